"""Read files and data sets as rows, and map rows to samples, for any model and task. Write and
check samples that are tokenized already, rows of `input_ids`.

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
import random
import re
import shlex
import sys
import sysconfig
import warnings
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from glob import escape, glob
from pathlib import Path
from typing import IO, Any

import datasets
import numpy as np
import pyarrow.parquet
from datasets import Dataset, Features, List, ReadInstruction, Value, concatenate_datasets
from huggingface_hub import snapshot_download
from transformers import PreTrainedTokenizerBase as Tokenizer

from . import ranks
from .options import as_flag
from .ranks import say

Parts = dict[str, Dataset]  # rows or samples by split: train, and maybe validation and others

PROBLEM = "problem of the row"  # a column of CSV files
BEFORE = "text before"  # a column of text files: the end of the previous piece
CONTINUES = "text continues"  # a column of text files: "yes", or "" for the last piece
LINE = "json line"  # the only column of a JSON file: its lines, which `parse` reads
EXTRA = (PROBLEM, BEFORE, CONTINUES)
PIECE = 1 << 14  # characters of a text file that make a row
# Where a text file is cut: before a space, or else at a line break.
CUTS = [re.compile(r"[^\W\d_](?= )"), re.compile(r"[^\W\d_](?=\s)|(?<=\S)\n(?=\S)")]
SUFFIXES = {".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt"}
LARGE = 50_000  # rows above which several processes map them
# Names of columns in the singular, the likeliest first.
PROMPTS = ("prompt question instruction query problem input user human document article dialogue "
           "abstract source content text")  # fmt: skip
ANSWERS = "completion response solution answer output assistant summary highlight headline target"
PROBE = "  Two  Words, a Ünïcode dash – and\n\ta line break 1234"
EXCLUDED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
ADVICE = (  # by the type of an error while a file is read; the first match is used
    (UnicodeError, "Convert text to UTF-8, a spreadsheet to CSV, other compression to gzip."),
    (csv.Error, "Correct it."),
    ((gzip.BadGzipFile, EOFError), "Compress it again."),
    (Exception, "Pass text, CSV, JSONL or Parquet, or a directory written by save_to_disk."),
)
MASKS = ("attention_mask", "loss_mask", "completion_mask", "assistant_masks")  # of tokenized rows
PREPARED = "prepared"  # the directory in OUTPUT_DIR that --prepare-only writes
ORIGIN = "prepared.json"  # a file in it with the origin of the tokens
TOKEN_FLAGS = "source_length target_length source_prefix block_size max_seq_length train_on_prompt"
datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it raises the errors that it logs
if not sys.stderr.isatty() or int(os.environ.get("RANK", 0)):
    datasets.disable_progress_bars()


def find_paths(spec: str) -> list[Path]:
    """Return the paths of one --dataset argument: a file, a directory written by `save_to_disk`, or
    the files of a glob or, if it has text files, of a directory."""
    path = Path(spec).expanduser()
    if path.is_dir() and not any(path.glob("dataset_*.json")):  # which save_to_disk writes
        return sorted(x for x in path.glob("[!.]*") if suffix_of(x) == ".txt") or [path]
    names = [path] if path.exists() else sorted(glob(str(path), recursive=True))
    return list(map(Path, names))


def split_spec(spec: str, built_in: Iterable[str]) -> tuple[str, str | None]:
    """Return the name in a --dataset argument, and the split after its first colon or None."""
    if spec in built_in or find_paths(spec):
        return spec, None
    name, _, split = spec.partition(":")
    return name, split or None


def read(name: str, config: str | None) -> Parts:
    """Return rows by split, of files (train), a `save_to_disk` directory or a hub data set."""
    files = find_paths(name)
    if not files and (suffix_of(Path(name)) in SUFFIXES or name.count("/") > 1):
        raise ValueError(f"--dataset {name} does not exist. Correct the path.")
    try:
        if not files:
            return read_hub(name, config)
        if len(files) == 1 and files[0].is_dir():
            parts = datasets.load_from_disk(str(files[0]))
            return parts if isinstance(parts, dict) else {"train": parts}
        parts = [read_file(path) for path in files]
        if any(part.features != parts[0].features for part in parts):  # optional fields differ
            parts = [as_lines(part) for part in parts]
        return {"train": concatenate_datasets(parts)}
    except Exception as error:  # pandas, pyarrow, the hub and datasets each raise their own types
        cause = error.__cause__ or error
        advice = next(text for kind, text in ADVICE if isinstance(cause, kind))
        if getattr(cause, "errno", None) in (13, 28, 30):  # forbidden, disk full or read-only
            advice = "Allow it, or set HF_DATASETS_CACHE to a directory that you can write."
        elif not files:
            advice = "It is not a file. Correct the name, or set HF_TOKEN if it is private."
        reason = shorten(str(cause)).rstrip(".")
        raise ValueError(f"--dataset {name} cannot be read: {reason}. {advice}") from error


def read_hub(name: str, config: str | None) -> Parts:
    """Return the rows of a hub data set by split. If that fails, read the files that `hf download`
    has cached."""
    try:
        return datasets.load_dataset(name, config)
    except Exception:
        with contextlib.suppress(Exception):
            path = snapshot_download(name, repo_type="dataset", local_files_only=True)
            parts = datasets.load_dataset(path, config)
            say(f"{name}: the hub cannot be read, so the rows are those of all files in {path}")
            return parts
        raise


def suffix_of(path: Path) -> str:
    """Return the suffix of a file, without .gz."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def open_text(path: Path) -> IO[str]:
    """Open a text file, which may be compressed, with its line breaks as they are."""
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    return opener(path, "rt", encoding="utf-8-sig", newline="")


