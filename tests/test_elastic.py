"""Change the number of processes: the global batch and the losses stay the same."""

import os
import signal
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator

import pytest
from conftest import ROOT, error_lines, launch, live_metrics, losses, metrics, status
from slurm_cluster import wait_until

import llama_fsdp
from benchmarks.driven import parse_flags
from runtime import options
from tools import memory_estimator


def parse(processes: int, monkeypatch: pytest.MonkeyPatch, *flags: str) -> Namespace:
    """Return the arguments of llama_fsdp.py under torchrun with this number of processes."""
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    return parse_flags(llama_fsdp, ["--model-name", "tiny", *flags])


@pytest.mark.parametrize(
    ("total", "limit", "processes", "micro_batches"),
    [(64, 8, 1, (8, 8)), (64, 8, 8, (8, 1)), (64, 64, 2, (32, 1)), (60, 8, 2, (6, 5)),
     (26, 8, 2, (1, 13)), (8, 1, 8, (1, 1))],
)  # fmt: skip
def test_micro_batches_keep_the_global_batch(total, limit, processes, micro_batches, monkeypatch):
    """The estimator splits the global batch in the same way."""
    flags = ["--global-batch-size", str(total), "--batch-size", str(limit)]
    args = parse(processes, monkeypatch, *flags)
    assert (args.batch_size, args.gradient_accumulation_steps) == micro_batches
    args = options.parse(memory_estimator.Options, [*flags, "--gpus-per-node", str(processes)])
    assert (args.batch_size, args.gradient_accumulation_steps) == micro_batches


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--global-batch-size", "12"], "12 is not a multiple of 8 processes. Pass 16."),
        (["--global-batch-size", "4"], "4 is not a multiple of 8 processes. Pass 8."),
        (["--global-batch-size", "-8"], "-8 is out of range. It must be at least 0, below"),
        (["--global-batch-size", "8", "--gradient-accumulation-steps", "2"],
         "Pass --global-batch-size or --gradient-accumulation-steps, not both."),
    ],
)  # fmt: skip
def test_impossible_batches_are_refused(flags, message, monkeypatch, capfd):
    """An export uses no batch, so it ignores the flag."""
    with pytest.raises(SystemExit):
        parse(8, monkeypatch, *flags)
    (error,) = error_lines(capfd.readouterr().err)
    assert message in error
    if flags[-1] == "12":
        assert parse(8, monkeypatch, *flags, "--export-only").batch_size == 1


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
    batches = [
        (start["arguments"]["batch_size"], start["arguments"]["gradient_accumulation_steps"])
        for start in metrics(output, "start")
    ]
    assert batches == [(2, 4), (2, 2), (2, 4)] and status(output) == "finished"
    expected = losses(tmp_path / "uninterrupted")
    assert losses(output) == pytest.approx(expected, abs=1e-5, rel=0) and len(expected) == 120
