"""core/reading.py: rows keep the values of their files, and bad files cause one message."""

import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch.distributed as dist
from conftest import ROOT
from datasets import Audio, Dataset, DatasetDict, Features, Value, load_dataset
from transformers import ByT5Tokenizer

import block_dataset
import summarization_dataset
from core import ranks, reading
from core.ranks import Problem
from summarization_dataset import Data

VALUES = [
    {"text": "2024-05-01", "n": None, "of": {"b": 12345678901234567890, "a": [None, 1.5]}},
    {"late": "x", "text": "null", "n": 3},
    {"text": "line\u2028separator \x85", "n": "mixed"},
]
PAIRS = [{"text": f"t {i}", "headline": f"h {i}"} for i in range(30)]


def jsonl(rows: list) -> str:
    """Return the rows as JSONL text."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def rows_of(path: object) -> list[dict]:
    """Return the rows of a data set's split train as they are in its files."""
    return list(map(reading.parse, reading.read(str(path))["train"]))


def texts(path: object, bad_rows: str = "fail") -> list[str]:
    """Return the texts of a data set with the columns text and headline."""
    rows = summarization_dataset.load_rows(str(path), Data(bad_rows=bad_rows), ByT5Tokenizer())
    return rows["train"]["text"][:]


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "list.json", "x.ndjson.gz"])
def test_json_values_equal_the_file(name, tmp_path):
    text = "\ufeff" + "".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in VALUES)
    text = json.dumps(VALUES, indent=1) if name == "list.json" else text
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if "gz" in name else text.encode())
    assert json.dumps(rows_of(tmp_path / name)) == json.dumps(VALUES)
    rows = reading.read(str(tmp_path / name))["train"]
    assert [*reading.first_row("x", rows)] == ["text", "n", "late", "of"]


@pytest.mark.parametrize("name", ["a[1].csv", "d.tsv.gz", "e.tsv.parts/f.csv"])
def test_csv_values_are_text(name, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    key, delimiter = ("a,b,c", "\t") if "d.tsv" in name else ("te xt", ",")
    lines = [f'\ufeff"{key}"|n', '"a ""b"", "|007', "", "null|"]
    text = "\n".join(lines).replace("|", delimiter).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if "gz" in name else text)
    assert rows_of(tmp_path / name) == [{key: 'a "b", ', "n": "007"}, {key: "null", "n": ""}]


