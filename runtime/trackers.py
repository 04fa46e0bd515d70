"""Experiment trackers, which also get the numbers of metrics.jsonl; only rank 0 has them.

Their packages are imported when a run asks for them. The training does not depend on a tracker: one
that fails is named once, and not used after that.
"""

import contextlib
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

Send = Callable[[dict[str, float], int], None]  # numbers by name, and their step


class Trackers:
    """The trackers of --track, open while entered; a run that continues at `step` does so in them,
    too."""

    def __init__(self, args: Namespace, directory: Path, script: str, step: int) -> None:
        self.args = args
        self.directory = directory / "track"
        self.script = script
        self.step = step
        self.sends: dict[str, Send] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Trackers":
        for name in self.args.track:
            with self._tolerant(name):
                self.directory.mkdir(exist_ok=True)
                self.sends[name] = self._stack.enter_context(OPEN[name](self))
        return self

    def __exit__(self, *_: object) -> None:
        with self._tolerant("closing"):
            self._stack.close()

    def log(self, event: str, step: int, values: dict[str, Any]) -> None:
        """Send an event's numbers, as event/name; those of an inner dict as event/name/key."""
        numbers = {}
        for name, value in values.items():
            inner = value if isinstance(value, dict) else {"": value}
            for key, number in inner.items():
                if isinstance(number, int | float):
                    numbers[f"{event}/{name}/{key}".rstrip("/")] = number
        for name, send in list(self.sends.items()):
            with self._tolerant(name):
                send(numbers, step)

    def run_id(self) -> str:
        """Return the id of all runs in this directory, which the first one makes."""
        path = self.directory / "id"
        if not path.exists():
            path.write_text(uuid.uuid4().hex[:8])
        return path.read_text()

    @contextlib.contextmanager
    def _tolerant(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of whatever type: the training goes on
            self.sends.pop(name, None)
            first_line = (str(error) or type(error).__name__).splitlines()[0]
            tqdm.write(f"--track {name} failed and is left out from here on: {first_line}")


def _say_where(name: str, where: str) -> None:
    tqdm.write(f"--track {name}: {where}")


@contextlib.contextmanager
def _tensorboard(trackers: Trackers) -> Iterator[Send]:
    from torch.utils.tensorboard import SummaryWriter

    # Later steps that are logged there already are trained again.
    writer = SummaryWriter(trackers.directory / "tensorboard", purge_step=trackers.step + 1)
    for name, value in vars(trackers.args).items():
        writer.add_text(f"arguments/{name}", str(value), trackers.step)

    def send(numbers: dict[str, float], step: int) -> None:
        for name, number in numbers.items():
            writer.add_scalar(name, number, step)
        writer.flush()

    _say_where("tensorboard", f"tensorboard --logdir {writer.log_dir} shows the numbers")
    with contextlib.closing(writer):
        yield send


@contextlib.contextmanager
def _wandb(trackers: Trackers) -> Iterator[Send]:
    import wandb

    run = wandb.init(
        project=trackers.script,
        dir=trackers.directory,
        id=trackers.run_id(),
        resume="allow",
        config=vars(trackers.args),
    )
    # Without a network there is no address yet.
    _say_where("wandb", run.url or f"wandb sync {Path(run.dir).parent} uploads the numbers")
    with run:
        yield lambda numbers, step: run.log(numbers, step=step)


@contextlib.contextmanager
def _trackio(trackers: Trackers) -> Iterator[Send]:
    import trackio

    run = trackio.init(
        project=trackers.script,
        name=trackers.run_id(),
        resume="allow",
        config={name: str(value) for name, value in vars(trackers.args).items()},
    )
    _say_where("trackio", f"trackio show --project {trackers.script} shows the numbers")
    yield lambda numbers, step: run.log(numbers, step=step)
    trackio.finish()


OPEN = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
