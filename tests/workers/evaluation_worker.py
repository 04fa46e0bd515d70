"""Evaluate a model, change its weights in place, and evaluate it again, under each strategy."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests")]

import torch
import torch.distributed as dist
from ten_steps import parse_args
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import block_dataset
import gpt2_fsdp
import policies
from core import ranks
from optional import startup_checks

STRATEGIES = {"ddp": 1, "full_shard": 1, "shard_grad_op": 1, "full_shard 2": 2}


def evaluate_twice(args: gpt2_fsdp.Args, device: torch.device) -> list[float]:
    """Return the loss before and after all weights are halved."""
    torch.manual_seed(0)
    model, blocks, _, source = gpt2_fsdp.load_model(args, needs_weights=True)
    model = gpt2_fsdp.wrap_model(args, device, model, blocks, source)
    batch = block_dataset.collate(startup_checks.blocks())
    losses = []
    with torch.no_grad():
        for _ in range(2):
            with policies.evaluation(model):
                losses.append(gpt2_fsdp.summed_loss(model, batch).item())
            for parameter in model.parameters():
                parameter *= 0.5
    if isinstance(model, FSDP):  # each queued event lets the host gather one more unit ahead
        assert len(model._free_event_queue._queue) <= 4
    return losses


def main() -> None:
    """Write the losses by strategy."""
    results = {}
    device = ranks.setup(timeout_minutes=5)
    for name, fsdp in STRATEGIES.items():
        flags = ["--strategy", name.split()[0], "--fsdp", str(fsdp), "--model-name", "tiny"]
        results[name] = evaluate_twice(parse_args(gpt2_fsdp, flags), device)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    ranks.leave(0)


if __name__ == "__main__":
    main()
