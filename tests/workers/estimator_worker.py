"""Measure one step of each model on each rank, under torchrun, for test_memory_estimator.py.

estimator_worker.py OUTPUT.json MODELS.json  # {key: [script, flags]}
"""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from ten_steps import storage_bytes

import policies
from core import ranks, weights
from core.steps import parameter_groups


def step(script: ModuleType, args: Any, device: torch.device) -> dict[str, float]:
    """Return the bytes stored after the backward pass and after the step."""
    model, blocks, _, initial = script.load_model(args, True)
    shapes = weights.whole_shapes(model)
    model = script.wrap_model(args, device, model, blocks, initial)
    optimizer = torch.optim.AdamW(parameter_groups(model, shapes, 0.1))
    ids = torch.arange(16).reshape(2, 8)
    inputs = {"decoder_input_ids": ids} if script.__name__ == "T5_training" else {}
    with policies.autocast(model, device, args.sharding.precision):
        logits = model(input_ids=ids, use_cache=False, **inputs).logits
    logits.float().logsumexp(-1).sum().backward()
    sizes = {}
    scales = []
    for state in filter(None, (getattr(m, "quant_state", None) for m in model.modules())):
        scales += [state.absmax, state.state2.absmax, state.offset, state.code]
    sizes["parameter_bytes"] = storage_bytes([*model.parameters(), *scales])
    sizes["gradient_bytes"] = storage_bytes(p.grad for p in model.parameters())
    optimizer.step()
    moments = [v for state in optimizer.state.values() for k, v in state.items() if k != "step"]
    return sizes | {"optimizer_bytes": storage_bytes(moments)}


if __name__ == "__main__":
    output, models = sys.argv[1], json.loads(sys.argv[2])
    results, device = {}, None
    for key, (name, flags) in models.items():
        script = importlib.import_module(name)
        sys.argv = [name, *flags, "--dataset", "docstrings.jsonl", "--output-dir", output]
        args = script.parse_args()
        device = device or ranks.setup(args.run.timeout_minutes)
        results[key] = ranks.on_every_rank(step, script, args, device)
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps(results))
    ranks.finish()