def read_file(path: Path) -> Dataset:
    """Return the rows of a file, for JSON its unparsed lines."""
    suffix = suffix_of(path)
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty")
    if path.name.lower().endswith(".parquet.gz"):
        return Dataset(pyarrow.parquet.read_table(gzip.open(path)))
    if suffix == ".parquet":
        # A batch size, because the first part of a file may have no rows.
        options = {"data_files": escape(str(path)), "split": "train", "batch_size": 1000}
        return datasets.load_dataset("parquet", **options)
    if suffix in (".csv", ".tsv"):
        _, header = next(csv_lines(path))
        if len({*header}) < len(header):
            raise csv.Error(f"{path} has the column {max(header, key=header.count)} twice")
        return from_generator(csv_rows, (*header, PROBLEM), path)
    if suffix.startswith((".json", ".ndjson")):
        return from_generator(json_lines, (LINE,), path)
    return from_generator(text_pieces, ("text", BEFORE, CONTINUES), path)


def from_generator(generate: Callable, columns: Iterable[str], path: Path) -> Dataset:
    """Return the rows that `generate(path)` yields, whose columns are all text, cached by path,
    modification time and code."""
    features = Features(dict.fromkeys(columns, Value("string")))
    key = cache_key(generate, str(path.resolve()), path.stat().st_mtime_ns)
    return Dataset.from_generator(generate, features, gen_kwargs={"path": path}, fingerprint=key)


def as_lines(rows: Dataset) -> Dataset:
    """Return rows as lines of JSON, in which rows with other fields fit too. Values that JSON does
    not have become null."""
    if LINE in rows.column_names:
        return rows

    def to_lines(columns: dict[str, list]) -> dict[str, list[str]]:
        batch = map(without_none, by_row(columns))
        return {LINE: [json.dumps(row, default=lambda _: None) for row in batch]}

    rows = select(rows, rows.column_names)
    features = Features({LINE: Value("string")})
    return rows.map(to_lines, batched=True, remove_columns=rows.column_names, features=features)


