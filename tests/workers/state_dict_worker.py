"""Measure the extra memory of a save and a resume under torchrun, for test_checkpoint.py.

    state_dict_worker.py RESULT.json MODEL_DIRECTORY TEXT OUTPUT_DIR FLAGS...

Rank 0 writes, in bytes: `shard`, a rank's parameters in fp32; `unit`, the largest FSDP unit in
fp32; and for `save` and `resume` the peak and the final memory, relative to the memory before, on
the host. With SIMULATED=1, which runs on the simulated device, it adds device and pinned memory.
It also writes the sum of the momentum, saved and resumed.
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests")]
SIMULATED = "SIMULATED" in os.environ
if SIMULATED:
    from simdev.run import install

    install(str(ROOT))

import torch
import torch.distributed as dist
from ten_steps import local, parse_args
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import block_dataset
import gpt2_fsdp
from core import checkpoint, ranks, weights
from core.steps import parameter_groups, settings


def resident(key: str) -> int:
    """Return this process's memory in bytes: VmRSS now, or VmHWM, its peak since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def peaks(function: Callable[[], object]) -> dict[str, int]:
    """Run `function` and return its peak memory and the memory after it, in bytes relative to the
    memory before it."""
    gc.collect()
    if SIMULATED:
        sim = torch.sim
        sim.reset_peak_memory_stats()
        sim.host_reset_peak()
        sim.pinned_reset_peak()
        device, host, pinned = sim.memory_allocated(), sim.host_memory(), sim.pinned_memory()
        function()
        return {
            "pinned": sim.pinned_peak() - pinned,
            "pinned_after": sim.pinned_memory() - pinned,
            "device": sim.max_memory_allocated() - device,
            "device_after": sim.memory_allocated() - device,
            "host": sim.host_peak() - host,
            "host_after": sim.host_memory() - host,
        }
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    host = resident("VmRSS")
    function()
    return {"host": resident("VmHWM") - host, "host_after": resident("VmRSS") - host}


def start(
    args: gpt2_fsdp.Args, device: torch.device, steps: int
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return the script's model and an optimizer after `steps` steps."""
    model, blocks, _, source = gpt2_fsdp.load_model(args, needs_weights=True)
    shapes = weights.whole_shapes(model)
    model = gpt2_fsdp.wrap_model(args, device, model, blocks, source)
    optimizer = torch.optim.AdamW(parameter_groups(model, shapes, 0.1), fused=True)
    batch = ranks.to_device(block_dataset.collate([{"input_ids": range(3, 36)}]), device)
    for _ in range(steps):
        (gpt2_fsdp.summed_loss(model, batch) / 32).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def new_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what a save and a load need of a run's state."""
    identity = {"--seed": 0}
    return {"step": 2, "settings": settings(optimizer), "flags": {}, "identity": identity}


def momentum(optimizer: torch.optim.Optimizer) -> float:
    """Return the sum of the absolute first moments of this rank."""
    moments = [local(values["exp_avg"]) for values in optimizer.state.values()]
    return sum(tensor.double().abs().sum().item() for tensor in moments)


def save_and_resume(args: gpt2_fsdp.Args, device: torch.device) -> dict:
    """Save twice, because the first save imports modules, then resume a fresh model."""
    path = args.run.output_dir / "step-00000002"
    model, optimizer = start(args, device, 2)
    state = new_state(optimizer)

    def save() -> None:
        checkpoint.save(path, checkpoint.snapshot(model, optimizer, state), state)

    save()
    units = [unit for unit in FSDP.fsdp_modules(model) if unit._handle]
    sizes = [unit._handle.flat_param._unpadded_unsharded_size.numel() for unit in units]
    measurements = {
        "shard": 4 * sum(local(parameter).numel() for parameter in model.parameters()),
        "unit": 4 * max(sizes, default=0),  # FSDP2's state dicts gather no units
        "save": peaks(save),
        "momentum_saved": momentum(optimizer),
    }
    del model, optimizer, save, units

    model, optimizer = start(args, device, 0)
    if not SIMULATED:  # with --cpu-offload, the first forward pass leaves a gradient
        first = next(p for p in model.parameters() if local(p).numel())
        first.grad = torch.zeros_like(first)
    state = new_state(optimizer)
    measurements["resume"] = peaks(lambda: checkpoint.load(path, model, optimizer, state))
    measurements["momentum_resumed"] = momentum(optimizer)
    return measurements


if __name__ == "__main__":
    result, model, text, output, *flags = sys.argv[1:]
    common = ["--model-name", model, "--dataset", text, "--val-dataset", text, "--block-size", "32",
              "--batch-size", "1", "--output-dir", output]  # fmt: skip
    args = parse_args(gpt2_fsdp, [*common, *flags])
    measurements = save_and_resume(args, ranks.setup(7))
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(measurements))
    ranks.leave(0)
