"""Rows of files and hub data sets, and samples made of them.

Rows of text, CSV and JSON files are stored as lines of JSON, because Arrow would change values.
`datasets` caches the results: let one process per node load first. Any rank may call these.
"""

import contextlib
import csv
import gc
import gzip
import hashlib
import inspect
import json
import os
import random
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from glob import escape, glob
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, Features, ReadInstruction, Value, concatenate_datasets
from transformers import PreTrainedTokenizerBase as Tokenizer

from .ranks import Problem, print0

Parts = dict[str, Dataset]  # rows or samples by split: train, and maybe validation

LINE = "json line"  # the only column of files: a row as JSON, which `parse` reads
UNEVEN = "fields that the header lacks, or lacking fields"  # of rows of CSV files
LARGE = 10_000  # rows above which several processes map them
TOKENS = ("input_ids", "labels", "token_type_ids", "special_tokens_mask")  # of tokenized rows
PROBE = "  Two  Words, a Ünïcode dash – and\n\ta line break 1234"


def load_sets(
    args: Any, load_parts: Callable, hold_out: Callable, draw: Callable, evaluate_only: bool = False
) -> tuple[Dataset | None, Parts]:
    """Return the training set, None with `evaluate_only`, and the validation sets by name.

    `load_parts(name)` returns rows by split, `hold_out(name, rows)` splits those that have no
    validation rows, and `draw(name, split, rows, limit)` makes at most `limit` samples (0: all).
    """
    train, validation = [], {}
    for name in args.val_dataset:
        try:
            parts = load_parts(name)
        except Problem as error:
            raise Problem(f"--val-dataset: {error}") from None
        validation[name] = parts.get("validation", parts["train"])
        if name in args.dataset and "validation" not in parts:
            print0(f"{name} is also trained on: its validation loss will be too low.")
    for name in () if evaluate_only and validation else args.dataset:
        parts = load_parts(name)
        if not args.val_dataset:
            parts = parts if "validation" in parts else hold_out(name, parts["train"])
            validation[name] = parts["validation"]
        if not evaluate_only:
            train.append(draw(name, "train", parts["train"], args.num_train_samples))
    for name, rows in validation.items():
        samples = draw(name, "validation", rows, args.num_val_samples)
        validation[name] = samples.with_format("numpy")
    return concatenate_datasets(train).with_format("numpy") if train else None, validation


def read(spec: str, config: str | None = None, text_rows: Callable | None = None) -> Parts:
    """Return rows by split: of files (train) in a path, glob or folder of text files, of a
    directory of `save_to_disk`, or of a hub data set; of NAME:SPLIT see `pick`. `text_rows` yields
    the rows of an open text file. Raise Problem if the data cannot be read."""
    name, _, split = spec.partition(":")
    path = Path(name).expanduser()
    pattern = escape(str(path)) + "/*.txt" * path.is_dir() if path.exists() else str(path)
    files = sorted(x for x in map(Path, glob(pattern, recursive=True)) if x.is_file())
    parts: Any = []
    try:
        if any(path.glob("dataset_*.json")):  # which save_to_disk writes
            parts = datasets.load_from_disk(path)
            # Their fingerprints are those of the code that made them, not of what they contain.
            for rows in parts.values() if isinstance(parts, dict) else [parts]:
                keys = [_key(Path(file["filename"])) for file in rows.cache_files]
                rows._fingerprint = digest(rows._fingerprint, keys)
        elif files:
            for path in files:
                parts.append(_read_file(path, text_rows))
            if len({LINE in rows.column_names for rows in parts}) > 1:
                raise ValueError("Parquet files need a --dataset of their own")
            parts = concatenate_datasets(parts)
        elif path.is_dir():
            raise ValueError("the folder has no *.txt. Pass its files, such as FOLDER/*.jsonl")
        else:
            parts = datasets.load_dataset(name, config)
        return pick(parts if isinstance(parts, dict) else {"train": parts}, split)
    except Exception as error:  # pandas, pyarrow, the hub and datasets each raise their own types
        cause = error.__cause__ or error
        problem = "cannot be read" if path.exists() else "is not a file, and not on the hub"
        cache = f". The cache is {datasets.config.HF_DATASETS_CACHE}"
        reason = shorten(str(cause)) + (cache if getattr(cause, "filename", None) else "")
        raise Problem(f"Data set {path} {problem}: {reason}") from error


