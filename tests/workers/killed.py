"""Run a script and send SIGKILL to one rank before a step: killed.py SCRIPT RANK STEP FLAGS..."""

import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests")]

from benchmarks.driven import parse_flags
from runtime.state import State
from runtime.steps import Step


def before_each_step(hook: Callable[[State], None]) -> None:
    """Call `hook` with the training state at the start of each step."""
    enter = Step.__enter__

    def begin(step: Step) -> Step:
        hook(step.steps.state)
        return enter(step)

    Step.__enter__ = begin


if __name__ == "__main__":
    script, rank, number = importlib.import_module(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

    def die(state: State) -> None:
        """Kill this process at the start of the step."""
        if state.step + 1 == number and int(os.environ.get("RANK", 0)) == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    before_each_step(die)
    script.fsdp_main(parse_flags(script, sys.argv[4:]))
