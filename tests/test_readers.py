"""Test runtime/readers.py: rows keep the files' values, and bad files cause one error message."""

import errno
import gzip
import json
import os
import random
import subprocess
import sys
import time
from decimal import Decimal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from datasets import Audio, Dataset, Features, Value, load_dataset
from huggingface_hub import snapshot_download
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

import block_dataset
import gpt2_fsdp
import llama_fsdp
import T5_training
from benchmarks.driven import parse_flags
from runtime import readers
from runtime.chats import LLAMA_2

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
    assert [*readers.columns_of("x", rows)] == ["text", "n", "of"]
    features = {"json": Value("string")}

    def dump(batch: list[dict]) -> list[list[dict]]:
        return [[{"json": json.dumps(row)}] for row in batch]

    samples = readers.map_rows(str(path), rows, dump, features, "fail")["json"]
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
        "args = Options()\n"
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
    "column.jsonl": (
        jsonl(PAIRS),
        "--source-column x",
        "no column x.* Pass --source-column text --target-col",
    ),
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
    "utf16.csv": ("text,headline\na,b\n".encode("utf-16"), "", "Convert text to UTF-8"),
    "latin1.csv": (b"text,headline\ncaf\xe9,b\n", "", "utf-8' codec can't decode byte 0xe9"),
    "semicolon.csv": ("text;headline\na;b\nc\n", "", "row 2: line 3: 1 fields, not 2"),
    "quote.csv": ('text,headline\na,"b\nc,d\n', "", "quote.csv, line 3: unexpected end of data"),
    "inner.csv": ('text,headline\na,b\n"he "hi" to",c\n', "", "inner.csv, line 3: ',' expected"),
    "wide.csv": (
        "text,headline\na,b,c\nd,e\n",
        "",
        "wide.csv, row 1: line 2: 3 fields, not 2. Correct it, or pass --bad-rows skip",
    ),
    "field.csv": (
        "text,headline\na,b\nc,\n",
        "",
        "field.csv, row 2: the text or the summary is em",
    ),
    "twice.csv": ("text,headline,text\na,b,c\n", "", "twice.csv has the column text twice"),
    "narrow.csv": ("text,headline,x\na,b\n", "", "narrow.csv, row 1: line 2: 2 fields, not 3"),
    "latin1.csv.gz": (gzip.compress(b"text,headline\ncaf\xe9,b\n"), "", "Convert text to UTF-8"),
    "plain.jsonl.gz": ("text", "", "plain.jsonl.gz cannot be read: .*Compress it again"),
    "half.jsonl": (
        '{"text": "a\\ud800", "headline": "b"}\n' * 2,
        "",
        "half.jsonl, row 1: .*surrogates not",
    ),
    "half.json": (
        '[{"text": "a", "headline": "b", "x": "\\ud800"}]',
        "",
        "row 1: .*surrogates not allowed",
    ),
    "nan.jsonl": (
        '{"text": NaN, "headline": "b"}\n',
        "",
        "nan.jsonl, row 1: text is nan, not text",
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


WORDS = ["It's", "the", "House", "42", "naïve", "日本", "x=1;", "end.", "-"]
GAPS = [
    " ",
    " ",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\n\n\n",
    "\r\n",
    "\r\n\r\n",
    "\n    ",
    " \n",
    "\t",
    ".\n\n",
]
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {  # pre-tokenizers
    "GPT-2": None,
    "Llama 3": LLAMA_3,
    "Qwen": LLAMA_3.replace("{1,3}", ""),
    "SentencePiece": "",
}


def random_text(seed: int, count: int) -> str:
    """Return words with blank lines, indentation and other gaps."""
    draw = random.Random(seed)
    return "".join(draw.choice(WORDS) + draw.choice(GAPS) for _ in range(count))


def small_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Return a BPE tokenizer with the pre-tokenizer of a model family."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=PATTERNS[kind] is None)
    if kind == "SentencePiece":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    elif PATTERNS[kind]:
        split = pre_tokenizers.Split(Regex(PATTERNS[kind]), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    else:
        tokenizer.pre_tokenizer = level
    options = {"special_tokens": ["<unk>", "</s>"], "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=level.alphabet(), **options)
    tokenizer.train_from_iterator([random_text(9, 3000)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("kind", PATTERNS)
def test_text_file_has_the_tokens_of_the_whole_text(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "PIECE", 64)
    tokenizer = small_tokenizer(kind)
    for seed, ending in enumerate(("", "\n", "x", "\n\n", "\r\n")):
        text = random_text(seed, 2000) + ending
        (tmp_path / f"{seed}.txt").write_bytes(text.encode())
        path = str(tmp_path / f"{seed}.txt")
        pieces = readers.read(path, None)["train"]
        assert len(pieces) > 50 and max(map(len, pieces["text"])) < 1000
        args = parse_flags(gpt2_fsdp, ["--dataset", path, "--block-size", "64"])
        rows = block_dataset.load_blocks(path, tokenizer, args)["train"]
        ids = [x for row in rows for x in row["input_ids"][:-1]] + [rows[-1]["input_ids"][-1]]
        expected = tokenizer(text.rstrip("\r\n"))["input_ids"]
        assert ids == [*expected, tokenizer.eos_token_id]


def test_compressed_files_have_the_rows_of_plain_ones(tmp_path):
    rows = [{"text": f"a {i}", "headline": f"b {i}"} for i in range(40)]
    contents = {
        "a.jsonl": jsonl(rows),
        "b.json": json.dumps(rows),
        "c.csv": "text,headline\n" + "".join(f"{x['text']},{x['headline']}\n" for x in rows),
        "d.txt": "one\n\ntwo\n",
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content.encode()))
        names = name, f"{name}.gz", f"{name}*"
        plain, packed, both = (readers.read(str(tmp_path / x), None)["train"] for x in names)
        assert list(plain) == list(packed) and list(both) == 2 * list(plain)
    assert len(readers.read(str(tmp_path), None)["train"]) == 2  # the text files of a directory
    Dataset.from_list(rows).to_parquet(tmp_path / "x.parquet")
    content = (tmp_path / "x.parquet").read_bytes()
    (tmp_path / "y.parquet.gz").write_bytes(gzip.compress(content))
    assert list(readers.read(str(tmp_path / "y.parquet.gz"), None)["train"]) == rows


def test_data_set_of_hf_download_is_read_from_the_hub_cache(tmp_path, monkeypatch, capfd):
    repository = tmp_path / "datasets--someone--pairs"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("1" * 40)
    snapshot = repository / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "train.jsonl").write_text(jsonl(PAIRS))
    monkeypatch.setattr(
        readers, "snapshot_download", partial(snapshot_download, cache_dir=tmp_path)
    )
    assert list(readers.read("someone/pairs", None)["train"]) == PAIRS
    assert f"the rows are those of all files in {snapshot}" in capfd.readouterr().out
    with pytest.raises(ValueError, match="someone/other cannot be read: .*Correct the name"):
        readers.read("someone/other", None)


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("name", ["someone/pairs", "x.parquet"])
def test_cache_that_cannot_be_written_is_not_called_a_wrong_name(
    name, number, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("x.parquet").write_text("rows")

    def load_dataset(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "cache/x.lock")

    monkeypatch.setattr(readers.datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match="x.lock'. Allow it, or set HF_DATASETS_CACHE to a"):
        readers.read(name, None)


def test_long_and_short_csv_rows_are_skipped_and_counted(tmp_path, capfd):
    lines = ["text,headline", *(f"text {i},line {i}" for i in range(60)), "a,b,c", "d"]
    (tmp_path / "x.csv").write_text("\n".join(lines) + "\n")
    args = parse_flags(T5_training, ["--dataset", str(tmp_path / "x.csv"), "--bad-rows", "skip"])
    T5_training.data.load(args, ByT5Tokenizer())
    printed = capfd.readouterr().out
    assert "60 of 62 rows used" in printed and "line 62: 3 fields, not 2" in printed
    assert "line 63: 1 fields, not 2" in printed


def test_shards_with_different_fields_train_as_when_listed(tmp_path):
    calls = [{"a": 1}, {"b": ["x"]}, None]
    for i, value in enumerate(calls):
        rows = []
        for number in range(20):
            question = {"role": "user", "content": f"q{i} {number}"}
            turns = [question, {"role": "assistant", "content": "a"}]
            rows.append({"messages": turns, "extra": value} | ({"only": 1} if i == 1 else {}))
        Dataset.from_list(rows).to_parquet(tmp_path / f"{i}.parquet")
    rows = [
        llama_fsdp.data.load(
            parse_flags(
                llama_fsdp,
                ["--model-name", "tiny", "--dataset", *names, "--val-dataset", names[0]],
            ),
            ByT5Tokenizer(chat_template=LLAMA_2),
        )[0].dataset
        for names in ([f"{tmp_path}/*.parquet"], [f"{tmp_path}/{i}.parquet" for i in range(3)])
    ]
    assert {tuple(x) for x in rows[0]["input_ids"]} == {tuple(x) for x in rows[1]["input_ids"]}


def test_columns_that_nobody_asked_for_are_not_decoded(tmp_path):
    """Without a decoder for audio, reading that column would raise an error."""
    rows = [{"text": f"t {i}", "headline": "h", "sound": {"bytes": b"x", "path": None}}
            for i in range(40)]  # fmt: skip
    columns = Features(text=Value("string"), headline=Value("string"), sound=Audio())
    table = Dataset.from_list(rows).cast(columns)
    table.to_parquet(tmp_path / "x.parquet")
    path = str(tmp_path / "x.parquet")
    args = parse_flags(T5_training, ["--dataset", path])
    assert len(T5_training.data.load(args, ByT5Tokenizer())[0]) == 38
    args = parse_flags(gpt2_fsdp, ["--dataset", path, "--block-size", "8"])
    assert block_dataset.load(args, ByT5Tokenizer())[0]


@pytest.mark.parametrize("groups", [[960] + [1] * 39, [400, 300, 200, *[1] * 100], [3] * 300])
def test_hold_out_takes_at_most_a_tenth_of_the_rows(groups):
    numbers = np.random.default_rng(0).permutation(10**6)[: len(groups)]
    keys = np.repeat(numbers, groups)
    for usual in (keys % 100 >= 95, keys < np.unique(keys)[max(1, len(groups) // 20)]):
        mask = readers.held_out("x", keys, usual)
        assert min(39, len(keys) / 40) <= mask.sum() <= len(keys) / 10
        assert not {*keys[mask]} & {*keys[~mask]}


@pytest.mark.slow  # measures time
def test_blocks_of_a_long_row_take_linear_time():
    seconds = []
    for count in (400_000, 3_200_000):
        times = []
        for _ in range(3):
            start = time.process_time()
            assert sum(1 for _ in block_dataset.blocks([{"input_ids": [5] * count}], 128)) > 1000
            times.append(time.process_time() - start)
        seconds.append(min(times))
    assert seconds[1] < 30 * seconds[0]  # eight times the tokens


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


def test_guessed_columns_are_in_the_right_order():
    """A row's texts and their summaries are named in any order, and an index is not text."""
    for columns, pair in (
        ({"id": 2, "summary": 9, "dialogue": 99}, ["dialogue", "summary"]),
        ({"title": 9, "abstract": 99}, ["abstract", "title"]),
        ({"": 2, "Frage": 9, "Kurze Antwort": 9}, ["Frage", "'Kurze Antwort'"]),
        ({"Unnamed: 0": 2, "answer": 5, "question": 5}, ["question", "answer"]),
    ):
        assert readers.guess_columns(columns) == pair


def test_only_text_files_of_a_directory_are_text(tmp_path):
    Dataset.from_list(PAIRS).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved/README.txt").write_text("not a row")
    assert readers.find_paths(str(tmp_path / "saved")) == [tmp_path / "saved"]
    Dataset.from_list(PAIRS).save_to_disk(tmp_path / "saved too")
    with pytest.raises(ValueError, match="cannot be read"):
        readers.read(str(tmp_path / "saved*"), None)
    for name in ("a.txt", "._a.txt"):
        (tmp_path / name).write_text("x")
    assert readers.find_paths(str(tmp_path)) == [tmp_path / "a.txt"]
    (tmp_path / "a.txt").write_bytes("text".encode("utf-16-le"))
    with pytest.raises(ValueError, match="is not text: it contains a zero byte"):
        readers.read(str(tmp_path / "a.txt"), None)


def test_other_columns_in_a_glob_hide_no_problem_or_weight(tmp_path):
    (tmp_path / "a.csv").write_text("text,headline\ngood,x\nOne, two,summary of three\n")
    (tmp_path / "b.csv").write_text("text,headline,id\nother,sum,1\n")
    rows = readers.read(str(tmp_path / "*.csv"), None)["train"]
    with pytest.raises(ValueError, match="line 3: 3 fields, not 2"):
        list(map(readers.parse, rows))
    for number, row in enumerate([{"loss": Decimal(0)}, {"loss": Decimal(1), "x": 1}]):
        Dataset.from_list([row]).to_parquet(tmp_path / f"{number}.parquet")
    rows = readers.read(str(tmp_path / "*.parquet"), None)["train"]
    assert [readers.parse(row)["loss"] for row in rows] == [0, 1]


def test_columns_of_mixed_types_are_read_as_values(tmp_path):
    """`datasets` 5 stores them as JSON."""
    values = ['Two.\nSure "2"', 42]
    (tmp_path / "x.jsonl").write_text(jsonl([{"text": x} for x in values]))
    rows = load_dataset("json", data_files=str(tmp_path / "x.jsonl"), split="train")
    rows.save_to_disk(tmp_path / "saved")
    rows = readers.select(readers.read(str(tmp_path / "saved"), None)["train"], ["text"])
    assert [row["text"] for row in rows] == values
