"""A script that stays in one of its phases: phases.py SCRIPT PHASE SECONDS FLAGS...

Where the phase begins, each rank writes the file OUTPUT_DIR.PHASE-RANK, and sleeps, once. Where the
process leaves, it writes its exit code into OUTPUT_DIR.exit-RANK. The phase "none" never begins.
"""

import importlib
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests")]

from runtime import checkpoints, readers, run
from runtime.steps import Step

RANK = os.environ.get("RANK", "0")


def places(script: ModuleType) -> dict[str, tuple[Any, str, range | None]]:
    """Return where each phase begins: an object, the name of a function in it, and of one whose
    last argument is a step or the run, how many steps may be done there."""
    later = range(3, 1000)
    return {
        "load": (script, "load_model", None),
        "tokenisation": (readers, "samples", None),
        "first validation": (script, "validation", range(1)),
        "first step": (Step, "__enter__", range(1)),
        "step": (Step, "__enter__", later),
        "validation": (script, "validation", later),
        "save": (checkpoints._Writer, "write_data", None),
        "generation": (script, "generation", None),
        "best export": (run.Run, "_export", None),
        "export": (run.Run, "export", None),
    }


def steps_done(of: Any) -> int:
    """Return how many steps are done, from a step or the run."""
    return (of if isinstance(of, run.Run) else of.steps).state.step


def stay(phase: str, seconds: float, script: ModuleType, output: Path) -> None:
    """Put the sleep where the phase begins."""
    place, name, steps = places(script)[phase]
    function = getattr(place, name)
    there = output.with_name(f"{output.name}.{phase}-{RANK}")

    def slow(*args: Any, **options: Any) -> Any:
        if not there.exists() and (steps is None or steps_done(args[-1]) in steps):
            there.touch()
            time.sleep(seconds)
        return function(*args, **options)

    setattr(place, name, slow)


def leave(code: int) -> None:
    """Write the exit code."""
    output.with_name(f"{output.name}.exit-{RANK}").write_text(str(code))
    exit_now(code)


if __name__ == "__main__":
    name, phase, seconds, *flags = sys.argv[1:]
    script = importlib.import_module(name)
    args = script.parse_args(flags)
    output = Path(args.output_dir)
    exit_now, os._exit = os._exit, leave
    if phase != "none":
        stay(phase, float(seconds), script, output)
    run.launch(script.fsdp_main, args)
