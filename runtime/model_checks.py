"""Checks of a model before training: its config, its loss, and the tokens it attends to."""

import contextlib
from argparse import Namespace
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from . import ranks
from .batches import Batch, to_device
from .options import as_flag
from .ranks import true_on_any

# Suffixes of config fields that are set to 0. With layerdrop, ranks would skip different layers and
# wait for each other forever. With rescale_every, validation would permanently divide weights.
SWITCHED_OFF = ("layerdrop", "rescale_every")
# What a config.json may say, and what training needs. Exports keep the base's values.
FOR_TRAINING = {
    "return_dict": True,
    "output_attentions": False,
    "output_hidden_states": False,
    "torchscript": False,
}
TINY_LIMIT = 10_000_000  # parameters that --model-name tiny may have


def fit_config(
    args: Namespace, model_class: type[PreTrainedModel], config: PretrainedConfig, *lengths: str
) -> None:
    """Prepare a config for training, in place; call it before the model is built.

    Set the fields in SWITCHED_OFF to 0, and those of FOR_TRAINING. Raise ValueError if the model
    has fewer positions than one of the arguments named in `lengths`, or is too large for
    --model-name tiny.
    """
    for name in () if args.export_only else lengths:  # an export reads no data
        check_length(as_flag(name), getattr(args, name), config)
    for name, value in config.to_dict().items():
        if name.endswith(SWITCHED_OFF) and value:
            setattr(config, name, type(value)(0))
            ranks.say(f"{name} is set to 0 (the model has {value}).")
    for name, value in FOR_TRAINING.items():
        if getattr(config, name, value) != value:
            setattr(config, name, value)
    padding = getattr(config, "pad_token_id", None)
    if isinstance(padding, int) and padding >= getattr(config, "vocab_size", padding + 1):
        config.pad_token_id = None  # the embedding has no such row
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
def check_sum(
    summed_loss: Callable[[nn.Module, Batch], Tensor],
    model: nn.Module,
    batch: Batch,
    singles: list[Batch],
    device: torch.device,
) -> None:
    """Raise ValueError, on all ranks, unless the loss of a `batch` is the sum of the losses of its
    examples, `singles`. If a loss has several terms, only the first one is checked.

    The training loop divides by the number of target tokens, so a mean would train with gradients
    that are too small. A difference of 10% may be rounding, or tokens routed to other experts.
    """
    with eager_mode(device):
        losses = [summed_loss(model, to_device(one, device)) for one in (batch, *singles)]
    total, *parts = (loss.flatten()[0].item() for loss in losses)
    if true_on_any(abs(total - sum(parts)) > 0.1 * abs(sum(parts))):
        raise ValueError(
            f"summed_loss is not a sum over target tokens: {len(parts)} examples in one batch give "
            f'{total:.6g}, one by one {sum(parts):.6g} in total. Use reduction="sum". If your '
            "loss cannot be a sum, delete check_sum(...) and divide by your own count in train."
        )


@contextlib.contextmanager
def eager_mode(device: torch.device) -> Iterator[None]:
    """Run forward passes without torch.compile, and restore the random states at the end."""
    devices = [] if device.type == "cpu" else [device.index]
    random = torch.random.fork_rng(devices, device_type=device.type)
    with torch.compiler.set_stance("force_eager"), random:
        yield


def rounding_limit(dtype: torch.dtype, least: float) -> float:
    """Return the relative difference that rounding in `dtype` may cause, at least `least`."""
    return max(least, 4 * torch.finfo(dtype).eps)


def check_equal(one: Tensor, other: Tensor, limit: float, problem: str) -> None:
    """Raise ValueError, on all ranks, if logits [positions, vocabulary] differ by more than `limit`
    on any rank: the mean distance relative to the mean norm. `problem` is a format string for it.

    The mean is used because rounding may route a few positions to other experts. NaN counts as
    equal, because the first step reports it with the samples.
    """
    difference = (one - other).norm(dim=-1).mean() / one.norm(dim=-1).mean()
    if true_on_any(difference.item() > limit):
        raise ValueError(problem.format(difference.item()))


def check_causality(ids: Tensor, logits: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError if logits [2, length, vocabulary] differ in the common prefix of `ids`."""
    length = int((ids[0] == ids[1]).cumprod(0).sum())
    check_equal(
        *logits[:, :length], rounding_limit(dtype, 1e-4),
        "The model is not causal: its logits change by {:.1%} if only later tokens change, so it "
        "would train on the answers. Give it a causal attention mask.",
    )  # fmt: skip
