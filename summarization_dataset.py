"""Summarisation pairs for a sequence-to-sequence model, from raw text to padded batches.

`--dataset` is `wikihow` (the CSV files in `--data-dir`), `docstrings` (those of the installed
Python, no download), a CSV, TSV, JSONL, JSON or Parquet file, or a hub id. `load_summarization`
opens it (`open_sources`), cleans it and gives each row a split (`clean_rows`), takes as many rows
as asked for (`draw_rows`) and tokenises them (`encode`); `collate` pads a batch. Results stay in
the `datasets` cache, so a second process or run maps them from disk: let one process per node load
first.

Copy this file along with the script that imports it and the folder runtime/. To use data of your
own, return one more `Source` from `open_sources`.
"""

import argparse
import contextlib
import hashlib
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, List, Value
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from runtime import arguments, ranks
from runtime.rows import bad_rows, json_rows, readers

WIKIHOW = {"all": "wikihowAll.csv", "sep": "wikihowSep.csv"}
EMPTY = "with an empty field"
TOKENS = ("input_ids", "labels")  # columns of rows that are tokenised already
FEATURES = dict.fromkeys(TOKENS, List(Value("int32"))) | {"length": Value("int32")}
BUILT_IN = {"wikihow": (1500, 300), "docstrings": (1500, 300)}  # examples by default
# Validation last: a title that stands in two lists is not trained on.
TITLE_LISTS = {"train": "all_train.txt", "test": "all_test.txt", "validation": "all_val.txt"}


@dataclass(frozen=True)
class Source:
    """Raw rows and the rule that splits them."""

    name: str
    rows: Dataset
    columns: tuple[str, str, str]  # text, summary, and the key: rows equal in it stay together
    percent: dict[str, int]  # of the keys, for each split; "train" first
    rule: str  # what splits the rows, in words
    one_line: bool = False  # line breaks in texts and summaries become spaces
    titles: dict[str, str] | None = None  # the split of each title, in place of percentages
    wikihow: bool = False  # apply WikiHow's published cleaning


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the group "data" to `parser`."""
    add = parser.add_argument_group("data").add_argument
    dataset = "wikihow, docstrings (built in), a CSV, TSV, JSONL or Parquet file, or a hub id"
    val_split = "the one to validate on; the training split again means: hold out 5%% of it"
    eval_split = "with --evaluate-only: validation, WikiHow's test, or any split of a hub data set"
    add("--dataset", help=dataset, default="wikihow")
    add("--val-dataset", help="a file or hub id to validate on, instead of a part of --dataset")
    add("--data-dir", help="folder with WikiHow's CSV files and title lists", default="data")
    add("--wikihow-part", help="whole articles or paragraphs", choices=list(WIKIHOW), default="all")
    add("--dataset-config", help="configuration of a hub data set")
    add("--train-split", help="split of a hub data set to train on", default="train")
    add("--val-split", help=val_split, default="validation")
    add("--eval-split", help=eval_split, default="validation")
    add("--source-column", help="column with the texts", default="text")
    add("--target-column", help="column with the summaries", default="headline")
    add("--source-prefix", help="put before each text", default="summarize: ")
    add("--source-length", help="longest text in tokens, EOS included", type=int, default=512)
    add("--target-length", help="longest summary in tokens, EOS included", type=int, default=150)
    for flag, number in ("--num-train-samples", 1500), ("--num-val-samples", 300):
        text = f"0: all; as by default, but {number} of wikihow and docstrings"
        add(flag, type=int, help=text)
    line = "put each text and summary on one line, as is done with wikihow and docstrings"
    add("--clean", help=line, **arguments.OFF)
    add("--bad-rows", help=bad_rows.HELP, choices=bad_rows.CHOICES, default="fail")
    add(
        "--group-by-length", help="batch texts of about one length, which pads less", **arguments.ON
    )


def resolve_arguments(args: argparse.Namespace) -> dict[str, int]:
    """Resolve --num-train-samples and --num-val-samples."""
    return arguments.samples(args, *BUILT_IN.get(args.dataset, (0, 0)))


def check_arguments(args: argparse.Namespace) -> list[str]:
    """List a sentence for each problem that shows without reading data."""
    if args.export_only:
        return []  # it reads no data
    limits = dict.fromkeys(("source_length", "target_length"), (2, arguments.ANY))
    limits |= dict.fromkeys(("num_train_samples", "num_val_samples"), (0, arguments.ANY))
    problems = arguments.out_of_range(args, limits) + check_eval_split(args)
    if args.dataset == "wikihow":
        path = wikihow_path(args)
        if not path.is_file():
            problems.append(
                f"{path} is missing: get {path.name} of the WikiHow dataset (Koupaee & Wang 2018) "
                f"by way of https://github.com/mahnazkoupaee/WikiHow-Dataset and put it into "
                f"{path.parent}/, or take --dataset docstrings, which needs no download"
            )
    else:
        problems += readers.check_name("--dataset", args.dataset)
    if args.val_dataset is not None and args.dataset in BUILT_IN:
        problems.append(f"--val-dataset goes with files and hub ids, not with {args.dataset}")
    elif args.val_dataset is not None:
        problems += readers.check_name("--val-dataset", args.val_dataset)
    return problems


def wikihow_path(args: argparse.Namespace) -> Path:
    """Return the path of WikiHow's CSV file."""
    return Path(args.data_dir).expanduser() / WIKIHOW[args.wikihow_part]


