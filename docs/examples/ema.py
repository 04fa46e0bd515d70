"""An exponential moving average of the weights; docs/change-a-script.md adds it to a script."""

import torch
from torch import nn


class Ema:
    """Averages this rank's shards of the parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.average = [parameter.detach().clone() for parameter in model.parameters()]
        self.count = torch.tensor(0)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the average towards the weights."""
        self.count += 1
        for average, parameter in zip(self.average, model.parameters(), strict=True):
            average.lerp_(parameter, 0.1)

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Replace the weights by the average."""
        for average, parameter in zip(self.average, model.parameters(), strict=True):
            parameter.copy_(average)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the average and the number of updates."""
        return {f"average.{i}": x for i, x in enumerate(self.average)} | {"count": self.count}
