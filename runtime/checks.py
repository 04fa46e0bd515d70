"""Checks before training: the config, the loss, and the tokens that a model attends to."""

import contextlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from .batches import Batch
from .options import as_flag
from .ranks import say, true_on_any

# Suffixes of config fields that are set to 0. With layerdrop, ranks would skip different layers and
# wait for each other forever. With rescale_every, validation would permanently divide weights.
SWITCHED_OFF = ("layerdrop", "rescale_every")
# What a config.json may say, and what training needs. Exports keep the base's values.
FOR_TRAINING = {
    "return_dict": True,
    "output_attentions": False,
    "output_hidden_states": False,
    "torchscript": False,
    "use_cache": False,
    "gradient_checkpointing": False,  # --activation-checkpointing does it
}
TINY_LIMIT = 10_000_000  # parameters that --model-name tiny may have
OTHER_LOGITS = (
    "The logits behind the loss differ from the model's own by {:.2%}. Make LossHead.loss_logits "
    "scale and cap them as the model's forward does, or compute the loss as T5_training.py does."
)
OTHER_INPUTS = (
    "The decoder's logits differ by {:.1%} from those that the model computes from the labels. "
    "Make collate build decoder_input_ids and decoder_attention_mask as the model's forward does."
)
NOT_CAUSAL = (
    "The model is not causal: its logits change by {:.1%} if only later tokens change, so it would "
    "train on the answers. Give it a causal attention mask."
)
PADDING = (
    "Padding changes the model's logits by {:.1%}, so the loss would depend on the rest of the "
    "batch. Use batches of one length in collate, and delete this check in runtime/checks.py."
)
LEAK = (
    "Documents in a sequence attend to each other: the logits of equal documents differ by {:.2%}, "
    "because the model ignores position_ids and cu_seq_lens. Pass --no-packing."
)
NOT_A_SUM = (
    "summed_loss is not a sum over target tokens: a batch's loss differs by {:.0%} from the sum of "
    'its examples\' losses. Use reduction="sum". If your loss cannot be a sum, divide by your own '
    "count in train, and delete this check in runtime/checks.py."
)
NOT_CHECKED = (
    "The loss is not checked against the model's own logits, because no loss_logits method "
    "computed them for every token."
)


def fit_config(
    args: Namespace, model_class: type[PreTrainedModel], config: PretrainedConfig, *lengths: str
) -> None:
    """Prepare a config for training, in place; call it before the model is built.

    Raise ValueError if the model has fewer positions than one of the arguments named in `lengths`,
    or is too large for --model-name tiny.
    """
    for name in () if args.export_only else lengths:  # an export reads no data
        check_length(as_flag(name), getattr(args, name), config)
    for name, value in config.to_dict().items():
        if name in FOR_TRAINING:
            setattr(config, name, FOR_TRAINING[name])
        elif name.endswith(SWITCHED_OFF) and value:
            setattr(config, name, type(value)(0))
            say(f"{name} is set to 0 (the model has {value}).")
    if getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None):
        config._attn_implementation = "eager"  # with sdpa, some versions drop the cap in silence
    elif "flash" in (config._attn_implementation or ""):  # the base's; --attention may choose it
        config._attn_implementation = None
    padding = getattr(config, "pad_token_id", None) or 0
    if not 0 <= padding < getattr(config, "vocab_size", padding + 1):
        # The embedding has no such row. Only encoder-decoders need one, and they mask it.
        end = config.eos_token_id if config.is_encoder_decoder else None
        config.pad_token_id = end[0] if isinstance(end, list) else end
    if args.model_name == "tiny":
        with torch.device("meta"):  # allocates nothing
            size = model_class(config).num_parameters()
        if size > TINY_LIMIT:
            raise ValueError(
                f"--model-name tiny would have {size:,} parameters. Use the names of "
                f"{type(config).__name__} for width and layers in TINY, and few experts."
            )


def check_length(flag: str, length: int, config: PretrainedConfig) -> None:
    """Raise ValueError if a model has fewer positions than `length`; relative ones are no limit."""
    positions = getattr(config, "max_position_embeddings", None) or length
    if 0 < positions < length:  # XLNet has -1, which is no limit
        raise ValueError(f"{flag} {length} is above the model's {positions} positions. Lower it.")


