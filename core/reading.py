"""Rows of files and hub data sets, and samples made of them.

Rows of text, CSV and JSON files are stored as lines of JSON, because Arrow would change values.
`datasets` caches the results: let one process per node load first. Any rank may call these.
"""

import ast
import contextlib
import csv
import dataclasses
import gc
import gzip
import hashlib
import inspect
import json
import os
import random
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from glob import escape, glob
from itertools import chain, zip_longest
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

import datasets
import numpy as np
from datasets import Dataset, Features, List, ReadInstruction, Value, concatenate_datasets
from huggingface_hub import snapshot_download
from transformers import PreTrainedTokenizerBase as Tokenizer

from .ranks import Problem, print0

Parts = dict[str, Dataset]  # rows or samples by split: train, and maybe validation

LINE = "json line"  # the only column of files: a row as JSON, which `parse` reads
PROBLEM = "problem of the row"  # a key of rows of CSV files that cannot be used
TEXT = Value("string")
LARGE = 50_000  # rows above which several processes map them
MASKS = ("attention_mask", "loss_mask", "completion_mask", "assistant_masks")  # of tokenized rows
EXCLUDED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
PROBE = "  Two  Words, a Ünïcode dash – and\n\ta line break 1234"


def load_sets(
    args: Any, load_parts: Callable, hold_out: Callable, draw: Callable, evaluate_only: bool = False
) -> tuple[Dataset | None, Parts]:
    """Return the training set, None with `evaluate_only`, and the validation sets by name.

    `args` has `dataset`, `val_dataset`, `num_train_samples` and `num_val_samples`.
    `load_parts(name)` returns rows by split, `hold_out(name, rows)` splits those that have no
    validation rows, and `draw(name, split, rows, limit)` makes at most `limit` samples (0: all).
    """
    train, validation = [], {}
    for name in args.val_dataset:
        parts = load_parts(name)
        validation[name] = parts.get("validation", parts["train"])
    for name in () if evaluate_only and validation else args.dataset:
        parts = load_parts(name)
        if "validation" not in parts and not args.val_dataset:
            parts = hold_out(name, parts["train"])
        if not args.val_dataset:
            validation[name] = parts["validation"]
        if not evaluate_only:
            train.append(draw(name, "train", parts["train"], args.num_train_samples))
    for name, rows in validation.items():
        validation[name] = join([draw(name, "validation", rows, args.num_val_samples)])
    return join(train) if train else None, validation


def read(spec: str, config: str | None = None, text_rows: Callable | None = None) -> Parts:
    """Return rows by split: of files (train) in a path, glob or folder of text files, of a
    directory of `save_to_disk`, or of a hub data set; see `pick` for NAME:SPLIT.

    `text_rows` yields the rows of an open text file. Raise Problem if the data cannot be read.
    """
    files = _find_files(spec)
    name, split = (spec, "") if files else spec.partition(":")[::2]
    files = files or _find_files(name)
    path, parts = Path(name), []
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it raises the errors that it logs
    try:
        if not files:
            parts = _read_hub(name, config)
        elif len(files) == 1 and files[0].is_dir():
            parts = datasets.load_from_disk(str(files[0]))
        else:
            for path in files:
                parts.append(_read_file(path, text_rows))
            parts = concatenate_datasets(parts)
    except Exception as error:  # pandas, pyarrow, the hub and datasets each raise their own types
        problem = "cannot be read" if files else "is not a file, and cannot be read from the hub"
        reason = shorten(str(error.__cause__ or error)).rstrip(".")
        raise Problem(f"Data set {path} {problem}: {reason}.") from error
    return pick(name, parts if isinstance(parts, dict) else {"train": parts}, split)


def pick(name: str, parts: Parts, split: str) -> Parts:
    """Return one split or slice, such as train[:1000], as {"train": rows}; if "", train and
    validation. Raise Problem if there is no such split."""
    if not split and "train" in parts:
        return {key: parts[key] for key in ("train", "validation") if key in parts}
    sizes = {key: len(rows) for key, rows in parts.items()}
    try:
        pieces = ReadInstruction.from_spec(split or "train").to_absolute(sizes)
    except (ValueError, AssertionError) as error:
        raise Problem(f"Data set {name}: {error} Pass {name}:SPLIT.") from error
    chosen = [parts[x.splitname].select(range(x.from_, x.to)) for x in pieces]
    return {"train": concatenate_datasets(chosen)}


