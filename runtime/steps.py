"""The optimizer steps of a run: their micro-batches, and the work around each step.

Entering a step fetches its micro-batches and counts the targets and stop requests of all ranks.
Leaving it counts the step and checks the previous one. The host reads a step's numbers after the
device has started the next step, so nothing waits for the device.
"""

import contextlib
import itertools
import math
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
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


class AsyncReadback:
    """A copy of numbers from the device to the host that does not block."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers.to("cpu", non_blocking=True)  # into pinned memory
        self.arrival: torch.Event | None = None
        if numbers.device.type != "cpu":
            self.arrival = torch.Event(numbers.device)
            self.arrival.record()

    def read(self) -> list[Any]:
        """Return the numbers after waiting for the copy, but not for later work of the device."""
        if self.arrival:
            self.arrival.synchronize()
        return self.numbers.tolist()


class Step:
    """One optimizer step; all ranks enter it. `samples` are the sample indices of all ranks."""

    def __init__(self, steps: "Steps", fetch: Iterator[Batch], samples: list[int]) -> None:
        self.steps = steps
        self.samples = samples
        self.number = steps.state.step + 1
        self._fetch = fetch
        self._batches: list[Batch] | None = None  # set when the step is entered
        self._numbers: AsyncReadback | None = None  # set by `guard`

    def __enter__(self) -> None:
        steps, state = self.steps, self.steps.state
        self._start = time.perf_counter()
        self._scheduled = state.scheduler.last_epoch
        self._batches = list(self._fetch)
        if steps.is_stopping:
            steps.check()
            raise Stopped
        targets = sum(batch["targets"] for batch in self._batches)
        tokens = sum(batch["tokens"] for batch in self._batches)
        numbers = [targets, tokens, int(steps.stop.is_asked)]
        on_host = torch.tensor(numbers, pin_memory=state.device.type != "cpu")
        sums = on_host.to(state.device, non_blocking=True)
        dist.all_reduce(sums)
        self._counts = AsyncReadback(sums)  # the third: how many ranks were asked to stop
        self.targets: Tensor = sums[0]  # int64 [], on the device, over all ranks and micro-batches

    def micro_batches(self) -> Iterator[tuple[Batch, bool]]:
        """Yield this rank's micro-batches, on the device, and whether each is the last one."""
        if self._batches is None:
            raise RuntimeError("The step was not entered. Put `with step:` around its work.")
        for number, batch in enumerate(self._batches, start=1):
            yield to_device(batch, self.steps.state.device), number == len(self._batches)

    def guard(self, optimizer: Optimizer, loss: Tensor, grad_norm: Tensor) -> None:
        """End the run, before the optimizer changes anything, if the gradients are not finite. Call
        this before its step. `loss` is this rank's share of the loss, or a vector of terms.

        A fused optimizer skips the step on the device. For others the host waits for the norm. In
        fp16 the scaler decides.
        """
        share = loss.sum()
        self._numbers = AsyncReadback(torch.stack([share, grad_norm.to(share)]))
        self.steps.unchecked.append(self)
        if self.steps.state.scaler.is_enabled():
            return
        grad_norm = grad_norm.where(self.targets > 0, math.nan)  # without targets, skip the step
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            is_bad = grad_norm.isfinite().logical_not()
            device = optimizer.param_groups[0]["params"][0].device  # the CPU with offload
            optimizer.found_inf = is_bad.float().to(device)
            return
        self.steps.check()

    def check(self) -> None:
        """End the run, on all ranks, if the step had no targets or no finite gradient norm. In fp16
        an overflow halves the loss scale, and the run ends only if it is below 1."""
        step, samples, scaler = self.number, self.samples, self.steps.state.scaler
        if self._counts.read()[0] == 0:
            ranks.exit_with(f"Step {step} has no target tokens, in samples {samples}. Check them.")
        loss, grad_norm = self._numbers.read()
        if math.isfinite(grad_norm) or (scaler.is_enabled() and scaler.get_scale() >= 1):
            return
        count = dist.get_world_size()
        flags = ranks.on_every_rank(lambda: not math.isfinite(loss))
        bad_ranks = [rank for rank, is_bad in enumerate(flags) if is_bad]
        suspects = [i for rank in bad_ranks or range(count) for i in samples[rank::count]]
        ranks.exit_with(
            f"Step {step}: gradient norm {grad_norm} at loss scale {scaler.get_scale():g}, "
            f"loss not finite on ranks {bad_ranks}, samples {suspects}. Lower --lr, or check "
            "these samples, which the script's load_data returns as train_set[i]."
        )

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        if self._numbers is None:
            raise RuntimeError("Call step.guard(optimizer, loss, grad_norm) before the optimizer.")
        steps, state, args = self.steps, self.steps.state, self.steps.args
        if state.scheduler.last_epoch == self._scheduled:
            raise RuntimeError("The schedule did not advance. Call scheduler.step() in each step.")
        if any(
            p.grad is not None for group in state.optimizer.param_groups for p in group["params"]
        ):
            raise RuntimeError(
                "Gradients were not cleared. Call optimizer.zero_grad() in each step."
            )
        state.step += 1
        state.consumed += len(self.samples)
        _, tokens, stop_requests = self._counts.read()  # the device computed them before the step
        state.tokens += tokens
        steps.is_stopping = stop_requests > 0
        is_due = any(map(self.due, (args.log_every, args.eval_every, args.save_every)))
        steps.check(pending=0 if is_due or state.scaler.is_enabled() else 1)
        steps.metrics.count_step(time.perf_counter() - self._start)
        if steps.stop.nothing_to_lose:  # in the first step
            dist.barrier(group=ranks.cpu_group())  # otherwise one might save while another exits
            steps.stop.set_nothing_to_lose(False)

    def due(self, every: int) -> bool:
        """Return whether an action that runs every `every` steps (0: never) is due after this step.
        All are due at the end of an epoch and of the run."""
        state = self.steps.state
        if state.step == state.total_steps or state.consumed == len(self.steps.loader.dataset):
            return True
        return every > 0 and state.step % every == 0


