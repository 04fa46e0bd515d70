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
    """The trackers of --track, in which a run that resumes at `step` continues."""

    def __init__(self, args: Namespace, directory: Path, script: str, step: int) -> None:
        self.open: dict[str, Any] = {}  # without those that have failed
        for name in args.track:
            with self._tolerant(name):
                self.open[name] = _start(name, args, directory, script, step)

    def log(self, event: str, step: int, values: dict[str, Any]) -> None:
        """Send an event's numbers as event/name, and those of `losses` as event/losses/name."""
        losses = {f"losses/{name}": loss for name, loss in values.get("losses", {}).items()}
        numbers = {f"{event}/{k}": x for k, x in (values | losses).items() if k != "losses"}
        for name, tracker in list(self.open.items()):
            with self._tolerant(name):
                if name == "tensorboard":
                    for key, number in numbers.items():
                        tracker.add_scalar(key, number, step)
                    tracker.flush()
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
    directory.mkdir(exist_ok=True)
    path = directory / "id"  # shared by all starts in this directory
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:8])
    run = path.read_text()
    ours = {"project": script, "name": run, "group": os.environ.get(f"{name}_run_group".upper())}
    if name == "wandb":
        ours |= {"id": os.environ.get("WANDB_RUN_ID", run), "dir": str(directory)}
    # The user's variables, such as WANDB_NAME or TRACKIO_PROJECT, take precedence.
    options = {key: os.environ.get(f"{name}_{key}".upper(), x) for key, x in ours.items()}
    return importlib.import_module(name).init(resume="allow", config=vars(args), **options)
