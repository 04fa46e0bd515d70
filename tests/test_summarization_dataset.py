"""The data rules of summarization_dataset.py, on small files in the shape of the real ones."""

import argparse
import csv
import gc
import hashlib
import importlib.util
import itertools
import json
import os
import pickle
import random
import subprocess
import sys
import time
import weakref
from functools import partial
from pathlib import Path

import datasets
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    ByT5Tokenizer,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

import summarization_dataset as sd
from runtime import rouge
from runtime.rows import readers

ROOT = Path(__file__).resolve().parents[1]
XSUM = ROOT.parent / "shared" / "data" / "xsum_200.jsonl"
TOKENIZER = ByT5Tokenizer()
LONG = "A text that is long enough to keep the headline below three quarters of it, by far. "


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets.disable_progress_bars()
    return tmp_path / "cache"


def arguments(**changes):
    """Return defaults of the flags, all examples, texts not cut, and `changes`."""
    parser = argparse.ArgumentParser()
    sd.add_arguments(parser)
    rouge.add_arguments(parser)
    args = parser.parse_args([])
    everything = {"num_train_samples": 0, "num_val_samples": 0, "source_length": 4000}
    everything["evaluate_only"] = False
    vars(args).update(everything | {"source_prefix": "", "target_length": 1000} | changes)
    vars(args).update(sd.resolve_arguments(args))
    return args


def load(module=sd, **changes):
    """Load with the byte tokenizer; give back (text, summary) pairs of the two sets."""
    sets = module.load_summarization(arguments(**changes), TOKENIZER)
    return [
        [(decode(row["input_ids"]), decode(row["labels"])) for row in examples] for examples in sets
    ]


def decode(ids):
    assert ids[-1] == TOKENIZER.eos_token_id
    return bytes(i - 3 for i in ids[:-1]).decode()


def refusal(**changes):
    """Return the one sentence that `changes` are answered with."""
    args = arguments(**changes)
    problems = sd.check_arguments(args)
    if problems:
        (message,) = problems
    else:
        with pytest.raises(ValueError) as caught:
            sd.load_summarization(args, TOKENIZER, verbose=False)
        message = str(caught.value)
    assert not message.endswith(".") and "\n" not in message and "Traceback" not in message
    return message


def write_csv(path, header, rows, **options):
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, **options).writerows([header, *rows])
    return path


def wikihow_all(folder, rows):
    """wikihowAll.csv of (title, headline, text) rows."""
    rows = [(headline, title, text) for title, headline, text in rows]
    return write_csv(folder / "wikihowAll.csv", ("headline", "title", "text"), rows)


def wikihow_sep(folder, rows):
    """wikihowSep.csv of (title, headline, text) rows."""
    rows = [("An overview", headline, text, "Steps", title) for title, headline, text in rows]
    header = "overview", "headline", "text", "sectionLabel", "title"
    return write_csv(folder / "wikihowSep.csv", header, rows)


def articles(number):
    return [(f"How to {i}", f"Do {i}.", f"{i}: {LONG}") for i in range(number)]


def bucket_of(key):
    return int(hashlib.blake2b(key.encode(), digest_size=6).hexdigest(), 16) % 100


def placed(**changes):
    """Where all rows of a single source go: place -> (text, summary) pairs."""
    (source,) = sd.open_sources(arguments(**changes))
    rows = sd.clean_rows(source)
    places = sd.assign(source, rows, lambda line: None)
    found = {}
    for place, row in zip(places, rows, strict=True):
        found.setdefault(place, []).append((row["text"], row["summary"]))
    return found


# --- WikiHow -----------------------------------------------------------------------------------


def test_wikihow_cleaning_and_report(tmp_path, capsys):
    wikihow_all(
        tmp_path,
        [
            (
                "How to Greet",
                '\nBe "nice", always.,\nGo home.,\n',
                'Say "hello", first...\n\n\n,Then go.\r\n,Rest\nwell.\n\nBye.,' + LONG,
            ),
            ("How to Number", "123", LONG),
            ("How to Null", "null", LONG + "NA"),
            ("How to Be Short", "x" * 74, "y" * 100),
            ("How to Fail", "x" * 75, "y" * 100),  # 0.75 of the length is not shorter
            ("How to Be Empty", "  \n", LONG),
            ("How to Be Emptier", "Do it.", ""),
            ("", "A headline without title.", LONG),
        ],
    )
    found = placed(data_dir=str(tmp_path))
    assert {place: len(rows) for place, rows in found.items()} == {
        "train": 3,
        "validation": 1,
        "test": 1,
        "with an empty field": 2,
        "with a headline not shorter than 0.75 of the text": 1,
    }
    texts = {summary: text for split in sd.TITLE_LISTS for text, summary in found[split]}
    assert texts == {
        'Be "nice", always. Go home.': 'Say "hello", first. Then go. Rest well. Bye.,'
        + LONG.rstrip(),
        "123": LONG.rstrip(),
        "null": LONG + "NA",
        "x" * 74: "y" * 100,
        "A headline without title.": LONG.rstrip(),
    }
    train, val = load(data_dir=str(tmp_path))
    assert (sorted(train), val) == (sorted(found["train"]), found["validation"])
    out = capsys.readouterr().out
    assert "8 rows" in out and "2 with an empty field" in out and "a hash of the title" in out
    assert "1 with a headline not shorter than 0.75 of the text" in out
    assert "train 3, validation 1, test 1" in out
    load(data_dir=str(tmp_path))
    assert capsys.readouterr().out == out  # the numbers come from the cache as well
    args = arguments(data_dir=str(tmp_path))
    sd.load_summarization(args, TOKENIZER, verbose=False)
    assert capsys.readouterr().out == ""


