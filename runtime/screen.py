"""Progress of long work on the screen: a bar on a terminal, a line now and then in a file."""

import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

from . import watchdog
from .ranks import say

LINE_SECONDS = 30.0  # between two lines


class Lines:
    """Print, at most every LINE_SECONDS, the work done, its speed, and the time left."""

    def __init__(self, text: str, total: int, done: int = 0) -> None:
        self.text = text
        self.total = total
        self._began_at = done
        self._start = self._last = time.monotonic()

    def left(self, done: int) -> str:
        """Return the time that is left, as 1:02:03 or 02:03, at the speed so far."""
        seconds = (time.monotonic() - self._start) / max(1, done - self._began_at)
        return tqdm.format_interval(seconds * (self.total - done))

    def show(self, done: int) -> None:
        """Print a line if it is time for one."""
        now = time.monotonic()
        if now - self._last < LINE_SECONDS or done == self._began_at:
            return
        self.rest()  # first: tqdm redraws its bars after each line, which may call this again
        rate = (done - self._began_at) / (now - self._start)
        speed = f"{rate:,.0f} a second" if rate >= 1 else f"{1 / rate:.3g} s each"
        say(f"{self.text} {done:,}/{self.total:,}  {speed}  left {self.left(done)}")

    def rest(self) -> None:
        """Note that something else was printed just now."""
        self._last = time.monotonic()


class Progress:
    """Show on rank 0 how much of `total` units of work is done, a bar until all is."""

    def __init__(self, text: str, total: int, unit: str = "it", done: int = 0) -> None:
        self.done = done
        is_hidden = None if dist.get_rank() == 0 else True  # None: shown on a terminal only
        self._bar = tqdm(
            desc=text, total=total, initial=done, unit=unit, leave=False, dynamic_ncols=True,
            disable=is_hidden, delay=1e-9,
        )  # fmt: skip
        self.lines: Lines | None = None  # without a terminal, on rank 0
        if dist.get_rank() == 0 and self._bar.disable:
            self.lines = Lines(text, total, done)

    def update(self) -> None:
        """Note that a unit is done; the last one clears the bar."""
        watchdog.touch()
        self.done += 1
        self._bar.update()
        if self.lines:
            self.lines.show(self.done)
        if self.done == self._bar.total:
            self.close()

    def close(self) -> None:
        """Clear the bar."""
        self._bar.close()


def progress(items: Any, text: str) -> Iterator[Any]:
    """Yield the items, which have a length, and show how many of them are done."""
    shown = Progress(text, len(items))
    try:
        for item in items:
            yield item
            shown.update()
    finally:
        shown.close()
