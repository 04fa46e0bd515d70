"""Checks of a model and its loss before training. Without this file, models and losses that do not
fit train incorrectly in silence: means, other logits, missing masks, leaks between documents."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from transformers import PretrainedConfig

import policies
from core.ranks import Batch, Problem, host_sums, print0, to_device
from core.weights import unwrapped

OTHER_LOGITS = ("The logits behind the loss differ by {:.2%} from the model's own. Pass it equal "
                "inputs, and make LossHead.loss_logits compute as its forward does.")  # fmt: skip
NOT_CAUSAL = "The model is not causal: its logits change by {:.1%} if only later tokens change."
PADDING = ("Padding changes the model's logits by {:.1%}. Use batches of one length in collate, "
           "and delete this check.")  # fmt: skip
LEAK = "Documents in a sequence attend to each other ({:.2%}). Pass --no-packing."
NOT_A_SUM = ("summed_loss is not a sum over target tokens: a batch's loss differs by {:.2%} from "
             "that of its parts. Use reduction='sum', or divide by your own count in train and "
             "delete this check.")  # fmt: skip
MADE_BY_COLLATE = ("labels", "targets", "tokens", "decoder_input_ids", "decoder_attention_mask")
ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")


def check_length(args: Any, name: str, config: PretrainedConfig) -> None:
    """Raise Problem if a model has fewer positions than the length `name` of `args`; relative ones
    are no limit."""
    length = getattr(args, name)
    positions = getattr(config, "max_position_embeddings", None) or length
    ropes = getattr(config, "rope_parameters", None) or {}
    if ropes:
        config.standardize_rope_params()  # the field may be outside of them in config.json
    for rope in (ropes, *ropes.values()):  # some models have one for each kind of layer
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            # A longer sequence would change the angles of all sequences of its batch.
            positions = min(positions, rope["original_max_position_embeddings"])
    if 0 < positions < length:  # XLNet has -1, which is no limit
        flag = name.replace("_", "-")
        raise Problem(f"--{flag} {length} is above the model's {positions} positions. Lower it.")


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise Problem if an optimizer would train incorrectly on the shards of a model; print a line
    if it may."""
    updated = {x for group in optimizer.param_groups for x in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in updated:
            raise Problem(f"The optimizer lacks {name}. Add it, or freeze it in wrap_model.")
    if not isinstance(model, FSDP | FSDPModule) or dist.get_world_size() == 1:
        return
    if isinstance(optimizer, torch.optim.Adafactor):
        raise Problem("Adafactor would factor shards, not tensors. Pass --strategy ddp.")
    name = type(optimizer).__name__
    if isinstance(model, FSDP) and name not in ELEMENTWISE:
        print0(f"{name} gets flat shards: unless its updates are elementwise, pass --fsdp 2.")


# Two samples that start alike, for the `collate` of each data module. The last one is the shortest.
def blocks() -> list[Any]:
    """Return samples for block_dataset."""
    return [{"input_ids": [*range(10, 43)]}, {"input_ids": [*range(10, 26), *range(50, 55)]}]


def pairs() -> list[Any]:
    """Return samples for summarization_dataset: the first two differ in the target's end only."""
    source, target = range(10, 27), range(30, 46)
    texts = (source, target), (source, target[:8]), (source[:9], target[:5])
    return [{"input_ids": ids, "labels": labels} for ids, labels in texts]


def chats(args: Any) -> list[Any]:
    """Return samples for chat_dataset and its `args`: [a, a] and [b, a] if documents are packed."""
    # A multiple of 4, because two documents fill a row, which is padded to a multiple of 8. If it
    # can be, it is longer than some attention blocks.
    length = 160 if args.max_seq_length >= 320 else 16
    a = [10 + i % 97 for i in range(length + 1)]
    b = a[:8] + [10 + i * i % 97 for i in range(8, length + 1)]
    rows = [[a], [a[:9]]]
    if args.packing:
        rows = [[a, a], [b, a]]
    return [[{"input_ids": ids, "labels": ids} for ids in row] for row in rows]


@torch.no_grad()
def check_model(
    args: Any, device: torch.device, model: nn.Module, summed_loss: Callable, samples: list[Any],
    collate: Callable,
) -> None:  # fmt: skip
    """Raise Problem, on all ranks, if a model with its weights would train incorrectly: its loss is
    not a sum or not computed from its own logits, or these depend on later tokens, other documents
    or padding. `samples` are those of a function above; all ranks pass the same."""
    groups = [samples, *([sample] for sample in samples), []]
    *probe, no_targets = [to_device(collate(group), device) for group in groups]
    with (
        torch.compiler.set_stance("force_eager"),
        policies.evaluation(model),
        policies.autocast(model, device, args.sharding.precision),
    ):
        # FSDP records its prefetch order in the first pass, so run it as in training.
        with _recorded_logits(model, summed_loss) as recorded:
            losses = [summed_loss(model, batch).flatten()[:1] for batch in probe]
        parts = [_own_logits(model, batch) for batch in probe]
        empty = summed_loss(model, no_targets)
    logits = own = torch.cat(parts)
    if sum(map(len, recorded)) == len(own):  # otherwise the loss does not call token_loss
        logits = torch.cat(recorded).float()
    together, first, *_, last = logits.split([len(part) for part in parts])
    second = together[len(first) :]
    labels = probe[0]["labels"]
    common = (labels[0] == labels[1]).cumprod(0).sum()
    rounding = 4 * torch.finfo(policies.PRECISIONS[args.sharding.precision].param_dtype).eps
    noise = max(rounding, 1e-4)
    _check_equal(together[:common], second[:common], noise, NOT_CAUSAL)
    if "decoder_input_ids" in probe[0]:
        _check_equal(together[-len(last) :], last, noise, PADDING)
    _check_equal(logits, own, max(rounding, 1e-5), OTHER_LOGITS)
    if isinstance(samples[0], list) and len(samples[0]) == 2:  # `chats`, packed
        document, after_itself, _, after_other = together.chunk(4)
        _check_equal(document, after_itself, noise, LEAK)
        # Rounding is equal at equal positions in one pass, so even a small difference is a leak.
        _check_equal(after_itself, after_other, noise / 16, LEAK)
    # A mean would train with gradients that are too small. Rounding may route to other experts.
    has_experts = "expert" in unwrapped(model).config.to_json_string()
    _check_equal(sum(losses[1:]), losses[0], 0.1 if has_experts else max(rounding, 0.01), NOT_A_SUM)
    _check_equal(losses[0], losses[0] + empty.nan_to_num(1.0), 0, NOT_A_SUM)  # NaN: a mean
    if token_loss := summed_loss.__globals__.get("token_loss"):
        # Exactly, because a second term may be small.
        some, targets = together[:4], labels[labels != -100][:4]
        padding = torch.full_like(targets, -100)
        padded = token_loss(torch.cat([some, some]), torch.cat([targets, padding]))
        total = sum(map(token_loss, some.split(1), targets.split(1)))
        _check_equal(total[None], padded[None], 1e-5, NOT_A_SUM)


def _own_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits, fp32 [targets, vocabulary], that a model computes without our loss. An
    encoder-decoder makes its decoder's inputs from the labels."""
    labels, is_seq2seq = batch["labels"], "decoder_input_ids" in batch
    inputs = {name: x for name, x in batch.items() if name not in MADE_BY_COLLATE}
    logits = model(**inputs, labels=labels if is_seq2seq else None).logits
    return logits[labels != -100].float()


@contextlib.contextmanager
def _recorded_logits(model: nn.Module, summed_loss: Callable) -> Iterator[list[Tensor]]:
    """Yield a list of the logits [targets, vocabulary] of the targets that token_loss gets, in the
    head of a model or in the script."""
    chunks: list[Tensor] = []

    def record(token_loss: Callable, logits: Tensor, targets: Tensor) -> Tensor:
        chunks.append(logits[targets != -100])
        return token_loss(logits, targets)

    places = [vars(module) for module in model.modules()] + [summed_loss.__globals__]
    originals = [(names, names["token_loss"]) for names in places if "token_loss" in names]
    for names, token_loss in originals:
        names["token_loss"] = partial(record, token_loss)
    yield chunks
    for names, token_loss in originals:
        names["token_loss"] = token_loss


def _check_equal(one: Tensor, other: Tensor, limit: float, problem: str) -> None:
    """Raise Problem(problem), on all ranks, if tensors [..., vocabulary] differ on any rank by more
    than `limit`: the mean distance, as rounding may route a few positions to other experts,
    relative to the mean norm. NaN counts as equal: the first step reports it with the samples."""
    difference = (one - other).norm(dim=-1).mean() / one.norm(dim=-1).mean()
    if host_sums([difference.item() > limit])[0]:
        raise Problem(problem.format(difference.item()))
