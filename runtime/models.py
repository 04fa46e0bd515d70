"""A model's names and shapes, whatever wraps it and however its weights are held."""

import re

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightTransform

EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TEXT_PART = re.compile(r"^(model\.)?language_model\.")  # of a multimodal model's keys
WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside FSDP1 or DDP; FSDP2 does not wrap it."""
    if isinstance(model, FSDP | DDP):
        return model.module
    return model


def plain_name(name: str) -> str:
    """Return a tensor's name before wrapping, and without the adapter beside it."""
    return WRAPPERS.sub("", name).replace(".base_layer.", ".")


def text_key(key: str) -> str:
    """Return the key in a model's own files of what stands under `key` in a multimodal model's."""
    return TEXT_PART.sub("", key)


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """Return a parameter's shape before wrapping, of packed 4 bits that of the weights in them."""
    return torch.Size(getattr(parameter, "whole_shape", parameter.shape))


def attention_of(model: PreTrainedModel) -> str:
    """Return the name of the attention that an unwrapped model computes, with the kernel's."""
    return getattr(model, "attention_kernel", None) or model.config._attn_implementation


def conversions(model: PreTrainedModel, add_legacy: bool) -> list[WeightTransform]:
    """List what Transformers does to the keys, and some tensors, in files of the model's type.

    A class that extends one of Transformers' is given the same: its files are of the same type.
    """
    model.is_custom_code = lambda: False  # or a class defined elsewhere would get nothing
    return get_model_conversion_mapping(model, add_legacy=add_legacy)
