"""What an optimizer step trains on, a function of seed, epoch and global batch; parameter groups;
learning rates."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .ranks import Problem
from .weights import plain_name, unwrapped


class StepSampler:
    """The batch sampler of a DataLoader whose items are optimizer steps, not micro-batches: this
    rank's sample indices of each step from `start` to `stop`, through all epochs.

    An epoch's permutation is cut into global batches. Sample i of a step belongs to rank
    i % world_size. The last step of an epoch is short: its micro-batches may be short or empty. If
    `epochs_differ`, the index of sample i in an epoch is epoch * num_samples + i.
    """

    def __init__(
        self, num_samples: int, batch_size: int, accumulation: int, seed: int,
        epochs_differ: bool = False,
    ) -> None:  # fmt: skip
        self.num_samples = num_samples
        self.global_batch = batch_size * accumulation * dist.get_world_size()
        self.steps_per_epoch = math.ceil(num_samples / self.global_batch)
        self.seed = seed
        self.epochs_differ = epochs_differ
        self.start = self.stop = 0
        self._epoch, self._order = -1, None

    def samples(self, step: int) -> Tensor:
        """Return the sample indices, of all ranks, of a step, counted from 0; int [samples]."""
        epoch, i = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, self.order(generator)
        samples = self._order[i * self.global_batch :][: self.global_batch]
        return samples + epoch * self.num_samples if self.epochs_differ else samples

    def order(self, generator: torch.Generator) -> Tensor:
        """Return an epoch's permutation of the samples, int [num_samples], drawn with `generator`.
        A subclass may choose another one, such as by length."""
        return torch.randperm(self.num_samples, generator=generator, dtype=torch.int32)

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.start, self.stop):
            yield self.samples(step)[dist.get_rank() :: dist.get_world_size()].tolist()


class MicroBatches:
    """The collate function for StepSampler: cut a step's samples into exactly `accumulation`
    micro-batches. `collate` makes each of 0 or more samples."""

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
    rank, world_size = dist.get_rank(), dist.get_world_size()
    starts = range(0, len(samples), batch_size * world_size)
    batches = [range(len(samples))[x : x + starts.step][rank::world_size] for x in starts]
    return DataLoader(
        samples, batch_sampler=batches, collate_fn=collate, pin_memory=device.type != "cpu",
        generator=torch.Generator(),  # or it would draw from dropout's
    )  # fmt: skip


def parameter_groups(model: nn.Module, shapes: dict[str, torch.Size], decay: float) -> list[dict]:
    """Return the trained parameters in two groups: `decay` is the weight decay of those that are
    not norms, biases or one-dimensional. `shapes` are those before wrapping, by name."""
    inner = unwrapped(model)
    norms = set()
    for module in inner.modules():
        if "norm" in type(module).__name__.lower():
            norms.update(module.parameters(recurse=False))
    decayed, others = [], []
    for name, parameter in inner.named_parameters():
        if not parameter.requires_grad:
            continue
        is_vector = len(shapes[plain_name(name)]) < 2 or name.endswith((".bias", "_bias"))
        (others if is_vector or parameter in norms else decayed).append(parameter)
    groups = (decayed, decay), (others, 0.0)
    return [{"params": params, "weight_decay": x} for params, x in groups if params]


def schedule(
    kind: str, total_steps: int, warmup_steps: int, epoch_steps: int, gamma: float
) -> Callable[[int], float]:
    """Return a function from the number of steps done to the factor of the learning rate."""
    if kind != "step" and warmup_steps >= total_steps > 1:
        raise Problem(f"The warm-up has {warmup_steps} of {total_steps} steps. Lower --warmup-*.")

    def factor(done: int) -> float:
        if kind == "step":
            return gamma ** (done // epoch_steps)
        if done < warmup_steps:
            return (done + 1) / (warmup_steps + 1)  # the first step has a rate above 0
        progress = (done - warmup_steps) / (total_steps - warmup_steps)
        falling = {"linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
        return falling.get(kind, 1.0)

    return factor


def settings(optimizer: torch.optim.Optimizer) -> list[dict[str, str]]:
    """Return the values in an optimizer's param_groups, except the learning rate and parameters, as
    text. Checkpoints do not contain them."""
    return [
        {key: repr(x) for key, x in group.items() if key not in ("params", "lr")}
        for group in optimizer.param_groups
    ]
