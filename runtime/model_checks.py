"""Checks of a model before it trains: its loss is its own, and it sees only what it should."""

import contextlib
import re
from argparse import Namespace
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from . import ranks
from .batches import Batch, to_device
from .ranks import true_on_any

SWITCHED_OFF = {  # ends of names in a config
    "layerdrop": "ranks would leave out different layers, and wait for each other for ever",
    "rescale_every": "a validation would leave weights divided, in checkpoints and exports too",
}
TINY_LIMIT = 50_000_000  # parameters that --model-name tiny may have


def logit_scale_and_cap(config: PretrainedConfig) -> tuple[float, float | None]:
    """The factor that a config gives the logits, and the cap to which tanh bends them, if any."""
    scale = getattr(config, "logit_scale", None) or 1.0  # as Cohere calls it
    scale /= getattr(config, "logits_scaling", None) or 1.0  # as Granite does
    return scale, getattr(config, "final_logit_softcapping", None)


def fit_config(
    args: Namespace, model_class: type[PreTrainedModel], config: PretrainedConfig, *lengths: str
) -> None:
    """Make a config fit for training, in place; call it before the model is made of it.

    What is in SWITCHED_OFF becomes 0, with a line that says so. Raises ValueError if the model has
    fewer positions than one of the arguments called `lengths`, if it would change its attention
    while it runs, has none that --activation-checkpointing attention can keep, or is too large for
    --model-name tiny: its parameters are counted on meta, so that no memory is taken.
    """
    if args.activation_checkpointing == "attention":
        _check_kept_attention(model_class, config)
    for name in lengths:
        flag = f"--{name.replace('_', '-')}"
        check_length(flag, getattr(args, name), config)
    for name, value in config.to_dict().items():
        for end, reason in SWITCHED_OFF.items():
            if name.endswith(end) and value:
                setattr(config, name, type(value)(0))
                ranks.say(f"{name} is 0 here, not the model's {value}: {reason}")
    _say_longrope(config, max((getattr(args, name) for name in lengths), default=0))
    if getattr(config, "attention_type", None) == "block_sparse":
        raise ValueError(
            "the model's block_sparse attention becomes full attention for good with the first "
            "short batch: set attention_type to original_full in its config.json"
        )
    if args.model_name != "tiny":
        return
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    if size > TINY_LIMIT:
        raise ValueError(
            f"--model-name tiny would have {size:,} parameters, above {TINY_LIMIT:,}: give TINY "
            f"the names that {type(config).__name__} has for width and layers, and few experts"
        )


def _check_kept_attention(model_class: type[PreTrainedModel], config: PretrainedConfig) -> None:
    """Raise ValueError if no kernel gives what --activation-checkpointing attention keeps, or if
    its dropout, not drawn again, would shift the random numbers of the rest."""
    flag = "--activation-checkpointing"
    if not model_class._supports_sdpa:
        raise ValueError(
            f"{flag} attention keeps what a kernel gives, and {model_class.__name__} uses none: "
            f"use {flag} blocks"
        )
    for name in ("attn_pdrop", "attention_dropout"):
        if getattr(config, name, 0.0):
            raise ValueError(
                f"{flag} attention needs attention without dropout: set {name} to 0 in the "
                f"model's config.json, or use {flag} blocks"
            )


