"""A watchdog that prints where a rank is when it takes too long, to see which rank differs."""

import faulthandler
import os
import sys
import threading
import time


class Watchdog:
    """A thread that prints this rank's phase and Python stacks, once, if a phase lasts too long.

    It runs while entered; `minutes` is the limit of a phase (0: never).
    """

    def __init__(self, minutes: float) -> None:
        self.seconds = 60 * minutes
        self.name: str | None = None  # the phase that is watched
        self.since = 0.0
        self._left = threading.Event()

    def phase(self, name: str | None) -> None:
        """Begin a phase, such as "step 7"; None: one without a limit."""
        self.since = time.monotonic()
        self.name = name

    def __enter__(self) -> "Watchdog":
        if self.seconds:
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()

    def _watch(self) -> None:
        while not self._left.wait(min(5.0, self.seconds / 4)):
            lasted = time.monotonic() - self.since
            if self.name and lasted > self.seconds:
                rank = os.environ.get("RANK", "0")
                text = f"rank {rank} has been in {self.name} for {lasted / 60:.1f} minutes:\n"
                with open(os.memfd_create("traceback"), "w+") as file:
                    faulthandler.dump_traceback(file)  # of all threads
                    file.seek(0)
                    text += file.read()
                print(text, file=sys.stderr, flush=True)  # at once: other ranks print theirs, too
                self.name = None
