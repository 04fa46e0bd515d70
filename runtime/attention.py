"""Attention for packed documents, given to Transformers: flash-attn's kernel or torch's own. On a
machine without an accelerator scaled_dot_product_attention computes a document at a time.

Names no model. A layer that asks for what a kernel does not compute is refused.
"""

import contextlib
import importlib
import inspect
from argparse import Namespace
from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PretrainedConfig,
    PreTrainedModel,
    masking_utils,
)

from . import ranks

CHOICES = ["auto", "flash", "varlen", "sdpa", "eager"]
FLASH_OPTIONS = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale",
                 "causal"}  # fmt: skip
HELP = "flash-attn's kernel, torch's own, or one with a mask; auto: the first that runs"


def varlen_kernel(name: str, precision: str) -> Callable[..., Tensor]:
    """Return the attention kernel for packed documents that `name` (flash or varlen) means.

    It takes queries, keys and values [positions, heads, head size] in bf16 or fp16 (on a CPU also
    fp32), the latter two maybe with fewer heads (GQA), cumulative document lengths (int32), the
    largest of the lengths and the scale. Its attribute `origin` is its module and version. Raises
    ValueError with the reason if it cannot run here.
    """
    if name == "varlen" and ranks.accelerator() is None:
        return per_document
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        raise ValueError(f"--attention {name} needs a GPU of compute capability 8.0 or newer")
    if precision == "fp32":
        raise ValueError(f"--attention {name} needs --precision bf16 or fp16")
    if name == "varlen":
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError:
            raise ValueError("--attention varlen needs torch 2.11 or newer") from None
        known = inspect.signature(varlen_attn).parameters
        if "window_size" not in known:
            raise ValueError("--attention varlen needs torch 2.11 or newer")
        gqa = "enable_gqa" in known

        def varlen(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float):
            groups = q.size(1) // k.size(1)
            if not gqa:
                k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
            options = {"enable_gqa": groups > 1} if gqa else {}
            limits = (ends, ends, longest, longest)
            return varlen_attn(q, k, v, *limits, scale=scale, window_size=(-1, 0), **options)

        varlen.origin = f"{varlen_attn.__module__} {torch.__version__}"
        return varlen
    module = flash_module()
    function = module.flash_attn_varlen_func

    def flash(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float):
        limits = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        limits |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        output = function(q, k, v, **limits, softmax_scale=scale, causal=True)
        return output[0] if isinstance(output, tuple) else output

    flash.origin = f"{module.__name__} {version_of(module)}"
    return flash


def flash_module() -> ModuleType:
    """Return the newest module of flash-attn whose function for packed documents runs here.

    Raises ValueError, with what each of those tried says, if there is none.
    """
    major, _ = torch.cuda.get_device_capability()
    said = []
    for name, runs in (
        ("flash_attn_interface", major == 9),  # version 3
        ("flash_attn.cute", major >= 9),  # version 4
        ("flash_attn", True),  # version 2
    ):
        if not runs:
            continue
        try:
            module = importlib.import_module(name)
            known = inspect.signature(module.flash_attn_varlen_func).parameters
        except Exception as error:  # of any type, if it was built for another torch or driver
            reason, *_ = str(error).splitlines() or [type(error).__name__]
            said.append(f"{name}: {reason}")
            continue
        # The unfinished version 4 that comes with 2.8 takes no longest length, and has no backward.
        lacking = FLASH_OPTIONS - known.keys()
        if not lacking:
            return module
        said.append(f"{name}: it does not take {', '.join(sorted(lacking))}")
    raise ValueError(
        f"--attention flash needs a package flash-attn that runs on this GPU ({'; '.join(said)})"
    )


def version_of(module: ModuleType) -> str:
    """Return a module's version: its own `__version__`, or else that of its package."""
    if hasattr(module, "__version__"):
        return module.__version__
    package = module.__name__.partition(".")[0]
    distributions = metadata.packages_distributions().get(package, ())
    return ", ".join(metadata.version(name) for name in distributions) or "of unknown version"


