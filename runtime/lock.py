"""OUTPUT_DIR/lock: one run at a time writes to a directory."""

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from filelock import SoftFileLease, Timeout

from . import ranks
from .stops import STOPPED, kill_forked


class Lock:
    """A context in which rank 0 holds OUTPUT_DIR/lock for all ranks. Entering it raises ValueError
    if another run holds the lock."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        path = directory / "lock"
        self.lease = SoftFileLease(path, on_compromise=self._end, thread_local=False)

    def __enter__(self) -> None:
        ranks.on_rank_zero(self._acquire)

    def __exit__(self, *_: object) -> None:
        self.lease.release()

    def _acquire(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        seconds, owner = 1.0, self.lease.owner
        who = f"process {owner.pid} on {owner.hostname}" if owner else "another run"
        # In a container, filelock appends the process namespace to the host name.
        host, namespace = socket.gethostname(), Path("/proc/self/ns/pid").stat().st_ino
        if owner and owner.hostname not in (host, f"{host}?pidns-{namespace:x}"):
            seconds = 35.0  # a lease without a heartbeat expires after 30 s
            ranks.say(f"{self.directory} is in use by {who}. Waiting 35 s in case it was killed.")
        try:
            self.lease.acquire(timeout=seconds)  # at once if its holder died on this host
        except Timeout:
            text = f"--output-dir {self.directory} is in use by {who}. Pass another one."
            raise ValueError(text) from None

    def check(self) -> None:
        """End this process if another run has taken over the lock, for example while this one was
        suspended. Call this before saving."""
        if self.lease.is_locked and not self.lease.is_lock_held_by_us:  # is_locked: only on rank 0
            time.sleep(1)  # a read may fail once on a network file system
            if not self.lease.is_lock_held_by_us:
                self._end()

    def _end(self, _: Any = None) -> None:
        text = f"error: Another run has taken over --output-dir {self.directory}. This one ends."
        print(text, file=sys.stderr, flush=True)
        kill_forked()
        os._exit(STOPPED)
