"""Compute gradients of a small model in DDP's buckets under torchrun, for test_gradients.py.

    gradients_worker.py RESULT.pt MODEL_DIRECTORY OUTPUT_DIR

Rank 0 writes the results of `in_buckets` on all ranks.
"""

import copy
import os
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests")]

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from ten_steps import storage_bytes
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gpt2_fsdp
import policies
from benchmarks.driven import parse_flags
from runtime import ranks, weights
from runtime.chunked_loss import LossHead

IN_BUCKETS = {
    "one micro-batch": [],
    "accumulated": ["--gradient-accumulation-steps", "2"],
    "accumulated without sync": ["--gradient-accumulation-steps", "2", "--accumulate-no-sync"],
}


def head_gradient_error(device: str) -> float:
    """Return the relative error of the head's bf16 gradient, compared with fp32, for the row of the
    most common target: 500 of 4,096 tokens.

    As after some training, the head predicts roughly the frequency of each target and the hidden
    states have a nonzero mean. The row is then a small difference of large sums. Rounding these to
    bf16 after each token causes an error of 1 to 50%.
    """
    torch.manual_seed(0)
    tokens, width, vocabulary, common = 4096, 64, 512, 500
    rare = 1 + torch.multinomial(1 / torch.arange(1.0, vocabulary), tokens - common, True)
    targets = F.pad(rare, (common, 0))[torch.randperm(tokens)]
    frequency = torch.bincount(targets, minlength=vocabulary) + 0.1
    weight = 0.02 * torch.randn(vocabulary, width) + frequency.log()[:, None] / width
    hidden, weight = (1 + torch.randn(tokens, width) / 2).bfloat16(), weight.bfloat16()
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        head = nn.Linear(width, vocabulary, bias=False)
        states = hidden.to(device, dtype).requires_grad_()  # as in training
        head = LossHead(head, transformers.GPT2Config(), gpt2_fsdp.token_loss).to(device, dtype)
        head.weight.data.copy_(weight)
        loss = head(states, targets.to(device))
        (loss / tokens).backward()
        rows.append(head.weight.grad[0].float())
    fp32, bf16 = rows
    return ((bf16 - fp32).norm() / fp32.norm()).item()


def backward(args: Namespace, model: nn.Module, step: int) -> float:
    """Run a step's micro-batches forward and backward, and return the sum of their losses."""
    total = 0.0
    device = weights.unwrapped(model).device
    count = args.gradient_accumulation_steps
    pairs = []
    for number in range(count):
        seed = 100 * step + 10 * number + dist.get_rank()
        ids = torch.randint(3, 300, (2, 16), generator=torch.Generator().manual_seed(seed))
        pairs.append((ids.to(device), number == count - 1))
    batches = SimpleNamespace(micro_batches=lambda: pairs)
    for ids in policies.micro_batches(model, batches, args.accumulate_no_sync):
        with policies.autocast(model, args.precision):
            loss = model(input_ids=ids, use_cache=False).logits.float().logsumexp(-1).mean()
        loss.backward()
        total += loss.item()
    return total


def in_buckets(args: Namespace, model: nn.Module) -> dict:
    """Make three DDP steps with the script's wrapping and three with plain DDP. Return for each the
    losses, norms and weights, and the number and bytes of the gradients' storages."""
    policies.fuse(model)  # as the script does
    plain = DDP(copy.deepcopy(model))
    results = {}
    for name, wrapped in (
        ("ours", gpt2_fsdp.wrap_model(args, ranks.local_device(), model, lambda _: None)),
        ("plain", plain),
    ):
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2, fused=True)
        losses, norms = [], []
        for step in range(3):
            losses.append(backward(args, wrapped, step))
            norms.append(policies.clip_gradients(wrapped, 0.5))
            optimizer.step()
            gradients = [p.grad for p in wrapped.parameters()]
            storages = {gradient.untyped_storage().data_ptr() for gradient in gradients}
            optimizer.zero_grad()
        results[name] = losses, norms, [p.detach() for p in wrapped.parameters()]
        results[f"{name}, storages"] = len(storages), storage_bytes(gradients)
    return results


def main() -> None:
    """Run every variant in one process group."""
    result, directory, output = sys.argv[1:]
    common = ["--model-name", directory, "--output-dir", output, "--precision", "fp32"]
    gpt2_fsdp.setup(parse_flags(gpt2_fsdp, common))
    model = gpt2_fsdp.MODEL.from_pretrained(directory, dtype=torch.float32)
    results: dict = {}
    for name, flags in IN_BUCKETS.items():
        args = parse_flags(gpt2_fsdp, [*common, *flags, "--strategy", "ddp"])
        results[f"in buckets, {name}"] = in_buckets(args, copy.deepcopy(model))
    all_ranks = ranks.on_every_rank(lambda: results)
    if dist.get_rank() == 0:
        torch.save(all_ranks, result)
    gpt2_fsdp.cleanup()


if __name__ == "__main__":
    main()
    os._exit(0)  # as the scripts do
