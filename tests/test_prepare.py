"""tools/prepare.py: training on prepared tokens equals training on the data."""

import importlib
import sys

import pytest
from conftest import launch, losses
from in_process import start
from transformers import ByT5Tokenizer

import chat_dataset
from core.ranks import Problem

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


def test_several_validation_sets_and_existing_directories_are_refused(texts, tmp_path):
    flags = ["gpt2_fsdp.py", "--model-name", "tiny", "--dataset", texts[0], "--output-dir"]
    result = launch(0, "tools/prepare.py", *flags, tmp_path, "--val-dataset", *texts, check=False)
    assert result.returncode == 1 and "There are 2 validation sets." in result.stderr
    (tmp_path / "prepared").mkdir()
    result = launch(0, "tools/prepare.py", *flags, tmp_path, check=False)
    assert result.returncode == 1 and "prepared exists. Delete it" in result.stderr


@pytest.mark.parametrize("script, change, message", [
    ("llama_fsdp", {"chat_template": "chatml"}, "with another tokenizer or chat template"),
    ("llama_fsdp", {"max_seq_length": 32}, "tokens, but --max-seq-length allows 33"),
    ("gpt2_fsdp", {}, "prepared for llama_fsdp.py"),
])  # fmt: skip
def test_what_a_directory_was_prepared_for_is_checked(script, change, message, chats, tmp_path):
    """Also another tokenizer: its digest is that of a tokenizer without one of the tokens."""
    words = ["llama_fsdp.py", "--model-name", "tiny", "--dataset", chats, "--max-seq-length", 512]
    launch(0, "tools/prepare.py", *words, "--output-dir", tmp_path)
    name = str(tmp_path / "prepared")
    args = importlib.import_module(script).Args().data
    args.dataset = (name,)
    tokenizer = ByT5Tokenizer()
    for key, value in change.items():
        setattr(args, key, value)
    stops = chat_dataset.set_chat_template(tokenizer, args) if script == "llama_fsdp" else []
    with pytest.raises(Problem, match=message):
        sys.modules[type(args).__module__].load(args, tokenizer)
    if script == "llama_fsdp":
        assert {*stops} == {1}
        tokenizer.add_tokens("<new>")
        with pytest.raises(Problem, match="with another tokenizer"):
            chat_dataset.load(args, tokenizer)
