"""Run under torchrun by test_state_dicts.py: what a save and a resume hold above what trains.

    state_dict_worker.py RESULT.json MODEL_DIRECTORY TEXT OUTPUT_DIR FLAGS...

Rank 0 writes, in bytes: `shard`, a rank's parameters in fp32; `unit`, the largest FSDP unit in
fp32; and the peak and the rest of a save and of a resume above what lived before, on the host and,
with SIMULATED=1 on the simulated device, on the device and in pinned memory. And the momentum,
saved and resumed.
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
from benchmarks.driven import Driven
from runtime import checkpoints
from runtime.state import TrainState


def resident(key: str) -> int:
    """Return this process's memory in bytes: VmRSS now, or VmHWM, its peak since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def peaks(function: Callable[[], object]) -> dict[str, int]:
    """Return the peak bytes while `function` runs, and the bytes after it, above those before
    it."""
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
    """Make a step, on the first batch."""
    driven.step([driven.batch()])


def prepared(args: Namespace, device: torch.device, steps: int) -> Driven:
    """Return a training after so many steps."""
    driven = Driven(gpt2_fsdp, args, device)
    for _ in range(steps):
        train(driven)
    return driven


def momentum(state: TrainState) -> float:
    """Return the sum of the first moments' sizes."""
    moments = [local(values["exp_avg"]) for values in state.optimizer.state.values()]
    return sum(tensor.double().abs().sum().item() for tensor in moments)


def main() -> None:
    """Write what was found."""
    result, model, text, output, *flags = sys.argv[1:]
    common = ["--model-name", model, "--dataset", text, "--val-dataset", text, "--block-size", "32",
              "--batch-size", "1", "--output-dir", output]  # fmt: skip
    args = gpt2_fsdp.parse_args([*common, *flags])
    device = gpt2_fsdp.setup(args)
    found = saved_and_resumed(args, device)
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(found))
    gpt2_fsdp.cleanup()


def saved_and_resumed(args: Namespace, device: torch.device) -> dict:
    """Save twice, the first time to import what a save needs, then resume a fresh state."""
    directory = Path(args.output_dir)
    driven = prepared(args, device, 2)
    state = driven.state
    checkpoints.Saver(args, directory, state).save()
    units = [unit for unit in FSDP.fsdp_modules(state.model) if unit._handle]
    sizes = [unit._handle.flat_param._unpadded_unsharded_size.numel() for unit in units]
    found = {
        "shard": 4 * sum(local(parameter).numel() for parameter in state.model.parameters()),
        "unit": 4 * max(sizes, default=0),  # none under FSDP2, of which a state dict gathers none
        "save": peaks(checkpoints.Saver(args, directory, state).save),
        "momentum_saved": momentum(state),
    }
    driven.end()
    del driven, state, units

    driven = prepared(args, device, 0)
    state = driven.state
    if not SIMULATED:  # as the forward pass of a start leaves it with --cpu-offload
        first = next(p for p in state.model.parameters() if local(p).numel())
        first.grad = torch.zeros_like(first)
    path = directory / "checkpoints" / "step-00000002"
    found["resume"] = peaks(lambda: checkpoints.load_checkpoint(path, state, args))
    found["momentum_resumed"] = momentum(state)
    return found


if __name__ == "__main__":
    main()
    os._exit(0)  # as the scripts do, and why
