"""Only new rows of the embedding (and of a tied head) are trained, those of added tokens. Wrapping
would drop a gradient hook.

<!-- new rows -->
```diff
 import policies
+from new_rows import keep_rows
```

```diff
     groups = parameter_groups(model, shapes, optim.weight_decay)
+    rows = weights.unwrapped(model).get_input_embeddings().weight
+    for group in groups:
+        group["params"] = [parameter for parameter in group["params"] if parameter is not rows]
+    groups.append({"params": [rows], "weight_decay": 0.0})
```

```diff
+        keep_rows(model, 50257)
         grad_norm = policies.clip_gradients(model, optim.max_grad_norm)
```
"""

import math

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor

from core.weights import unwrapped


def keep_rows(model: nn.Module, count: int) -> None:
    """Set the gradients of the first `count` rows of a wrapped model's embedding to 0, before they
    are clipped. Call on all ranks."""
    embedding = unwrapped(model).get_input_embeddings()
    if isinstance(model, FSDP) and model.sharding_strategy != ShardingStrategy.NO_SHARD:
        unit = embedding if isinstance(embedding, FSDP) else model
        # A shard may begin within a row, so gather the gradient.
        with FSDP.summon_full_params(unit, recurse=False, with_grads=True):
            embedding.weight.grad[:count] = 0
        return
    rows = embedding.weight.grad
    if isinstance(rows, DTensor):  # the last dimension of the mesh shards rows
        mesh = rows.device_mesh
        count -= math.ceil(len(rows) / mesh.size(-1)) * mesh.get_local_rank(-1)
        rows = rows.to_local()
    rows[: max(0, count)] = 0
