"""What is asked of a model before it trains: is its loss its own, what does a token cost?"""

import copy

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from . import adapters
from .batches import to_device
from .ranks import true_on_any


def flops_per_token(model: nn.Module, length: float) -> float | None:
    """FLOP that a token costs in a forward and a backward pass, in a document of `length` tokens.

    They are 6 N + 12 L d T (Chowdhery et al. 2022, PaLM, appendix B): N parameters stand in matrix
    products, the head's among them, L layers have heads of d in all, and T is the length, masked or
    not. Recomputed activations do not count, nor do adapters. Frozen weights below adapters are
    4 N: they have no gradients. Both terms are read off two forward passes of a copy of the
    unwrapped Transformers `model` on meta: a pass over n tokens costs a n + b n^2. None where the
    model looks at values in its forward pass, for on meta there are none.
    """
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"  # other kernels are not counted, or do not run on meta
    with torch.device("meta"):
        twin = type(model)(config)

    def cost(tokens: int) -> int:
        ids = torch.empty(1, tokens, dtype=torch.int64, device="meta")
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            twin(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        return counter.get_total_flops()

    try:
        short, long = cost(8), cost(16)
    except RuntimeError:
        return None
    quadratic = (long - 2 * short) / (2 * 8**2)
    linear = (short - quadratic * 8**2) / 8
    passes = 3
    if adapters.has_adapters(model):
        passes = 2
    return passes * linear + 3 * quadratic * length


@torch.no_grad()
def check_head(
    model: nn.Module,
    inputs: dict[str, torch.Tensor | int],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Raise ValueError, on all ranks, if the loss is not computed from the model's own logits.

    `inputs` are keywords of the wrapped `model`, alike on all ranks, of a few tokens. With empty
    `targets` besides, the model returns the logits of its loss, [positions, vocabulary]; without,
    its own, [batch, length, vocabulary], as `logits`. Both are computed in `dtype`. The model, in
    evaluation mode, runs without torch.compile. The random states stay as they are.
    """
    inputs = to_device(inputs, device)
    devices = [] if device.type == "cpu" else [device.index]
    with (
        torch.compiler.set_stance("force_eager"),
        torch.random.fork_rng(devices, device_type=device.type),
    ):
        # The first pass sets FSDP's order of prefetching: it is the one that training makes.
        found = model(**inputs, targets=inputs["input_ids"].new_empty(0)).float()
        own = model(**inputs, use_cache=False).logits.flatten(0, 1).float()
    # A scale before the head rounds otherwise than one behind it.
    rounding = max(1e-5, 4 * torch.finfo(dtype).eps)
    largest = own.abs().nan_to_num(0, 0).max().item()
    # Values that are not finite in both are left to the first step, which names the samples.
    same = torch.allclose(found, own, rtol=0, atol=rounding * largest, equal_nan=True)
    if true_on_any(not same):
        difference = (found - own).abs().max().item()
        raise ValueError(
            f"the logits behind the loss differ by {difference:.3g} from the model's own, which "
            f"reach {largest:.3g}: have forward and chunked_loss scale or cap them as the model's "
            "own forward does; or take the loss from the model's own logits, as T5_training.py "
            "does, and leave out check_head"
        )