def test_names_are_files_globs_folders_and_splits(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(f'{{"x": "{name}"}}\n' * 10)
    glob = f"{tmp_path}/*.jsonl"
    assert rows_of(glob) == [{"x": "a"}] * 10 + [{"x": "b"}] * 10
    assert rows_of(f"{glob}:train[9:11]") == [{"x": "a"}, {"x": "b"}]
    parts = {name: Dataset.from_list(PAIRS[:2]) for name in ("train", "validation", "test")}
    DatasetDict(parts).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved/README.txt").write_text("not a row")
    assert list(reading.read(f"{tmp_path}/saved")) == ["train", "validation"]
    assert rows_of(f"{tmp_path}/saved:test[:1]") == PAIRS[:1]
    for name in ("b.txt", "a.txt", "._a.txt", "x.csv"):
        (tmp_path / name).write_text(name)
    rows = reading.read(str(tmp_path), None, lambda file: [file.read()])["train"]
    assert rows[reading.LINE][:] == ["a.txt", "b.txt"]
    for name in ("a.txt", "no/such/file.csv", "saved:dev"):
        with pytest.raises(Problem, match=f"{name.partition(':')[0]} (cannot|is not a file)"):
            reading.read(f"{tmp_path}/{name}")


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet", "saved"])
def test_replaced_data_are_read_again(name, tmp_path):
    """tar, zip and rsync restore the time of a file, and code that reads a file gives rows the same
    fingerprint."""
    path = tmp_path / name
    for word in ("old", "new"):
        rows = Dataset.from_list([{"text": word, "headline": "h"}])
        rows._fingerprint = "same"
        if name == "saved":
            rows.save_to_disk(path)
        else:
            (rows.to_json if name == "x.jsonl" else rows.to_parquet)(path)
            os.utime(path, (1_700_000_000, 1_700_000_000))
        assert texts(path) == [word]


LOAD = """
import sys
from block_dataset import Data, load_blocks
from transformers import ByT5Tokenizer
print(load_blocks(sys.argv[1], ByT5Tokenizer(), Data(block_size=2))["train"]._fingerprint)
"""


def test_another_process_and_a_used_tokenizer_find_the_cache(tmp_path):
    path = str(tmp_path / "x.jsonl")
    Path(path).write_text(jsonl(PAIRS))
    output = subprocess.check_output([sys.executable, "-c", LOAD, path], cwd=ROOT, text=True)
    tokenizer = ByT5Tokenizer()
    tokenizer("x", truncation=True, max_length=3)
    rows = block_dataset.load_blocks(path, tokenizer, block_dataset.Data(block_size=2))["train"]
    assert output.split()[-1] == rows._fingerprint


UNEVEN = "row {}: the row has other fields than the header .*. Correct it, or pass --bad-rows"
BAD_FILES = {  # name: (content, message)
    "folder": (None, r"folder cannot be read: the folder has no \*.txt. Pass its files"),
    "lfs.csv": ("version https://git-lfs.github.com/spec/v1\n", "it is a pointer of Git LFS"),
    "columns.json": (json.dumps({"text": ["a"], "headline": ["b"]}), "is a table in a row"),
    "quote.tsv": ('text\theadline\nx\ty\n"a\tb\nc"\td\n', 'line 4: a field that begins with " spa'),
    "broken.jsonl": (jsonl(PAIRS) + '{"text": "b}\n', "broken.jsonl, row 31: Unterminated string"),
    "list.jsonl": ("[1]\n", "list.jsonl cannot be read: the line is not a JSON object"),
    "empty.jsonl": ("", "empty.jsonl cannot be read: it has no rows"),
    "header.csv": ("text,headline\n", "header.csv cannot be read: it has no rows"),
    "excel.csv": ("text,headline,,\na,b,,\n", "line 1: the header has '' twice"),
    "uneven.csv": ("text;headline\na, b;c\n", "separator right\\?\\)\\. $"),
    "pretty.json": (json.dumps(PAIRS[0], indent=1), "Write an object per line"),
    "cut.json": ('[{"text": "a"', "cut.json cannot be read: Expecting ',' delimiter"),
    "ints.jsonl": (jsonl([*PAIRS, {"text": 1}]), "row 31: text is 1, not t"),
    "quote.csv": ('text,headline\na,"b\nc,d\n', "quote.csv cannot be read: line 3: unexpected end"),
    "wide.csv": ("text,headline\na,b\nc,d,e\n", UNEVEN.format(2)),
    "narrow.csv": ("text,headline\na,b\nc\n", UNEVEN.format(2)),
    "twice.csv": ("text,headline,text\na,b,c\n", "line 1: the header has 'text' twice"),
    "table.json": (json.dumps({"id": [1, 2], "text": ["a", "b"]}), "is a table in a row"),
    "latin1.csv.gz": (gzip.compress(b"text,headline\ncaf\xe9,b\n"), "can't decode byte 0xe9"),
    "plain.jsonl.gz": ("text", "plain.jsonl.gz cannot be read: Not a gzipped file"),
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


def test_bad_rows_are_skipped_and_named(tmp_path, monkeypatch, capfd):
    lines = ["text,headline", *(f"text {i},line {i}" for i in range(60)), "a,b,c", *["d"] * 12]
    (tmp_path / "x.csv").write_text("\n".join(lines) + "\n")
    assert texts(tmp_path / "x.csv", "skip") == [f"text {i}" for i in range(60)]
    printed = capfd.readouterr().out
    assert printed.count("Skipped") == 10 and "row 61: the row has other" in printed
    assert "x.csv: 60 samples of 73 rows" in printed
    monkeypatch.setattr(reading, "LARGE", 50)  # then several processes map the rows
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    (tmp_path / "y.csv").write_text("\n".join(["text,headline", *["a,b", "c"] * 40]) + "\n")
    assert texts(tmp_path / "y.csv", "skip") == ["a"] * 40
    assert capfd.readouterr().out.count("Skipped") == 9
    (tmp_path / "all.jsonl").write_text(jsonl([{"text": 1, "headline": "x"}] * 6))
    with pytest.raises(Problem, match="all.jsonl has no usable rows among 6"):
        texts(tmp_path / "all.jsonl", "skip")


@pytest.mark.parametrize("directory", [None, "long " * 20, "\u4e34" * 30])
def test_many_rows_are_mapped_in_order(directory, tmp_path, monkeypatch):
    """Several processes map them. The paths of their sockets could be too long."""
    monkeypatch.setattr(reading, "LARGE", 1000)
    if directory:
        (tmp_path / directory).mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / directory))
        ranks.setup(timeout_minutes=1.0)
        dist.destroy_process_group()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    rows = [{"text": f"t {i}", "headline": "h"} for i in range(1001)]
    (tmp_path / "x.jsonl").write_text(jsonl(rows))
    assert texts(tmp_path / "x.jsonl") == [row["text"] for row in rows]


