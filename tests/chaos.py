"""Kill a script again and again, and compare what comes out with an uninterrupted run.

    python tests/chaos.py T5_training.py --kills 50

Two CPU ranks save at every step. At random times, many of them inside a save, one rank, torchrun
alone, or all processes get SIGKILL; then the same command is started again. In the end every logged
loss must equal that of an uninterrupted run, with each step logged once, and so must final/: to the
last bit, or with --alternate, under which FSDP1 and FSDP2 take turns, to 1e-5.

Other flags go to the script, such as --fsdp 2.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import pytest
from conftest import ROOT, check_equal_weights, logged, losses, weights

TINY = {
    "T5_training.py": ["--rouge-samples", "0", "--target-length", "16", "--source-length", "64"],
    "gpt2_fsdp.py": ["--block-size", "64"],
    "llama_fsdp.py": ["--max-seq-length", "128"],
}
SHARED = ["--model-name", "tiny", "--dataset", "docstrings", "--num-train-samples", "64",
          "--num-val-samples", "8", "--batch-size", "4", "--log-every", "1", "--save-every", "1",
          "--eval-every", "3"]  # fmt: skip


def start(script: str, flags: list[str], output: Path) -> subprocess.Popen:
    """The script on two ranks, in a process group of its own."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", str(ROOT / script), *SHARED, *TINY[script]]
    log = output.with_suffix(".log").open("a")
    options = {"stdout": log, "stderr": log, "start_new_session": True}
    return subprocess.Popen([*command, *flags, "--output-dir", str(output)], **options)


def workers(torchrun: int) -> list[int]:
    """Process ids of torchrun's children."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text()
        return [int(pid) for pid in children.split()]
    return []


def holder(output: Path) -> int:
    """Process id in the run's lock."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((output / "lock").read_text())["pid"]
    return 0


def steps_saved(output: Path) -> int:
    """Step of the newest checkpoint."""
    names = [path.name for path in (output / "checkpoints").glob("step-*")]
    return max((int(name.removeprefix("step-")) for name in names), default=0)


def steps_logged(output: Path) -> int:
    """The last step that was logged."""
    return max((line["step"] for line in logged(output, "train")), default=0)


def attempt(
    script: str, flags: list[str], output: Path, chance: random.Random
) -> tuple[str, int] | None:
    """Run until a random moment after the first step, and kill; None if it finished before.

    Returns what was killed, and how many steps are lost with it.
    """
    process = start(script, flags, output)
    while process.poll() is None and holder(output) not in workers(process.pid):
        time.sleep(0.02)  # orphans of the start before may still save
    before = steps_logged(output)
    while process.poll() is None and steps_logged(output) == before:
        time.sleep(0.02)
    time.sleep(chance.uniform(0, 1))
    what = chance.choice(["rank 0", "rank 1", "torchrun", "all"])
    if process.poll() is not None:
        return None
    pids = workers(process.pid)
    targets = {"rank 0": pids[:1], "rank 1": pids[1:], "torchrun": [process.pid]}
    for pid in targets.get(what, [process.pid, *pids]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert process.wait(timeout=100) != 0 or what.startswith("rank")
    return what, max(0, steps_logged(output) - steps_saved(output))


def check_near(torn: Path, whole: Path) -> None:
    """Losses to 1e-5, weights to 1e-4."""
    for event in ("train", "val"):
        assert losses(torn, event) == pytest.approx(losses(whole, event), abs=1e-5)
    there = weights(whole / "final")
    for name, tensor in weights(torn / "final").items():
        assert tensor.sub(there[name]).abs().max() < 1e-4, name


def check_equal(torn: Path, whole: Path) -> None:
    """To the last bit."""
    for event in ("train", "val"):
        assert losses(torn, event) == losses(whole, event)
    check_equal_weights(torn / "final", whole / "final")


def chaos(
    script: str, flags: list[str], directory: Path, kills: int, seed: int, alternate: bool = False
) -> dict:
    """Figures of a run killed `kills` times; AssertionError if it differs from another."""
    chance, began, killed = random.Random(seed), time.monotonic(), []
    flags = ["--max-steps", str(10 * kills + 6), *flags]
    whole, torn = directory / "whole", directory / "torn"
    assert start(script, flags, whole).wait(timeout=600) == 0
    first = time.monotonic() - began
    for number in range(kills):
        turn = ["--fsdp", str(1 + number % 2)] if alternate else []
        found = attempt(script, [*flags, *turn], torn, chance)
        if found is None:
            break
        killed.append(found)
    assert start(script, flags, torn).wait(timeout=600) == 0, torn.with_suffix(".log").read_text()
    if alternate:
        check_near(torn, whole)
    else:
        check_equal(torn, whole)
    assert not [*torn.glob("checkpoints/tmp-*"), *torn.glob("lock*")]
    return {
        "kills": len(killed),
        "of": {what: [w for w, _ in killed].count(what) for what in sorted({w for w, _ in killed})},
        "lost_steps": sum(lost for _, lost in killed),
        "seconds": time.monotonic() - began,
        "uninterrupted_seconds": first,
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script", choices=list(TINY))
    parser.add_argument("--kills", type=int, default=50, help="how often")
    parser.add_argument("--seed", type=int, default=0, help="of the random times")
    parser.add_argument("--alternate", action="store_true", help="--fsdp 1 and 2 in turn")
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        found = chaos(args.script, flags, place, args.kills, args.seed, args.alternate)
        print(args.script, found)


if __name__ == "__main__":
    main()
