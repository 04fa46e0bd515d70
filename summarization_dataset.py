"""Summarisation pairs for a sequence-to-sequence model, from raw text to padded batches.

`--dataset` names `wikihow` (the CSV files in `--data-dir`), `docstrings` (those of the installed
Python, no download), CSV, TSV, JSONL, JSON or Parquet files, or hub ids. `load` cleans and splits
the rows (`clean_rows`, `split_rows`), draws as many as asked for and tokenizes them (`encode`);
`collate` pads a batch. Results stay in the `datasets` cache: let one process per node load first.

Copy this file along with the script that imports it and the folder runtime/. For data of your own
return the rows of another built-in name from `load_rows`.
"""

import contextlib
import hashlib
import random
import re
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, List, Value
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from runtime import arguments, ranks, readers
from runtime.ranks import say

WIKIHOW = {"all": "wikihowAll.csv", "sep": "wikihowSep.csv"}
BUILT_IN = {"wikihow": (1500, 300), "docstrings": (1500, 300)}  # examples by default
PERCENT = {  # of the keys, for each split
    "wikihow": {"train": 98, "validation": 1, "test": 1},
    "docstrings": {"train": 85, "validation": 15},
    "other": {"train": 95, "validation": 5},
}
# Validation last: a title that is in two lists is not trained on.
TITLE_LISTS = {"train": "all_train.txt", "test": "all_test.txt", "validation": "all_val.txt"}
PAIR = {"text": Value("string"), "summary": Value("string")}
TOKENS = {"input_ids": List(Value("int32")), "labels": List(Value("int32"))}
TOKENS |= {"length": Value("int32")}
KEY = {"key": Value("int64"), "place": Value("string")}  # a split, why it is dropped, or nothing


def add_arguments(parser: ArgumentParser) -> None:
    """Add the group "data" to `parser`."""
    add = parser.add_argument_group("data").add_argument
    add("--dataset", **arguments.WORDS, default=["wikihow"], help="wikihow, docstrings (built in), "
        "CSV, TSV, JSONL or Parquet files, save_to_disk directories or hub ids; NAME:train[:1000] "
        "takes a split or a part (default: wikihow)")  # fmt: skip
    add("--val-dataset", **arguments.WORDS, default=[], help="validate on these instead of a part "
        "of each --dataset, such as wikihow:test")  # fmt: skip
    add("--data-dir", help="folder with WikiHow's CSV files and title lists", default="data")
    add("--wikihow-part", help="whole articles or paragraphs", choices=list(WIKIHOW), default="all")
    add("--dataset-config", help="configuration of a hub data set")
    add("--source-column", help="column with the texts", default="text")
    add("--target-column", help="column with the summaries", default="headline")
    add("--source-prefix", help="put before each text", default="summarize: ")
    tokens = "longest {} in tokens, EOS included"
    add("--source-length", **arguments.at_least(2), default=512, help=tokens.format("text"))
    add("--target-length", **arguments.at_least(2), default=150, help=tokens.format("summary"))
    for flag, number in ("--num-train-samples", 1500), ("--num-val-samples", 300):
        text = f"per data set (0: all; default: all, except {number} of wikihow and docstrings)"
        add(flag, **arguments.at_least(0), help=text)
    add("--bad-rows", **arguments.BAD_ROWS)
    add("--group-by-length", help="batch texts of about one length, to pad less", **arguments.ON)


