"""Summarization pairs for a sequence-to-sequence model, from raw text to padded batches.

`load` cleans and splits the rows (`clean_rows`, `split_wikihow`), draws the requested number and
tokenizes them (`encode`); `collate` pads a batch. For your own data, return its rows from
`load_rows` under a name like wikihow.
"""

import contextlib
import hashlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow.compute
import torch
import tyro
from datasets import Dataset, List, Value
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from core import reading
from core.args import Interval, Names, Range
from core.ranks import Batch, Problem, print0
from core.steps import StepSampler
from core.weights import unwrapped

WIKIHOW = {"all": "wikihowAll.csv", "sep": "wikihowSep.csv"}
SPLITS = {"train": 98, "validation": 1, "test": 1}  # percent of WikiHow's titles
# Validation is last, so that a title in two lists is not trained on.
TITLE_LISTS = {"train": "all_train.txt", "test": "all_test.txt", "validation": "all_val.txt"}
PAIR = {"text": Value("string"), "summary": Value("string")}
TOKENS = {"input_ids": List(Value("int32")), "labels": List(Value("int32"))}
TOKENS |= {"length": Value("int32")}
KEY = {"key": Value("int64"), "split": Value("string")}  # split: from the title lists, or empty
WIKIHOW_COLUMNS = ("text", "headline", "title")  # rows with one title stay together
USUAL_COLUMNS = (  # texts and summaries, if the data lack those of the flags' defaults
    ("article", "highlights"), ("article", "summary"), ("article", "abstract"),
    ("document", "summary"), ("dialogue", "summary"), ("text", "summary"), ("text", "target"),
    ("source", "target"), ("input", "output"), ("prompt", "response"), ("prompt", "completion"),
    ("question", "answer"),
)  # fmt: skip
Length = Annotated[int, Range(2), tyro.conf.arg(metavar="N")]


@dataclass
class Data:
    """NAME is wikihow (in --data-dir), a CSV, JSON, JSONL or Parquet file, a save_to_disk directory
    or a hub id; NAME:train[:1000] takes a split or a part."""

    dataset: Names = ("wikihow",)
    """data to train on, joined"""
    val_dataset: Names = ()
    """data to validate on instead of a part of each --dataset, for example wikihow:test"""
    data_dir: Path = Path("data")
    """directory of WikiHow's CSV files and title lists"""
    wikihow_part: Literal[*WIKIHOW] = "all"
    """whole articles or paragraphs"""
    dataset_config: str | None = None
    """configuration of hub data sets"""
    source_column: str = "text"
    """column with the texts"""
    target_column: str = "headline"
    """column with the summaries"""
    source_prefix: str = "summarize: "
    """prepended to each text"""
    source_length: Length = 512
    """tokens per text; the rest is cut"""
    target_length: Length = 150
    """tokens per summary; the rest is cut"""
    num_train_samples: Interval = None
    """rows per data set; 0: all; None: 1500 of wikihow, all of others"""
    num_val_samples: Interval = None
    """rows per data set; 0: all; None: 300 of wikihow, all of others"""
    bad_rows: Literal["fail", "skip"] = "fail"
    """skip: drop unusable rows"""
    group_by_length: bool = True
    """batch texts of similar length, to pad less"""

    def problems(self, _: Any) -> list[str]:
        """Return a message if the source is the target."""
        are_equal = self.source_column == self.target_column
        return ["--source-column and --target-column are the same."] * are_equal


def load(
    args: Data, tokenizer: Tokenizer, evaluate_only: bool = False
) -> tuple[Dataset | None, reading.Parts]:
    """Return the training set, None with `evaluate_only`, and the validation sets by name.

    Their columns are TOKENS: `length` is that of `input_ids`, and EOS is last. The choice of rows
    depends only on the data. Raise Problem if data or flags cannot be used.
    """
    load_parts = partial(load_rows, args=args, tokenizer=tokenizer)
    make = partial(draw, args=args, tokenizer=tokenizer)
    train_set, val_sets = reading.load_sets(args, load_parts, reading.hold_out, make, evaluate_only)
    if train_set:
        text, summary = (tokenizer.decode(train_set[0][x]) for x in ("input_ids", "labels"))
        print0(f"an example, with targets in « »: «{summary}» from {text}"[:400])
    return train_set, val_sets