def by_row(columns: dict[str, list]) -> list[dict[str, Any]]:
    """Return the rows of a batch that `datasets` gives as columns."""
    return [dict(zip(columns, x, strict=True)) for x in zip(*columns.values(), strict=True)]


def csv_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the fields of each row of a CSV or TSV file, first the header, and the number of its
    last line. Raise csv.Error where the rest cannot be read."""
    csv.field_size_limit(2**31 - 1)
    with open_text(path) as file:
        delimiter = "\t" if suffix_of(path) == ".tsv" else max(",;\t|", key=file.readline().count)
        file.seek(0)
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            for fields in filter(None, reader):
                yield reader.line_num, fields
        except csv.Error as error:
            raise csv.Error(f"{path}, line {reader.line_num}: {error}") from None


def csv_rows(path: Path) -> Iterator[dict[str, str | None]]:
    """Yield the rows of a CSV or TSV file. PROBLEM says what is wrong with one."""
    lines = csv_lines(path)
    _, header = next(lines)
    for line, fields in lines:
        row = dict(itertools.zip_longest(header, fields[: len(header)]))
        is_wrong = len(fields) != len(header)
        problem = f"line {line}: {len(fields)} fields, not {len(header)}"
        yield row | {PROBLEM: problem if is_wrong else None}


def json_lines(path: Path) -> Iterator[dict[str, str]]:
    """Yield the lines of a JSON file, or the rows of one that contains a list as lines."""
    with open_text(path) as file:
        is_list = file.read(1 << 20).lstrip().startswith("[")
        file.seek(0)
        # In ASCII, because half of a surrogate pair is not UTF-8.
        for line in map(json.dumps, json.load(file)) if is_list else file:
            yield {LINE: line.strip()}


def text_pieces(path: Path) -> Iterator[dict[str, str]]:
    """Yield a text file in pieces that have the same tokens as in the whole text, with the end of
    the piece before each: some tokenizers put a space before the first word of a text.

    Tokens do not span a letter and the space after it, nor a single line break and the next word.
    The line breaks at the end are left out.
    """
    pending, before = "", ""
    with open_text(path) as file:
        while block := file.read(PIECE):
            if "\0" in block:
                raise ValueError(f"{path} is not text: it contains a zero byte")
            pending += block
            start = max(0, len(pending) - PIECE)
            places = CUTS[len(pending) > 16 * PIECE].finditer(pending, start)
            cut = max((place.end() for place in places), default=0)
            if not cut and len(pending) > 64 * PIECE:
                cut = len(pending) - 1
            if cut and pending[cut:].strip():
                piece, pending = pending[:cut], pending[cut:]
                yield {"text": piece, BEFORE: before, CONTINUES: "yes"}
                before = piece[-16:]
    yield {"text": pending.rstrip("\r\n"), BEFORE: before, CONTINUES: ""}


def docstring_rows() -> Dataset:
    """Return the docstrings of Python's standard library as rows: text, headline, module."""
    with warnings.catch_warnings(action="ignore"):  # about escapes in the library's own strings
        columns = ("text", "headline", "module")
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


def pick(name: str, parts: Parts, split: str | None) -> Parts:
    """Return one split or slice, such as train[:1000], as {"train": rows}; if None, train and
    validation."""
    if split is None and "train" in parts:
        return {key: parts[key] for key in ("train", "validation") if key in parts}
    sizes = {key: len(rows) for key, rows in parts.items()}
    try:
        pieces = ReadInstruction.from_spec(split or "train").to_absolute(sizes)
    except (ValueError, AssertionError) as error:
        advice = f"Pass {name}:SPLIT with one of {', '.join(parts)}."
        raise ValueError(f"--dataset {name} has no split {split or 'train'}. {advice}") from error
    chosen = [parts[x.splitname].select(range(x.from_, x.to)) for x in pieces]
    return {"train": concatenate_datasets(chosen)}


