"""A stop in any phase of a run loses no step. Where nothing could be lost, it ends at once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, check_equal_weights, launch, live_metrics, losses, metrics, status
from slurm_cluster import wait_until

# Seconds by which the phase is extended. A run interrupts LONG phases, but completes SHORT ones.
LONG, SHORT = 100, 4
PHASES = {
    "load": LONG,
    "tokenisation": LONG,
    "first validation": LONG,
    "first step": LONG,
    "step": SHORT,
    "validation": SHORT,
    "save": SHORT,
    "generation": LONG,
    "best export": SHORT,
    "export": LONG,
}
AT_ONCE = {"load", "tokenisation", "first validation", "first step", "generation", "export"}
IN_MAKE_TEST = {("load", signal.SIGUSR1)}  # test_runs.py tests a stop in a step


def cases() -> list:
    """Return every phase with every signal. All but one are marked slow."""
    params = []
    for phase in PHASES:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            marks = [] if (phase, number) in IN_MAKE_TEST else [pytest.mark.slow]
            params.append(pytest.param(phase, number, marks=marks, id=f"{phase}-{number.name}"))
    return params


@pytest.fixture(scope="module")
def flags(pairs: Path) -> list[str]:
    """Return flags for six steps of `tiny`, which has dropout. Every second step is validated and
    saved."""
    return ["--model-name", "tiny", "--dataset", str(pairs), "--source-column", "text",
            "--target-column", "headline", "--source-length", "16", "--target-length", "8",
            "--num-train-samples", "0", "--max-steps", "6", "--batch-size", "2", "--log-every", "1",
            "--save-every", "2", "--eval-every", "2", "--rouge-samples", "2"]  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, flags: list[str]) -> Path:
    """Return the output directory of a finished run on two ranks."""
    output = tmp_path_factory.mktemp("run") / "uninterrupted"
    launch(2, "T5_training.py", *flags, "--output-dir", output)
    return output


@pytest.mark.parametrize(("phase", "number"), cases())
def test_stop_in_each_phase_saves_and_resumes_bit_for_bit(
    phase, number, uninterrupted, flags, tmp_path
):
    """The signal goes to torchrun, as in launch.slurm."""
    output = tmp_path / "output"
    flags = [*flags, "--output-dir", str(output)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    handled = ["--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1"]
    worker = ["tests/workers/phases.py", "T5_training", phase, str(PHASES[phase])]
    command = [sys.executable, *torchrun, *handled, *worker, *flags]
    env = os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "cache")}  # forces tokenisation
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=env, **pipes)
    ranks = [0] if phase == "tokenisation" else [0, 1]  # rank 1 waits for rank 0
    marks = [tmp_path / f"output.{phase}-{rank}" for rank in ranks]
    wait_until(lambda: all(path.exists() for path in marks), 100, str)
    process.send_signal(number)
    start = time.monotonic()
    log, _ = process.communicate(timeout=60)
    seconds = time.monotonic() - start
    assert process.returncode != 0
    assert seconds < SHORT + 10, log
    assert "core/" not in log  # only torchrun prints a traceback
    exits = [tmp_path / f"output.exit-{rank}" for rank in (0, 1)]
    if phase in AT_ONCE:  # the kernel ended the processes
        assert not any(path.exists() for path in exits)
    else:
        assert status(output) == "stopped", log
        assert [path.read_text() for path in exits] == ["75", "75"]
        assert number.name in log

    last_saved = max((int(path.name[-8:]) for path in output.glob("checkpoints/step-*")), default=0)
    last_step = max((line["step"] for line in live_metrics(output, "train")), default=0)
    assert last_saved == last_step  # no step is lost
    result = launch(2, "T5_training.py", *flags)
    assert [line["step"] for line in metrics(output, "start")][-1] == last_saved, result.stdout
    for event in ("train", "val"):
        assert losses(output, event) == losses(uninterrupted, event)
    for kind in ("final", "best"):
        check_equal_weights(output / kind, uninterrupted / kind)
    assert status(output) == "finished"
    assert not list(output.rglob("tmp-*"))
