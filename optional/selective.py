"""Selective recomputation. Without this file, blocks are recomputed as a whole or not at all."""

import functools
import itertools
from typing import Any

from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers.pytorch_utils import Conv1D


def keep(model: nn.Module, blocks: tuple[type[nn.Module], ...], kind: str) -> None:
    """Keep some results of the blocks that policies.checkpoint_blocks recomputes, if `kind` is
    selective."""
    if kind != "selective":
        return
    for block in model.modules():
        if isinstance(block, blocks):
            contexts = functools.partial(selective_contexts, count_products(block))
            block.forward = functools.partial(block.forward, context_fn=contexts)


def count_products(block: nn.Module) -> int:
    """Return the number of modules in a block that compute a matrix product."""
    return sum(isinstance(layer, nn.Linear | Conv1D) for layer in block.modules())


def is_product_kept(number: int, count: int) -> bool:
    """Return whether selective recomputation keeps the result of a matrix product, counted from 1,
    of `count` in a block: every second, counted from both ends. The last is never recomputed."""
    if 2 * number <= count:
        return number % 2 == 1
    return (count - number) % 2 == 1


def has_dropout(kernel: Any, inputs: tuple, options: dict) -> bool:
    """Return whether an attention kernel draws random numbers for these arguments."""
    schema = getattr(kernel, "_schema", None)  # flex_attention has neither a schema nor dropout
    names = [argument.name for argument in schema.arguments] if schema else []
    arguments = dict(zip(names, inputs, strict=False)) | options
    return bool(arguments.get("dropout_p"))


def selective_contexts(count: int) -> Any:
    """Return contexts for the forward pass of a block of `count` matrix products and for its
    recomputation, which keep the results of some products, and of attention kernels that draw no
    random numbers: the layers after one that is not repeated would draw others than before."""
    numbers = itertools.count(1), itertools.count(1)

    def is_kept(context: Any, operator: Any, *inputs: Any, **options: Any) -> bool:
        name = str(operator)
        if name in ("aten.mm.default", "aten.addmm.default"):
            # torch 2.11 asks in both passes.
            return is_product_kept(next(numbers[context.is_recompute]), count)
        is_attention = "attention" in name or "attn" in name
        return is_attention and not has_dropout(operator, inputs, options)

    return create_selective_checkpoint_contexts(is_kept)
