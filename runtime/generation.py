"""Generation with a model that FSDP or DDP has wrapped."""

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from . import ranks
from .model_checks import eager_mode
from .weights import unwrapped

# Settings that return other objects than one text per example, need a tokenizer, or depend on time.
SET_ASIDE = (
    "num_return_sequences", "return_dict_in_generate", "output_scores", "output_logits",
    "output_attentions", "output_hidden_states", "stop_strings", "token_healing", "max_time",
    "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp",
)  # fmt: skip


@contextlib.contextmanager
def generation(
    model: nn.Module, device: torch.device, dtype: torch.dtype, num_beams: int | None
) -> Iterator[Callable]:
    """Yield the model's `generate`, which computes in `dtype` and does not sample; all ranks.

    If `num_beams` is None, use the value in the model's generation config. Ignore its settings in
    SET_ASIDE.

    Generation runs outside the root's forward, so FSDP1's root is gathered around it. The blocks
    gather themselves, and `synced_gpus` gives all ranks the same number of forward passes.
    """
    root = contextlib.nullcontext()
    if isinstance(model, FSDP):
        root = FSDP.summon_full_params(model, recurse=False, writeback=False)
    options = {"do_sample": False, "synced_gpus": dist.get_world_size() > 1}
    if num_beams is not None:
        options["num_beams"] = num_beams
    inner = unwrapped(model)
    settings = inner.generation_config
    inner.generation_config = copy.deepcopy(settings)
    for name in SET_ASIDE:
        setattr(inner.generation_config, name, None)
    try:
        with root, torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            yield functools.partial(inner.generate, **options)
    finally:
        inner.generation_config = settings  # exports contain it


@torch.no_grad()
def check_generation(
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    num_beams: int | None,
    batch: dict[str, torch.Tensor],
) -> None:
    """Generate three tokens for a `batch` with `input_ids` and `attention_mask`, so that a setting
    that cannot work fails before the training. Raise ValueError on all ranks if one fails."""
    inputs = {key: batch[key].to(device) for key in ("input_ids", "attention_mask")}

    def generate_one() -> None:
        try:
            with warnings.catch_warnings(action="ignore"):  # a min_length above three tokens
                generate(**inputs, max_new_tokens=3)
        except Exception as error:  # any kind, from any setting
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"The model cannot generate texts for ROUGE ({type(error).__name__}: {reason}). "
                "Fix its generation_config.json, or pass --rouge-samples 0."
            ) from error

    with eager_mode(device), generation(model, device, dtype, num_beams) as generate:
        ranks.on_every_rank(generate_one)
