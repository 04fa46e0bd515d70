"""Measure the extra memory of a save and a resume under torchrun, for test_state_dicts.py.

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
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests")]
SIMULATED = "SIMULATED" in os.environ
if SIMULATED:
    from simdev.run import install

    install(str(ROOT))

import torch
import torch.distributed as dist
from ten_steps import local
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import gpt2_fsdp
from benchmarks.driven import Driven, parse_flags
from runtime import checkpoints
from runtime.state import State


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


def train(driven: Driven) -> None:
    """Make one step on the first batch."""
    driven.step([driven.batch()])


def start(args: Namespace, device: torch.device, steps: int) -> Driven:
    """Return a driven script after `steps` steps."""
    driven = Driven(gpt2_fsdp, args, device)
    for _ in range(steps):
        train(driven)
    return driven


def momentum(state: State) -> float:
    """Return the sum of the absolute first moments of this rank."""
    moments = [local(values["exp_avg"]) for values in state.optimizer.state.values()]
    return sum(tensor.double().abs().sum().item() for tensor in moments)


def main() -> None:
    """Write rank 0's measurements."""
    result, model, text, output, *flags = sys.argv[1:]
    common = ["--model-name", model, "--dataset", text, "--val-dataset", text, "--block-size", "32",
              "--batch-size", "1", "--output-dir", output]  # fmt: skip
    args = parse_flags(gpt2_fsdp, [*common, *flags])
    device = gpt2_fsdp.setup(args)
    measurements = save_and_resume(args, device)
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(measurements))
    gpt2_fsdp.cleanup()


def save_and_resume(args: Namespace, device: torch.device) -> dict:
    """Save twice, because the first save imports modules, then resume a fresh state."""
    directory = Path(args.output_dir)
    driven = start(args, device, 2)
    state = driven.state
    checkpoints.Saver(args, directory, state, {}).save()
    units = [unit for unit in FSDP.fsdp_modules(state.model) if unit._handle]
    sizes = [unit._handle.flat_param._unpadded_unsharded_size.numel() for unit in units]
    measurements = {
        "shard": 4 * sum(local(parameter).numel() for parameter in state.model.parameters()),
        "unit": 4 * max(sizes, default=0),  # FSDP2's state dicts gather no units
        "save": peaks(checkpoints.Saver(args, directory, state, {}).save),
        "momentum_saved": momentum(state),
    }
    driven.end()
    del driven, state, units

    driven = start(args, device, 0)
    state = driven.state
    if not SIMULATED:  # with --cpu-offload, the first forward pass leaves a gradient
        first = next(p for p in state.model.parameters() if local(p).numel())
        first.grad = torch.zeros_like(first)
    path = directory / "checkpoints" / "step-00000002"
    measurements["resume"] = peaks(lambda: checkpoints.load_checkpoint(path, state, {}, 0))
    measurements["momentum_resumed"] = momentum(state)
    return measurements


if __name__ == "__main__":
    main()
    os._exit(0)  # as the scripts do
