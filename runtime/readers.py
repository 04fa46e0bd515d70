"""Read files and data sets as rows, and map rows to samples, for any model and task.

`datasets` caches the results: let one process per node load first.
"""

import ast
import contextlib
import csv
import dataclasses
import gc
import gzip
import hashlib
import inspect
import itertools
import json
import os
import re
import sys
import sysconfig
import warnings
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from glob import escape, glob
from pathlib import Path
from typing import IO, Any

import datasets
import numpy as np
import pyarrow.parquet
from datasets import Dataset, Features, List, ReadInstruction, Value, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from .ranks import say

PROBLEM = "problem of the row"  # a column of CSV files
BEFORE = "text before"  # a column of text files: the end of the previous piece
IS_LAST = "is last piece"  # a column of text files
EXTRA = (PROBLEM, BEFORE, IS_LAST)
PIECE = 1 << 14  # characters of a text file that make a row
# Where a text file is cut: before a space, or else at a line break.
CUTS = [re.compile(r"[^\W\d_](?= )"), re.compile(r"[^\W\d_](?=\s)|(?<=\S)\n(?=\S)")]
LINE = "json line"  # the only column of a JSON file: its lines, which `parse` reads
SUFFIXES = {".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt"}
LARGE = 50_000  # rows above which several processes map them
# Names of columns, the likeliest first.
PROMPTS = "prompt question instruction query problem input user human document article text source"
ANSWERS = "completion response answer output solution assistant summary highlights headline target"
PROMPTS, ANSWERS = PROMPTS.split(), ANSWERS.split()
PROBE = "  Two  Words, a Ünïcode dash – and\n\ta line break 1234"
EXCLUDED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it raises the errors that it logs
if not sys.stderr.isatty() or int(os.environ.get("RANK", 0)):
    datasets.disable_progress_bars()


def find_paths(spec: str) -> list[Path]:
    """Return the paths of one --dataset argument: a file, a directory, or the files of a glob."""
    path = Path(spec).expanduser()
    names = [path] if path.exists() else sorted(glob(str(path), recursive=True))
    return list(map(Path, names))


def split_spec(spec: str, built_in: Sequence[str]) -> tuple[str, str | None]:
    """Return the name in a --dataset argument, and the split after its first colon or None."""
    if spec in built_in or find_paths(spec):
        return spec, None
    name, _, split = spec.partition(":")
    return name, split or None


def read(name: str, config: str | None) -> dict[str, Dataset]:
    """Return rows by split, of files (train), a `save_to_disk` directory or a hub data set."""
    files = find_paths(name)
    if not files and (kind_of(Path(name)) in SUFFIXES or name.count("/") > 1):
        raise ValueError(f"--dataset {name} does not exist. Correct the path.")
    try:
        if not files:
            return datasets.load_dataset(name, config)
        if files[0].is_dir():
            parts = datasets.load_from_disk(str(files[0]))
            return parts if isinstance(parts, dict) else {"train": parts}
        parts = [read_file(path) for path in files]
        if any(part.features != parts[0].features for part in parts):  # optional fields differ
            parts = [part if LINE in part.column_names else as_lines(part) for part in parts]
        return {"train": concatenate_datasets(parts)}
    except Exception as error:  # pandas, pyarrow, the hub and datasets each raise their own types
        cause = error.__cause__ or error
        advice = "Pass text, CSV, JSONL or Parquet, or a directory written by save_to_disk."
        if not files:
            advice = "It is not a file. Correct the name, or set HF_TOKEN if it is private."
        elif isinstance(cause, UnicodeError):
            advice = "Convert it to UTF-8, or pass CSV, JSONL or Parquet."
        elif isinstance(cause, csv.Error):
            advice = "Correct it."
        elif isinstance(cause, (gzip.BadGzipFile, EOFError)):
            advice = "Compress it again."
        reason = shorten(str(cause)).rstrip(".")
        raise ValueError(f"--dataset {name} cannot be read: {reason}. {advice}") from error


