"""Ranks that cannot reach each other, and exits that end."""

import subprocess
import sys
import time

import pytest
from conftest import ROOT, errors_said, launch


def python(code: str, **options: float) -> subprocess.CompletedProcess:
    """Run a program."""
    pipes = {"cwd": ROOT, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, "-c", code], **pipes, **options)


@pytest.mark.parametrize(
    "processes,fault", [(2, "default group"), pytest.param(4, "mesh", marks=pytest.mark.slow)]
)
def test_unreachable_ranks_are_reported_in_time(processes, fault):
    """gloo alone would wait for the group's time-out. A rank that joins after the limit is waited
    for."""
    start = time.monotonic()
    result = launch(processes, "tests/workers/ranks_worker.py", fault, check=False)
    assert time.monotonic() - start < 80
    assert result.stdout.count("joined") == 4 * (fault == "mesh")
    (said,) = errors_said(result.stderr)
    assert "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME" in said and "in 3 s" in said
    assert said in result.stderr.split("Root Cause")[1]


@pytest.mark.parametrize("where", ["init_process_group", "new_group"])
def test_hanging_nccl_start_is_reported(where):
    """A thread reports it, because init_process_group waits inside NCCL."""
    code = f"""
import functools, time, torch.distributed as dist
from datetime import timedelta
from runtime import ranks
ranks.joining = functools.partial(ranks.joining, limit=1.0)
dist.init_process_group = dist.new_group = lambda **_: None
dist.{where} = lambda **_: time.sleep(100)
dist.get_backend = lambda: "nccl"
with ranks.rendezvous(timedelta(minutes=30)) as place:
    dist.init_process_group(**place)
"""
    result = python(code, timeout=60)
    assert result.returncode == 1
    (said,) = errors_said(result.stderr)
    assert "NCCL_SOCKET_IFNAME" in said


def test_uncaught_exception_ends_the_process():
    """Python's own exit would hang."""
    code = """
import atexit, time
from runtime.run import launch
atexit.register(time.sleep, 100)
def main(args):
    print("all of it", end="")
    raise IndexError("the fault")
launch(main, None)
"""
    result = python(code, timeout=60)
    assert result.returncode == 1 and result.stdout == "all of it"
    assert result.stderr.strip().endswith("IndexError: the fault") and "Traceback" in result.stderr
