"""--async-save: saves in the background contain what foreground saves do, and fail as they do."""

import json
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.utils._pytree as pytree
from conftest import check_equal_runs, error_lines, launch, metrics, status
from in_process import start
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import gpt2_fsdp
from core import checkpoint
from optional.async_save import Saver, Saves


@pytest.fixture
def flags(block_flags: list[str]) -> list[str]:
    """Return flags for eight steps that save every second step."""
    return [*block_flags, "--save-every", "2", "--batch-size", "4", "--max-steps", "8",
            "--keep-checkpoints", "9"]  # fmt: skip


def test_background_save_copies_what_training_changes(process_group):
    model = torch.nn.Linear(3, 2)
    saver = Saver(checkpoint.save, Saves(async_save=True), model, 1.0)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        moments = optimizer.state_dict()["state"]
        tensors = {"model": dict(model.named_parameters()), "optimizer": moments}
        before = [x.detach().clone() for x in pytree.tree_leaves(tensors)]
        copies = saver._copy(tensors)
        optimizer.step()
        assert not torch.equal(model.weight, before[0])
        assert all(map(torch.equal, pytree.tree_leaves(copies), before))


def contents(path: Path, directory: Path) -> tuple[dict, dict]:
    """Return the state and the tensors, by name, of a checkpoint."""
    state = json.loads((path / checkpoint.STATE).read_text())
    dcp_to_torch_save(path, directory / "whole.pt")
    tensors = torch.load(directory / "whole.pt")
    return state, {pytree.keystr(key): x for key, x in pytree.tree_flatten_with_path(tensors)[0]}


def test_background_saves_equal_foreground_saves(flags, tmp_path):
    for name, more in {"plain": [], "async": ["--async-save"]}.items():
        assert start(gpt2_fsdp, *flags, "--output-dir", tmp_path / name, *more) == 0
    names = sorted(path.name for path in tmp_path.glob("plain/checkpoints/*"))
    assert names == [f"step-0000000{step}" for step in (2, 4, 6, 8)]
    for name in names:
        pair = [tmp_path / run / "checkpoints" / name for run in ("plain", "async")]
        (state, tensors), (other_state, others) = (contents(path, tmp_path) for path in pair)
        assert state.pop("files").keys() == other_state.pop("files").keys()
        assert state == other_state and tensors.keys() == others.keys()
        assert all(torch.equal(tensor, others[key]) for key, tensor in tensors.items())
        assert (pair[1] / "crc-0.json").is_file()


def test_save_does_not_wait_for_a_stream(flags, tmp_path, monkeypatch):
    """PyTorch would copy ahead on a stream of its own, which waits for the training."""
    writer = mock.Mock(wraps=checkpoint.dcp.FileSystemWriter)
    monkeypatch.setattr(checkpoint.dcp, "FileSystemWriter", writer)
    flags = [*flags, "--max-steps", "2", "--output-dir", tmp_path, "--async-save"]
    assert start(gpt2_fsdp, *flags) == 0
    (call,) = writer.call_args_list
    assert call.kwargs["per_thread_copy_ahead"] == 0


def fail(monkeypatch: pytest.MonkeyPatch, calls: set[int]) -> list[str]:
    """Make these calls of `checkpoint.save` fail; return a list of the threads of all calls."""
    save, threads = checkpoint.save, []

    def failing_save(path: Path, *args: object, **options: object) -> None:
        threads.append(threading.current_thread().name)
        if len(threads) in calls:
            raise OSError(f"{path} could not be saved (No space left on device).")
        save(path, *args, **options)

    monkeypatch.setattr(checkpoint, "save", failing_save)
    return threads


def test_failed_save_is_tried_again_at_the_next_one(flags, tmp_path, monkeypatch, capfd):
    threads = fail(monkeypatch, {2})
    assert start(gpt2_fsdp, *flags, "--output-dir", tmp_path, "--async-save") == 0
    assert [name == "MainThread" for name in threads] == [False, False, True, False]
    assert capfd.readouterr().out.count("step-00000004 could not be saved") == 1
    saved = list(tmp_path.glob("checkpoints/step-*/train_state.json"))
    assert len(saved) == 3 and status(tmp_path) == "finished"


def test_disk_that_stays_full_ends_the_run(flags, tmp_path, monkeypatch, capfd):
    threads = fail(monkeypatch, set(range(2, 99)))
    assert start(gpt2_fsdp, *flags, "--output-dir", tmp_path, "--async-save") == 1
    (error,) = error_lines(capfd.readouterr().err)
    assert "step-00000008 could not be saved" in error and len(threads) == 4
    (state,) = tmp_path.glob("checkpoints/*/train_state.json")
    assert state.parent.name == "step-00000002"


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", ["1", "2"])
def test_killed_run_resumes_bit_for_bit(fsdp, flags, tmp_path):
    flags = [*flags, "--batch-size", "2", "--fsdp", fsdp]
    launch(2, "gpt2_fsdp.py", *flags, "--output-dir", tmp_path / "whole")
    command = [*flags, "--output-dir", tmp_path / "killed", "--async-save"]
    assert launch(2, "tests/workers/killed.py", "gpt2_fsdp", 0, 8, *command, check=False).returncode
    launch(2, "gpt2_fsdp.py", *command)
    assert metrics(tmp_path / "killed", "start")[-1]["step"] in (4, 6)
    check_equal_runs(tmp_path / "killed", tmp_path / "whole")