def test_columns_of_later_rows_are_named(tmp_path, capfd):
    rows = [{"text": "a", "headline": "b"}, 1, {"text": "a", "headline": "b", "context": "c"}]
    (tmp_path / "x.jsonl").write_text(jsonl(rows))
    assert texts(tmp_path / "x.jsonl", "skip") == ["a", "a"]
    assert "uses text and headline; left out: context" in capfd.readouterr().out


def test_cache_that_cannot_be_written_is_named(monkeypatch):
    error = OSError(28, "No space left on device", "cache/x.lock")
    monkeypatch.setattr(reading.datasets, "load_dataset", Mock(side_effect=error))
    with pytest.raises(Problem, match="No space left on device: 'cache/x.lock'. The cache is /"):
        reading.read("someone/pairs")


def test_files_with_different_fields_keep_their_values_or_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("text,headline\ngood,x\nOne, two,summary of three\n")
    (tmp_path / "b.jsonl").write_text(jsonl([{"text": 1, "other": None}]))
    rows = reading.read(f"{tmp_path}/*.*")["train"]
    assert reading.parse(rows[0]) == {"text": "good", "headline": "x"}
    with pytest.raises(ValueError, match="other fields"):
        reading.parse(rows[1])
    assert reading.parse(rows[2]) == {"text": 1, "other": None}
    for number, value in enumerate(("x", {"a": 1})):
        Dataset.from_list([{"turns": [value]}]).to_parquet(tmp_path / f"{number}.parquet")
    with pytest.raises(Problem, match="The features can't be aligned"):
        reading.read(f"{tmp_path}/*.parquet")
    with pytest.raises(Problem, match="Parquet files need a --dataset of their own"):
        reading.read(f"{tmp_path}/*[b1].*")


def test_columns_that_nobody_asked_for_are_not_decoded(tmp_path):
    """Without a decoder for audio, reading that column would raise an error."""
    rows = [{"text": f"t {i}", "headline": "h", "sound": {"bytes": b"x"}} for i in range(40)]
    columns = Features(text=Value("string"), headline=Value("string"), sound=Audio())
    Dataset.from_list(rows).cast(columns).to_parquet(tmp_path / "x.parquet")
    assert texts(tmp_path / "x.parquet") == [row["text"] for row in rows]


def test_columns_of_mixed_types_are_read_as_values(tmp_path):
    """`datasets` 5 stores them as JSON."""
    values = ['Two.\nSure "2"', 42]
    (tmp_path / "x.jsonl").write_text(jsonl([{"text": x, "headline": "h"} for x in values]))
    rows = load_dataset("json", data_files=str(tmp_path / "x.jsonl"), split="train")
    rows.save_to_disk(tmp_path / "saved")
    assert texts(tmp_path / "saved", "skip") == values[:1]