def check_eval_split(args: argparse.Namespace) -> list[str]:
    """Return a sentence if the data set has no --eval-split; a hub's is looked for when loading."""
    split = args.eval_split
    known = ["validation"]
    if args.dataset == "wikihow":
        known.append("test")
    is_file = Path(args.dataset).suffix.lower() in readers.KINDS
    has_splits = args.dataset not in BUILT_IN and not is_file
    if split != "validation" and not args.evaluate_only:
        return [f"--eval-split {split} needs --evaluate-only: training validates on --val-split"]
    if split != "validation" and args.val_dataset is not None:
        return [f"--eval-split {split} is one of --dataset: leave out --val-dataset"]
    if split in known or has_splits:
        return []
    return [f"--eval-split {split}: {args.dataset} has no such split, only {' and '.join(known)}"]


def load_summarization(
    args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, verbose: bool = True
) -> tuple[Dataset | None, Dataset]:
    """Return the training and the validation set: tokenised, cut to number, and cached.

    With --evaluate-only they are None and the rows of --eval-split.

    Both have the columns `input_ids` and `labels`, lists of at most `--source-length` and
    `--target-length` ints, the last of which is EOS. Which rows are taken depends on the data
    alone. `verbose` prints what was dropped, how the rows were split, and how many are used.

    Raises ValueError, with a sentence for the user, if arguments or data do not serve.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(f"The tokenizer {type(tokenizer).__name__} has no EOS token")
    readers.show_progress(verbose)
    numbers = {"train": args.num_train_samples, "validation": args.num_val_samples}
    if args.evaluate_only:
        numbers = {args.eval_split: args.num_val_samples}
    found = {}
    for source in open_sources(args):
        if numbers.keys() & source.percent.keys():
            found |= split_rows(source, args, tokenizer, verbose)
    sets = []
    for split, number in numbers.items():
        total = len(found[split])
        if total == 0:
            raise ValueError(f"{args.dataset} has no example in its split {split}")
        examples = draw_rows(found[split], number)
        if "input_ids" not in examples.column_names:
            examples = encode(examples, args, tokenizer)
        if verbose:
            targets = readers.count_targets(examples)
            used = f"{len(examples):,} of {total:,} examples used"
            print(f"{split}: {used}, with {targets:,} target tokens", flush=True)
            say_full(split, examples, args)
        sets.append(examples)
    if verbose:
        first = sets[0][0]
        text, summary = (tokenizer.decode(first[column]) for column in TOKENS)
        shown = f"{readers.shortened(text)} -> «{readers.shortened(summary)}», learned"
        print(f"an example: {shown}", flush=True)
    train_set = None if args.evaluate_only else sets[0]
    return train_set, sets[-1]


@readers.names_cache
def load(
    args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, verbose: bool
) -> tuple[readers.Rows | None, dict[str, readers.Rows]]:
    """Return the sets of `load_summarization`, the validation set by its name."""
    train_set, val_set = load_summarization(args, tokenizer, verbose)
    val_sets = {args.val_dataset or args.dataset: readers.Rows(val_set)}
    if args.evaluate_only:
        return None, val_sets
    return readers.Rows(train_set), val_sets


def split_rows(
    source: Source, args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, verbose: bool
) -> dict[str, Dataset]:
    """Return the usable rows of a source by split: texts to encode, or tokens as of `encode`."""
    if source.columns == TOKENS:
        return load_tokens(source, args, tokenizer)
    rows = clean_rows(source)
    if args.dataset not in BUILT_IN:
        broken = json_rows.broken_rows(source.rows)
        bad = {}
        for i, place in enumerate(rows["place"], start=1):
            if place == EMPTY:
                bad[i] = broken.get(i, "its text or its summary is empty")
        bad_rows.leave_out(source.name, bad, len(rows), args.bad_rows, verbose)
    places = assign(source, rows, partial(print, flush=True) if verbose else lambda line: None)
    found = {}
    for split in source.percent:
        found[split] = rows.select([i for i, place in enumerate(places) if place == split])
    return found


def say_full(split: str, examples: Dataset, args: argparse.Namespace) -> None:
    """Print how many texts and summaries have as many tokens as they may: longer ones are cut."""
    for column, flag in ("input_ids", "source_length"), ("labels", "target_length"):
        limit = getattr(args, flag)
        arrays = readers.in_order(examples, column)
        full = sum(int((array.value_lengths().to_numpy() == limit).sum()) for array in arrays)
        if full:
            name = f"--{flag.replace('_', '-')} {limit}"
            print(f"{split}: {full:,} of {len(examples):,} {column} fill {name}, or are cut to it")


def draw_rows(rows: Dataset, number: int) -> Dataset:
    """Return a random `number` of rows (0: all), in their order."""
    if not 0 < number < len(rows):
        return rows
    indices = list(range(len(rows)))
    random.Random(0).shuffle(indices)
    return rows.select(sorted(indices[:number]))  # reads faster than in random order


def open_sources(args: argparse.Namespace) -> list[Source]:
    """Open what `--dataset` names: one source to be split, or two that are split already."""
    columns = (args.source_column, args.target_column)
    if args.dataset == "docstrings":
        columns = ("text", "headline", "module")
        percent = {"train": 85, "validation": 15}
        rows = readers.docstring_rows()
        return [Source("docstrings", rows, columns, percent, "a hash of the module", one_line=True)]
    if args.dataset == "wikihow":
        columns += ("title",)
        path = wikihow_path(args)
        rows = readers.read_file(path)
        check_columns(str(path), rows, columns)
        titles = read_title_lists(path.parent)
        percent = {"train": 98, "validation": 1, "test": 1}
        rule = "a hash of the title" if titles is None else f"the title lists in {path.parent}/"
        return [Source(str(path), rows, columns, percent, rule, True, titles, wikihow=True)]
    splits = ["train", "validation"]
    if args.eval_split != "validation":  # then the data set has splits, see `check_eval_split`
        splits = [args.eval_split]
        parts = readers.read_parts(args.dataset, args, "eval_split")
    elif args.val_dataset is None:
        parts = readers.read_parts(args.dataset, args, "train_split", "val_split")
    else:
        parts = readers.read_parts(args.dataset, args, "train_split")
        parts += readers.read_parts(args.val_dataset, args, "val_split")
    have_text = any(set(columns) <= set(rows.column_names) for _, rows in parts)
    have_tokens = all("input_ids" in rows.column_names for _, rows in parts)
    if have_tokens and not have_text:
        columns = TOKENS
    else:
        for name, rows in parts:
            check_columns(name, rows, columns)
        columns += columns[:1]
    if len(parts) < len(splits):
        percent = {"train": 95, "validation": 5}
        rule = f"a hash of {columns[0]}"
        return [Source(*parts[0], columns, percent, rule, args.clean)]
    return [
        Source(*part, columns, {split: 100}, "the data set itself", args.clean)
        for split, part in zip(splits, parts, strict=True)
    ]


def load_tokens(
    source: Source, args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Dataset]:
    """Return the rows of a source of tokens made beforehand by split, as `encode` makes them."""
    from runtime.rows import tokens  # a copy may leave it out

    limits = {"input_ids": ("--source-length", args.source_length)}
    limits["labels"] = ("--target-length", args.target_length)
    shaping = ("source_length", "target_length", "source_prefix", "clean")
    rules = readers.token_rules(tokenizer)
    made_from = tokens.check_origin(source.name, source.rows, FEATURES, args, shaping, rules)
    rows = tokens.checked_columns(source.name, source.rows, limits, tokenizer)
    if made_from:  # by --prepare-only: the rows have all columns
        rows = source.rows
    parts = [rows]
    if len(source.percent) > 1:
        parts = tokens.split(source.name, rows)
    if made_from:
        return dict(zip(source.percent, parts, strict=True))

    def add_length(batch: dict[str, list]) -> dict[str, list]:
        lengths = [len(ids) for ids in batch["input_ids"]]
        return {column: batch[column] for column in TOKENS} | {"length": lengths}

    sets = [readers.cached_map(rows, add_length, FEATURES) for rows in parts]
    return dict(zip(source.percent, sets, strict=True))


def check_columns(name: str, rows: Dataset, columns: tuple[str, ...]) -> None:
    """Raise ValueError unless all `columns` are there and hold text."""
    if not set(columns) <= set(rows.column_names):
        needed = f"--source-column {columns[0]} and --target-column {columns[1]} are not both"
        if len(columns) == 3:
            needed = needed.replace("are not both", f"and {columns[2]} are not all")
        found = ", ".join(rows.column_names)
        advice = ""
        texts = readers.longest_texts(rows)
        if len(columns) == 2 and len(texts) > 1:
            advice = f": give --source-column {texts[0]} --target-column {texts[1]}"
        raise ValueError(f"{name} has columns {found}; {needed} among them{advice}")
    for column in columns:
        kind = rows.features[column]
        if not readers.is_text(kind):
            raise ValueError(f"Column {column} of {name} does not hold text but {kind}")


def read_title_lists(folder: Path) -> dict[str, str] | None:
    """Return the split of each title by the authors' lists; None without those of training and
    validation."""
    paths = {split: folder / name for split, name in TITLE_LISTS.items()}
    if not (paths["train"].is_file() and paths["validation"].is_file()):
        return None
    titles = {}
    for split, path in paths.items():
        if path.is_file():
            readers.check_content(path)
            lines = path.read_text(encoding="utf-8-sig").split("\n")
            titles.update((title_key(line), split) for line in lines)
    return titles


def title_key(title: str) -> str:
    """Return a title's letters and digits alone, as the authors' lists hold file names."""
    return "".join(filter(str.isalnum, title))


def clean_rows(source: Source) -> Dataset:
    """Clean all rows; the column `place` is a row's split, or in words why it is dropped."""
    columns = source.columns
    titles = source.titles
    wikihow = source.wikihow
    one_line = source.one_line
    bounds = list(zip(accumulate(source.percent.values()), source.percent, strict=True))

    def clean(text: str, summary: str, key: str) -> tuple[str, str, int, str]:
        if wikihow:
            key = title_key(key) or text
        # Unlike hash(), the same in every process; unlike a checksum, even for similar keys.
        number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "big")
        if not text or not summary:
            return "", "", 0, EMPTY
        if wikihow and len(summary) >= 0.75 * len(text):
            return "", "", 0, "with a headline not shorter than 0.75 of the text"
        if titles is not None and key not in titles:
            return "", "", 0, "with a title in none of the lists"
        split = titles[key] if titles else next(s for n, s in bounds if number % 100 < n)
        if wikihow:
            text = re.sub(r"\.+[\r\n]+,", ".\n", text)
            summary = summary.replace(".,", ".")
        if one_line:
            text, summary = (re.sub(r"\s*[\r\n]\s*", " ", part) for part in (text, summary))
        return text, summary, number, split

    def clean_batch(batch: dict[str, list[str | None]]) -> dict[str, list]:
        fields = zip(*(batch[column] for column in columns), strict=True)
        rows = [clean(*((field or "").strip() for field in row)) for row in fields]
        return {name: [row[i] for row in rows] for i, name in enumerate(features)}

    features = {name: Value("string") for name in ("text", "summary", "key", "place")}
    features["key"] = Value("int64")
    identity = (columns, bounds, titles, wikihow, one_line)
    return readers.cached_map(source.rows, clean_batch, features, *identity)


