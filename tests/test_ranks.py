"""Ranks that cannot reach each other, and exits that do not hang."""

import subprocess
import sys
import time

import pytest
from conftest import ROOT, error_lines, launch


def python(code: str, **options: float) -> subprocess.CompletedProcess:
    """Run Python code in a new process."""
    pipes = {"cwd": ROOT, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, "-c", code], **pipes, **options)


@pytest.mark.parametrize(
    "processes,fault", [(2, "default group"), pytest.param(4, "mesh", marks=pytest.mark.slow)]
)
def test_unreachable_ranks_are_reported_in_time(processes, fault):
    """gloo alone would wait for the group's timeout. The limit does not cover late starts."""
    start = time.monotonic()
    result = launch(processes, "tests/workers/ranks_worker.py", fault, check=False)
    assert time.monotonic() - start < 80
    assert result.stdout.count("joined") == 4 * (fault == "mesh")
    (message,) = error_lines(result.stderr)
    assert "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME" in message and "in 3 s" in message
    assert message in result.stderr.split("Root Cause")[1]


@pytest.mark.parametrize("where", ["init_process_group", "new_group"])
def test_hanging_nccl_start_is_reported(where):
    """A thread reports it, because init_process_group waits inside NCCL."""
    code = f"""
import functools, time, torch.distributed as dist
from datetime import timedelta
from runtime import ranks
ranks.join_deadline = functools.partial(ranks.join_deadline, limit=1.0)
dist.init_process_group = dist.new_group = lambda **_: None
dist.{where} = lambda **_: time.sleep(100)
dist.get_backend = lambda: "nccl"
with ranks.rendezvous(timedelta(minutes=30)) as options:
    dist.init_process_group(**options)
"""
    result = python(code, timeout=60)
    assert result.returncode == 1
    (message,) = error_lines(result.stderr)
    assert "NCCL_SOCKET_IFNAME" in message


def test_uncaught_exception_ends_the_process():
    """A normal Python exit would hang."""
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
