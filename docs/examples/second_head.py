"""A second head, here for the token after the next one, in gpt2_fsdp.py. It begins as `__init__`
makes it, and final/ has it; Transformers ignores it.

<!-- second head -->
```diff
 import policies
+from second_head import second_loss
```

```diff
         self.set_output_embeddings(LossHead(self.get_output_embeddings(), config, token_loss))
+        self.second = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
```

```diff
-        return self.get_output_embeddings()(hidden.flatten(0, 1), targets.flatten())
+        second = second_loss(self.second, hidden, targets)
+        return self.get_output_embeddings()(hidden.flatten(0, 1), targets.flatten()) + second
```
"""

import torch.nn.functional as F
from torch import Tensor, nn


def second_loss(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of a head, summed over the targets [batch, length] of the next positions."""
    logits = head(hidden[:, :-1]).flatten(0, 1).float()
    return F.cross_entropy(logits, targets[:, 1:].flatten(), reduction="sum")