def assign(source: Source, rows: Dataset, report: Callable[[str], None]) -> list[str]:
    """Return each row's split, or why it is dropped, after a report; ValueError if a split has no
    row."""
    name = source.name
    splits = list(source.percent)
    places = rows["place"][:]
    counts = Counter(places)
    dropped = ", ".join(f"{n:,} {why}" for why, n in counts.items() if why not in splits)
    report(f"{name}: {len(places):,} rows, dropped: {dropped or 'none'}")
    if not any(counts[split] for split in splits):
        raise ValueError(f"{name} has no row left after cleaning: {dropped}")
    if source.titles is not None and not (counts["train"] and counts["validation"]):
        raise ValueError(
            f"{name} has {counts['train']} rows for training and {counts['validation']} for "
            f"validation by {source.rule}: put there the lists that belong to it, or none"
        )
    if source.titles is None and not all(counts[split] for split in splits):
        # Too few keys for the percentages: one for each split held out, the others train.
        keys = rows["key"][:]
        kept = sorted({key for key, place in zip(keys, places, strict=True) if place in splits})
        if len(kept) == 1:
            raise ValueError(f"{name} cannot be split by {source.rule}: no two rows differ in it")
        held_out = dict(zip(kept[:-1], splits[1:], strict=False))
        places = [
            held_out.get(key, "train") if place in splits else place
            for key, place in zip(keys, places, strict=True)
        ]
    sizes = ", ".join(f"{split} {places.count(split):,}" for split in splits)
    report(f"{name}: split by {source.rule}: {sizes}")
    return places