def kind_of(path: Path) -> str:
    """Return the suffix of a file, without .gz."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def open_text(path: Path) -> IO[str]:
    """Open a text file, which may be compressed, with its line breaks as they are."""
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    return opener(path, "rt", encoding="utf-8-sig", newline="")


def read_file(path: Path) -> Dataset:
    """Return the rows of a file, for JSON its unparsed lines."""
    kind = kind_of(path)
    options: dict[str, Any] = {"data_files": escape(str(path)), "split": "train"}
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty")
    if path.name.lower().endswith(".parquet.gz"):
        return Dataset(pyarrow.parquet.read_table(gzip.open(path)))
    if kind == ".parquet":
        return datasets.load_dataset("parquet", **options)
    if kind in (".csv", ".tsv"):
        columns = dict.fromkeys((*csv_header(path), PROBLEM), Value("string"))
        return from_generator(csv_rows, columns, path)
    if kind not in (".jsonl", ".ndjson", ".json"):
        columns = {"text": Value("string"), BEFORE: Value("string"), IS_LAST: Value("bool")}
        return from_generator(text_pieces, columns, path)
    with open_text(path) as file:
        if kind == ".json" and file.read(1 << 20).lstrip().startswith("["):
            return from_generator(list_rows, {LINE: Value("string")}, path)
    rows = datasets.load_dataset("text", encoding="utf-8-sig", **options)
    return rows.rename_column("text", LINE)


def as_lines(rows: Dataset) -> Dataset:
    """Return rows as lines of JSON, in which rows with other fields fit too. Values that JSON does
    not have become null."""

    def to_lines(columns: dict[str, list]) -> dict[str, list[str]]:
        batch = (dict(zip(columns, x, strict=True)) for x in zip(*columns.values(), strict=True))
        return {LINE: [json.dumps(without_none(row), default=lambda _: None) for row in batch]}

    rows = select(rows, rows.column_names)
    features = Features({LINE: Value("string")})
    return rows.map(to_lines, batched=True, remove_columns=rows.column_names, features=features)


def csv_reader(file: IO[str], path: Path) -> Any:
    """Return a reader of a CSV or TSV file."""
    csv.field_size_limit(2**31 - 1)
    return csv.reader(file, delimiter="\t" if kind_of(path) == ".tsv" else ",", strict=True)


def csv_header(path: Path) -> list[str]:
    """Return the column names of a CSV file; raise csv.Error if it has one twice."""
    with open_text(path) as file:
        header = next(csv_reader(file, path))
    for name in header:
        if header.count(name) > 1:
            raise csv.Error(f"{path} has the column {name} twice")
    return header


def csv_rows(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a CSV or TSV file. PROBLEM says what is wrong with one, and csv.Error is
    raised where the rest cannot be read."""
    with open_text(path) as file:
        reader = csv_reader(file, path)
        header = next(reader)
        try:
            for fields in filter(None, reader):
                problem = None
                if len(fields) != len(header):
                    problem = f"line {reader.line_num}: {len(fields)} fields, not {len(header)}"
                yield dict(itertools.zip_longest(header, fields[: len(header)])) | {
                    PROBLEM: problem
                }
        except csv.Error as error:
            raise csv.Error(f"{path}, line {reader.line_num}: {error}") from None


