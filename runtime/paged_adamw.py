"""AdamW whose moments the GPU pages out to the CPU; importing this needs bitsandbytes.

The moments are in CUDA's unified memory, as in QLoRA (Dettmers et al. 2023). On a CPU they are
ordinary tensors.
"""

import warnings
from typing import Any

import torch
from bitsandbytes.optim import PagedAdamW32bit
from torch import Tensor, nn

warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")
NAMES = {"state1": "exp_avg", "state2": "exp_avg_sq"}  # bitsandbytes' and PyTorch's, fp32


class PagedAdamW(PagedAdamW32bit):
    """bitsandbytes' PagedAdamW32bit with the state dicts of PyTorch's AdamW, which FSDP can shard.

    So a checkpoint of one goes on with the other. bitsandbytes' own state dicts have numbers of
    steps that are no tensors, and moments that FSDP takes for settings.
    """

    def update_step(self, group: dict, parameter: Tensor, *place: int) -> None:
        """Update a parameter, unless this rank has nothing of it: a CUDA kernel of no blocks would
        end the process."""
        if parameter.numel():
            super().update_step(group, parameter, *place)

    def state_dict(self) -> dict[str, Any]:
        """Return AdamW's state dict: moments in fp32, shaped as this rank's part of the parameter
        and not copied, and `step`, a scalar in fp32 on the CPU."""
        whole = torch.optim.Optimizer.state_dict(self)
        state = {}
        for key, values in whole["state"].items():
            state[key] = {name: values[own] for own, name in NAMES.items()}
            state[key]["step"] = torch.tensor(float(values["step"]))
        defaults = torch.optim.AdamW([nn.Parameter(torch.empty(0))], fused=True).defaults
        groups = []
        for group in whole["param_groups"]:
            settings = {name: group.get(name, value) for name, value in defaults.items()}
            kept = {name: group[name] for name in ("params", "initial_lr") if name in group}
            groups.append(settings | kept)
        return {"state": state, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy AdamW's state into the moments, which are made if need be. Settings are kept."""
        for group_number, group in enumerate(self.param_groups):
            keys = state_dict["param_groups"][group_number]["params"]  # names, or numbers
            for number, parameter in enumerate(group["params"]):
                values = state_dict["state"].get(keys[number])
                if values is None:  # a rank may have nothing of a parameter
                    continue
                if parameter not in self.state:  # unified memory is never given back
                    self.init_state(group, parameter, group_number, number)
                state = self.state[parameter]
                state["step"] = int(values["step"])
                for own, name in NAMES.items():
                    state[own].copy_(values[name])
