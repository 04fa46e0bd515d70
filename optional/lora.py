"""LoRA: small trained matrices next to frozen weights, which may be in 4 bits (QLoRA). Without this
file, all weights are trained. Needs peft, and for 4 bits bitsandbytes. All ranks call each function
together."""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import safetensors.torch
import torch
import tyro
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.pytorch_utils import Conv1D

import policies
from core import export, ranks, weights
from core.args import Fraction, Names, Positive, Size
from core.ranks import Problem

ADAPTER = ".lora_"  # part of an adapter's name
BLOCK = 64  # weights that share a scale


@dataclass
class Lora:
    """Adapters, which need --fsdp 2."""

    lora_rank: Size = 0
    """train adapters of this rank; 0: all weights"""
    lora_alpha: Positive = 16.0
    """scales their output by alpha / rank"""
    lora_dropout: Fraction = 0.0
    """dropout rate of their inputs"""
    lora_targets: Annotated[Names, tyro.conf.arg(help_behavior_hint="")] = ()
    """projections with adapters, such as q_proj v_proj; none: all in the blocks"""
    load_in_4bit: bool = False
    """hold frozen projections in NF4 (QLoRA)"""

    def resolve(self, args: Any) -> None:
        """Choose --fsdp 2 for adapters unless --fsdp is passed."""
        is_passed = any(word.startswith("--fsdp") for word in sys.argv)
        if self.lora_rank and not is_passed:
            args.sharding.fsdp = 2

    def problems(self, args: Any) -> list[str]:
        """Return a message if the flags of a script's `args` cannot work."""
        if not self.lora_rank:
            message = "--lora-alpha, -dropout, -targets and --load-in-4bit need --lora-rank."
            return [message] if self != Lora() else []
        if args.sharding.strategy == "ddp" or args.sharding.fsdp == 1:
            return ["--lora-rank needs --fsdp 2, and not --strategy ddp."]
        return []


