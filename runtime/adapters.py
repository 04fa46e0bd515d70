"""LoRA: small trainable matrices next to frozen weights, which may be in 4 bits (QLoRA).

Works with any model. Needs peft, and for 4 bits bitsandbytes, when they are used. All ranks call
each function together.
"""

import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from . import export, ranks, weights
from .checkpoints import checksum
from .options import INSTALL, as_flag, flag
from .weights import ADAPTER

BLOCK = 64  # weights that share a scale
FSDP1_ONLY = ("ddp", "no_shard")  # strategies


@dataclass
class Options:
    """adapters, under --fsdp 2"""

    lora_rank: int = flag(0, "train adapters of this rank (0: all weights)", low=0)
    lora_alpha: float = flag(16.0, "scales their output by alpha / rank", above=0)
    lora_dropout: float = flag(0.0, "dropout rate of their inputs", low=0, below=1)
    lora_targets: list[str] = flag([], "projections with adapters, such as q_proj v_proj (default: "
        "all in the blocks)", metavar="NAME")  # fmt: skip
    load_in_4bit: bool = flag(False, "hold frozen projections in NF4 (QLoRA)")
    merge: bool = flag(False, "export whole models, not adapters")
    packages = {"peft": "lora_rank", "bitsandbytes": "load_in_4bit"}  # and the field that needs it

    def derive(self) -> None:
        """Set --fsdp to 2 if adapters are trained and it is not passed."""
        if self.lora_rank and self.fsdp is None and self.strategy not in FSDP1_ONLY:
            self.fsdp = 2

    def problems(self) -> list[str]:
        """Return a message for each flag of LoRA or 4-bit weights that cannot work."""
        if not self.lora_rank:
            changed = [k for k, x in vars(Options()).items() if getattr(self, k) != x]
            return [f"{as_flag(name)} needs adapters. Pass --lora-rank." for name in changed]
        problems = []
        if self.strategy in FSDP1_ONLY:
            return [f"--lora-rank needs another strategy than {self.strategy}. Pass full_shard."]
        if self.fsdp == 1:
            problems.append("--lora-rank needs --fsdp 2. FSDP1 holds gradients of frozen weights.")
        if self.merge and self.model_name == "tiny":
            problems.append("--merge needs a model in files, not --model-name tiny.")
        for package, name in self.packages.items():
            if getattr(self, name) and importlib.util.find_spec(package) is None:
                problems.append(f"{as_flag(name)} needs {package}. {INSTALL}")
        if self.load_in_4bit and torch.__version__ < "2.13":  # FSDP2 would cast the bytes
            problems.append(f"--load-in-4bit needs torch 2.13 or newer, not {torch.__version__}.")
        return problems


