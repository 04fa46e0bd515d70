"""Experiment trackers, which also get the numbers of metrics.jsonl; rank 0 only.

A tracker that fails is named once, and not used after that: the training continues.
"""

import importlib
import uuid
from argparse import Namespace
from pathlib import Path
from typing import Any

from tqdm import tqdm


class Trackers:
    """The trackers of --track. A run that resumes at `step` continues in them."""

    def __init__(self, args: Namespace, directory: Path, script: str, step: int) -> None:
        self.config = {name: str(value) for name, value in vars(args).items()}
        self.directory = directory / "track"
        self.script = script
        self.step = step
        self.open: dict[str, Any] = {}
        for name in args.track:
            start = self._tensorboard if name == "tensorboard" else self._module
            self._try(name, lambda name=name, start=start: self.open.update({name: start(name)}))

    def _tensorboard(self, _: str) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        # Steps after the restored one are trained again.
        return SummaryWriter(self.directory / "tensorboard", purge_step=self.step + 1)

    def _module(self, name: str) -> Any:
        """Start a run of wandb or trackio, which have the same functions."""
        self.directory.mkdir(exist_ok=True)
        path = self.directory / "id"  # shared by all starts in this directory
        if not path.exists():
            path.write_text(uuid.uuid4().hex[:8])
        place = {"name": path.read_text()}
        if name == "wandb":
            place |= {"id": path.read_text(), "dir": self.directory}
        module = importlib.import_module(name)
        return module.init(project=self.script, resume="allow", config=self.config, **place)

    def log(self, event: str, step: int, values: dict[str, Any]) -> None:
        """Send an event's numbers, as event/name; those of an inner dict as event/name/key."""
        numbers = {}
        for name, value in values.items():
            inner = value if isinstance(value, dict) else {"": value}
            for key, number in inner.items():
                if isinstance(number, int | float):
                    numbers[f"{event}/{name}/{key}".rstrip("/")] = number
        for name, tracker in list(self.open.items()):
            self._try(name, lambda name=name, tracker=tracker: _send(name, tracker, numbers, step))

    def close(self) -> None:
        """Close all trackers."""
        for name, tracker in list(self.open.items()):
            self._try(name, tracker.close if name == "tensorboard" else tracker.finish)