def add(
    args: Any, model: PreTrainedModel, initial: weights.Initial,
    blocks: tuple[type[nn.Module], ...], tokenizer: Tokenizer,
) -> None:  # fmt: skip
    """Given a script's arguments with --lora-rank, freeze a model on meta, and add fp32 adapters of
    the projections in its `blocks`. Frozen weights are stored in the compute dtype, with
    --load-in-4bit the blocks' projections in NF4, and the adapters' initial values in rank 0's
    `initial`. Raise Problem if a target is not a projection."""
    options = args.adapters
    name = args.model.model_name
    if not options.lora_rank:
        return
    import peft

    dtype = policies.PRECISIONS[args.sharding.precision].param_dtype
    layers, targets = projections(model, blocks, options.lora_targets)
    if options.load_in_4bit:
        in_fp32 = model._keep_in_fp32_modules or []  # T5 reads their dtype
        for path, module in layers.items():
            if path.rpartition(".")[2] not in in_fp32:
                model.set_submodule(path, Linear4bit(module, dtype))
    base = Path(name)
    config = peft.LoraConfig(
        r=options.lora_rank, lora_alpha=options.lora_alpha, lora_dropout=options.lora_dropout,
        target_modules=targets,
        task_type="SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM",
        # An absolute path, so that final/ loads from any directory.
        base_model_name_or_path=str(base.absolute()) if base.is_dir() else name,
    )  # fmt: skip
    peft.inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    adapted = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
    if others := adapted - layers.keys():  # such as experts
        raise Problem(f"--lora-targets: {min(others)} is not a projection of a block. Pass others.")
    config.inference_mode = True  # the value that peft saves
    config.target_modules = targets  # sorted: the order of peft's set differs between runs
    file = Path(model.config.name_or_path) / "config.json"
    model.text_part = ""  # where a multimodal base has the layers
    if file.is_file() and json.loads(file.read_text())["model_type"] != model.config.model_type:
        model.text_part = weights.TEXT_PART
        config.target_modules = rf".*\.{weights.TEXT_PART}.*\.({'|'.join(targets)})"
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    # One value per tensor shows whether a resume has the same base model.
    values = sorted((name, x.flatten()[x.numel() // 2].item()) for name, x in initial.items())
    base_digest = ranks.on_rank_zero(weights.digest, values)[:8]
    if initial:  # on rank 0
        fill_initial(initial, model)
        check_markers(model, initial, tokenizer)
    model.adapters = config
    model.adapters_identity = {
        "--lora-rank": config.r,
        "--lora-alpha": config.lora_alpha,
        "--lora-targets": targets,
        "--load-in-4bit": options.load_in_4bit,
        "the base": base_digest,
    }


def fill_initial(initial: weights.Initial, model: nn.Module) -> None:
    """Give the tensors in rank 0's `initial` the names that they have next to adapters, and add the
    adapters' initial values, which are peft's."""
    for name, parameter in model.named_parameters():
        base_name = name.replace(".base_layer.", ".")
        if base_name in initial:
            initial[name] = initial.pop(base_name)
        elif ADAPTER in name:
            initial[name] = torch.zeros(parameter.shape)
            if ".lora_A." in name:
                nn.init.kaiming_uniform_(initial[name], a=math.sqrt(5))


def packing(receive: Callable, model: nn.Module) -> Callable:
    """Return the `receive` of a model's Initializer as a function that returns the weight of a
    Linear4bit in 4 bits."""

    def receive_packed(name: str) -> Tensor:
        tensor = receive(name)
        module = model.get_submodule(name.rpartition(".")[0])
        is_packed = isinstance(module, Linear4bit) and tensor.ndim == 2  # not the bias
        return module.quantize(tensor.float()) if is_packed else tensor

    return receive_packed


def identity(model: nn.Module) -> dict[str, Any]:
    """Return what must stay the same in a resume: the adapters' shapes and their base."""
    return getattr(model, "adapters_identity", {"--lora-rank": 0})


def frozen_names(model: nn.Module) -> set[str]:
    """Return the names of the weights that adapters freeze. Checkpoints leave them out."""
    if not hasattr(model, "adapters"):
        return set()
    parameters = model.named_parameters()
    return {weights.plain_name(name) for name, x in parameters if not x.requires_grad}


def projections(
    model: nn.Module, blocks: tuple[type[nn.Module], ...], chosen: tuple[str, ...]
) -> tuple[dict[str, nn.Module], list[str]]:
    """Return by name the linear layers inside a model's `blocks`, which are classes, and the last
    parts of the names of those with adapters: `chosen`, or all. Raise Problem if one is none."""
    inner = {x for block in model.modules() if isinstance(block, blocks) for x in block.modules()}
    # Llama 4's router is a Linear too, but its forward returns a tuple.
    linear = (nn.Linear.forward, Conv1D.forward)
    layers = {n: x for n, x in model.named_modules() if x in inner and type(x).forward in linear}
    names = {name.rpartition(".")[2] for name in layers}
    if unknown := set(chosen) - names:
        raise Problem(f"--lora-targets {min(unknown)} is none of {', '.join(sorted(names))}.")
    return layers, sorted(set(chosen or names))


def check_markers(model: PreTrainedModel, initial: weights.Initial, tokenizer: Tokenizer) -> None:
    """Print a line if adapters freeze the embeddings of chat markers that were never trained: rows
    that are all zero, or equal to each other. Call on rank 0."""
    embedding = model.get_input_embeddings().weight
    name = next(name for name, x in model.named_parameters() if x is embedding)
    rows = {}
    for token, i in tokenizer.get_added_vocab().items():
        if token in str(tokenizer.chat_template) and i < len(embedding):
            rows[token] = tuple(initial[name][i].tolist())
    all_rows = list(rows.values())
    untrained = [token for token, row in rows.items() if all_rows.count(row) > 1 or not any(row)]
    if untrained:
        ranks.print0(f"The base has no trained embeddings of {' '.join(untrained)}, and adapters "
                     "freeze them. Pass --chat-template llama-2 or train all weights.")  # fmt: skip


def export_model(
    model: nn.Module, tokenizer: Tokenizer, path: Path, dtype: str,
    check_stop: Callable = lambda: None, rewrite: Callable = lambda *_: None,
) -> None:  # fmt: skip
    """Write a model as `core.export` does or, if it has adapters, these, in fp32, as a directory
    that `PeftModel.from_pretrained` loads."""
    if not hasattr(model, "adapters"):
        export.export_model(model, tokenizer, path, dtype, check_stop, rewrite)
        return
    tensors = {}
    for name, parameter in model.named_parameters():
        if ADAPTER in name:
            check_stop()
            key = weights.plain_name(name).replace(".default.", ".")
            key = key.replace("model.", f"model.{model.text_part}", 1)
            tensor = export.gather(parameter.detach(), torch.float32)
            tensors[f"base_model.model.{key}"] = tensor.cpu()

    def write_adapters() -> None:
        # Unlike save_file, this raises OSError on a full disk.
        content = safetensors.torch.save(tensors, {"format": "pt"})
        (temporary / "adapter_model.safetensors").write_bytes(content)
        model.adapters.save_pretrained(temporary)
        settings = model.generation_config.to_json_string()  # without save_pretrained's refusals
        (temporary / "generation_config.json").write_text(settings)
        export.write_tokenizer(tokenizer, temporary)
        rewrite(temporary, tokenizer)

    with export.new_directory(path) as temporary:
        ranks.on_rank_zero(write_adapters)


class Linear4bit(nn.Linear):
    """A linear layer whose weight is uint8 [weights / 2, 1], so that FSDP2 can shard it.

    The weight is on meta until the loader stores the result of `quantize` in it. The format is NF4
    with double quantization (Dettmers et al. 2023, QLoRA): 4 bits per weight. Every rank holds all
    scales, one per 64 weights (their largest magnitude), in 1/64 of a byte per weight.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        width = linear.in_features
        outputs = linear.out_features
        super().__init__(width, outputs, bias=False, device="meta")
        self.bias = linear.bias
        self.dtype = dtype  # the compute dtype
        packed = torch.empty(width * outputs // 2, 1, dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(packed, requires_grad=False)

    def quantize(self, weight: Tensor) -> Tensor:
        """Return a whole `weight`, floats [outputs, width], as bytes for `self.weight`; keep the
        scales. The second quantization takes the mean of all of them."""
        if weight.device.type == "cpu" and weight.shape[1] % BLOCK:
            raise Problem(f"bitsandbytes is wrong for width {weight.shape[1]} on a CPU. Use a GPU.")
        from bitsandbytes.functional import quantize_4bit

        packed, self.quant_state = quantize_4bit(
            weight, blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
        )
        self.quant_state.dtype = self.dtype
        return packed

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output of a linear layer with the dequantized weight."""
        from bitsandbytes import matmul_4bit

        return matmul_4bit(inputs, self.weight, quant_state=self.quant_state, bias=self.bias)