@pytest.mark.parametrize("sizes", [[960] + [1] * 39, [400, 300, 200, *[1] * 100], [3] * 300])
def test_hold_out_keeps_equal_rows_together(sizes):
    keys = np.repeat(np.random.default_rng(0).permutation(10**6)[: len(sizes)], sizes)
    parts = reading.hold_out("x", Dataset.from_dict({"key": keys}))
    train, validation = (set(parts[name]["key"]) for name in ("train", "validation"))
    assert not train & validation and train | validation == {*keys.tolist()}
    assert len(keys) / 50 <= len(parts["validation"]) <= len(keys) / 20
    with pytest.raises(Problem, match="too few different rows.* Pass --val-dataset"):
        reading.hold_out("x", Dataset.from_dict({"key": [7] * 40}))


@pytest.mark.parametrize("row, message", [
    ({"input_ids": [5, 384]}, "input_ids has 5 to 384, no token of 384"),
    ({"input_ids": [5, -1]}, "no token of 384"),
    ({"input_ids": [5] * 300}, "300 tokens, but --block-size allows 129"),
    ({"input_ids": []}, "input_ids is empty or not a list of integers"),
    ({"input_ids": [5.5, 6.0]}, "is empty or not a list"),
    ({"input_ids": [5, 6, 0]}, "the tokens begin or end in padding"),
    ({"input_ids": [5, 1, 1]}, "the tokens begin or end in padding"),
    ({"input_ids": [0, 0, 5]}, "the tokens begin or end in padding"),
    ({"input_ids": [0, 5]}, "the tokens begin or end in padding"),
    *(({"input_ids": [5, 6, 7], name: values}, f"{name} is not read, and not all 1")
      for name, values in (("position_ids", [0, 1, 0]), ("seq_lens", [2, 1]),
                           ("loss_mask", [0, 1, 1]), ("label_ids", [-100, 6, 7]))),
])  # fmt: skip
def test_tokens_that_would_train_otherwise_are_refused(row, message):
    with pytest.raises(ValueError, match=message):
        reading.token_ids(row, "input_ids", "--block-size", 129, ByT5Tokenizer())


def test_tokens_padded_with_a_special_token_are_refused():
    """Llama 3 has <|finetune_right_pad_id|>, which its tokenizer does not name as padding."""
    tokenizer = ByT5Tokenizer()
    tokenizer.add_tokens("<right_pad>", special_tokens=True)
    pad = tokenizer.convert_tokens_to_ids("<right_pad>")
    with pytest.raises(ValueError, match="the tokens begin or end in padding"):
        reading.token_ids({"labels": [5, 1, pad, pad]}, "labels", "--x", 129, tokenizer)


def test_fingerprint_sees_changes():
    rows = [{"input_ids": np.arange(i, i + 3)} for i in range(1000)]
    as_lists = [{"input_ids": row["input_ids"].tolist()} for row in rows]
    assert reading.fingerprint(rows) == reading.fingerprint(as_lists)
    assert reading.fingerprint(rows).startswith("1,000 samples, crc ")
    assert len({reading.fingerprint(x) for x in (rows, rows[1:], rows[::-1], [rows[:2]])}) == 4


def test_validation_on_rows_that_are_trained_on_is_named(capfd):
    rows = Dataset.from_dict({"key": [1, 2]})
    limits = {"num_train_samples": 0, "num_val_samples": 0}
    args = SimpleNamespace(dataset=("a",), val_dataset=("a", "b"), **limits)
    reading.load_sets(args, lambda _: {"train": rows}, reading.hold_out, lambda *x: x[2])
    assert capfd.readouterr().out == "a is also trained on: its validation loss will be too low.\n"


def test_unknown_tokens_are_counted(capfd):
    """Id 2 of a ByT5 tokenizer. If it is EOS, as GPT-2's, it stands for no character."""
    rows = Dataset.from_dict({"input_ids": [[5, 2], [2, 6]]})
    for tokenizer in (ByT5Tokenizer(), ByT5Tokenizer(eos_token="<unk>")):
        reading.print_unknown("rows", rows.select([1, 0]), tokenizer)
    assert capfd.readouterr().out == "rows: 2 tokens are <unk>, for unknown characters\n"
