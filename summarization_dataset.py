"""Summarization pairs for a sequence-to-sequence model, from raw text to padded batches.

`--dataset` takes `wikihow` (the CSV files in `--data-dir`), `docstrings` (those of the installed
Python, no download), CSV, TSV, JSONL, JSON or Parquet files, or hub ids. `load` cleans and splits
the rows (`clean_rows`, `split_rows`), draws the requested number and tokenizes them (`encode`);
`collate` pads a batch. `datasets` caches the results: let one process per node load first.

Copy this file along with the script that imports it and the folder runtime/. For your own data,
return its rows from `load_rows` under another built-in name.
"""

import contextlib
import hashlib
import random
import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset, List, Value
from torch import nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from runtime import ranks, readers
from runtime.batches import pad
from runtime.options import BadRows, flag
from runtime.ranks import say
from runtime.weights import unwrapped

WIKIHOW = {"all": "wikihowAll.csv", "sep": "wikihowSep.csv"}
BUILT_IN = {"wikihow": (1500, 300), "docstrings": (1500, 300)}  # default numbers of examples
PERCENT = {  # of the keys in each split
    "wikihow": {"train": 98, "validation": 1, "test": 1},
    "docstrings": {"train": 85, "validation": 15},
    "other": {"train": 95, "validation": 5},
}
# Validation is last, so that a title in two lists is not trained on.
TITLE_LISTS = {"train": "all_train.txt", "test": "all_test.txt", "validation": "all_val.txt"}
PAIR = {"text": Value("string"), "summary": Value("string")}
TOKENS = {"input_ids": List(Value("int32")), "labels": List(Value("int32"))}
TOKENS |= {"length": Value("int32")}
KEY = {"key": Value("int64"), "split": Value("string")}  # split: from the title lists, or empty
COLUMNS = {  # text, summary, and the key of rows that stay together
    "wikihow": ["text", "headline", "title"],
    "docstrings": ["text", "headline", "module"],
}


@dataclass
class Options:
    """data"""

    dataset: list[str] = flag([], "wikihow, docstrings (built in), CSV, JSON, JSONL or Parquet "
        "files, save_to_disk directories or hub ids; NAME:train[:1000] takes a split or a part "
        "(default: wikihow)", metavar="DATA")  # fmt: skip
    val_dataset: list[str] = flag([], "validate on these instead of a part of each --dataset; for "
        "example wikihow:test", metavar="DATA")  # fmt: skip
    data_dir: str = flag("data", "directory of WikiHow's CSV files and title lists", metavar="DIR")
    wikihow_part: Literal[*WIKIHOW] = flag("all", "whole articles or paragraphs")
    dataset_config: str | None = flag(None, "configuration of a hub data set")
    source_column: str = flag("text", "column with the texts")
    target_column: str = flag("headline", "column with the summaries")
    source_prefix: str = flag("summarize: ", "prepended to each text")
    source_length: int = flag(512, "tokens per text; the rest is cut", low=2)
    target_length: int = flag(150, "tokens per summary; the rest is cut", low=2)
    num_train_samples: int | None = flag(None, "rows per data set (0: all; default: all, but 1500 "
        "for wikihow and docstrings)", low=0)  # fmt: skip
    num_val_samples: int | None = flag(None, "rows per data set (0: all; default: all, but 300 "
        "for wikihow and docstrings)", low=0)  # fmt: skip
    bad_rows: BadRows = flag("fail", "skip: drop unusable rows")
    group_by_length: bool = flag(True, "batch texts of similar length, to pad less")


def load(args: Namespace, tokenizer: Tokenizer) -> tuple[Dataset | None, readers.Parts]:
    """Return the training set (None with --evaluate-only) and the validation sets by name.

    Their columns are TOKENS: `length` is that of `input_ids`, and EOS is last. The choice of rows
    depends only on the data. Raise ValueError if data or flags cannot be used.
    """
    load_parts = partial(load_rows, args=args, tokenizer=tokenizer)
    hold_out = partial(split_rows, percent=PERCENT["other"])
    make = partial(draw, args=args, tokenizer=tokenizer)
    train_set, val_sets = readers.load_sets(args, "wikihow", load_parts, hold_out, make)
    if train_set:
        text, summary = (tokenizer.decode(train_set[0][x]) for x in ("input_ids", "labels"))
        say(readers.shorten(f"an example, with targets in « »: «{summary}» from {text}"))
    return train_set, val_sets


def load_rows(spec: str, args: Namespace, tokenizer: Tokenizer) -> readers.Parts:
    """Return the clean rows of one --dataset argument by split."""
    name, split = readers.split_spec(spec, BUILT_IN)
    if name not in BUILT_IN:
        raw = readers.pick(name, readers.read(name, args.dataset_config), split)
        return {key: clean_rows(name, rows, args, tokenizer) for key, rows in raw.items()}
    if name == "wikihow":
        rows = open_wikihow(Path(args.data_dir).expanduser() / WIKIHOW[args.wikihow_part])
    else:
        rows = readers.docstring_rows()
    parts = split_rows(spec, clean_rows(name, rows, args, tokenizer), PERCENT[name])
    return readers.pick(name, parts, split) if split else parts


