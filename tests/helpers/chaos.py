"""Inject faults into every phase of a script and compare its results with an undisturbed run.

    python tests/helpers/chaos.py T5_training.py                        # every phase, every fault
    python tests/helpers/chaos.py gpt2_fsdp.py --fsdp 2 --faults "SIGKILL rank 0" --rounds 5
    python tests/helpers/chaos.py llama_fsdp.py --restarts --faults "SIGKILL rank 1"  # by torchrun

The script runs on two CPU ranks (see --ranks) and saves at every step. For each fault, one run is
hit in each phase, within a second of the start of the phase, and resumed each time. Finally it runs
to its end. Its logged losses must then equal those of the undisturbed run, with each step logged
once, and its final/ must be bit-for-bit equal. With --next-ranks every second start has another
number of processes; the losses must be equal up to rounding, for which the model needs no dropout.

A fault that requests a stop must leave every step saved and, between the first step of the start
and the last save, the status `stopped` and exit code 75. Elsewhere it ends the processes.
After any fault, the run must end. Other flags, such as --fsdp 2, are passed to the script.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from conftest import (
    ROOT,
    TINY,
    check_equal_runs,
    error_lines,
    finish,
    live_metrics,
    losses,
    status,
    wait_until,
)

LENGTHS = {
    "T5_training.py": ["--rouge-samples", "2", "--target-length", "16", "--source-length", "64"],
    "gpt2_fsdp.py": ["--block-size", "64"],
    "llama_fsdp.py": ["--max-seq-length", "128", "--save-best"],
}
SHARED = [*TINY, "--num-train-samples", "64", "--num-val-samples", "8", "--batch-size", "4",
          "--save-every", "1", "--eval-every", "3", "--max-steps", "12"]  # fmt: skip
PHASES = ["tokenisation", "load", "first validation", "first step", "step", "validation", "save",
          "generation", "export"]  # fmt: skip
SIGNALS = {  # the slice selects receivers from [torchrun, *ranks]
    "SIGKILL rank 0": (signal.SIGKILL, slice(1, 2)),
    "SIGKILL rank 1": (signal.SIGKILL, slice(2, 3)),
    "SIGKILL torchrun": (signal.SIGKILL, slice(0, 1)),
    "SIGKILL all": (signal.SIGKILL, slice(0, None)),
    "SIGTERM torchrun": (signal.SIGTERM, slice(0, 1)),
    "SIGTERM rank 1": (signal.SIGTERM, slice(2, 3)),
    "SIGINT all": (signal.SIGINT, slice(0, None)),
    "SIGHUP torchrun": (signal.SIGHUP, slice(0, 1)),
    "SIGQUIT rank 0": (signal.SIGQUIT, slice(1, 2)),
    "SIGUSR1 torchrun": (signal.SIGUSR1, slice(0, 1)),
}
PAUSE_SECONDS = 0.5  # how long a rank sleeps at the start of the phase
END_SECONDS = 20  # that a run needs to end after a fault, on a quiet machine


class Launch(NamedTuple):
    """The arguments that start a script."""

    script: str
    flags: list[str]
    ranks: int = 2
    restarts: bool = False  # whether torchrun restarts the script, once


def start(launch: Launch, phase: str, output: Path) -> subprocess.Popen:
    """Start the script, with a pause at the start of `phase`, and return torchrun's process."""
    script = launch.script
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", str(launch.ranks), "--max-restarts", str(int(launch.restarts))]
    torchrun += ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
    worker = [ROOT / "tests/workers/phases.py", script.removesuffix(".py"), phase, PAUSE_SECONDS]
    command = [*torchrun, *map(str, worker), *SHARED, *LENGTHS[script], *launch.flags]
    command += ["--output-dir", str(output)]
    log = output.with_suffix(".log").open("a")
    # With a shared cache, there would be nothing to tokenise.
    env = os.environ | {"HF_DATASETS_CACHE": str(output.with_suffix(".cache"))}
    options = {"stdout": log, "stderr": log, "start_new_session": True}
    return subprocess.Popen(command, env=env, cwd=ROOT, **options)


def workers(torchrun: int) -> list[int]:
    """Return the process ids of torchrun's children."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text()
        return [int(pid) for pid in children.split()]
    return []


def is_over(pid: int) -> bool:
    """Return whether a process has ended. It need not be a child of this one."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def lost_steps(output: Path) -> int:
    """Return the number of logged steps after the newest complete checkpoint."""
    paths = (output / "checkpoints").glob("step-*/train_state.json")
    saved = max((int(path.parent.name.removeprefix("step-")) for path in paths), default=0)
    return max(0, last_logged(output) - saved)


def last_logged(output: Path) -> int:
    """Return the last step in metrics.jsonl."""
    return max((line["step"] for line in live_metrics(output, "train")), default=0)


