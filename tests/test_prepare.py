"""tools/prepare.py: training on prepared tokens equals training on the data."""

import dataclasses
import importlib
import json
import shutil
import sys
from pathlib import Path
from unittest import mock

import datasets
import pytest
from conftest import launch, losses, metrics
from in_process import start
from transformers import ByT5Tokenizer

import chat_dataset
import llama_fsdp
import prepared_dataset
from core.checkpoint import crc_of
from core.ranks import Problem
from tools import prepare

SCRIPTS = {  # fixtures of --model-name and --dataset, other flags
    "T5_training": ("t5_directory", "pairs", "--rouge-samples=0"),
    "gpt2_fsdp": ("gpt2_directory", "texts", "--block-size=32"),
    "llama_fsdp": ("llama_directory", "chats", "--max-seq-length=64"),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_losses_are_those_of_the_data(script, request, tmp_path):
    model, data = map(request.getfixturevalue, SCRIPTS[script][:2])
    data = data[0] if isinstance(data, tuple) else data
    flags = ["--model-name", model, SCRIPTS[script][2], "--num-train-samples", 30, "--max-steps", 4,
             "--log-every", 1]  # fmt: skip
    words = [f"{script}.py", *flags, "--dataset", data, "--output-dir", tmp_path]
    launch(0, "tools/prepare.py", *words)
    for output, dataset in {"data": data, "tokens": tmp_path / "prepared"}.items():
        more = ["--dataset", dataset, "--output-dir", tmp_path / output]
        assert start(importlib.import_module(script), *flags, *more) == 0
    for event in ("train", "val"):
        assert losses(tmp_path / "data", event) == losses(tmp_path / "tokens", event)
    line = json.loads((tmp_path / "prepared/prepared.json").read_text())["data"]
    assert line.startswith(f"{data}: uses ")
    for output in ("data", "tokens"):
        assert metrics(tmp_path / output, "start")[0]["data"] == line


def test_several_validation_sets_and_existing_directories_are_refused(texts, tmp_path):
    flags = ["gpt2_fsdp.py", "--model-name", "tiny", "--dataset", texts[0], "--output-dir"]
    result = launch(0, "tools/prepare.py", *flags, tmp_path, "--val-dataset", *texts, check=False)
    assert result.returncode == 1 and "There are 2 validation sets." in result.stderr
    (tmp_path / "prepared").mkdir()
    result = launch(0, "tools/prepare.py", *flags, tmp_path, check=False)
    assert result.returncode == 1 and "prepared exists. Delete it" in result.stderr


@pytest.fixture(scope="module")
def prepared(chats, tmp_path_factory):
    """Return a directory that was prepared for llama_fsdp.py, with its default flags but these."""
    output = tmp_path_factory.mktemp("prepared")
    words = ["llama_fsdp.py", "--dataset", chats, "--max-seq-length", 512, "--no-packing"]
    launch(0, "tools/prepare.py", *words, "--model-name", "tiny", "--output-dir", output)
    return str(output / "prepared")


@pytest.mark.parametrize("script, changes, message", [
    ("llama_fsdp", {}, None),
    ("llama_fsdp", {"chat_template": "chatml"}, "the tokenizer and chat template is [0-9a-f]+,"),
    ("llama_fsdp", {"max_seq_length": 32}, "--max-seq-length is 32, was 512. Pass the same, or"),
    ("llama_fsdp", {"text_column": "x"}, "--text-column is x, was None. Pass the same, or"),
    ("llama_fsdp", {"num_train_samples": 9}, "otherwise: --num-train-samples is 9, was 600."),
    ("gpt2_fsdp", {"num_train_samples": 600}, "the data module is block_dataset, was chat_dataset"),
])  # fmt: skip
def test_directory_is_refused_unless_it_was_prepared_for_the_run(
    script, changes, message, prepared
):
    args = importlib.import_module(script).TINY.data
    flags = {"dataset": (prepared,), **changes}
    args = dataclasses.replace(args, **flags)
    tokenizer = ByT5Tokenizer()
    stops = chat_dataset.set_chat_template(tokenizer, args) if script == "llama_fsdp" else []
    module = sys.modules[type(args).__module__]
    if message is None:
        train_set, val_sets = module.load(args, tokenizer)
        assert {*stops} == {1} and len(train_set) and [*val_sets] == [prepared]
        tokenizer.add_tokens("<new>")
        message = "the tokenizer and chat template is [0-9a-f]+,"
    with pytest.raises(Problem, match=message):
        module.load(args, tokenizer)


@pytest.mark.parametrize("form", ["{0}/train", "{0}/..", "{0}:train", "{0} {0}", "x.jsonl {0}"])
def test_part_of_a_prepared_directory_is_refused(form, prepared):
    args = importlib.import_module("llama_fsdp").TINY.data
    args = dataclasses.replace(args, dataset=tuple(form.format(prepared).split()[::-1]))
    with pytest.raises(Problem, match="is prepared. Pass the directory of prepared.json, as the"):
        chat_dataset.load(args, ByT5Tokenizer())


def damaged(change: str, path: Path) -> None:
    """Damage a file of a prepared directory, or delete it."""
    notes = path / prepared_dataset.NOTES
    text = notes.read_text()
    changes = {"cut notes": text[:-5], "foreign notes": '{"by": "another tool"}', "list": "[1]",
               "changed template": text.replace("INST", "inst"), "no notes": ""}  # fmt: skip
    if change in changes:
        assert changes[change] != text
        notes.write_text(changes[change])
        return
    (tokens,) = path.glob("train/*.arrow")
    content = bytearray(tokens.read_bytes())
    content[len(content) // 2] ^= 4
    tokens.write_bytes({"flipped bit": content, "cut tokens": content[:-100]}.get(change, b""))
    if change == "missing tokens":
        tokens.unlink()


@pytest.mark.parametrize("change", [
    "cut notes", "foreign notes", "list", "changed template", "no notes",
    "flipped bit", "cut tokens", "empty tokens", "missing tokens",
])  # fmt: skip
def test_damaged_directory_is_refused_with_one_message(change, prepared, tmp_path):
    path = Path(shutil.copytree(prepared, tmp_path / "data"))
    args = dataclasses.replace(llama_fsdp.TINY.data, dataset=(str(path),))
    tokenizer = ByT5Tokenizer()
    chat_dataset.set_chat_template(tokenizer, args)
    damaged(change, path)
    kind, message = Problem, r"is damaged: prepare it again\.$"
    if change == "missing tokens":
        kind, message = FileNotFoundError, "train/data-"
    with pytest.raises(kind, match=message):
        chat_dataset.load(args, tokenizer)


def test_tokens_that_the_model_lacks_are_refused(prepared, tmp_path):
    """The tokenizer has more tokens than the embedding has rows."""
    args = dataclasses.replace(llama_fsdp.TINY.data, dataset=(prepared,))
    tokenizer = ByT5Tokenizer()
    chat_dataset.set_chat_template(tokenizer, args)
    highest = json.loads((Path(prepared) / prepared_dataset.NOTES).read_text())["highest_id"]
    train_set, val_sets = prepared_dataset.load(args, tokenizer, False)
    used = {token for part in (train_set, *val_sets.values()) for ids in part["input_ids"]
            for token in ids.tolist()}  # fmt: skip
    assert highest == max(used)
    tokenizer.embedding_size = highest + 1
    chat_dataset.load(args, tokenizer)
    tokenizer.embedding_size = highest
    with pytest.raises(Problem, match=f"has token {highest}, but the model has only {highest}"):
        chat_dataset.load(args, tokenizer)


def test_interrupted_preparation_leaves_nothing_under_the_name(tmp_path, monkeypatch):
    """The same command works after two interruptions, at the tokens and at the rename."""
    rows = dict.fromkeys(("train", "validation"), datasets.Dataset.from_list([{"input_ids": [7]}]))
    path = tmp_path / "prepared"
    for owner, name in ((datasets.DatasetDict, "save_to_disk"), (Path, "rename")):
        real = getattr(owner, name)

        def interrupt(*args, real=real, **options):
            real(*args, **options)
            raise KeyboardInterrupt

        if name == "rename":
            interrupt = mock.Mock(side_effect=KeyboardInterrupt)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, interrupt)
            prepare.write(rows, {}, path)
        assert not path.exists()
    prepare.write(rows, {}, path)
    notes = json.loads((path / prepared_dataset.NOTES).read_text())
    assert notes["highest_id"] == 7 and notes.pop("crc") == crc_of(notes)
    assert [file.name for file in tmp_path.iterdir()] == ["prepared"]
