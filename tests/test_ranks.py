"""Processes that cannot reach each other, errors that are told apart, and exits that end."""

import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, errors_said, launch

from runtime import profiling, ranks
from runtime.stops import StopRequest


def python(code: str, **options: float) -> subprocess.CompletedProcess:
    """What a program does."""
    pipes = {"cwd": ROOT, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, "-c", code], **pipes, **options)


@pytest.mark.parametrize(
    "processes,fault", [(2, "default group"), pytest.param(4, "mesh", marks=pytest.mark.slow)]
)
def test_ranks_that_cannot_reach_each_other(processes: int, fault: str) -> None:
    """gloo's wait, which would last for the group's time-out, ends with a sentence that says what
    to set. A rank that comes later than the limit is waited for."""
    start = time.monotonic()
    result = launch(processes, "tests/ranks_worker.py", fault, check=False)
    assert time.monotonic() - start < 80
    assert result.stdout.count("joined") == 4 * (fault == "mesh")
    (said,) = errors_said(result.stderr)
    assert "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME" in said and "after 3 s" in said
    assert said in result.stderr.split("Root Cause")[1]


@pytest.mark.parametrize("where", ["init_process_group", "new_group"])
def test_a_start_of_nccl_that_hangs(where: str) -> None:
    """A thread speaks: `init_process_group` waits within NCCL, which releases Python's lock. So it
    does where gloo's group beside nccl waits."""
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


def test_the_limit_ends_with_the_join() -> None:
    """What comes after it may take its time; and an error within it is its own."""
    with ranks.joining(timedelta(seconds=1), limit=0.5):
        pass
    joining = ranks.joining(timedelta(seconds=1), limit=0.5)
    with pytest.raises(RuntimeError, match="no such interface"), joining:
        raise RuntimeError("no such interface")
    time.sleep(1)  # the thread would have ended this process


@pytest.mark.parametrize(
    "lost,error",
    [
        (True, RuntimeError("[1] gloo: Connection closed by peer [127.0.0.1]:1")),
        (True, dist.DistNetworkError("failed to recv, got 0 bytes. Connection was likely closed.")),
        (True, RuntimeError("[1] gloo: Timed out waiting 1800000ms for recv operation")),
        (True, dist.DistBackendError("ncclRemoteError: A call failed possibly due to a network")),
        (False, dist.DistBackendError("ncclSystemError: /dev/shm/nccl-x: No space left on device")),
        (False, dist.DistBackendError("ncclUnhandledCudaError: out of memory")),
        (False, dist.DistStoreError("wait timeout after 5000ms, keys: /0//cpu//0/1")),
        (False, OSError("Broken pipe")),
    ],
)
def test_what_is_the_loss_of_a_peer(lost: bool, error: Exception) -> None:
    """NCCL's class is that of its own errors, too."""
    assert ranks.peer_is_lost(error) == lost


@pytest.mark.parametrize("kind,code", [("DistStoreError", 75), ("DistBackendError", 1)])
def test_a_node_that_has_not_come(kind: str, code: int) -> None:
    """Is no error of the script: started again, it may meet it."""
    program = f"""
import torch.distributed as dist
from runtime.run import launch
def main(args):
    raise dist.{kind}("wait timeout after 5000ms")
launch(main, None)
"""
    assert python(program, timeout=60).returncode == code


def test_an_uncaught_exception_ends_the_process() -> None:
    """With its traceback and what was printed, although Python's own exit would hang."""
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


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.Store]:
    """The store in which ranks tell their failures."""
    store = dist.HashStore()
    monkeypatch.setattr(ranks, "_failure_store", store)
    monkeypatch.setattr(ranks, "_has_failed", False)
    yield store


@pytest.mark.parametrize("by", ["another", "this one"])
def test_a_failure_that_is_told(
    by: str, failures: dist.Store, capfd: pytest.CaptureFixture
) -> None:
    """Another rank's ends this one after a while; its own does not: it may have a save to end."""
    ends: list[float] = []

    def end(why: str) -> None:
        ends.append(time.monotonic())
        sys.exit()  # the thread, in place of the process

    with StopRequest(end, patience=1.0):
        start = time.monotonic()
        if by == "another":
            failures.set("failure", "")
        else:
            ranks.tell_failure()
        while not ends and time.monotonic() - start < 4:
            time.sleep(0.05)
    said = errors_said(capfd.readouterr().err)
    if by == "another":
        assert ends[0] - start > 1 and "another rank failed 1 s ago" in said[0]
    else:
        assert not ends and not said


def test_memory_is_recorded_with_python_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ stacks at every allocation slow a run down."""
    asked: list[dict] = []
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda **options: asked.append(options)
    )
    profiling.record_memory(torch.device("cpu"))
    profiling.record_memory(torch.device("cuda"))
    assert [options["stacks"] for options in asked] == ["python"]
