"""Attention for packed documents, registered in Transformers: a kernel of flash-attn or PyTorch, or
on a CPU scaled_dot_product_attention for one document at a time."""

import contextlib
import importlib
import inspect
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PretrainedConfig,
    PreTrainedModel,
)

from . import ranks
from .options import flag


@dataclass
class Options:
    """model"""

    attention: Literal["auto", "flash", "varlen", "sdpa", "eager"] = flag("auto", "flash: "
        "flash-attn; varlen: torch's; sdpa, eager: with a mask; auto: the first that runs"
    )  # fmt: skip

    def problems(self) -> list[str]:
        """Return a message if the kernel of --attention cannot run here."""
        if self.attention in ("flash", "varlen") and not self.prepare_only:
            try:
                varlen_kernel(self.attention, self.precision)
            except ValueError as error:
                return [str(error)]
        return []


def varlen_kernel(name: str, precision: str) -> Callable[..., Tensor]:
    """Return the attention kernel for packed documents called `name` (flash or varlen).

    It takes queries, keys and values [positions, heads, head size], where keys and values may have
    fewer heads, cumulative document lengths (int32), the largest length and the scale. Its
    attribute `origin` is its module and version. Raise ValueError if it cannot run here.
    """
    if name == "varlen" and ranks.accelerator() is None:
        return per_document
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        raise ValueError(f"--attention {name} needs a GPU of compute capability 8.0 or newer.")
    if precision == "fp32":
        raise ValueError(f"--attention {name} needs --precision bf16 or fp16.")
    if name == "flash":
        return flash_attn()
    from torch.nn.attention.varlen import varlen_attn

    # Before torch 2.13 it takes fewer key-value heads without being told.
    takes_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters

    def varlen(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float):
        options = {"scale": scale, "window_size": (-1, 0)}
        if takes_gqa:
            options["enable_gqa"] = q.size(1) > k.size(1)
        return varlen_attn(q, k, v, ends, ends, longest, longest, **options)

    varlen.origin = f"{varlen_attn.__module__} {torch.__version__}"
    return varlen


def flash_attn() -> Callable[..., Tensor]:
    """Return the kernel of flash-attn 3 if it is installed and the GPU is a Hopper, otherwise that
    of flash-attn 2. Raise ValueError if neither can be imported."""
    names = ["flash_attn"]
    if torch.cuda.get_device_capability()[0] == 9:
        names = ["flash_attn_interface", "flash_attn"]
    errors = []
    for name in names:
        try:
            module = importlib.import_module(name)
            function = module.flash_attn_varlen_func
            break
        except Exception as error:  # any type, if it was built for another torch or driver
            errors.append(f"{name}: {error}")
    else:
        raise ValueError(f"--attention flash needs flash-attn ({'; '.join(errors)}). Install it.")

    def flash(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float):
        limits = (ends, ends, longest, longest)
        output = function(q, k, v, *limits, softmax_scale=scale, causal=True)
        return output[0] if isinstance(output, tuple) else output

    flash.origin = f"{name} {getattr(module, '__version__', '3')}"
    return flash


def per_document(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float
) -> Tensor:
    """Return the causal attention of packed documents, one at a time: the kernel for CPUs."""
    outputs = []
    lengths = ends.diff().tolist()
    options = {"is_causal": True, "scale": scale, "enable_gqa": True}
    for parts in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        heads_first = (x.transpose(0, 1)[None] for x in parts)
        output = F.scaled_dot_product_attention(*heads_first, **options)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


per_document.origin = "scaled_dot_product_attention, a document at a time"


def automatic(
    config: PretrainedConfig, model_class: type[PreTrainedModel], length: int, precision: str
) -> str:
    """Return the first of flash, varlen, sdpa, eager that runs here and supports the model."""
    if not _has_sdpa(config, model_class):
        return "eager"
    if _needs_mask(config, length) or not model_class._supports_attention_backend:
        return "sdpa"
    for candidate in ("flash", "varlen"):
        with contextlib.suppress(ValueError):
            varlen_kernel(candidate, precision)
            return candidate
    return "sdpa"


