"""Checks of a model before training: its config, its attention, and the logits behind its loss."""

import contextlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from . import ranks
from .batches import Batch, to_device
from .ranks import true_on_any

# Suffixes of config fields that are set to 0. With layerdrop, ranks would skip different layers and
# wait for each other forever. With rescale_every, validation would permanently divide weights.
SWITCHED_OFF = ("layerdrop", "rescale_every")
TINY_LIMIT = 50_000_000  # parameters that --model-name tiny may have


def fit_config(
    args: Namespace, model_class: type[PreTrainedModel], config: PretrainedConfig, *lengths: str
) -> None:
    """Prepare a config for training, in place; call it before the model is built.

    Set the fields in SWITCHED_OFF to 0. Raise ValueError if the model has fewer positions than one
    of the arguments named in `lengths`, changes its attention during training, or is too large for
    --model-name tiny.
    """
    for name in lengths:
        check_length(f"--{name.replace('_', '-')}", getattr(args, name), config)
    for name, value in config.to_dict().items():
        if name.endswith(SWITCHED_OFF) and value:
            setattr(config, name, type(value)(0))
            ranks.say(f"{name} is set to 0 (the model has {value}).")
    if getattr(config, "attention_type", None) == "block_sparse":
        raise ValueError(
            "The model's block_sparse attention switches to full attention forever at the first "
            "short batch. Set attention_type to original_full in its config.json."
        )
    if args.model_name == "tiny":
        with torch.device("meta"):  # allocates nothing
            size = model_class(config).num_parameters()
        if size > TINY_LIMIT:
            raise ValueError(
                f"--model-name tiny would have {size:,} parameters. Use the names of "
                f"{type(config).__name__} for width and layers in TINY, and few experts."
            )


def check_length(flag: str, length: int, config: PretrainedConfig) -> None:
    """Raise ValueError if a model with this config has fewer positions than `length`. A config
    without max_position_embeddings, as with relative positions, has no limit."""
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise ValueError(f"{flag} {length} is above the model's {positions} positions.")


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

    `batch` is the same on all ranks: two rows that begin alike, with a loss at every position. If
    `packed`, both rows end in the document that the first row also begins with. The logits behind
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

    with _undisturbed(device):
        for head in heads:
            head.loss_logits = partial(record, head.loss_logits)
        # The first pass sets FSDP's order of prefetching, so it is the one that training makes.
        summed_loss(model, batch)
        for head in heads:
            del head.loss_logits
        own = model(**model_inputs(batch), use_cache=False).logits.float()
    logits = own
    if sum(map(len, chunks)) == ids.numel():
        logits = torch.cat(chunks).unflatten(0, ids.shape)
        _check_equal(
            logits.flatten(0, 1), own.flatten(0, 1), _rounding(dtype, 1e-5),
            "The logits behind the loss differ from the model's own by {:.2%}. Make LossHead."
            "loss_logits scale and cap them as the model's own forward does, or compute the loss "
            "from the model's own logits as T5_training.py does.",
        )  # fmt: skip
    else:
        ranks.say(
            "The loss is not checked against the model's own logits, because no loss_logits method "
            "computed them for every token."
        )
    _check_causality(ids, logits, dtype)
    if packed:
        _check_documents(logits, dtype)


