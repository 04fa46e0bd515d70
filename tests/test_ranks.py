"""Processes: one error on all ranks, exits that do not hang, and the environment of launchers."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, error_lines, launch, status

from core import ranks


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
    result = launch(0, "-c", code, check=False, timeout=60)
    assert result.returncode == 1 and result.stdout == "all of it"
    assert result.stderr.strip().endswith("IndexError: the fault") and "Traceback" in result.stderr


WORKER = """
import time
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
        assert str(problem).startswith(f"--seed is {rank} on one rank, {1 - rank} on another.")
        print("compared", flush=True)
    ranks.on_every_rank(fail, "rank 1 cannot read its file")

if __name__ == "__main__":
    ranks.GRACE_SECONDS = 0.5
    ranks.run(main, None)
"""


def test_error_of_one_rank_ends_all_with_one_message(tmp_path):
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    result = launch(2, path, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert result.returncode == 1 and result.stdout.count("compared") == 2
    assert set(error_lines(result.stderr)) == {"error: rank 1 cannot read its file"}


@pytest.mark.parametrize("variables", [
    {}, {"WORLD_SIZE": "4"}, {"SLURM_STEP_NUM_TASKS": "1"}, {"MASTER_ADDR": "localhost"},
])  # fmt: skip
def test_environment_without_a_rank_is_one_process(variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ranks.environment_size() == 1
    assert ranks.setup(timeout_minutes=1.0) == torch.device("cpu")
    assert dist.get_world_size() == 1 and ranks.cpu_group is None
    dist.destroy_process_group()


def test_signals_are_remembered_until_they_are_forgotten(process_group, capfd):
    request = ranks.StopRequest()
    request.listen()
    for _ in range(2):  # launchers repeat a signal
        os.kill(os.getpid(), signal.SIGUSR1)
    assert request.is_set and capfd.readouterr().out.count("Stopping") == 1
    with pytest.raises(ranks.Stopped):
        request.check()
    request.forget()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_output_that_cannot_be_written_does_not_end_a_run(block_flags, tmp_path):
    flags = [*block_flags, "--max-steps", 2, "--output-dir", tmp_path / "run"]
    with open("/dev/full", "w") as full:
        launch(0, "gpt2_fsdp.py", *flags, capture_output=False, stdout=full)
    assert status(tmp_path / "run") == "finished"
