"""Run a script with a pause at the start of a phase: phases.py SCRIPT PHASE SECONDS FLAGS...

When the phase starts, each rank writes the file OUTPUT_DIR.PHASE-RANK and sleeps, once. When the
process exits, it writes its exit code to OUTPUT_DIR.exit-RANK. The phase "none" adds no pause.
"""

import os
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from killed import before_each_step, import_script

from core import ranks
from prepare import tables

RANK = os.environ.get("RANK", "0")
LATER = range(3, 10**9)  # completed steps


def add_pause(phase: str, pause: Callable[[], None], script: ModuleType) -> None:
    """Make a script call `pause` whenever the phase starts."""

    def before(owner: Any, name: str, is_in_phase: Callable[..., bool]) -> None:
        function = getattr(owner, name)

        def slow(*args: Any, **options: Any) -> Any:
            if is_in_phase(*args):
                pause()
            return function(*args, **options)

        setattr(owner, name, slow)

    steps = {"first step": range(1), "step": LATER}
    validations = {"first validation": range(1), "validation": LATER}
    if phase in steps:
        before_each_step(script, lambda step: pause() if step - 1 in steps[phase] else None)
    elif phase in validations:
        before(script, "evaluate", lambda *args: args[5].step in validations[phase])
    elif phase == "export":
        before(script, "export_model", lambda *args: args[2].name == "final")
    elif phase == "load":
        before(script, "load_model", lambda *_: True)
    elif phase == "tokenisation":
        before(tables, "map_rows", lambda *_: True)
    elif phase == "save":
        before(script, "save", lambda *_: True)
    elif phase == "generation":
        before(script.rouge, "generation", lambda *_: True)
    elif phase != "none":
        raise ValueError(phase)


def record_exit(code: int) -> None:
    """Write the exit code, then exit."""
    output.with_name(f"{output.name}.exit-{RANK}").write_text(str(code))
    exit_now(code)


def pause_once() -> None:
    """Sleep, the first time."""
    mark = output.with_name(f"{output.name}.{phase}-{RANK}")
    if not mark.exists():
        mark.touch()
        time.sleep(seconds)


if __name__ == "__main__":
    script = import_script()
    phase, seconds = sys.argv.pop(1), float(sys.argv.pop(1))
    args = script.parse_args()
    output = args.run.output_dir
    exit_now, os._exit = os._exit, record_exit
    add_pause(phase, pause_once, script)
    ranks.run(script.fsdp_main, args)
