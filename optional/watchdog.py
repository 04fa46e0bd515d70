"""What a rank that hangs waits for. Without this file, it ends by the time-out of a collective, and
nothing tells where it was, or whom it waited for at the start. Any rank may call these functions.
"""

import contextlib
import faulthandler
import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import IO, Any

import torch.distributed as dist

from core.ranks import environment_size

WAIT_SECONDS = 5.0  # more than the starts of ranks differ by
_file: IO[str] | None = None  # open in a watched function
_seconds = 0.0


def watch_start() -> None:
    """Say after WAIT_SECONDS without a process group for whom this rank waits."""
    if environment_size() > 1:
        threading.Timer(WAIT_SECONDS, _print_wait).start()


def _print_wait() -> None:
    if not dist.is_initialized():
        rank = os.environ["RANK"]
        others = "rank 0" if rank != "0" else "the others"
        text = f"Rank {rank} of {environment_size()} waits for {others}."
        print(text, "To train on one process, unset RANK.", file=sys.stderr, flush=True)


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
