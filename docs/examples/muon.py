"""Muon for the blocks' matrices, AdamW for the rest, in gpt2_fsdp.py --fsdp 2. On several ranks,
the host limits Muon: about 13 collectives per matrix.

<!-- muon -->
```diff
 import policies
+from muon import take_matrices
```

```diff
+    matrices = take_matrices(model, groups)
     optimizers = [torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, fused=True)]
+    muon = torch.optim.Muon(
+        matrices, lr=optim.lr, weight_decay=optim.weight_decay, adjust_lr_fn="match_rms_adamw"
+    )
+    optimizers.append(muon)
```
"""

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from core.ranks import Problem


def take_matrices(model: nn.Module, groups: list[dict]) -> list[Tensor]:
    """Move the matrices of the blocks from the parameter groups to a list, which has the same order
    on all ranks: a set would not. Raise Problem for another wrapper than FSDP2."""
    if not isinstance(model, FSDPModule):
        raise Problem("Muon needs whole matrices. Pass --fsdp 2.")
    matrices = [p for name, p in model.named_parameters() if ".h." in name and p.ndim == 2]
    chosen = set(matrices)
    for group in groups:
        group["params"] = [p for p in group["params"] if p not in chosen]
    return matrices
