"""A number of exact answers, in llama_fsdp.py with --attention sdpa. Copy optional/rouge.py, too.

<!-- exact answers -->
```diff
 import optional.paged as paged  # optional: paged
+import optional.rouge as rouge
+from exact_answers import share_of_exact_answers
```

```diff
     run: Run = field(default_factory=lambda: replace(RUN))
+    summaries: rouge.Rouge = field(default_factory=rouge.Rouge)
```

```diff
-    return mean_losses(totals)
+    rows = val_sets[min(val_sets)].dataset.take(20)
+    exact = share_of_exact_answers(args, device, model, rows)
+    return mean_losses(totals) | {"exact": exact}
```
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import optional.rouge as rouge


def share_of_exact_answers(
    args: Any, device: torch.device, model: nn.Module, rows: Sequence[dict]
) -> float:
    """Return the share of samples of llama_fsdp.py whose answer the model generates, token by
    token, from the tokens before it. Call on all ranks."""
    correct = 0
    with rouge.generation(args, device, model) as generate:
        for row in rows:
            ids = torch.tensor(row["input_ids"])[None]
            start = int((torch.as_tensor(row["labels"]) == -100).sum())
            prompt = {"input_ids": ids[:, :start], "attention_mask": torch.ones(1, start)}
            correct += torch.equal(generate(prompt, ids.shape[1] - start).cpu(), ids)
    return correct / len(rows)