def load_rows(spec: str, args: Data, tokenizer: Tokenizer) -> reading.Parts:
    """Return the clean rows of one --dataset argument by split."""
    name, _, split = spec.partition(":")
    if name == "wikihow":
        parts = split_wikihow(clean_rows(name, open_wikihow(args), args, tokenizer))
        return reading.pick(parts, split) if split else parts
    parts = reading.read(spec, args.dataset_config)
    return {key: clean_rows(spec, rows, args, tokenizer) for key, rows in parts.items()}


def open_wikihow(args: Data) -> Dataset:
    """Return the rows of WikiHow's CSV file; raise Problem with its URL if it is missing."""
    path = args.data_dir.expanduser() / WIKIHOW[args.wikihow_part]
    if path.is_file():
        return reading.read(str(path))["train"]
    raise Problem(
        f"--dataset wikihow needs {path}. Get {path.name} (Koupaee & Wang 2018) from "
        "https://github.com/mahnazkoupaee/WikiHow-Dataset, or pass a --dataset of your own."
    )


def read_title_lists(directory: Path) -> dict[str, str]:
    """Return a dict of `title_key` to split from WikiHow's title lists; {} without lists."""
    titles = {}
    for split, name in TITLE_LISTS.items():
        path = directory / name
        if path.is_file():
            lines = path.read_text(encoding="utf-8-sig", errors="replace").split("\n")
            titles |= {title_key(line): split for line in lines}
    return titles


def title_key(title: str) -> str:
    """Return a title's letters and digits, to match it with file names in WikiHow's split lists."""
    return "".join(filter(str.isalnum, title))


def stable_hash(key: str) -> int:
    """Return a 48-bit hash of `key` that, unlike hash(), is the same in every process."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "big")


def clean_rows(name: str, rows: Dataset, args: Data, tokenizer: Tokenizer) -> Dataset:
    """Return the usable rows of data set `name` with KEY and cleaned texts (PAIR) or TOKENS."""
    columns = reading.first_row(name, rows)
    is_wikihow = name == "wikihow"
    needed = WIKIHOW_COLUMNS if is_wikihow else (args.source_column, args.target_column)
    missing = {*needed} - {*columns}
    if missing and "input_ids" in columns:
        return read_tokens(name, rows, args, tokenizer)
    reading.print_unread_tokens(name, columns)
    # With several data sets, the flags are for those that have the columns.
    are_defaults = needed == (Data.source_column, Data.target_column)
    if missing and (are_defaults or len(args.dataset + args.val_dataset) > 1):
        needed = reading.usual_columns(name, columns, USUAL_COLUMNS) or needed
    if missing := [column for column in needed if column not in columns]:
        advice = "Pass --source-column and --target-column."
        raise reading.no_columns(name, missing, columns, advice)
    titles = read_title_lists(args.data_dir.expanduser()) if is_wikihow else {}

    def clean(row: dict[str, Any]) -> list[dict[str, Any]]:
        for column in needed:
            if not isinstance(row.get(column), str):
                raise ValueError(f"{column} is {row.get(column)!r}, not text")
        text, summary, *key = (row[column] for column in needed)
        if is_wikihow:
            return clean_wikihow(text.strip(), summary.strip(), title_key(*key), titles)
        if not text.strip() or not summary.strip():
            raise ValueError("the text or the summary is empty")
        summary.encode()  # raises ValueError for half of a surrogate pair
        return [{"text": text, "summary": summary, "key": stable_hash(text), "split": ""}]

    return reading.map_rows(name, rows, needed, clean, PAIR | KEY, args.bad_rows, needed, titles)


def clean_wikihow(
    text: str, summary: str, key: str, titles: dict[str, str]
) -> list[dict[str, Any]]:
    """Return [the cleaned row as PAIR and KEY], or [] if WikiHow's authors would drop it."""
    if not text or not summary or len(summary) >= 0.75 * len(text):
        return []
    if titles and key not in titles:
        return []
    number = stable_hash(key or text)
    text = on_one_line(re.sub(r"\.+[\r\n]+,", ".\n", text))
    summary = on_one_line(summary.replace(".,", "."))
    return [{"text": text, "summary": summary, "key": number, "split": titles.get(key, "")}]


def on_one_line(text: str) -> str:
    """Return a text with spaces in place of line breaks."""
    return re.sub(r"\s*[\r\n]\s*", " ", text)


