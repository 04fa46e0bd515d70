"""core/reading.py: rows keep the values of their files, and bad files cause one message."""

import gzip
import json
import os
import subprocess
import sys
from decimal import Decimal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from datasets import Audio, Dataset, DatasetDict, Features, Value, load_dataset
from huggingface_hub import snapshot_download
from transformers import ByT5Tokenizer

from core import reading
from core.ranks import Problem

VALUES = [
    {"text": "2024-05-01", "n": None, "of": {"b": 12345678901234567890, "a": [None, 1.5]}},
    {"late": "x", "text": "null", "n": 3},
    {"text": "line\u2028separator \x85", "n": "mixed"},
]
PAIRS = [{"text": f"t {i}", "headline": f"h {i}"} for i in range(30)]
TEXT = Features(text=Value("string"))


def jsonl(rows: list) -> str:
    """Return the rows as JSONL text."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def rows_of(path: object) -> list[dict]:
    """Return the rows of a data set's split train as they are in its files."""
    return list(map(reading.parse, reading.read(str(path))["train"]))


def texts(path: object, bad_rows: str = "fail") -> list[str]:
    """Return the texts of a data set that must have the columns text and headline."""
    rows = reading.read(str(path))["train"]
    columns = reading.first_row(str(path), rows)
    if missing := [x for x in ("text", "headline") if x not in columns]:
        raise reading.no_columns(str(path), missing, columns, "Pass --text-column.")

    def read(batch: list[dict]) -> list[list[dict]]:
        for row in batch:
            if not isinstance(row["text"], str):
                raise ValueError(f"text is {row['text']}, not text")
        return [[{"text": row["text"]}] for row in batch]

    return reading.map_rows(str(path), rows, read, TEXT, bad_rows)["text"][:]


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "list.json", "x.ndjson.gz"])
def test_json_values_equal_the_file(name, tmp_path):
    text = "\ufeff" + "".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in VALUES)
    text = json.dumps(VALUES, indent=1) if name == "list.json" else text
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if "gz" in name else text.encode())
    assert json.dumps(rows_of(tmp_path / name)) == json.dumps(VALUES)
    rows = reading.read(str(tmp_path / name))["train"]
    assert [*reading.first_row("x", rows)] == ["text", "n", "of"]


@pytest.mark.parametrize("name, delimiter", [
    ("a[1].csv", ","), ("a.csv", ";"), ("b.csv", "|"), ("c.csv", "\t"), ("d.tsv.gz", "\t"),
])  # fmt: skip
def test_csv_values_are_text(name, delimiter, tmp_path):
    key = "a,b,c" if ".tsv" in name else "te xt"
    lines = [f'\ufeff"{key}"|n', '"a', '""b"", "|007', "", "null|"]
    text = "\n".join(lines).replace("|", delimiter).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if "gz" in name else text)
    assert rows_of(tmp_path / name) == [{key: 'a\n"b", ', "n": "007"}, {key: "null", "n": ""}]


