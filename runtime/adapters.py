"""LoRA: small trainable matrices beside frozen weights, which may be held in 4 bits (QLoRA).

Names no model. It needs peft, and for 4 bits bitsandbytes, which are imported where they are used.
All ranks call a function together.
"""

import argparse
import copy
import importlib.util
import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from . import hf_export, models, ranks, stored_tensors, trained
from .arguments import ANY, INSTALL, LEAST, OFF, out_of_range

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
        args, {"lora_rank": (0, ANY), "lora_alpha": (LEAST, ANY), "lora_dropout": (0, 1)}
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
    blocks: tuple[type[nn.Module], ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Freeze a model, and add adapters in fp32 to the projections in its `blocks`; in place.

    The frozen weights are held in `dtype`, in which the model computes, or with --load-in-4bit the
    blocks' projections in NF4, on `device`. What is on meta stays there. Raises ValueError if a
    target is not there, or cannot be held in 4 bits.
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
            raise ValueError(f"--lora-targets {target}: the projections are {', '.join(there)}")
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
    on_meta = model.get_input_embeddings().weight.is_meta
    peft.inject_adapter_in_model(config, model, low_cpu_mem_usage=on_meta)
    for name, module in model.named_modules():
        if not hasattr(module, "lora_A") or name in projections:
            continue
        if hasattr(module, "parameter_name"):  # peft has such names mean a parameter of experts
            raise ValueError(
                f"--lora-targets: with {', '.join(targets)} peft gives {name} adapters, too, which "
                "are not made here: name the projections of attention alone"
            )
        raise ValueError(f"--lora-targets: {name} is outside of the blocks and has such a name")
    _say_experts(model, targets, dtype)
    frozen: dict[nn.Parameter, nn.Parameter] = {}  # tied ones stay one
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter.requires_grad or parameter.dtype in (dtype, torch.uint8):
                continue
            if parameter not in frozen:
                frozen[parameter] = nn.Parameter(parameter.to(dtype), requires_grad=False)
            setattr(module, key, frozen[parameter])
    model.trained = model.adapters = Lora()


def _say_experts(model: nn.Module, targets: list[str], dtype: torch.dtype) -> None:
    """Print, on rank 0, which stacked experts get no adapters: they are parameters, not modules."""
    experts = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3 and min(parameter.shape) > 1:
                experts.add(name)
    if experts:
        held = str(dtype).removeprefix("torch.")
        ranks.say(
            f"--lora-rank: the experts ({', '.join(sorted(experts))}) get no adapters and stay "
            f"frozen, as {held}: --lora-targets are {' '.join(targets)}"
        )


def _hold_in_4bit(
    model: nn.Module, projections: dict[str, nn.Module], dtype: torch.dtype, device: torch.device
) -> None:
    from . import nf4

    for name, module in projections.items():
        if not fits_4bit(model, name):
            continue
        if not isinstance(module, nn.Linear):
            raise ValueError(f"--load-in-4bit: {name} is a {type(module).__name__}, no nn.Linear")
        if device.type == "cpu" and module.in_features % nf4.BLOCK:
            raise ValueError(
                f"--load-in-4bit on a CPU: {name} is {module.in_features} wide, which bitsandbytes "
                f"computes wrongly there, as it is no multiple of {nf4.BLOCK}"
            )
        quantized = nf4.Linear4bit(module, dtype)
        if not module.weight.is_meta:
            quantized.set_packed(quantized.quantize(module.weight.detach().to(device)))
        model.set_submodule(name, quantized)


def fits_4bit(model: PreTrainedModel, name: str) -> bool:
    """Return whether a projection may be held in 4 bits: T5 looks at the dtype of some."""
    return name.rpartition(".")[2] not in (model._keep_in_fp32_modules or [])


class Lora(trained.Whole):
    """The adapters alone are trained, saved and exported."""

    is_part = True

    def identity(self, args: Namespace, model: nn.Module) -> dict[str, Any]:
        """Return what the adapters are, and a checksum of what they stand beside."""
        (config,) = model.peft_config.values()
        base = f"tiny of --seed {args.seed}"
        if args.model_name != "tiny":
            base = ranks.on_rank_zero(lambda: stored_tensors.sum_of_files(model.stored_tensors))
        targets = " ".join(sorted(config.target_modules))
        return {
            "adapters": f"rank {config.r}, alpha {config.lora_alpha:g}, on {targets}",
            "base": base,
            "in 4 bits": args.load_in_4bit,
        }

    def is_saved(self, name: str) -> bool:
        """Return whether the tensor is an adapter's."""
        return ".lora_" in name

    def is_in_files(self, name: str) -> bool:
        """Return whether the tensor is no adapter's."""
        return ".lora_" not in name

    def initialize(self, model: PreTrainedModel, module: nn.Module, name: str) -> None:
        """Initialise an adapter as peft does: one projection as any nn.Linear, the other as 0."""
        if ".lora_A." in name:
            module.reset_parameters()
        elif ".lora_B." in name:
            nn.init.zeros_(module.weight)
        else:
            super().initialize(model, module, name)

    def exported_bytes(self, args: Namespace, trained: int, whole: int) -> int:
        """Return the size of the adapters in fp32, or with --merge of the whole model."""
        if args.merge:
            return super().exported_bytes(args, trained, whole)
        return 4 * trained

    def export(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, path: Path, args: Namespace
    ) -> None:
        """Write the adapters as a directory that `PeftModel.from_pretrained` loads.

        They stay fp32. With --merge it is a whole model, in --export-dtype: rank 0 reads the files
        of the base again, a tensor at a time, and adds the adapters' product in fp32. That replaces
        the directory before when it is complete.
        """
        found = {}
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                tensor = _gather(parameter.detach())  # all ranks do
                if dist.get_rank() == 0:
                    found[models.WRAPPERS.sub("", name)] = tensor.cpu()
        with hf_export.new_directory(path) as temporary:
            if args.merge:
                ranks.on_rank_zero(_write_merged, model, found, temporary, args)
            else:
                ranks.on_rank_zero(_write_adapters, model, found, temporary)
            if dist.get_rank() == 0:
                tokenizer.save_pretrained(temporary)


def _gather(tensor: Tensor) -> Tensor:
    """Return all of a DTensor, gathered on the device though it is offloaded, or the tensor."""
    if isinstance(tensor, DTensor):
        return tensor.to(tensor.device_mesh.device_type).full_tensor()
    return tensor


def _write_adapters(model: nn.Module, adapters: dict[str, Tensor], directory: Path) -> None:
    named = {
        f"base_model.model.{name.replace('.default.', '.')}": tensor.contiguous()
        for name, tensor in adapters.items()
    }
    save_file(named, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (config,) = model.peft_config.values()
    config = copy.deepcopy(config)
    config.inference_mode = True  # as peft writes it
    config.target_modules = sorted(config.target_modules)
    config.save_pretrained(directory)


def _write_merged(
    model: nn.Module, adapters: dict[str, Tensor], directory: Path, args: Namespace
) -> None:
    layers = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            layers[models.plain_name(f"{name}.weight")] = module
    parts = {}  # experts are written one by one, as they stand
    for stored in model.stored_tensors.values():
        parts |= {models.text_key(part.key): part for part in stored.parts()}
    tensors = {key: part.read().to("meta") for key, part in parts.items()}
    places = hf_export.create_files(directory, tensors, args)
    for name, stored in model.stored_tensors.items():
        if name in layers:
            key = models.text_key(stored.key)
            merged = stored.read().float() + _product(layers.pop(name), name, adapters)
            places[key].write(0, merged.flatten())
            del parts[key]
    assert not layers, f"not in the files: {', '.join(layers)}"
    for key, part in parts.items():
        places[key].write(0, part.read().flatten())
    hf_export.save_settings(model, directory, args)


def _product(layer: nn.Module, name: str, adapters: dict[str, Tensor]) -> Tensor:
    """Return what the adapters add to a layer's weight, in fp32 and its shape."""
    stem = name.removesuffix("weight")
    lora_A = adapters[f"{stem}lora_A.default.weight"]  # [rank, width]
    lora_B = adapters[f"{stem}lora_B.default.weight"]  # [outputs, rank]
    product = lora_B @ lora_A
    if layer.fan_in_fan_out:  # the weight is [width, outputs]
        product = product.T
    return product * layer.scaling["default"]