def test_paragraphs_of_an_article_stay_on_one_side(tmp_path):
    rows = [(title, f"{title}: {part}", LONG) for title, _, _ in articles(300) for part in "abc"]
    random.Random(0).shuffle(rows)
    wikihow_sep(tmp_path, rows)
    found = placed(data_dir=str(tmp_path), wikihow_part="sep")
    titles = {split: {s.split(":")[0] for _, s in rows} for split, rows in found.items()}
    assert set(titles) == {"train", "validation", "test"}
    assert sum(map(len, titles.values())) == 300  # no title on two sides
    assert sum(map(len, found.values())) == 900
    for title, _, _ in articles(300):  # the rule itself, so that no version may change it
        bucket = bucket_of(title.replace(" ", ""))
        split = "train" if bucket < 98 else "validation" if bucket < 99 else "test"
        assert title in titles[split]


def test_title_lists(tmp_path, capsys):
    eyes = [(f"{t} Cat's  Eyes, Quickly{i}", h, x) for i, (t, h, x) in enumerate(articles(9))]
    wikihow_all(tmp_path, eyes)
    keys = [f"Howto{i}CatsEyesQuickly{i}" for i in range(9)]  # as the real lists have them
    lists = {"train": keys[:4], "val": keys[4:6] + keys[3:4], "test": keys[6:7]}
    for name, titles in lists.items():
        (tmp_path / f"all_{name}.txt").write_text("".join(f"{title}\n" for title in titles))
    train, val = load(data_dir=str(tmp_path))
    assert [summary for _, summary in train] == ["Do 0.", "Do 1.", "Do 2."]
    assert [summary for _, summary in val] == ["Do 3.", "Do 4.", "Do 5."]  # 3 is in both lists
    out = capsys.readouterr().out
    assert "2 with a title in none of the lists" in out and "title lists in" in out
    assert "train 3, validation 3, test 1" in out

    (tmp_path / "all_test.txt").unlink()  # optional
    assert load(data_dir=str(tmp_path)) == [train, val]
    assert "3 with a title in none of the lists" in capsys.readouterr().out
    (tmp_path / "all_train.txt").unlink()  # without it there is nothing to go by
    load(data_dir=str(tmp_path))
    assert "a hash of the title" in capsys.readouterr().out


def test_title_lists_with_spaces_are_the_same(tmp_path):
    wikihow_all(tmp_path, articles(4))
    (tmp_path / "all_train.txt").write_text("How to 0\r\nHow to 1\r\n")
    (tmp_path / "all_val.txt").write_text("How to 2")
    train, val = load(data_dir=str(tmp_path))
    assert (len(train), len(val)) == (2, 1)


def test_lists_of_other_articles_are_refused(tmp_path):
    wikihow_all(tmp_path, articles(4))
    (tmp_path / "all_train.txt").write_text("Howto0\n")
    (tmp_path / "all_val.txt").write_text("Howto77\n")
    message = refusal(data_dir=str(tmp_path))
    assert "wikihowAll.csv" in message and "0 for validation" in message


@pytest.mark.parametrize(("titles", "sizes"), [(2, (1, 1, 0)), (3, (1, 1, 1)), (5, (3, 1, 1))])
def test_every_split_gets_a_row(tmp_path, titles, sizes):
    wikihow_all(tmp_path, [row for row in articles(titles) for _ in range(2)])
    found = placed(data_dir=str(tmp_path))
    assert tuple(len(found.get(s, [])) // 2 for s in ("train", "validation", "test")) == sizes
    assert found == placed(data_dir=str(tmp_path))


def test_a_single_title_cannot_be_split(tmp_path):
    wikihow_all(tmp_path, articles(1) * 3)
    assert "cannot be split by a hash of the title" in refusal(data_dir=str(tmp_path))


def test_rows_without_a_title_are_split_by_text(tmp_path):
    wikihow_all(tmp_path, [("", headline, text) for _, headline, text in articles(500)])
    sizes = {split: len(rows) for split, rows in placed(data_dir=str(tmp_path)).items()}
    assert sizes["train"] > 450 and sizes["validation"] > 1 and sizes["test"] > 1


def test_missing_wikihow_says_where_to_get_it(tmp_path):
    for part, name in sd.WIKIHOW.items():
        message = refusal(data_dir=str(tmp_path), wikihow_part=part)
        for words in (name, str(tmp_path), "mahnazkoupaee/WikiHow-Dataset", "--dataset docstrings"):
            assert words in message


def test_big_files_are_mapped_in_parallel(tmp_path, monkeypatch, request):
    """What is garbage before is collected here, not in the processes."""
    wikihow_all(tmp_path, articles(200))
    alone = load(data_dir=str(tmp_path))
    monkeypatch.setattr(readers, "LARGE", 100)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "other")
    collected = []
    garbage = argparse.Namespace()
    garbage.itself = garbage
    weakref.finalize(garbage, collected.append, True)
    request.addfinalizer(gc.enable)
    gc.disable()
    del garbage
    assert load(data_dir=str(tmp_path)) == alone
    assert collected
    assert list((tmp_path / "other").rglob("*00001_of_00002.arrow"))