def load(args: Namespace, tokenizer: Tokenizer) -> tuple[Dataset | None, dict[str, Dataset]]:
    """Return the training set, None with --evaluate-only, and the validation sets by name.

    Their columns are TOKENS: `length` is that of `input_ids`, and EOS is last. The choice of rows
    depends on the data alone. Raises ValueError if data or flags cannot be used.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer {type(tokenizer).__name__} has no EOS token: set one")
    train_sets = []
    val_sets = {}
    for word in [] if args.evaluate_only and args.val_dataset else args.dataset:
        parts = load_rows(word, args, tokenizer, hold_out=not args.val_dataset)
        if not args.val_dataset:
            val_sets[word] = parts["validation"]
        if not args.evaluate_only:
            train_sets.append(finish(word, "train", parts["train"], args, tokenizer))
    for word in args.val_dataset:
        parts = load_rows(word, args, tokenizer, hold_out=False)
        val_sets[word] = parts.get("validation", parts["train"])
    for word, rows in val_sets.items():
        val_sets[word] = readers.join([finish(word, "validation", rows, args, tokenizer)])
    readers.warn_of_validation(args, val_sets)
    if args.evaluate_only:
        return None, val_sets
    text, summary = (tokenizer.decode(train_sets[0][0][x]) for x in ("input_ids", "labels"))
    say(readers.shorten(f"an example, «learned»: «{summary}» from {text}"))
    return readers.join(train_sets), val_sets


def load_rows(
    word: str, args: Namespace, tokenizer: Tokenizer, hold_out: bool
) -> dict[str, Dataset]:
    """Return the rows of a word of --dataset by split; `hold_out` makes a split validation."""
    name, split = readers.split_word(word, list(BUILT_IN))
    if name in BUILT_IN:
        rows = open_wikihow(args) if name == "wikihow" else readers.docstring_rows()
        rows = clean_rows(name, rows, args, tokenizer)
        parts = readers.pick(name, split_rows(word, rows, PERCENT[name]), split)
    else:
        raw = readers.pick(name, readers.read(name, args.dataset_config), split)
        parts = {key: clean_rows(name, rows, args, tokenizer) for key, rows in raw.items()}
    if hold_out and "validation" not in parts:
        parts = split_rows(word, parts["train"], PERCENT["other"])
    return parts


def open_wikihow(args: Namespace) -> Dataset:
    """Return the rows of WikiHow's CSV file; ValueError says where to get it."""
    path = Path(args.data_dir).expanduser() / WIKIHOW[args.wikihow_part]
    if not path.is_file():
        raise ValueError(
            f"--dataset wikihow needs {path}. Get {path.name} (Koupaee & Wang 2018) from "
            "https://github.com/mahnazkoupaee/WikiHow-Dataset, or pass --dataset docstrings, which "
            "needs no download."
        )
    return readers.read(str(path), None)["train"]


def read_title_lists(args: Namespace) -> dict[str, str]:
    """Return the split of each title by WikiHow's authors' lists; {} without those of training and
    validation."""
    paths = {split: Path(args.data_dir).expanduser() / x for split, x in TITLE_LISTS.items()}
    if not (paths["train"].is_file() and paths["validation"].is_file()):
        return {}
    titles = {}
    for split, path in paths.items():
        if path.is_file():
            lines = path.read_text(encoding="utf-8-sig", errors="replace").split("\n")
            titles.update((title_key(line), split) for line in lines)
    return titles


def title_key(title: str) -> str:
    """Return the letters and digits of a title, because the authors' lists hold file names."""
    return "".join(filter(str.isalnum, title))


