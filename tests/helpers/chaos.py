"""Do harm to a script in each of its phases, and compare what comes out with an untouched run.

    python tests/helpers/chaos.py T5_training.py                        # every phase, every fault
    python tests/helpers/chaos.py gpt2_fsdp.py --fsdp 2 --faults "SIGKILL rank 0" --rounds 5
    python tests/helpers/chaos.py llama_fsdp.py --restarts --faults "SIGKILL rank 1"  # by torchrun

Two CPU ranks, or as many as --ranks says, save at every step. For each fault there is a run that
meets it in each phase, within a second of its beginning, is started again each time, and at last
ends in peace. Then every logged loss must equal that of the untouched run, with each step logged
once, and so must final/, to the last bit.

What asks the run to stop must leave the word `stopped`, exit code 75, and each step saved. Whatever
it is, the run must be over soon. Other flags go to the script, such as --fsdp 2.

Files that are slow, or fail now and then, are those of faulty_files.c, for which gcc is needed.
"""

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conftest import ROOT, check_equal_weights, errors_said, logged, losses, status

TINY = {
    "T5_training.py": ["--rouge-samples", "2", "--target-length", "16", "--source-length", "64"],
    "gpt2_fsdp.py": ["--block-size", "64"],
    "llama_fsdp.py": ["--max-seq-length", "128"],
}
SHARED = ["--model-name", "tiny", "--dataset", "docstrings", "--num-train-samples", "64",
          "--num-val-samples", "8", "--batch-size", "4", "--log-every", "1", "--save-every", "1",
          "--eval-every", "3", "--max-steps", "12"]  # fmt: skip
PHASES = ["tokenisation", "load", "first validation", "first step", "step", "validation", "save",
          "generation", "export"]  # fmt: skip
SIGNALS = {  # and which of torchrun and the ranks get it
    "SIGKILL rank 0": (signal.SIGKILL, slice(1, 2)),
    "SIGKILL rank 1": (signal.SIGKILL, slice(2, 3)),
    "SIGKILL torchrun": (signal.SIGKILL, slice(0, 1)),
    "SIGKILL all": (signal.SIGKILL, slice(0, None)),
    "SIGTERM torchrun": (signal.SIGTERM, slice(0, 1)),
    "SIGTERM rank 1": (signal.SIGTERM, slice(2, 3)),
    "SIGINT all": (signal.SIGINT, slice(0, None)),
    "SIGUSR1 torchrun": (signal.SIGUSR1, slice(0, 1)),
}
FULL = "disk full"
FILES = {"slow files": 10, "EIO": 3, "ESTALE": 3}  # seconds
FAULTS = [*SIGNALS, FULL, *FILES]
STAYS = 0.5  # seconds that a rank sleeps where a phase begins


class Launch(NamedTuple):
    """How the script is started."""

    script: str
    flags: list[str]
    ranks: int = 2
    restarts: bool = False  # torchrun starts it again, once


def faulty_files(directory: Path) -> str:
    """Return the library that makes files slow, or fail, compiled there once."""
    library = directory / "faulty_files.so"
    if not library.exists():
        source = Path(__file__).with_name("faulty_files.c")
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return str(library)


def start(launch: Launch, phase: str, output: Path, harmful: bool = False) -> subprocess.Popen:
    """Return the script on its ranks, which stay in the phase for a moment; if `harmful`,
    `harm_files` can be called."""
    script = launch.script
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", str(launch.ranks), "--max-restarts", str(int(launch.restarts))]
    torchrun += ["--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1"]
    worker = [str(ROOT / "tests/workers/phases.py"), script.removesuffix(".py"), phase, str(STAYS)]
    command = [*torchrun, *worker, *SHARED, *TINY[script], *launch.flags]
    command += ["--output-dir", str(output)]
    log = output.with_suffix(".log").open("a")
    # A cache of its own, or nothing would be tokenised.
    env = os.environ | {"HF_DATASETS_CACHE": str(output.with_suffix(".cache"))}
    if harmful:
        env |= {"LD_PRELOAD": faulty_files(output.parent), "FAULTY_FILES": str(output)}
    options = {"stdout": log, "stderr": log, "start_new_session": True}
    return subprocess.Popen(command, env=env, cwd=ROOT, **options)


def workers(torchrun: int) -> list[int]:
    """Return the process ids of torchrun's children."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text()
        return [int(pid) for pid in children.split()]
    return []


def is_over(pid: int) -> bool:
    """Return whether a process that is no child of this one has ended."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def steps_saved(output: Path) -> int:
    """Step of the newest complete checkpoint."""
    paths = (output / "checkpoints").glob("step-*/train_state.json")
    return max((int(path.parent.name.removeprefix("step-")) for path in paths), default=0)


def steps_logged(output: Path) -> int:
    """Return the last step that was logged."""
    return max((line["step"] for line in logged(output, "train")), default=0)


def fill_the_disk(ranks: list[int]) -> None:
    """Let no file grow beyond 100 kB for two seconds."""
    for limit in (100_000, resource.RLIM_INFINITY):
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        time.sleep(2)


def harm_files(fault: str, output: Path) -> None:
    """Let calls on the run's files last two seconds, or one in fifty fail, for some time."""
    harm = output.with_name(f"{output.name}.harm")
    harm.write_text(fault)
    time.sleep(FILES[fault])
    harm.unlink()


