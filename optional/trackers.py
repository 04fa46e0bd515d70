"""--track: TensorBoard, W&B and trackio. Without this file, metrics are in metrics.jsonl only."""

import importlib
import json
import os
import uuid
from collections.abc import Callable
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
        _try(name, _start, name, args, project, step)
    write = log.write

    def write_and_send(event: str, *values: Any, **more: Any) -> dict[str, Any]:
        written = write(event, *values, **more)
        for name in [*_open] if event != "start" else ():
            _try(name, _send, _open[name], event, written)
        return written

    log.write = write_and_send
    return log


def finish() -> None:
    """Close the trackers, which may still have events to send. Any rank may call this."""
    for name in [*_open]:
        tracker = _open.pop(name)
        _try(name, tracker.close if name == "tensorboard" else tracker.finish)


def _try(name: str, function: Callable, *values: Any) -> None:
    try:
        function(*values)
    except Exception as error:  # of any type: the training does not depend on a tracker
        _open.pop(name, None)
        print0(f"--track {name} failed and is no longer used: {error!r}")


def _send(tracker: Any, event: str, values: dict[str, Any]) -> None:
    """Send the numbers of an event as event/name, and those of `losses` as event/losses/FILE, or
    with the whole path if two data sets have the same file name."""
    step = values["step"]
    names = [x for x in values if isinstance(values[x], int | float) and x not in ("step", "time")]
    numbers = {f"{event}/{name}": values[name] for name in names}
    for name, x in values.get("losses", {}).items():
        tag = f"{event}/losses/{Path(name).name}"
        numbers[f"{event}/losses/{name}" if tag in numbers else tag] = x
    if hasattr(tracker, "log"):
        tracker.log(numbers, step=step)
        return
    for tag, x in numbers.items():
        tracker.add_scalar(tag, x, step)
    tracker.flush()


def _start(name: str, args: Any, project: str, step: int) -> None:
    directory = args.run.output_dir / "track"
    if name == "tensorboard":
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        _open[name] = writer(directory / name, purge_step=step + 1)  # later steps are repeated
        return
    directory.mkdir(exist_ok=True)
    path = directory / "id"  # shared by all starts in this directory
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:8])
    run = path.read_text()
    options = {"id": run, "dir": directory} if name == "wandb" else {"name": run}
    options["project"] = os.environ.get(f"{name.upper()}_PROJECT", project)
    options["config"] = json.loads(json.dumps(asdict(args), default=str))
    _open[name] = importlib.import_module(name).init(resume="allow", **options)
