"""AdamW's parameter groups, and the learning rate by step."""

import math
from argparse import Namespace
from collections.abc import Callable

from torch import nn

from .weights import WRAPPERS, unwrapped


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Return groups of the trained parameters for an optimizer, with and without weight decay.

    Norms, biases and one-dimensional parameters are not decayed. FSDP1 flattens parameters, so the
    shapes are those that `run.describe` stored.
    """
    inner = unwrapped(model)
    if not hasattr(inner, "shapes"):
        raise RuntimeError("Call run.describe(model, tokenizer) before wrapping the model.")
    norms = set()  # prefixes of the names of their parameters
    for name, module in inner.named_modules():
        if "norm" in type(module).__name__.lower():
            norms.add(WRAPPERS.sub("", f"{name}."))
    decayed, others = [], []
    for name, parameter in inner.named_parameters():
        if not parameter.requires_grad:
            continue
        name = WRAPPERS.sub("", name)
        module, _, key = name.rpartition(".")
        is_bias = key == "bias" or key.endswith("_bias")
        if len(inner.shapes[name]) > 1 and not is_bias and f"{module}." not in norms:
            decayed.append(parameter)
        else:
            others.append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def learning_rate(args: Namespace, total_steps: int, epoch_steps: int) -> Callable[[int], float]:
    """Return a function from optimizer step to factor of --lr: a warm-up, then --lr-schedule."""
    warmup = args.warmup_steps or math.ceil(args.warmup_ratio * total_steps)

    def factor(step: int) -> float:
        if args.lr_schedule == "step":
            return args.gamma ** (step // epoch_steps)
        if step < warmup:
            return (step + 1) / (warmup + 1)  # the first step has a rate above 0
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        if args.lr_schedule == "linear":
            return 1 - progress
        if args.lr_schedule == "cosine":
            return (1 + math.cos(math.pi * progress)) / 2
        return 1.0

    return factor
