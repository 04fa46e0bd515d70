"""A lock on OUTPUT_DIR. Without this file, a second run in the same directory is not refused: the
two would overwrite each other's files. Nor is a run in a directory with the exports of others."""

import contextlib
import fcntl
import os
import socket
from pathlib import Path

from core.ranks import Problem, on_rank_zero, print0


def hold(directory: Path) -> None:
    """Create `directory`, and lock the file `lock` in it until rank 0 ends. Call on all ranks.

    The kernel holds the lock, so that it ends with the process, even after kill -9 or on another
    node. Raise Problem on all ranks if another run holds it, or if exports would replace others.
    """
    on_rank_zero(_hold, directory)


def _hold(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    is_run = (directory / "status").exists()
    for path in (directory / "best", directory / "final"):
        is_export = (path / "tokenizer_config.json").exists()
        if any(path.glob("*")) and not (is_run and is_export):
            raise Problem(f"{path} has files, but not of this run. Pass another --output-dir.")
    # Never closed: a process loses a POSIX lock when it closes the file. Unlike flock's, such locks
    # are not inherited by the workers of a data loader, which may outlive the run for seconds.
    file = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        owner = os.read(file, 1000).decode(errors="replace") or "another run"
        problem = f"--output-dir {directory} is in use by {owner}. End it first, or pass another."
        raise Problem(problem) from None
    except OSError as error:
        print0(f"{directory} has no locks ({error.strerror}): start one run at a time in it.")
    os.truncate(file, 0)
    with contextlib.suppress(OSError):  # a full disk: the lock holds without an owner's name
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
