"""Run a script's own training one step at a time, for tests and benchmarks.

    driven = Driven(gpt2_fsdp, args, device)
    loss, grad_norm = driven.step()

`TimedRun` runs all steps as a loop that can alternate with other loops.
"""

import contextlib
import itertools
import queue
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from runtime import batches, checkpoints, options, run, weights
from runtime.batches import Batch
from runtime.metrics import Metrics
from runtime.run import Output, Run
from runtime.state import State
from runtime.steps import Step, Steps, StopRequest

Sets = tuple[Any, dict[str, Any]]  # the training set, and the validation sets by name


def parse_flags(script: ModuleType, argv: list[str] | None = None) -> Any:
    """Return a script's options for the flags in `argv` (default: sys.argv)."""
    return options.parse(script.Options, argv, script.TinyOptions)


class OffRun(Run):
    """A run without log and saves."""

    needs_validation = False

    def __init__(
        self, output: "OffRecord", state: State, loader: DataLoader, identity: dict
    ) -> None:
        self.identity = identity
        self.output = output
        self.args = output.args
        self.state = state
        self.loader = loader
        self.stop = StopRequest()
        self.stop.is_deferred = True  # only the main thread may handle signals
        self.metrics = output.make_metrics(state, loader)
        self.losses: list[Tensor] = []  # as logged

    def steps(self, loader: DataLoader) -> Iterator[Step]:
        """Yield the steps as the output directory wants them."""
        return self.output.steps(Steps(self.args, self.state, loader, self.metrics, self.stop))

    def log_step(self, **values: Tensor) -> None:
        """Log the step if the benchmark wants it."""
        if isinstance(self.metrics, Metrics):
            self.losses.append(values["loss"])
            super().log_step(**values)

    def log_validation(self, _: dict) -> None:
        """Log nothing."""

    def save(self) -> None:
        """Save nothing."""


class OffRecord(Output):
    """A script's training without lock, logs and saves.

    `sets` are data to use instead of the flags'.
    """

    def __init__(
        self,
        script: ModuleType,
        args: Namespace,
        device: torch.device,
        checkpoint: Path | None = None,
        sets: Sets | None = None,
    ) -> None:
        super().__init__(args, device, script.__name__)
        self.module = script
        self.checkpoint = checkpoint
        self.model, self.facts, self._init = script.load_model(args, device, checkpoint)
        self.describe(self.model, self.facts)
        self.train_set, self.val_sets = sets or script.load_data(args, self.facts.tokenizer)

    @property
    def state(self) -> State:
        """Return the state of the run."""
        return self.run.state

    def wrap(self) -> None:
        """Wrap the model. Call this in the training thread, which torch.compile is set for."""
        self.model = self.module.wrap_model(self.args, self.device, self.model, self._init)
        collate = collate_of(self.module, self.model)
        self.val_loaders: dict[str, DataLoader] = {}
        if self.val_sets:  # a benchmark may have none
            self.val_loaders = batches.val_loaders(self.val_sets, self.args.batch_size, collate)

    def train(self) -> None:
        """Run the script's `train` with this directory."""
        sets = self.train_set, self.val_loaders
        self.module.train(self.args, self.model, self.facts, *sets, self)

    def restore(self, state: State, loader: DataLoader, *args: Any) -> Run:
        """Return a run off the record, also if no steps are left."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with mock.patch.object(run, "Run", OffRun):
            self.run = super().restore(state, loader, *args) or OffRun(self, state, loader, {})
        return self.run

    def write_status(self, word: str) -> None:
        """Write nothing."""

    def make_metrics(self, state: State, loader: DataLoader) -> Any:
        """Return an object that logs nothing."""
        self.loader = loader
        return SimpleNamespace(shares=[], count_step=lambda _: None, close=lambda: None)


class TimedRun(OffRecord):
    """A training as a loop for `relay`, with logs and a progress bar, without validations."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.wrap()

    def loop(self, end_of_step: Callable[[], None]) -> None:
        """Train, and call `end_of_step` after each step and its log."""
        self.end_of_step = end_of_step
        self.val_loaders = {}
        self.train()

    def make_metrics(self, state: State, loader: DataLoader) -> Metrics:
        """Return metrics with a progress bar."""
        self.loader = loader
        return Metrics(self.args, self.directory, self.script, state, loader)

    def steps(self, steps: Steps) -> Iterator[Step]:
        """Yield the steps; call `end_of_step` after each."""
        for step in steps:
            yield step
            self.end_of_step()


