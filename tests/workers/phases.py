"""Run a script with a pause at the start of a phase: phases.py SCRIPT PHASE SECONDS FLAGS...

When the phase starts, each rank writes the file OUTPUT_DIR.PHASE-RANK and sleeps, once. When the
process exits, it writes its exit code to OUTPUT_DIR.exit-RANK. The phase "none" adds no pause.
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

from benchmarks.driven import parse_flags
from runtime import checkpoints, readers, run
from runtime.steps import Step

RANK = os.environ.get("RANK", "0")


def entry_points(script: ModuleType) -> dict[str, tuple[Any, str, range | None]]:
    """Return the function that starts each phase as an object and an attribute name. A range limits
    the number of completed steps."""
    later = range(3, 1000)
    return {
        "load": (script, "load_model", None),
        "tokenisation": (readers, "map_rows", None),
        "first validation": (script, "validation", range(1)),
        "first step": (Step, "__enter__", range(1)),
        "step": (Step, "__enter__", later),
        "validation": (script, "validation", later),
        "save": (checkpoints._Writer, "write_data", None),
        "generation": (getattr(script, "rouge", None), "generation", None),
        "best export": (run.Run, "_export_best", None),
        "export": (run.Output, "export", None),
    }


def completed_steps(*args: Any) -> int:
    """Return the number of completed steps; `args` contain a step or the output of the run."""
    owner = next(x for x in args if isinstance(x, Step | run.Output))
    return (owner.run if isinstance(owner, run.Output) else owner.steps).state.step


def add_pause(phase: str, seconds: float, script: ModuleType, output: Path) -> None:
    """Make the first call of the phase's entry point sleep."""
    owner, name, steps = entry_points(script)[phase]
    function = getattr(owner, name)
    mark = output.with_name(f"{output.name}.{phase}-{RANK}")

    def slow(*args: Any, **options: Any) -> Any:
        is_in_phase = steps is None or completed_steps(*args) in steps
        if not mark.exists() and is_in_phase and args[-1] != "best":  # final/ is exported later
            mark.touch()
            time.sleep(seconds)
        return function(*args, **options)

    setattr(owner, name, slow)


def record_exit(code: int) -> None:
    """Write the exit code, then exit."""
    output.with_name(f"{output.name}.exit-{RANK}").write_text(str(code))
    exit_now(code)


if __name__ == "__main__":
    name, phase, seconds, *flags = sys.argv[1:]
    script = importlib.import_module(name)
    args = parse_flags(script, flags)
    output = Path(args.output_dir)
    exit_now, os._exit = os._exit, record_exit
    if phase != "none":
        add_pause(phase, float(seconds), script, output)
    run.launch(script.fsdp_main, args)
