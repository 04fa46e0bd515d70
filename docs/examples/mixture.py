"""Data sets in fixed shares, here 3:1, in gpt2_fsdp.py with two names after --dataset.

<!-- mixture -->
```diff
 import policies
+import mixture
```

```diff
-    load = partial(block_dataset.load, args.data, tokenizer)
+    load = partial(mixture.load, block_dataset.load, args.data, tokenizer)
```

```diff
     sampler = StepSampler(len(train_set), optim)  # the same order on any ranks
+    sampler.order = partial(mixture.order, train_set.lengths, (3, 1))
```
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from datasets import concatenate_datasets
from torch import Tensor


def load(load_one: Callable, args: Any, tokenizer: Any, **options: bool) -> tuple:
    """Load each --dataset by itself. Return the training sets joined, with their `lengths`, or None
    if only validations need data; and the validation sets by name."""
    parts = [
        load_one(replace(args, dataset=(name,)), tokenizer, **options) for name in args.dataset
    ]
    validation = {}
    for _, sets in parts:
        validation |= sets
    training = [samples for samples, _ in parts if samples is not None]
    if not training:
        return None, validation
    joined = concatenate_datasets(training).with_format("numpy")
    joined.lengths = [len(samples) for samples in training]
    return joined, validation


def order(lengths: Sequence[int], shares: Sequence[float], generator: torch.Generator) -> Tensor:
    """Return the samples of an epoch, drawn from joined data sets in fixed shares, int [all]. Of
    each set, they are whole permutations and a part of one: an epoch repeats the samples of a set
    whose share is above its size, and lacks some of the others. Like any order, this is a function
    of seed and epoch, so a resume continues it."""
    parts = []
    first = 0  # the index of a source's first sample
    drawn = 0
    share = 0.0  # of the sources so far
    for length, own_share in zip(lengths, shares, strict=True):
        share += own_share / sum(shares)
        count = round(share * sum(lengths)) - drawn
        passes = max(1, math.ceil(count / length))
        orders = [torch.randperm(length, generator=generator) for _ in range(passes)]
        parts.append(first + torch.cat(orders)[:count])
        first += length
        drawn += count
    samples = torch.cat(parts)
    return samples[torch.randperm(len(samples), generator=generator)]
