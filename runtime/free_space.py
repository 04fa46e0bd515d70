"""Is there room for what a run will leave? Asked before anything is trained."""

import shutil
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy

from . import adapters, ranks
from .checkpoints import TrainState
from .hf_weights import EXPORT_DTYPES


def check(state: TrainState, args: Namespace) -> None:
    """Raise ValueError, on all ranks, if --output-dir is on a disk too full for this run.

    A checkpoint has the trained parameters and AdamW's two moments, 12 bytes for each in fp32;
    there are --keep-checkpoints of them while the next one is written, and one in shards besides if
    that is made one file. Then there are the best weights, best/ and final/. What an earlier run
    left there makes way.
    """
    trained, whole = count_parameters(state.model)
    checkpoints = args.keep_checkpoints + 1
    if args.checkpoint_type == "full":
        checkpoints += 1
    exported = EXPORT_DTYPES[args.export_dtype].itemsize * whole
    if adapters.has_adapters(state.model) and not args.merge:
        exported = 4 * trained
    needed = 12 * trained * checkpoints + 2 * 4 * trained + 2 * exported
    ranks.on_rank_zero(_compare, needed, Path(args.output_dir), checkpoints)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """How many parameters of a wrapped model are trained, and how many it has; all ranks."""
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
    """Rank 0 alone."""
    places = [*directory.glob("checkpoints/*"), directory / "best", directory / "final"]
    there = sum(file.stat().st_size for place in places for file in place.rglob("*"))
    free = shutil.disk_usage(directory).free + there
    if free < needed:
        raise ValueError(
            f"--output-dir {directory} has room for {free / 1e9:.1f} GB, but {checkpoints} "
            f"checkpoints, best/ and final/ take {needed / 1e9:.1f}: make room, lower "
            "--keep-checkpoints, or go on with --ignore-free-space"
        )
