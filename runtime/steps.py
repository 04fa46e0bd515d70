"""The optimizer steps of a run, and requests to stop it.

Entering a step fetches its micro-batches and counts the targets and stop requests of all ranks. On
exit the step is counted, and the numbers of the step before it are checked. The host reads them
after the device has started the next step, so nothing waits for the device.
"""

import contextlib
import ctypes
import itertools
import math
import os
import signal
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
from .state import State

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
REPEATS = 10.0  # seconds in which launchers may send a signal again


class Stopped(Exception):
    """A rank was asked to stop. All ranks raise this together, between steps or batches."""


class StopRequest:
    """Whether this process was asked to stop: by a signal or, under torchrun, by its end.

    Before `defer` and after `forget` a signal has its default action: it ends the process at once,
    even in a load, a compilation or a collective. In between the ranks stop together and save.
    """

    def __init__(self) -> None:
        self.is_deferred = False
        self.is_asked = False
        self._time = 0.0

    def defer(self) -> None:
        """From now on, remember signals: there is something to lose."""
        self.is_deferred = True
        for number in SIGNALS:
            signal.signal(number, self._ask)

    def forget(self) -> None:
        """From now on, let signals end the process."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    def end_process(self) -> None:
        """From now on, let signals end the process, those of the past too."""
        self.forget()
        if self.is_asked:
            signal.raise_signal(signal.SIGTERM)

    def _ask(self, number: int, _: object) -> None:
        is_first = not self.is_asked
        self.is_asked = True
        if is_first:
            self._time = time.monotonic()
        is_second = time.monotonic() > self._time + REPEATS
        # torchrun sends SIGTERM to all ranks when one has failed.
        if is_second or (number == signal.SIGTERM and ranks.has_failed()):
            self.end_process()
        if is_first and int(os.environ.get("RANK", 0)) == 0:
            text = f"{signal.Signals(number).name}: stopping after this step or the next.\n"
            os.write(1, text.encode())  # a signal handler must not call print()


def signal_at_end_of_parent(number: int) -> None:
    """Make Linux send a signal to this process when its parent ends, even by SIGKILL."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def _start_forked() -> None:
    """End this child of `datasets` or a DataLoader when a signal arrives or its parent ends."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal_at_end_of_parent(signal.SIGKILL)


os.register_at_fork(after_in_child=_start_forked)


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
        """If the gradient norm is not finite, make the optimizer skip this step; the run then ends.

        Call this before optimizer.step(). An optimizer that is not fused cannot skip, so for it the
        run ends here, and the host waits for the norm. In fp16 the scaler decides. `loss` is this
        rank's share of the loss, or a vector of terms, of which the first one is printed.
        """
        self._numbers = AsyncReadback(torch.stack([*loss.flatten(), grad_norm.to(loss)]))
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
        *terms, grad_norm = self._numbers.read()
        self.steps.metrics.shares.append(terms[0])
        if math.isfinite(grad_norm) or (scaler.is_enabled() and scaler.get_scale() >= 1):
            return
        count = dist.get_world_size()
        flags = ranks.on_every_rank(lambda: not all(map(math.isfinite, terms)))
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
        if not steps.stop.is_deferred:  # in the first step
            dist.barrier(group=ranks.cpu_group())  # otherwise one might save while another ends
            steps.stop.defer()

    def due(self, every: int | None) -> bool:
        """Return whether an action that runs every `every` steps is due after this step. It also
        runs at the end of the run and, unless `every` is 0, at the end of each epoch."""
        state = self.steps.state
        if state.is_last_step:
            return True
        if state.consumed == len(self.steps.loader.dataset):
            return every != 0
        return bool(every) and state.step % every == 0


@dataclass
class Steps:
    """The remaining steps of a run, starting at `state`. Iterate over it on all ranks.

    A data set whose samples differ between epochs has a method `set_epoch`.
    """

    args: Namespace
    state: State
    loader: DataLoader
    metrics: Metrics
    stop: StopRequest
    unchecked: list[Step] = field(default_factory=list)
    is_stopping: bool = False  # agreed by all ranks

    def __iter__(self) -> Iterator[Step]:
        state, loader = self.state, self.loader
        sampler = loader.batch_sampler
        loader.generator = torch.Generator()  # so that epochs do not advance dropout's random state
        while not state.is_last_step:
            sampler.epoch = state.epoch
            sampler.consumed = state.consumed
            if hasattr(loader.dataset, "set_epoch"):
                loader.dataset.set_epoch(state.epoch)
            micro_batches = iter(loader)
            for samples in sampler.steps():
                step = Step(self, itertools.islice(micro_batches, sampler.accumulation), samples)
                with self._trace(step.number):
                    yield step
                if state.is_last_step:
                    return
            state.epoch += 1
            state.consumed = 0

    def check(self, pending: int = 0) -> None:
        """Check all steps except the last `pending` ones; end the run if one was invalid."""
        while len(self.unchecked) > pending:
            self.unchecked.pop(0).check()

    def _trace(self, number: int) -> contextlib.AbstractContextManager:
        """Return a profiler on rank 0 in the step of --profile, else a context without effect."""
        if number != self.args.profile or dist.get_rank() != 0:
            return contextlib.nullcontext()
        path = f"{self.args.output_dir}/trace-step-{number}.json.gz"
        return torch.profiler.profile(on_trace_ready=lambda x: x.export_chrome_trace(path))