@dataclass
class Steps:
    """The remaining steps of a run, starting at `state`. Iterate over it on all ranks.

    A data set whose samples differ between epochs has a method `set_epoch`.
    """

    args: Namespace
    state: TrainState
    loader: DataLoader
    metrics: Metrics
    stop: StopRequest
    unchecked: list[Step] = field(default_factory=list)
    is_stopping: bool = False  # agreed by all ranks

    def __iter__(self) -> Iterator[Step]:
        state, loader = self.state, self.loader
        sampler = loader.batch_sampler
        loader.generator = torch.Generator()  # so that epochs do not advance dropout's random state
        while state.step < state.total_steps:
            sampler.epoch = state.epoch
            sampler.consumed = state.consumed
            if hasattr(loader.dataset, "set_epoch"):
                loader.dataset.set_epoch(state.epoch)
            micro_batches = iter(loader)
            for samples in sampler.steps():
                step = Step(self, itertools.islice(micro_batches, sampler.accumulation), samples)
                with trace(self.args, step.number):
                    yield step
                if state.step == state.total_steps:
                    return
            state.epoch += 1
            state.consumed = 0

    def check(self, pending: int = 0) -> None:
        """Check all steps except the last `pending` ones; end the run if one was invalid."""
        while len(self.unchecked) > pending:
            self.unchecked.pop(0).check()


def trace(args: Namespace, step: int) -> contextlib.AbstractContextManager:
    """Return a profiler on rank 0 in the step of --profile, otherwise a context without effect."""
    if step != args.profile or dist.get_rank() != 0:
        return contextlib.nullcontext()
    path = f"{args.output_dir}/trace-step-{step}.json.gz"
    return torch.profiler.profile(on_trace_ready=lambda x: x.export_chrome_trace(path))
