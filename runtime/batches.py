"""The order of samples and its division into global batches; parameter groups and schedules.

Sample order is a function of the seed, the epoch and the global batch, and of the lengths if
batches are grouped by length. It does not depend on the number of ranks.
"""

import math
import signal
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .ranks import accelerator
from .weights import WRAPPERS, unwrapped

Batch = dict[str, Tensor | int]  # as returned by a script's `collate`


class GlobalBatchSampler:
    """The batch sampler of a DataLoader: this rank's micro-batches of each global batch.

    The epoch's permutation is cut into global batches, one per optimizer step. Each is dealt to the
    ranks in turn, then cut into micro-batches. No sample is dropped or repeated: some
    micro-batches of the last step may be short or empty. If `seed` is None, samples keep the order
    of the data set.

    Given `lengths`, one per sample, a global batch has samples of similar length, so that there is
    little padding and no rank waits for another. The global batches come in random order, except
    that the longest comes first: if it does not fit in memory, the run fails at once.

    Set `epoch` and `consumed` (samples of all ranks) to resume without loading earlier samples.

    Raise ValueError if there are fewer samples to train on than ranks.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        accumulation: int,
        seed: int | None,
        lengths: list[int] | None = None,
    ):
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.accumulation = accumulation
        self.seed = seed
        self.lengths = None if lengths is None else torch.tensor(lengths)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        if seed is not None and num_samples < self.world_size:
            raise ValueError(f"{num_samples} training samples are fewer than the {self.world_size} "
                             "processes. Start fewer, or pass more data.")  # fmt: skip
        self.global_batch = batch_size * accumulation * self.world_size
        self.steps_per_epoch = math.ceil(num_samples / self.global_batch)
        self.epoch = 0
        self.consumed = 0

    def steps(self) -> Iterator[list[int]]:
        """Yield the indices of the samples, of all ranks, of each remaining step of the epoch."""
        if self.seed is None:
            order = torch.arange(self.num_samples, dtype=torch.int32)
        else:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            order = torch.randperm(self.num_samples, generator=generator, dtype=torch.int32)
            if self.lengths is not None:
                order = self._group_by_length(order, generator)
        for start in range(self.consumed, self.num_samples, self.global_batch):
            yield order[start : start + self.global_batch].tolist()

    def _group_by_length(self, order: Tensor, generator: torch.Generator) -> Tensor:
        """Return `order` with each half sorted by length, then its global batches shuffled.

        Each epoch has other halves, hence other batches. If the last batch is short, it stays last.
        """
        count = len(order) // self.global_batch
        order, remainder = order.tensor_split([count * self.global_batch])
        halves = order.tensor_split([count // 2 * self.global_batch])
        order = torch.cat([half[self.lengths[half].argsort(stable=True)] for half in halves])
        batches = order.view(count, self.global_batch)[torch.randperm(count, generator=generator)]
        if count:
            longest = self.lengths[batches].sum(dim=1).argmax().item()
            batches[[0, longest]] = batches[[longest, 0]]
        return torch.cat((batches.flatten(), remainder))

    def __iter__(self) -> Iterator[list[int]]:
        for samples in self.steps():
            rank_samples = samples[self.rank :: self.world_size]
            for start in range(0, self.batch_size * self.accumulation, self.batch_size):
                yield rank_samples[start : start + self.batch_size]

    def __len__(self) -> int:
        steps = math.ceil((self.num_samples - self.consumed) / self.global_batch)
        return steps * self.accumulation


def block_stops(_: int) -> None:
    """Block, in a worker process of a DataLoader, the requests to stop that its rank handles."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1))


def val_loaders(
    val_sets: dict[str, Any], batch_size: int, collate: Callable
) -> dict[str, DataLoader]:
    """Return by name a loader of this rank's batches of each validation set, in order. Raise
    ValueError if there is no set, or an empty one."""
    if not val_sets or not all(map(len, val_sets.values())):
        raise ValueError("load_data must return a validation set, and each needs samples.")
    loaders = {}
    for name, samples in val_sets.items():
        sampler = GlobalBatchSampler(len(samples), batch_size, 1, seed=None)
        loaders[name] = _ordered_loader(samples, sampler, collate)
    return loaders


def first_samples(loader: DataLoader, samples: int | None) -> DataLoader:
    """Return a loader of this rank's share of the first `samples` samples (None: all) of
    `loader`."""
    sampler = loader.batch_sampler
    if samples is None:
        return loader
    count = math.ceil(samples / sampler.global_batch)
    return _ordered_loader(loader.dataset, list(sampler)[:count], loader.collate_fn)


def _ordered_loader(samples: Any, sampler: Any, collate: Callable) -> DataLoader:
    return DataLoader(
        samples,
        batch_sampler=sampler,
        collate_fn=collate,
        pin_memory=accelerator() is not None,
        generator=torch.Generator(),  # otherwise each pass would advance dropout's random state
    )


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with its tensors on `device`, copied asynchronously."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    return batch | {name: x.to(device, non_blocking=True) for name, x in tensors.items()}


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
    """Return groups of the trained parameters for an optimizer, with and without weight decay.

    Norms, biases and one-dimensional parameters are not decayed. FSDP1 flattens parameters, so pass
    the `shapes` that they had before, by name.
    """
    inner = unwrapped(model)
    norms = set()  # prefixes of the names of their parameters
    for name, module in inner.named_modules():
        if "norm" in type(module).__name__.lower():
            norms.add(WRAPPERS.sub("", f"{name}."))
    decayed, others = [], []
    for name, parameter in inner.named_parameters():
        if not parameter.requires_grad:
            continue
        name = WRAPPERS.sub("", name)
        module, _, key = name.rpartition(".")
        is_bias = key == "bias" or key.endswith("_bias")
        if len(shapes[name]) > 1 and not is_bias and f"{module}." not in norms:
            decayed.append(parameter)
        else:
            others.append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def learning_rate(args: Namespace, total_steps: int, epoch_steps: int) -> Callable[[int], float]:
    """Return a function from optimizer step to factor of --lr: a warm-up, then --lr-schedule."""
    warmup = args.warmup_steps or math.ceil(args.warmup_ratio * total_steps)

    def factor(step: int) -> float:
        if args.lr_schedule == "step":
            return args.gamma ** (step // epoch_steps)
        if step < warmup:
            return (step + 1) / (warmup + 1)  # the first step has a rate above 0
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        if args.lr_schedule == "linear":
            return 1 - progress
        if args.lr_schedule == "cosine":
            return (1 + math.cos(math.pi * progress)) / 2
        return 1.0

    return factor
