"""The order of samples, cut into global batches, and what brings a batch to the device.

Sample order is a function of the seed, the epoch and the global batch, and of the lengths where
batches are grouped by length. It does not depend on the number of ranks.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from .ranks import accelerator

Batch = dict[str, Tensor | int]  # as a script's `collate` makes it


class GlobalBatchSampler:
    """The batch sampler of a DataLoader: this rank's micro-batches of each global batch.

    The epoch's permutation is cut into global batches, one per optimizer step. Each is dealt out to
    the ranks in turn, then cut into micro-batches. No sample is dropped or repeated: some
    micro-batches of the last step may be short or empty. With a `seed` of None the order is that of
    the data set.

    Given `lengths`, one of each sample, a global batch has samples of about one length, so that
    little is padding and no rank waits for another. The global batches come in random order. Only
    the longest comes first: if it does not fit in memory, that is seen at once.

    Set `epoch` and `consumed` (samples, of all ranks) to continue anywhere; nothing is loaded then.
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
        self.global_batch = batch_size * accumulation * self.world_size
        self.steps_per_epoch = math.ceil(num_samples / self.global_batch)
        self.epoch = 0
        self.consumed = 0

    def steps(self) -> Iterator[list[int]]:
        """Yield the samples, of all ranks, of each remaining step of the epoch."""
        if self.seed is None:
            order = torch.arange(self.num_samples, dtype=torch.int32)
        else:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            order = torch.randperm(self.num_samples, generator=generator, dtype=torch.int32)
            if self.lengths is not None:
                order = self._grouped(order, generator)
        for start in range(self.consumed, self.num_samples, self.global_batch):
            yield order[start : start + self.global_batch].tolist()

    def _grouped(self, order: Tensor, generator: torch.Generator) -> Tensor:
        """Sort each half by length, then shuffle all the global batches but a short last one."""
        whole, rest = divmod(len(order), self.global_batch)
        if not whole:
            return order
        # Halves, drawn again in each epoch, or each would have the same batches.
        half = (whole + 1) // 2
        parts = order.tensor_split([half * self.global_batch])
        order = torch.cat([part[self.lengths[part].argsort(stable=True)] for part in parts])
        # The short batch has neighbours too, of any length in the second half.
        place = torch.randint(half, whole + 1, (), generator=generator).item() * self.global_batch
        before, short, after = order.tensor_split([place, place + rest])
        batches = torch.cat((before, after)).view(whole, self.global_batch)
        batches = batches[torch.randperm(whole, generator=generator)]
        longest = self.lengths[batches].sum(dim=1).argmax().item()
        batches[[0, longest]] = batches[[longest, 0]]
        return torch.cat((batches.flatten(), short))

    def __iter__(self) -> Iterator[list[int]]:
        for samples in self.steps():
            mine = samples[self.rank :: self.world_size]
            for start in range(0, self.batch_size * self.accumulation, self.batch_size):
                yield mine[start : start + self.batch_size]

    def __len__(self) -> int:
        steps = math.ceil((self.num_samples - self.consumed) / self.global_batch)
        return steps * self.accumulation


def train_sampler(
    args: Namespace, dataset: Any, lengths: list[int] | None = None
) -> GlobalBatchSampler:
    """Return the order in which `dataset`, which has len(), is trained on; `lengths` group it.

    Raises ValueError if it has fewer samples than there are processes.
    """
    if len(dataset) < dist.get_world_size():
        raise ValueError(
            f"there are {len(dataset)} training samples, fewer than the {dist.get_world_size()} "
            "processes: use fewer processes, or more data"
        )
    return GlobalBatchSampler(
        len(dataset), args.batch_size, args.gradient_accumulation_steps, args.seed, lengths
    )


def val_loaders(
    args: Namespace, val_sets: dict[str, Any], collate: Callable
) -> dict[str, DataLoader]:
    """Return loaders of this rank's batches of each validation set, in its order, by name."""
    loaders = {}
    for name, samples in val_sets.items():
        sampler = GlobalBatchSampler(len(samples), args.batch_size, 1, seed=None)
        loaders[name] = _ordered_loader(samples, sampler, collate)
    return loaders


def first(loader: DataLoader, samples: int | None) -> DataLoader:
    """Return a loader of this rank's batches that hold the first `samples` (None: all) of all
    ranks."""
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
        generator=torch.Generator(),  # or each pass would draw from dropout's
    )


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with its tensors on `device`, copied asynchronously."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    return batch | {name: x.to(device, non_blocking=True) for name, x in tensors.items()}
