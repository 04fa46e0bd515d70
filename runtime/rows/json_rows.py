"""JSON files whose rows hold more than texts and numbers, read as they stand.

Arrow, with which `datasets` reads them, makes the objects of all rows alike: it adds members that
are null, puts them in one order, makes floats of whole numbers, and dates of texts. But what a
model must learn to write, such as the arguments of a tool, should be what the file says. Imports
nothing else of this repository.
"""

import functools
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, List, Value

JSON = "json"  # the id of a feature whose texts are JSON
BROKEN = "not read"  # the column that says why a row could not be read
SUFFIXES = (".jsonl", ".ndjson", ".json")
HEAD = 1 << 20  # bytes of a file that are looked at for objects


def place(name: str, number: int) -> str:
    """Say where row `number`, from 1, of a data set stands: a line, if it is a JSON file with a row
    on each, else the row."""
    path = Path(name).expanduser()
    if path.suffix.lower() in SUFFIXES and path.is_file() and not holds_list(path):
        with path.open(encoding="utf-8-sig") as file:
            rows = (line_number for line_number, line in enumerate(file, 1) if line.strip())
            line = next(itertools.islice(rows, number - 1, None), None)
        if line is not None:
            return f"line {line}"
    return f"row {number}"


def holds_list(path: Path) -> bool:
    """Tell whether a JSON file is a list of its rows, and not a row a line."""
    with path.open(encoding="utf-8-sig") as file:
        return path.suffix.lower() == ".json" and file.read(HEAD).lstrip().startswith("[")


def begin_with_objects(path: Path) -> bool:
    """Tell whether one of the first rows of a file holds an object, or a list of some."""
    with path.open("rb") as file:
        head = file.read(HEAD)
    # An object that is no row follows a colon, or a list's bracket behind one.
    return re.search(rb":\s*\[?\s*\{", head) is not None


def is_plain(column: Any) -> bool:
    """Tell whether an Arrow column is what its JSON file says: it holds no objects, whose members
    Arrow makes alike in all rows, and no dates, which it makes of texts."""
    kind = column.type
    if pa.types.is_list(kind):
        return is_plain(pc.list_flatten(column))
    is_altered = isinstance(kind, pa.BaseExtensionType) or pa.types.is_temporal(kind)
    return not (is_altered or pa.types.is_struct(kind))


def read(path: Path, key: str, skip_broken: bool) -> Dataset:
    """Read the rows of a JSON or JSONL file as they stand there; `key` is the cache's.

    A column of texts is text, one of whole numbers, or of lists of them, is int64. Any other is
    text, too: the JSON of each value, under a feature with the id JSON. If `skip_broken`, a line
    that holds no object is a row without values, and the column BROKEN says why; else it raises
    ValueError, as does a file without rows.
    """
    known = Dataset.from_generator(
        functools.partial(survey, path),
        features=Features({"column": Value("string"), "kind": Value("string")}),
        fingerprint=f"{key}-columns",
    )
    kinds = dict(zip(known["column"], known["kind"], strict=True))
    if BROKEN in kinds and (not skip_broken or len(kinds) == 1):
        raise ValueError(f"{path}{kinds[BROKEN]}")
    types = {"int": Value("int64"), "ints": List(Value("int64")), JSON: Value("string", id=JSON)}
    features = {name: types.get(kind, Value("string")) for name, kind in kinds.items()}

    def rows() -> Iterator[dict[str, Any]]:
        for row, _, reason in parsed_json(path):
            found = {BROKEN: reason} if BROKEN in kinds else {}
            for name, value in row.items():
                is_json = kinds[name] == JSON and value is not None
                found[name] = json.dumps(value, ensure_ascii=False) if is_json else value
            yield dict.fromkeys(features) | found

    return Dataset.from_generator(rows, features=Features(features), fingerprint=f"{key}-rows")


def survey(path: Path) -> Iterator[dict[str, str]]:
    """Yield the columns of a JSON file with their kinds: text, int, ints, or JSON. If a line holds
    no object, there is a column BROKEN, whose kind is where the first such line stands, and what is
    wrong with it, as the path goes on to say."""
    kinds: dict[str, str] = {}
    for row, where, reason in parsed_json(path):
        if reason:
            kinds.setdefault(BROKEN, f", {where}: {reason}" if where else f": {reason}")
        for name, value in row.items():
            kind = kind_of(value)
            if kinds.setdefault(name, kind) != kind and kind:
                kinds[name] = JSON if kinds[name] else kind
    kinds = kinds or {BROKEN: ": it has no rows"}
    for name, kind in kinds.items():
        yield {"column": name, "kind": kind or "text"}


def kind_of(value: Any) -> str:
    """Return the kind of a value of a JSON file, see `survey`; "" for null, which fits any."""
    if value is None:
        return ""
    if isinstance(value, str):
        return "text"
    if is_int64(value):
        return "int"
    if isinstance(value, list) and all(map(is_int64, value)):
        return "ints"
    return JSON


def is_int64(value: Any) -> bool:
    """Tell whether a value is a whole number of at most 64 bits."""
    return type(value) is int and -(2**63) <= value < 2**63


def parsed_json(path: Path) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield the objects of a JSON file, one a line or a list of them: each, where it stands, and
    ""; or, for one that cannot be read, {}, where it stands, and what is wrong."""
    is_list = holds_list(path)
    with path.open(encoding="utf-8-sig") as file:
        if not is_list:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield parsed_object(f"line {number}", line)
            return
        try:
            rows = json.load(file)
        except ValueError as error:
            yield {}, "", f"it cannot be read as JSON: {error}"
            return
    for number, row in enumerate(rows, 1):
        yield checked_object(f"row {number}", row)


def parsed_object(place: str, text: str) -> tuple[dict[str, Any], str, str]:
    """Return what `parsed_json` yields of a line."""
    try:
        return checked_object(place, json.loads(text))
    except ValueError as error:
        # Of a line alone, JSON would give the number 1.
        reason = f"{error.msg} at column {error.colno}" if hasattr(error, "colno") else error
        return {}, place, f"it cannot be read as JSON: {reason}"


def checked_object(place: str, row: Any) -> tuple[dict[str, Any], str, str]:
    """Return what `parsed_json` yields of a row."""
    return (row, place, "") if isinstance(row, dict) else ({}, place, "it is no JSON object")


def as_in_file(value: Any, feature: Any) -> Any:
    """Return a row's value as its file has it: parsed, if `read` kept it as JSON. Else members of
    objects that are null, at any depth, are left out, as Arrow gives all rows the same members."""
    if getattr(feature, "id", None) == JSON:
        return None if value is None else json.loads(value)
    return without_none(value)


def without_none(value: Any) -> Any:
    """Return `value` without the members of its objects that are None, at any depth."""
    if isinstance(value, dict):
        return {key: without_none(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [without_none(part) for part in value]
    return value


def broken_rows(rows: Dataset) -> dict[int, str]:
    """Return why rows could not be read, by their numbers, from 1."""
    if BROKEN not in rows.column_names:
        return {}
    return {number: reason for number, reason in enumerate(rows[BROKEN], 1) if reason}