def open_wikihow(path: Path) -> Dataset:
    """Return the rows of WikiHow's CSV file; raise ValueError with its URL if it is missing."""
    if path.is_file():
        return readers.read(str(path), None)["train"]
    raise ValueError(
        f"--dataset wikihow needs {path}. Get {path.name} (Koupaee & Wang 2018) from "
        "https://github.com/mahnazkoupaee/WikiHow-Dataset, or pass --dataset docstrings, which "
        "needs no download."
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


def clean_rows(name: str, rows: Dataset, args: Namespace, tokenizer: Tokenizer) -> Dataset:
    """Return the usable rows of data set `name` with KEY and cleaned texts (PAIR) or TOKENS."""
    columns = readers.columns_of(name, rows)
    needed = COLUMNS.get(name, [args.source_column, args.target_column])
    missing = [column for column in needed if column not in columns]
    rows = readers.select(rows, [*needed, "input_ids", "labels"])
    if missing and "input_ids" in columns:
        return read_tokens(name, rows, args, tokenizer)
    if missing:
        likely = readers.guess_columns(columns)
        advice = "Pass a data set with two columns of text."
        if len(likely) > 1 and name not in COLUMNS:
            advice = f"Pass --source-column {likely[0]} --target-column {likely[1]}."
        raise ValueError(f"{readers.lacks(name, missing, columns)} {advice}")
    titles = read_title_lists(Path(args.data_dir).expanduser()) if name == "wikihow" else {}

    def clean(row: dict[str, Any]) -> list[dict[str, Any]]:
        for column in needed:
            if not isinstance(row.get(column), str):
                raise ValueError(f"{column} is {row.get(column)!r}, not text")
        text, summary, *key = (row[column] for column in needed)
        if name == "wikihow":
            return clean_wikihow(text.strip(), summary.strip(), title_key(*key), titles)
        if name in BUILT_IN:
            text, summary = on_one_line(text.strip()), on_one_line(summary.strip())
        if not text.strip() or not summary.strip():
            raise ValueError("the text or the summary is empty")
        number = stable_hash(*key or [text])
        return [{"text": text, "summary": summary, "key": number, "split": ""}]

    cleaned = readers.map_rows(
        name, rows, lambda x: [*map(clean, x)], PAIR | KEY, args.bad_rows, needed, titles
    )
    say(f"{name}: {len(cleaned):,} of {len(rows):,} rows used")
    return cleaned


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


def read_tokens(name: str, rows: Dataset, args: Namespace, tokenizer: Tokenizer) -> Dataset:
    """Return rows that are already tokenized with the columns of TOKENS and KEY."""
    readers.compare_origin(name, readers.token_origin(args, tokenizer))
    limits = {"input_ids": ("--source-length", args.source_length)}
    limits["labels"] = ("--target-length", args.target_length)

    def read(row: dict[str, Any]) -> list[dict[str, Any]]:
        pair = {x: readers.token_ids(row, x, *limits[x], tokenizer) for x in limits}
        ids = pair["input_ids"]
        return [pair | {"length": len(ids), "key": stable_hash(repr(ids)), "split": ""}]

    key = limits, len(tokenizer)
    return readers.map_rows(
        name, rows, lambda x: [*map(read, x)], TOKENS | KEY, args.bad_rows, *key
    )


def split_rows(name: str, rows: Dataset, percent: dict[str, int]) -> readers.Parts:
    """Return rows by split: from their column `split` or, if it is empty, `percent` of their keys.

    Rows with equal keys stay together. Raise ValueError if `train` or `validation` is empty.
    """
    splits = list(percent)
    keys = rows.with_format("numpy")["key"][:]
    row_splits = np.array(rows["split"], dtype=object)
    if not row_splits[0]:
        places = np.cumsum(list(percent.values())).searchsorted(keys % 100, side="right")
        if percent is PERCENT["other"]:
            places = readers.held_out(name, keys, places > 0).astype(int)
        elif len({*places}) < len(splits):
            places[:] = 0
            for number, key in enumerate(np.unique(keys)[:-1][: len(splits) - 1], 1):
                places[keys == key] = number
        row_splits = np.array(splits, dtype=object)[places]
    parts = {split: rows.select(np.flatnonzero(row_splits == split)) for split in splits}
    sizes = ", ".join(f"{split} {len(part):,}" for split, part in parts.items())
    if not len(parts["train"]) or not len(parts["validation"]):
        raise ValueError(f"--dataset {name} has too few different rows: {sizes}. Pass more data, "
                         "--val-dataset, or other title lists.")  # fmt: skip
    say(f"{name}: {sizes} rows")
    return parts


def draw(
    spec: str, split: str, rows: Dataset, limit: int | None, args: Namespace, tokenizer: Tokenizer
) -> Dataset:
    """Return `limit` random rows (0: all, None: the default) as TOKENS, the same in every run."""
    default = BUILT_IN.get(spec.partition(":")[0], (0, 0))[split != "train"]
    total = len(rows)
    number = (default if limit is None else limit) or total
    if number < total:
        indices = list(range(total))
        random.Random(0).shuffle(indices)
        rows = rows.select(sorted(indices[:number]))  # reads faster than in random order
    rows = rows.remove_columns(list(KEY))
    if "input_ids" not in rows.column_names:
        lengths = args.source_length, args.target_length
        rows = encode(spec, rows, tokenizer, args.source_prefix, lengths, args.bad_rows)
    full = int((rows.with_format("numpy")["length"][:] == args.source_length).sum())
    say(f"{spec}, {split}: {len(rows):,} of {total:,} rows used, {full:,} reach --source-length")
    targets = np.concatenate([x.flatten().to_numpy() for x in readers.arrays(rows, "labels")])
    unknown = int((targets == tokenizer.unk_token_id).sum())
    if 100 * unknown > len(targets):
        say(f"Warning: {unknown:,} of {len(targets):,} target tokens are {tokenizer.unk_token}. "
            "The tokenizer lacks some characters, so the model cannot learn to write them."
            )  # fmt: skip
    return rows


def encode(
    spec: str, rows: Dataset, tokenizer: Tokenizer, prefix: str, lengths: tuple, bad_rows: str
) -> Dataset:
    """Tokenize rows of PAIR and return them with the columns of TOKENS. `prefix` precedes each
    text; a text and a summary have at most `lengths` tokens."""
    options = {"truncation": True, "return_attention_mask": False}

    def with_eos(ids: list[int], length: int) -> list[int]:
        eos = [tokenizer.eos_token_id]
        return ids if ids[-1:] == eos else ids[: length - 1] + eos

    def encode_batch(batch: list[dict]) -> list[list[dict]]:
        texts = [prefix + row["text"] for row in batch]
        summaries = [row["summary"] for row in batch]
        sources = tokenizer(texts, max_length=lengths[0], **options)["input_ids"]
        targets = tokenizer(text_target=summaries, max_length=lengths[1], **options)["input_ids"]
        samples = []
        for source, target in zip(sources, targets, strict=True):
            ids = with_eos(source, lengths[0])
            labels = with_eos(target, lengths[1])
            samples.append([{"input_ids": ids, "labels": labels, "length": len(ids)}])
        return samples

    key = prefix, lengths, readers.tokenizer_digest(tokenizer)
    return readers.map_rows(spec, rows, encode_batch, TOKENS, bad_rows, *key)


def collator(model: nn.Module) -> Callable:
    """Return `collate` with the arguments for a model's decoder start token and padding token set.

    Raise ValueError if the model lacks one of them, or a row for it.
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
        raise ValueError(
            f"The model's decoder start token is {start}, and its padding token is {padding}. Set "
            "decoder_start_token_id and pad_token_id in its config.json."
        )
    return partial(collate, pad_token_id=padding, decoder_start_token_id=start)


def source_lengths(samples: Sequence[dict]) -> list[int]:
    """Return the number of source tokens of each sample."""
    if isinstance(samples, Dataset):
        return samples["length"][:].tolist()
    return [len(sample["input_ids"]) for sample in samples]


def probe_batch() -> list[dict[str, range]]:
    """Return three samples for the checks of the model. The first two have the same source, and the
    second target is the start of the first. The third has a shorter source and target."""
    source, target = range(10, 27), range(30, 46)
    pairs = (source, target), (source, target[:8]), (source[:9], target[:5])
    return [{"input_ids": ids, "labels": labels} for ids, labels in pairs]


def collate(
    examples: list[dict], pad_token_id: int, decoder_start_token_id: int
) -> dict[str, torch.Tensor | int]:
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
    targets = [example["labels"] for example in examples]
    multiple = 1 if ranks.accelerator() is None else 8
    labels = pad(targets, -100, multiple=multiple)
    decoder_input_ids = torch.full_like(labels, decoder_start_token_id)
    decoder_input_ids[:, 1:] = labels[:, :-1].masked_fill(labels[:, :-1] == -100, pad_token_id)
    decoder_attention_mask = (labels != -100).long()
    decoder_attention_mask[:, 0] = 1
    count = sum(map(len, targets))
    return {
        "input_ids": pad(sources, pad_token_id, multiple=multiple),
        "attention_mask": pad([[1] * len(source) for source in sources], 0, multiple=multiple),
        "labels": labels,
        "decoder_input_ids": decoder_input_ids,
        "decoder_attention_mask": decoder_attention_mask,
        "targets": count,
        "tokens": count + sum(map(len, sources)),
    }
