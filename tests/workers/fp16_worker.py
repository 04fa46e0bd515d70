"""Train briefly in fp16 with overflowing gradients under torchrun, for test_fp16.py.

    fp16_worker.py RESULT.json OUTPUT_DIR FLAGS.json

Rank 0 writes the results of `train` and `overflow` by script and strategy.
"""

import importlib
import json
import os
import sys
import types
from argparse import Namespace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests")]

import torch
import torch.distributed as dist
from ten_steps import local, strategy_flags

from benchmarks.driven import Driven, parse_flags
from runtime import ranks
from runtime.run import prepare_directory

STRATEGIES = {  # the scripts handle strategies alike, so one script tries all of them
    "T5_training": ("full_shard",),
    "gpt2_fsdp": ("full_shard", "shard_grad_op", "ddp", "fsdp2"),
    "llama_fsdp": ("fsdp2",),
}
SCALE = 2.0**12  # the default, 2**16, overflows in Llama's first step


def train(script: types.ModuleType, args: Namespace, device: torch.device) -> tuple[dict, Driven]:
    """Return the losses of all steps, the loss scale after them, and the driven script."""
    driven = Driven(script, args, device)
    scaler = driven.state.scaler
    if scaler.is_enabled():
        scaler.load_state_dict(scaler.state_dict() | {"scale": SCALE})
    losses = []
    for loss, _ in driven.all():
        dist.all_reduce(loss)
        losses.append(loss.item())
    return {"losses": losses, "scale": scaler.get_scale()}, driven


def shards(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return copies of this rank's shards of the parameters."""
    return [local(parameter.detach()).clone() for parameter in model.parameters()]


def overflow(driven: Driven, batch: dict, place: str) -> dict:
    """Make one step whose gradients overflow on rank 1 and return its effects. They overflow in the
    "loss", before reduction, or in the "shard", after it."""
    script, state = driven.module, driven.state
    summed_loss, unscale = script.summed_loss, state.scaler.unscale_
    before = shards(state.model)
    scale, schedule = state.scaler.get_scale(), state.scheduler.last_epoch

    def infinite_loss(*args: object) -> torch.Tensor:
        return summed_loss(*args) * float("inf")

    def infinite_shard(optimizer: torch.optim.Optimizer) -> None:
        largest = max(state.model.parameters(), key=lambda parameter: parameter.numel())
        local(largest.grad)[..., 0] = float("inf")
        unscale(optimizer)

    if dist.get_rank() == 1 and place == "loss":
        script.summed_loss = infinite_loss
    if dist.get_rank() == 1 and place == "shard":
        state.scaler.unscale_ = infinite_shard
    has_ended = False
    try:
        driven.step([batch])
        driven.check()
    except SystemExit:
        has_ended = True
    script.summed_loss = summed_loss
    state.scaler.unscale_ = unscale
    pairs = zip(before, shards(state.model), strict=True)
    has_changed = any(not torch.equal(old, new) for old, new in pairs)
    return {
        "changed": ranks.on_every_rank(lambda: has_changed),
        "scale": state.scaler.get_scale() / scale,
        "schedule": state.scheduler.last_epoch - schedule,
        "ended": ranks.on_every_rank(lambda: has_ended),
    }


def try_strategy(
    name: str, flags: list[str], strategy: str, device: torch.device, directory: Path
) -> dict:
    """Train in fp32 and fp16, overflow, resume, and overflow at a small scale."""
    script = importlib.import_module(name)
    prepare_directory(directory)
    flags = [*flags, *strategy_flags(strategy), "--output-dir", str(directory)]
    fp32, _ = train(script, parse_flags(script, [*flags, "--precision", "fp32"]), device)
    args = parse_flags(script, [*flags, "--precision", "fp16"])
    fp16, driven = train(script, args, device)
    batch = driven.batch()
    steps = {"loss": overflow(driven, batch, "loss")}
    if strategy != "ddp":  # under DDP, all ranks have the same gradients
        steps["shard"] = overflow(driven, batch, "shard")
    steps["none"] = overflow(driven, batch, "nowhere")

    resumed = Driven(script, args, device, driven.save(keep=1))
    scaler, saved = resumed.state.scaler, driven.state.scaler.state_dict()
    is_same = scaler.state_dict() == saved
    scaler.load_state_dict(saved | {"scale": 1.5})
    steps["last"] = overflow(resumed, batch, "loss")
    return {"fp32": fp32, "fp16": fp16, "overflows": steps, "scaler_resumed": is_same}


def main() -> None:
    """Train all scripts in one process group."""
    result, output, scripts = sys.argv[1:]
    ranks.GRACE_SECONDS = 0
    device, results = None, {}
    for name, flags in json.loads(scripts).items():
        if device is None:
            script = importlib.import_module(name)
            device = script.setup(parse_flags(script, flags))
        for strategy in STRATEGIES[name]:
            directory = Path(output) / name / strategy
            results[f"{name} {strategy}"] = try_strategy(name, flags, strategy, device, directory)
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(results))
    script.cleanup()


if __name__ == "__main__":
    main()
    os._exit(0)  # as the scripts do
