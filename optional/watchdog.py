"""What a rank that hangs waits for. Without this file, it ends by the time-out of a collective, and
nothing tells where it was, or whom it waited for at the start."""

import faulthandler
import os
import sys
import threading
import time
from pathlib import Path
from typing import IO

import torch.distributed as dist

from core import ranks

WAIT_SECONDS = 5.0  # more than the starts of ranks differ by
_file: IO[str] | None = None  # open from the first step on


def watch_start() -> None:
    """Without a process group, say after WAIT_SECONDS for whom this rank waits, and end it after
    ranks.JOIN_SECONDS. Any rank may call this."""
    if ranks.environment_size() > 1:
        threading.Thread(target=_watch_start, daemon=True).start()


def _watch_start() -> None:
    time.sleep(WAIT_SECONDS)
    if not dist.is_initialized():
        rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
        others = "rank 0" if rank != "0" else "the others"
        advice = "To train on one process, unset RANK."
        print(f"Rank {rank} of {size} waits for {others}. {advice}", file=sys.stderr, flush=True)
        time.sleep(ranks.JOIN_SECONDS)
    if not dist.is_initialized():  # it waits in C++
        print(f"error: {ranks.NOT_CONNECTED}", file=sys.stderr, flush=True)
        os._exit(1)


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
