"""Write the stacks of a rank that makes no progress to OUTPUT_DIR/stacks-rank-N.txt."""

import faulthandler
import time
from pathlib import Path
from typing import Any

_file: Any = None  # open while the watchdog runs
_seconds = 0.0
_last_touch = 0.0


def start(path: Path, seconds: float) -> None:
    """Start a timer that writes all stacks to `path` if `touch` is not called for `seconds`."""
    global _file, _seconds
    _file, _seconds = path.open("w"), seconds
    touch()


def touch() -> None:
    """Restart the watchdog's timer, at most once a second because that starts a thread."""
    global _last_touch
    if _file is not None and time.monotonic() > _last_touch + 1:
        _last_touch = time.monotonic()
        faulthandler.dump_traceback_later(_seconds, file=_file)


def stop() -> None:
    """Stop the watchdog's timer, and delete its file if it is empty."""
    global _file
    if _file is not None:
        faulthandler.cancel_dump_traceback_later()
        if _file.seek(0, 2) == 0:  # seek returns its size
            Path(_file.name).unlink(missing_ok=True)
        _file = None
