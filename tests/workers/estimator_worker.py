"""Measure one step of each model on each rank, under torchrun, for test_memory_estimator.py.

estimator_worker.py OUTPUT.json MODELS.json  # {key: [script, flags]}
"""

import importlib
import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests")]

import torch
import torch.distributed as dist
from ten_steps import storage_bytes

import policies
from benchmarks.driven import parse_flags
from runtime import batches

SENT = {"bytes": 0.0}


def count(name: str, times: int, position: int) -> None:
    """Make a collective add the bytes that a ring sends: `times` (k - 1) / k of the tensor."""
    collective = getattr(dist, name)

    def counting_collective(*args: object, **options: object) -> object:
        whole = args[position] if args else options["input"]  # FSDP2 passes keywords
        tensors = whole if isinstance(whole, list) else [whole]
        ranks = dist.get_world_size(options.get("group"))
        SENT["bytes"] += times * sum(x.nbytes for x in tensors) * (ranks - 1) / ranks
        return collective(*args, **options)

    setattr(dist, name, counting_collective)


def step(script: ModuleType, args: Namespace, device: torch.device) -> dict[str, float]:
    """Return the bytes stored after the backward pass and after the step, and the bytes sent."""
    model, facts, init = script.load_model(args, device)
    model = script.wrap_model(args, device, model, init)
    optimizer = torch.optim.AdamW(batches.parameter_groups(model, facts.shapes, 0.1))
    ids = torch.arange(16).reshape(2, 8)
    inputs = {"decoder_input_ids": ids} if script.__name__ == "T5_training" else {}
    if hasattr(script, "attention"):  # for packed documents
        inputs["cu_seq_lens"] = torch.tensor([0, 8, 16], dtype=torch.int32)
        inputs["longest_document"] = 8
    SENT["bytes"] = 0.0
    with policies.autocast(model, args.precision):
        logits = model(input_ids=ids, use_cache=False, **inputs).logits
    logits.float().logsumexp(-1).sum().backward()
    sizes = {"sent_bytes_per_gpu": SENT["bytes"]}
    scales = []
    for state in filter(None, (getattr(m, "quant_state", None) for m in model.modules())):
        scales += [state.absmax, state.state2.absmax, state.offset, state.code]
    sizes["parameter_bytes"] = storage_bytes([*model.parameters(), *scales])
    sizes["gradient_bytes"] = storage_bytes(p.grad for p in model.parameters())
    optimizer.step()
    moments = [v for state in optimizer.state.values() for k, v in state.items() if k != "step"]
    return sizes | {"optimizer_bytes": storage_bytes(moments)}


def main() -> None:
    """Write the sizes of all ranks for each model."""
    output, models = sys.argv[1], json.loads(sys.argv[2])
    results, device = {}, None
    count("all_gather", times=1, position=0)
    count("reduce_scatter_single", times=1, position=1)
    count("all_reduce", times=2, position=0)
    for key, (name, flags) in models.items():
        script = importlib.import_module(name)
        args = parse_flags(script, [*flags, "--dataset", "docstrings", "--output-dir", output])
        device = device or script.setup(args)
        ranks: list = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, step(script, args, device))
        results[key] = ranks
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # like the scripts
