"""Requests to stop a run: signals, or the end of torchrun."""

import os
import select
import signal
import threading
from collections.abc import Callable

import multiprocess

from . import ranks

STOPPED = 75  # exit code of a run that stopped on request: the same command resumes it
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
PARENT = os.getppid()  # torchrun, if it started this process


class Stopped(Exception):
    """A rank was asked to stop. All ranks raise this together, between steps or batches."""


class StopRequest:
    """A context that watches for requests to stop: SIGTERM, SIGINT, SIGUSR1, or torchrun's end.

    If nothing would be lost, or a rank has failed, a request calls `end` with its name, which ends
    the process. Otherwise the ranks stop together. A thread reads the signals, as Python runs no
    handler while the main thread loads, compiles or waits in a collective.
    """

    def __init__(self, end: Callable[[str], None]) -> None:
        self.end = end
        self.is_asked = False
        self.nothing_to_lose = True
        self._lock = threading.Lock()  # guards the two flags above

    def __enter__(self) -> None:
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)  # the thread handles it
        threading.Thread(target=self._watch, args=(reader,), daemon=True).start()

    def __exit__(self, *_: object) -> None:
        _restore()
        os.close(self._writer)  # ends the thread

    def _watch(self, reader: int) -> None:
        while True:
            is_readable, _, _ = select.select([reader], [], [], 1.0)
            number = os.read(reader, 1) if is_readable else None
            if number == b"":  # the other end is closed
                break
            if number and number[0] in SIGNALS:
                self._ask(signal.Signals(number[0]).name)
            elif "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != PARENT:
                self._ask("the end of torchrun")
        os.close(reader)

    def _ask(self, name: str) -> None:
        with self._lock:
            if self.nothing_to_lose or ranks.has_failed():
                self.end(name)
            if not self.is_asked:
                ranks.say(f"{name}: stopping after this step or the next.")
            self.is_asked = True

    def set_nothing_to_lose(self, value: bool) -> None:
        """Set whether a request to stop ends the process at once; if True, earlier ones do too."""
        with self._lock:
            self.nothing_to_lose = value
            if self.is_asked and value:
                self.end("a request to stop")


def _restore() -> None:
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_restore)  # children of `datasets` must not wake the thread


def kill_forked() -> None:
    """Kill the worker processes of `datasets`, which would otherwise wait for work forever."""
    for child in multiprocess.active_children():
        child.kill()
