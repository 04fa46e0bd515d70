"""Stacks of a rank that makes no progress, in OUTPUT_DIR/stacks-rank-N.txt."""

import faulthandler
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

_file: Any = None  # open while the watchdog runs
_seconds = 0.0
_armed = 0.0  # when the timer was last started


def start(directory: Path, seconds: float) -> None:
    """Write all stacks of this process when `touch` is not called for so many seconds."""
    global _file, _seconds
    _file = (directory / f"stacks-rank-{dist.get_rank()}.txt").open("w")
    _seconds = seconds
    touch()


def touch() -> None:
    """Note progress, and start the timer again: at most once a second, as that takes a thread."""
    global _armed
    now = time.monotonic()
    if _file is not None and now - _armed > 1:
        faulthandler.dump_traceback_later(_seconds, file=_file)
        _armed = now


def stop() -> None:
    """Stop the timer, and delete the file if it is empty."""
    global _file, _armed
    if _file is not None:
        faulthandler.cancel_dump_traceback_later()
        _file.close()
        path = Path(_file.name)
        if path.exists() and not path.stat().st_size:
            path.unlink()
    _file, _armed = None, 0.0
