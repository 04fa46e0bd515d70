"""The state that a run trains, saves and restores: model, optimizer and counters."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

# Fields of TrainState that a checkpoint stores as JSON.
COUNTERS = ("step", "epoch", "consumed", "tokens", "best_loss", "best_step", "validation_due")
FLAGS = ("lr", "initial_lr", "momentum", "weight_decay")  # of param_groups: from flags or schedule


@dataclass
class TrainState:
    """The state of a run that a checkpoint stores: model, optimizer and counters."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler
    device: torch.device
    total_steps: int
    identity: dict[str, Any]  # values that all starts of the run must share, see identity.py
    others: dict[str, Any] = field(default_factory=dict)  # other objects with state, by name
    step: int = 0  # optimizer steps done
    epoch: int = 0
    consumed: int = 0  # samples of this epoch, of all ranks
    tokens: int = 0  # of all steps and ranks, without padding
    best_loss: float = float("inf")
    best_step: int = 0  # the step whose weights are in best/
    validation_due: bool = False  # the validation of this step was interrupted

    def __post_init__(self) -> None:
        self.initial_numbers = self.numbers()

    def numbers(self) -> list[dict[str, float]]:
        """Return the numbers in each of the optimizer's param_groups, except the settings."""
        return [
            {key: x for key, x in group.items() if isinstance(x, int | float) and key not in FLAGS}
            for group in self.optimizer.param_groups
        ]

    def changed_numbers(self) -> list[dict[str, float]]:
        """Return those that the optimizer has changed, such as a schedule-free one its `k`."""
        pairs = zip(self.numbers(), self.initial_numbers, strict=True)
        return [{k: x for k, x in now.items() if x != first.get(k)} for now, first in pairs]
