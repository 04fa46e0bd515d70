"""Memory of a save and a resume (12 bytes per parameter, for weights and moments), and resumes with
other strategies and world sizes."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import ROOT, launch, losses, metrics, weights
from in_process import start
from transformers import ByT5Tokenizer, GPT2Config, GPT2LMHeadModel

import gpt2_fsdp
from core import checkpoint
from core.steps import settings

SIMULATOR = ROOT.parent / "shared/simdev"
# Give every tensor separate pages, which malloc returns as soon as the tensor is freed.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_ARENA_MAX": "1"}
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def deep_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a GPT-2 with 19 million parameters in 24 blocks, so that each block is small."""
    torch.manual_seed(0)
    tokenizer = ByT5Tokenizer()
    shape = {"n_embd": 256, "n_layer": 24, "n_head": 4, "n_positions": 64}
    config = GPT2Config(vocab_size=len(tokenizer), bos_token_id=1, eos_token_id=1, **shape)
    path = tmp_path_factory.mktemp("deep")
    GPT2LMHeadModel(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def measure(model: Path, text: Path, directory: Path, *flags: str, **environment: str) -> dict:
    """Return the results of state_dict_worker.py on two ranks."""
    result = directory / "result.json"
    worker = ["tests/workers/state_dict_worker.py", result, model, text, directory / "run", *flags]
    launch(2, *worker, env=os.environ | environment)
    memory = json.loads(result.read_text())
    assert memory["momentum_resumed"] == pytest.approx(memory["momentum_saved"], rel=1e-9)
    assert memory["momentum_saved"] > 0
    return memory


@needs_proc
def test_save_and_resume_use_one_host_copy(deep_gpt2, texts, tmp_path):
    memory = measure(deep_gpt2, texts[0], tmp_path, **MALLOC)
    parameter = memory["shard"] / 4  # the shard's bytes at 1 byte per parameter
    assert 12 * parameter < memory["save"]["host"] < 13 * parameter
    assert memory["save"]["host_after"] < parameter
    moments = 8 * parameter  # the moments stay allocated
    assert memory["resume"]["host"] - moments < 12 * parameter + memory["unit"]
    assert memory["resume"]["host_after"] - moments < parameter


@pytest.mark.slow
@needs_proc
def test_fsdp2_save_makes_no_copy(deep_gpt2, texts, tmp_path):
    memory = measure(deep_gpt2, texts[0], tmp_path, "--fsdp", "2", **MALLOC)
    parameter = memory["shard"] / 4
    assert memory["save"]["host"] < parameter
    assert memory["resume"]["host"] < 13 * parameter  # 8 are moments, 4 gradients


@pytest.mark.slow
@pytest.mark.skipif(not SIMULATOR.is_dir(), reason="../shared/simdev is absent")
@pytest.mark.skipif(not importlib.util.find_spec("ninja"), reason="needs ninja and g++")
@pytest.mark.parametrize("flags", [[], ["--cpu-offload"]], ids=" ".join)
def test_save_and_resume_use_little_device_memory(flags, deep_gpt2, texts, tmp_path):
    simulated = {"SIMULATED": "1", "PYTHONPATH": str(SIMULATOR)}
    memory = measure(deep_gpt2, texts[0], tmp_path, *flags, **simulated)
    parameter, unit = memory["shard"] / 4, memory["unit"]
    moments = 0 if flags else 8 * parameter
    save, resume = memory["save"], memory["resume"]
    assert save["device"] < unit + parameter
    assert resume["device"] - moments < unit + 8 * parameter
    assert 12 * parameter < save["host"] < 13 * parameter
    assert resume["host"] < 13 * parameter
    assert save["device_after"] < 1000
    assert abs(resume["device_after"] - moments) < unit


def test_full_file_and_extra_tensors_of_single_ranks(process_group, tmp_path):
    """The extra tensors need as many processes."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"settings": settings(optimizer), "step": 2, "flags": {}, "identity": {"--seed": 0}}
    mean, seven = torch.zeros(2), torch.full((2,), 7.0)
    extra = checkpoint.extra_state("mine", {"mean": seven})
    tensors = checkpoint.snapshot(model, optimizer, state) | extra
    checkpoint.save(tmp_path / "x", tensors, state, full=True)
    assert torch.equal(torch.load(tmp_path / "x/full.pt")["model"]["weight"], model.weight)
    extra = checkpoint.extra_state("mine", {"mean": mean})
    checkpoint.read(tmp_path / "x", extra)
    assert torch.equal(mean, seven)
    extra["mine"] = {"mean of rank 0 of 2": mean}  # as two processes would read it
    with pytest.raises(dcp.CheckpointException, match="mean of rank 0 of 2"):
        checkpoint.read(tmp_path / "x", extra)


def test_checkpoints_cross_strategies_and_world_sizes(gpt2_directory, texts, tmp_path):
    """A run is killed under FSDP1 on 2 ranks, FSDP2 on 4 and FSDP1 on 2, then ends under DDP on 1.
    It uses sharded, full and asynchronous saves."""
    common = ["--model-name", gpt2_directory, "--dataset", texts[0], "--val-dataset", texts[1],
              "--block-size", "32", "--num-train-samples", "35", "--num-val-samples", "0",
              "--max-steps", "8", "--log-every", "1", "--eval-every", "3", "--save-every", "2",
              "--lr", "1e-3"]  # fmt: skip
    whole, output = tmp_path / "whole", tmp_path / "parts"
    one_process = [*common, "--batch-size", "8"]
    assert start(gpt2_fsdp, *one_process, "--fsdp", "2", "--output-dir", whole) == 0
    one = ["--fsdp", "1", "--batch-size", "4"]
    two = ["--fsdp", "2", "--batch-size", "2", "--checkpoint-type", "full", "--async-save"]
    hybrid = ["--strategy", "hybrid_shard", "--shard-group-size", "2"]
    for processes, step, flags in ((2, 3, one), (4, 7, [*two, *hybrid]), (2, 8, one)):
        killed = ["tests/workers/killed.py", "gpt2_fsdp", 0, step, *common, *flags]
        assert launch(processes, *killed, "--output-dir", output, check=False).returncode
    assert start(gpt2_fsdp, *one_process, "--strategy", "ddp", "--output-dir", output) == 0
    starts = [line["step"] for line in metrics(output, "start")]
    assert starts in ([0, 2, 5, 6], [0, 2, 6, 6])  # the pending save may be lost
    for event in ("train", "val"):
        assert losses(output, event) == pytest.approx(losses(whole, event), abs=1e-5)
    for name in ("final", "best"):
        expected = weights(whole / name)
        for key, tensor in weights(output / name).items():
            assert tensor.sub(expected[key]).abs().max() < 1e-4
    before = weights(output / "final")
    export = ["--fsdp", "2", "--export-only", "--output-dir", output]
    assert start(gpt2_fsdp, *one_process, *export) == 0
    assert all(tensor.equal(before[key]) for key, tensor in weights(output / "final").items())
