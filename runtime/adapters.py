"""LoRA: small trainable matrices beside frozen weights, which may be held in 4 bits (QLoRA).

Names no model. It needs peft, and for 4 bits bitsandbytes, which are imported where they are used.
All ranks call a function together.
"""

import argparse
import copy
import importlib.util
import logging
import math
import zlib
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from . import export, ranks, weights
from .arguments import ANY, INSTALL, OFF, POSITIVE, out_of_range

DEFAULTS = {
    "lora_alpha": 16.0,
    "lora_dropout": 0.0,
    "lora_targets": None,
    "load_in_4bit": False,
    "merge": False,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument_group("adapters, under --fsdp 2").add_argument
    add("--lora-rank", type=int, default=0, help="train adapters of this rank (0: all weights)")
    add("--lora-alpha", type=float, help="their output is scaled by alpha / rank")
    add("--lora-dropout", type=float, help="share of their inputs that is dropped")
    add("--lora-targets", nargs="+", metavar="NAME",
        help="the projections that get one, such as q_proj v_proj (default: all of the blocks)"
    )  # fmt: skip
    add("--load-in-4bit", **OFF, help="hold the blocks' frozen projections in NF4 (QLoRA)")
    add("--merge", **OFF, help="write best/ and final/ as whole models, not as adapters")
    parser.set_defaults(**DEFAULTS)


def resolve_arguments(args: Namespace) -> dict[str, Any]:
    """Resolve --fsdp: adapters make FSDP2 the default."""
    return {"fsdp": 2} if args.lora_rank and args.fsdp is None else {}


def check_arguments(args: Namespace) -> list[str]:
    """List what is wrong with the values of `add_arguments`, a sentence each."""
    problems = out_of_range(
        args, {"lora_rank": (0, ANY), "lora_alpha": (POSITIVE, ANY), "lora_dropout": (0, 1)}
    )
    if not args.lora_rank:
        for name, default in DEFAULTS.items():
            if getattr(args, name) != default:
                problems.append(f"--{name.replace('_', '-')} needs adapters: give a --lora-rank")
        return problems
    if args.fsdp == 1:
        problems.append("--lora-rank needs --fsdp 2: 1 holds gradients of frozen weights too")
    if args.merge and args.model_name == "tiny":
        problems.append("--merge needs a model in files: tiny is in none")
    if importlib.util.find_spec("peft") is None:
        problems.append(f"--lora-rank needs peft: {INSTALL}")
    if args.load_in_4bit and importlib.util.find_spec("bitsandbytes") is None:
        problems.append(f"--load-in-4bit needs bitsandbytes: {INSTALL}")
    return problems


def add(
    args: Namespace,
    model: PreTrainedModel,
    source: weights.Source,
    blocks: tuple[type[nn.Module], ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Freeze a model on meta, and add adapters in fp32 to the projections in its `blocks`.

    The frozen weights are held in `dtype`, in which the model computes, or with --load-in-4bit the
    blocks' projections in NF4. Rank 0's `source` gains the adapters' first values. Raises
    ValueError if a target does not exist, or cannot be held in 4 bits.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it tells of kernels for CPUs
    import peft

    projections = {}
    for name, block in model.named_modules():
        if isinstance(block, blocks):
            for inner, module in block.named_modules():
                # Llama 4's router is a Linear too, and gives a tuple.
                if type(module).forward in (nn.Linear.forward, Conv1D.forward):
                    projections[f"{name}.{inner}"] = module
    there = sorted({name.rpartition(".")[2] for name in projections})
    targets = args.lora_targets or there
    for target in targets:
        if target not in there:
            raise ValueError(f"--lora-targets {target}: the projections are {', '.join(there)}.")
    if args.load_in_4bit:
        _hold_in_4bit(model, projections, dtype, device)
    config = peft.LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=targets,
        task_type="SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM",
        base_model_name_or_path=args.model_name,
    )
    peft.inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and name not in projections:  # such as experts
            raise ValueError(
                f"--lora-targets {' '.join(targets)} gives {name} adapters too, which is not a "
                "projection of a block. Pass the projections of attention alone."
            )
    frozen: dict[nn.Parameter, nn.Parameter] = {}  # tied ones stay one
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter.requires_grad or parameter.dtype in (dtype, torch.uint8):
                continue
            if parameter not in frozen:
                frozen[parameter] = nn.Parameter(parameter.to(dtype), requires_grad=False)
            setattr(module, key, frozen[parameter])
    model.adapters = Lora(_checksum(source))
    if source:  # rank 0
        source |= _first_values(model)


def _hold_in_4bit(
    model: nn.Module, projections: dict[str, nn.Module], dtype: torch.dtype, device: torch.device
) -> None:
    from . import nf4

    for name, module in projections.items():
        if not fits_4bit(model, name):
            continue
        if not isinstance(module, nn.Linear):
            kind = type(module).__name__
            raise ValueError(f"--load-in-4bit: {name} is a {kind}. Only nn.Linear can be.")
        if device.type == "cpu" and module.in_features % nf4.BLOCK:
            raise ValueError(
                f"--load-in-4bit: {name} is {module.in_features} wide, which bitsandbytes computes "
                f"wrongly on a CPU. Use a GPU, or widths that are multiples of {nf4.BLOCK}."
            )
        model.set_submodule(name, nf4.Linear4bit(module, dtype))


def fits_4bit(model: PreTrainedModel, name: str) -> bool:
    """Return whether a projection may be held in 4 bits: T5 looks at the dtype of some."""
    return name.rpartition(".")[2] not in (model._keep_in_fp32_modules or [])


def _checksum(source: weights.Source) -> str:
    """Return a CRC-32 of names, shapes and a row of each tensor, on rank 0, in the files' dtype."""
    checksum = 0
    for name, tensor in sorted(source.items()):
        row = tensor[len(tensor) // 2] if tensor.dim() else tensor
        checksum = zlib.crc32(f"{name} {list(tensor.shape)}".encode(), checksum)
        checksum = zlib.crc32(row.contiguous().reshape(-1).view(torch.uint8).numpy(), checksum)
    return f"{checksum:08x}"


def _first_values(model: nn.Module) -> weights.Source:
    """Return what the adapters are at first, by name: one projection as peft initializes it, the
    other zeros."""
    values = {}
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            values[name] = nn.init.kaiming_uniform_(torch.empty(parameter.shape), a=math.sqrt(5))
        elif ".lora_B." in name:
            values[name] = torch.zeros(parameter.shape)
    return values


class Lora:
    """The adapters of a model, which alone are trained, saved and exported."""

    def __init__(self, checksum: str) -> None:
        self.checksum = checksum  # of the weights below, on rank 0

    def identity(self, args: Namespace, model: nn.Module) -> dict[str, Any]:
        """Return what a run with adapters and its continuation must share."""
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
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, path: Path, args: Namespace
    ) -> None:
        """Write the adapters, in fp32, as a directory that `PeftModel.from_pretrained` loads.

        With --merge it is a whole model in --export-dtype: rank 0 maps the files of the base again
        and adds the adapters' product in fp32.
        """
        adapters = {}
        for name, parameter in model.named_parameters():
            if self.is_saved(name):
                tensor = export.gather(parameter.detach(), torch.float32)
                adapters[weights.WRAPPERS.sub("", name)] = tensor.cpu()
        with export.new_directory(path) as temporary:
            if not args.merge:
                ranks.on_rank_zero(_write_adapters, model, tokenizer, adapters, temporary)
                return
            merged = iter(())
            if dist.get_rank() == 0:
                merged = _merged(model, adapters, args)
            export.write_model(model, merged, tokenizer, temporary, args)


def _write_adapters(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, adapters: dict[str, Tensor],
    directory: Path,
) -> None:  # fmt: skip
    named = {}
    for name, tensor in adapters.items():
        named[f"base_model.model.{name.replace('.default.', '.')}"] = tensor.contiguous()
    save_file(named, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (config,) = model.peft_config.values()
    config = copy.deepcopy(config)
    config.inference_mode = True  # as peft writes it
    config.target_modules = sorted(config.target_modules)
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _merged(
    model: nn.Module, adapters: dict[str, Tensor], args: Namespace
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the base, from its files, with the adapters' products added in fp32."""
    layers = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            layers[weights.plain_name(f"{name}.weight")] = module
    directory = weights.find_directory(args.model_name, weights.SETTINGS)
    base = weights.read_model(type(model), model.config, directory)
    for name, tensor in export.whole_tensors(base, torch.float32):
        if name in layers:
            tensor = tensor + _product(layers.pop(name), name, adapters)
        yield name, export.gather(tensor, export.EXPORT_DTYPES[args.export_dtype])
    assert not layers, f"not in the files: {', '.join(layers)}"


def _product(layer: nn.Module, name: str, adapters: dict[str, Tensor]) -> Tensor:
    """Return what the adapters add to a layer's weight, in fp32 and its shape."""
    stem = name.removesuffix("weight")
    lora_A = adapters[f"{stem}lora_A.default.weight"]  # [rank, width]
    lora_B = adapters[f"{stem}lora_B.default.weight"]  # [outputs, rank]
    product = lora_B @ lora_A
    if layer.fan_in_fan_out:  # the weight is [width, outputs]
        product = product.T
    return product * layer.scaling["default"]
