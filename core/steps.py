"""What an optimizer step trains on, a function of seed, epoch and global batch; parameter groups;
learning rates."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .ranks import Problem
from .weights import plain_name, unwrapped


class StepSampler:
    """The batch sampler of a DataLoader whose items are optimizer steps, not micro-batches.

    An epoch's permutation is cut into global batches, one per step. Each is dealt to the ranks in
    turn: sample i of a step belongs to rank i % world_size. No sample is dropped or repeated. The
    last step of an epoch is short, so some micro-batches of it may be short or empty.

    Iterate over it to get this rank's sample indices of each step from `start` to `stop`, through
    all epochs: set both before. If `epochs_differ`, the index of sample i in an epoch is
    epoch * num_samples + i.
    """

    def __init__(
        self, num_samples: int, batch_size: int, accumulation: int, seed: int,
        epochs_differ: bool = False,
    ) -> None:  # fmt: skip
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if num_samples < self.world_size:
            raise Problem(f"{num_samples} training samples are fewer than the {self.world_size} "
                          "processes. Start fewer, or pass more data.")  # fmt: skip
        self.num_samples = num_samples
        self.global_batch = batch_size * accumulation * self.world_size
        self.steps_per_epoch = math.ceil(num_samples / self.global_batch)
        self.seed = seed
        self.epochs_differ = epochs_differ
        self.start = self.stop = 0
        self._epoch, self._order = -1, torch.empty(0)

    def samples(self, step: int) -> Tensor:
        """Return the sample indices, of all ranks, of a step, counted from 0; int [samples]."""
        epoch, i = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order = self.order(generator)
            self._epoch = epoch
            self._order = order + epoch * self.num_samples if self.epochs_differ else order
        return self._order[i * self.global_batch : (i + 1) * self.global_batch]

    def order(self, generator: torch.Generator) -> Tensor:
        """Return an epoch's permutation of the samples, int [num_samples], drawn with `generator`.
        A subclass may choose another one, such as by length."""
        return torch.randperm(self.num_samples, generator=generator, dtype=torch.int32)

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.start, self.stop):
            yield self.samples(step)[self.rank :: self.world_size].tolist()

    def __len__(self) -> int:
        return self.stop - self.start


class MicroBatches:
    """The collate function that goes with StepSampler: cut a step's samples into micro-batches.

    It returns a list of exactly `accumulation` batches; `collate` makes each of 0 or more samples.
    """

    def __init__(self, collate: Callable[[list], Any], batch_size: int, accumulation: int) -> None:
        self.collate = collate
        self.starts = range(0, batch_size * accumulation, batch_size)

    def __call__(self, samples: list) -> list[Any]:
        return [self.collate(samples[i : i + self.starts.step]) for i in self.starts]


def ordered_loader(
    samples: Any, batch_size: int, collate: Callable[[list], Any], device: torch.device
) -> DataLoader:
    """Return a loader of this rank's batches of a data set, in order. All ranks have equally many;
    the last ones may be short or empty."""
    step = batch_size * dist.get_world_size()
    starts = range(dist.get_rank(), dist.get_rank() + len(samples), step)
    batches = [
        range(start, min(start + step, len(samples)), dist.get_world_size()) for start in starts
    ]
    return DataLoader(
        samples,
        batch_sampler=batches,
        collate_fn=collate,
        pin_memory=device.type != "cpu",
        generator=torch.Generator(),  # or it would draw from dropout's
    )


def pad(rows: Sequence[Sequence[int]], value: int, least: int = 1, multiple: int = 1) -> Tensor:
    """Return rows as int64 [rows, length], padded with `value`. The length is that of the longest
    row, at least `least`, rounded up to a multiple of `multiple`."""
    width = -(-max(least, *map(len, rows)) // multiple) * multiple
    array = np.full((len(rows), width), value)
    for target, row in zip(array, rows, strict=True):
        target[: len(row)] = row
    return torch.from_numpy(array)


def parameter_groups(
    model: nn.Module, shapes: dict[str, torch.Size], weight_decay: float
) -> list[dict]:
    """Return the trained parameters in two groups, with and without weight decay.

    Norms, biases and one-dimensional parameters are not decayed. FSDP1 flattens parameters, so pass
    the `shapes` that they had before wrapping, by name.
    """
    inner = unwrapped(model)
    norms = {  # prefixes of the names of their parameters
        plain_name(f"{name}.")
        for name, module in inner.named_modules()
        if "norm" in type(module).__name__.lower()
    }
    decayed, others = [], []
    for name, parameter in inner.named_parameters():
        if not parameter.requires_grad:
            continue
        name = plain_name(name)
        module, _, key = name.rpartition(".")
        is_bias = key == "bias" or key.endswith("_bias")
        is_decayed = len(shapes[name]) > 1 and not is_bias and f"{module}." not in norms
        (decayed if is_decayed else others).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def schedule(
    kind: str, total_steps: int, warmup_steps: int, epoch_steps: int, gamma: float
) -> Callable[[int], float]:
    """Return a function from the number of steps done to the factor of the learning rate.

    It is a function of the step alone, so there is no scheduler to save.
    """
    if kind != "step" and warmup_steps >= total_steps > 1:
        raise Problem(f"The warm-up has {warmup_steps} steps, but the run only {total_steps}. "
                      "Lower --warmup-steps or --warmup-ratio.")  # fmt: skip

    def factor(done: int) -> float:
        if kind == "step":
            return gamma ** (done // epoch_steps)
        if done < warmup_steps:
            return (done + 1) / (warmup_steps + 1)  # the first step has a rate above 0
        progress = min(1.0, (done - warmup_steps) / max(1, total_steps - warmup_steps))
        if kind == "linear":
            return 1 - progress
        if kind == "cosine":
            return (1 + math.cos(math.pi * progress)) / 2
        return 1.0  # constant

    return factor


def settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return what an optimizer keeps outside of its `state`, which checkpoints do not contain: the
    values in its param_groups, except the learning rate and the parameters, and its numbers."""
    groups = [
        {key: repr(x) for key, x in group.items() if key not in ("params", "lr")}
        for group in optimizer.param_groups
    ]
    return [*groups, {k: x for k, x in vars(optimizer).items() if type(x) in (int, float)}]
