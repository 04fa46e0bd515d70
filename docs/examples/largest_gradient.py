"""The largest element of the gradient, before clipping, as a statistic to log.

<!-- largest gradient -->
```diff
 import policies
+from largest_gradient import largest_gradient
```

```diff
+        largest = largest_gradient(model, device)
         grad_norm = policies.clip_gradients(model, optim.max_grad_norm)
```

```diff
                 grad_norm=grad_norm,
+                largest=largest,
```
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


def largest_gradient(model: nn.Module, device: torch.device) -> Tensor:
    """Return the largest absolute element of all ranks' shards, which are combined because each
    rank has only its own. Call on all ranks."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    shards = [x.to_local() if hasattr(x, "to_local") else x for x in gradients]
    shards = [x for x in shards if x.numel() > 0]
    largest = nn.utils.get_total_norm(shards, norm_type=torch.inf).to(device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest
