"""Parameter groups, the learning-rate schedule, and the check that a step was finite."""

import math
import re
from argparse import Namespace

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from . import ranks
from .checkpoints import TrainState


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """AdamW's groups of what is trained: biases and norms have no weight decay.

    They are told by their names, since FSDP's shards are all one-dimensional.
    """
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if re.search(r"(\.bias|norm\w*\.weight|ln_\w+\.weight)$", name):
            others.append(parameter)
        else:
            decayed.append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def new_optimizer(args: Namespace, groups: list[dict]) -> Optimizer:
    """AdamW, of PyTorch, or of bitsandbytes where --optimizer asks for it."""
    if args.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=args.lr, fused=True)
    from .paged_adamw import PagedAdamW

    return PagedAdamW(groups, lr=args.lr)


def lr_schedule(
    args: Namespace, optimizer: Optimizer, total_steps: int, epoch_steps: int
) -> LambdaLR:
    """The learning rate by optimizer step: a warm-up, then the shape of --lr-schedule."""
    warmup = math.ceil(args.warmup_ratio * total_steps)

    def factor(step: int) -> float:
        if args.lr_schedule == "step":
            return args.gamma ** (step // epoch_steps)
        if step < warmup:
            return (step + 1) / (warmup + 1)  # no step is wasted on a rate of 0
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        if args.lr_schedule == "linear":
            return 1 - progress
        if args.lr_schedule == "cosine":
            return (1 + math.cos(math.pi * progress)) / 2
        return 1.0

    return LambdaLR(optimizer, factor)


def check_finite(
    state: TrainState, loss: torch.Tensor, grad_norm: torch.Tensor, samples: list[int]
) -> None:
    """End the run, on all ranks, if the gradient norm of the step under way is not finite.

    `loss` is this rank's share, `samples` are those of all ranks. fp16 may overflow: the scaler
    then skips the step and halves its scale. If that would fall below 1, the run ends too.
    """
    if grad_norm.isfinite():
        return
    reason = ""
    if state.scaler.is_enabled():
        if state.scaler.get_scale() * state.scaler.get_backoff_factor() >= 1:
            return
        reason = ", and the loss scale of fp16 would fall below 1"
    where = ranks.ranks_where(not loss.isfinite()) or "none"
    ranks.exit_with(
        f"step {state.step + 1}: gradient norm {grad_norm}, loss not finite on ranks {where}, "
        f"samples {samples}{reason}"
    )
