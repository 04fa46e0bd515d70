"""Experiment trackers, which receive the numbers of metrics.jsonl too; rank 0 only."""

import contextlib
import importlib
import os
import uuid
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm


class Trackers:
    """The trackers of --track. A run that resumes at `step` continues its records. A tracker that
    fails is reported once and not used again."""

    def __init__(self, args: Namespace, directory: Path, script: str, step: int) -> None:
        self.open: dict[str, Any] = {}
        for name in args.track:
            with self._tolerant(name):
                self.open[name] = _start(name, args, directory, script, step)

    def log(self, event: str, step: int, values: dict[str, Any]) -> None:
        """Send an event's numbers as event/name, and those of `losses` as event/losses/name."""
        numbers = {f"{event}/{name}": number for name, number in values.items()}
        losses = numbers.pop(f"{event}/losses", {})
        numbers |= {f"{event}/losses/{name}": loss for name, loss in losses.items()}
        for name, tracker in list(self.open.items()):
            with self._tolerant(name):
                if name == "tensorboard":
                    for key, number in numbers.items():
                        tracker.add_scalar(key, number, step)
                else:
                    tracker.log(numbers, step=step)

    def close(self) -> None:
        """Close all trackers."""
        for name, tracker in list(self.open.items()):
            with self._tolerant(name):
                tracker.close() if name == "tensorboard" else tracker.finish()

    @contextlib.contextmanager
    def _tolerant(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of any type: the training does not depend on a tracker
            self.open.pop(name, None)
            tqdm.write(f"--track {name} failed and is no longer used: {error!r}")


def _start(name: str, args: Namespace, directory: Path, script: str, step: int) -> Any:
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(directory / name, purge_step=step + 1)  # later steps are repeated
    path = directory / "id"  # shared by all starts in this directory
    if not path.exists():
        directory.mkdir(exist_ok=True)
        path.write_text(uuid.uuid4().hex[:8])
    run = path.read_text()
    os.environ |= {"WANDB_RUN_ID": run, "WANDB_DIR": str(directory)}
    tracker = importlib.import_module(name)
    return tracker.init(project=script, name=run, resume="allow", config=vars(args))
