"""OUTPUT_DIR/lock: one run at a time writes to a directory."""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from . import ranks
from .stops import STOPPED, kill_forked

LOCK_SECONDS = 60  # without a heartbeat until a lock counts as left behind


def pid_namespace() -> str:
    """Return a name for a machine's start, and a container on it, in which a pid is one process.

    Containers may have one host name, and each a process of the same number.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


class Lock:
    """OUTPUT_DIR/lock, held while entered by rank 0 for all, so that no other run writes there.

    The lock of a run that is gone is taken over: of a dead process of this host, of the same job
    before a restart, or one without a heartbeat while this start waited, for at most LOCK_SECONDS.
    Entering raises ValueError if another run holds it, OSError if nothing can be written.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "lock"
        self.new_beat = directory / "lock-beat"
        self.left = threading.Event()
        self.beaten = 0.0  # when the last heartbeat was
        self.heart: threading.Thread | None = None  # while held, on rank 0
        self.job = os.environ.get("SLURM_JOB_ID")  # not torchrun's run id, often the same
        self.mine = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "pids": pid_namespace(),
            "job": self.job,
            "restart": int(os.environ.get("SLURM_RESTART_COUNT", 0)),
        }

    def __enter__(self) -> "Lock":
        ranks.on_rank_zero(self._acquire)
        if dist.get_rank() == 0:
            self.beaten = time.time()
            self.heart = threading.Thread(target=self._beat, daemon=True)
            self.heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        if dist.get_rank() == 0:
            self.release()

    def is_held(self) -> bool:
        """Return whether this run holds the lock; rank 0 alone."""
        return self.heart is not None and not self.left.is_set()

    def release(self) -> None:
        """Let other runs in; rank 0 alone."""
        self.left.set()
        self.heart.join()
        if not self._is_lost():
            with contextlib.suppress(OSError):  # cut off
                self.path.unlink()
                self.new_beat.unlink(missing_ok=True)

    def _text(self) -> str:
        return json.dumps(self.mine | {"heartbeat": time.time()})

    def _holder(self) -> tuple[dict[str, Any], tuple[str, int]]:
        """Return the lock's holder, and its text and time, which change with each heartbeat."""
        text = self.path.read_text(errors="replace")
        holder = None
        with contextlib.suppress(ValueError):  # torn, or not ours
            holder = json.loads(text)
        if not isinstance(holder, dict):
            holder = {}
        return holder, (text, self.path.stat().st_mtime_ns)

    def _is_gone(self, holder: dict[str, Any]) -> bool:
        pids = holder.get("pids", self.mine["pids"])
        if (holder.get("host"), pids) != (self.mine["host"], self.mine["pids"]):
            is_restart = holder.get("restart", 0) < self.mine["restart"]
            return self.job is not None and holder.get("job") == self.job and is_restart
        pid = holder.get("pid")
        return pid == self.mine["pid"] or not Path(f"/proc/{pid}").exists()

    def _acquire(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.path.is_dir():
            raise ValueError(f"{self.path} is a directory, where a run has its lock: remove it")
        deadline = time.monotonic() + LOCK_SECONDS
        first_seen = None
        while not self._create():
            with contextlib.suppress(FileNotFoundError):  # given back meanwhile
                holder, seen = self._holder()
                too_late = time.monotonic() > deadline
                who = f"process {holder.get('pid')} on {holder.get('host')}"
                if self._is_gone(holder) or (too_late and seen == first_seen):
                    self.path.unlink()
                elif too_late:
                    raise ValueError(
                        f"--output-dir {self.directory} is in use by {who}: stop that with Ctrl-C "
                        "there, or give another --output-dir"
                    )
                elif first_seen is None:
                    print(
                        f"waiting for {who}, which uses {self.directory}, for {LOCK_SECONDS} s: "
                        "stop it with Ctrl-C there, or this one, and give another --output-dir",
                        flush=True,
                    )
                    first_seen = seen
            time.sleep(0.2)

    def _create(self) -> bool:
        """Take the lock if it is free; return whether it was."""
        try:
            with self.path.open("x") as file:
                try:
                    file.write(self._text())
                    file.flush()
                except OSError:
                    self.path.unlink()
                    raise
        except FileExistsError:
            return False
        return True

    def _beat(self) -> None:
        while not self.left.wait(LOCK_SECONDS / 6):
            self.check()
            try:
                self.new_beat.write_text(self._text())
                self.new_beat.replace(self.path)
            except OSError:  # a full disk
                try:
                    os.utime(self.path)
                except OSError:
                    continue
            self.beaten = time.time()

    def check(self) -> None:
        """End this process, with nothing written, if another run has taken the directory over.

        That may be so after LOCK_SECONDS without a heartbeat: this process was stopped, or cut off
        from its files. Call it before writing.
        """
        if not self.is_held() or abs(time.time() - self.beaten) < LOCK_SECONDS / 2:
            return
        if self._is_lost():
            text = (
                f"--output-dir {self.directory} is another run's: this one was silent for too long"
            )
            print(f"error: {text}", file=sys.stderr, flush=True)
            kill_forked()
            os._exit(STOPPED)

    def _is_lost(self) -> bool:
        try:
            holder, _ = self._holder()
        except FileNotFoundError:  # the other has come and gone
            return True
        except OSError:  # still cut off
            return False
        return not holder.items() >= self.mine.items()