def test_names_are_files_globs_folders_and_splits(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(f'{{"x": "{name}"}}\n' * 10)
    glob = f"{tmp_path}/*.jsonl"
    assert rows_of(glob) == [{"x": "a"}] * 10 + [{"x": "b"}] * 10
    assert rows_of(f"{glob}:train[9:11]") == [{"x": "a"}, {"x": "b"}]
    (tmp_path / "a:b.jsonl").write_text('{"x": 1}\n')
    assert rows_of(f"{tmp_path}/a:b.jsonl") == [{"x": 1}]
    parts = {name: Dataset.from_list(PAIRS[:2]) for name in ("train", "validation", "test")}
    DatasetDict(parts).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved/README.txt").write_text("not a row")
    assert list(reading.read(f"{tmp_path}/saved")) == ["train", "validation"]
    assert rows_of(f"{tmp_path}/saved:test[:1]") == PAIRS[:1]
    Dataset.from_list(PAIRS).save_to_disk(tmp_path / "saved too")
    assert rows_of(tmp_path / "saved too") == PAIRS
    for name in (f"{tmp_path}/saved*", f"{tmp_path}/a.txt", "no/such/file.csv"):
        with pytest.raises(Problem, match="cannot be read"):
            reading.read(name)
    with pytest.raises(Problem, match="saved: .*dev.*Pass .*saved:SPLIT"):
        reading.read(f"{tmp_path}/saved:dev")


def test_folder_has_its_text_files(tmp_path):
    for name in ("b.txt", "a.txt", "._a.txt", "x.csv"):
        (tmp_path / name).write_text(name)

    def whole(file):
        yield {"text": file.read()}

    rows = reading.read(str(tmp_path), None, whole)["train"]
    assert list(map(reading.parse, rows)) == [{"text": "a.txt"}, {"text": "b.txt"}]
    with pytest.raises(Problem, match="a.txt cannot be read: it is not a CSV, TSV, JSON, "):
        reading.read(f"{tmp_path}/a.txt")


def test_replaced_file_is_read_again_though_its_time_is_the_same(tmp_path):
    """tar, zip and rsync restore the modification time."""
    for path in (tmp_path / "x.jsonl", tmp_path / "x.parquet"):
        for word in ("old", "new"):
            if path.suffix == ".parquet":
                Dataset.from_list([{"text": word}]).to_parquet(path)
            else:
                path.write_text(jsonl([{"text": word}]))
            os.utime(path, (1_700_000_000, 1_700_000_000))
            assert rows_of(path) == [{"text": word}]


def test_second_process_reuses_the_cache(tmp_path):
    """The tokenizer was used earlier in each process, which must not change the cache key."""
    (tmp_path / "x.jsonl").write_text('{"text": "a b"}\n' * 30 + '{"text": "c"}\n')
    program = (
        "import sys; from block_dataset import *; from transformers import ByT5Tokenizer\n"
        "class Counting(ByT5Tokenizer):\n"
        "    calls = 0\n"
        "    def __call__(self, *args, **options):\n"
        "        Counting.calls += 'text_target' not in options\n"
        "        return super().__call__(*args, **options)\n"
        "tokenizer = Counting(); tokenizer('x', truncation=True, max_length=3)\n"
        "Counting.calls = 0\n"
        f"rows = load_blocks('{tmp_path}/x.jsonl', tokenizer, Data(block_size=2))['train']\n"
        "print(len(rows), Counting.calls)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_DATASETS_CACHE": str(tmp_path / "c")}
    command = [sys.executable, "-c", program]
    outputs = [subprocess.check_output(command, env=environment, text=True) for _ in range(2)]
    assert [output.splitlines()[-1] for output in outputs] == ["61 1", "61 0"]


BAD_FILES = {  # name: (content, message)
    "folder": (None, "folder cannot be read: Directory folder is neither"),
    "column.jsonl": (jsonl([{"a": 1, "b": 2}]), "no column text or headline. Its columns are: a, "),
    "broken.jsonl": (jsonl(PAIRS) + '{"text": "b}\n', "broken.jsonl, row 31: Unterminated string"),
    "list.jsonl": ("[1]\n", "list.jsonl has no JSON objects"),
    "empty.jsonl": ("", "empty.jsonl cannot be read: it has no rows"),
    "blank.jsonl": ("\n\n", "blank.jsonl cannot be read: it has no rows"),
    "empty.csv": ("", "empty.csv cannot be read: it has no rows"),
    "header.csv": ("text,headline\n", "header.csv cannot be read: it has no rows"),
    "pretty.json": (json.dumps(PAIRS[0], indent=1), "Write one on each line"),
    "cut.json": ('[{"text": "a"', "cut.json cannot be read: Expecting ',' delimiter"),
    "ints.jsonl": (jsonl([*PAIRS, {"text": 1}]), "row 31: text is 1, not t"),
    "utf16.csv": ("text,headline\na,b\n".encode("utf-16"), "utf16.csv cannot be read: .utf-8"),
    "latin1.csv": (b"text,headline\ncaf\xe9,b\n", "utf-8' codec can't decode byte 0xe9"),
    "semicolon.csv": ("text;headline\na;b\nc\n", "row 2: line 3: 1 fields, not 2"),
    "quote.csv": ('text,headline\na,"b\nc,d\n', "quote.csv cannot be read: line 3: unexpected end"),
    "inner.csv": ('text,headline\na,b\n"he "hi" to",c\n', "line 3: ',' expected"),
    "wide.csv": ("text,headline\na,b,c\nd,e\n",
                 "wide.csv, row 1: line 2: 3 fields, not 2. Correct it, or pass --bad-rows skip"),
    "twice.csv": ("text,headline,text\na,b,c\n", "cannot be read: .* text is there twice"),
    "narrow.csv": ("text,headline,x\na,b\n", "narrow.csv, row 1: line 2: 2 fields, not 3"),
    "latin1.csv.gz": (gzip.compress(b"text,headline\ncaf\xe9,b\n"), "can't decode byte 0xe9"),
    "plain.jsonl.gz": ("text", "plain.jsonl.gz cannot be read: Not a gzipped file"),
    "half.jsonl": ('{"text": "a\\ud800", "headline": "b"}\n' * 2, "row 1: .*surrogates not"),
    "half.json": ('[{"text": "a", "headline": "\\ud800"}]', "row 1: .*surrogates not"),
    "nan.jsonl": ('{"text": NaN, "headline": "b"}\n', "nan.jsonl, row 1: text is nan, not text"),
    "bad.parquet": ("no parquet", "bad.parquet cannot be read: Parquet magic bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file_causes_one_message(name, tmp_path, monkeypatch):
    content, message = BAD_FILES[name]
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    if content is not None:
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(Problem, match=message) as error:
        texts(name)
    assert "\n" not in str(error.value) and name in str(error.value)


def test_bad_rows_are_skipped_and_named(tmp_path, capfd):
    lines = ["text,headline", *(f"text {i},line {i}" for i in range(60)), "a,b,c", "d"]
    (tmp_path / "x.csv").write_text("\n".join(lines) + "\n")
    assert texts(tmp_path / "x.csv", "skip") == [f"text {i}" for i in range(60)]
    printed = capfd.readouterr().out
    assert "row 61: line 62: 3 fields, not 2" in printed and "line 63: 1 fields" in printed
    (tmp_path / "all.jsonl").write_text(jsonl([{"text": 1, "headline": "x"}] * 6))
    with pytest.raises(Problem, match="all.jsonl has no usable rows among 6"):
        texts(tmp_path / "all.jsonl", "skip")


def test_many_rows_are_mapped_in_order_by_several_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LARGE", 1000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    rows = [{"text": f"t {i}", "headline": "h"} for i in range(1001)]
    (tmp_path / "x.jsonl").write_text(jsonl(rows))
    assert texts(tmp_path / "x.jsonl") == [row["text"] for row in rows]


def test_data_set_of_hf_download_is_read_from_the_hub_cache(tmp_path, monkeypatch, capfd):
    repository = tmp_path / "datasets--someone--pairs"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("1" * 40)
    snapshot = repository / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "train.jsonl").write_text(jsonl(PAIRS))
    cached = partial(snapshot_download, cache_dir=tmp_path)
    monkeypatch.setattr(reading, "snapshot_download", cached)
    assert rows_of("someone/pairs:train[:3]") == PAIRS[:3]
    assert f"the rows are those of all files in {snapshot}" in capfd.readouterr().out
    with pytest.raises(Problem, match="someone/other is not a file, and cannot be read from"):
        reading.read("someone/other")


def test_cache_that_cannot_be_written_is_named(monkeypatch):
    def load_dataset(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "cache/x.lock")

    monkeypatch.setattr(reading.datasets, "load_dataset", load_dataset)
    with pytest.raises(Problem, match="No space left on device: 'cache/x.lock'"):
        reading.read("someone/pairs")


def test_files_with_different_fields_keep_their_values_or_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("text,headline\ngood,x\nOne, two,summary of three\n")
    (tmp_path / "b.jsonl").write_text(jsonl([{"text": 1, "other": None}]))
    rows = reading.read(f"{tmp_path}/*.*")["train"]
    assert reading.parse(rows[0]) == {"text": "good", "headline": "x"}
    with pytest.raises(ValueError, match="line 3: 3 fields, not 2"):
        reading.parse(rows[1])
    assert reading.parse(rows[2]) == {"text": 1, "other": None}
    rows = [{"loss": Decimal(0), "turns": [{"a": 1}]}, {"loss": Decimal(1), "turns": [{"b": "x"}]}]
    for number, row in enumerate(rows):
        Dataset.from_list([row]).to_parquet(tmp_path / f"{number}.parquet")
    assert rows_of(tmp_path / "0.parquet") == [{"loss": 0.0, "turns": [{"a": 1}]}]
    with pytest.raises(Problem, match="The features can't be aligned"):
        reading.read(f"{tmp_path}/*.parquet")


def test_objects_of_a_saved_data_set_have_no_members_that_arrow_added(tmp_path):
    rows = [{"calls": [{"a": 1}]}, {"calls": [{"b": "x"}]}, {"calls": None}]
    Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    assert rows_of(tmp_path / "saved") == [*rows[:2], {}]


def test_columns_that_nobody_asked_for_are_not_decoded(tmp_path):
    """Without a decoder for audio, reading that column would raise an error."""
    rows = [{"text": f"t {i}", "sound": {"bytes": b"x", "path": None}} for i in range(40)]
    columns = Features(text=Value("string"), sound=Audio())
    Dataset.from_list(rows).cast(columns).to_parquet(tmp_path / "x.parquet")
    rows = reading.read(str(tmp_path / "x.parquet"))["train"]
    assert reading.first_row("x", rows)["text"] == "t 0"
    assert reading.select(rows, ["text"])[0] == {"text": "t 0"}
    assert reading.select(rows, ["text", "sound"])[0]["sound"] == {"bytes": b"x", "path": None}


def test_columns_of_mixed_types_are_read_as_values(tmp_path):
    """`datasets` 5 stores them as JSON."""
    values = ['Two.\nSure "2"', 42]
    (tmp_path / "x.jsonl").write_text(jsonl([{"text": x} for x in values]))
    rows = load_dataset("json", data_files=str(tmp_path / "x.jsonl"), split="train")
    rows.save_to_disk(tmp_path / "saved")
    rows = reading.select(reading.read(str(tmp_path / "saved"))["train"], ["text"])
    assert [row["text"] for row in rows] == values


def test_usual_columns_are_printed_with_those_left_out(capfd):
    table = [("article", "summary"), ("question", "answer")]
    columns = ["id", "Question", "Answer", "context"]
    assert reading.usual_columns("x", columns, table) == ("Question", "Answer")
    assert capfd.readouterr().out == "x: uses Question and Answer, not id, context\n"
    assert reading.usual_columns("x", ["question", "reply"], table) is None


@pytest.mark.parametrize("groups", [[960] + [1] * 39, [400, 300, 200, *[1] * 100], [3] * 300])
def test_hold_out_takes_at_most_a_tenth_of_the_rows(groups):
    numbers = np.random.default_rng(0).permutation(10**6)[: len(groups)]
    keys = np.repeat(numbers, groups)
    for usual in (keys % 100 >= 95, keys < np.unique(keys)[max(1, len(groups) // 20)]):
        mask = reading.held_out("x", keys, usual)
        assert min(39, len(keys) / 40) <= mask.sum() <= len(keys) / 10
        assert not {*keys[mask]} & {*keys[~mask]}
    with pytest.raises(Problem, match="too few different rows.* Pass --val-dataset"):
        reading.held_out("x", np.zeros(40, dtype=int), np.zeros(40, dtype=bool))


@pytest.mark.parametrize("row, message", [
    ({"input_ids": [5, 384]}, "token 384 is not one of the tokenizer's 384"),
    ({"input_ids": [5, -1]}, "token -1 is not one"),
    ({"input_ids": [5] * 300}, "300 tokens, but --block-size allows 129"),
    ({"input_ids": []}, "tokens are empty or not a list of integers"),
    ({"input_ids": ["a"]}, "tokens are empty or not a list"),
    ({}, "tokens are empty or not a list"),
    ({"input_ids": [5, 6, 0]}, "the tokens end in padding"),
    ({"input_ids": [5, 6], "labels": [5, 6], "attention_mask": [0, 1]}, "attention_mask excludes"),
    *(({"input_ids": [5, 6], name: [0, 1]}, f"{name} excludes tokens") for name in reading.MASKS),
])  # fmt: skip
def test_invalid_tokens_are_refused(row, message):
    with pytest.raises(ValueError, match=message):
        reading.token_ids(row, "input_ids", "--block-size", 129, ByT5Tokenizer())


def test_fingerprint_and_tokenizer_digest_see_changes():
    rows = [{"input_ids": np.arange(i, i + 3)} for i in range(1000)]
    as_lists = [{"input_ids": row["input_ids"].tolist()} for row in rows]
    assert reading.fingerprint(rows) == reading.fingerprint(as_lists)
    assert reading.fingerprint(rows).startswith("1,000 samples, crc ")
    assert len({reading.fingerprint(x) for x in (rows, rows[1:], rows[::-1], [rows[:2]])}) == 4
    digests = [reading.tokenizer_digest(x) for x in (ByT5Tokenizer(), ByT5Tokenizer(extra_ids=3))]
    used = ByT5Tokenizer()
    used("text", truncation=True, max_length=2)
    assert digests[0] == reading.tokenizer_digest(used) != digests[1]
