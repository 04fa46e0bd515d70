"""Stacks of a rank that hangs. Without this file, a rank that waits forever ends by the time-out of
a collective, and nothing tells where it was."""

import faulthandler
from pathlib import Path
from typing import IO

import torch.distributed as dist

_file: IO[str] | None = None  # open from the first step on


def restart(directory: Path, timeout_minutes: float) -> None:
    """Write the stacks of all threads to DIRECTORY/stacks-rank-N.txt if neither this function nor
    `stop` is called for a third of the time-out. Any rank may call this."""
    global _file
    if _file is None:
        _file = (directory / f"stacks-rank-{dist.get_rank()}.txt").open("w")
    faulthandler.dump_traceback_later(timeout_minutes * 20, file=_file)


def stop() -> None:
    """Write no more stacks, and delete the file if it is empty. Any rank may call this."""
    global _file
    faulthandler.cancel_dump_traceback_later()
    if _file is not None and _file.seek(0, 2) == 0:  # its size
        Path(_file.name).unlink(missing_ok=True)
    _file = None