def columns_of(name: str, rows: Dataset) -> dict[str, int]:
    """Return by column the length of the first row's text plus 1; 0 if it has another value, -1 if
    it has a list. The columns of JSON lines are the keys of the first object.

    Raise ValueError if there is no row, or no object in the first 1,000 lines.
    """
    count = 1000 if LINE in rows.column_names else 1
    for row in rows.with_format("arrow")[:count].to_pylist():  # decodes no images
        with contextlib.suppress(ValueError):
            if isinstance(row := json.loads(row[LINE]) if LINE in row else row, dict):
                return {
                    key: len(x) + 1 if isinstance(x, str) else -isinstance(x, list)
                    for key, x in row.items()
                    if key not in EXTRA
                }
    raise ValueError(f"--dataset {name} has no JSON objects or rows. Write one on each line.")


def guess_columns(columns: dict[str, int]) -> list[str]:
    """Return the columns with text, quoted for a shell: first those that most likely have the
    prompts and the answers, or the texts and their summaries, by PROMPTS and ANSWERS; then the
    longest."""
    texts = [x for x, length in columns.items() if length > 0 and not x.lower().endswith("id")]
    texts = [x for x in texts if x and not x.startswith("Unnamed")]  # pandas' index
    longest = sorted(texts, key=columns.get, reverse=True) if len(texts) > 2 else texts

    def named(likely: str) -> list[str]:
        return [x for word in likely.split() for x in longest if word == x.lower().rstrip("s")]

    answers = named(ANSWERS)[:1]
    prompts = [x for x in named(PROMPTS) + longest if x not in answers][:1]
    return [shlex.quote(x) for x in dict.fromkeys(prompts + answers + longest)]


def lacks(name: str, missing: Iterable[str], columns: Iterable[str]) -> str:
    """Return the first part of an error message about missing columns."""
    return (f"--dataset {name} has no column {' or '.join(missing)}. Its columns are: "
            f"{shorten(', '.join(columns))}.")  # fmt: skip


def select(rows: Dataset, names: Iterable[str | None]) -> Dataset:
    """Return the rows with only the columns `names`, as far as they exist, and JSON lines. Images
    and audio in them are not decoded."""
    rows = rows.select_columns(
        [x for x in rows.column_names if x in {LINE, *EXTRA, *MASKS, *names}]
    )
    for name, kind in rows.features.items():
        inner = kind.feature if isinstance(kind, List) else kind
        if hasattr(inner, "decode") and not isinstance(inner, datasets.Json):
            inner = dataclasses.replace(inner, decode=False)
            rows = rows.cast_column(name, List(inner) if isinstance(kind, List) else inner)
    return rows


