"""Processes: one error on all ranks, exits that do not hang, and the environment of launchers."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, launch, metrics, status

from core import ranks
from core.ranks import Problem


def python(code: str, **options: float) -> subprocess.CompletedProcess:
    """Run Python code in a new process."""
    pipes = {"cwd": ROOT, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, "-c", code], **pipes, **options)


def test_uncaught_exception_ends_the_process():
    """A normal Python exit would hang."""
    code = """
import atexit, time
from core import ranks
atexit.register(time.sleep, 100)
def main(args):
    print("all of it", end="")
    raise IndexError("the fault")
ranks.run(main, None)
"""
    result = python(code, timeout=60)
    assert result.returncode == 1 and result.stdout == "all of it"
    assert result.stderr.strip().endswith("IndexError: the fault") and "Traceback" in result.stderr


WORKER = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from core import ranks

def fail(text):
    if dist.get_rank() == 1:
        raise ranks.Problem(text)

def main(_):
    ranks.setup(timeout_minutes=7)
    assert dist.group.WORLD._get_backend(ranks.torch.device("cpu")).options._timeout == (
        timedelta(minutes=7))
    rank = dist.get_rank()
    assert ranks.on_every_rank(lambda: rank) == [0, 1]
    assert ranks.host_sums([1, rank]) == [2, 1]
    assert ranks.on_rank_zero(lambda: rank) == 0
    assert ranks.compare_ranks({"--seed": 0}) == {"--seed": 0}
    calls = []
    ranks.local_main_process_first(lambda: calls.append(time.time()))
    times = ranks.on_every_rank(lambda: calls)
    assert times[0] < times[1]
    try:
        ranks.compare_ranks({"--seed": rank})
    except ranks.Problem as problem:
        assert str(problem).startswith("--seed is 0 on rank 0, 1 on rank 1. Give all nodes the")
        print("compared", flush=True)
    ranks.on_every_rank(fail, "rank 1 cannot read its file")

if __name__ == "__main__":
    ranks.GRACE_SECONDS = 0.5
    ranks.run(main, None)
"""


def test_error_of_one_rank_ends_all_with_one_message(tmp_path):
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = launch(2, path, check=False, env=environment)
    assert result.returncode == 1 and result.stdout.split() == ["compared"] * 2
    messages = [x for x in result.stderr.splitlines() if x.startswith("error: ")]
    assert set(messages) == {"error: rank 1 cannot read its file"}
    assert messages[0] in result.stderr.split("Root Cause")[1]  # the last lines on the screen


@pytest.mark.parametrize("variables", [
    {}, {"WORLD_SIZE": "4"}, {"SLURM_STEP_NUM_TASKS": "1"}, {"MASTER_ADDR": "localhost"},
])  # fmt: skip
def test_environment_without_a_rank_is_one_process(variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ranks.environment_size() == 1
    assert ranks.setup(timeout_minutes=1.0) == torch.device("cpu")
    assert dist.get_world_size() == 1 and ranks.cpu_group() is None
    dist.destroy_process_group()


def test_error_on_a_rank_is_raised_with_its_message(process_group):
    for error in (Problem("what"), OSError("where")):

        def fail(error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error), match=str(error)):
            ranks.on_rank_zero(fail)


def test_request_to_stop_is_kept_if_stdout_is_full(monkeypatch):
    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "write", fail)
    request = ranks.StopRequest()
    request.listen()
    signal.raise_signal(signal.SIGUSR1)
    request.forget()
    assert request.is_set


@pytest.fixture
def flags(t5_directory, pairs, tmp_path):
    """Return flags for two steps of T5 on a copy of the model, which a test may change."""
    model = shutil.copytree(t5_directory, tmp_path / "model")
    return ["--model-name", model, "--dataset", pairs, "--output-dir", tmp_path / "run",
            "--max-steps", 2, "--batch-size", 2, "--rouge-samples", 2]  # fmt: skip


def set_generation(model: Path, **values: object) -> None:
    """Change fields of a model's generation_config.json."""
    path = model / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_settings_that_change_the_outputs_are_ignored(flags, tmp_path):
    values = {"num_return_sequences": 2, "num_beams": 2, "return_dict_in_generate": True}
    set_generation(tmp_path / "model", **values, output_scores=True, stop_strings=["x"])
    environment = os.environ | {"MASTER_ADDR": "localhost", "PYTHONIOENCODING": "ascii"}
    launch(0, "T5_training.py", *flags, env=environment)
    (done,) = metrics(tmp_path / "run", "done")
    assert "rouge1" in done
    exported = json.loads((tmp_path / "run/final/generation_config.json").read_text())
    assert exported["num_return_sequences"] == 2  # as the base had it


@pytest.mark.parametrize("is_closed", [False, True])
def test_output_that_cannot_be_written_does_not_end_a_run(is_closed, flags, tmp_path):
    close = (lambda: os.close(1)) if is_closed else None
    with open("/dev/full", "w") as full:
        options = {"capture_output": False, "stdout": full, "preexec_fn": close}
        launch(0, "T5_training.py", *flags, **options)
    assert status(tmp_path / "run") == "finished"