@torch.no_grad()
def check_model(
    model: nn.Module, summed_loss: Callable, model_inputs: Callable, probe: list[Batch],
    dtype: torch.dtype, packed: bool = False,
) -> None:  # fmt: skip
    """Raise ValueError, on all ranks, if a model would train incorrectly: its loss is not a sum or
    not computed from its own logits, or these depend on later tokens, other documents or padding.

    `probe` is a batch, then each of its rows as a batch, on the model's device and the same on all
    ranks. The first two rows start alike. If `packed`, both consist of two documents of one length,
    and only their first documents differ. The model, in evaluation mode, computes in `dtype`.
    """
    labels = probe[0]["labels"]
    is_target = torch.cat([batch["labels"].flatten() for batch in probe]) != -100
    inputs = model_inputs(probe[0])
    is_seq2seq = "decoder_input_ids" in inputs
    if is_seq2seq:  # the model makes its decoder's inputs from labels
        inputs = {name: x for name, x in inputs.items() if not name.startswith("decoder_")}
        inputs["labels"] = labels
    with eager_mode(labels.device), recorded_logits(model) as chunks:
        # FSDP records its prefetch order in the first pass, so run it as in training.
        losses = [summed_loss(model, batch).flatten()[:1] for batch in probe]
        if sum(map(len, chunks)) not in (len(is_target), is_target.sum()):
            say("" if is_seq2seq else NOT_CHECKED)
            chunks[:] = [model(**model_inputs(batch)).logits.flatten(0, 1) for batch in probe]
        own = model(**inputs).logits[labels != -100].float()
    logits = torch.cat(chunks).float()
    logits = logits[is_target] if len(logits) == len(is_target) else logits
    in_batch, in_first, *_, in_last = [int((x["labels"] != -100).sum()) for x in probe]
    together, last = logits[:in_batch], logits[-in_last:]
    common = int((labels[0] == labels[1]).cumprod(0).sum())
    rounding = 4 * torch.finfo(dtype).eps
    noise = max(rounding, 1e-4)
    check_equal(together[:common], together[in_first:][:common], noise, NOT_CAUSAL)
    if is_seq2seq:
        check_equal(together[-in_last:], last, noise, PADDING)
    check_equal(together, own, max(rounding, 1e-5), OTHER_INPUTS if is_seq2seq else OTHER_LOGITS)
    if packed:
        document, after_itself, _, after_other = together.chunk(4)
        check_equal(document, after_itself, noise, LEAK)
        # Rounding is equal at equal positions in one pass, so even a small difference is a leak.
        check_equal(after_itself, after_other, noise / 16, LEAK)
    # A mean would train with gradients that are too small. Rounding may route to other experts.
    check_equal(sum(losses[1:]), losses[0], 0.1, NOT_A_SUM)


@contextlib.contextmanager
def recorded_logits(model: nn.Module) -> Iterator[list[Tensor]]:
    """Yield a list of the logits that methods `loss_logits` of a model's modules return."""
    chunks: list[Tensor] = []

    def record(compute: Callable, hidden: Tensor) -> Tensor:
        chunks.append(compute(hidden))
        return chunks[-1]

    heads = [module for module in model.modules() if hasattr(type(module), "loss_logits")]
    for head in heads:
        head.loss_logits = partial(record, head.loss_logits)
    yield chunks
    for head in heads:
        del head.loss_logits


@contextlib.contextmanager
def eager_mode(device: torch.device) -> Iterator[None]:
    """Run forward passes without torch.compile, and restore the random states at the end."""
    devices = [] if device.type == "cpu" else [device.index]
    random = torch.random.fork_rng(devices, device_type=device.type)
    with torch.compiler.set_stance("force_eager"), random:
        yield


def check_equal(one: Tensor, other: Tensor, limit: float, problem: str) -> None:
    """Raise ValueError(problem), on all ranks, if tensors [..., vocabulary] differ on any rank by
    more than `limit`: the mean distance, as rounding may route a few positions to other experts,
    relative to the mean norm. NaN counts as equal: the first step reports it with the samples."""
    difference = (one - other).norm(dim=-1).mean() / one.norm(dim=-1).mean()
    if true_on_any(difference.item() > limit):
        raise ValueError(problem.format(difference.item()))
