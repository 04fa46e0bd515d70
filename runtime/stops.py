"""Requests to stop a run, by a signal or by the end of torchrun."""

import os
import select
import signal
import threading
from collections.abc import Callable

import multiprocess

from . import ranks

STOPPED = 75  # exit code of a run that stopped on request: the same command resumes it
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
PARENT = os.getppid()  # torchrun, if there is one


class Stopped(Exception):
    """A rank was asked to stop. All ranks raise it together, where nothing is half done."""


class StopRequest:
    """A watch for requests to stop, while entered: SIGTERM, SIGINT, SIGUSR1, or torchrun's end.

    If nothing would be lost, as in the load and the export, or a rank has failed, a request calls
    `end` with its name, which ends the process. Otherwise the ranks stop at the next step or batch
    of a validation. A thread reads the signals from the wakeup descriptor, as Python runs no
    handler while the main thread loads, compiles or waits in a collective.
    """

    def __init__(self, end: Callable[[str], None]) -> None:
        self.end = end
        self.is_asked = False
        self.name = ""  # of the request, such as SIGTERM
        self.nothing_to_lose = True
        self._lock = threading.Lock()  # guards both

    def __enter__(self) -> "StopRequest":
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, _ignore)
        threading.Thread(target=self._watch, args=(reader,), daemon=True).start()
        return self

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
                ranks.say(f"{name}: stopping after this step or the next")
            self.is_asked = True
            self.name = name

    def set_nothing_to_lose(self, value: bool) -> None:
        """Set whether a request should end this process at once; one that has come does so now."""
        with self._lock:
            self.nothing_to_lose = value
            if self.is_asked and value:
                self.end(self.name)


def _ignore(*_: object) -> None:
    """Do nothing: the thread sees the signal."""


def _restore() -> None:
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_restore)  # or a child of `datasets` would wake the thread


def kill_forked() -> None:
    """Kill the processes that tokenize for `datasets`, which would wait for work for ever."""
    for child in multiprocess.active_children():
        child.kill()