def _find_files(spec: str) -> list[Path]:
    path = Path(spec).expanduser()
    if path.is_dir() and not any(path.glob("dataset_*.json")):  # which save_to_disk writes
        return sorted(x for x in path.glob("[!.]*") if _suffix(x) == ".txt") or [path]
    return [path] if path.exists() else [Path(x) for x in sorted(glob(str(path), recursive=True))]


def _suffix(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _read_hub(name: str, config: str | None) -> Parts:
    try:
        return datasets.load_dataset(name, config)
    except Exception:
        with contextlib.suppress(Exception):  # maybe `hf download` has cached the files
            path = snapshot_download(name, repo_type="dataset", local_files_only=True)
            print0(f"{name}: the hub cannot be read, so the rows are those of all files in {path}")
            return datasets.load_dataset(path, config)
        raise


def _read_file(path: Path, text_rows: Callable | None) -> Dataset:
    stat, suffix = path.stat(), _suffix(path)
    key = digest(str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    if suffix == ".parquet":  # a batch size, because the first part of a file may have no rows
        options = {"data_files": escape(str(path)), "split": "train", "batch_size": 1000}
        return datasets.load_dataset("parquet", key, **options)
    readers = dict.fromkeys((".json", ".jsonl", ".ndjson"), _json_rows)
    readers |= {".csv": _csv_rows, ".tsv": _csv_rows}
    reader = readers.get(suffix, text_rows)
    if not reader:
        raise ValueError("it is not a CSV, TSV, JSON, JSONL or Parquet file")
    return Dataset.from_generator(
        _lines, Features({LINE: TEXT}), gen_kwargs={"path": path, "reader": reader},
        fingerprint=cache_key(reader, key),
    )  # fmt: skip


def _lines(path: Path, reader: Callable) -> Iterator[dict[str, str]]:
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    line = None
    with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
        for row in reader(file):  # in ASCII, because half of a surrogate pair is not UTF-8
            line = row if isinstance(row, str) else json.dumps(row)
            yield {LINE: line}
    if line is None:
        raise ValueError("it has no rows")


def _json_rows(file: IO[str]) -> Iterator[Any]:
    is_list = file.read(1 << 20).lstrip().startswith("[")
    file.seek(0)
    yield from json.load(file) if is_list else filter(None, map(str.strip, file))


def _csv_rows(file: IO[str]) -> Iterator[dict[str, str | None]]:
    csv.field_size_limit(2**31 - 1)
    header = file.readline()
    delimiter = "\t" if ".tsv" in file.name.lower() else max(",;\t|", key=header.count)
    file.seek(0)
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    rows = filter(None, reader)
    try:
        header = next(rows, [])
        if len({*header}) < len(header):
            raise csv.Error(f"the column {max(header, key=header.count)} is there twice")
        for fields in rows:
            row = dict(zip_longest(header, fields[: len(header)]))
            if len(fields) != len(header):
                row[PROBLEM] = f"line {reader.line_num}: {len(fields)} fields, not {len(header)}"
            yield row
    except csv.Error as error:
        raise csv.Error(f"line {reader.line_num}: {error}") from None


def docstring_rows() -> Dataset:
    """Return the docstrings of Python's standard library as rows: text (the body), headline (the
    first line), module."""
    path = Path(sysconfig.get_path("stdlib"))
    features = Features({"text": TEXT, "headline": TEXT, "module": TEXT})
    key = cache_key(_docstrings, str(path))
    return Dataset.from_generator(_docstrings, features, gen_kwargs={"path": path}, fingerprint=key)


def _docstrings(path: Path) -> Iterator[dict[str, str]]:
    seen = set()
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(set(folders) - EXCLUDED_FOLDERS)
        for file in sorted(Path(folder, name) for name in files if name.endswith(".py")):
            try:
                tree = ast.parse(file.read_bytes())
            except (SyntaxError, ValueError, OSError):
                continue
            for node in ast.walk(tree):
                text = ast.get_docstring(node) if isinstance(node, documented) else None
                headline, _, body = (text or "").partition("\n\n")
                body = body.strip()
                # A first line that continues on the second is not a summary.
                if "\n" in headline or len(headline) < 10 or len(body) < 20 or body in seen:
                    continue
                seen.add(body)
                module = file.relative_to(path).as_posix()
                yield {"text": body, "headline": headline, "module": module}


def first_row(name: str, rows: Dataset) -> dict[str, Any]:
    """Return the first row, whose keys are the columns, without decoding images. Raise Problem if
    there are no rows, or no JSON objects among the first 1,000."""
    for row in rows.with_format("arrow")[:1000].to_pylist():
        with contextlib.suppress(ValueError):
            row = json.loads(row[LINE]) if LINE in row else row
            if isinstance(row, dict):
                return row
    raise Problem(f"Data set {name} has no JSON objects or rows. Write one on each line.")


def usual_columns(name: str, columns: Iterable[str], table: Iterable[tuple]) -> tuple | None:
    """Return, and print, the first line of the table whose columns are all there, in upper or lower
    case; None if there is none."""
    by_lower = {column.lower(): column for column in columns}
    for usual in table:
        if by_lower.keys() >= {*usual}:
            chosen = tuple(by_lower[x] for x in usual)
            others = ", ".join(x for x in columns if x not in chosen)
            print0(f"{name}: uses {' and '.join(chosen)}" + (f", not {others}" if others else ""))
            return chosen
    return None


def no_columns(name: str, missing: Iterable[str], columns: Iterable[str], advice: str) -> Problem:
    """Return the error that the columns `missing` are not among `columns`."""
    return Problem(f"Data set {name} has no column {' or '.join(missing)}. Its columns are: "
                   f"{shorten(', '.join(columns))}. {advice}")  # fmt: skip


def select(rows: Dataset, names: Iterable[str | None]) -> Dataset:
    """Return the rows with only the columns `names`, as far as they exist, masks of tokens, and
    lines of JSON. Images and audio are not decoded."""
    rows = rows.select_columns([x for x in rows.column_names if x in {LINE, *MASKS, *names}])
    for name, kind in rows.features.items():
        inner = kind.feature if isinstance(kind, List) else kind
        if hasattr(inner, "decode") and not isinstance(inner, datasets.Json):
            inner = dataclasses.replace(inner, decode=False)
            rows = rows.cast_column(name, List(inner) if isinstance(kind, List) else inner)
    return rows


def parse(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as in its file, without what Arrow added to it; raise ValueError if it is not a
    JSON object or does not fit its CSV file."""
    if LINE not in row:
        return _without_none(row)
    value = json.loads(row[LINE])
    if "\\u" in row[LINE]:
        json.dumps(value, ensure_ascii=False).encode()  # raises for half of a surrogate pair
    if not isinstance(value, dict):
        raise ValueError("the line is not a JSON object")
    if PROBLEM in value:
        raise ValueError(value[PROBLEM])
    return value


def _without_none(value: Any) -> Any:
    """Return `value` without members that are None, which Arrow adds to objects, and with decimals,
    such as weights, as floats."""
    if isinstance(value, dict):
        return {key: _without_none(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_without_none(part) for part in value]
    return float(value) if isinstance(value, Decimal) else value


def map_rows(
    name: str, rows: Dataset, function: Callable, features: dict, bad_rows: str, *key: object
) -> Dataset:
    """Return the samples, dicts of `features`, that `function` makes of rows, cached by `key` and
    the code of its file.

    It takes a list of rows and returns a list of samples for each. If it raises ValueError for a
    row, raise Problem with the row's number or, if `bad_rows` is "skip", leave the row out.
    """

    def convert(batch: list[dict], indices: list[int]) -> list[list[dict]]:
        try:
            return function([parse(row) for row in batch])
        except Problem as error:  # of the data set, not of a row
            raise Problem(f"{name}: {error}") from None
        except (ValueError, TypeError, AttributeError) as error:
            if len(batch) > 1:
                return [convert([row], [i])[0] for row, i in zip(batch, indices, strict=True)]
            problem = f"{name}, row {indices[0] + 1}: {shorten(getattr(error, 'msg', str(error)))}"
            if bad_rows == "fail":
                raise Problem(f"{problem}. Correct it, or pass --bad-rows skip.") from None
            print0(f"Skipped {problem}")
            return [[]]

    def convert_columns(columns: dict[str, list], indices: list[int]) -> dict[str, list]:
        by_row = zip(*columns.values(), strict=True)
        batch = [dict(zip(columns, row, strict=True)) for row in by_row]
        samples = list(chain.from_iterable(convert(batch, indices)))
        return {column: list(map(itemgetter(column), samples)) for column in features}

    gc.collect()  # finalizing garbage may crash a forked process
    # The hash of `datasets` depends on a tokenizer's state, and not on a module's code.
    key = cache_key(function, rows._fingerprint, name, bad_rows, sorted(features), *key)
    samples = rows.with_format(None).map(
        convert_columns, batched=True, batch_size=100, with_indices=True, new_fingerprint=key,
        remove_columns=rows.column_names, features=Features(features),
        num_proc=len(os.sched_getaffinity(0)) if len(rows) > LARGE else None,
    )  # fmt: skip
    if len(samples) == 0:
        raise Problem(f"Data set {name} has no usable rows among {len(rows):,}. Correct it.")
    return samples


def token_ids(
    row: dict[str, Any], column: str, flag: str, limit: int, tokenizer: Tokenizer
) -> list[int]:
    """Return the tokens in a column of a row. Raise ValueError unless they are 1 to `limit` ids of
    the tokenizer, and no mask excludes some; with labels only attention_mask counts."""
    for mask in MASKS[:1] if "labels" in row else MASKS:
        if 0 in (row.get(mask) or ()):
            raise ValueError(f"{mask} excludes tokens, and it is not read. Remove them")
    ids = row.get(column)
    if not ids or not isinstance(ids, list) or not all(isinstance(x, int) for x in ids):
        raise ValueError("tokens are empty or not a list of integers")
    if len(ids) > limit:
        raise ValueError(f"{len(ids):,} tokens, but {flag} allows {limit:,}")
    eos = tokenizer.eos_token_id
    if ids[-1] == tokenizer.pad_token_id != eos or ids[-2:] == [eos, eos]:
        raise ValueError("the tokens end in padding")
    for token in (min(ids), max(ids)):
        if not 0 <= token < len(tokenizer):
            raise ValueError(f"token {token} is not one of the tokenizer's {len(tokenizer):,}")
    return ids


def held_out(name: str, keys: np.ndarray, usual: np.ndarray) -> np.ndarray:
    """Return a mask of about 5% of the rows with these keys, never more than 10%: `usual`, unless
    that has too few or too many rows. Rows with equal keys stay together.

    Raise Problem if each key has too many rows.
    """
    limit = max(1, len(keys) // 20)
    if limit / 2 <= usual.sum() <= 2 * limit and not usual.all():
        return usual
    distinct, counts = np.unique(keys, return_counts=True)  # sorted hashes: a random order
    fits = counts <= 2 * limit
    count = np.searchsorted(np.cumsum(counts[fits]), limit, side="right")
    mask = np.isin(keys, distinct[fits][: max(1, count)])
    if not mask.any() or mask.all():
        raise Problem(f"Data set {name} has too few different rows, so none can be held out for "
                      "validation. Pass --val-dataset.")  # fmt: skip
    return mask


def split_by(is_held_out: np.ndarray, rows: Dataset) -> Parts:
    """Return the rows by split, given a mask of those for validation."""
    masks = {"train": ~is_held_out, "validation": is_held_out}
    return {split: rows.select(np.flatnonzero(mask)) for split, mask in masks.items()}


def sample(rows: Dataset, limit: int) -> Dataset:
    """Return `limit` random rows (0: all), the same in every run."""
    number = min(limit or len(rows), len(rows))
    return rows.select(sorted(random.Random(0).sample(range(len(rows)), number)))


def join(parts: list[Dataset]) -> Dataset:
    """Return the rows of all parts, stored in this order and read as NumPy arrays."""
    return concatenate_datasets(parts).flatten_indices().with_format("numpy")


def fingerprint(samples: Any) -> str:
    """Return the length of a data set and a CRC of at most 256 of its samples, as text."""
    some = [samples[i] for i in range(0, len(samples), len(samples) // 256 + 1)]
    text = json.dumps(some, default=lambda x: x.tolist() if hasattr(x, "tolist") else repr(x))
    return f"{len(samples):,} samples, crc {zlib.crc32(text.encode()):08x}"


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Return a digest of what determines a tokenizer's output: its rules if it has a fast backend,
    its vocabulary, and the tokens of a probe text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend else {}
    rules |= {"truncation": None, "padding": None}  # state of the last call
    ids = sorted(tokenizer(text=PROBE, text_target=PROBE, verbose=False).items())
    return digest(rules, sorted(tokenizer.get_vocab().items()), tokenizer.special_tokens_map, ids)


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
