"""The flag --optimizer: bitsandbytes' AdamW, which moves its moments to the CPU if needed."""

import importlib.util
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .options import INSTALL, flag

PAGED = "paged_adamw_32bit"
NAMES = {"state1": "exp_avg", "state2": "exp_avg_sq"}  # bitsandbytes' and PyTorch's, in fp32


@dataclass
class Options:
    """optimizer"""

    optimizer: Literal["adamw", PAGED] = flag("adamw", "paged: bitsandbytes' AdamW, moves moments "
        "to the CPU if needed; needs --fsdp 1")  # fmt: skip

    def problems(self) -> list[str]:
        """Return a message if --optimizer cannot run here."""
        if self.optimizer == PAGED and self.fsdp == 2:
            return [f"--optimizer {PAGED} needs --fsdp 1. bitsandbytes rejects DTensors."]
        if self.optimizer == PAGED and not importlib.util.find_spec("bitsandbytes"):
            return [f"--optimizer {PAGED} needs bitsandbytes. {INSTALL}"]
        return []


def make_optimizer(groups: list[dict], lr: float) -> torch.optim.Optimizer:
    """Return bitsandbytes' paged AdamW with the state dicts of PyTorch's AdamW, which FSDP can
    shard, so that a checkpoint of one resumes with the other."""
    from bitsandbytes.optim import PagedAdamW32bit

    class PagedAdamW(PagedAdamW32bit):
        def update_step(self, group: dict, parameter: Tensor, *indices: int) -> None:
            if parameter.numel():  # a CUDA kernel for an empty shard would end the process
                super().update_step(group, parameter, *indices)

        def state_dict(self) -> dict[str, Any]:
            result = torch.optim.Optimizer.state_dict(self)
            state = {}
            for key, values in result["state"].items():
                state[key] = {torch_name: values[name] for name, torch_name in NAMES.items()}
                state[key]["step"] = torch.tensor(float(values["step"]))
            defaults = torch.optim.AdamW([nn.Parameter(torch.empty(0))], fused=True).defaults
            for group in result["param_groups"]:
                for name in group.keys() - defaults.keys() - {"params", "initial_lr"}:
                    del group[name]
                group |= {name: x for name, x in defaults.items() if name not in group}
            return result | {"state": state}

        @torch.no_grad()
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            for group_number, group in enumerate(self.param_groups):
                keys = state_dict["param_groups"][group_number]["params"]  # names or numbers
                for number, parameter in enumerate(group["params"]):
                    values = state_dict["state"].get(keys[number])
                    if values is None:
                        continue  # this rank has no part of the parameter
                    if parameter not in self.state:  # unified memory is never freed
                        self.init_state(group, parameter, group_number, number)
                    state = self.state[parameter]
                    state["step"] = int(values["step"])
                    for key, torch_name in NAMES.items():
                        state[key].copy_(values[torch_name])

    return PagedAdamW(groups, lr=lr)
