"""--track: TensorBoard, W&B and trackio. Without this file, metrics are in metrics.jsonl only."""

import contextlib
import importlib
import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from core.log import Log
from core.ranks import print0

_open: dict[str, Any] = {}  # trackers by name, without those that have failed


@dataclass
class Track:
    """Where metrics go, besides metrics.jsonl."""

    track: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """also send metrics to these"""


def follow(log: Log, args: Any, project: str, step: int) -> Log:
    """Return `log`, whose events go to the trackers of `args.track` too. A run that resumes at
    `step` in `args.run.output_dir` continues there. Any rank may call this."""
    for name in args.track.track if dist.get_rank() == 0 else ():
        with _tolerant(name):
            _open[name] = _start(name, args, project, step)
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
    for name, tracker in list(_open.items()):
        with _tolerant(name):
            tracker.close() if name == "tensorboard" else tracker.finish()
    _open.clear()


def _send(event: str, values: dict[str, Any]) -> None:
    """Send the numbers of an event as event/name, and those of `losses` as event/losses/FILE, or
    with the whole path if two data sets have the same file name."""
    numbers = {}
    for name, x in values.get("losses", {}).items():
        tag = f"{event}/losses/{Path(name).name}"
        numbers[f"{event}/losses/{name}" if tag in numbers else tag] = x
    for name, x in values.items():
        if isinstance(x, int | float) and name not in ("step", "time"):
            numbers[f"{event}/{name}"] = x
    for name, tracker in list(_open.items()):
        with _tolerant(name):
            if name != "tensorboard":
                tracker.log(numbers, step=values["step"])
                continue
            for tag, x in numbers.items():
                tracker.add_scalar(tag, x, values["step"])
            tracker.flush()


@contextlib.contextmanager
def _tolerant(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of any type: the training does not depend on a tracker
        _open.pop(name, None)
        print0(f"--track {name} failed and is no longer used: {error!r}")


def _start(name: str, args: Any, project: str, step: int) -> Any:
    directory = args.run.output_dir / "track"
    if name == "tensorboard":
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        return writer(directory / name, purge_step=step + 1)  # later steps are repeated
    directory.mkdir(exist_ok=True)
    path = directory / "id"  # shared by all starts in this directory
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:8])
    run = path.read_text()
    options = {"id": run, "dir": directory} if name == "wandb" else {"name": run}
    options["project"] = os.environ.get(f"{name.upper()}_PROJECT", project)
    options["config"] = json.loads(json.dumps(asdict(args), default=str))
    return importlib.import_module(name).init(resume="allow", **options)
