"""Run under torchrun by test_gradients.py: gradients of a small model in DDP's buckets.

    gradients_worker.py RESULT.pt MODEL_DIRECTORY OUTPUT_DIR

Writes what `in_buckets` returned, of all ranks.
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
from ten_steps import held
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gpt2_fsdp
import policies
from runtime import ranks, weights
from runtime.chunked_loss import LossHead

IN_BUCKETS = {
    "one micro-batch": [],
    "accumulated": ["--gradient-accumulation-steps", "2"],
    "accumulated without sync": ["--gradient-accumulation-steps", "2", "--accumulate-no-sync"],
}


def head_gradient_error(device: str) -> float:
    """Return the relative error of the head's gradient in bf16 against fp32, for the row of the
    commonest target: 500 of 4,096 tokens.

    The head predicts about the frequency of each target, and hidden states have a mean, as after
    some training. So the row is a small difference of large sums, and 1 to 50% off if these are
    rounded to bf16 after each token.
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
        states = hidden.to(device, dtype).requires_grad_()  # as those of a model in training
        head = LossHead(head, transformers.GPT2Config(), gpt2_fsdp.token_loss).to(device, dtype)
        head.weight.data.copy_(weight)
        loss = head(states, targets.to(device))
        (loss / tokens).backward()
        rows.append(head.weight.grad[0].float())
    exact, found = rows
    return ((found - exact).norm() / exact.norm()).item()


def backward(args: Namespace, model: nn.Module, step: int) -> float:
    """Add the gradients of the micro-batches of a step, and return the sum of their losses."""
    total = 0.0
    device = weights.unwrapped(model).device
    count = args.gradient_accumulation_steps
    pairs = []
    for number in range(count):
        seed = 100 * step + 10 * number + dist.get_rank()
        ids = torch.randint(3, 300, (2, 16), generator=torch.Generator().manual_seed(seed))
        pairs.append((ids.to(device), number == count - 1))
    made = SimpleNamespace(micro_batches=lambda: pairs)
    for ids in policies.micro_batches(args, model, made):
        with policies.autocast(args, device):
            loss = model(input_ids=ids, use_cache=False).logits.float().logsumexp(-1).mean()
        loss.backward()
        total += loss.item()
    return total


def in_buckets(args: Namespace, model: nn.Module) -> dict:
    """Return losses, norms and weights of three DDP steps as the script wraps, and with separate
    gradients; and the storages of the gradients."""
    policies.fuse_gelu(model)  # as the script does
    plain = DDP(copy.deepcopy(model))
    found = {}
    for who, wrapped in (
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
        found[who] = losses, norms, [p.detach() for p in wrapped.parameters()]
        found[f"{who}, storages"] = len(storages), held(gradients)
    return found


def main() -> None:
    """Try every variant in one process group."""
    result, directory, output = sys.argv[1:]
    common = ["--model-name", directory, "--output-dir", output, "--precision", "fp32"]
    gpt2_fsdp.setup(gpt2_fsdp.parse_args(common))
    made = gpt2_fsdp.MODEL.from_pretrained(directory, dtype=torch.float32)
    found: dict = {}
    for name, flags in IN_BUCKETS.items():
        args = gpt2_fsdp.parse_args([*common, *flags, "--strategy", "ddp"])
        found[f"in buckets, {name}"] = in_buckets(args, copy.deepcopy(made))
    everyone = ranks.on_every_rank(lambda: found)
    if dist.get_rank() == 0:
        torch.save(everyone, result)
    gpt2_fsdp.cleanup()


if __name__ == "__main__":
    main()
    os._exit(0)  # as the scripts do, and why
