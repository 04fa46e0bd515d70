"""Weights of samples, in T5_training.py: here their key `weight`. Let the mean be 1.

<!-- weights -->
```diff
 import policies
+import weighted
```

```diff
-    inputs = {name: x for name, x in batch.items() if name not in ("labels", "targets", "tokens")}
+    others = ("labels", "targets", "tokens", "weights")
+    inputs = {name: x for name, x in batch.items() if name not in others}
```

```diff
-    return token_loss(logits.flatten(0, 1).float(), batch["labels"].flatten())
+    rows = zip(batch["weights"], logits.float(), batch["labels"], strict=True)
+    return sum(weight * token_loss(row, labels) for weight, row, labels in rows)
```

```diff
     collate = summarization_dataset.collator(model)
+    collate = weighted.collator(collate, lambda sample: sample.get("weight", 1.0))
```
"""

from collections.abc import Callable

import torch


def collator(collate: Callable, weight_of: Callable[[dict], float]) -> Callable:
    """Return `collate` with the key `weights` in its batches, fp32 [batch]."""

    def collate_weights(samples: list[dict]) -> dict:
        weights = [weight_of(sample) for sample in samples] or [1.0]
        return collate(samples) | {"weights": torch.tensor(weights)}

    return collate_weights
