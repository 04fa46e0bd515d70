"""Read files and data sets as rows, and map rows to samples. Names no model and no task.

Rows and samples are `datasets.Dataset`s, mapped from the cache of `datasets`. Let one process of a
node load first; the others find its cache.
"""

import ast
import csv
import gc
import hashlib
import inspect
import json
import os
import sys
import sysconfig
import warnings
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from glob import glob
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, ReadInstruction, Value, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from .ranks import say

LINE = "json line"  # the only column of a JSON file: its lines, which `parse` reads
JSON = (".jsonl", ".ndjson", ".json")
KINDS = (*JSON, ".csv", ".tsv", ".parquet", ".txt")
ORIGIN = {"row": Value("int64"), "problem": Value("string")}
LARGE = 50_000  # rows above which several processes map them
PROBE = "  Two  Words, a Ünïcode dash – and\n\ta line break 1234"
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


def find_paths(word: str) -> list[Path]:
    """Return the file or directory, or the files of a glob, that a word names."""
    path = Path(word).expanduser()
    return [path] if path.exists() else [Path(name) for name in sorted(glob(str(path)))]


def split_word(word: str, built_in: Sequence[str]) -> tuple[str, str | None]:
    """Return the name in a word of --dataset, and the split after its first colon, or None."""
    if "://" in word:
        raise ValueError(f"--dataset {word} is a URL. Download the file and pass its path.")
    if word in built_in or find_paths(word):
        return word, None
    name, _, split = word.partition(":")
    return name, split or None


def read(name: str, config: str | None) -> dict[str, Dataset]:
    """Return by split the rows of files, of a `save_to_disk` directory, or of a hub data set.

    Files have the one split train. Raises ValueError if the rows cannot be read.
    """
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs, it also raises
    if not sys.stderr.isatty() or int(os.environ.get("RANK", 0)):
        datasets.disable_progress_bars()
    files = find_paths(name)
    advice = "Files must be UTF-8 text or Parquet; a directory, one written by save_to_disk."
    if not files and (Path(name).suffix.lower() in KINDS or name.count("/") > 1):
        raise ValueError(f"--dataset {name} does not exist. Correct the path.")
    try:
        if not files:
            advice = "It is no file here. Correct the name, or set HF_TOKEN if it is private."
            return datasets.load_dataset(name, config)
        if files[0].is_dir():
            found = datasets.load_from_disk(str(files[0]))
            return found if isinstance(found, dict) else {"train": found}
        return {"train": concatenate_datasets([read_file(path) for path in files])}
    except Exception as error:  # pandas, pyarrow, the hub and datasets each raise their own types
        while error.__cause__ is not None:
            error = error.__cause__
        reason = shorten(str(error) or type(error).__name__).rstrip(".")
        raise ValueError(f"--dataset {name} cannot be read: {reason}. {advice}") from error


def read_file(path: Path) -> Dataset:
    """Return the rows of a file. Those of a JSON file are its lines, unparsed."""
    kind = path.suffix.lower()
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty")
    options = {"data_files": str(path), "split": "train"}
    if kind in (".csv", ".tsv"):
        separator = "\t" if kind == ".tsv" else ","
        columns = dict.fromkeys(csv_header(path, separator), Value("string"))
        options |= {"sep": separator, "features": Features(columns), "keep_default_na": False}
        return datasets.load_dataset("csv", **options)
    if kind == ".parquet":
        return datasets.load_dataset("parquet", **options)
    if kind not in JSON:
        return from_generator(text_lines, {"text": Value("string")}, path)
    with path.open(encoding="utf-8-sig") as file:
        is_list = kind == ".json" and file.read(1 << 20).lstrip().startswith("[")
    if is_list:
        return from_generator(list_rows, {LINE: Value("string")}, path)
    rows = datasets.load_dataset("text", encoding="utf-8-sig", **options)
    return rows.rename_column("text", LINE)


def csv_header(path: Path, separator: str) -> list[str]:
    """Return a CSV file's columns; ValueError names the first line that pandas would misread."""
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader, line = csv.reader(file, delimiter=separator, strict=True), 1
        try:
            header = next(reader, [])
            if not all(header) or len({*header}) < len(header) or ";" in "".join(header):
                raise csv.Error(f"the header {header} needs distinct names between commas")
            for row in reader:
                if len(row) > len(header):
                    raise csv.Error(f"{len(row)} fields for {len(header)} columns")
                line = reader.line_num + 1
        except csv.Error as error:
            raise ValueError(f"{path}, line {line}: {error}") from None
    return header


