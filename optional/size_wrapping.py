"""FSDP units by size: `--wrap size:N`. Without this file, each block of the model is a unit."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy


@dataclass
class Units:
    """Which modules are gathered at once."""

    wrap: str = "block"
    """FSDP units: block, or size:N for modules with at least N parameters"""

    def problems(self, args: Any) -> list[str]:
        """Return a message if --wrap cannot be used."""
        if not re.fullmatch(r"block|size:\d+", self.wrap):
            return [f"--wrap {self.wrap} is neither block nor size:N."]
        if self.wrap != "block" and args.sharding.fsdp == 2:
            return ["--wrap size:N needs --fsdp 1."]
        return []


def choose(units: Units, model: nn.Module, block_policy: Callable) -> Callable:
    """Return the auto-wrap policy that --wrap asks for, or `block_policy`. The embedding and the
    head share a weight, so both must be in the root unit."""
    if units.wrap == "block":
        return block_policy
    smallest = int(units.wrap.removeprefix("size:"))
    tied = model.get_output_embeddings().weight

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        """Return whether FSDP wraps a module: if it has `smallest` parameters or more."""
        is_large = size_based_auto_wrap_policy(module, recurse, nonwrapped_numel, smallest)
        return is_large and (recurse or tied not in set(module.parameters()))

    return policy