def hashed(key: str) -> int:
    """Return a hash that, unlike hash(), is the same in every process."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "big")


def clean_rows(name: str, rows: Dataset, args: Namespace, tokenizer: Tokenizer) -> Dataset:
    """Return the rows of data set `name` with the columns of KEY, and of PAIR or TOKENS."""
    columns = readers.column_names(name, rows)
    wanted = [args.source_column, args.target_column]
    if name == "docstrings":
        wanted = ["text", "headline"]
    if name == "wikihow":
        wanted.append("title")
    titles = read_title_lists(args) if name == "wikihow" else {}
    is_tokens = "input_ids" in columns and not {*wanted} <= {*columns}
    if not is_tokens and not {*wanted} <= {*columns}:
        raise ValueError(f"--dataset {name} has columns {', '.join(columns)}, but not all of "
                         f"{wanted}. Pass --source-column and --target-column.")  # fmt: skip

    def clean(row: dict[str, Any]) -> dict[str, Any]:
        found = ["" if row.get(x) is None else row[x] for x in wanted]
        for column, value in zip(wanted, found, strict=True):
            if not isinstance(value, str):
                raise ValueError(f"{column} is {value}, not text")
        text, summary, *title = (value.strip() for value in found)
        if name == "wikihow":
            return clean_wikihow(text, summary, title_key(*title), titles)
        if not text or not summary:
            raise ValueError("its text or its summary is empty")
        key = row["module"] if name == "docstrings" else text
        if name == "docstrings":
            text, summary = on_one_line(text), on_one_line(summary)
        return {"text": text, "summary": summary, "key": hashed(key), "place": ""}

    def clean_some(some: list[dict]) -> list[list[dict]]:
        return [[clean(row)] for row in some]

    def check_some(some: list[dict]) -> list[list[dict]]:
        from runtime import tokens  # a copy may leave it out

        found = []
        for row in some:
            ids, labels = (tokens.check_ids(row.get(x), *limits[x], tokenizer) for x in limits)
            pair = {"input_ids": ids, "labels": labels, "length": len(ids)}
            found.append([pair | {"key": hashed(repr(ids)), "place": ""}])
        return found

    if is_tokens:
        from runtime import tokens  # a copy may leave it out

        tokens.check_origin(name, args, tokenizer)
        limits = {"input_ids": ("--source-length", args.source_length)}
        limits["labels"] = "--target-length", args.target_length
        return readers.samples(name, rows, check_some, TOKENS | KEY, args, limits, len(tokenizer))
    rows = readers.samples(name, rows, clean_some, PAIR | KEY, args, wanted, sorted(titles.items()))
    counts = Counter(place for place in rows["place"] if place.startswith("with "))
    reasons = ", ".join(f"{count:,} {place}" for place, count in counts.items())
    say(f"{name}: {len(rows):,} rows, dropped: {reasons or 'none'}")
    return rows


def clean_wikihow(text: str, summary: str, key: str, titles: dict[str, str]) -> dict[str, Any]:
    """Return a row of WikiHow, cleaned as its authors do; `place` is its split, or why it goes."""
    place = titles.get(key, "with a title in none of the lists") if titles else ""
    if not text or not summary:
        place = "with an empty field"
    elif len(summary) >= 0.75 * len(text):
        place = "with a headline not shorter than 0.75 of the text"
    number = hashed(key or text)
    text = on_one_line(re.sub(r"\.+[\r\n]+,", ".\n", text))
    summary = on_one_line(summary.replace(".,", "."))
    return {"text": text, "summary": summary, "key": number, "place": place}


def on_one_line(text: str) -> str:
    """Return a text with spaces in place of line breaks."""
    return re.sub(r"\s*[\r\n]\s*", " ", text)


def split_rows(name: str, rows: Dataset, percent: dict[str, int]) -> dict[str, Dataset]:
    """Return rows by split: that in `place`, else by their key, so that equal keys stay together.
    Every split that is held out gets at least one key; ValueError if rows are too few."""
    splits = list(percent)
    places = np.array(rows["place"], dtype=object)
    kept = [i for i, place in enumerate(places) if not place.startswith("with ")]
    rows, places = rows.select(kept), places[kept]
    keys = rows.with_format("numpy")["key"][:]
    by_list = bool(len(places) and places[0])
    if not by_list:
        bounds = np.cumsum(list(percent.values()))
        places = np.array(splits, dtype=object)[bounds.searchsorted(keys % 100, side="right")]
    counts = Counter(places)
    if by_list and not (counts["train"] and counts["validation"]) or not kept:
        sizes = f"{counts['train']} training and {counts['validation']} validation rows"
        raise ValueError(f"--dataset {name} has {sizes}. Pass more data, or other title lists.")
    if not by_list and len(counts) < len(splits):
        distinct = np.unique(keys)
        if len(distinct) == 1:
            raise ValueError(f"--dataset {name}: no two rows differ, so none can be held out for "
                             "validation. Pass --val-dataset.")  # fmt: skip
        places[:] = "train"
        for key, split in zip(distinct[:-1], splits[1:], strict=False):
            places[keys == key] = split
    say(f"{name}: {', '.join(f'{split} {list(places).count(split):,}' for split in splits)} rows")
    return {split: rows.select(np.flatnonzero(places == split)) for split in splits}


def finish(word: str, split: str, rows: Dataset, args: Namespace, tokenizer: Tokenizer) -> Dataset:
    """Return a random, but always same, choice of rows as tokens, in their order."""
    flag = args.num_train_samples if split == "train" else args.num_val_samples
    default = BUILT_IN.get(word.partition(":")[0], (0, 0))[split != "train"]
    number = (default if flag is None else flag) or len(rows)
    total = len(rows)
    if number < total:
        indices = list(range(total))
        random.Random(0).shuffle(indices)
        rows = rows.select(sorted(indices[:number]))  # reads faster than in random order
    rows = rows.remove_columns(list(KEY))
    if "input_ids" not in rows.column_names:
        rows = encode(word, rows, args, tokenizer)
    say(f"{word}, {split}: {len(rows):,} of {total:,} examples used")
    full = int((rows.with_format("numpy")["length"][:] == args.source_length).sum())
    say(f"{word}, {split}: {full:,} texts fill --source-length, or are cut to it" if full else "")
    return rows


def encode(word: str, rows: Dataset, args: Namespace, tokenizer: Tokenizer) -> Dataset:
    """Tokenize cleaned rows into columns input_ids, labels, and length, of input_ids."""
    eos = tokenizer.eos_token_id
    prefix = args.source_prefix
    lengths = args.source_length, args.target_length

    def closed(ids: list[int], length: int) -> list[int]:
        return ids if ids and ids[-1] == eos else [*ids[: length - 1], eos]

    def encode_some(some: list[dict]) -> list[list[dict]]:
        texts = [prefix + row["text"] for row in some], [row["summary"] for row in some]
        options = {"truncation": True, "return_attention_mask": False}
        inputs = tokenizer(texts[0], max_length=lengths[0], **options)
        labels = tokenizer(text_target=texts[1], max_length=lengths[1], **options)
        sources = [closed(ids, lengths[0]) for ids in inputs["input_ids"]]
        targets = [closed(ids, lengths[1]) for ids in labels["input_ids"]]
        pairs = zip(sources, targets, strict=True)
        return [[{"input_ids": x, "labels": y, "length": len(x)}] for x, y in pairs]

    key = prefix, lengths, readers.tokenizer_fingerprint(tokenizer)
    return readers.samples(word, rows, encode_some, TOKENS, args, *key)


def collator(model: PreTrainedModel) -> Callable:
    """Return `collate` for a model, with the tokens that its decoder starts and is padded with.

    Raises ValueError if it has none.
    """
    start, padding = (
        getattr(model.config, "decoder_start_token_id", None),
        model.config.pad_token_id,
    )
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):  # T5Gemma has its start elsewhere
        labels = torch.tensor([[5, -100, -100]])
        with contextlib.suppress(AttributeError, TypeError, ValueError):  # it may find none
            shifted = model.prepare_decoder_input_ids_from_labels(labels=labels)
            start, _, padding = shifted[0].tolist()
    if start is None or padding is None:
        raise ValueError(
            "the model has no token to start its decoder with, or none for padding: set "
            "decoder_start_token_id and pad_token_id in its config.json"
        )
    return partial(collate, pad_token_id=padding, decoder_start_token_id=start)


def source_lengths(args: Namespace, samples: Sequence[dict]) -> list[int] | None:
    """Return the number of source tokens of each sample; None without --group-by-length."""
    if not args.group_by_length:
        return None
    if isinstance(samples, Dataset):
        return samples["length"][:].tolist()
    return [len(sample["input_ids"]) for sample in samples]


def examples() -> list[dict[str, range]]:
    """Return three samples for the checks of the model. Two have one source, and the second's
    target is how the first's begins; the third has a shorter source and target."""
    source, target = range(10, 27), range(30, 46)
    pairs = (source, target), (source, target[:8]), (source[:9], target[:5])
    return [{"input_ids": one, "labels": other} for one, other in pairs]


