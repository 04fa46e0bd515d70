"""Check before training that a sequence-to-sequence model gets the decoder inputs it expects."""

from collections.abc import Callable

import torch
from torch import nn

from .batches import Batch, to_device
from .model_checks import check_causality, check_equal, eager_mode, rounding_limit


@torch.no_grad()
def check_decoder(
    model: nn.Module,
    model_inputs: Callable[[Batch], Batch],
    batch: Batch,
    single: Batch,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Raise ValueError, on all ranks, if the decoder inputs of a sequence-to-sequence model differ
    from those it makes from labels, if its decoder sees later tokens, or if padding changes logits.

    `batch` is the same on all ranks and has three examples: two with equal sources, where one
    target is the start of the other, and a shorter one. `single` is the third without padding.
    """
    batch = to_device(batch, device)
    inputs, labels = model_inputs(batch), batch["labels"]
    source = {key: value for key, value in inputs.items() if not key.startswith("decoder_")}
    is_target = labels != -100
    with eager_mode(device):
        logits = model(**inputs, use_cache=False).logits.float()
        expected = model(**source, labels=labels, use_cache=False).logits.float()
        unpadded = model(**model_inputs(to_device(single, device)), use_cache=False).logits.float()
    ids = inputs["decoder_input_ids"].masked_fill(~is_target, -1)
    check_causality(ids[:2], logits[:2], dtype)
    length = int(is_target[2].sum())
    check_equal(
        logits[2, :length], unpadded[0, :length], rounding_limit(dtype, 1e-4),
        "Padding changes the model's logits by {:.1%}, so the loss would depend on the rest of the "
        "batch. Use batches of one length in collate, and delete this check.",
    )  # fmt: skip
    check_equal(
        logits[is_target], expected[is_target], rounding_limit(dtype, 1e-5),
        "The decoder's logits differ by {:.1%} from those that the model computes from the labels. "
        "Make collate build decoder_input_ids and decoder_attention_mask as the model's forward "
        "does.",
    )  # fmt: skip
