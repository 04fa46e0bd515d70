"""Augmented training batches; those of validations stay. Here, a tenth of the input tokens is
hidden. With any --num-workers, random numbers of PyTorch, NumPy and Python depend on --seed, rank
and step only. Samples themselves must stay the same whenever they are read.

<!-- augmentation -->
```diff
 import policies
+from augment import hide_tokens
```

```diff
-        MicroBatches(train_set, sampler, collate, optim),
+        MicroBatches(train_set, sampler, partial(hide_tokens, collate=collate), optim),
```
"""

from collections.abc import Callable

import torch


def hide_tokens(samples: list, collate: Callable) -> dict:
    """Return the batch of samples, with a tenth of the input tokens replaced by token 3."""
    batch = collate(samples)
    is_hidden = torch.rand(batch["input_ids"].shape) < 0.1
    return batch | {"input_ids": batch["input_ids"].masked_fill(is_hidden, 3)}
