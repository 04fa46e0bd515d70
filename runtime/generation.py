"""Generation with a model that FSDP or DDP has wrapped."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from .checks import eager_mode
from .weights import unwrapped

# Other values return other objects than one text per example, need a tokenizer or depend on time.
ONE_TEXT = {
    "do_sample": False,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
    "stop_strings": None,
    "prompt_lookup_num_tokens": None,
    "max_time": None,
    "use_cache": True,  # training's config says False, and generation without it is slow
}


@contextlib.contextmanager
def generation(
    model: nn.Module, device: torch.device, dtype: torch.dtype, num_beams: int | None
) -> Iterator[Callable]:
    """Yield the model's `generate`, which computes in `dtype` and does not sample; all ranks.

    The model's generation config applies, except for ONE_TEXT and, unless it is None, `num_beams`.

    Generation runs outside the root's forward, so FSDP1's root is gathered around it. The blocks
    gather themselves, and `synced_gpus` gives all ranks the same number of forward passes.
    """
    root = contextlib.nullcontext()
    if isinstance(model, FSDP):
        root = FSDP.summon_full_params(model, recurse=False, writeback=False)
    options = ONE_TEXT | {"synced_gpus": dist.get_world_size() > 1}
    options["pad_token_id"] = unwrapped(model).config.pad_token_id  # the file's may have no row
    if num_beams is not None:
        options["num_beams"] = num_beams
    with root, torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        yield functools.partial(unwrapped(model).generate, **options)


@torch.no_grad()
def check_generation(
    model: nn.Module, device: torch.device, dtype: torch.dtype, num_beams: int | None,
    batch: dict[str, torch.Tensor],
) -> None:  # fmt: skip
    """Generate three tokens for a batch, so that settings that cannot work fail before training.

    All ranks need the same `batch`. Raise ValueError if generation fails.
    """
    inputs = {key: batch[key].to(device) for key in ("input_ids", "attention_mask")}
    quiet = warnings.catch_warnings(action="ignore")  # of a min_length above three tokens
    try:
        with quiet, eager_mode(device), generation(model, device, dtype, num_beams) as generate:
            generate(**inputs, max_new_tokens=3)
    except Exception as error:  # any kind, from any setting
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"The model cannot generate texts for ROUGE ({type(error).__name__}: {reason}). "
            "Fix its generation_config.json, or pass --rouge-samples 0."
        ) from error