def check_length(flag: str, length: int, config: PretrainedConfig) -> None:
    """Raise ValueError if a model of this configuration has fewer positions than `length`.

    A configuration that names no number, such as one with relative positions, has no limit.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise ValueError(f"{flag} {length} is above the model's {positions} positions")


def _say_longrope(config: PretrainedConfig, length: int) -> None:
    """Print, on rank 0, that documents of one batch do not leave each other alone, if so."""
    rope = getattr(config, "rope_parameters", None) or {}
    limit = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") == "longrope" and limit and length > limit:
        ranks.say(
            f"a text above {limit} tokens has Transformers scale the positions of its whole batch, "
            f"of shorter texts too: up to {limit} each is trained on as it is alone"
        )


@torch.no_grad()
def check_logits(
    model: nn.Module,
    inputs: dict[str, Tensor | int],
    device: torch.device,
    dtype: torch.dtype,
    packed: bool = False,
) -> None:
    """Raise ValueError, on all ranks, if a causal model would learn from other logits than its own,
    or from tokens that it should not see.

    `inputs` are keywords of the wrapped `model`, alike on all ranks: two rows that begin alike. If
    `packed`, both end in one document, which is also what the first begins with. With empty
    `targets` besides, the model returns the logits of its loss, [positions, vocabulary]; without,
    its own, [batch, length, vocabulary], as `logits`. Both are computed in `dtype`. The model, in
    evaluation mode, runs without torch.compile. The random states stay as they are.
    """
    inputs = to_device(inputs, device)
    ids = inputs["input_ids"]
    with _undisturbed(device):
        # The first pass sets FSDP's order of prefetching: it is the one that training makes.
        try:
            found = model(**inputs, targets=ids.new_empty(0)).float().unflatten(0, ids.shape)
        except TypeError as error:
            raise ValueError(
                f"the model does not run ({error}): its layers may need the mask that --attention "
                "flash and varlen do without, so try --attention sdpa"
            ) from error
        own = model(**inputs, use_cache=False).logits.float()
    _check_head(model, found, own, dtype)
    _check_causality(ids, found, dtype)
    if packed:
        _check_documents(found, dtype)


@torch.no_grad()
def check_decoder(
    model: nn.Module,
    inputs: dict[str, Tensor | int],
    alone: dict[str, Tensor | int],
    labels: Tensor,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Raise ValueError, on all ranks, if a sequence-to-sequence model is not given what it would
    give its own decoder, if the decoder sees later tokens, or if padding changes the logits.

    `inputs` are keywords of the wrapped `model`, alike on all ranks, as `collate` makes them of two
    examples with equal sources, of which one target is the beginning of the other, and of a third,
    shorter one; `alone` are those of the third, which has no padding then. The model, as in
    `check_logits`, computes logits of `inputs`, of `alone`, and of `inputs` with the `labels` in
    place of what the decoder is given.
    """
    inputs, alone = to_device(inputs, device), to_device(alone, device)
    labels = labels.to(device)
    source = {key: value for key, value in inputs.items() if not key.startswith("decoder_")}
    is_target = labels != -100
    with _undisturbed(device):
        found = model(**inputs, use_cache=False).logits.float()
        own = model(**source, labels=labels, use_cache=False).logits.float()
        unpadded = model(**alone, use_cache=False).logits.float()
    ids = inputs["decoder_input_ids"].masked_fill(~is_target, -1)
    _check_causality(ids[:2], found[:2], dtype)
    length = int(is_target[2].sum())
    difference = _mean_difference(found[2, :length], unpadded[0, :length])
    if true_on_any(difference > _noise(dtype)):
        raise ValueError(
            f"padding changes what the model computes: its logits differ by {difference:.1%} from "
            "those of the example alone, so the loss would depend on the batch: have collate pad "
            "nothing (batches of one length), and leave out this check"
        )
    difference, largest = _compare(found[is_target], own[is_target])
    if true_on_any(difference > _rounding(dtype) * largest):
        raise ValueError(
            f"the decoder's logits differ by {difference:.3g} from those that the model computes "
            f"of the labels, which reach {largest:.3g}: have collate make decoder_input_ids and "
            "decoder_attention_mask as the model's own forward does"
        )


@torch.no_grad()
def check_sum(
    summed_loss: Callable[[Batch], Tensor], batch: Batch, alone: list[Batch], device: torch.device
) -> None:
    """Raise ValueError, on all ranks, unless the loss of a `batch` is the sum of the losses of its
    examples `alone`.

    The training loop divides by the number of target tokens, so a mean would train with gradients
    that are too small. Differences up to 10% are rounding, or experts that are routed differently.
    """
    with _undisturbed(device):
        together = summed_loss(to_device(batch, device)).float()
        apart = sum(summed_loss(to_device(one, device)).float() for one in alone)
    if true_on_any(bool(((together - apart).abs() > 0.1 * apart.abs()).any())):
        raise ValueError(
            f"summed_loss is not a sum over target tokens: a batch of {len(alone)} examples gives "
            f"{together.tolist()}, the same examples one by one {apart.tolist()} in total. Use "
            'reduction="sum". If your loss cannot be such a sum, delete the line `check_sum(...)` '
            "in check_loss and divide by your own count in train."
        )


