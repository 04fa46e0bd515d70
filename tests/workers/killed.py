"""Run a script and send SIGKILL to one rank before a step: killed.py SCRIPT RANK STEP FLAGS..."""

import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests")]

from core import ranks


def before_each_step(script: ModuleType, hook: Callable[[int], None]) -> None:
    """Call `hook` with the number of a step, from 1, before the script makes it."""
    progress = script.progress

    def watched(items: Any, text: str, total: int, done: int = 0) -> Iterator[Any]:
        for number, item in enumerate(progress(items, text, total, done), done + 1):
            if text == "step":
                hook(number)
            yield item

    script.progress = watched


def import_script() -> ModuleType:
    """Return the script that sys.argv[1] names; delete the words before it, which are not its."""
    del sys.argv[0]
    return importlib.import_module(sys.argv[0])


if __name__ == "__main__":
    script = import_script()
    rank, number = int(sys.argv.pop(1)), int(sys.argv.pop(1))

    def die(step: int) -> None:
        if step == number and int(os.environ.get("RANK", 0)) == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    before_each_step(script, die)
    ranks.run(script.fsdp_main, script.parse_args())