def list_rows(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a JSON file that contains a list, each as a line of JSON."""
    with open_text(path) as file:
        rows = json.load(file)
    for row in rows:
        yield {LINE: json.dumps(row)}  # in ASCII: half of a surrogate pair is not UTF-8


def text_pieces(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a text file in pieces that have the same tokens as in the whole text, with the end of
    the piece before each: some tokenizers put a space before the first word of a text.

    Tokens do not span a letter and the space after it, nor a single line break and the next word.
    The line breaks at the end are left out.
    """
    pending, before = "", ""
    with open_text(path) as file:
        while block := file.read(PIECE):
            pending += block
            start = max(0, len(pending) - PIECE)
            kind = CUTS[len(pending) > 16 * PIECE]
            cut = max((match.end() for match in kind.finditer(pending, start)), default=0)
            if not cut and len(pending) > 64 * PIECE:
                cut = len(pending) - 1
            if cut and pending[cut:].strip():
                piece, pending = pending[:cut], pending[cut:]
                yield {"text": piece, BEFORE: before, IS_LAST: False}
                before = piece[-16:]
    yield {"text": pending.rstrip("\r\n"), BEFORE: before, IS_LAST: True}


def docstring_rows() -> Dataset:
    """Return the docstrings of Python's standard library as rows: text, headline, module."""
    columns = dict.fromkeys(("text", "headline", "module"), Value("string"))
    with warnings.catch_warnings(action="ignore"):  # about escapes in the library's own strings
        return from_generator(docstrings, columns, Path(sysconfig.get_path("stdlib")))


def docstrings(path: Path) -> Iterator[dict[str, str]]:
    """Yield text (the body), headline (the first line) and module of the docstrings in `path`."""
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


def from_generator(generate: Callable, features: dict | None, path: Path) -> Dataset:
    """Return the rows that `generate(path)` yields, cached by path, modification time and code."""
    key = fingerprint(generate, str(path.resolve()), path.stat().st_mtime_ns)
    columns = Features(features) if features else None  # those of a CSV file are in its header
    return Dataset.from_generator(generate, columns, gen_kwargs={"path": path}, fingerprint=key)


def pick(name: str, parts: dict[str, Dataset], split: str | None) -> dict[str, Dataset]:
    """Return one split or slice, such as train[:1000], as {"train": rows}; if None, all `parts`."""
    if split is None and "train" in parts:
        return parts
    sizes = {key: len(rows) for key, rows in parts.items()}
    try:
        pieces = ReadInstruction.from_spec(split or "train").to_absolute(sizes)
    except (ValueError, AssertionError) as error:
        advice = f"Pass {name}:SPLIT with one of {', '.join(parts)}."
        raise ValueError(f"--dataset {name} has no split {split or 'train'}. {advice}") from error
    chosen = [parts[x.splitname].select(range(sizes[x.splitname])[x.from_ : x.to]) for x in pieces]
    return {"train": concatenate_datasets(chosen)}


def first_object(rows: Dataset) -> dict[str, Any] | None:
    """Return the first JSON object of the rows, None if there is none in the first 1,000 lines."""
    for line in rows[:1000][LINE]:
        with contextlib.suppress(ValueError):
            if isinstance(value := json.loads(line), dict):
                return value
    return None


def column_names(name: str, rows: Dataset) -> list[str]:
    """Return the column names of a data set; for JSON lines, the keys of the first object."""
    if LINE not in rows.column_names:
        return [column for column in rows.column_names if column not in EXTRA]
    value = first_object(rows)
    if value is None:
        raise ValueError(f"--dataset {name} has no JSON objects. Write one on each line.")
    return list(value)


def text_columns(rows: Dataset) -> list[str]:
    """Return the names of the columns that contain text, in JSON lines those of the first row."""
    if LINE in rows.column_names:
        return [key for key, x in (first_object(rows) or {}).items() if isinstance(x, str)]
    features = rows.features.items()
    return [x for x, kind in features if getattr(kind, "dtype", "") == "string" and x not in EXTRA]


def guess_columns(texts: Sequence[str]) -> list[str]:
    """Return the columns that most likely have the prompts and the answers, or the texts and their
    summaries: the first of PROMPTS and of ANSWERS among `texts`, or else the first columns."""
    texts = [name for name in texts if not name.endswith("id")]
    prompts = [*(x for x in PROMPTS if x in texts), *texts]
    answers = [x for x in (*(x for x in ANSWERS if x in texts), *texts) if x != prompts[0]]
    return prompts[:1] + answers[:1]


def lacks(name: str, missing: Sequence[str], columns: Sequence[str]) -> str:
    """Return the first part of an error message about missing columns."""
    return (f"--dataset {name} has no column {' or '.join(missing)}. Its columns are: "
            f"{', '.join(columns)}.")  # fmt: skip


def select(rows: Dataset, names: Iterable[str | None]) -> Dataset:
    """Return the rows with only the columns `names`, as far as they exist, and JSON lines. Images
    and audio in them are not decoded."""
    rows = rows.select_columns([x for x in rows.column_names if x in {LINE, *EXTRA, *names}])
    for name, kind in rows.features.items():
        inner = kind.feature if isinstance(kind, List) else kind
        if hasattr(inner, "decode"):
            inner = dataclasses.replace(inner, decode=False)
            rows = rows.cast_column(name, List(inner) if isinstance(kind, List) else inner)
    return rows


def parse(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as in its file; raise ValueError if its line is not a JSON object."""
    if LINE not in row:
        if row.get(PROBLEM):
            raise ValueError(row[PROBLEM])
        return without_none(row)
    value = json.loads(row[LINE])
    if "\\u" in row[LINE]:
        json.dumps(value, ensure_ascii=False).encode()  # raises for half of a surrogate pair
    if not isinstance(value, dict):
        raise ValueError("the line is not a JSON object")
    return value


def without_none(value: Any) -> Any:
    """Return `value` without members that are None: Arrow adds missing members to objects."""
    if isinstance(value, dict):
        return {key: without_none(part) for key, part in value.items() if part is not None}
    return [without_none(part) for part in value] if isinstance(value, list) else value


def map_rows(
    name: str, rows: Dataset, function: Callable, features: dict, args: Namespace, *key: object
) -> Dataset:
    """Return the samples, dicts of `features`, that `function` makes of rows, cached by `key`.

    `function` takes a list of rows and returns a list of samples for each. If it raises ValueError
    for a row, the error names the row, or --bad-rows skip leaves the row out.
    """

    def convert(batch: list[dict], numbers: list[int]) -> list[list[dict]]:
        try:
            return function([parse(row) for row in batch])
        except (ValueError, TypeError, AttributeError) as error:
            if len(batch) > 1:
                return [convert([row], [i])[0] for row, i in zip(batch, numbers, strict=True)]
            problem = f"{name}, row {numbers[0]}: {shorten(getattr(error, 'msg', str(error)))}"
            if args.bad_rows == "fail":
                advice = "Correct it, or pass --bad-rows skip."
                raise ValueError(f"{problem}. {advice}") from None
            say(f"Skipped {problem}")
            return [[]]

    def convert_columns(columns: dict[str, list], indices: list[int]) -> dict[str, list]:
        batch = [dict(zip(columns, x, strict=True)) for x in zip(*columns.values(), strict=True)]
        kept = [i for i, row in enumerate(batch) if row.get(LINE, "x").strip()]  # no blank lines
        groups = convert([batch[i] for i in kept], [indices[i] + 1 for i in kept]) if kept else []
        return {x: [sample[x] for group in groups for sample in group] for x in features}

    gc.collect()  # finalizing garbage may crash a forked process
    # The hash of `datasets` depends on a tokenizer's state, and not on a module's code.
    key = fingerprint(function, rows._fingerprint, name, args.bad_rows, sorted(features), *key)
    mapped = rows.with_format(None).map(
        convert_columns, batched=True, batch_size=100, with_indices=True, new_fingerprint=key,
        remove_columns=rows.column_names, features=Features(features),
        num_proc=len(os.sched_getaffinity(0)) if len(rows) > LARGE else None,
    )  # fmt: skip
    if len(mapped) == 0:
        raise ValueError(f"--dataset {name} has no usable rows among {len(rows):,}. Correct it.")
    return mapped


def held_out(name: str, keys: np.ndarray, usual: np.ndarray) -> np.ndarray:
    """Return a mask of about 5% of the rows with these keys, never more than 10%. Rows with equal
    keys stay together. The mask is `usual` unless that has too few or too many rows.

    Raise ValueError if each key has too many rows.
    """
    limit = max(1, len(keys) // 20)
    if limit / 2 <= usual.sum() <= 2 * limit and not usual.all():
        return usual
    distinct, counts = np.unique(keys, return_counts=True)  # sorted hashes: a random order
    fits = counts <= 2 * limit
    if not fits.all():
        say(f"{name}: one prompt has {counts.max():,} of {len(keys):,} rows, which all train.")
    count = np.searchsorted(np.cumsum(counts[fits]), limit, side="right")
    mask = np.isin(keys, distinct[fits][: max(1, count)])
    if not mask.any() or mask.all():
        raise ValueError(f"--dataset {name} has too few different rows, so none can be held out "
                         "for validation. Pass --val-dataset.")  # fmt: skip
    return mask


def join(parts: list[Dataset]) -> Dataset:
    """Return the rows of all parts, stored in this order and read as NumPy arrays."""
    return concatenate_datasets(parts).flatten_indices().with_format("numpy")


def check_embedded(samples: Any, count: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError, with its text, if a token in a data set of tokens has no row in the model,
    which has `count` rows. Some tokenizers have special tokens without one."""
    rows = getattr(samples, "dataset", samples)  # from which packs are made
    if len(tokenizer) <= count or not isinstance(rows, Dataset):
        return
    for column in {"input_ids", "labels"} & {*rows.column_names}:
        for batch in rows.with_format("arrow").select_columns(column).iter(10_000):
            for ids in batch[column].to_pylist():
                if ids and max(ids) >= count:
                    text = shorten(tokenizer.decode([x for x in ids if x >= 0]))
                    token = tokenizer.convert_ids_to_tokens(max(ids))
                    raise ValueError(
                        f"The data have the token {token} ({max(ids):,}), but the model has "
                        f"{count:,} rows. It is in: {text}"
                    )


def content_sum(rows: Dataset, crc: int = 0) -> int:
    """Return the CRC-32 of all rows in order, starting from `crc`, however they are stored."""
    for table in rows.select_columns(sorted(rows.column_names)).with_format("arrow").iter(10_000):
        for batch in table.replace_schema_metadata().combine_chunks().to_batches():
            crc = zlib.crc32(batch.serialize(), crc)
    return crc


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
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


def fingerprint(function: Callable, *parts: object) -> str:
    """Return a digest of `parts`, of this file, and of the file that defines `function`."""
    files = Path(__file__), Path(inspect.getsourcefile(function))
    return digest(parts, *(file.read_bytes() for file in files))


def digest(*parts: object) -> str:
    """Return a hash of the repr of `parts`."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