def encode(rows: Dataset, args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Tokenise cleaned rows into columns input_ids, labels, and length, of input_ids."""
    eos = tokenizer.eos_token_id
    prefix = args.source_prefix
    lengths = args.source_length, args.target_length

    def closed(ids: list[int], length: int) -> list[int]:
        return ids if ids and ids[-1] == eos else [*ids[: length - 1], eos]

    def encode_batch(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        texts = [prefix + text for text in batch["text"]], batch["summary"]
        options = {"truncation": True, "return_attention_mask": False}
        inputs = tokenizer(texts[0], max_length=lengths[0], **options)
        labels = tokenizer(text_target=texts[1], max_length=lengths[1], **options)
        sources = [closed(ids, lengths[0]) for ids in inputs["input_ids"]]
        targets = [closed(ids, lengths[1]) for ids in labels["input_ids"]]
        return {"input_ids": sources, "labels": targets, "length": [len(ids) for ids in sources]}

    identity = (prefix, lengths, readers.token_rules(tokenizer))
    return readers.cached_map(rows, encode_batch, FEATURES, *identity)


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


def source_lengths(args: argparse.Namespace, samples: Sequence[dict]) -> list[int] | None:
    """Return the number of source tokens of each sample; None without --group-by-length."""
    if not args.group_by_length:
        return None
    if isinstance(samples, readers.Rows):
        return samples.dataset["length"][:]
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
