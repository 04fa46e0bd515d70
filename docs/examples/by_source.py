"""The training loss of each source, in T5_training.py: here two, by the samples' key `source`. The
sums are not saved: the first line after a resume has the steps since then.

<!-- by source -->
```diff
 import policies
+from by_source import BySource
```

```diff
+BY_SOURCE = BySource(2)
+
+
 def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
```

```diff
-    inputs = {name: x for name, x in batch.items() if name not in ("labels", "targets", "tokens")}
+    others = ("labels", "targets", "tokens", "sources")
+    inputs = {name: x for name, x in batch.items() if name not in others}
```

```diff
-    return token_loss(logits.flatten(0, 1).float(), batch["labels"].flatten())
+    rows = zip(logits.float(), batch["labels"], strict=True)
+    losses = torch.stack([token_loss(row, labels) for row, labels in rows])
+    if model.training:
+        BY_SOURCE.add(losses.detach(), batch)
+    return losses.sum()
```

```diff
     collate = summarization_dataset.collator(model)
+    collate = BySource.collator(collate, lambda sample: sample.get("source", 0))
```

```diff
                 grad_norm=grad_norm,
+                losses=BY_SOURCE.means(),
```
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


class BySource:
    """Sums losses and counts targets by source."""

    def __init__(self, sources: int) -> None:
        self.totals = torch.zeros(sources, 2)  # the loss and the targets of each

    @staticmethod
    def collator(collate: Callable, source_of: Callable[[dict], int]) -> Callable:
        """Return `collate` with the key `sources` in its batches, int64 [batch]."""

        def collate_sources(samples: list[dict]) -> dict:
            sources = [source_of(sample) for sample in samples] or [0]
            return collate(samples) | {"sources": torch.tensor(sources)}

        return collate_sources

    def add(self, losses: Tensor, batch: dict) -> None:
        """Add the losses [batch] of a batch's samples."""
        counts = (batch["labels"] != -100).sum(dim=1)
        values = torch.stack([losses, counts.to(losses.dtype)], dim=1)
        self.totals = self.totals.to(losses.device).index_add(0, batch["sources"], values)

    def means(self) -> list[float]:
        """Return the mean loss per target of each source, over all ranks since the last call. Call
        on all ranks."""
        dist.all_reduce(self.totals)
        losses, counts = self.totals.unbind(dim=1)
        means = (losses / counts).tolist()
        self.totals.zero_()
        return means
