"""CRC-32 of checkpoint files. Without this file, damage that keeps a file's size is not noticed."""

import json
import zlib
from pathlib import Path

import numpy as np
import torch.distributed as dist

from core import checkpoint
from core.ranks import Problem, on_every_rank, on_rank_zero, print0


def save(path: Path, *job: object) -> None:
    """Save a checkpoint as `core.checkpoint.save`, then crc-RANK.json: the sums of this rank's
    files, and on rank 0 of the common ones. Call on all ranks."""
    checkpoint.save(path, *job)
    rank = dist.get_rank()
    own = [*path.glob(f"__{rank}_*"), *(path.glob("[!_c]*") if rank == 0 else ())]
    sums = on_every_rank(lambda: {x.name: zlib.crc32(np.memmap(x, mode="r")) for x in own})
    on_every_rank((path / f"crc-{rank}.json").write_text, json.dumps(sums[rank]))


def find_intact(directory: Path) -> Path:
    """Return the newest complete checkpoint that agrees with its sums, if a kill left it any, or
    raise Problem. Call on all ranks."""
    for path in reversed(on_rank_zero(checkpoint.complete_checkpoints, directory)):
        try:
            on_every_rank(_verify, path)
            return path
        except (OSError, ValueError) as error:
            print0(f"{path} is damaged, so it is skipped: {error}")
    raise Problem(f"No checkpoint in {directory} is intact. Pass another --output-dir.")


def _verify(path: Path) -> None:
    for file in sorted(path.glob("crc-*.json"))[dist.get_rank() :: dist.get_world_size()]:
        for name, crc in json.loads(file.read_text()).items():
            if zlib.crc32(np.memmap(path / name, mode="r")) != crc:  # without a copy
                raise ValueError(f"{name} differs from its sum in {file.name}")