class Driven(OffRecord):
    """A training that waits for `step` to be called, starting from `checkpoint` if it is given.

    The script's `train` runs in a thread, which waits between calls. Its exceptions are raised in
    the calling thread.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._requests: queue.Queue = queue.Queue()
        self._answers: queue.Queue = queue.Queue()
        self._thread = threading.Thread(target=self._answer_all, daemon=True)
        self._thread.start()
        self._answer()

    def _answer_all(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device.index)
        try:
            self.wrap()
            self.train()
            self._answers.put((None, None))
        except BaseException as error:
            self._answers.put((None, error))

    def _answer(self) -> Any:
        result, error = self._answers.get()
        if error is not None:
            raise error
        return result

    def steps(self, steps: Steps) -> Iterator[Step]:
        """Yield a step for each call of `step`."""
        self.all_steps = steps
        regular = iter(steps)
        self._answers.put((None, None))
        while (request := self._requests.get()) is not None:
            given, samples, around = request
            with around:
                if given is None:
                    step = next(regular, None)
                else:
                    step = Step(self.all_steps, iter(given), samples)
                if step is None:
                    self._answers.put((None, None))
                    continue
                calls: list[tuple] = []
                step.guard = _record_calls(step.guard, calls)
                step.due = lambda _: False  # no logs, validations and saves
                self.fetched = step
                yield step
            self._answers.put(((*calls[0][1:],), None))

    def step(
        self,
        given: list[Batch] | None = None,
        samples: list[int] = [0],  # noqa: B006 (it is not changed)
        around: contextlib.AbstractContextManager | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """Make the next step, or a step on the `given` micro-batches, in the context `around`.

        Return this rank's share of the loss and the gradient norm, or None if no step is left.
        """
        self._requests.put((given, samples, around or contextlib.nullcontext()))
        return self._answer()

    def all(self, count: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Make the remaining steps, at most `count`, and yield the result of each."""
        for _ in range(count) if count is not None else itertools.count():
            result = self.step()
            if result is None:
                return
            yield result

    def end(self) -> None:
        """End the training and free its memory."""
        self._requests.put(None)
        self._thread.join()
        del self.run, self.model, self.all_steps, self.loader

    def check(self) -> None:
        """Check the steps that have not been checked yet."""
        self.all_steps.check()

    def batch(self) -> Batch:
        """Return the first micro-batch of an epoch."""
        return next(iter(self.loader))

    def save(self, keep: int = 9) -> Path:
        """Save a checkpoint in the output directory; return its path."""
        args = Namespace(
            **vars(self.args) | {"keep_checkpoints": keep, "checkpoint_type": "sharded"}
        )
        checkpoints.Saver(args, self.directory, self.state, self.run.identity).save()
        return self.directory / f"checkpoints/step-{self.state.step:08d}"


def _record_calls(guard: Callable, calls: list[tuple]) -> Callable:
    """Return a function that appends its arguments to `calls` and calls `guard`."""

    def keep(*args: Any) -> None:
        calls.append(args)
        guard(*args)

    return keep


def collate_of(script: ModuleType, model: torch.nn.Module) -> Callable:
    """Return the collate function of a script; T5's depends on the model."""
    if hasattr(script.data, "collator"):
        return script.data.collator(weights.unwrapped(model))
    return script.data.collate