def per_document(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float
) -> Tensor:
    """Compute on a CPU what the kernels do, a document at a time, without a mask over the pack."""
    outputs = []
    lengths = ends.diff().tolist()
    for parts in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        heads_first = (x.transpose(0, 1)[None] for x in parts)
        output = F.scaled_dot_product_attention(
            *heads_first, is_causal=True, scale=scale, enable_gqa=True
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


per_document.origin = "scaled_dot_product_attention, a document at a time"


def check_arguments(args: Namespace) -> list[str]:
    """List a sentence if --attention names a kernel that cannot run here, or none to keep."""
    if args.attention == "eager" and args.activation_checkpointing == "attention":
        return ["--activation-checkpointing attention keeps what a kernel gives: --attention eager "
                "has none"]  # fmt: skip
    if args.attention in ("flash", "varlen") and not args.prepare_only:
        try:
            varlen_kernel(args.attention, args.precision)
        except ValueError as error:
            return [str(error)]
    return []


def automatic(args: Namespace, config: PretrainedConfig, model_class: type[PreTrainedModel]) -> str:
    """Return the first attention that runs here and computes what a `model_class` of `config` asks
    for."""
    if not model_class._supports_sdpa:
        return "eager"
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    has_window = window is not None and window < args.max_seq_length
    # A compiled graph would break in `per_document`, the varlen kernel of a CPU.
    breaks = args.compile and ranks.accelerator() is None
    has_more = has_window or _has_chunks(args, config) or _dropout(config)
    if has_more or breaks or not model_class._supports_attention_backend:
        return "sdpa"
    for candidate in ("flash", "varlen"):
        with contextlib.suppress(ValueError):
            varlen_kernel(candidate, args.precision)
            return candidate
    return "sdpa"


def register(kernel: Callable[..., Tensor], longest: int = 0) -> None:
    """Give Transformers an attention called "packed", with `cu_seq_lens` in place of a mask.

    The cumulative lengths, and the longest of the lengths, are made once a batch, by `collate`, and
    reach every layer as keywords. A layer that asks for what the kernel does not compute raises
    ValueError: a mask or bias, a soft cap, sinks, dropout, or a window shorter than the sequences,
    which have up to `longest` tokens.
    """

    def packed(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None,
        scaling: float, cu_seq_lens: Tensor | None = None, longest_document: int = 0,
        sliding_window: int | None = None, is_causal: bool | None = None, **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Take [batch, heads, length, head size], return [batch, length, heads, head size]."""
        if cu_seq_lens is None:
            raise ValueError(
                f"--attention flash and varlen need cu_seq_lens, which {type(module).__name__} is "
                "not given by its layer: use --attention sdpa"
            )
        batch, _, length, _ = query.shape
        features = {"attention_mask": attention_mask} | options
        for name in ("position_ids", "cache_position", "use_cache"):  # these change nothing here
            features.pop(name, None)
        if sliding_window is not None and sliding_window < (longest or length):
            features["sliding_window"] = sliding_window
        if is_causal is False or not getattr(module, "is_causal", True):
            features["is_causal=False"] = True
        missing = [name for name, x in features.items() if isinstance(x, Tensor) or x]
        if missing:
            raise ValueError(
                f"--attention flash and varlen have no {', '.join(missing)}, for which "
                f"{type(module).__name__} asks: use --attention eager, or sdpa for a window or "
                "dropout"
            )
        # Under autocast the rotary embedding leaves queries and keys in fp32.
        parts = (x.transpose(1, 2).flatten(0, 1).to(value.dtype) for x in (query, key, value))
        output = kernel(*parts, cu_seq_lens, longest_document, scaling)
        return output.unflatten(0, (batch, length)), None

    AttentionInterface.register("packed", packed)
    AttentionMaskInterface.register("packed", lambda **_: None)


def _dropout(config: PretrainedConfig) -> float:
    return getattr(config, "attention_dropout", 0.0)


def _has_chunks(args: Namespace, config: PretrainedConfig) -> bool:
    """Tell whether sequences may be longer than the chunks in which Llama 4's layers attend."""
    chunk = getattr(config, "attention_chunk_size", None)
    return chunk is not None and chunk < args.max_seq_length


def _require(
    name: str, args: Namespace, config: PretrainedConfig, model_class: type[PreTrainedModel]
) -> None:
    """Raise ValueError if a `model_class` of `config` cannot use attention `name` rightly."""
    if name == "sdpa" and not model_class._supports_sdpa:
        raise ValueError(f"--attention sdpa: {model_class.__name__} has none, use eager")
    if name in ("flash", "varlen"):
        if _dropout(config):
            raise ValueError(f"--attention {name} has no dropout: use sdpa for this model")
        if not model_class._supports_attention_backend:
            other = "sdpa" if model_class._supports_sdpa else "eager"
            raise ValueError(
                f"--attention {name}: {model_class.__name__} takes no attention but its own: use "
                f"--attention {other}"
            )
        if _has_chunks(args, config):
            raise ValueError(
                f"--attention {name} has no chunks, in which this model attends above "
                f"{config.attention_chunk_size} tokens: use --attention sdpa"
            )
    counts_documents = hasattr(masking_utils, "remap_positions_for_packed_sequence")
    if args.packing and _has_chunks(args, config) and not counts_documents:
        raise ValueError(
            f"Transformers {transformers.__version__} counts this model's chunks of "
            f"{config.attention_chunk_size} tokens from the sequence's beginning, not from each "
            "document's: use --no-packing, or Transformers 5.23"
        )


def set_attention(
    args: Namespace, config: PretrainedConfig, model_class: type[PreTrainedModel]
) -> str:
    """Have a `model_class` of `config` use --attention, and return whose kernel that is.

    Raises ValueError if it cannot.
    """
    if args.prepare_only:
        return "none"  # nothing is computed
    name = args.attention
    if name == "auto":
        name = automatic(args, config, model_class)
    _require(name, args, config, model_class)
    config._attn_implementation = name
    if name not in ("flash", "varlen"):
        return name
    kernel = varlen_kernel(name, args.precision)
    register(kernel, args.max_seq_length)
    config._attn_implementation = "packed"
    return f"{name} ({kernel.origin})"
