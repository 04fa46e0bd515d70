"""An exponential moving average of the weights.

<!-- ema -->
```diff
+    ema = Ema(model)
     names = weights.saved_names(model)
```

```diff
         checkpoint.load(newest, model, names, optimizers, state)
+        checkpoint.read(newest, checkpoint.extra_state("ema", ema.state_dict()))
```

```diff
         scaler.update()
+        ema.update(model)
```

```diff
             tensors = snapshot(model, names, optimizers, state)
+            tensors |= checkpoint.extra_state("ema", ema.state_dict())
```

```diff
                 grad_norm=grad_norm,
+                updates=ema.count,
```

```diff
 from core.checkpoint import State, save, snapshot
+from ema import Ema
```
"""

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
