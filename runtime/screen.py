"""Progress of long work on the screen: a bar on a terminal, a line now and then in a file."""

import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

from . import watchdog
from .ranks import say


class Lines:
    """The file to which tqdm writes where there is no terminal: each state of a bar is a line."""

    def write(self, text: str) -> None:
        """Print the text unless it clears the bar, or moves the cursor for a second bar."""
        say(text.replace("\x1b[A", "").strip())

    def flush(self) -> None:
        """Do nothing: `write` has printed the text."""


class Progress(tqdm):
    """The progress of `total` units of work, on rank 0, until all are done."""

    def __init__(self, text: str, total: int, unit: str = "it", done: int = 0) -> None:
        options: dict[str, Any] = {"delay": 1e-9}  # the first update draws the bar
        if not sys.stderr.isatty():
            options = {"delay": 30.0, "mininterval": 30.0, "miniters": 1}  # seconds
            options["bar_format"] = "{desc} {n_fmt}/{total_fmt}  {rate_fmt}  left {remaining}"
            options["file"] = Lines()
        super().__init__(
            desc=text, total=total, initial=done, unit=unit, leave=False, dynamic_ncols=True,
            disable=dist.get_rank() != 0, **options,
        )  # fmt: skip

    def update(self, n: float | None = 1) -> bool | None:
        """Note that `n` units are done; the last one clears the bar."""
        watchdog.touch()
        is_drawn = super().update(n)
        if self.n >= self.total:
            self.close()
        return is_drawn


def progress(items: Any, text: str) -> Iterator[Any]:
    """Yield the items, which have a length, and show how many of them are done."""
    with Progress(text, len(items)) as bar:
        for item in items:
            yield item
            bar.update()
