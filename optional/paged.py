"""The flag --optimizer: bitsandbytes' AdamW, which moves its moments to the CPU if needed.
Without this file, the moments of AdamW must fit next to the model, or need --cpu-offload."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

PAGED = "paged_adamw_32bit"
NAMES = {"state1": "exp_avg", "state2": "exp_avg_sq"}  # bitsandbytes' and PyTorch's, in fp32


@dataclass
class Paged:
    """Which optimizer updates the weights."""

    optimizer: Literal["adamw", PAGED] = "adamw"
    """paged: bitsandbytes' AdamW, moves moments to the CPU if needed; needs --fsdp 1"""

    def problems(self, args: Any) -> list[str]:
        """Return a message if --optimizer cannot run here."""
        if self.optimizer == PAGED and args.sharding.fsdp == 2:
            return [f"--optimizer {PAGED} needs --fsdp 1. bitsandbytes rejects DTensors."]
        return []


def replace(args: Paged, adamw: torch.optim.AdamW) -> torch.optim.Optimizer:
    """Return `adamw`, or bitsandbytes' paged AdamW in its place. Their state dicts are alike, so
    that FSDP can shard them and a checkpoint of one resumes with the other."""
    if args.optimizer != PAGED:
        return adamw
    from bitsandbytes.optim import PagedAdamW32bit

    class AdamW(PagedAdamW32bit):  # the name is part of a run's identity
        def update_step(self, group: dict, parameter: Tensor, *indices: int) -> None:
            if parameter.numel():  # a CUDA kernel for an empty shard would end the process
                super().update_step(group, parameter, *indices)

        def state_dict(self) -> dict[str, Any]:
            result = torch.optim.Optimizer.state_dict(self)
            state = {}
            for key, values in result["state"].items():
                state[key] = {torch_name: values[name] for name, torch_name in NAMES.items()}
                state[key]["step"] = torch.tensor(float(values["step"]))
            return result | {"state": state}

        @torch.no_grad()
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            for group_number, group in enumerate(self.param_groups):
                keys = state_dict["param_groups"][group_number]["params"]  # names or numbers
                for number, parameter in enumerate(group["params"]):
                    values = state_dict["state"].get(keys[number])
                    if values is None:  # this rank has no part of the parameter
                        continue
                    if parameter not in self.state:  # unified memory is never freed
                        self.init_state(group, parameter, group_number, number)
                    state = self.state[parameter]
                    state["step"] = int(values["step"])
                    for key, torch_name in NAMES.items():
                        state[key].copy_(values[torch_name])

    return AdamW(adamw.param_groups)
