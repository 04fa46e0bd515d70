"""--track: TensorBoard, W&B and trackio. Without this file, metrics are in metrics.jsonl only."""

import contextlib
import importlib.util
import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from core.log import Log
from core.ranks import print0

_open: dict[str, Any] = {}  # trackers by name, without those that have failed


@dataclass
class Track:
    """Where metrics go, besides metrics.jsonl."""

    track: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """also send metrics to these"""

    def problems(self, _: Any) -> list[str]:
        """Return a message for each tracker that is not installed."""
        missing = [name for name in self.track if importlib.util.find_spec(name) is None]
        return [f"--track {name} is not installed. Run pip install {name}." for name in missing]


def follow(log: Log, args: Any, project: str, step: int) -> Log:
    """Return `log`, whose events go to the trackers of `args.track` too. A run that resumes at
    `step` in `args.run.output_dir` continues there. Any rank may call this."""
    if int(os.environ.get("RANK", 0)) == 0:
        settings = json.loads(json.dumps(asdict(args), default=str))
        for name in args.track.track:
            with _tolerant(name):
                _open[name] = _start(name, args.run.output_dir / "track", project, step, settings)
    write = log.write

    def write_and_send(event: str, *values: Any, **more: Any) -> dict[str, Any]:
        written = write(event, *values, **more)
        if event != "start":
            _send(event, written)
        return written

    log.write = write_and_send
    return log


def finish() -> None:
    """Close the trackers, which may still have events to send. Any rank may call this."""
    for name in list(_open):
        with _tolerant(name):
            tracker = _open.pop(name)
            tracker.close() if name == "tensorboard" else tracker.finish()


def _send(event: str, values: dict[str, Any]) -> None:
    """Send the numbers of an event as event/name, and those of `losses` as event/losses/name."""
    losses = {f"losses/{name}": loss for name, loss in values.get("losses", {}).items()}
    numbers = {name: x for name, x in (values | losses).items() if isinstance(x, int | float)}
    numbers = {f"{event}/{name}": x for name, x in numbers.items() if name not in ("step", "time")}
    for name, tracker in list(_open.items()):
        with _tolerant(name):
            if name == "tensorboard":
                for key, number in numbers.items():
                    tracker.add_scalar(key, number, values["step"])
                tracker.flush()
            else:
                tracker.log(numbers, step=values["step"])


@contextlib.contextmanager
def _tolerant(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of any type: the training does not depend on a tracker
        _open.pop(name, None)
        print0(f"--track {name} failed and is no longer used: {error!r}")


def _start(name: str, directory: Path, project: str, step: int, settings: dict) -> Any:
    if name == "tensorboard":
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        return writer(directory / name, purge_step=step + 1)  # later steps are repeated
    directory.mkdir(exist_ok=True)
    path = directory / "id"  # shared by all starts in this directory
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:8])
    run = path.read_text()
    ours = {"project": project, "name": run}
    if name == "wandb":
        ours |= {"id": os.environ.get("WANDB_RUN_ID", run), "dir": str(directory)}
    # The user's variables, such as WANDB_NAME or TRACKIO_PROJECT, take precedence.
    options = {key: os.environ.get(f"{name}_{key}".upper(), x) for key, x in ours.items()}
    return importlib.import_module(name).init(resume="allow", config=settings, **options)
