"""Distillation of a teacher model with the same tokenizer, in T5_training.py. Each rank holds it
whole.

<!-- teacher -->
```diff
 import policies
+from teacher import Teacher
```

```diff
+TEACHER = Teacher()
+
+
 def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
```

```diff
-    return token_loss(logits.flatten(0, 1).float(), batch["labels"].flatten())
+    loss = token_loss(logits.flatten(0, 1).float(), batch["labels"].flatten())
+    return loss + TEACHER.loss(inputs, logits, batch["labels"])
```

```diff
+    TEACHER.load(MODEL.from_pretrained("google-t5/t5-large"), device)
     start = state.step
```
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Teacher:
    """A model whose logits are targets. It is no part of the trained model, so FSDP ignores it."""

    def load(self, model: nn.Module, device: torch.device) -> None:
        """Set the model, which must have the same vocabulary."""
        self.model = model.to(device).eval().requires_grad_(False)

    def loss(self, inputs: dict[str, Tensor], logits: Tensor, labels: Tensor) -> Tensor | int:
        """Return the divergence from the teacher, summed over the labels that are not -100; in
        validations 0."""
        if not torch.is_grad_enabled():
            return 0
        with torch.no_grad():
            expected = self.model(**inputs, use_cache=False).logits
        is_target = labels != -100
        own, other = (x[is_target].float().log_softmax(-1) for x in (logits, expected))
        return F.kl_div(own, other, reduction="sum", log_target=True)
