"""LoRA: small trainable matrices next to frozen weights, which may be in 4 bits (QLoRA).

Works with any model. Needs peft, and for 4 bits bitsandbytes. All ranks call each function
together.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from . import export, ranks, weights
from .identity import checksum


def add(
    args: Namespace,
    model: PreTrainedModel,
    source: weights.Source,
    blocks: tuple[type[nn.Module], ...],
    dtype: torch.dtype,
) -> None:
    """Freeze a model on meta, and add fp32 adapters to the projections in its `blocks`.

    Frozen weights are stored in `dtype`, the compute dtype, and with --load-in-4bit the blocks'
    projections in NF4. The adapters' initial values are added to rank 0's `source`. Raise
    ValueError if a target is not a projection.
    """
    import peft

    layers, targets = projections(args, model, blocks)
    if args.load_in_4bit:
        from . import nf4

        for name, module in layers.items():
            if fits_4bit(model, name):
                model.set_submodule(name, nf4.Linear4bit(module, dtype))
    base = args.model_name
    if Path(base).is_dir():
        base = str(Path(base).absolute())  # final/ loads from any directory
    config = peft.LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=targets,
        task_type="SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM",
        base_model_name_or_path=base,
    )
    peft.inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    adapted = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
    if not adapted <= layers.keys():  # such as experts
        raise ValueError(
            f"--lora-targets {' '.join(sorted(targets))} names {min(adapted - layers.keys())} too, "
            "which is not a projection of a block. Pass only the projections of the attention."
        )
    config.inference_mode = True  # the value that peft saves
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    model.adapters = Lora(source)
    for name, parameter in model.named_parameters():
        if source and model.adapters.is_saved(name):  # on rank 0; same initialization as peft
            source[name] = torch.zeros(parameter.shape)
            if ".lora_A." in name:
                nn.init.kaiming_uniform_(source[name], a=math.sqrt(5))


def projections(args: Namespace, model: nn.Module, blocks: tuple) -> tuple[dict, set[str]]:
    """Return by name the linear layers inside a model's `blocks`, which are classes, and the last
    parts of the names of those with adapters. Raise ValueError if one of --lora-targets is none."""
    inner = {x for block in model.modules() if isinstance(block, blocks) for x in block.modules()}
    # Llama 4's router is a Linear too, but its forward returns a tuple.
    linear = (nn.Linear.forward, Conv1D.forward)
    layers = {n: x for n, x in model.named_modules() if x in inner and type(x).forward in linear}
    names = {name.rpartition(".")[2] for name in layers}
    targets = set(args.lora_targets or names)
    if not targets <= names:
        raise ValueError(
            f"--lora-targets {' '.join(sorted(targets - names))}: no such projection. Pass some of "
            f"{', '.join(sorted(names))}."
        )
    return layers, targets


def fits_4bit(model: PreTrainedModel, name: str) -> bool:
    """Return whether layer `name` may be in 4 bits. T5 reads the dtype of those that stay fp32."""
    return name.rpartition(".")[2] not in (model._keep_in_fp32_modules or [])


class Lora:
    """The adapters of a model: the only part that is trained, saved and exported."""

    def __init__(self, source: weights.Source) -> None:
        # A checksum of one value per tensor shows whether a resume has the same base model.
        values = {name: x.flatten()[x.numel() // 2].item() for name, x in source.items()}
        self.checksum = checksum(sorted(values.items()))

    def identity(self, args: Namespace, model: nn.Module) -> dict[str, Any]:
        """Return the values that must not change when a run with adapters resumes."""
        (config,) = model.peft_config.values()
        targets = " ".join(sorted(config.target_modules))
        return {
            "adapters": f"rank {config.r}, alpha {config.lora_alpha:g}, on {targets}",
            "base": ranks.on_rank_zero(lambda: self.checksum),
            "in 4 bits": args.load_in_4bit,
        }

    def is_saved(self, name: str) -> bool:
        """Return whether a checkpoint contains the tensor called `name`."""
        return ".lora_" in name

    def export(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, path: Path, args: Namespace,
        before_each: Callable[[], None],
    ) -> None:  # fmt: skip
        """Write the adapters, in fp32, as a directory that `PeftModel.from_pretrained` loads.

        With --merge, write a whole model in --export-dtype: rank 0 maps the base's files again and
        adds the product of the adapters in fp32.
        """
        adapters = {}
        for name, parameter in model.named_parameters():
            if self.is_saved(name):
                before_each()
                key = weights.WRAPPERS.sub("", name).replace(".default.", ".")
                tensor = export.gather(parameter.detach(), torch.float32)
                adapters[f"base_model.model.{key}"] = tensor.cpu()

        def write_adapters() -> None:
            save_file(adapters, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
            (config,) = model.peft_config.values()
            config.save_pretrained(temporary)
            export.write_tokenizer(tokenizer, temporary)

        with export.new_directory(path) as temporary:
            if args.merge:
                tensors = _merge(model, adapters, args, before_each)
                export.write_model(model, tensors, tokenizer, temporary, args)
            else:
                ranks.on_rank_zero(write_adapters)


def _merge(
    model: nn.Module, adapters: dict[str, Tensor], args: Namespace, before_each: Callable[[], None]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and value of each tensor of the merged model. On rank 0, add the adapters'
    products in fp32 and cast to --export-dtype; on other ranks the values are on meta."""
    (config,) = model.peft_config.values()
    directory = ranks.on_rank_zero(weights.find_directory, args.model_name, weights.SETTINGS)
    kind = weights.library_class(type(model))
    device = ranks.local_device()
    base, source = weights.new_model(kind, model.config, directory)
    for name, tensor in export.whole_tensors(base, torch.float32, before_each):
        if source:  # rank 0
            # On the device: one thread of a CPU would take ten minutes for 70B.
            tensor = export.gather(source[name].to(device), torch.float32)
            layer = name.removesuffix(".weight")
            key = f"base_model.model.{layer}"
            if f"{key}.lora_A.weight" in adapters:
                lora_A = adapters[f"{key}.lora_A.weight"].to(device)  # [rank, width]
                lora_B = adapters[f"{key}.lora_B.weight"].to(device)  # [outputs, rank]
                product = lora_B @ lora_A * (config.lora_alpha / config.r)
                # Conv1D's weight is [width, outputs].
                is_conv = isinstance(base.get_submodule(layer), Conv1D)
                tensor = tensor + (product.T if is_conv else product)
            tensor = export.gather(tensor, export.EXPORT_DTYPES[args.export_dtype])
        yield name, tensor
