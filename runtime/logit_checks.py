"""Check before training that the loss of a causal model uses the model's own logits."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from . import ranks
from .batches import Batch, to_device
from .model_checks import check_causality, check_equal, eager_mode, rounding_limit


@torch.no_grad()
def check_logits(
    summed_loss: Callable[[nn.Module, Batch], Tensor],
    model_inputs: Callable[[Batch], Batch],
    model: nn.Module,
    batch: Batch,
    device: torch.device,
    dtype: torch.dtype,
    packed: bool = False,
) -> None:
    """Raise ValueError, on all ranks, if the loss of a causal model is computed from other logits
    than its own, or from logits that depend on tokens they should not see.

    `batch` is the same on all ranks: two rows that start alike, with a loss at every position. If
    `packed`, both rows end with the document that the first row also starts with. The logits behind
    the loss are those that a module's method `loss_logits` returns while `summed_loss` runs; if
    there is no such method, only the model's own logits are checked. The model, in evaluation mode,
    computes in `dtype`, without torch.compile. Random states are restored.
    """
    batch = to_device(batch, device)
    ids = batch["input_ids"]
    chunks: list[Tensor] = []
    heads = [module for module in model.modules() if hasattr(type(module), "loss_logits")]

    def record(compute: Callable, hidden: Tensor) -> Tensor:
        chunks.append(compute(hidden))
        return chunks[-1]

    with eager_mode(device):
        for head in heads:
            head.loss_logits = partial(record, head.loss_logits)
        # FSDP records its prefetch order in the first pass, so run it as in training.
        summed_loss(model, batch)
        for head in heads:
            del head.loss_logits
        expected = model(**model_inputs(batch), use_cache=False).logits.float()
    logits = expected
    if sum(map(len, chunks)) == ids.numel():
        logits = torch.cat(chunks).unflatten(0, ids.shape)
        check_equal(
            logits.flatten(0, 1), expected.flatten(0, 1), rounding_limit(dtype, 1e-5),
            "The logits behind the loss differ from the model's own by {:.2%}. Make LossHead."
            "loss_logits scale and cap them as the model's own forward does, or compute the loss "
            "from the model's own logits as T5_training.py does.",
        )  # fmt: skip
    else:
        ranks.say(
            "The loss is not checked against the model's own logits, because no loss_logits method "
            "computed them for every token."
        )
    check_causality(ids, logits, dtype)
    if packed:
        _check_documents(logits, dtype)


def _check_documents(logits: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError if logits [2, length, vocabulary] of equal documents differ: the two halves
    of the first row, and the second halves of both rows, which follow different documents."""
    first, other = (row.chunk(2) for row in logits)
    noise = rounding_limit(dtype, 1e-4)
    problem = (
        "Documents in a sequence attend to each other: the logits of equal documents differ by "
        "{:.2%}, because the model ignores position_ids and cu_seq_lens. Pass --no-packing."
    )
    check_equal(*first, noise, problem)
    # Rounding is equal at equal positions in one pass, so even a small difference is a leak.
    check_equal(first[1], other[1], noise / 16, problem)