def pick(parts: Parts, split: str) -> Parts:
    """Return one split or slice, such as train[:1000], as {"train": rows}; if "", train and
    validation. Raise Problem if there is no such split."""
    if not split and "train" in parts:
        return {key: parts[key] for key in ("train", "validation") if key in parts}
    sizes = {key: len(rows) for key, rows in parts.items()}
    try:
        pieces = ReadInstruction.from_spec(split or "train").to_absolute(sizes)
    except ValueError as error:
        raise Problem(str(error)) from None
    chosen = [parts[x.splitname].select(range(x.from_, x.to)) for x in pieces]
    return {"train": concatenate_datasets(chosen)}


def _key(path: Path) -> str:
    stat = path.stat()
    return digest(str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def _read_file(path: Path, text_rows: Callable | None) -> Dataset:
    key, suffix = _key(path), Path(path.name.lower().removesuffix(".gz")).suffix
    with path.open("rb") as file:
        if file.read(20) == b"version https://git-":
            raise ValueError("it is a pointer of Git LFS. Run `git lfs pull`")
    if suffix == ".parquet":
        return datasets.load_dataset("parquet", key, data_files=escape(str(path)), split="train")
    readers = dict.fromkeys((".json", ".jsonl", ".ndjson"), _json_rows)
    readers |= dict.fromkeys((".csv", ".tsv"), _csv_rows)
    reader = readers.get(suffix, text_rows)
    if not reader:
        raise ValueError("it is not a CSV, TSV, JSON, JSONL or Parquet file")

    def lines() -> Iterator[dict[str, str]]:
        opener = gzip.open if path.suffix.lower() == ".gz" else open
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            row = None
            for row in reader(file):  # in ASCII, because half of a surrogate pair is not UTF-8
                yield {LINE: row if isinstance(row, str) else json.dumps(row)}
            if row is None:
                raise ValueError("it has no rows")

    features = Features({LINE: Value("string")})
    return Dataset.from_generator(lines, features, fingerprint=cache_key(reader, key))


def _json_rows(file: Any) -> Iterator[Any]:
    lines = filter(None, map(str.strip, file))
    is_list = next(lines, "").startswith("[")
    file.seek(0)
    yield from json.load(file) if is_list else lines


def _csv_rows(file: Any) -> Iterator[dict[str, str]]:
    csv.field_size_limit(2**31 - 1)
    delimiter = "\t" if ".tsv" in Path(file.name).name.lower() else ","
    rows = csv.DictReader(file, None, UNEVEN, UNEVEN, delimiter=delimiter, strict=True)
    try:
        columns = rows.fieldnames or []
        if len({*columns}) < len(columns):
            raise csv.Error(f"the header has {max(columns, key=columns.count)!r} twice")
        for row in rows:
            if delimiter == "\t" and any("\n" in field for field in row.values()):
                raise csv.Error('a field that begins with " spans lines. Write a CSV file')
            yield row
    except csv.Error as error:
        raise ValueError(f"line {rows.reader.line_num}: {error}") from None


def first_row(name: str, rows: Dataset) -> dict[str, Any]:
    """Return the first row, with what only some of the next 99 in a file have: its keys are the
    columns. Images are not decoded. Raise Problem if there is none, or if it is a whole table."""
    head = rows.with_format("arrow")[: 100 if LINE in rows.column_names else 1].to_pylist()
    try:
        row = parse(head[0])
    except (ValueError, IndexError) as error:
        advice = "Write an object per line." * isinstance(error, json.JSONDecodeError)
        raise Problem(f"The first row of {name} cannot be read: {error}. {advice}") from None
    columns = [x for x in row.values() if isinstance(x, dict | list)]
    is_table = len(columns) == len(row) and len({*map(len, columns)}) == 1
    if len(rows) == 1 and is_table and any({*map(type, x)} in ({str}, {list}) for x in columns):
        raise Problem(f"{name} is a table in a row. Pass orient='records', lines=True to to_json.")
    for other in head[1:]:
        with contextlib.suppress(ValueError):
            row = parse(other) | row
    return row


def usual_columns(columns: Iterable[str], table: Iterable[tuple]) -> tuple | None:
    """Return the first line of the table whose columns are all there, or None."""
    return next((usual for usual in table if {*usual} <= {*columns}), None)


def print_columns(name: str, used: Iterable[str], columns: Collection[str]) -> None:
    """Print which of several columns are used, and which are not."""
    if len(columns) > 1:
        others = ", ".join(x for x in columns if x not in used)
        print0(f"{name}: uses {' and '.join(used)}" + (others and f"; left out: {others}"))


def print_unknown(name: str, samples: Dataset, tokenizer: Tokenizer) -> None:
    """Print how many tokens are unknown. GPT-2's unknown token is EOS, which replaces none."""
    unknown = tokenizer.unk_token_id
    chunks = samples.with_format("arrow")[:]["input_ids"].chunks
    count = sum(np.count_nonzero(chunk.flatten().to_numpy() == unknown) for chunk in chunks)
    if count and unknown not in (tokenizer.eos_token_id, tokenizer.bos_token_id):
        print0(f"{name}: {count:,} tokens are {tokenizer.unk_token}, for unknown characters")


def no_columns(name: str, missing: Iterable[str], columns: Iterable[str], advice: str) -> Problem:
    """Return the error that the columns `missing` are not among `columns`."""
    return Problem(f"Data set {name} has no column {' or '.join(missing)}. Its columns are: "
                   f"{shorten(', '.join(columns))}. {advice}")  # fmt: skip


def parse(row: dict[str, Any], features: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a row as in its file, without what Arrow added to it, given the `features` of its data
    set; raise ValueError if it is not a JSON object or does not fit its CSV file."""
    if LINE not in row:
        return {key: _without_none(value, (features or {}).get(key)) for key, value in row.items()}
    row = json.loads(row[LINE])
    if not isinstance(row, dict):
        raise ValueError("the line is not a JSON object")
    if UNEVEN in row or UNEVEN in row.values():
        raise ValueError("the row has other fields than the header (is the separator right?)")
    return row


def _without_none(value: Any, feature: Any) -> Any:
    """Return `value` without members that are None, which Arrow adds to objects, not to JSON."""
    if isinstance(feature, datasets.Json):
        return value
    if isinstance(value, dict):
        inner = feature if isinstance(feature, dict) else {}
        parts = {key: part for key, part in value.items() if part is not None}
        return {key: _without_none(part, inner.get(key)) for key, part in parts.items()}
    inner = getattr(feature, "feature", None)
    return [_without_none(part, inner) for part in value] if isinstance(value, list) else value


def map_rows(
    name: str, rows: Dataset, columns: Iterable[str], function: Callable, features: dict,
    bad_rows: str, *key: object,
) -> Dataset:  # fmt: skip
    """Return the samples, dicts of `features`, of which `function` makes a list of each row. It
    gets the `columns` that exist, or a row of a file. `key` and the function's file are the key of
    the cache. If it raises ValueError, raise Problem with the number of the row or, if `bad_rows`
    is "skip", leave the row out."""
    rows = rows.with_format(None)
    wanted = {LINE, *columns}
    rows = rows.select_columns([x for x in rows.column_names if x in wanted])
    types = rows.features
    skipped: list[int] = []  # by this process
    processes = len(os.sched_getaffinity(0)) if len(rows) > LARGE else None

    def convert(columns: dict[str, list], numbers: list[int]) -> dict[str, list]:
        samples = []
        for number, *values in zip(numbers, *columns.values(), strict=True):
            try:
                samples += function(parse(dict(zip(columns, values, strict=True)), types))
            except Problem as error:  # of the data set, not of a row
                raise Problem(f"{name}, row {number + 1}: {error}") from None
            except (ValueError, TypeError, AttributeError) as error:
                problem = f"{name}, row {number + 1}: {shorten(str(error))}"
                if bad_rows == "fail":
                    raise Problem(f"{problem}. Correct it, or pass --bad-rows skip.") from None
                skipped.append(number)
                if len(skipped) <= max(1, 10 // (processes or 1)):
                    print0(f"Skipped {problem}")
        return {kind: [sample[kind] for sample in samples] for kind in features}

    gc.collect()  # finalizing garbage may crash a forked process
    # The hash of `datasets` depends on a tokenizer's state, and not on a module's code.
    key = cache_key(function, rows._fingerprint, name, bad_rows, sorted(features), *key)
    samples = rows.map(
        convert, batched=True, batch_size=100, with_indices=True, new_fingerprint=key,
        remove_columns=rows.column_names, features=Features(features),
        num_proc=processes,
    )  # fmt: skip
    if len(samples) == 0:
        raise Problem(f"Data set {name} has no usable rows among {len(rows)}.")
    if len(samples) != len(rows):
        print0(f"{name}: {len(samples):,} samples of {len(rows):,} rows")
    return samples


def token_ids(
    row: dict[str, Any], column: str, flag: str, limit: int, tokenizer: Tokenizer
) -> list[int]:
    """Return the tokens in a column of a row. Raise ValueError unless they are 1 to `limit` ids of
    the tokenizer without padding, and no mask excludes some."""
    for name, values in row.items():  # masks, weights, other labels, lengths of packed documents
        if name in TOKENS or not isinstance(values, list) or len(values) < 2:
            continue
        ignored = [*range(len(values))] if name == "position_ids" else [1] * len(values)
        if isinstance(values[0], int | float) and values != ignored:
            raise ValueError(f"{name} is not read, and not all 1. Remove or split what it excludes")
    ids = row.get(column)
    if not ids or {*map(type, ids)} != {int}:
        raise ValueError(f"{column} is empty or not a list of integers")
    if len(ids) > limit:
        raise ValueError(f"{len(ids)} tokens, but {flag} allows {limit}")
    if not 0 <= min(ids) <= max(ids) < len(tokenizer):
        raise ValueError(f"{column} has {min(ids)} to {max(ids)}, no token of {len(tokenizer)}")
    eos, bos, pad = tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id
    is_padded = pad in (ids[0], ids[-1]) and pad not in (eos, bos)
    twice = [x for x in (ids[0], ids[-1]) if [x, x] in (ids[:2], ids[-2:])]
    added = tokenizer.added_tokens_decoder if twice else {}  # some pad with an unnamed one
    if is_padded or any(x in (eos, bos, pad) or x in added and added[x].special for x in twice):
        raise ValueError("the tokens begin or end in padding, or with BOS twice")
    return ids


def hold_out(name: str, rows: Dataset) -> Parts:
    """Split rows into `train` and `validation`: those with the lowest hashes in the column `key`,
    at most 5%. Equal ones stay together. Raise Problem if the lowest hash has more rows."""
    keys = rows.with_format("numpy")["key"][:]
    first = np.sort(keys)[min(max(1, len(keys) // 20), len(keys) - 1)]
    if first == keys.min():
        raise Problem(f"{name} has too few different rows to hold some out. Pass --val-dataset.")
    parts = {"train": keys >= first, "validation": keys < first}
    return {split: rows.select(np.flatnonzero(mask)) for split, mask in parts.items()}


def sample(rows: Dataset, limit: int) -> Dataset:
    """Return `limit` random rows (0: all), the same in every run."""
    number = min(limit or len(rows), len(rows))
    return rows.select(sorted(random.Random(0).sample(range(len(rows)), number)))


def fingerprint(samples: Any) -> str:
    """Return the length of a data set and a CRC of at most 256 of its samples, as text."""
    some = [samples[i] for i in range(0, len(samples), len(samples) // 256 + 1)]
    text = json.dumps(some, default=lambda x: getattr(x, "tolist", x.__repr__)())
    return f"{len(samples):,} samples, crc {zlib.crc32(text.encode()):08x}"


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Return a digest of a tokenizer's vocabulary and rules, and of the tokens of a text."""
    ids = tokenizer(text=PROBE, text_target=PROBE, verbose=False)  # resets truncation and padding
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else ""
    words = sorted(tokenizer.get_vocab().items())
    return digest(rules, words, tokenizer.special_tokens_map, sorted(ids.items()))


def shorten(text: str) -> str:
    """Return a text on one line, cut to 300 characters."""
    return " ".join(text.split())[:300]


def cache_key(function: Callable, *parts: object) -> str:
    """Return a digest of `parts`, of this file, and of the file that defines `function`."""
    files = Path(__file__), Path(inspect.getsourcefile(function))
    return digest(parts, *(file.read_bytes() for file in files))


def digest(*parts: object) -> str:
    """Return a hash of the repr of `parts`."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
