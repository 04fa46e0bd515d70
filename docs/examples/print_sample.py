"""A sample at each validation, in gpt2_fsdp.py. Copy optional/rouge.py, too: on several ranks, all
must generate together, and FSDP1's root must be gathered around it.

<!-- sample -->
```diff
 import policies
+from print_sample import print_sample
```

```diff
     stop = StopRequest()
+    model.tokenizer = tokenizer
```

```diff
         log.write("val", **results)
+        print_sample(args, device, model, "The ")
```
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import optional.rouge as rouge
from core.ranks import print0


def print_sample(args: Any, device: torch.device, model: nn.Module, prompt: str) -> None:
    """Print 40 tokens that continue a prompt. Call on all ranks."""
    tokenizer = model.tokenizer
    greedy = SimpleNamespace(num_beams=1)
    options = SimpleNamespace(sharding=args.sharding, summaries=greedy)
    batch = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    with rouge.generation(options, device, model) as generate:
        tokens = generate(batch, 40)[0]
    print0(f"sample: {tokenizer.decode(tokens)!r}")