def list_rows(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a JSON file that holds a list, each as a line of JSON."""
    for row in json.loads(path.read_text(encoding="utf-8-sig")):
        yield {LINE: json.dumps(row, ensure_ascii=False)}


def text_lines(path: Path) -> Iterator[dict[str, str]]:
    """Yield a text file's lines with their ends; the last one has none, so that EOS follows it."""
    held: list[str] = []  # the last line with text, and the blank ones after it
    with path.open(encoding="utf-8-sig") as file:
        for line in file:
            if line != "\n":
                yield from ({"text": text} for text in held)
                held = []
            held.append(line)
    yield {"text": held[0].rstrip("\n")}


def docstring_rows() -> Dataset:
    """Return the docstrings of Python's library, in columns text, headline and module."""
    features = dict.fromkeys(("text", "headline", "module"), Value("string"))
    return from_generator(docstrings, features, Path(sysconfig.get_path("stdlib")))


def docstrings(path: Path) -> Iterator[dict[str, str]]:
    """Yield text (the body), headline (the first line) and module of a library's docstrings."""
    seen = set()
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(set(folders) - NOT_LIBRARY)
        for file in sorted(Path(folder, name) for name in files if name.endswith(".py")):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # about escapes in the library's own strings
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


def from_generator(generate: Callable, features: dict, path: Path) -> Dataset:
    """Return the cached rows that `generate(path)` yields; path, date and our code are the key."""
    key = fingerprint(generate, str(path.resolve()), path.stat().st_mtime_ns)
    options = {"features": Features(features), "gen_kwargs": {"path": path}}
    return Dataset.from_generator(generate, fingerprint=key, **options)


def pick(name: str, parts: dict[str, Dataset], split: str | None) -> dict[str, Dataset]:
    """Return the rows of `split`, such as train[:1000], as train; without one all `parts`.

    Raises ValueError if the split, or train, is not in `parts`.
    """
    if split is None and "train" in parts:
        return parts
    sizes = {key: len(rows) for key, rows in parts.items()}
    try:
        pieces = ReadInstruction.from_spec(split or "train").to_absolute(sizes)
    except (ValueError, AssertionError) as error:
        known = ", ".join(parts)
        raise ValueError(f"--dataset {name} has no split {split or 'train'}. Pass {name}:SPLIT with "
                         f"one of {known}.") from error  # fmt: skip
    chosen = [parts[x.splitname].select(range(sizes[x.splitname])[x.from_ : x.to]) for x in pieces]
    return {"train": concatenate_datasets(chosen)}


def column_names(rows: Dataset) -> list[str]:
    """Return the columns of rows; of JSON lines, the keys of the first object."""
    for line in rows[:1000].get(LINE, []):
        try:
            return list(parse({LINE: line}))
        except ValueError:
            continue
    return rows.column_names


def parse(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as its file has it; ValueError if its line is not a JSON object."""
    if LINE not in row:
        return without_none(row)
    try:
        found = json.loads(row[LINE])
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def without_none(value: Any) -> Any:
    """Return `value` without members that are None: Arrow gives all objects the same members."""
    if isinstance(value, dict):
        return {key: without_none(part) for key, part in value.items() if part is not None}
    return [without_none(part) for part in value] if isinstance(value, list) else value


def place(name: str, number: int) -> str:
    """Return the file and row, from 1, in which row `number` of data set `name` is."""
    for path in find_paths(name):
        count = 0 if path.is_dir() else len(read_file(path))
        if number <= count:
            return f"{path}, row {number}"  # of JSONL and text files its line
        number -= count
    return f"{name}, row {number}"


def samples(
    name: str, rows: Dataset, function: Callable, features: dict, args: Namespace, *key: object
) -> Dataset:
    """Return the samples that `function` makes of rows, cached under its code and `key`.

    `function` takes some rows and returns a list of samples, dicts of `features`, for each. It
    raises ValueError if a row cannot be used: an error that names file and row, unless --bad-rows
    skip leaves the row out.
    """

    def make(some: list[dict], numbers: list[int]) -> list[dict]:
        try:
            made = function([parse(row) for row in some])
        except ValueError as error:
            if len(some) > 1:
                pairs = zip(some, numbers, strict=True)
                return [sample for row, number in pairs for sample in make([row], [number])]
            if args.bad_rows == "fail":
                reason = f"{place(name, numbers[0])}: {shorten(str(error))}"
                raise ValueError(f"{reason}. --bad-rows skip leaves such rows out.") from None
            return [{"row": numbers[0], "problem": shorten(str(error))}]
        pairs = zip(numbers, made, strict=True)
        return [{**x, "row": number, "problem": ""} for number, found in pairs for x in found]

    def make_batch(batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        some = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
        kept = [i for i, row in enumerate(some) if row.get(LINE, "x").strip()]  # no blank lines
        made = make([some[i] for i in kept], [indices[i] + 1 for i in kept]) if kept else []
        return {column: [sample.get(column) for sample in made] for column in features | ORIGIN}

    options = {"with_indices": True, "batch_size": 100}
    key = fingerprint(function, name, args.bad_rows, *key)
    mapped = cached_map(rows, make_batch, features | ORIGIN, key, **options)
    problems = mapped.with_format("arrow").select_columns("problem")[:]["problem"].to_pylist()
    bad = [i for i, problem in enumerate(problems) if problem]
    first = "; ".join(f"{place(name, mapped[i]['row'])}: {problems[i]}" for i in bad[:3])
    if len(mapped) == 0 or 2 * len(bad) > len(mapped):
        raise ValueError(f"--dataset {name}: {len(bad):,} of {len(mapped):,} rows cannot be used. "
                         f"{first or 'It has no rows'}. Correct the file.")  # fmt: skip
    mapped = mapped.remove_columns(list(ORIGIN))
    if not bad:
        return mapped
    say(f"{name}: skipped {len(bad):,} of {len(problems):,} rows. {first}")
    return mapped.select(np.flatnonzero([not problem for problem in problems]))


def cached_map(
    rows: Dataset, function: Callable, features: dict, *key: object, **options: Any
) -> Dataset:
    """Map batches of rows to the columns `features`, cached under our code and `key`.

    The hash that `datasets` takes changes with a tokenizer's state, and not with a module's code.
    """
    gc.collect()  # garbage may crash a forked process that finalises it
    return rows.map(
        function,
        batched=True,
        remove_columns=rows.column_names,
        features=Features(features),
        num_proc=len(os.sched_getaffinity(0)) if len(rows) > LARGE else None,
        new_fingerprint=fingerprint(function, rows._fingerprint, sorted(features), *key),
        **options,
    )


def ready(rows: Dataset) -> Dataset:
    """Return rows that are read as NumPy arrays, written to the cache in their order."""
    return (rows if rows._indices is None else rows.flatten_indices()).with_format("numpy")


def warn_of_validation(args: Namespace, val_sets: dict[str, Any]) -> None:
    """Print one warning if training rows are validated on, or validation rows are few."""
    reasons = [f"{x} is also the training set" for x in args.val_dataset if x in args.dataset]
    reasons += [f"{x} has {len(rows)} samples" for x, rows in val_sets.items() if len(rows) < 20]
    say(f"WARNING: validation may mislead: {'; '.join(reasons)}" if reasons else "")


def content_sum(rows: Dataset, crc: int = 0) -> int:
    """Return a CRC-32, continuing `crc`, of all rows in their order, however they are stored."""
    for table in rows.select_columns(sorted(rows.column_names)).with_format("arrow").iter(10_000):
        table = table.combine_chunks().replace_schema_metadata()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        crc = zlib.crc32(sink.getvalue(), crc)
    return crc


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of everything that decides how a tokenizer makes tokens of texts."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend else tokenizer.get_vocab()
    rules |= {"truncation": None, "padding": None}  # set by the last call
    added = sorted((number, repr(x)) for number, x in tokenizer.added_tokens_decoder.items())
    probe = {"text": PROBE, "text_target": PROBE + "".join(tokenizer.all_special_tokens)}
    ids = sorted(tokenizer(**probe, verbose=False).items())
    return fingerprint(shorten, sorted(rules.items()), added, tokenizer.special_tokens_map, ids)


def count_targets(rows: Dataset) -> int:
    """Return the number of labels that are trained on: not -100."""
    tables = rows.with_format("arrow").select_columns("labels").iter(10_000)
    labels = (table["labels"].combine_chunks().flatten().to_numpy() for table in tables)
    return sum(int((part != -100).sum()) for part in labels)


def shorten(text: str, length: int = 300) -> str:
    """Return a text on one line, cut to `length` characters."""
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[:length]} ..."


def fingerprint(function: Callable, *parts: object) -> str:
    """Return a digest of this file, the file that defines `function`, and the repr of `parts`."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    digest.update(Path(inspect.getsourcefile(function)).read_bytes())
    digest.update(repr(parts).encode())
    return digest.hexdigest()[:32]
