"""Run by test_memory_estimator.py: what torch's FSDPMemTracker finds of a model under FSDP2.

    fsdp2_tracker_worker.py MODEL RANKS FLAGS...

Prints a JSON object of bytes on rank 0: `parameters` and `gradients` after the backward pass, and
the peak of both passes. Nothing is allocated: tensors are fake, and so is the process group.
Attention keeps what a fused kernel keeps.
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


class FusedAttention(torch.autograd.Function):
    """The estimator's, with a backward pass, and without the scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """Only shapes count."""
        output = torch.empty_like(query.transpose(1, 2))
        log_sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, log_sums, bias)
        return output

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        """A gradient for each input."""
        query, key, value, _, _, bias = ctx.saved_tensors
        inputs = (query, key, value, bias)
        return tuple(None if tensor is None else torch.empty_like(tensor) for tensor in inputs)


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None,
    position_bias: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """As the estimator has it."""
    if position_bias is not None:
        padding = torch.empty(query.size(0), 1, 1, key.size(2), dtype=torch.bool)
        position_bias = torch.where(padding, position_bias, 0.0)
    return FusedAttention.apply(query, key, value, position_bias), None


def place_on_cpu(model: torch.nn.Module) -> None:
    """Give what is on meta fake storage; tied parameters stay one."""
    placed: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in placed:
                fake = torch.empty(parameter.shape, dtype=parameter.dtype)
                placed[parameter] = torch.nn.Parameter(fake, parameter.requires_grad)
            setattr(module, key, placed[parameter])
        for key, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, key, torch.empty(buffer.shape, dtype=buffer.dtype))


def main() -> None:
    """One micro-batch of one sequence, as the estimator assumes by default, with recomputation as
    the script has it."""
    name, ranks = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    config = memory_estimator.load_config(name)
    flags = memory_estimator.parse_args(["--model-name", name, *sys.argv[3:]])
    script = memory_estimator.load_script(flags, config)
    AttentionInterface.register("fused", attention)
    AttentionMaskInterface.register("fused", lambda **_: None)
    config._attn_implementation = "fused"
    args = Namespace(strategy="full_shard", precision="bf16", cpu_offload=False)
    mesh = policies.device_mesh(args, CPU)  # its collectives must not be fake
    policies.device_mesh = lambda *_: mesh
    length = memory_estimator.LENGTHS[config.model_type]
    with torch.device("meta"):
        model = memory_estimator.model_class(script)(config)
    policies.fuse_gelu(model)
    if flags.lora_rank:
        memory_estimator.add_adapters(flags, script, model, torch.bfloat16)
    with FakeTensorMode():
        place_on_cpu(model)
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
        batch = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "decoder_input_ids": target,
            "position_ids": ids,
            "cu_seq_lens": ids,
            "longest_document": length,
            "labels": target,
            "target_positions": torch.arange(length),  # the most there can be
        }
        tracker = FSDPMemTracker(model)
        tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
        tracker.track_inputs(tuple(tensors))
        with tracker:
            script.summed_loss(model, batch).backward()
        (now,) = tracker.get_tracker_snapshot("current").values()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    bytes_of = {str(key).rpartition(".")[2]: value for key, value in now.items()}
    found = {
        "parameters": bytes_of["SHARDED_PARAM"],
        "gradients": bytes_of["SHARDED_GRAD"],
        "peak": peak["Total"],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