@contextlib.contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Surround forward passes that are no part of the training: without torch.compile, and with the
    random states restored."""
    devices = [] if device.type == "cpu" else [device.index]
    with (
        torch.compiler.set_stance("force_eager"),
        torch.random.fork_rng(devices, device_type=device.type),
    ):
        yield


def _rounding(dtype: torch.dtype) -> float:
    """The relative difference that rounding may make of two ways to compute the same logits."""
    # A scale before the head rounds otherwise than one behind it.
    return max(1e-5, 4 * torch.finfo(dtype).eps)


def _compare(found: Tensor, own: Tensor) -> tuple[float, float]:
    """The largest difference of two tensors, and the largest finite absolute value of the second.

    Where both are not finite they do not differ: that is left to the first step, which names the
    samples.
    """
    difference = (found - own).abs()
    difference[~(found.isfinite() | own.isfinite())] = 0
    return difference.nan_to_num(torch.inf).max().item(), own.abs().nan_to_num(0, 0).max().item()


def _check_head(model: nn.Module, found: Tensor, own: Tensor, dtype: torch.dtype) -> None:
    difference, largest = _compare(found, own)
    if not true_on_any(difference > _rounding(dtype) * largest):
        return
    inner = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    features = []
    for name, value in inner.config.to_dict().items():
        if re.match(r"(final_)?logits?_|lm_head_", name) and value is not None:
            features.append(f"{name} {value}")
    if getattr(inner.get_output_embeddings(), "bias", None) is not None:
        features.append("a bias of the head")
    raise ValueError(
        f"the logits behind the loss differ by {difference:.3g} from the model's own, which "
        f"reach {largest:.3g} (the model has {', '.join(features) or 'no scale, cap or bias'}): "
        "have forward and chunked_loss compute them as the model's own forward does; or take the "
        "loss from the model's own logits, as T5_training.py does, and leave out check_logits"
    )


def _check_causality(ids: Tensor, logits: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError if logits [2, length, vocabulary] differ where the ids so far do not."""
    alike = int((ids[0] == ids[1]).cumprod(0).sum())
    difference = _mean_difference(*logits[:, :alike])
    if true_on_any(difference > _noise(dtype)):
        raise ValueError(
            f"the model is not causal: logits differ by {difference:.1%} where only later tokens "
            "do, so it would learn from what it cannot know: its attention mask is not causal, or "
            "it is given none"
        )


def _check_documents(logits: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError if logits [2, length, vocabulary] of equal documents differ: of the halves
    of the first row, and of the second halves, which stand behind other documents."""
    first, other = (row.chunk(2) for row in logits)
    apart = _mean_difference(*first)
    behind = _mean_difference(first[1], other[1])
    # At one place in one pass rounding is the same, so what is left in 16 bits is a leak.
    if true_on_any(apart > _noise(dtype) or behind > _noise(dtype) / 16):
        raise ValueError(
            "documents in a sequence see each other: the logits of equal ones differ by "
            f"{max(apart, behind):.2%}, as this model heeds neither position_ids nor cu_seq_lens: "
            "use --no-packing"
        )


def _mean_difference(one: Tensor, other: Tensor) -> float:
    """The mean over positions of how far vectors [positions, vocabulary] are apart, relative to
    their mean length. Experts that rounding exchanges in a few positions count little."""
    apart = (one - other).norm(dim=-1).mean()
    return (apart / one.norm(dim=-1).mean()).item()


def _noise(dtype: torch.dtype) -> float:
    """The `_mean_difference` that rounding may make of the same positions in other surroundings."""
    return max(1e-4, 4 * torch.finfo(dtype).eps)
