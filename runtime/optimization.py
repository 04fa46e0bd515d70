"""Parameter groups, the learning-rate schedule, and the check that a step was good."""

import math
import os
from argparse import Namespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from . import ranks
from .checkpoints import TrainState
from .hf_weights import WRAPPERS


def note_decay(model: nn.Module) -> None:
    """Set `model.decayed`, the names of the parameters that get weight decay.

    None is there for norms, for biases, and for what is one-dimensional. Call it before wrapping,
    for FSDP1's shards are all one-dimensional.
    """
    norms = {name for name, x in model.named_modules() if "norm" in type(x).__name__.lower()}
    model.decayed = set()
    for name, parameter in model.named_parameters():
        module, _, key = name.rpartition(".")
        is_bias = key == "bias" or key.endswith("_bias")
        if parameter.dim() > 1 and not is_bias and module not in norms:
            model.decayed.add(name)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """AdamW's groups of what is trained, with and without weight decay, as `note_decay` found."""
    inner = next(module for module in model.modules() if hasattr(module, "decayed"))
    decayed, others = [], []
    for name, parameter in inner.named_parameters():
        if not parameter.requires_grad:
            continue
        if WRAPPERS.sub("", name) in inner.decayed:
            decayed.append(parameter)
        else:
            others.append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def new_optimizer(args: Namespace, groups: list[dict]) -> Optimizer:
    """AdamW, of PyTorch, or of bitsandbytes where --optimizer asks for it."""
    if args.cpu_offload and os.environ.get("OMP_NUM_THREADS") == "1":  # so torchrun sets it
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
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


class HostCopy:
    """Numbers of the device, on their way to the host."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers.to("cpu", non_blocking=True)  # which is in pinned memory
        self._arrived = None
        if numbers.device.type != "cpu":
            self._arrived = torch.Event(numbers.device)
            self._arrived.record()

    def read(self) -> list[Any]:
        """Wait for the numbers, but not for what the device has been given to do since."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._numbers.tolist()


class StepCheck:
    """A step that is under way on the device, to be checked when the host can know how it went.

    Such a step changes nothing if it is bad, see `TrainState.optimizer_step`.
    """

    def __init__(
        self, state: TrainState, samples: list[int], counts: HostCopy, loss: Tensor,
        grad_norm: Tensor,
    ):  # fmt: skip
        self.state = state
        self.step = state.step + 1
        self.samples = samples  # of all ranks
        self.counts = counts  # of all ranks; the first is that of target tokens
        self.numbers = HostCopy(torch.stack([loss, grad_norm.to(loss)]))  # this rank's share, all's

    def check(self) -> None:
        """End the run, on all ranks, if the step had no targets, or no finite gradient norm.

        fp16 may overflow: then the scale was halved. If it is below 1, the run ends too.
        """
        if self.counts.read()[0] == 0:
            ranks.exit_with(f"step {self.step} has no target tokens, in samples {self.samples}")
        loss, grad_norm = self.numbers.read()
        if math.isfinite(grad_norm):
            return
        reason = ""
        scaler = self.state.scaler
        if scaler.is_enabled():
            if scaler.get_scale() >= 1:
                return
            reason = ", and the loss scale of fp16 would fall below 1"
        where = ranks.ranks_where(not math.isfinite(loss)) or "none"
        ranks.exit_with(
            f"step {self.step}: gradient norm {grad_norm}, loss not finite on ranks {where}, "
            f"samples {self.samples}{reason}"
        )
