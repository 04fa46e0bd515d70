"""Data sets of tokens made beforehand: rows of `input_ids`, and of `labels`, as a run uses them.

Such a data set is a Parquet or JSONL file, or a directory that `save_to_disk` or --prepare-only has
written. Imports nothing of this repository but readers and
json_rows.
"""

import contextlib
import hashlib
import json
import shutil
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerBase

from . import readers
from .json_rows import place

PREPARED = "prepared"  # the directory in OUTPUT_DIR that --prepare-only writes
TEMPLATE = "chat template"
BATCH = 10_000  # rows looked at together
HIDDEN = -100  # a label that is no target


def save(
    path: Path, train: Dataset, val: Dataset, tokenizer: PreTrainedTokenizerBase,
    made_from: dict[str, Any],
) -> None:  # fmt: skip
    """Write the splits train and validation as the directory `path`, complete or not at all.

    Their description is the JSON of what they are `made_from` and of the tokenizer's rules. Raises
    ValueError if they are read from `path`, or something else is there.
    """
    files = [Path(file["filename"]) for rows in (train, val) for file in rows.cache_files]
    is_read = any(path.resolve() in file.resolve().parents for file in files)
    if is_read or (path.exists() and not readers.is_saved(path)):
        raise ValueError(f"--prepare-only would replace {path}: give another --output-dir")
    rules = readers.token_rules(tokenizer) | {TEMPLATE: tokenizer.chat_template}
    text = json.dumps(made_from | {"rules": rules})
    parts = {}
    for name, rows in ("train", train), ("validation", val):
        parts[name] = rows.select(range(len(rows)))  # a copy, so that `rows` keep their description
        parts[name].info.description = text
    temporary = path.with_name(f"tmp-{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    DatasetDict(parts).save_to_disk(temporary)
    shutil.rmtree(path, ignore_errors=True)
    temporary.rename(path)


def check_origin(
    name: str, rows: Dataset, columns: Iterable[str], args: Namespace, flags: Iterable[str],
    rules: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Return what --prepare-only has noted of the rows; {} if it has not made them.

    Raises ValueError if it made them for another script, whose `columns` are others, by other
    `rules` of making tokens, with other values of the `flags` that shape them, or noted too little.
    """
    made_from = None
    with contextlib.suppress(ValueError):  # a description in somebody's words
        made_from = json.loads(rows.info.description)
    if not isinstance(made_from, dict) or "script" not in made_from:
        return {}
    if set(columns) != set(rows.column_names):
        raise ValueError(
            f"{name} was made for another script, or by another version of {made_from['script']}: "
            "make it again"
        )
    there = made_from.get("rules")
    if there is None:
        raise ValueError(f"{name} does not say what made its tokens: make it again")
    differing = [words for rule in rules for words in _difference(rule, there.get(rule), rules)]
    same = "give the --chat-template that it was made with, " * (TEMPLATE in differing)
    if differing:
        raise ValueError(
            f"{name} was made with another {', '.join(differing)} than the model's tokenizer has: "
            f"{same}make it again with --prepare-only, or train the model that it was made for"
        )
    for flag in flags:
        there, here = made_from["arguments"][flag], getattr(args, flag)
        if there != here:
            raise ValueError(
                f"{name} was made with --{flag.replace('_', '-')} {there}, not {here}: give the "
                "same, or make it again"
            )
    return made_from


def _difference(rule: str, there: Any, rules: dict[str, Any]) -> list[str]:
    """Name what differs between a rule as it was there and as it is in `rules`."""
    here = rules[rule]
    if there == here:
        return []
    if not isinstance(here, dict) or not isinstance(there, dict):
        return [rule]
    roles = [role for role in here | there if here.get(role) != there.get(role)]
    return [f"{role} ({there.get(role)} there, {here.get(role)} here)" for role in roles]


def checked_columns(
    name: str, rows: Dataset, limits: dict[str, tuple[str, int]],
    tokenizer: PreTrainedTokenizerBase, hidden: bool = False,
) -> Dataset:  # fmt: skip
    """Return the columns that `limits` names, each with its flag and its largest number of tokens.

    They hold ids of the tokenizer; labels, if `hidden`, also -100 where nothing is learned. Raises
    ValueError, with a sentence for the user, at the first row that is otherwise.
    """
    missing = set(limits) - set(rows.column_names)
    if missing:
        raise ValueError(f"{name} has input_ids, but no {', '.join(missing)}")
    if "attention_mask" in rows.column_names:
        for _, values, _ in _batches(name, rows, "attention_mask"):
            if (values != 1).any():
                raise ValueError(f"{name} has padding (0 in attention_mask): save it without")
    for column, (flag, longest) in limits.items():
        lowest = HIDDEN if hidden and column == "labels" else 0
        for first, values, offsets in _batches(name, rows, column):
            lengths = np.diff(offsets)
            row = int(lengths.argmax())
            if lengths[row] > longest:
                raise ValueError(
                    f"{name}, {place(name, first + row)}: {column} has {lengths[row]:,} tokens, "
                    f"more than the {longest:,} that {flag} allows"
                )
            wrong = np.flatnonzero((values < lowest) | (values >= len(tokenizer)))
            if len(wrong):
                row = int(offsets.searchsorted(wrong[0], side="right")) - 1
                raise ValueError(
                    f"{name}, {place(name, first + row)}: {column} has {values[wrong[0]]}, "
                    f"which is none of the tokenizer's {len(tokenizer):,} tokens"
                )
    return rows.select_columns(list(limits))


def _batches(name: str, rows: Dataset, column: str) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield a column of lists, many rows at a time: the number of the first row, from 1, the
    values, and the offsets at which each list begins and the last one ends. Raises ValueError if it
    holds anything else."""
    first = 1
    for batch in rows.select_columns(column).with_format("arrow").iter(BATCH):
        array = batch[column].combine_chunks()
        if not hasattr(array, "offsets"):  # a list of a fixed size has none either
            raise ValueError(f"{name}: {column} is {array.type}: save it as lists of whole numbers")
        if array.null_count or array.flatten().null_count:
            raise ValueError(f"{name}: {column} has rows or numbers missing")
        values = array.flatten().to_numpy(zero_copy_only=False)
        if values.dtype.kind not in "iu":
            raise ValueError(f"{name}: {column} holds {values.dtype}, not whole numbers")
        offsets = array.offsets.to_numpy()
        offsets = offsets - offsets[0]
        lengths = np.diff(offsets)
        if lengths.min() == 0:
            row = first + int(lengths.argmin())
            raise ValueError(f"{name}, {place(name, row)}: {column} is empty")
        yield first, values, offsets
        first += len(batch)


def split(name: str, rows: Dataset) -> tuple[Dataset, Dataset]:
    """Return the rows to train on, and 5% to validate on, by a hash of `input_ids`; ValueError if
    all are the same."""
    keys = [key(row["input_ids"]) for row in readers.Rows(rows.select_columns("input_ids"))]
    return readers.hold_out(name, rows, keys)


def key(ids: Sequence[int]) -> int:
    """Return a hash of the tokens alone, by which rows are held out."""
    digest = hashlib.blake2b(np.asarray(ids, dtype=np.int32).tobytes(), digest_size=7)
    return int.from_bytes(digest.digest(), "big")
