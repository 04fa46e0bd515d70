"""Test tools/preflight.py: it measures, reports slow and silent ranks, and leaves no files."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from chaos import workers
from conftest import ROOT, error_lines, finish, launch, wait_until
from slurm_cluster import free_ports

from tools import preflight

HOST = socket.gethostname()
HEALTHY = "All ranks are fine."


def run_async(*flags: object, torchrun: tuple = ("--standalone",)) -> subprocess.Popen[str]:
    """Launch preflight.py on two ranks in the background."""
    start = [sys.executable, "-m", "torch.distributed.run", *torchrun, "--nproc-per-node", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*start, str(ROOT / "tools/preflight.py"), *map(str, flags)], **pipes)


def worker_pid(process: subprocess.Popen, rank: int, output: Path) -> int:
    """Wait until a rank starts to measure and return its process id."""
    wait_until(lambda: len(workers(process.pid)) == 2)
    wait_until((output / "tmp-preflight").is_dir)
    return workers(process.pid)[rank]


def throttle(process: subprocess.Popen, pid: int) -> None:
    """Slow a worker to a third of its speed with short pauses, until the launch ends."""
    with contextlib.suppress(ProcessLookupError):
        while process.poll() is None:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.02)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_slow_rank_is_reported(rank, tmp_path):
    process = run_async("--output-dir", tmp_path)
    pid = worker_pid(process, rank, tmp_path)
    threading.Thread(target=throttle, args=(process, pid), daemon=True).start()
    result = finish(process)
    (message,) = error_lines(result.stderr)
    slow = re.findall(r"rank (\d) on (\S+) is slow: ([^,]+),", message)
    assert (str(rank), HOST, "matrix products") in slow
    assert {match[:2] for match in slow} == {(str(rank), HOST)}
    assert process.returncode == 1 and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_silent_rank_is_reported(tmp_path):
    process = run_async("--output-dir", tmp_path, "--timeout-seconds", 20)
    pid = worker_pid(process, 1, tmp_path)
    time.sleep(1)
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: workers(process.pid) == [pid], 30)
    os.kill(pid, signal.SIGKILL)  # otherwise torchrun would wait for it
    (message,) = error_lines(finish(process).stderr)
    assert process.returncode == 1 and "1 failed to pass monitoredBarrier in 20000 ms" in message


@pytest.mark.slow
def test_healthy_nodes_pass_in_a_minute(tmp_path):
    start = time.monotonic()
    lines = launch(2, "tools/preflight.py", "--output-dir", tmp_path).stdout.splitlines()
    assert time.monotonic() - start < 60
    table = [line for line in lines if ", GB/s " in line or ", TFLOP/s " in line]
    assert len(table) == 6
    assert lines[-1] == HEALTHY and not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("outputs", [("shared", "shared"), ("one", "other")])
def test_two_nodes_measure_both_links_and_report_unshared_disk(outputs, tmp_path):
    (port,) = free_ports(1)
    rendezvous = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "1")
    rendezvous += ("--rdzv-endpoint", f"localhost:{port}")
    nodes = [
        run_async("--output-dir", tmp_path / output, torchrun=rendezvous) for output in outputs
    ]
    results = [finish(node) for node in nodes]
    is_shared = outputs[0] == outputs[1]
    if is_shared:
        printed = max(result.stdout for result in results)
        for row in ("all-reduce in node, 4.19 MB", "all-reduce across, 0.0655 MB"):
            assert f"\n{row}, GB/s " in printed
        assert printed.rstrip().endswith(HEALTHY)
    else:
        errors = "".join(result.stderr for result in results)
        assert "tmp-preflight is not on a file system that all nodes share." in errors
    assert {node.returncode for node in nodes} == {int(not is_shared)}


@pytest.mark.parametrize("seconds, slow", [
    ([1.0], {}),
    ([1.0, 1.09, 1.0, 0.5], {}),
    ([2.0, 1.0], {0: 2.0}),
    ([1.0, 3.0, 3.0, 1.0], {1: 3.0, 2: 3.0}),
])  # fmt: skip
def test_slow_ranks_exceed_the_tolerance(seconds, slow, monkeypatch):
    monkeypatch.setattr(preflight, "CPU_TOLERANCE", 1.1)
    assert preflight.find_slow(seconds) == slow
