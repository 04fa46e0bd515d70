"""Generation with a model that FSDP or DDP has wrapped."""

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from .weights import unwrapped


@contextlib.contextmanager
def generation(
    model: nn.Module, device: torch.device, dtype: torch.dtype, num_beams: int | None
) -> Iterator[Callable]:
    """Yield the model's `generate`, which computes in `dtype` and does not sample; all ranks.

    If `num_beams` is None, use the value in the model's generation config.

    Generation runs outside the root's forward, so FSDP1's root is gathered around it. The blocks
    gather themselves, and `synced_gpus` gives all ranks the same number of forward passes.
    """
    root = contextlib.nullcontext()
    if isinstance(model, FSDP):
        root = FSDP.summon_full_params(model, recurse=False, writeback=False)
    options = {"do_sample": False, "synced_gpus": dist.get_world_size() > 1}
    if num_beams is not None:
        options["num_beams"] = num_beams
    with root, torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        yield functools.partial(unwrapped(model).generate, **options)
