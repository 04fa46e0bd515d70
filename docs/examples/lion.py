"""The optimizer Lion, for docs/change-a-script.md. It is not fused and takes no loss scaler."""

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """Steps by the sign of an interpolated momentum (Chen et al. 2023)."""

    def __init__(self, params, lr: float = 1e-4, betas=(0.9, 0.99), weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update each parameter that has a gradient."""
        for group in self.param_groups:
            one, two = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                momentum = state["exp_avg"]
                update = (one * momentum + (1 - one) * parameter.grad).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * update)
                momentum.mul_(two).add_(parameter.grad, alpha=1 - two)
