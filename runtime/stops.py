"""Requests to stop a run, by a signal or by the end of torchrun."""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable

from tqdm import tqdm

from . import ranks

# Exit code of a run that stopped on request, or has lost another rank: started again, it goes on.
STOPPED = 75

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
PARENT = os.getppid()  # torchrun, if there is one
UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ


class Stopped(Exception):
    """A rank was asked to stop. All ranks raise it together, at a point where nothing is half
    done."""


class StopRequest:
    """A watch for requests to stop this process, while entered: SIGTERM, SIGINT, SIGUSR1, or the
    end of its torchrun, which leaves its workers running when it is killed.

    While there is nothing to lose, as in the load and the export, a request ends the process at
    once: `end` is called with a message, and must not return. Otherwise the ranks agree to stop
    where a step, or a batch of a validation, begins.

    Python runs a signal's handler between bytecodes, so not while a rank loads, compiles, or waits
    in a collective for another that is gone. A thread that reads the wakeup descriptor sees the
    signal then, too: after SIGTERM in a step it ends the process, unless the step ends soon.

    The thread also sees when another rank has told its failure, and ends this process `patience`
    seconds later, because the torchrun of another node may not ask it to stop.
    """

    def __init__(self, end: Callable[[str], None], patience: float = 60.0) -> None:
        self.end = end
        self.patience = patience
        self.name = ""  # what asked this process to stop, such as SIGTERM
        self.terminated = False  # SIGTERM has come
        self.nothing_to_lose = True
        self._lock = threading.Lock()  # guards the three above, and the deadline
        self._deadline = float("inf")  # when a step must have ended after SIGTERM
        self._began: float | None = None  # when the step under way did
        self._slowest = 0.0  # seconds of the slowest step
        self._heard: float | None = None  # when another rank had told its failure

    def __enter__(self) -> "StopRequest":
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before = [signal.signal(number, _ignore) for number in SIGNALS]
        threading.Thread(target=self._watch, args=(reader,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in zip(SIGNALS, self._before, strict=True):
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        os.close(self._writer)

    def _watch(self, reader: int) -> None:
        while True:
            has_come, _, _ = select.select([reader], [], [], 1.0)
            if has_come:
                number = os.read(reader, 1)
                if not number:
                    break
                if number[0] in SIGNALS:  # others may have handlers in Python, too
                    self._ask(signal.Signals(number[0]).name)
            elif UNDER_TORCHRUN and os.getppid() != PARENT:
                self._ask("the end of torchrun")
            with self._lock:
                if time.monotonic() > self._deadline:
                    self.end(f"{self.name}: the step does not end, and is lost")
            self._listen()
        os.close(reader)

    def _listen(self) -> None:
        """End the process if another rank failed a while ago."""
        if self._heard is None and ranks.another_failed():
            self._heard = time.monotonic()
        if self._heard is not None and time.monotonic() - self._heard > self.patience:
            why = f"another rank failed {self.patience:.0f} s ago: see that one's error"
            ranks.say_error(why)
            self.end(why)

    def _ask(self, name: str) -> None:
        with self._lock:
            is_first = not self.name
            self.name = name
            self.terminated = self.terminated or name == "SIGTERM"
            self._end_if_nothing_is_lost()
            self._set_deadline()
            if is_first and int(os.environ.get("RANK", 0)) == 0:
                tqdm.write(f"{name}: stopping after this step or the next")

    def _end_if_nothing_is_lost(self) -> None:
        if self.name and self.nothing_to_lose:
            self.end(f"{self.name}: stopped, where there is nothing to save")

    def _set_deadline(self) -> None:
        self._deadline = float("inf")
        if self.terminated and self._began is not None:
            self._deadline = time.monotonic() + 5 + 2 * self._slowest

    def begin_step(self) -> bool:
        """Note that a step begins; return whether this rank was asked to stop."""
        with self._lock:
            self._began = time.monotonic()
            self._set_deadline()
            return bool(self.name)

    def end_step(self) -> None:
        """Note that the step is over: a save or an export has no deadline."""
        with self._lock:
            if self._began is not None:
                self._slowest = max(self._slowest, time.monotonic() - self._began)
            self._began = None
            self._set_deadline()

    def set_nothing_to_lose(self, value: bool) -> None:
        """Say whether a request should end this process at once; it does, if one has come."""
        with self._lock:
            self.nothing_to_lose = value
            self._end_if_nothing_is_lost()


def _ignore(*_: object) -> None:
    """Do nothing: the thread sees the signal."""


def _forget_in_child() -> None:
    """Restore signals' defaults in processes that `datasets` forks, which must not wake the thread
    of this one."""
    if signal.getsignal(signal.SIGTERM) is _ignore:
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget_in_child)


def kill_forked() -> None:
    """Kill the processes that tokenise for `datasets`: without this one they would wait for work
    for ever."""
    multiprocess = sys.modules.get("multiprocess")
    if multiprocess is not None:
        for child in multiprocess.active_children():
            child.kill()