# --- Docstrings --------------------------------------------------------------------------------


def test_docstring_corpus(capsys):
    start = time.process_time()  # the machine may be shared
    first = sd.load_summarization(arguments(dataset="docstrings"), TOKENIZER)
    cold = time.process_time() - start
    again = sd.load_summarization(arguments(dataset="docstrings"), TOKENIZER)
    warm = time.process_time() - start - cold
    assert cold < 20 and warm < cold / 2
    train, val = (rows[:] for rows in first)
    assert [train, val] == [rows[:] for rows in again]
    sources = [tuple(ids) for ids in train["input_ids"] + val["input_ids"]]
    assert 1500 < len(sources) < 6000
    assert 0.03 < len(val["labels"]) / len(sources) < 0.25
    rows = sd.open_sources(arguments(dataset="docstrings"))[0].rows
    assert len(set(rows["text"])) == len(rows) == len(sources)
    assert not any({"test", "tests", "site-packages"} & set(m.split("/")) for m in rows["module"])
    place = {}
    for row in sd.clean_rows(sd.open_sources(arguments(dataset="docstrings"))[0]):
        assert "\n" not in row["text"] + row["summary"]
        assert place.setdefault(row["key"], row["place"]) == row["place"]  # by module
    assert list(readers.docstrings()) == rows.to_list()


def test_which_docstrings_are_taken(tmp_path, monkeypatch):
    taken = "The first line, a summary.\n\n    The body,\n      of two lines.\n    "
    library = {
        "a.py": f'def f():\n    """{taken}"""\nclass C:\n    "Only one line of text here."\n',
        "b.py": f'"""{taken}"""\nasync def f():\n    """Runs on to\n    line two.\n\n    {LONG}"""',
        "c.py": "def broken(:\n",
        "d.py": f'class C:\n    """Some class.\n\n\n    A{LONG}\n    """\n    x = "\\d"\n',
        "e.py": '"""A long enough headline.\n\nToo short a body."""',
        "f.txt": f'"""Not a program.\n\nB{LONG}"""',
        "g.py": f'"""Short.\n\nC{LONG}"""',
        "sub/tests/h.py": f'"""Left out, as a test.\n\nD{LONG}"""',
        "site-packages/i.py": f'"""Left out, as installed.\n\nE{LONG}"""',
        "sub/j.py": f'"""In a folder below.\n\nF{LONG}"""',
    }
    for name, text in library.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "k.py").write_bytes(b'"""Not UTF-8: caf\xe9.\n\nA body which is long enough."""')
    coded = f'# -*- coding: latin-1 -*-\n"""In Latin 1: caf\xe9.\n\nG{LONG}"""'
    (tmp_path / "l.py").write_bytes(coded.encode("latin-1"))
    monkeypatch.setattr(readers.sysconfig, "get_path", lambda name: str(tmp_path))
    assert [(row["module"], row["headline"], row["text"]) for row in readers.docstrings()] == [
        ("a.py", "The first line, a summary.", "The body,\n  of two lines."),
        ("d.py", "Some class.", f"A{LONG}".rstrip()),
        ("l.py", "In Latin 1: caf\xe9.", f"G{LONG}".rstrip()),
        ("sub/j.py", "In a folder below.", f"F{LONG}".rstrip()),
    ]


# --- Files and hub data sets -------------------------------------------------------------------

ROWS = [
    {"document": f'{i}: one,\ntwo\tand "three" caf\xe9', "id": i, "summary": f"{i}00"}
    for i in range(200)
]


def write_rows(path, rows):
    if path.suffix.lower() in (".csv", ".tsv"):
        delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
        write_csv(path, list(rows[0]), [list(row.values()) for row in rows], delimiter=delimiter)
    elif path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        path.write_text("\n".join(lines), encoding="utf-8")
    return path


COLUMNS = {"source_column": "document", "target_column": "summary"}


