"""Attention kernels for packed documents: flash-attn, PyTorch's varlen, on a CPU sdpa for one
document at a time. Without this file, Transformers' sdpa computes the attention between all of them
and masks most; with flash-attn, set `config._attn_implementation = "flash_attention_2"` instead."""

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from core.ranks import Problem, print0


@dataclass
class Kernel:
    """How attention is computed."""

    attention: Literal["auto", "flash", "varlen", "sdpa", "eager"] = "auto"
    """flash: flash-attn; varlen: torch's; sdpa, eager: with a mask; auto: the first that runs"""


def set_kernel(
    args: Any, config: transformers.PretrainedConfig, kind: type[transformers.PreTrainedModel]
) -> None:
    """Set --attention, given all arguments of a script, in the config of a model of class `kind`,
    and print it. Raise Problem if the model cannot use it."""
    name = args.attention.attention
    length = args.data.max_seq_length
    precision = args.sharding.precision
    has_sdpa = kind._supports_sdpa and not getattr(config, "attn_logit_softcapping", None)
    is_packed = kind._supports_attention_backend and not _needs_mask(config, length)
    if name == "auto":
        name = "sdpa" if has_sdpa else "eager"
        # `per_document` would break the compiled graph.
        is_traced = args.sharding.compile and not torch.accelerator.is_available()
        if has_sdpa and is_packed and not is_traced:
            for candidate in ("varlen", "flash"):
                try:
                    varlen_kernel(candidate, precision)
                    name = candidate
                except Problem as problem:
                    if problem.__cause__:  # flash-attn is installed, but broken
                        print0(str(problem))
    if name == "sdpa" and not has_sdpa:
        raise Problem(f"--attention sdpa: {kind.__name__} lacks it. Pass eager.")
    config._attn_implementation = name
    if name in ("flash", "varlen"):
        if not is_packed:
            raise Problem(f"--attention {name} does not fit {kind.__name__}. Pass sdpa or eager.")
        register(varlen_kernel(name, precision), length)
        config._attn_implementation = "packed"
    print0(f"attention: {name}")


def _needs_mask(config: transformers.PretrainedConfig, length: int) -> bool:
    """Return whether layers have what kernels lack: dropout, a window, chunks (Llama 4), or keys
    that are selected (DeepSeek 3.2)."""
    window = getattr(config, "sliding_window", None) or length
    has_window = getattr(config, "use_sliding_window", True) and window < length
    chunk = getattr(config, "attention_chunk_size", None) or length
    has_other = getattr(config, "index_topk", None) or getattr(config, "attention_dropout", 0)
    return has_window or chunk < length or bool(has_other)


def varlen_kernel(name: str, precision: str) -> Callable:
    """Return the kernel `name` (flash or varlen) for packed documents. It takes queries, keys and
    values [positions, heads, head size], the latter two with as many or fewer heads, cumulative
    document lengths (int32), the largest length and the scale. Raise Problem if it cannot run."""
    if name == "varlen" and not torch.accelerator.is_available():
        return per_document
    has_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
    if not has_gpu or precision == "fp32":
        raise Problem(f"--attention {name} needs an Ampere GPU or newer, --precision bf16 or fp16.")
    if name == "flash":
        return flash_attn()
    from torch.nn.attention.varlen import varlen_attn

    # Without this argument, torch 2.11 accepts fewer key-value heads by itself.
    has_flag = "enable_gqa" in inspect.signature(varlen_attn).parameters

    def varlen(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float) -> Tensor:
        options = {"enable_gqa": q.size(1) > k.size(1)} if has_flag else {}
        return varlen_attn(
            q, k, v, ends, ends, longest, longest, scale=scale, window_size=(-1, 0), **options
        )

    return varlen


def flash_attn() -> Callable:
    """Return the kernel of flash-attn 3 if it is installed and the GPU is a Hopper, otherwise that
    of flash-attn 2. Raise Problem if it cannot be imported."""
    name = "flash_attn"
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    if is_hopper and importlib.util.find_spec("flash_attn_interface"):
        name = "flash_attn_interface"
    if not importlib.util.find_spec(name):
        raise Problem("--attention flash needs flash-attn. Install it.")
    try:
        function = importlib.import_module(name).flash_attn_varlen_func
    except Exception as error:  # any type, if it was built for another torch or driver
        raise Problem(f"{name} cannot be imported: {error}. Install it again.") from error

    def flash(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float) -> Tensor:
        options = {"softmax_scale": scale, "causal": True}
        # By default, the order of its sums in the backward pass varies.
        options["deterministic"] = torch.are_deterministic_algorithms_enabled()
        output = function(q, k, v, ends, ends, longest, longest, **options)
        return output[0] if isinstance(output, tuple) else output

    return flash


def per_document(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, _: int, scale: float) -> Tensor:
    """Return the causal attention of packed documents, one at a time: the kernel for CPUs."""
    # The backward pass of a slice would fill zeros of the size of the pack, for each document.
    lengths = ends.diff().tolist()
    parts = [x.transpose(0, 1)[None].split(lengths, dim=2) for x in (q, k, v)]
    outputs = [
        F.scaled_dot_product_attention(*document, is_causal=True, scale=scale, enable_gqa=True)
        for document in zip(*parts, strict=True)
    ]
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


def register(kernel: Callable, longest: int) -> None:
    """Register `kernel` in Transformers as the attention "packed", which uses the document lengths
    of the batch instead of a mask. It raises Problem if a layer passes something that the kernel
    does not support: a mask, bias, soft cap, sinks, dropout, or a window below `longest`."""

    def packed(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None,
        scaling: float, cu_seq_lens_q: Tensor | None = None, max_length_q: int = 0,
        sliding_window: int | None = None, is_causal: bool | None = None, **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Return attention [batch, length, heads, size] of [batch, heads, length, size] inputs."""
        name = type(module).__name__
        if cu_seq_lens_q is None:
            raise Problem(f"{name} does not pass cu_seq_lens_q on. Pass --attention sdpa.")
        features = options | {
            "attention_mask": attention_mask,
            "is_causal=False": is_causal is False or not getattr(module, "is_causal", True),
            "sliding_window": sliding_window is not None and sliding_window < longest,
        }
        for feature, x in features.items():
            if feature not in IGNORED and (isinstance(x, Tensor) or x):
                raise Problem(f"{name} needs {feature}. Pass --attention eager, or sdpa.")
        # Under autocast the rotary embedding leaves queries and keys in fp32.
        parts = (x.transpose(1, 2).flatten(0, 1).to(value.dtype) for x in (query, key, value))
        output = kernel(*parts, cu_seq_lens_q, max_length_q, scaling)
        return output.unflatten(0, (len(query), -1)), None

    # There is no mask function of this name, so Transformers makes no mask.
    transformers.AttentionInterface.register("packed", packed)


# Equal to those of the queries, or used elsewhere in the layer.
IGNORED = {"cu_seq_lens_k", "max_length_k", "position_ids", "cache_position", "use_cache"}
