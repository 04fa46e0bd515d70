"""Print what torch's FSDPMemTracker counts of a model under FSDP2, for test_memory_estimator.py.

    fsdp2_tracker_worker.py MODEL RANKS

Prints a JSON object of bytes on rank 0: `parameters` and `gradients` after the backward pass, and
the peak of both passes. Tensors and process group are fake, so nothing is allocated.
"""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AttentionInterface, AttentionMaskInterface

import policies
from tools import memory_estimator

CPU = torch.device("cpu")


def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
    """Return a gradient for each input of the estimator's FusedAttention, which has none."""
    query, key, value, _, _, bias = ctx.saved_tensors
    inputs = (query, key, value, bias)
    return tuple(None if tensor is None else torch.empty_like(tensor) for tensor in inputs)


def attention(module: torch.nn.Module, *inputs: Any, **options: Any) -> tuple[Tensor, None]:
    """Call the estimator's attention, but let the graph go that it keeps for the estimate."""
    output = memory_estimator.fused_attention(module, *inputs, **options)
    del module.kernel_outputs
    return output


def main() -> None:
    """Track one micro-batch of one sequence, with recomputation as the script has it."""
    name, ranks = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    config = memory_estimator.load_config(name)
    flags = memory_estimator.parse_args(["--model-name", name])
    script = memory_estimator.load_script(flags, config)
    memory_estimator.FusedAttention.backward = staticmethod(backward)
    AttentionInterface.register("fused", attention)
    AttentionMaskInterface.register("fused", lambda **_: None)
    config._attn_implementation = "fused"
    args = Namespace(strategy="full_shard", precision="bf16", cpu_offload=False)
    mesh = policies.device_mesh(args, CPU)  # outside of FakeTensorMode: it communicates
    policies.device_mesh = lambda *_: mesh
    length = memory_estimator.LENGTHS[config.model_type]
    with FakeTensorMode():
        model = memory_estimator.model_class(script)(config)
        policies.fuse_gelu(model)
        options = policies.fsdp2_options(args, CPU)
        for unit in policies.fsdp2_units(model, policies.wrap_policy(script.units(model))):
            fully_shard(unit, **options)
        policies.plan_gathers(model)
        if script.RECIPE.get("activation_checkpointing"):
            policies.checkpoint_activations(model, script.BLOCKS)
        ids = torch.zeros(1, length, dtype=torch.int64)
        target = ids
        if config.is_encoder_decoder:
            target = ids[:, : flags.target_length].clone()
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": ids}
        batch |= {"decoder_input_ids": target, "labels": target, "cu_seq_lens": ids}
        batch["target_positions"] = torch.arange(length)  # as many as possible
        tracker = FSDPMemTracker(model)
        tracker.track_inputs(tuple(batch.values()))
        with tracker:
            script.summed_loss(model, batch | {"longest_document": length}).backward()
        (now,) = tracker.get_tracker_snapshot("current").values()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    sizes = {str(key).rpartition(".")[2]: value for key, value in now.items()}
    sizes = {"parameters": sizes["SHARDED_PARAM"], "gradients": sizes["SHARDED_GRAD"]}
    print(json.dumps(sizes | {"peak": peak["Total"]}))


if __name__ == "__main__":
    main()
