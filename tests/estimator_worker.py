"""Run under torchrun by test_memory_estimator.py: one step under each strategy, closely measured.

estimator_worker.py OUTPUT.json MODELS.json: for each model its script, name and flags.
"""

import importlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from ten_steps import held

import policies
from runtime import optimization

SENT = {"bytes": 0.0}


def count(name: str, times: int, place: int) -> None:
    """Have a collective add what a ring of its ranks sends: `times` (k - 1) / k of the whole."""
    collective = getattr(dist, name)

    def counted(*args: object, **options: object) -> object:
        whole = args[place] if args else options["input"]  # FSDP2 names its arguments
        whole = whole if isinstance(whole, list) else [whole]
        ranks = dist.get_world_size(options.get("group"))
        SENT["bytes"] += times * sum(x.nbytes for x in whole) * (ranks - 1) / ranks
        return collective(*args, **options)

    setattr(dist, name, counted)


def step(script: object, args: object, device: torch.device) -> dict[str, float]:
    """Bytes held after backward and after the step, and bytes sent."""
    model, _, init = script.load_model(args, device)
    model = script.wrap_model(args, device, model, init)
    optimizer = torch.optim.AdamW(optimization.parameter_groups(model, 0.1))
    ids = torch.arange(16).reshape(2, 8)
    inputs = {"decoder_input_ids": ids} if script.__name__ == "T5_training" else {}
    if hasattr(script, "attention"):  # which is that of packed documents
        inputs["cu_seq_lens"] = torch.tensor([0, 8, 16], dtype=torch.int32)
        inputs["longest_document"] = 8
    SENT["bytes"] = 0.0
    with policies.autocast(args, device):
        logits = model(input_ids=ids, use_cache=False, **inputs).logits
    logits.float().logsumexp(-1).sum().backward()
    found = {"sent_bytes_per_gpu": SENT["bytes"]}
    scales = []
    for module in model.modules():
        if getattr(module, "quant_state", None):
            state = module.quant_state
            scales += [state.absmax, state.state2.absmax, state.offset, state.code]
    found["parameter_bytes"] = held([*model.parameters(), *scales])
    found["gradient_bytes"] = held(p.grad for p in model.parameters())
    optimizer.step()
    moments = [v for state in optimizer.state.values() for k, v in state.items() if k != "step"]
    return found | {"optimizer_bytes": held(moments)}


def main() -> None:
    """Write what each rank found for each model, by its key."""
    output, models = sys.argv[1], json.loads(sys.argv[2])
    results, device = {}, None
    for name, times, place in (("all_gather", 1, 0), ("reduce_scatter_single", 1, 1),
                               ("all_reduce", 2, 0)):  # fmt: skip
        count(name, times, place)
    for key, (name, flags) in models.items():
        script = importlib.import_module(name)
        args = script.parse_args([*flags, "--dataset", "docstrings", "--output-dir", output])
        device = device or script.setup(args)
        ranks: list = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, step(script, args, device))
        results[key] = ranks
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # as the scripts do, and why
