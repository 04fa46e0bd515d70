"""Whole runs of gpt2_fsdp.py: real text, killed and resumed, exported and reloaded."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import check_equal_weights, check_tied_once, launch, losses, metrics, weights
from in_process import start

import gpt2_fsdp

RELOAD = """
import json, sys, torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
text = open(sys.argv[2]).read().rstrip("\\n")
ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
ids = torch.tensor(ids + [tokenizer.eos_token_id])
size, total = int(sys.argv[3]), 0.0
with torch.no_grad():
    for start in range(0, len(ids) - 1, size):
        block = ids[start : start + size + 1]
        logits = model(block[None, :-1]).logits[0]
        total += F.cross_entropy(logits.double(), block[1:], reduction="sum").item()
tied = model.lm_head.weight is model.transformer.wte.weight
print(json.dumps({"loss": total / (len(ids) - 1), "tied": tied, "class": type(model).__name__}))
"""


@pytest.fixture(scope="module")
def flags(texts: tuple[Path, Path]) -> list[str]:
    """Return flags for eight steps of `tiny`, which has dropout: five per epoch, global batch 8."""
    return ["--dataset", str(texts[0]), "--val-dataset", str(texts[1]), "--block-size", "32",
            "--num-train-samples", "35", "--num-val-samples", "0", "--max-steps", "8",
            "--log-every", "1", "--eval-every", "3", "--save-every", "2", "--lr", "1e-3",
            "--model-name", "tiny"]  # fmt: skip


def reload(directory: Path, text: Path, size: int) -> dict:
    """Load an exported model with plain Transformers in a fresh process. Return its loss, its class
    and whether its embeddings are tied."""
    command = [sys.executable, "-c", RELOAD, directory, text, str(size)]
    return json.loads(subprocess.check_output(command, text=True))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, flags: list[str]) -> Path:
    """Return the output directory of a finished FSDP2 run on two ranks, with dropout."""
    output = tmp_path_factory.mktemp("run") / "uninterrupted"
    command = [*flags, "--fsdp", "2", "--batch-size", "4", "--output-dir", output]
    launch(2, "gpt2_fsdp.py", *command)
    return output


def test_killed_run_under_fsdp2_resumes_bit_for_bit(uninterrupted, flags, tmp_path):
    command = [*flags, "--fsdp", "2", "--batch-size", "4", "--output-dir", tmp_path]
    assert launch(2, "tests/workers/killed.py", "gpt2_fsdp", 1, 8, *command, check=False).returncode
    launch(2, "gpt2_fsdp.py", *command)
    assert [line["step"] for line in metrics(tmp_path, "start")] == [0, 6]
    assert losses(tmp_path) == losses(uninterrupted)
    assert losses(tmp_path, "val") == losses(uninterrupted, "val")
    check_equal_weights(tmp_path / "final", uninterrupted / "final")


def test_one_ddp_process_resumes_two_shard_grad_op_ranks(gpt2_directory, flags, tmp_path):
    """Units are chosen by size. The model has no dropout."""
    flags = [*flags, "--model-name", str(gpt2_directory)]
    output = ["--output-dir", tmp_path / "parts"]
    assert start(gpt2_fsdp, *flags, "--batch-size", "8", "--output-dir", tmp_path / "whole") == 0
    size = ["--strategy", "shard_grad_op", "--wrap", "size:3000"]
    command = [*flags, *output, *size, "--batch-size", "4"]
    assert launch(2, "tests/workers/killed.py", "gpt2_fsdp", 0, 7, *command, check=False).returncode
    assert start(gpt2_fsdp, *flags, *output, "--batch-size", "8", "--strategy", "ddp") == 0
    check_tied_once(tmp_path / "parts")
    for event in ("train", "val"):
        expected = losses(tmp_path / "whole", event)
        assert losses(tmp_path / "parts", event) == pytest.approx(expected, abs=1e-5)


def test_exported_model_has_same_perplexity(uninterrupted, flags, texts):
    val = losses(uninterrupted, "val")
    exported = reload(uninterrupted / "final", texts[1], 32)
    assert math.exp(exported["loss"]) == pytest.approx(math.exp(val[8]), rel=1e-5)
    assert exported["tied"] and exported["class"] == "GPT2LMHeadModel"
    assert "lm_head.weight" not in weights(uninterrupted / "final")
    check_tied_once(uninterrupted)
    assert metrics(uninterrupted, "val")[-1]["perplexity"] == pytest.approx(math.exp(val[8]))
    assert metrics(uninterrupted, "train")[-1]["peak_memory_mb"] > 100