def parse(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as in its file; raise ValueError if its line is not a JSON object."""
    if LINE not in row:
        value = without_none(row)
    else:
        value = json.loads(row[LINE])
        if "\\u" in row[LINE]:
            json.dumps(value, ensure_ascii=False).encode()  # raises for half of a surrogate pair
        if not isinstance(value, dict):
            raise ValueError("the line is not a JSON object")
    if value.get(PROBLEM):
        raise ValueError(value[PROBLEM])
    return value


def without_none(value: Any) -> Any:
    """Return `value` without members that are None, which Arrow adds to objects, and with decimals,
    such as weights, as floats."""
    if isinstance(value, dict):
        return {key: without_none(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [without_none(part) for part in value]
    return float(value) if isinstance(value, Decimal) else value


def map_rows(
    name: str, rows: Dataset, function: Callable, features: dict, bad_rows: str, *key: object
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
            if bad_rows == "fail":
                advice = "Correct it, or pass --bad-rows skip."
                raise ValueError(f"{problem}. {advice}") from None
            say(f"Skipped {problem}")
            return [[]]

    def convert_columns(columns: dict[str, list], indices: list[int]) -> dict[str, list]:
        batch = by_row(columns)
        kept = [i for i, row in enumerate(batch) if row.get(LINE, "x").strip()]  # no blank lines
        groups = convert([batch[i] for i in kept], [indices[i] + 1 for i in kept]) if kept else []
        return {x: [sample[x] for group in groups for sample in group] for x in features}

    gc.collect()  # finalizing garbage may crash a forked process
    # The hash of `datasets` depends on a tokenizer's state, and not on a module's code.
    key = cache_key(function, rows._fingerprint, name, bad_rows, sorted(features), *key)
    mapped = rows.with_format(None).map(
        convert_columns, batched=True, batch_size=100, with_indices=True, new_fingerprint=key,
        remove_columns=rows.column_names, features=Features(features),
        num_proc=len(os.sched_getaffinity(0)) if len(rows) > LARGE else None,
    )  # fmt: skip
    if len(mapped) == 0:
        raise ValueError(f"--dataset {name} has no usable rows among {len(rows):,}. Correct it.")
    return mapped


def load_sets(
    args: Namespace,
    default: str,
    load_parts: Callable[[str], Parts],
    hold_out: Callable[[str, Dataset], Parts],
    draw: Callable[[str, str, Dataset, int | None], Dataset],
) -> tuple[Dataset | None, Parts]:
    """Return the training set, None with --evaluate-only, and the validation sets by --dataset or
    --val-dataset argument.

    `load_parts` returns the rows of an argument by split, `hold_out` splits those that have no
    validation rows, and `draw` makes samples of those of a split, at most a number (0: all).
    """
    train_sets = []
    val_sets = {}

    def add_validation(spec: str, rows: Dataset) -> None:
        val_sets[spec] = join([draw(spec, "validation", rows, args.num_val_samples)])

    for spec in [] if args.evaluate_only and args.val_dataset else args.dataset or [default]:
        parts = load_parts(spec)
        if "validation" not in parts and not args.val_dataset:
            parts = hold_out(spec, parts["train"])
        if not args.evaluate_only:
            train_sets.append(draw(spec, "train", parts["train"], args.num_train_samples))
        if not args.val_dataset:
            add_validation(spec, parts["validation"])
    for spec in args.val_dataset:
        parts = load_parts(spec)
        add_validation(spec, parts.get("validation", parts["train"]))
    return join(train_sets) if train_sets else None, val_sets


def split_by(is_held_out: np.ndarray, rows: Dataset) -> Parts:
    """Return the rows by split, given a mask of those for validation."""
    masks = {"train": ~is_held_out, "validation": is_held_out}
    return {split: rows.select(np.flatnonzero(mask)) for split, mask in masks.items()}


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


def sample(rows: Dataset, limit: int) -> Dataset:
    """Return `limit` random rows (0: all), the same in every run."""
    number = min(limit or len(rows), len(rows))
    return rows.select(sorted(random.Random(0).sample(range(len(rows)), number)))


def join(parts: list[Dataset]) -> Dataset:
    """Return the rows of all parts, stored in this order and read as NumPy arrays."""
    return concatenate_datasets(parts).flatten_indices().with_format("numpy")


def arrays(rows: Dataset, column: str) -> Iterator[pyarrow.Array]:
    """Yield a column in parts of 10,000 rows."""
    for table in rows.with_format("arrow").select_columns(column).iter(10_000):
        yield table[column].combine_chunks()


def check_embedded(samples: Any, count: int, tokenizer: Tokenizer) -> None:
    """Raise ValueError, with its text, if a token in a data set of tokens has no row in the model,
    which has `count` rows. Some tokenizers have special tokens without one."""
    rows = getattr(samples, "dataset", samples)  # from which packs are made
    if len(tokenizer) <= count or not isinstance(rows, Dataset):
        return
    for column in {"input_ids", "labels"} & {*rows.column_names}:
        for ids in itertools.chain.from_iterable(x.to_pylist() for x in arrays(rows, column)):
            if max(ids, default=0) >= count:
                text = shorten(tokenizer.decode([x for x in ids if x >= 0]))
                token = f"{tokenizer.convert_ids_to_tokens(max(ids))} ({max(ids):,})"
                raise ValueError(f"The data have the token {token}, but the model has {count:,} "
                                 f"rows. Use its own tokenizer. It is in: {text}")  # fmt: skip


def content_sum(rows: Dataset, crc: int = 0) -> int:
    """Return the CRC-32 of all rows in order, starting from `crc`, however they are stored."""
    for table in rows.select_columns(sorted(rows.column_names)).with_format("arrow").iter(10_000):
        for batch in table.replace_schema_metadata().combine_chunks().to_batches():
            crc = zlib.crc32(batch.serialize(), crc)
    return crc


def token_origin(args: Namespace, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the values that determine a row's tokens: version, tokenizer, template and flags."""
    origin = {"version": 1, "tokenizer": tokenizer_digest(tokenizer)}
    if hasattr(args, "chat_template"):
        origin["--chat-template"] = digest(tokenizer.chat_template)
    return origin | {as_flag(x): vars(args)[x] for x in TOKEN_FLAGS.split() if x in vars(args)}


def write_prepared(
    output_dir: str, train_set: Any, val_sets: dict[str, Any], origin: dict[str, Any]
) -> None:
    """Write the samples by split to OUTPUT_DIR/prepared, and their `token_origin`; all ranks.
    `load_from_disk` rejects a directory whose last file is missing.

    Raise ValueError if there are several validation sets or the directory exists.
    """
    if len(val_sets) > 1:
        raise ValueError(f"--prepare-only writes one validation set, not {len(val_sets)}. Pass one "
                         "--dataset or one --val-dataset.")  # fmt: skip
    path = Path(output_dir) / PREPARED
    sets = {"train": train_set, "validation": next(iter(val_sets.values()))}
    rows = {split: getattr(samples, "dataset", samples) for split, samples in sets.items()}

    def save() -> None:
        if path.exists():
            raise ValueError(f"{path} exists. Delete it, or pass another --output-dir.")
        path.mkdir()
        (path / ORIGIN).write_text(json.dumps(origin, indent=2))
        datasets.DatasetDict(rows).save_to_disk(path)

    ranks.on_rank_zero(save)
    say(f"Pass --dataset {path} to train on these tokens.")


def compare_origin(name: str, origin: dict[str, Any]) -> None:
    """Raise ValueError if data set `name` was prepared with another tokenizer or flags."""
    file = Path(name).expanduser() / ORIGIN
    saved = json.loads(file.read_text()) if file.is_file() else origin
    for key, value in origin.items():
        if saved.get(key) != value:
            raise ValueError(f"--dataset {name} was prepared with {key} {saved.get(key)}, not "
                             f"{value}. Pass the same, or prepare it again.")  # fmt: skip


def token_ids(
    row: dict[str, Any], column: str, flag: str, limit: int, tokenizer: Tokenizer
) -> Sequence[int]:
    """Return the tokens in a column of a row. Raise ValueError unless they are 1 to `limit` ids of
    the tokenizer, and no mask excludes some; with labels only attention_mask counts."""
    for key in MASKS[:1] if "labels" in row else MASKS:
        if 0 in (row.get(key) or ()):
            raise ValueError(f"{key} excludes tokens. Remove these, or, for llama_fsdp.py, write "
                             "labels of -100")  # fmt: skip
    ids = row.get(column)
    if not ids or not isinstance(ids, list) or not all(isinstance(x, int) for x in ids):
        raise ValueError("tokens are empty or not a list of integers")
    if len(ids) > limit:
        raise ValueError(f"{len(ids):,} tokens, but {flag} allows {limit:,}")
    if ids[-1] == tokenizer.pad_token_id != tokenizer.eos_token_id:
        raise ValueError("the tokens end in padding")
    for token in (min(ids), max(ids)):
        if not 0 <= token < len(tokenizer):
            raise ValueError(f"token {token} is not one of the tokenizer's {len(tokenizer):,}")
    return ids


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