@torch.no_grad()
def check_decoder(
    model: nn.Module,
    model_inputs: Callable[[Batch], Batch],
    batch: Batch,
    alone: Batch,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Raise ValueError, on all ranks, if the decoder inputs of a sequence-to-sequence model differ
    from those it makes from labels, if its decoder sees later tokens, or if padding changes logits.

    `batch` is the same on all ranks and has three examples: two with equal sources, where one
    target is the beginning of the other, and a shorter one. `alone` is the third without padding.
    """
    batch = to_device(batch, device)
    inputs, labels = model_inputs(batch), batch["labels"]
    source = {key: value for key, value in inputs.items() if not key.startswith("decoder_")}
    is_target = labels != -100
    with _undisturbed(device):
        logits = model(**inputs, use_cache=False).logits.float()
        own = model(**source, labels=labels, use_cache=False).logits.float()
        unpadded = model(**model_inputs(to_device(alone, device)), use_cache=False).logits.float()
    ids = inputs["decoder_input_ids"].masked_fill(~is_target, -1)
    _check_causality(ids[:2], logits[:2], dtype)
    length = int(is_target[2].sum())
    _check_equal(
        logits[2, :length], unpadded[0, :length], _rounding(dtype, 1e-4),
        "Padding changes the model's logits by {:.1%}, so the loss would depend on the rest of the "
        "batch. Use batches of one length in collate, and delete this check.",
    )  # fmt: skip
    _check_equal(
        logits[is_target], own[is_target], _rounding(dtype, 1e-5),
        "The decoder's logits differ by {:.1%} from those that the model computes from the labels. "
        "Make collate build decoder_input_ids and decoder_attention_mask as the model's forward "
        "does.",
    )  # fmt: skip


@torch.no_grad()
def check_sum(
    summed_loss: Callable[[nn.Module, Batch], Tensor],
    model: nn.Module,
    batch: Batch,
    alone: list[Batch],
    device: torch.device,
) -> None:
    """Raise ValueError, on all ranks, unless the loss of a `batch` is the sum of the losses of its
    examples `alone`. If a loss has several terms, only the first one is checked.

    The training loop divides by the number of target tokens, so a mean would train with gradients
    that are too small. A difference of 10% may be rounding, or tokens routed to other experts.
    """
    with _undisturbed(device):
        losses = [summed_loss(model, to_device(one, device)) for one in (batch, *alone)]
    together, *apart = (loss.flatten()[0].item() for loss in losses)
    if true_on_any(abs(together - sum(apart)) > 0.1 * abs(sum(apart))):
        raise ValueError(
            f"summed_loss is not a sum over target tokens: {len(apart)} examples in one batch give "
            f'{together:.6g}, one by one {sum(apart):.6g} in total. Use reduction="sum". If your '
            "loss cannot be a sum, delete check_sum(...) and divide by your own count in train."
        )


@contextlib.contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Run forward passes without torch.compile, and restore the random states after them."""
    devices = [] if device.type == "cpu" else [device.index]
    random = torch.random.fork_rng(devices, device_type=device.type)
    with torch.compiler.set_stance("force_eager"), random:
        yield


def _rounding(dtype: torch.dtype, least: float) -> float:
    """Return the relative difference that rounding in `dtype` may cause, at least `least`."""
    return max(least, 4 * torch.finfo(dtype).eps)


def _check_equal(one: Tensor, other: Tensor, limit: float, problem: str) -> None:
    """Raise ValueError, on all ranks, if logits [positions, vocabulary] differ by more than `limit`
    on any rank: the mean distance relative to the mean length, which is formatted into `problem`.

    The mean is used because rounding may route a few positions to other experts. NaN counts as
    equal, because the first step reports it with the samples.
    """
    apart = (one - other).norm(dim=-1).mean() / one.norm(dim=-1).mean()
    if true_on_any(apart.item() > limit):
        raise ValueError(problem.format(apart.item()))


def _check_causality(ids: Tensor, logits: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError if logits [2, length, vocabulary] differ where all ids up to there agree."""
    alike = int((ids[0] == ids[1]).cumprod(0).sum())
    _check_equal(
        *logits[:, :alike], _rounding(dtype, 1e-4),
        "The model is not causal: its logits change by {:.1%} if only later tokens change, so it "
        "would train on the answers. Give it a causal attention mask.",
    )  # fmt: skip


def _check_documents(logits: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError if logits [2, length, vocabulary] of equal documents differ: the two halves
    of the first row, and the second halves of both rows, which follow different documents."""
    first, other = (row.chunk(2) for row in logits)
    noise = _rounding(dtype, 1e-4)
    problem = (
        "Documents in a sequence see each other: the logits of equal documents differ by {:.2%}, "
        "because the model ignores position_ids and cu_seq_lens. Pass --no-packing."
    )
    _check_equal(*first, noise, problem)
    # Rounding is equal at equal positions in one pass, so even a small difference is a leak.
    _check_equal(first[1], other[1], noise / 16, problem)
