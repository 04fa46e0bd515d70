"""Extra memory of a save and a resume: 12 bytes per parameter, for weights and moments."""

import importlib.util
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.utils._pytree as pytree
from conftest import ROOT, launch
from torch.distributed.checkpoint import filesystem
from transformers import ByT5Tokenizer, GPT2Config, GPT2LMHeadModel

import llama_fsdp
from benchmarks.driven import parse_flags
from runtime import checkpoints
from runtime.checkpoints import Saver, _Writer
from runtime.state import State

SIMULATOR = ROOT.parent / "shared/simdev"


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
    return json.loads(result.read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_save_and_resume_use_one_host_copy(deep_gpt2, texts, tmp_path):
    # Give every tensor separate pages, which malloc returns as soon as the tensor is freed.
    malloc = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_ARENA_MAX": "1"}
    memory = measure(deep_gpt2, texts[0], tmp_path, **malloc)
    parameter = memory["shard"] / 4  # the shard's bytes at 1 byte per parameter
    assert 12 * parameter < memory["save"]["host"] < 13 * parameter
    assert memory["save"]["host_after"] < parameter
    moments = 8 * parameter  # the moments stay allocated
    assert memory["resume"]["host"] - moments < 12 * parameter + memory["unit"]
    assert memory["resume"]["host_after"] - moments < parameter
    assert memory["momentum_resumed"] == pytest.approx(memory["momentum_saved"], rel=1e-9)
    assert memory["momentum_saved"] > 0


def test_background_save_copies_what_training_changes():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    state = SimpleNamespace(model=model, optimizer=optimizer)
    stager = Saver(Namespace(async_save=False), Path(), state, {})._stager
    writer = SimpleNamespace(stager=stager, copied=())  # stage() sets per_thread_copy_ahead
    for _ in range(2):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        moments = optimizer.state_dict()["state"]
        tensors = {"model": dict(model.named_parameters()), "optimizer": moments}
        before = [x.detach().clone() for x in pytree.tree_leaves(tensors)]
        copies = _Writer.stage(writer, tensors)
        optimizer.step()
        assert not torch.equal(model.weight, before[0])
        assert all(map(torch.equal, pytree.tree_leaves(copies), before))


@pytest.fixture
def saved_state() -> Iterator[State]:
    """Yield a model's optimizer as a state to save, in a process group of one."""
    llama_fsdp.setup(parse_flags(llama_fsdp, ["--model-name", "tiny"]))
    model = torch.nn.Linear(1000, 500)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1000)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    objects = (model, None, optimizer, scheduler, torch.amp.GradScaler("cpu"))
    yield State(*objects, total_steps=9, step=1)
    llama_fsdp.cleanup()


def bytes_read() -> int:
    """Return the bytes that all threads of this process have read from files so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def directory_size(path: Path) -> int:
    """Return the bytes of the files in a directory."""
    return sum(file.stat().st_size for file in path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind, passes", [("sharded", 0), ("full", 1)])
def test_save_does_not_read_its_files_to_sum_them(kind, passes, saved_state, tmp_path):
    """A full checkpoint is made of shards, which are read once."""
    flags = {"async_save": False, "checkpoint_type": kind, "keep_checkpoints": 1}
    saver = Saver(Namespace(**flags), tmp_path, saved_state, {})
    assert saver.save()  # the first save also imports modules
    before = bytes_read()
    saved_state.step += 1
    assert saver.save()
    count = bytes_read() - before
    (path,) = (tmp_path / "checkpoints").iterdir()
    assert count == pytest.approx(passes * directory_size(path), abs=0.1 * directory_size(path))
    files = json.loads((path / checkpoints.STATE).read_text())["files"]
    assert files == {name: checkpoints.file_sum(path / name) for name in files}
    assert files.keys() == {file.name for file in path.iterdir()} - {checkpoints.STATE}


def test_async_save_does_not_wait_for_a_stream(saved_state, tmp_path, monkeypatch):
    flags = {"async_save": True, "timeout_minutes": 1, "checkpoint_type": "sharded"}
    saver = Saver(Namespace(**flags, keep_checkpoints=1), tmp_path, saved_state, {})
    loaders = []
    for name in ("_SerialCpuLoader", "_OverlappingCpuLoader"):
        real = getattr(filesystem, name)

        def new(*args, real=real, **options):
            loaders.append(real.__name__)
            return real(*args, **options)

        monkeypatch.setattr(filesystem, name, new)
    available = torch.cuda.is_available
    monkeypatch.setattr(
        torch.cuda, "is_available",
        lambda: "filesystem" in sys._getframe(1).f_code.co_filename or available(),
    )  # fmt: skip
    assert saver.save()
    saver.finish()
    assert loaders == ["_SerialCpuLoader"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_fsdp2_save_makes_no_copy(deep_gpt2, texts, tmp_path):
    malloc = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_ARENA_MAX": "1"}
    memory = measure(deep_gpt2, texts[0], tmp_path, "--fsdp", "2", **malloc)
    parameter = memory["shard"] / 4
    assert memory["save"]["host"] < parameter
    assert memory["resume"]["host"] < 13 * parameter  # 8 are moments, 4 gradients
    assert memory["momentum_resumed"] == pytest.approx(memory["momentum_saved"], rel=1e-9)
    assert memory["momentum_saved"] > 0


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
    assert memory["momentum_resumed"] == pytest.approx(memory["momentum_saved"], rel=1e-9)
    assert memory["momentum_saved"] > 0
    assert save["device_after"] < 1000
    # The loss check had left the root unit gathered.
    assert abs(resume["device_after"] - moments) < unit


def test_tensors_of_single_ranks_need_as_many_processes(saved_state, monkeypatch):
    saved_state.others["ema"] = torch.optim.SGD([torch.ones(2, requires_grad=True)], momentum=1.0)
    monkeypatch.setattr(checkpoints, "_other_tensors", lambda _: {"ema of rank 0": torch.ones(1)})
    with pytest.raises(ValueError, match="ema: 2 processes saved tensors of their own. Start as m"):
        checkpoints._read_others(print, saved_state, 2)