def register(kernel: Callable[..., Tensor], longest: int = 0) -> None:
    """Register `kernel` in Transformers as the attention "packed", which uses the `cu_seq_lens` of
    the batch instead of a mask. It raises ValueError if a layer passes something that the kernel
    does not support: a mask or bias, a soft cap, sinks, dropout, or a window below `longest`.
    """

    def packed(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None,
        scaling: float, cu_seq_lens: Tensor | None = None, longest_document: int = 0,
        sliding_window: int | None = None, is_causal: bool | None = None, **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Return attention [batch, length, heads, size] of [batch, heads, length, size] inputs."""
        name = type(module).__name__
        if cu_seq_lens is None:
            raise ValueError(
                f"--attention flash and varlen need cu_seq_lens, which the layer of {name} does "
                "not pass on. Pass --attention sdpa."
            )
        batch, _, length, _ = query.shape
        features = {"attention_mask": attention_mask} | options
        if sliding_window is not None and sliding_window < (longest or length):
            features["sliding_window"] = sliding_window
        if is_causal is False or not getattr(module, "is_causal", True):
            features["is_causal=False"] = True
        used = {feature for feature, x in features.items() if isinstance(x, Tensor) or x}
        missing = sorted(used - {"position_ids", "cache_position", "use_cache"})
        if missing:
            raise ValueError(
                f"--attention flash and varlen do not support {', '.join(missing)}, which {name} "
                "needs. Pass --attention eager, or sdpa for a window or dropout."
            )
        # Under autocast the rotary embedding leaves queries and keys in fp32.
        parts = (x.transpose(1, 2).flatten(0, 1).to(value.dtype) for x in (query, key, value))
        output = kernel(*parts, cu_seq_lens, longest_document, scaling)
        return output.unflatten(0, (batch, length)), None

    AttentionInterface.register("packed", packed)
    AttentionMaskInterface.register("packed", lambda **_: None)


def _needs_mask(config: PretrainedConfig, length: int) -> bool:
    """Return whether layers have what kernels lack: dropout, a window, chunks (Llama 4), or keys
    that are selected (DeepSeek 3.2)."""
    window = getattr(config, "sliding_window", None) or length
    has_window = getattr(config, "use_sliding_window", True) and window < length
    chunk = getattr(config, "attention_chunk_size", None) or length
    selects = getattr(config, "index_topk", None) is not None
    return has_window or chunk < length or selects or bool(getattr(config, "attention_dropout", 0))


def _has_sdpa(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> bool:
    """Return whether a model may use sdpa, which has no soft cap (see `checks.fit_config`)."""
    return model_class._supports_sdpa and not getattr(config, "attn_logit_softcapping", None)


def set_attention(
    args: Namespace, config: PretrainedConfig, model_class: type[PreTrainedModel]
) -> str:
    """Set --attention in `config`; return its name and kernel. Raise ValueError if the model cannot
    use it."""
    if args.prepare_only:
        return "none"  # nothing is computed
    name = args.attention
    if name == "auto":
        name = automatic(config, model_class, args.max_seq_length, args.precision)
        if name == "varlen" and args.compile and ranks.accelerator() is None:
            name = "sdpa"  # `per_document` would break the compiled graph
    if name == "sdpa" and not _has_sdpa(config, model_class):
        raise ValueError(f"--attention sdpa: {model_class.__name__} lacks it. Pass eager.")
    if name not in ("flash", "varlen"):
        config._attn_implementation = name
        return name
    if not model_class._supports_attention_backend or _needs_mask(config, args.max_seq_length):
        raise ValueError(
            f"--attention {name}: {model_class.__name__} needs a mask, dropout or attention of "
            f"its own. Pass --attention {'sdpa' if _has_sdpa(config, model_class) else 'eager'}."
        )
    kernel = varlen_kernel(name, args.precision)
    register(kernel, args.max_seq_length)
    config._attn_implementation = "packed"
    return f"{name} ({kernel.origin})"
