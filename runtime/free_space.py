"""Refuses a run for whose checkpoints and models the disk has no room, before it trains."""

import shutil
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy

from . import ranks, trained
from .state import TrainState


def require(state: TrainState, args: Namespace) -> None:
    """Raise ValueError, on all ranks, if --output-dir is on a disk too full for this run.

    A checkpoint has the trained parameters and AdamW's two moments, 12 bytes for each in fp32;
    there are --keep-checkpoints of them while the next one is written, and one in shards besides if
    that is made one file. Then there are best/, its replacement and final/. What an earlier run
    left there makes way.
    """
    trainable, whole = count_parameters(state.model)
    checkpoints = args.keep_checkpoints + 1
    if args.checkpoint_type == "full":
        checkpoints += 1
    exported = trained.of(state.model).exported_bytes(args, trainable, whole)
    needed = 12 * trainable * checkpoints + 3 * exported
    ranks.on_rank_zero(_compare, needed, Path(args.output_dir), checkpoints)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Count the parameters of a wrapped model that are trained, and all of them; all ranks."""
    in_4bit = {}
    for module in model.modules():
        if hasattr(module, "quantize"):
            in_4bit[module.weight] = module.in_features * module.out_features
    counts = torch.zeros(2, dtype=torch.int64)
    for parameter in model.parameters():
        # Of a DTensor all are counted; of FSDP1's, this rank's.
        count = in_4bit.get(parameter, parameter.numel())
        counts += torch.tensor([count * parameter.requires_grad, count])
    if isinstance(model, FSDP) and model.sharding_strategy != ShardingStrategy.NO_SHARD:
        dist.all_reduce(counts, group=ranks.cpu_group())
        counts //= dist.get_world_size() // dist.get_world_size(model.process_group)
    return counts[0].item(), counts[1].item()


def _compare(needed: int, directory: Path, checkpoints: int) -> None:
    """Raise ValueError if there is less room than `needed`; rank 0 alone."""
    places = [*directory.glob("checkpoints/*"), directory / "best", directory / "final"]
    there = sum(file.stat().st_size for place in places for file in place.rglob("*"))
    free = shutil.disk_usage(directory).free + there
    if free < needed:
        raise ValueError(
            f"--output-dir {directory} has room for {_size(free)}, but {checkpoints} "
            f"checkpoints, best/ and final/ take {_size(needed)}: make room, lower "
            "--keep-checkpoints, or go on with --ignore-free-space"
        )


def _size(count: int) -> str:
    """Return a number of bytes in GB, or in MB if it is small."""
    if count < 1e9:
        return f"{count / 1e6:.0f} MB"
    return f"{count / 1e9:.1f} GB"
