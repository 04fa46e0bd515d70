"""Test runtime/readers.py: rows keep the files' values, and bad files cause one error message."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from conftest import ROOT
from datasets import Dataset, Value
from transformers import ByT5Tokenizer

import llama_fsdp
import T5_training
from benchmarks.driven import parse_flags
from runtime import readers

FAIL = Namespace(bad_rows="fail")
VALUES = [
    {"text": "2024-05-01", "n": None, "of": {"b": 12345678901234567890, "a": [None, 1.5]}},
    {"late": "x", "text": "null", "n": 3},
    {"text": "line\u2028separator \x85", "n": "mixed"},
]


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "list.json"])
def test_json_values_equal_the_file(name, tmp_path):
    path = tmp_path / name
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in VALUES)
    path.write_text(json.dumps(VALUES, indent=1) if name == "list.json" else "\ufeff" + text)
    rows = readers.read(str(path), None)["train"]
    assert readers.column_names("x", rows) == ["text", "n", "of"]
    features = {"json": Value("string")}

    def dump(batch: list[dict]) -> list[list[dict]]:
        return [[{"json": json.dumps(row)}] for row in batch]

    samples = readers.map_rows(str(path), rows, dump, features, FAIL)["json"]
    assert list(samples) == [json.dumps(row) for row in VALUES]


def test_csv_values_are_text(tmp_path):
    path = tmp_path / "a[1].csv"
    path.write_text('"te,xt",n\n"a\n""b"" ",007\nnull,\nNA,1.50\n')
    rows = readers.read(str(path), None)["train"]
    assert rows["te,xt"][:] == ['a\n"b" ', "null", "NA"] and rows["n"][:] == ["007", "", "1.50"]


def test_dataset_names_accept_files_globs_and_splits(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(f'{{"x": "{name}"}}\n' * 10)
    glob = str(tmp_path / "*.jsonl")
    rows = readers.read(glob, None)
    assert len(rows["train"]) == 20
    assert readers.split_spec(f"{glob}:train[:5]", []) == (glob, "train[:5]")
    assert len(readers.pick(glob, rows, "train[:5]")["train"]) == 5
    assert readers.split_spec("someone/set:test", []) == ("someone/set", "test")
    (tmp_path / "a:b.jsonl").write_text('{"x": 1}\n')
    assert readers.split_spec(f"{tmp_path}/a:b.jsonl", [])[1] is None


def test_second_process_reuses_the_cache(tmp_path):
    """The tokenizer was used earlier in each process, which must not change the cache key."""
    (tmp_path / "x.jsonl").write_text('{"content": "a b"}\n' * 30 + '{"content": "c"}\n')
    program = (
        "import sys; from chat_dataset import *; from transformers import ByT5Tokenizer\n"
        "from runtime import readers; import datasets\n"
        "tokenizer = ByT5Tokenizer(); tokenizer('x', truncation=True, max_length=3)\n"
        "calls = []; encode = encode_texts\n"
        "import chat_dataset\n"
        "chat_dataset.encode_texts = lambda *args: calls.append(1) or encode(*args)\n"
        "parser = ArgumentParser(); add_arguments(parser); args = parser.parse_args([])\n"
        f"rows = load_documents('{tmp_path}/x.jsonl', tokenizer, args)['train']\n"
        "print(len(rows), len(calls))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_DATASETS_CACHE": str(tmp_path / "c")}
    command = [sys.executable, "-c", program]
    outputs = [subprocess.check_output(command, env=environment, text=True) for _ in range(2)]
    assert [output.splitlines()[-1] for output in outputs] == ["31 1", "31 0"]


def test_content_sum_depends_on_values_order_and_boundaries(tmp_path):
    rows = [{"ids": [i, i + 1] * (i % 3), "text": str(i)} for i in range(50)]
    whole = Dataset.from_list(rows)
    expected = readers.content_sum(whole)
    whole.to_parquet(tmp_path / "rows.parquet", batch_size=7)
    assert (
        readers.content_sum(readers.read(str(tmp_path / "rows.parquet"), None)["train"]) == expected
    )
    chosen = Dataset.from_list(rows[::-1] + rows).select([*range(50, 99), 99])
    assert readers.content_sum(chosen) == readers.content_sum(readers.join([chosen])) == expected
    swapped = [*rows[:20], rows[21], rows[20], *rows[22:]]
    shifted = [
        *rows[:10],
        {"ids": [10], "text": "10"},
        {"ids": [11, 11, 12], "text": "11"},
        *rows[12:],
    ]
    for changed in (swapped, shifted, [*rows[:25], rows[25] | {"text": "x"}, *rows[26:]]):
        assert readers.content_sum(Dataset.from_list(changed)) != expected


PAIRS = [{"text": f"t {i}", "headline": f"h {i}"} for i in range(30)]
CHATS = [{"prompt": f"q{i}", "completion": "a"} for i in range(30)]
TOKENS = [{"input_ids": [5, 6, 7 + i], "labels": [5, 6]} for i in range(30)]


def jsonl(rows: list) -> str:
    """Return the rows as JSONL text."""
    return "".join(json.dumps(row) + "\n" for row in rows)


BAD_FILES = {  # name: (content, flags, message)
    "gone.jsonl": (None, "", "gone.jsonl does not exist"),
    "folder": (None, "", "folder cannot be read: Directory folder is neither"),
    "column.jsonl": (jsonl(PAIRS), "--source-column x", "has columns text, headline, but not all"),
    "split.jsonl": (jsonl(PAIRS), ":test", "split.jsonl has no split test. Pass split.jsonl:SPLIT"),
    "broken.jsonl": (
        jsonl(PAIRS) + '{"text": "b}\n',
        "",
        "broken.jsonl, row 31: Unterminated string",
    ),
    "list.jsonl": ("[1]\n", "", "list.jsonl has no JSON objects"),
    "empty.jsonl": ("", "", "empty.jsonl is empty"),
    "blank.jsonl": ("\n\n", "", "blank.jsonl has no JSON objects"),
    "pretty.json": (json.dumps(PAIRS[0], indent=1), "", "Write one on each line"),
    "cut.json": ('[{"text": "a"', "", "cut.json cannot be read: Expecting ',' delimiter"),
    "ints.jsonl": (
        jsonl([*PAIRS, {"text": "a", "headline": 1}]),
        "",
        "row 31: headline is 1, not t",
    ),
    "utf16.csv": ("text,headline\na,b\n".encode("utf-16"), "", "UTF-8 text, CSV"),
    "latin1.csv": (b"text,headline\ncaf\xe9,b\n", "", "utf-8' codec can't decode byte 0xe9"),
    "semicolon.csv": ("text;headline\na;b\n", "", "has columns text;headline, but not all"),
    "quote.csv": ('text,headline\na,"b\nc,d\n', "", "quote.csv, line 3: unexpected end of data"),
    "inner.csv": ('text,headline\na,b\n"he "hi" to",c\n', "", "inner.csv, line 3: ',' expected"),
    "wide.csv": (
        "text,headline\na,b,c\nd,e\n",
        "",
        "wide.csv, line 2: more fields than the 2 columns",
    ),
    "field.csv": (
        "text,headline\na,b\nc,\n",
        "",
        "field.csv, row 2: the text or the summary is em",
    ),
    "one.csv": ("text,headline\na,b\n", "", "too few different rows"),
    "bad.parquet": ("no parquet", "", "bad.parquet cannot be read: Parquet magic bytes"),
    "vocabulary.jsonl": (
        jsonl([{"input_ids": [5, 9999], "labels": [5]}, *TOKENS]),
        "",
        "token 9999",
    ),
    "long.jsonl": (
        jsonl([{"input_ids": [5] * 99, "labels": [5]}]),
        "--source-length 9",
        "allows 9",
    ),
    "all.jsonl": (
        jsonl([{"headline": 1}] * 6),
        "--bad-rows skip --source-column headline",
        "no usable rows among 6",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file_causes_one_message(name, tmp_path, monkeypatch):
    content, flags, message = BAD_FILES[name]
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    if content is not None:
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    word = name + flags if flags.startswith(":") else f"{name} {flags}"
    args = parse_flags(T5_training, ["--model-name", "tiny", "--dataset", *word.split()])
    with pytest.raises(ValueError, match=message) as error:
        T5_training.data.load(args, ByT5Tokenizer())
    assert "\n" not in str(error.value) and name in str(error.value)


def test_bad_row_stops_a_run_with_one_error(tmp_path, capfd):
    path = tmp_path / "chats.jsonl"
    path.write_text(jsonl([*CHATS, {"prompt": "q"}]))
    flags = ["--model-name", "tiny", "--dataset", str(path), "--output-dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as end:
        llama_fsdp.fsdp_main(parse_flags(llama_fsdp, flags))
    assert end.value.code == 1
    stderr = capfd.readouterr().err
    assert "Traceback" not in stderr and stderr.count("error: ") == 1
    assert f"{path}, row 31: the assistant's turn is None, not text. Correct it, or" in stderr
