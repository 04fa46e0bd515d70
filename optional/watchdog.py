"""What a rank that hangs waits for. Without this file, it ends by the time-out of a collective, and
nothing tells where it was, or whom it waited for at the start. Any rank may call these functions.
"""

import contextlib
import faulthandler
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any

import torch.distributed as dist

from core import ranks

WAIT_SECONDS = 5.0  # more than the starts of ranks differ by
_file: IO[str] | None = None  # open in a watched function
_seconds = 0.0


def watch_start() -> None:
    """Without a process group, say after WAIT_SECONDS for whom this rank waits, and end it after
    ranks.JOIN_SECONDS."""
    if ranks.environment_size() > 1:
        threading.Thread(target=_watch_start, daemon=True).start()


def _watch_start() -> None:
    rank = os.environ["RANK"]
    size = os.environ["WORLD_SIZE"]
    others = "rank 0" if rank != "0" else "the others"
    text = f"Rank {rank} of {size} waits for {others}. To train on one process, unset RANK."
    for seconds, line in (
        (WAIT_SECONDS, text),
        (ranks.JOIN_SECONDS, f"error: {ranks.NOT_CONNECTED}"),
    ):
        time.sleep(seconds)
        if dist.is_initialized():
            return
        print(line, file=sys.stderr, flush=True)
    os._exit(1)  # it waits in C++


def watched(train: Callable) -> Callable:
    """Return `train`, whose first argument are the script's, as a function that writes all stacks
    to OUTPUT_DIR/stacks-rank-N.txt if `restart` is not called for a third of the time-out. At its
    end, also by an error, an empty file is deleted."""

    @functools.wraps(train)
    def run(args: Any, *others: Any) -> Any:
        global _file, _seconds
        path = args.run.output_dir / f"stacks-rank-{dist.get_rank()}.txt"
        _seconds = args.run.timeout_minutes * 20
        with path.open("w") as _file:
            restart()
            try:
                return train(args, *others)
            finally:
                faulthandler.cancel_dump_traceback_later()
                with contextlib.suppress(OSError):  # do not hide the reason for the end
                    if _file.seek(0, 2) == 0:  # its size
                        path.unlink(missing_ok=True)
                _file = None

    return run


def restart() -> None:
    """Start the time again, if a watched function runs."""
    if _file is not None:
        faulthandler.dump_traceback_later(_seconds, file=_file)
