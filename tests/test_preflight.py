"""Test tools/preflight.py: it measures, reports slow and silent ranks, and leaves no files."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
from chaos import workers
from conftest import ROOT, error_lines, launch, wait_until
from slurm_cluster import free_ports

from tools import preflight
from tools.preflight import Place, Probe

HOST = socket.gethostname().split(".")[0]
TINY = ("--model-name", "tiny", "--output-dir")
PLACES = [Place(f"host{rank // 2}", rank // 2, rank % 2, 2, 2) for rank in range(4)]
HEALTHY = "All ranks are fine."


def run_async(*flags: object, torchrun: tuple = ("--standalone",)) -> subprocess.Popen[str]:
    """Launch preflight.py on two ranks in the background."""
    start = [sys.executable, "-m", "torch.distributed.run", *torchrun, "--nproc-per-node", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*start, str(ROOT / "tools/preflight.py"), *map(str, flags)], **pipes)


def worker_pid(process: subprocess.Popen, rank: int, output: Path) -> int:
    """Wait until a rank starts to measure and return its process id."""
    wait_until(lambda: len(workers(process.pid)) == 2, 60)
    wait_until((output / "tmp-preflight").is_dir, 100)
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
    process = run_async(*TINY, tmp_path)
    pid = worker_pid(process, rank, tmp_path)
    threading.Thread(target=throttle, args=(process, pid), daemon=True).start()
    _, error = process.communicate(timeout=300)
    (message,) = error_lines(error)
    assert message.startswith(f"error: rank {rank} on {HOST} is slow: ")
    assert "matrix products" in message and message.count(" is slow: ") == 1
    assert process.returncode == 1 and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_silent_rank_is_reported(tmp_path):
    process = run_async(*TINY, tmp_path, "--timeout-seconds", 5)
    pid = worker_pid(process, 1, tmp_path)
    time.sleep(1)
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: workers(process.pid) == [pid], 60)
    os.kill(pid, signal.SIGKILL)  # otherwise torchrun would wait for it
    _, error = process.communicate(timeout=60)
    (message,) = error_lines(error)
    assert process.returncode == 1 and "1 failed to pass monitoredBarrier in 5000 ms" in message


@pytest.mark.slow
def test_healthy_nodes_of_a_large_model_pass_in_a_minute(tmp_path):
    start = time.monotonic()
    lines = launch(2, "tools/preflight.py", "--output-dir", tmp_path).stdout.splitlines()
    assert time.monotonic() - start < 60
    assert "unit: an FSDP unit of llama-2-7b, 809.5 MB in fp32" in lines
    table = [line for line in lines if "%" in line]
    assert len(table) == 10 and max(map(len, table)) <= 80
    assert lines[-1] == HEALTHY and not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("outputs", [("shared", "shared"), ("one", "other")])
def test_two_nodes_measure_both_links_and_report_unshared_disk(outputs, tmp_path):
    (port,) = free_ports(1)
    rendezvous = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "1")
    rendezvous += ("--rdzv-endpoint", f"localhost:{port}")
    nodes = [run_async(*TINY, tmp_path / output, torchrun=rendezvous) for output in outputs]
    printed, _ = max(node.communicate(timeout=300) for node in nodes)
    for row in ("all-gather in node, unit", "reduce-scatter across, 64 kB"):
        assert f"\n{row} " in printed
    is_shared = outputs[0] == outputs[1]
    message = HEALTHY if is_shared else f"on {HOST} differs from the first node's directory."
    assert printed.rstrip().endswith(message)
    assert {node.returncode for node in nodes} == {int(not is_shared)}


def samples(*medians: float, spread: float = 0.0) -> preflight.Seconds:
    """Return seven samples in seconds for each rank, with these medians and this spread."""
    steps = range(-3, 4)
    return {(r,): [m * (1 + spread / 2 * s) for s in steps] for r, m in enumerate(medians)}


@pytest.mark.parametrize("medians, spread, outliers", [
    ((1.0,), 0.0, {}),
    ((1.0, 1.09, 1.0, 0.5), 0.0, {}),
    ((2.0, 1.0), 0.0, {(0,): 2.0}),
    ((1.0, 3.0, 3.0, 1.0), 0.0, {(1,): 3.0, (2,): 3.0}),
    ((1.0, 1.0, 1.5), 0.16, {(2,): 1.5}),
    ((1.0, 1.0, 1.5), 0.17, {}),
])  # fmt: skip
def test_outliers_exceed_the_tolerance_and_their_own_spread(medians, spread, outliers, monkeypatch):
    monkeypatch.setattr(preflight, "CPU_TOLERANCE", 0.1)
    assert preflight.find_outliers(samples(*medians, spread=spread)) == outliers


def test_only_ranks_slow_in_both_rounds_are_reported(monkeypatch):
    probes = [Probe(name, "ms", 0, (0,), list) for name in "abc"]
    rounds = [
        {"a": samples(1, 1, 1), "b": samples(1, 2, 2.5), "c": samples(3, 1, 1)},
        {"b": samples(1, 1, 4), "c": samples(1, 1, 1)},
    ]
    measure = mock.Mock(side_effect=rounds)
    monkeypatch.setattr(preflight, "measure", measure)
    results, slow = preflight.measure_twice(probes, None)
    names = ["".join(probe.name for probe in call.args[0]) for call in measure.call_args_list]
    assert names == ["abc", "bc"]
    assert slow == {"b": {(2,): 4.0}, "c": {}} and results == {**rounds[0], **rounds[1]}
    (message,) = preflight.describe_slow(slow, PLACES)
    assert message == "rank 2 on host1 is slow: b 4.00 times the others' time."
    assert preflight.name_members((1, 3), PLACES) == "rank 1 of each node"