def read_tokens(name: str, rows: Dataset, args: Data, tokenizer: Tokenizer) -> Dataset:
    """Return rows that are already tokenized with the columns of TOKENS and KEY."""
    limits = args.source_length, args.target_length

    def read(row: dict[str, Any]) -> list[dict[str, Any]]:
        ids = reading.token_ids(row, "input_ids", "--source-length", limits[0], tokenizer)
        labels = reading.token_ids(row, "labels", "--target-length", limits[1], tokenizer)
        if labels[-1] != tokenizer.eos_token_id:
            raise ValueError("labels do not end in EOS, so the model would not learn to stop")
        key = stable_hash(repr(ids))
        return [{"input_ids": ids, "labels": labels, "length": len(ids), "key": key, "split": ""}]

    key = args.bad_rows, limits, len(tokenizer)
    return reading.map_rows(name, rows, rows.column_names, read, TOKENS | KEY, *key)


def split_wikihow(rows: Dataset) -> reading.Parts:
    """Return rows by split: from their column `split` or, if it is empty, SPLITS of their keys.

    Rows with equal keys stay together. Raise Problem if `train` or `validation` is empty.
    """
    splits = np.array(rows["split"], dtype=object)
    if not splits[0]:
        keys = rows.with_format("numpy")["key"][:]
        places = np.cumsum([*SPLITS.values()]).searchsorted(keys % 100, side="right")
        splits = np.array([*SPLITS], dtype=object)[places]
    parts = {split: rows.select(np.flatnonzero(splits == split)) for split in SPLITS}
    sizes = ", ".join(f"{split} {len(part):,}" for split, part in parts.items())
    if not len(parts["train"]) or not len(parts["validation"]):
        raise Problem(f"--dataset wikihow has too few different rows: {sizes}. Pass more data, "
                      "--val-dataset, or other title lists.")  # fmt: skip
    print0(f"wikihow: {sizes} rows")
    return parts


def draw(
    spec: str, split: str, rows: Dataset, limit: int | None, args: Data, tokenizer: Tokenizer
) -> Dataset:
    """Return `limit` random rows (0: all, None: the default) as TOKENS, the same in every run."""
    total = len(rows)
    if limit is None and spec.partition(":")[0] == "wikihow":
        limit = 1500 if split == "train" else 300
    if limit and limit < total:
        indices = list(range(total))
        random.Random(0).shuffle(indices)
        rows = rows.select(sorted(indices[:limit]))  # reads faster than in random order
    rows = rows.remove_columns([*KEY])
    if "input_ids" not in rows.column_names:
        texts = [x + y for x, y in zip(rows["text"], rows["summary"], strict=True)]
        for kind, space in {"line breaks": "\n", "tabs": "\t", "repeated spaces": "  "}.items():
            is_lost = space not in tokenizer.decode(tokenizer(f"a{space}b")["input_ids"])
            if count := is_lost * sum(space in text for text in texts):
                print0(f"{spec}, {split}: the tokenizer loses the {kind} of {count:,} rows")
        special = [x for x in tokenizer.all_special_tokens if "extra_id" not in x]
        if count := sum(any(x in text for x in special) for text in texts):
            print0(f"{spec}, {split}: {count:,} rows spell a special token, which it becomes")
        rows = encode(spec, rows, tokenizer, args)
    reading.print_unknown(f"{spec}, {split}", rows, tokenizer, "input_ids", "labels")
    print0(f"{spec}, {split}: {len(rows):,} of {total:,} rows drawn")
    columns = rows.with_format("arrow")[:]
    for column, kind in (("input_ids", "source"), ("labels", "target")):
        limit = getattr(args, f"{kind}_length")
        lengths = pyarrow.compute.list_value_length(columns[column]).to_numpy()
        if count := np.count_nonzero(lengths == limit):
            print0(f"  {count:,} reach --{kind}-length {limit}, which cuts the rest")
    return rows


def encode(spec: str, rows: Dataset, tokenizer: Tokenizer, args: Data) -> Dataset:
    """Tokenize rows of PAIR, cut to the lengths of the flags, and return them as TOKENS."""
    prefix, lengths = args.source_prefix, (args.source_length, args.target_length)
    eos = tokenizer.eos_token_id

    def with_eos(ids: list[int], length: int) -> list[int]:
        return ids if ids[-1:] == [eos] else [*ids[: length - 1], eos]

    def encode_pair(row: dict) -> list[dict]:
        source = tokenizer(prefix + row["text"], truncation=True, max_length=lengths[0])
        target = tokenizer(text_target=row["summary"], truncation=True, max_length=lengths[1])
        ids = with_eos(source["input_ids"], lengths[0])
        labels = with_eos(target["input_ids"], lengths[1])
        return [{"input_ids": ids, "labels": labels, "length": len(ids)}]

    key = prefix, lengths, reading.tokenizer_digest(tokenizer)
    return reading.map_rows(spec, rows, PAIR, encode_pair, TOKENS, args.bad_rows, *key)