def add(
    args: Options,
    model: PreTrainedModel,
    source: weights.Source,
    blocks: tuple[type[nn.Module], ...],
    dtype: torch.dtype,
) -> "Lora":
    """Freeze a model on meta; add and return fp32 adapters of the projections in its `blocks`.

    Frozen weights are stored in `dtype`, the compute dtype, and with --load-in-4bit the blocks'
    projections in NF4. The adapters' initial values are added to rank 0's `source`. Raise
    ValueError if a target is not a projection.
    """
    import peft

    layers, targets = projections(model, blocks, args.lora_targets)
    if args.load_in_4bit:
        for name, module in layers.items():
            if fits_4bit(model, name):
                model.set_submodule(name, Linear4bit(module, dtype))
    base = Path(args.model_name)
    config = peft.LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=targets,
        task_type="SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM",
        # An absolute path, so that final/ loads from any directory.
        base_model_name_or_path=str(base.absolute()) if base.is_dir() else args.model_name,
    )
    peft.inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    adapted = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
    if not adapted <= layers.keys():  # such as experts
        raise ValueError(
            f"--lora-targets {' '.join(sorted(targets))} names {min(adapted - layers.keys())} too, "
            "which is not a projection of a block. Pass only the projections of the attention."
        )
    config.inference_mode = True  # the value that peft saves
    config.target_modules = sorted(targets)  # the order of a set differs between runs
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    values = {name: x.flatten()[x.numel() // 2].item() for name, x in source.items()}
    for name, parameter in model.named_parameters():
        if source and ADAPTER in name:  # on rank 0; same initialization as peft
            source[name] = torch.zeros(parameter.shape)
            if ".lora_A." in name:
                nn.init.kaiming_uniform_(source[name], a=math.sqrt(5))
    base_checksum = checksum(sorted(values.items()))
    return Lora(config, args.merge, args.load_in_4bit, base_checksum)


def projections(
    model: nn.Module, blocks: tuple, chosen: list[str]
) -> tuple[dict[str, nn.Module], set[str]]:
    """Return by name the linear layers inside a model's `blocks`, which are classes, and the last
    parts of the names of those with adapters: `chosen`, or all. Raise ValueError if one is none."""
    inner = {x for block in model.modules() if isinstance(block, blocks) for x in block.modules()}
    # Llama 4's router is a Linear too, but its forward returns a tuple.
    linear = (nn.Linear.forward, Conv1D.forward)
    layers = {n: x for n, x in model.named_modules() if x in inner and type(x).forward in linear}
    names = {name.rpartition(".")[2] for name in layers}
    targets = set(chosen or names)
    if not targets <= names:
        raise ValueError(
            f"--lora-targets {' '.join(sorted(targets - names))}: no such projection. Pass some of "
            f"{', '.join(sorted(names))}."
        )
    return layers, targets


def fits_4bit(model: PreTrainedModel, name: str) -> bool:
    """Return whether layer `name` may be in 4 bits. T5 reads the dtype of those that stay fp32."""
    return name.rpartition(".")[2] not in (model._keep_in_fp32_modules or [])


@dataclass
class Lora:
    """The adapters of a model, the only part that is trained, saved and exported."""

    config: Any  # of peft
    merge: bool
    in_4bit: bool
    checksum: str  # of one value per tensor: shows whether a resume has the same base model

    def identity(self) -> dict[str, Any]:
        """Return the values that must not change when a run with adapters resumes."""
        config = self.config
        targets = " ".join(sorted(config.target_modules))
        return {
            "adapters": f"rank {config.r}, alpha {config.lora_alpha:g}, on {targets}",
            "base": ranks.on_rank_zero(lambda: self.checksum),
            "in 4 bits": self.in_4bit,
        }

    def export(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, path: Path, dtype: torch.dtype,
        before_each: Callable[[], None],
    ) -> None:  # fmt: skip
        """Write the adapters, in fp32, as a directory that `PeftModel.from_pretrained` loads.

        With --merge, write a whole model in `dtype`: rank 0 maps the base's files again and adds
        the product of the adapters in fp32.
        """
        adapters = {}
        for name, parameter in model.named_parameters():
            if ADAPTER in name:
                before_each()
                key = weights.WRAPPERS.sub("", name).replace(".default.", ".")
                tensor = export.gather(parameter.detach(), torch.float32)
                adapters[f"base_model.model.{key}"] = tensor.cpu()

        def write_adapters() -> None:
            save_file(adapters, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
            self.config.save_pretrained(temporary)
            export.write_tokenizer(tokenizer, temporary)

        with export.new_directory(path) as temporary:
            if self.merge:
                tensors = self._merged(model, adapters, dtype, before_each)
                export.write_model(model, tensors, tokenizer, temporary, dtype)
            else:
                ranks.on_rank_zero(write_adapters)

    def _merged(
        self, model: nn.Module, adapters: dict[str, Tensor], dtype: torch.dtype,
        before_each: Callable[[], None],
    ) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
        """Yield the name and value of each tensor of the merged model. On rank 0, add the adapters'
        products in fp32 and cast to `dtype`; on other ranks the values are on meta."""
        directory = Path(model.config.name_or_path)  # as the run has opened it, on each node
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
                    product = lora_B @ lora_A * (self.config.lora_alpha / self.config.r)
                    # Conv1D's weight is [width, outputs].
                    is_conv = isinstance(base.get_submodule(layer), Conv1D)
                    tensor = tensor + (product.T if is_conv else product)
                tensor = export.gather(tensor, export.stored_dtype(base, name, dtype))
            yield name, tensor


class Linear4bit(nn.Linear):
    """A linear layer whose weight is uint8 [weights / 2, 1], so that FSDP2 can shard it.

    The weight is on meta until the loader stores the result of `quantize` in it. The format is NF4
    with double quantization (Dettmers et al. 2023, QLoRA): 4 bits per weight, 8 bits for the scale
    of every 64 weights (their largest magnitude), and 32 bits for every 256 scales. Every rank
    holds all scales, 1/64 of a byte per weight.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        width, outputs = linear.in_features, linear.out_features
        super().__init__(width, outputs, bias=False, device="meta")
        self.bias = linear.bias
        self.dtype = dtype  # of the computation
        self.quant_state = None
        packed = torch.empty(width * outputs // 2, 1, dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(packed, requires_grad=False)

    def quantize(self, weight: Tensor) -> Tensor:
        """Return `weight`, floats [outputs, width], as bytes for `self.weight`; keep the scales.

        Quantize whole tensors, because the second quantization takes the mean of all scales.
        """
        if weight.device.type == "cpu" and weight.shape[1] % BLOCK:
            raise ValueError(
                f"--load-in-4bit: bitsandbytes gives wrong results for width {weight.shape[1]} on "
                f"a CPU. Use a GPU, or widths that are multiples of {BLOCK}."
            )
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