def attempt(
    launch: Launch, phase: str, fault: str, output: Path, chance: random.Random
) -> dict | None:
    """Start the script, inject the fault in the phase and wait for the end. Return the outcome, or
    None if the script has no such phase."""
    marks = [output.with_name(f"{output.name}.{phase}-{rank}") for rank in range(launch.ranks)]
    exits = [output.with_name(f"{output.name}.exit-{rank}") for rank in range(launch.ranks)]
    logged = last_logged(output)
    for path in (*marks, *exits):
        path.unlink(missing_ok=True)
    if phase == "tokenisation":
        shutil.rmtree(output.with_suffix(".cache"), ignore_errors=True)
        marks = marks[:1]  # only rank 0 tokenises; the others wait
    process = start(launch, phase, output)
    while process.poll() is None and not all(mark.exists() for mark in marks):
        time.sleep(0.02)
    time.sleep(chance.uniform(0, 1))
    ranks = workers(process.pid)
    if process.poll() is not None or len(ranks) != launch.ranks:
        assert finish(process).returncode == 0, output.with_suffix(".log").read_text()[-3000:]
        return None
    fault_time = time.monotonic()
    number, targets = SIGNALS[fault]
    for pid in [process.pid, *ranks][targets]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    finish(process, END_SECONDS)
    wait_until(lambda: all(map(is_over, ranks)), END_SECONDS)  # they outlive a killed torchrun
    file = output / "status"
    has_status = file.is_file() and file.read_text()  # not before training starts
    return {
        "phase": phase,
        "fault": fault,
        "restarts": launch.restarts,
        "status": status(output) if has_status else "none",
        "exit codes": [path.read_text() if path.exists() else "killed" for path in exits],
        "steps": last_logged(output) - logged,
        "lost steps": lost_steps(output),
        "seconds": round(time.monotonic() - fault_time, 1),
        "error": error_lines(output.with_suffix(".log").read_text())[-1:],
    }


def check(outcome: dict) -> None:
    """Check that a requested stop loses no step."""
    if outcome["restarts"]:
        assert (outcome["status"], set(outcome["exit codes"])) == ("finished", {"0"}), outcome
        return
    if outcome["phase"] == "export" and outcome["status"] == "finished":  # before the fault
        assert set(outcome["exit codes"]) == {"0"}, outcome
    elif not outcome["fault"].startswith(("SIGKILL rank", "SIGKILL all")):
        assert outcome["lost steps"] == 0, outcome
        if outcome["phase"] in ("step", "validation", "save") and outcome["steps"] > 0:
            assert outcome["status"] == "stopped", outcome
            assert set(outcome["exit codes"]) == {"75"}, outcome


def chaos(
    launch: Launch, directory: Path, faults: list[str], phases: list[str], seed: int = 0,
    next_ranks: int = 0,
) -> list[dict]:  # fmt: skip
    """Return the outcome of each fault in each phase. Raise AssertionError if a run's numbers
    differ."""
    if launch.script != "T5_training.py":  # only T5 generates
        phases = [phase for phase in phases if phase != "generation"]
    chance = random.Random(seed)
    baseline = directory / "baseline"
    assert finish(start(launch, "none", baseline)).returncode == 0
    outcomes = []
    for fault in faults:
        disturbed = directory / "disturbed"
        for phase in phases:
            outcome = attempt(launch, phase, fault, disturbed, chance)
            if next_ranks:
                launch, next_ranks = launch._replace(ranks=next_ranks), launch.ranks
            if outcome:
                print(json.dumps({"script": launch.script} | outcome), flush=True)
                check(outcome)
                outcomes.append(outcome)
        exit_code = finish(start(launch, "none", disturbed)).returncode
        assert exit_code == 0, disturbed.with_suffix(".log").read_text()[-3000:]
        if next_ranks:
            assert losses(disturbed) == pytest.approx(losses(baseline), rel=1e-5)
        else:
            check_equal_runs(disturbed, baseline, ("final", "best"))
        shutil.rmtree(disturbed)
        disturbed.with_suffix(".log").unlink()
    return outcomes


def main() -> None:
    """Print each outcome and the number of faults."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script", choices=list(LENGTHS))
    parser.add_argument("--faults", nargs="+", choices=SIGNALS, default=list(SIGNALS))
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--rounds", type=int, default=1, help="each at other moments")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the moments")
    parser.add_argument("--ranks", type=int, default=2, help="number of processes")
    parser.add_argument("--next-ranks", type=int, default=0, help="of every second start")
    parser.add_argument("--restarts", action="store_true", help="once, by torchrun; for SIGKILL")
    args, flags = parser.parse_known_args()
    launch = Launch(args.script, flags, args.ranks, args.restarts)
    count = 0
    for seed in range(args.seed, args.seed + args.rounds):
        with tempfile.TemporaryDirectory() as directory:
            cases = Path(directory), args.faults, args.phases, seed, args.next_ranks
            outcomes = chaos(launch, *cases)
            count += len(outcomes)
    print(f"{args.script}: {count} faults. Every run matched the undisturbed run.")


if __name__ == "__main__":
    main()
