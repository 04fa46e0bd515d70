"""Nodes join and leave: the global batch and the losses stay the same."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from conftest import (
    ROOT,
    finish,
    launch,
    live_metrics,
    losses,
    metrics,
    status,
    wait_for_step,
    wait_until,
)
from slurm_cluster import free_ports

pytestmark = pytest.mark.usefixtures("real_torchrun")


@pytest.fixture
def start_node() -> Iterator[Callable[..., subprocess.Popen]]:
    """Yield a function that starts another instance of torchrun, with one process, of one job. All
    are killed after the test."""
    (port,) = free_ports(1)
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1",
        "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}",
        "--rdzv-id", "any", "--rdzv-conf", "last_call_timeout=2",
    ]  # fmt: skip
    # If nodes shared torchrun's store, running ones would never announce it to one that joins.
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    nodes: list[subprocess.Popen] = []

    def start(*command: object) -> subprocess.Popen:
        words = [*torchrun, *map(str, command)]
        options = {"cwd": ROOT, "start_new_session": True, "env": environment}
        nodes.append(subprocess.Popen(words, **options))
        return nodes[-1]

    yield start
    for node in nodes:
        if node.poll() is None:
            os.killpg(node.pid, signal.SIGKILL)


@pytest.mark.slow
def test_node_joining_and_leaving_does_not_change_losses(start_node, chats, tmp_path):
    flags = ["--model-name", "tiny", "--dataset", chats, "--max-seq-length", "64", "--max-steps",
             "120", "--epochs", "1000", "--log-every", "1", "--save-every", "20", "--eval-every",
             "0", "--lr", "1e-3", "--batch-size", "2", "--global-batch-size", "8"]  # fmt: skip
    launch(2, "llama_fsdp.py", *flags, "--output-dir", tmp_path / "uninterrupted")
    output = tmp_path / "elastic"
    command = ["llama_fsdp.py", *flags, "--output-dir", output]
    first = start_node(*command)
    wait_for_step(output, 10)
    second = start_node(*command)
    wait_until(lambda: len(live_metrics(output, "start")) == 2, 30, lambda: "no node has joined")
    wait_for_step(output, max(losses(output)) + 25)
    os.killpg(second.pid, signal.SIGKILL)
    wait_until(lambda: len(live_metrics(output, "start")) == 3, 90, lambda: "it does not go on")
    third = start_node(*command)  # it counts no restart, and `first` one
    assert finish(first).returncode == finish(third).returncode == 0
    assert [start["world_size"] for start in metrics(output, "start")] == [1, 2, 1, 2]
    optims = [start["arguments"]["optim"] for start in metrics(output, "start")]
    batches = [(x["batch_size"], x["gradient_accumulation_steps"]) for x in optims]
    assert batches == [(2, 4), (2, 2), (2, 4), (2, 2)] and status(output) == "finished"
    expected = losses(tmp_path / "uninterrupted")
    assert losses(output) == pytest.approx(expected, abs=1e-5, rel=0) and len(expected) == 120