def end_in_peace(process: subprocess.Popen, output: Path) -> None:
    """Let a run that continues save once, then ask it to stop."""
    before = steps_saved(output)
    deadline = time.monotonic() + 15
    while process.poll() is None and steps_saved(output) == before and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)


def attempt(
    launch: Launch, phase: str, fault: str, output: Path, chance: random.Random
) -> dict | None:
    """Start, do harm in the phase, and wait for the end; None if the script has no such phase."""
    marks = [output.with_name(f"{output.name}.{phase}-{rank}") for rank in range(launch.ranks)]
    exits = [output.with_name(f"{output.name}.exit-{rank}") for rank in range(launch.ranks)]
    for path in (*marks, *exits):
        path.unlink(missing_ok=True)
    if phase == "tokenisation":
        shutil.rmtree(output.with_suffix(".cache"), ignore_errors=True)
        marks = marks[:1]  # the others wait for what the first makes
    process = start(launch, phase, output, fault in FILES)
    while process.poll() is None and not all(mark.exists() for mark in marks):
        time.sleep(0.02)
    time.sleep(chance.uniform(0, 1))
    ranks = workers(process.pid)
    if process.poll() is not None or len(ranks) != launch.ranks:
        assert process.wait(timeout=60) == 0, output.with_suffix(".log").read_text()[-3000:]
        return None
    began = time.monotonic()
    if fault in SIGNALS:
        number, targets = SIGNALS[fault]
        for pid in [process.pid, *ranks][targets]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    elif fault == FULL:
        fill_the_disk(ranks)
        end_in_peace(process, output)
    else:
        harm_files(fault, output)
        end_in_peace(process, output)
    process.wait(timeout=100)
    while not all(map(is_over, ranks)):  # those of a torchrun that was killed
        time.sleep(0.02)
        assert time.monotonic() - began < 100
    return {
        "phase": phase,
        "fault": fault,
        "restarts": launch.restarts,
        "status": word_of(output),
        "exit codes": [path.read_text() if path.exists() else "killed" for path in exits],
        "lost steps": max(0, steps_logged(output) - steps_saved(output)),
        "seconds": round(time.monotonic() - began, 1),
        "said": errors_said(output.with_suffix(".log").read_text())[-1:],
    }


def word_of(output: Path) -> str:
    """Return the word in the file status; none before the training begins, or on a full disk."""
    path = output / "status"
    return status(output) if path.is_file() and path.read_text() else "none"


def check(found: dict) -> None:
    """Check that a request to stop loses nothing, and that every run ends soon."""
    if found["restarts"]:
        assert (found["status"], set(found["exit codes"])) == ("finished", {"0"}), found
        return
    assert found["seconds"] < 30 + FILES.get(found["fault"], 0), found
    if found["phase"] == "export" and found["status"] == "finished":  # before the fault was met
        assert set(found["exit codes"]) == {"0"}, found
    elif found["fault"].startswith(("SIGTERM", "SIGINT", "SIGUSR1", "SIGKILL torchrun")):
        assert (found["status"], found["lost steps"]) == ("stopped", 0), found
        assert set(found["exit codes"]) == {"75"}, found


def chaos(
    launch: Launch, directory: Path, faults: list[str], phases: list[str], seed: int = 0
) -> list[dict]:
    """Return the outcome of each fault in each phase. Raise AssertionError if a run's numbers
    differ."""
    if launch.script != "T5_training.py":  # which alone generates
        phases = [phase for phase in phases if phase != "generation"]
    chance = random.Random(seed)
    whole = directory / "whole"
    assert start(launch, "none", whole).wait(timeout=600) == 0
    outcomes = []
    runs = []
    for fault in faults:
        # A run that the fault may not end goes on to its end.
        alone = launch.restarts or fault not in SIGNALS
        runs += [(fault, [phase]) for phase in phases] if alone else [(fault, phases)]
    for fault, phases_of_run in runs:
        torn = directory / "torn"
        for phase in phases_of_run:
            found = attempt(launch, phase, fault, torn, chance)
            if found:
                print(json.dumps({"script": launch.script} | found), flush=True)
                check(found)
                outcomes.append(found)
        last = start(launch, "none", torn).wait(timeout=600)
        assert last == 0, torn.with_suffix(".log").read_text()[-3000:]
        for event in ("train", "val"):
            assert losses(torn, event) == losses(whole, event)
        for name in ("final", "best"):
            check_equal_weights(torn / name, whole / name)
        assert not [*torn.rglob("tmp-*"), *torn.glob("lock*")]
        shutil.rmtree(torn)
        torn.with_suffix(".log").unlink()
    return outcomes


def main() -> None:
    """Print each outcome, and how many there were."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script", choices=list(TINY))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=[*SIGNALS, FULL])
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--rounds", type=int, default=1, help="with other moments each")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--restarts", action="store_true", help="by torchrun, once; for SIGKILL")
    args, flags = parser.parse_known_args()
    launch = Launch(args.script, flags, args.ranks, args.restarts)
    count = 0
    for seed in range(args.seed, args.seed + args.rounds):
        with tempfile.TemporaryDirectory() as directory:
            where = Path(directory)
            found = chaos(launch, where, args.faults, args.phases, seed)
            count += len(found)
    print(f"{args.script}: {count} faults, and every run is as if there had been none")


if __name__ == "__main__":
    main()
