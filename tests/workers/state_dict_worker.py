"""Measure the host memory of a save and a resume of gpt2_fsdp.py, for test_checkpoint.py.

    state_dict_worker.py RESULT.json FLAGS...

Rank 0 writes the number of its parameters, the bytes of the largest FSDP unit in fp32, and for each
of the two the peak and the final memory, relative to that before, and the sum of the momentum.
"""

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests")]

import torch
import torch.distributed as dist
from ten_steps import local, parse_args, patched, run
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.optim import Optimizer

import gpt2_fsdp
from core import checkpoint, ranks

load, snapshot = checkpoint.load, checkpoint.snapshot
results: dict[str, Any] = {}


def resident(key: str) -> int:
    """Return this process's memory in bytes: VmRSS now, or VmHWM, its peak since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def measure(name: str, optimizer: Optimizer, function: Callable[[], object]) -> None:
    """Run a function and keep its memory and the sum of the absolute first moments after it."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = resident("VmRSS")
    function()
    memory = {"peak": resident("VmHWM") - before, "after": resident("VmRSS") - before}
    moments = [local(values["exp_avg"]).double() for values in optimizer.state.values()]
    results[name] = memory | {"momentum": sum(x.abs().sum().item() for x in moments)}


def save_twice(model: nn.Module, optimizer: Optimizer, state: dict) -> dict:
    """Save a checkpoint besides the script's own, and return the snapshot for that one."""
    path = Path(sys.argv[1]).with_name("checkpoint")

    def save() -> None:
        checkpoint.save(path, snapshot(model, optimizer, state), state)

    measure("save", optimizer, save)
    results["parameter"] = sum(local(parameter).numel() for parameter in model.parameters())
    units = [unit._handle.flat_param for unit in FSDP.fsdp_modules(model) if unit._handle]
    results["unit"] = 4 * max(unit._unpadded_unsharded_size.numel() for unit in units)
    return snapshot(model, optimizer, state)


def load_with_gradient(path: Path, model: nn.Module, optimizer: Optimizer, state: dict) -> dict:
    """Load a checkpoint into a model with a gradient, as --cpu-offload has one."""
    first = next(p for p in model.parameters() if local(p).numel())
    first.grad = torch.zeros_like(first)
    loaded: dict[str, Any] = {}
    measure("resume", optimizer, lambda: loaded.update(load(path, model, optimizer, state)))
    return loaded


if __name__ == "__main__":
    device = ranks.setup(7)
    two, three = (parse_args(gpt2_fsdp, [*sys.argv[2:], "--max-steps", x]) for x in ("2", "3"))
    with patched(checkpoint, snapshot=save_twice):
        run(gpt2_fsdp, two, device)  # the second save is measured, as the first imports modules
    with patched(checkpoint, load=load_with_gradient):
        run(gpt2_fsdp, three, device)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    ranks.leave(0)
