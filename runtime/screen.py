"""Progress of long work: a bar on a terminal, or a line every 30 seconds in a file.

A watchdog writes the stacks of a rank that makes no progress to OUTPUT_DIR/stacks-rank-N.txt.
"""

import contextlib
import faulthandler
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

from .ranks import say

_file: Any = None  # open while the watchdog runs
_seconds = 0.0
_last_touch = 0.0


@contextlib.contextmanager
def watchdog(path: Path, seconds: float) -> Iterator[None]:
    """Write all stacks to `path` whenever `touch` is not called for `seconds`."""
    global _file, _seconds
    with path.open("w") as _file:
        _seconds = seconds
        touch()
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            if _file.seek(0, 2) == 0:  # seek returns its size
                path.unlink(missing_ok=True)
            _file = None


def touch() -> None:
    """Restart the watchdog's timer, at most once a second because that starts a thread."""
    global _last_touch
    if _file is not None and time.monotonic() > _last_touch + 1:
        _last_touch = time.monotonic()
        faulthandler.dump_traceback_later(_seconds, file=_file)


class Lines:
    """A file object for tqdm without a terminal. It prints each update of the bar as a line."""

    def write(self, text: str) -> None:
        """Print the text, unless it only clears the bar or moves the cursor."""
        say(text.replace("\x1b[A", "").strip())

    def flush(self) -> None:
        """Do nothing, because `write` has printed the text."""


class Progress:
    """A progress bar of `total` units of work on rank 0, from the first unit to the last one."""

    def __init__(self, text: str, total: int, unit: str = "it", done: int = 0) -> None:
        self._options: dict[str, Any] = {
            "desc": text, "total": total, "initial": done, "unit": unit, "leave": False,
            "dynamic_ncols": True, "disable": dist.get_rank() != 0,
        }  # fmt: skip
        self._done = done
        self._bar: tqdm | None = None
        if not sys.stderr.isatty():
            self._options |= {"delay": 30.0, "mininterval": 30.0, "miniters": 1}  # seconds
            self._options["bar_format"] = "{desc} {n_fmt}/{total_fmt}  {rate_fmt}  left {remaining}"
            self._bar = tqdm(file=Lines(), **self._options)

    def update(self, count: int = 1) -> None:
        """Advance the bar by `count` units; the last unit clears it."""
        touch()
        if self._bar is None:  # before the first unit, each message would draw it again
            self._bar = tqdm(**self._options)
        self._bar.update(count)
        self._done += count
        if self._done >= self._options["total"]:
            self.close()

    def close(self) -> None:
        """Clear the bar."""
        if self._bar is not None:
            self._bar.close()


def progress(items: Any, text: str) -> Iterator[Any]:
    """Yield the items of a sized iterable, with a progress bar."""
    with contextlib.closing(Progress(text, len(items))) as bar:
        for item in items:
            yield item
            bar.update()