def test_a_damaged_cache_is_named(tmp_path, cache):
    """Each file of it, emptied and cut: the sentence names its place, or it is made anew."""
    args = arguments(dataset=str(write_rows(tmp_path / "x.jsonl", ROWS)), **COLUMNS)
    sd.load(args, TOKENIZER, False)
    whole = {file: file.read_bytes() for file in cache.rglob("*") if file.is_file()}
    refused = 0
    for file, part in itertools.product(whole, (0.0, 0.5)):
        for other, content in whole.items():
            other.unlink(missing_ok=True)  # it may be mapped still
            other.write_bytes(content[: int(part * len(content))] if other == file else content)
        try:
            sd.load(args, TOKENIZER, False)
        except OSError as error:
            assert str(error).startswith(f"the cache of data sets, {cache}, cannot be written or")
            refused += 1
    assert refused


@pytest.mark.parametrize("name", ["x.csv", "x.CSV", "a [1]*.tsv", "x.jsonl", "x.json", "x.parquet"])
def test_files_of_all_kinds(tmp_path, name):
    path = write_rows(tmp_path / name, ROWS)
    train, val = load(dataset=str(path), **COLUMNS)
    expected = [(row["document"], row["summary"]) for row in ROWS]
    held_out = [bucket_of(row["document"]) >= 95 for row in ROWS]
    expected_train = [pair for pair, held in zip(expected, held_out, strict=True) if not held]
    assert train == expected_train and any("\n" in text for text, _ in train)
    assert val == [pair for pair, held in zip(expected, held_out, strict=True) if held]
    assert val


def test_line_breaks_go_where_clean_asks(tmp_path):
    path = write_rows(tmp_path / "x.jsonl", ROWS)
    train, val = load(dataset=str(path), clean=True, **COLUMNS)
    documents = {row["document"].replace("\n", " ") for row in ROWS}
    assert {text for text, _ in train + val} == documents


def test_validation_pairs_of_ones_own(tmp_path, capsys):
    """All of --dataset is trained on then, and what is left out of either is told."""
    path = write_rows(tmp_path / "train.jsonl", ROWS[:40])
    other = write_rows(tmp_path / "val.parquet", ROWS[40:60])
    files = {"dataset": str(path), "val_dataset": str(other)}
    train, val = load(**files, **COLUMNS)
    assert [summary for _, summary in train] == [row["summary"] for row in ROWS[:40]]
    assert [summary for _, summary in val] == [row["summary"] for row in ROWS[40:60]]
    train, val = load(**files, num_train_samples=9, **COLUMNS)
    assert (len(train), len(val)) == (9, 20)
    said = capsys.readouterr().out
    assert "train: 9 of 40 examples used" in said and "validation: 20 of 20" in said
    message = refusal(dataset=str(path), val_dataset="gone.csv", **COLUMNS)
    assert "--val-dataset gone.csv is missing" in message
    assert "not with docstrings" in refusal(dataset="docstrings", val_dataset=str(other))


def test_only_built_in_sets_are_limited_by_default():
    for dataset, expected in (
        ("wikihow", (1500, 300)),
        ("docstrings", (1500, 300)),
        ("a/b", (0, 0)),
    ):
        args = arguments(dataset=dataset, num_train_samples=None, num_val_samples=None)
        assert (args.num_train_samples, args.num_val_samples) == expected
    args = arguments(dataset="docstrings", num_train_samples=0, num_val_samples=7)
    assert (args.num_train_samples, args.num_val_samples) == (0, 7)


