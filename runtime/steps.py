"""The optimizer steps of a run: their micro-batches, and all that must happen around each.

A script's loop reads

    for step in run.steps(loader):
        with step:
            for batch, is_last in step.micro_batches():
                ...  # loss / step.targets, backward
            step.guard(optimizer, loss, grad_norm)
            ...  # the optimizer's step

Entering a step fetches its micro-batches, counts the targets of all ranks, and hears whether one
was asked to stop. Leaving it counts it as done, and checks the step before it: the host reads a
step's numbers once the device has begun the next one, so nothing waits for the device.
"""

import contextlib
import itertools
import math
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from . import ranks
from .batches import Batch, to_device
from .metrics import Metrics
from .state import TrainState
from .stops import Stopped, StopRequest
from .watchdog import Watchdog

# Where fp16's scaler skips the first step of all, the schedule steps before the optimizer.
warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler.step\(\)` before")


NOT_ENTERED = "the step is not entered, so nothing counts it: put `with step:` around it"


class HostCopy:
    """Numbers of the device, on their way to the host."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers.to("cpu", non_blocking=True)  # which is in pinned memory
        self._arrived = None
        if numbers.device.type != "cpu":
            self._arrived = torch.Event(numbers.device)
            self._arrived.record()

    def read(self) -> list[Any]:
        """Wait for the numbers, but not for what the device has been given to do since."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._numbers.tolist()


class Check:
    """A step's numbers, to be looked at when the host can know them without waiting."""

    def __init__(
        self, state: TrainState, samples: list[int], counts: HostCopy, loss: Tensor,
        grad_norm: Tensor,
    ):  # fmt: skip
        self.scaler = state.scaler
        self.step = state.step + 1
        self.epoch = state.epoch
        self.samples = samples  # of all ranks
        self.counts = counts  # of all ranks; the first is that of target tokens
        share = loss.sum()  # this rank's
        self.numbers = HostCopy(torch.stack([share, grad_norm.to(share)]))

    def make(self) -> None:
        """End the run, on all ranks, if the step had no targets, or no finite gradient norm.

        fp16 may overflow: then the scale was halved. If it is below 1, the run ends too.
        """
        if self.counts.read()[0] == 0:
            ranks.exit_with(f"step {self.step} has no target tokens, in samples {self.samples}")
        loss, grad_norm = self.numbers.read()
        if math.isfinite(grad_norm):
            return
        reason = ""
        if self.scaler.is_enabled():
            if self.scaler.get_scale() >= 1:
                return
            reason = ", and the loss scale of fp16 would fall below 1"
        where = ranks.ranks_where(not math.isfinite(loss))
        samples, whose = self.samples, "though every loss is finite"
        if where:
            whose = f"loss not finite on ranks {where}"
            samples = [i for rank in where for i in samples[rank :: dist.get_world_size()]]
        ranks.exit_with(
            f"step {self.step}: gradient norm {grad_norm}, {whose}, samples {samples} of epoch "
            f"{self.epoch}{reason}: lower --lr, or look at these samples, which the script's "
            "load_data gives as train_set[i]"
        )


class Step:
    """One optimizer step; all ranks enter it. `samples` are those of all ranks."""

    def __init__(self, steps: "Steps", fetch: Iterator[Batch], samples: list[int]) -> None:
        self.samples = samples
        self.targets: Tensor  # int64 [], on the device: of all ranks and micro-batches
        self._steps = steps
        self._fetch = fetch
        self._batches: list[Batch] = []
        self._counts: HostCopy  # targets, tokens, and how many ranks were asked to stop
        self._start = 0.0
        self._is_guarded = False
        self.is_over = False

    def __enter__(self) -> "Step":
        self._start = time.perf_counter()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._steps.profile())
            self._batches = list(self._fetch)
            self._count()
            self._profile = stack.pop_all()
        return self

    def _count(self) -> None:
        """Sum the numbers of targets and tokens over ranks; raises Stopped if one was asked to."""
        steps = self._steps
        if steps.is_stopping:
            steps.check()
            raise Stopped
        targets = sum(batch["targets"] for batch in self._batches)
        tokens = sum(batch["tokens"] for batch in self._batches)
        asked = int(steps.stop.begin_step())
        device = steps.state.device
        on_host = torch.tensor([targets, tokens, asked], pin_memory=device.type != "cpu")
        sums = on_host.to(device, non_blocking=True)
        dist.all_reduce(sums)
        self._counts = HostCopy(sums)
        self.targets = sums[0]

    def micro_batches(self) -> Iterator[tuple[Batch, bool]]:
        """Yield this rank's micro-batches, on the device, each with whether it is the last one."""
        if not self._start:
            raise RuntimeError(NOT_ENTERED)
        for number, batch in enumerate(self._batches, start=1):
            yield to_device(batch, self._steps.state.device), number == len(self._batches)

    def guard(self, optimizer: Optimizer, loss: Tensor, grad_norm: Tensor) -> None:
        """Have the optimizer's next step change nothing if the gradients are not finite, or if no
        rank had a target; the run then ends. Call it before that step, in every step.

        `loss` is this rank's share, or its parts, `grad_norm` that of all ranks. A fused optimizer
        is told on the device, and skips the step in its kernel. For any other the host waits for
        the norm. In fp16 the scaler decides by itself.
        """
        self._is_guarded = True
        state = self._steps.state
        check = Check(state, self.samples, self._counts, loss, grad_norm)
        self._steps.unchecked.append(check)
        if state.scaler.is_enabled():
            return
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            is_bad = (grad_norm.isfinite() & (self.targets > 0)).logical_not()
            place = optimizer.param_groups[0]["params"][0].device  # the host's, under offload
            optimizer.found_inf = is_bad.float().to(place)
            return
        self._steps.say_that_it_waits(optimizer)
        self._steps.check()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._profile.__exit__(kind, error, traceback)
            return
        with self._profile:
            if not self._is_guarded:
                raise RuntimeError(
                    "the step has no guard, so a NaN would be trained on: call step.guard("
                    "optimizer, loss, grad_norm) before the optimizer's step"
                )
            state = self._steps.state
            state.step += 1
            state.consumed += len(self.samples)
            _, tokens, asked = self._counts.read()  # when the device has begun the step
            state.tokens += tokens
            self._steps.is_stopping = asked > 0
            self._steps.check(waiting=0 if self._is_read_at_once() else 1)
        self.is_over = True
        self._steps.finish(time.perf_counter() - self._start)

    def _is_read_at_once(self) -> bool:
        """Return whether the host must know how the step went before the next one begins."""
        args, steps = self._steps.args, self._steps
        is_due = any(map(self.due, (args.log_every, args.eval_every, args.save_every)))
        return is_due or steps.done == 0 or steps.state.scaler.is_enabled()

    def due(self, every: int) -> bool:
        """Return whether what happens every so many steps (0: never) is due after this one.

        All is due at the end of an epoch, and of the run.
        """
        state = self._steps.state
        if state.step == state.total_steps or state.consumed == self._steps.epoch_samples:
            return True
        return every > 0 and state.step % every == 0


class Steps:
    """The steps that are left of a run, from where `state` is; iterate over it on all ranks.

    A data set whose samples differ between epochs has a method `set_epoch`.
    """

    def __init__(
        self, args: Namespace, state: TrainState, loader: DataLoader, metrics: Metrics,
        stop: StopRequest, watchdog: Watchdog,
    ):  # fmt: skip
        self.args = args
        self.state = state
        self.loader = loader
        self.metrics = metrics
        self.stop = stop
        self.watchdog = watchdog
        self.epoch_samples = len(loader.dataset)
        self.unchecked: list[Check] = []
        self.is_stopping = False  # so the ranks agreed
        self.done = 0  # by this process
        self._has_said = False  # that the host waits

    def __iter__(self) -> Iterator[Step]:
        state, loader = self.state, self.loader
        sampler = loader.batch_sampler
        loader.generator = torch.Generator()  # or each epoch would draw from dropout's
        while state.step < state.total_steps:
            sampler.epoch = state.epoch
            sampler.consumed = state.consumed
            if hasattr(loader.dataset, "set_epoch"):
                loader.dataset.set_epoch(state.epoch)
            micro_batches = iter(loader)
            for samples in sampler.steps():
                step = Step(self, itertools.islice(micro_batches, sampler.accumulation), samples)
                yield step
                if not step.is_over:
                    raise RuntimeError(NOT_ENTERED)
                if state.step == state.total_steps:
                    return
            state.epoch += 1
            state.consumed = 0

    @contextlib.contextmanager
    def profile(self) -> Iterator[None]:
        """Watch the step that begins, and with --profile trace it."""
        number = self.state.step + 1
        self.watchdog.phase(f"step {number}")
        if number != self.args.profile:
            yield
            return
        from . import profiling  # a copy may leave it out

        with profiling.trace(Path(self.args.output_dir), number):
            yield

    def check(self, waiting: int = 0) -> None:
        """Check all steps but the last few, which are `waiting`; the run ends if one was bad."""
        while len(self.unchecked) > waiting:
            self.unchecked.pop(0).make()

    def say_that_it_waits(self, optimizer: Optimizer) -> None:
        """Print, once, that an optimizer has the host wait for the device in every step."""
        if not self._has_said and self.state.device.type != "cpu":
            name = type(optimizer).__name__
            ranks.say(f"{name} is not fused: in every step the host waits for the gradient norm")
        self._has_said = True

    def finish(self, seconds: float) -> None:
        """Do what follows a step that took so long."""
        self.watchdog.phase(None)
        self.stop.end_step()
        self.metrics.count_step(seconds)
        if self.done == 0:
            dist.barrier(group=ranks.cpu_group())  # or one might save when another ends at once
            self.stop.set_nothing_to_lose(False)
            self.metrics.log_memory("first step")
        self.done += 1