def collate(
    examples: list[dict], pad_token_id: int, decoder_start_token_id: int
) -> dict[str, torch.Tensor | int]:
    """Pad examples to the longest of them; on a GPU to a multiple of 8, for its kernels.

    Returns int64 tensors: `input_ids` and `attention_mask` [batch, source], `labels`,
    `decoder_input_ids` and `decoder_attention_mask` [batch, target]; padding is `pad_token_id`, in
    `labels` -100. The int `targets` counts the labels that are not -100, `tokens` these and the
    source's tokens. Without examples the batch has one without any target, so that a rank with
    nothing left can go along.
    """
    # One position stays visible: attention over none would be NaN.
    examples = examples or [{"input_ids": [pad_token_id], "labels": []}]
    sources = [example["input_ids"] for example in examples]
    targets = [example["labels"] for example in examples]
    source_shape = len(examples), padded_width(sources)
    target_shape = len(examples), padded_width(targets)
    input_ids = np.full(source_shape, pad_token_id)
    attention_mask = np.zeros(source_shape, dtype=np.int64)
    labels = np.full(target_shape, -100)
    for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
        input_ids[number, : len(source)] = source
        attention_mask[number, : len(source)] = 1
        labels[number, : len(target)] = target
    decoder_input_ids = np.full(target_shape, decoder_start_token_id)
    decoder_input_ids[:, 1:] = labels[:, :-1]
    decoder_input_ids[decoder_input_ids == -100] = pad_token_id
    decoder_attention_mask = (labels != -100).astype(np.int64)
    decoder_attention_mask[:, 0] = 1
    tensors = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "labels": labels,
        "decoder_input_ids": decoder_input_ids,
        "decoder_attention_mask": decoder_attention_mask,
    }
    count = sum(map(len, targets))
    counts = {"targets": count, "tokens": count + sum(map(len, sources))}
    return {name: torch.from_numpy(array) for name, array in tensors.items()} | counts


def padded_width(rows: list[np.ndarray]) -> int:
    """Return the length of the longest row, at least 1; on a GPU rounded up to a multiple of 8."""
    multiple = 1 if ranks.accelerator() is None else 8
    return max(1, -(-max(map(len, rows)) // multiple)) * multiple
