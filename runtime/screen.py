"""Progress of long work: a bar on a terminal, or a line every 30 seconds in a file."""

import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

from . import watchdog
from .ranks import say


class Lines:
    """A file object for tqdm without a terminal. It prints each update of the bar as a line."""

    def write(self, text: str) -> None:
        """Print the text, unless it only clears the bar or moves the cursor."""
        say(text.replace("\x1b[A", "").strip())

    def flush(self) -> None:
        """Do nothing, because `write` has printed the text."""


class Progress(tqdm):
    """A progress bar of `total` units of work on rank 0, which disappears when all are done."""

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
        """Advance the bar by `n` units; the last unit clears it."""
        watchdog.touch()
        is_drawn = super().update(n)
        if self.n >= self.total:
            self.close()
        return is_drawn


def progress(items: Any, text: str) -> Iterator[Any]:
    """Yield the items of a sized iterable, with a progress bar."""
    with Progress(text, len(items)) as bar:
        for item in items:
            yield item
            bar.update()
