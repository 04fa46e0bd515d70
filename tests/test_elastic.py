"""Nodes join and leave: the global batch and the losses stay the same."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from conftest import ROOT, launch, live_metrics, losses, metrics, status
from slurm_cluster import wait_until


class Nodes:
    """Instances of torchrun on this machine that form one job, each with one process."""

    def __init__(self, *command: object) -> None:
        with socket.socket() as listener:
            listener.bind(("localhost", 0))
            port = listener.getsockname()[1]
        self.command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2",
            "--nproc-per-node", 1, "--max-restarts", 3, "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "any",
            "--rdzv-conf", "last_call_timeout=2", *command,
        ]  # fmt: skip
        self.processes: list[subprocess.Popen] = []

    def start(self) -> subprocess.Popen:
        """Start another node."""
        words = list(map(str, self.command))
        # If nodes shared torchrun's store, running ones would never announce it to one that joins.
        environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.processes.append(
            subprocess.Popen(words, cwd=ROOT, start_new_session=True, env=environment)
        )
        return self.processes[-1]

    def stop(self) -> None:
        """Kill all nodes that are still running."""
        for node in self.processes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)


@pytest.fixture
def nodes() -> Iterator[list[Nodes]]:
    """Yield a list. Nodes that a test adds to it are stopped after the test."""
    jobs: list[Nodes] = []
    yield jobs
    for job in jobs:
        job.stop()


@pytest.mark.slow
def test_node_joining_and_leaving_does_not_change_losses(nodes, chats, tmp_path):
    flags = ["--model-name", "tiny", "--dataset", chats, "--max-seq-length", "64", "--max-steps",
             "120", "--epochs", "1000", "--log-every", "1", "--save-every", "20", "--eval-every",
             "0", "--lr", "1e-3", "--batch-size", "2", "--global-batch-size", "8"]  # fmt: skip
    launch(2, "llama_fsdp.py", *flags, "--output-dir", tmp_path / "uninterrupted")
    output = tmp_path / "elastic"
    nodes.append(Nodes("llama_fsdp.py", *flags, "--output-dir", output))

    def reach(step: int) -> None:
        def steps() -> list[int]:
            return [line["step"] for line in live_metrics(output, "train")]

        wait_until(lambda: step in steps(), 240, lambda: f"step {step} not in {steps()}")

    first = nodes[0].start()
    reach(10)
    second = nodes[0].start()
    wait_until(lambda: len(live_metrics(output, "start")) == 2, 240, lambda: "no node has joined")
    reach(max(losses(output)) + 25)
    os.killpg(second.pid, signal.SIGKILL)
    assert first.wait(300) == 0
    assert [start["world_size"] for start in metrics(output, "start")] == [1, 2, 1]
    optims = [start["arguments"]["optim"] for start in metrics(output, "start")]
    batches = [(x["batch_size"], x["gradient_accumulation_steps"]) for x in optims]
    assert batches == [(2, 4), (2, 2), (2, 4)] and status(output) == "finished"
    expected = losses(tmp_path / "uninterrupted")
    assert losses(output) == pytest.approx(expected, abs=1e-5, rel=0) and len(expected) == 120