def test_a_file_with_a_byte_order_mark_and_missing_fields(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("\ufefftext,other,headline\n" + "a\n" + "b,,c\n" + "d,,e\n", encoding="utf-8")
    found = placed(dataset=str(path))
    assert sorted(found["train"] + found["validation"]) == [("b", "c"), ("d", "e")]
    assert len(found["with an empty field"]) == 1


def test_a_csv_with_row_names(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text(",text,headline\n0,a,b\n1,c,d\n")  # as pandas writes it
    assert sorted(sum(load(dataset=str(path)), [])) == [("a", "b"), ("c", "d")]


def test_relative_paths_and_rows_without_a_summary(tmp_path, monkeypatch, capsys):
    rows = [*ROWS, {"document": "none", "id": 0, "summary": None}, {"document": None, "id": 1}]
    write_rows(tmp_path / "x.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    said = (
        "x.jsonl, line 201: its text or its summary is empty (--bad-rows skip leaves such rows out)"
    )
    assert refusal(dataset="x.jsonl", **COLUMNS) == said
    train, val = load(dataset="x.jsonl", bad_rows="skip", **COLUMNS)
    assert len(train) + len(val) == 200
    assert "x.jsonl: 2 of 202 rows left out\n  2: its text or" in capsys.readouterr().out


@pytest.mark.skipif(not XSUM.is_file(), reason=f"needs {XSUM}")
def test_xsum():
    train, val = load(dataset=str(XSUM), **COLUMNS, source_length=512, target_length=150)
    rows = [json.loads(line) for line in XSUM.read_text(encoding="utf-8").splitlines()]
    assert len(train) + len(val) == len(rows) == 200 and len(val) == 7
    assert all(text and summary for text, summary in train + val)
    assert max(len(text.encode()) for text, _ in train) == 511


def test_hub_splits(tmp_path, monkeypatch):
    """A folder named like a hub id stands in for the hub: `datasets` loads both alike."""
    folder = tmp_path / "someone" / "set"
    folder.mkdir(parents=True)
    write_rows(folder / "train.jsonl", ROWS[:40])
    write_rows(folder / "test.jsonl", ROWS[40:60])
    monkeypatch.chdir(tmp_path)
    assert "someone/set is a directory: name a file in it" in refusal(dataset="someone/set")
    monkeypatch.setattr(sd.readers, "check_name", lambda *_: [])
    train, val = load(dataset="someone/set", val_split="test", **COLUMNS)
    assert [summary for _, summary in train + val] == [row["summary"] for row in ROWS[:60]]
    assert (len(train), len(val)) == (40, 20)
    train, val = load(dataset="someone/set", val_split="train", **COLUMNS)
    assert len(train) + len(val) == 40 and val and not set(train) & set(val)
    message = refusal(dataset="someone/set", **COLUMNS)
    for words in ("someone/set", "splits train, test;", "--val-split validation", "not among"):
        assert words in message
    assert "--train-split tran" in refusal(dataset="someone/set", train_split="tran", **COLUMNS)
    message = refusal(dataset="someone/set", val_split="test")
    assert "someone/set train has columns document, id, summary;" in message
    assert "--source-column text and --target-column headline are not both among them" in message
    assert message.endswith(": give --source-column document --target-column summary")


def test_a_split_to_evaluate(tmp_path, monkeypatch):
    """WikiHow's test, any of a hub's, and no training rows; what is not there is said."""
    wikihow_all(tmp_path, articles(300))
    test = {"evaluate_only": True, "eval_split": "test"}
    data = {"dataset": "wikihow", "data_dir": str(tmp_path)}
    none, rows = sd.load_summarization(arguments(**data, **test), TOKENIZER)
    assert none is None
    found = [(decode(row["input_ids"]), decode(row["labels"])) for row in rows]
    assert found == placed(**data)["test"]
    folder = tmp_path / "someone" / "set"
    folder.mkdir(parents=True)
    write_rows(folder / "train.jsonl", ROWS[:40])
    write_rows(folder / "test.jsonl", ROWS[40:60])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sd.readers, "check_name", lambda *_: [])
    for split, expected in (("test", ROWS[40:60]), ("train", ROWS[:40])):
        args = arguments(dataset="someone/set", **test | {"eval_split": split}, **COLUMNS)
        _, rows = sd.load_summarization(args, TOKENIZER)
        assert [decode(row["labels"]) for row in rows] == [row["summary"] for row in expected]
    other = test | {"eval_split": "dev"}
    message = refusal(dataset="someone/set", **other, **COLUMNS)
    assert message == "someone/set has the splits train, test; --eval-split dev is not among them"
    message = refusal(dataset="docstrings", **test)
    assert message == "--eval-split test: docstrings has no such split, only validation"
    assert "only validation and test" in refusal(**data, **other)
    message = refusal(**data, eval_split="test")
    assert message.startswith("--eval-split test needs --evaluate-only")
    for name, titles in (("train", range(299)), ("val", [299])):
        lines = "".join(f"How to {i}\n" for i in titles)
        (tmp_path / f"all_{name}.txt").write_text(lines)
    assert "has no example in its split test" in refusal(**data, **test)


def test_hub_out_of_reach():
    message = refusal(dataset="someone/gated")
    for words in ("someone/gated is no file here", "HF_HUB_OFFLINE", "JSONL", "docstrings"):
        assert words in message
    assert "licence" not in message


# --- What is refused ---------------------------------------------------------------------------


def test_arguments_out_of_range_are_all_reported():
    wrong = {"source_length": 1, "target_length": 0, "num_train_samples": -1, "num_val_samples": -2}
    problems = sd.check_arguments(arguments(dataset="docstrings", **wrong))
    assert [problem.split()[0] for problem in problems] == [
        "--source-length",
        "--target-length",
        "--num-train-samples",
        "--num-val-samples",
    ]
    assert sd.check_arguments(arguments(dataset="docstrings", source_length=2)) == []
    assert sd.check_arguments(arguments(dataset="someone/set")) == []
    assert "--source-length 1" in refusal(dataset="docstrings", source_length=1)


@pytest.mark.parametrize("name", ["gone.csv", "gone/b/x.csv", "/gone/x", "~/gone.jsonl", "a/b/c"])
def test_missing_file(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    message = refusal(dataset=name)
    assert "--dataset" in message and Path(name).name in message and "missing" in message


def test_unknown_kind_of_file(tmp_path):
    (tmp_path / "x.txt").write_text("text")
    message = refusal(dataset=str(tmp_path / "x.txt"))
    assert "x.txt" in message and ".csv, .tsv, .jsonl, .ndjson, .json, .parquet" in message


FILES = {  # name: (content, words of the answer)
    "columns.csv": ("a,b\n1,2\n", "columns.csv has columns a, b; --source-column text and "),
    "columns.jsonl": ('{"a": "1", "text": "2"}', "columns.jsonl has columns a, text;"),
    "empty.csv": ("", "empty.csv is empty"),
    "empty.jsonl": ("", "empty.jsonl is empty"),
    "empty.parquet": ("", "empty.parquet is empty"),
    "header.csv": ("text,headline\n", "header.csv has no rows"),
    "blank.csv": ("\n\n", "blank.csv cannot be read as CSV"),
    "blank.jsonl": ("\n\n", "blank.jsonl: it has no rows"),
    "list.json": ("[]", "list.json: it has no rows"),
    "nothing.csv": ("text,headline\na,\n,b\n", "nothing.csv, row 1: its text or its summary is"),
    "one.csv": ("text,headline\na,b\n", "one.csv cannot be split by a hash of text"),
    "latin1.csv": ("text,headline\ncaf\xe9,b\n".encode("latin-1"), "is not UTF-8: convert it"),
    "latin1.jsonl": ('{"text": "\xe9"}'.encode("latin-1"), "latin1.jsonl is not UTF-8"),
    "utf16.csv": ("text,headline\na,b\n".encode("utf-16"), "utf16.csv is not UTF-8"),
    "cut.csv": (b"text,headline\na,caf\xc3", "cut.csv is not UTF-8"),
    "wide.csv": ("text,headline\na, b,c\nd,e\n", "3 fields in the first row, 2 in the header"),
    "wider.csv": (
        "text,headline\na,b\nc,d, e\n",
        "wider.csv cannot be read as CSV: Error tokenizing data. C error: Expected 2",
    ),
    "open.csv": ('text,headline\na,"b\nc,d\n', "open.csv cannot be read as CSV: badly quoted"),
    "quotes.csv": ('text,headline\na,b\n"he said "hi" to",c\n', "badly quoted from line 3 on ("),
    "header quotes.csv": ('"te"xt,headline\na,b\n', "badly quoted from line 1 on ("),
    "lists.json": ('[{"text": "a"},\n["text"]]', "lists.json, row 2: it is no JSON object"),
    "quoted.csv": (
        '"text";"headline"\n"a, b";"c"\n',
        "set apart by semicolons: save it with commas",
    ),
    "semicolon.csv": ("text;headline\na;b\n", "set apart by semicolons: save it with commas"),
    "bad.jsonl": (
        '{"text": "a"}\n\n{"text": "b}\n',
        "bad.jsonl, line 3: it cannot be read as JSON: ",
    ),
    "lists.jsonl": ('{"text": "a"}\n["text"]\n', "lists.jsonl, line 2: it is no JSON object"),
    "bad.json": ('[{"text": "a"', "bad.json: it cannot be read as JSON: "),
    "bad.parquet": ("no parquet at all", "bad.parquet cannot be read as PARQUET: "),
    "number.jsonl": ('{"text": "a", "headline": 1}', "Column headline of"),
}


@pytest.mark.parametrize("name", FILES)
def test_bad_files(tmp_path, name):
    content, words = FILES[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refusal(dataset=str(tmp_path / name))
    assert words in message and str(tmp_path / name) in message


def test_wikihow_without_its_columns(tmp_path):
    write_csv(tmp_path / "wikihowAll.csv", ("headline", "text"), [("a", "b")])
    message = refusal(data_dir=str(tmp_path))
    assert "has columns headline, text;" in message and "title are not all among them" in message


def test_title_list_that_is_not_utf8(tmp_path):
    wikihow_all(tmp_path, articles(4))
    (tmp_path / "all_train.txt").write_bytes(b"Howtocaf\xe9\n")
    (tmp_path / "all_val.txt").write_text("Howto1\n")
    assert "all_train.txt is not UTF-8" in refusal(data_dir=str(tmp_path))


def test_tokenizer_without_eos():
    with pytest.raises(ValueError, match="no EOS"):
        sd.load_summarization(arguments(dataset="docstrings"), words_tokenizer(eos_token=None))


# --- Numbers of examples, tokens, batches ------------------------------------------------------


def test_subset_is_fixed_and_drawn_from_everywhere(tmp_path):
    path = write_rows(tmp_path / "x.jsonl", ROWS)
    everything, val = load(dataset=str(path), **COLUMNS)
    some, one = load(dataset=str(path), num_train_samples=10, num_val_samples=1, **COLUMNS)
    assert (
        len(some) == 10 and len(one) == 1 and set(some) < set(everything) and set(one) <= set(val)
    )
    assert some not in (everything[:10], everything[-10:])
    assert load(dataset=str(path), num_train_samples=10, **COLUMNS)[0] == some
    assert load(dataset=str(path), num_train_samples=1000, **COLUMNS)[0] == everything


def words_tokenizer(template=True, vocabulary="abcdefgh", eos_token="</s>"):
    tokens = ["<pad>", "</s>", "<unk>", ":", "summarize", *vocabulary]
    words = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if template:
        special = [("</s>", 1)]
        backend.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos_token, pad_token="<pad>", unk_token="<unk>"
    )


@pytest.mark.parametrize("template", [True, False])
def test_encoding_ends_in_eos(tmp_path, template):
    rows = [{"text": "a b c d e f g h", "headline": "h g f e"}, {"text": "b", "headline": "a"}]
    path = write_rows(tmp_path / "x.jsonl", rows)
    args = arguments(dataset=str(path), source_length=6, target_length=3)
    args.source_prefix = "summarize: "
    sets = sd.load_summarization(args, words_tokenizer(template))
    found = sorted((row["input_ids"], row["labels"]) for rows in sets for row in rows)
    assert found == [([4, 3, 5, 6, 7, 1], [12, 11, 1]), ([4, 3, 6, 1], [5, 1])]
    assert sets[0].column_names == ["input_ids", "labels", "length"]
    assert all(row["length"] == len(row["input_ids"]) for rows in sets for row in rows)


def test_byte_encoding_is_cut_before_eos(tmp_path):
    path = write_rows(tmp_path / "x.jsonl", [{"text": t * 40, "headline": t * 9} for t in "ab"])
    train, val = load(dataset=str(path), source_prefix="say: ", source_length=16, target_length=8)
    assert sorted(train + val) == [("say: " + t * 10, t * 7) for t in "ab"]


def test_collate(monkeypatch):
    """On a GPU to a multiple of 8, on a CPU no further than the longest."""
    examples = [{"input_ids": [5] * 9, "labels": [6, 1]}, {"input_ids": [7, 1], "labels": [8] * 8}]
    assert sd.collate(examples, 0, 2)["input_ids"].tolist() == [[5] * 9, [7, 1] + [0] * 7]
    monkeypatch.setattr(sd.ranks, "accelerator", lambda: "cuda")
    collate = partial(sd.collate, pad_token_id=0, decoder_start_token_id=2)
    collate = pickle.loads(pickle.dumps(collate))
    batch = collate(examples)
    assert (batch.pop("targets"), batch.pop("tokens")) == (10, 21)
    assert {name: (tuple(t.shape), t.dtype) for name, t in batch.items()} == {
        "input_ids": ((2, 16), torch.int64),
        "attention_mask": ((2, 16), torch.int64),
        "labels": ((2, 8), torch.int64),
        "decoder_input_ids": ((2, 8), torch.int64),
        "decoder_attention_mask": ((2, 8), torch.int64),
    }
    assert batch["input_ids"].tolist() == [[5] * 9 + [0] * 7, [7, 1] + [0] * 14]
    assert batch["attention_mask"].tolist() == [[1] * 9 + [0] * 7, [1, 1] + [0] * 14]
    assert batch["labels"].tolist() == [[6, 1] + [-100] * 6, [8] * 8]
    assert batch["decoder_input_ids"].tolist() == [[2, 6, 1] + [0] * 5, [2] + [8] * 7]
    assert batch["decoder_attention_mask"].tolist() == [[1, 1] + [0] * 6, [1] * 8]


def test_collate_suits_t5():
    config = T5Config(
        vocab_size=32,
        d_model=8,
        d_kv=4,
        d_ff=8,
        num_layers=1,
        num_heads=2,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config).eval()
    batch = sd.collate([{"input_ids": [5, 1], "labels": [9, 8, 1]}], 0, 0)
    assert (batch.pop("targets"), batch.pop("tokens")) == (3, 5)
    assert torch.equal(batch["decoder_input_ids"], model._shift_right(batch["labels"]))
    given = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    assert torch.equal(model(**batch).logits, model(**given).logits)

    empty = sd.collate([], 0, 0)
    assert (empty.pop("targets"), empty.pop("tokens")) == (0, 1)
    assert {name: tuple(t.shape) for name, t in empty.items()} == dict.fromkeys(batch, (1, 1))
    assert (empty["labels"] == -100).all() and empty["attention_mask"].sum() == 1
    labels = empty.pop("labels")
    logits = model(**empty).logits
    loss = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum")
    loss.backward()
    assert logits.isfinite().all() and loss == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


# --- The cache ---------------------------------------------------------------------------------


def written(cache):
    return {path: path.stat().st_mtime_ns for path in cache.rglob("*.arrow")}


def test_a_second_process_reuses_the_cache(tmp_path, cache):
    path = write_rows(tmp_path / "x.jsonl", ROWS)
    args = {"dataset": str(path), "num_train_samples": 20, **COLUMNS}
    first = sd.load_summarization(arguments(**args), words_tokenizer())
    files = written(cache)
    assert len(files) == 4  # raw, prepared, two encoded sets
    again = sd.load_summarization(arguments(**args), words_tokenizer())
    assert written(cache) == files and again[0][:] == first[0][:]
    program = (
        "from test_summarization_dataset import *\n"
        f"train, val = sd.load_summarization(arguments(**{args!r}), words_tokenizer())\n"
        "print(train[:] , val[:])"
    )
    search = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    environment = {**os.environ, "PYTHONPATH": search, "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{first[0][:]} {first[1][:]}"
    assert written(cache) == files


def test_lengths_and_tokenizers_do_not_share_a_cache(tmp_path):
    path = write_rows(tmp_path / "x.jsonl", [{"text": t * 2, "headline": t} for t in ("a b", "c")])

    def encoded(tokenizer, **changes):
        sets = sd.load_summarization(arguments(dataset=str(path), **changes), tokenizer)
        return sorted(row["input_ids"] for rows in sets for row in rows)

    base = encoded(words_tokenizer())
    assert encoded(words_tokenizer(), source_length=2) != base
    assert encoded(words_tokenizer(vocabulary="hgfedcba")) != base
    assert encoded(words_tokenizer(), source_prefix="summarize: ") != base
    assert encoded(words_tokenizer()) == base


def test_a_changed_file_is_read_again(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("text,headline\na,b\nc,d\n")
    os.utime(path, (1e9, 1e9))
    assert sorted(sum(load(dataset=str(path)), [])) == [("a", "b"), ("c", "d")]
    path.write_text("text,headline\na,b\nc,e\n")  # same size, same date
    os.utime(path, (1e9, 1e9))
    assert sorted(sum(load(dataset=str(path)), [])) == [("a", "b"), ("c", "e")]


def test_an_edited_module_does_not_reuse_what_the_old_one_made(tmp_path, monkeypatch):
    library = tmp_path / "library"
    library.mkdir()
    for name in "abc":
        (library / f"{name}.py").write_text(f'"""Headline of {name}.\n\n{name}{LONG}"""')
    monkeypatch.setattr(readers.sysconfig, "get_path", lambda name: str(library))

    def copied(original, name, change):
        path = tmp_path / f"{name}.py"
        path.write_text(Path(original.__file__).read_text(encoding="utf-8").replace(*change))
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module, path.read_bytes() != Path(original.__file__).read_bytes()

    def edited(*change):
        module, data_set_changed = copied(sd, "copied", change)
        module.readers, readers_changed = copied(readers, "runtime.rows.copied", change)
        assert data_set_changed + readers_changed == (change[0] != change[1])
        return sorted(sum(load(module, dataset="docstrings"), []))

    before = edited("", "")
    assert len(before) == 3
    in_generator = edited('"headline": headline,', '"headline": headline.upper(),')
    assert in_generator == [(text, summary.upper()) for text, summary in before]
    in_cleaning = edited("return text, summary, number", "return text[:9], summary, number")
    assert in_cleaning == [(text[:9], summary) for text, summary in before]
    in_encoding = edited("[prefix + text for", "[prefix + text[:5] for")
    assert in_encoding == [(text[:5], summary) for text, summary in before]
    assert edited("", "") == before


def test_the_flags_are_documented():
    parser = argparse.ArgumentParser()
    sd.add_arguments(parser)
    (group,) = (group for group in parser._action_groups if group.title == "data")
    assert all(action.help for action in group._group_actions)
    assert "hold out 5% of it" in " ".join(parser.format_help().split())


# --- ROUGE -------------------------------------------------------------------------------------


def test_rouge_samples_where_they_are_not_given():
    """32 in a training, all in an evaluation; a check by itself changes nothing."""
    training, evaluation = arguments(), arguments(evaluate_only=True)
    for args in training, evaluation:
        assert rouge.check_arguments(args) == [] and args.rouge_samples is None
    assert rouge.resolve_arguments(training) == {"rouge_samples": 32}
    assert rouge.resolve_arguments(evaluation) == {}
    assert rouge.resolve_arguments(arguments(rouge_samples=5)) == {}
    assert "--num-beams 0 is out" in rouge.check_arguments(arguments(num_beams=0))[0]


def test_texts_and_their_scores():
    """Padding and rows without targets are left out; the score is in percent."""
    ids = {text: TOKENIZER(text)["input_ids"] for text in ("ab", "a c", "ab d")}
    batch = sd.collate(
        [{"input_ids": ids["ab"], "labels": ids["a c"]}, {"input_ids": ids["ab"], "labels": []}],
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    output = torch.tensor([ids["ab d"] + [0], ids["ab d"] + [0]])
    triples = rouge.generated_texts(batch, output, TOKENIZER)
    assert triples == [("ab", "a c", "ab d")]
    assert rouge.shown(triples).splitlines()[2] == "generated: ab d"
    assert rouge.score([]) == {}
    assert rouge.score([("", "one two", "one three")])["rouge1"] == pytest.approx(50)
