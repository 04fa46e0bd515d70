"""Files that --profile leaves in OUTPUT_DIR: a step's trace, and what filled a GPU that ran out."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm


@contextlib.contextmanager
def trace(directory: Path, step: int) -> Iterator[None]:
    """Trace the step that is run inside: rank 0 writes what its CPU and GPU did, and when."""
    if dist.get_rank() != 0:
        yield
        return
    with torch.profiler.profile() as profiler:  # traces all devices, and waits for them at the end
        yield
    path = directory / f"trace-step-{step}.json.gz"
    profiler.export_chrome_trace(str(path))
    tqdm.write(f"step {step} is in {path}: open it in https://ui.perfetto.dev")


def record_memory(device: torch.device) -> None:
    """Have the GPU's allocator record, from now on, which line allocates what. The record is in
    host memory, and of bounded length. It has no C++ stacks, which would slow the whole run."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=100_000)


def write_memory(directory: Path, error: BaseException | None) -> None:
    """Write this rank's record of allocations, if the error is that the GPU ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError):
        path = directory / f"memory-rank-{dist.get_rank()}.pickle"
        torch.cuda.memory._dump_snapshot(str(path))
        print(f"what was in memory is in {path}: open it in https://pytorch.org/memory_viz")
