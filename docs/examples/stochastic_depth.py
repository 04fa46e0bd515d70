"""Stochastic depth: a block's change of a sample is dropped at random, on each rank for itself. All
ranks run the same units in the same order: a block that one rank skips would hang FSDP, because
others wait for that rank in its all-gather. So each block runs, and its result is dropped.

<!-- stochastic depth -->
```diff
 import policies
+import stochastic_depth
```

```diff
     mesh = policies.device_mesh(device, sharding, args.run.timeout_minutes)
+    stochastic_depth.add(model, blocks, rate=0.1)
```
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def add(model: nn.Module, blocks: tuple[type[nn.Module], ...], rate: float) -> None:
    """Drop the results of modules of the classes `blocks` at a rate. Call before wrapping."""
    for module in model.modules():
        if isinstance(module, blocks):
            module.forward = partial(drop, module, module.forward, rate)


def drop(
    module: nn.Module, forward: Callable, rate: float, hidden: Tensor, *inputs: Any, **options: Any
) -> Tensor:
    """Return a block's result [batch, length, width] for `hidden`, in training with its change of
    some samples dropped, of the others divided by the rate of those that are kept."""
    result = forward(hidden, *inputs, **options)
    if not module.training:
        return result
    kept = torch.rand(len(hidden), 1, 1, device=hidden.device) >= rate
    return hidden + (result - hidden) * kept / (1 - rate)