def collator(model: nn.Module) -> Callable:
    """Return `collate` with the arguments for a model's decoder start token and padding token set.

    Raise Problem if the model lacks one of them, or a row for it.
    """
    model = unwrapped(model)
    start = getattr(model.config, "decoder_start_token_id", None)
    padding = model.config.pad_token_id
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):  # T5Gemma's start is not in config
        labels = torch.tensor([[5, -100, -100]])
        with contextlib.suppress(AttributeError, TypeError, ValueError):  # it may have no start
            shifted = model.prepare_decoder_input_ids_from_labels(labels=labels)
            start, _, padding = shifted[0].tolist()
    rows = range(model.config.get_text_config().vocab_size)
    if start not in rows or padding not in rows:
        raise Problem(
            f"The model's decoder start token is {start}, and its padding token is {padding}. Set "
            "decoder_start_token_id and pad_token_id in its config.json."
        )
    return partial(collate, pad_token_id=padding, decoder_start_token_id=start)


class LengthSampler(StepSampler):
    """A StepSampler whose steps have samples of similar length, so that there is little padding and
    no rank waits for another.

    The steps come in random order, except that the longest comes first: if it does not fit in
    memory, the run fails at once. If the last step of an epoch is short, it stays last.
    """

    def __init__(self, samples: Any, batch_size: int, accumulation: int, seed: int) -> None:
        super().__init__(len(samples), batch_size, accumulation, seed)
        if isinstance(samples, Dataset):
            self.lengths = torch.tensor(samples["length"][:])
        else:
            self.lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])

    def order(self, generator: torch.Generator) -> Tensor:
        """Return an epoch's permutation, with each half sorted by length, then the steps shuffled.

        Each epoch has other halves, hence other steps.
        """
        order, count = super().order(generator), self.num_samples // self.global_batch
        order, remainder = order.tensor_split([count * self.global_batch])
        halves = order.tensor_split([count // 2 * self.global_batch])
        order = torch.cat([half[self.lengths[half].argsort(stable=True)] for half in halves])
        steps = order.view(count, self.global_batch)[torch.randperm(count, generator=generator)]
        if count:
            longest = self.lengths[steps].sum(dim=1).argmax().item()
            steps[[0, longest]] = steps[[longest, 0]]
        return torch.cat((steps.flatten(), remainder))


def pad(rows: list, value: int, multiple: int) -> Tensor:
    """Return rows of ints as int64 [rows, length], padded with `value`. The length is that of the
    longest row, rounded up to a multiple of `multiple`."""
    width = -(-max(1, *map(len, rows)) // multiple) * multiple
    array = np.full((len(rows), width), value)
    for target, row in zip(array, rows, strict=True):
        target[: len(row)] = row
    return torch.from_numpy(array)


def collate(examples: list[dict], pad_token_id: int, decoder_start_token_id: int) -> Batch:
    """Return a batch padded to the longest example, or on a GPU to a multiple of 8 for its kernels.

    It has int64 tensors: `input_ids` and `attention_mask` [batch, source], `labels`,
    `decoder_input_ids` and `decoder_attention_mask` [batch, target]; padding is `pad_token_id`, in
    `labels` -100. The int `targets` counts the labels that are not -100, `tokens` these and the
    source's tokens. If there are no examples, as on a rank that has none left, the batch is one
    row without targets.
    """
    # One position stays visible, because attention over none would be NaN.
    examples = examples or [{"input_ids": [pad_token_id], "labels": []}]
    sources = [example["input_ids"] for example in examples]
    masks = [example.get("attention_mask", [1] * len(example["input_ids"])) for example in examples]
    targets = [example["labels"] for example in examples]
    multiple = 8 if torch.accelerator.is_available() else 1
    labels = pad(targets, -100, multiple=multiple)
    decoder_input_ids = torch.full_like(labels, decoder_start_token_id)
    decoder_input_ids[:, 1:] = labels[:, :-1].masked_fill(labels[:, :-1] == -100, pad_token_id)
    decoder_attention_mask = (labels != -100).long()
    decoder_attention_mask[:, 0] = 1
    count = sum(np.count_nonzero(np.asarray(ids) != -100) for ids in targets)
    return {
        "input_ids": pad(sources, pad_token_id, multiple=multiple),
        "attention_mask": pad(masks, 0, multiple=multiple),
        "labels": labels,
        "decoder_input_ids": decoder_input_ids,
        "decoder_attention_mask": decoder_attention_mask,
        "targets": count,
        "tokens": count + sum(map(sum, masks)),
    }
