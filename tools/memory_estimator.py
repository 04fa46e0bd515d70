"""Estimate the memory and the traffic of FSDP training from a model's config.

    python tools/memory_estimator.py --model-name meta-llama/Llama-2-70b-hf --nodes 2
    python tools/memory_estimator.py --model-name DIRECTORY --json  # or a config.json
    python tools/memory_estimator.py --model-name DIRECTORY --script my_script.py

The first line says how full_shard fits, the second is the command for it, and the tables compare
all strategies under that command's flags; --json has those given. 1 GB is 10^9 bytes. No weights
are read or allocated: the model is built on the meta device, split into the script's FSDP units,
and one forward pass shows which tensors autograd keeps.

"fits" compares the largest of three peaks (training, saving, resuming) with the GPU's memory less
--reserve-gb: for the CUDA context, NCCL's buffers, workspaces of kernels, and memory that the
allocator reserves but does not use (32.14 GiB for 23.58 GiB active in torchtitan's issue 165, less
with PYTORCH_ALLOC_CONF=expandable_segments:True). CPU memory excludes the processes and the page
cache, and the copy of --checkpoint-type full. With --accumulate-no-sync every
GPU also holds the whole gradient. DDP is shown with the activations of FSDP; autocast keeps 5%
(GPT-2, T5) to 22% (Llama) more, because residuals and norms stay in fp32.
"""

import argparse
import contextlib
import functools
import importlib
import importlib.util
import inspect
import io
import itertools
import json
import shlex
import sys
from argparse import Namespace
from collections import ChainMap
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any directory

import torch
import transformers
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, AttentionMaskInterface, GPT2Config, T5Config
from transformers.pytorch_utils import Conv1D

import optional.fused_norms as fused_norms  # optional: fused_norms
import optional.startup_checks as checks  # optional: startup_checks
import policies
from core import ranks, weights
from core.args import Range, fit_global_batch
from core.chunked_loss import CHUNK

Classes = tuple[type[nn.Module], ...]

SCRIPTS = {"llama": "llama_fsdp", "gpt2": "gpt2_fsdp", "t5": "T5_training"}
LLAMA = functools.partial(transformers.LlamaConfig, max_position_embeddings=4096)
T5 = functools.partial(T5Config, decoder_start_token_id=0)
FLAN = functools.partial(T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
LLAMA_KEYS = "hidden_size intermediate_size num_hidden_layers num_attention_heads "
LLAMA_KEYS += "num_key_value_heads vocab_size"
GPT2_KEYS = "n_embd n_layer n_head vocab_size"
T5_KEYS = "d_model d_kv d_ff num_layers num_heads vocab_size"
SIZES = [  # config class, its keys, organization; published sizes and the scripts' tiny models
    (LLAMA, LLAMA_KEYS, "meta-llama", {
        "Llama-2-7b-hf": (4096, 11008, 32, 32, 32, 32000), "tiny": (128, 384, 4, 4, 2, 384),
        "Llama-2-13b-hf": (5120, 13824, 40, 40, 40, 32000),
        "Llama-2-70b-hf": (8192, 28672, 80, 64, 8, 32000),
    }),
    (LLAMA, LLAMA_KEYS, "TinyLlama", {
        "TinyLlama-1.1B-Chat-v1.0": (2048, 5632, 22, 32, 4, 32000),
    }),
    (GPT2Config, GPT2_KEYS, "openai-community", {
        "gpt2": (768, 12, 12, 50257), "gpt2-medium": (1024, 24, 16, 50257),
        "gpt2-large": (1280, 36, 20, 50257), "gpt2-xl": (1600, 48, 25, 50257),
        "tiny-gpt2": (128, 4, 4, 384),
    }),
    (T5, T5_KEYS, "google-t5", {
        "t5-small": (512, 64, 2048, 6, 8, 32128), "t5-base": (768, 64, 3072, 12, 12, 32128),
        "t5-large": (1024, 64, 4096, 24, 16, 32128), "t5-3b": (1024, 128, 16384, 24, 32, 32128),
        "t5-11b": (1024, 128, 65536, 24, 128, 32128), "tiny-t5": (128, 32, 512, 2, 4, 384),
    }),
    (FLAN, T5_KEYS, "google", {
        "flan-t5-small": (512, 64, 1024, 8, 6, 32128),
        "flan-t5-base": (768, 64, 2048, 12, 12, 32128),
        "flan-t5-large": (1024, 64, 2816, 24, 16, 32128),
        "flan-t5-xl": (2048, 64, 5120, 24, 32, 32128),
        "flan-t5-xxl": (4096, 64, 10240, 24, 64, 32128),
    }),
]  # fmt: skip
# GPU and CPU bytes per parameter of AdamW's fp32 moments. Paged moments count as CPU memory,
# because the driver moves them there when the GPU is full (Dettmers et al. 2023).
OPTIMIZERS = {"adamw": (8, 0), "paged_adamw_32bit": (0, 8)}
SHARDED = itertools.product(("shard_grad_op", "full_shard", "hybrid_shard"), (False, True))
MODES = [("ddp", False), *SHARDED]  # strategy, CPU offload
LENGTH_FLAGS = ("max_seq_length", "block_size", "source_length")  # --seq-length in the scripts
OTHER_LENGTH = 1024  # tokens, for a script that has none of them
TERMS = ("parameter", "gradient", "optimizer", "unsharded", "activation", "logit")
NODE_COUNTS = [*range(1, 65), 128, 256, 512, 1024, 2048, 4096]  # for "min nodes"
TABLES = {  # title: the key of an estimate for each column
    "GB on each GPU in training": {
        "params": "parameter_bytes", "grads": "gradient_bytes", "optim.": "optimizer_bytes",
        "units": "unsharded_bytes", "activ.": "activation_bytes", "logits": "logit_bytes",
        "peak": "total_bytes",
    },
    "GB on each GPU, peaks": {
        "training": "total_bytes", "save": "save_bytes", "resume": "resume_bytes",
        "fits": "fits", "min nodes": "smallest_nodes",
    },
    "GB of CPU memory in each node": {
        "training": "cpu_bytes_per_node", "save": "save_cpu_bytes_per_node",
        "resume": "resume_cpu_bytes_per_node",
    },
    "GB sent in a step": {"by a GPU": "sent_bytes_per_gpu", "by a node": "sent_bytes_per_node"},
    "seconds of a step, at least": {
        "in node": "intranode_seconds", "between": "internode_seconds",
        "FLOPs": "compute_seconds", "bound by": "bound_by",
    },
}  # fmt: skip
LEGEND = """units: unsharded parameters and gradients. peak: below the sum, as activations and
gradients do not peak together. in node, between: time to send the bytes at full link speed."""


def short_name(name: str) -> str:
    """Return the last part of a hub id in lower case without suffixes, such as llama-2-7b."""
    name = name.rpartition("/")[2].lower()
    return name.removesuffix("-hf").removesuffix("-v1.0").removesuffix("-chat")


BUILT_IN = {  # hub id, config class, names and values of its sizes, by short name
    short_name(name): (f"{organization}/{name}", config_class, keys.split(), values)
    for config_class, keys, organization, sizes in SIZES
    for name, values in sizes.items()
}


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line and exits with code 1."""

    def error(self, message: str) -> None:
        """Exit with the message."""
        ranks.exit_with(message)


FROM_0, FROM_1, ABOVE_0 = Range(0), Range(1), Range(1e-9)
NUMBERS = {  # flags: default, range, help; the machine's defaults are a DGX A100's
    "--nodes": (1, FROM_1, "number of machines"),
    "--gpus-per-node": (8, FROM_1, "GPUs in each machine"),
    "--gpu-memory-gb": (80.0, ABOVE_0, "memory of each GPU"),
    "--reserve-gb": (4.0, FROM_0, "GPU memory for what is not counted"),
    "--intranode-gbps": (2400.0, ABOVE_0, "Gbit/s that a GPU sends in its node"),
    "--internode-gbps": (1600.0, ABOVE_0, "Gbit/s that a node sends"),
    "--peak-tflops": (312.0, ABOVE_0, "TFLOP/s of a GPU at --precision"),
    "--batch-size": (1, FROM_1, "samples per GPU and micro-batch"),
    "--gradient-accumulation-steps": (1, FROM_1, "micro-batches per step"),
    "--global-batch-size": (0, FROM_0, "samples per step on all GPUs"),
    "--seq-length": (0, FROM_0, "tokens, T5: of the source; 0: the script's default"),
    "--target-length": (0, FROM_0, "tokens of the target, T5; 0: the script's default"),
    "--lora-rank": (0, FROM_0, "adapters of this rank; 0: train all weights"),
    "--lora-alpha": (16.0, ABOVE_0, "scales their output by alpha / rank"),
    "--lora-dropout": (0.0, Range(0, 1), "dropout rate of their inputs"),
}


def parse_args(argv: list[str] | None = None) -> Namespace:
    """Return the flags of `argv` (default: sys.argv), or exit with a message."""
    parser = Parser(
        description="\n\n".join(__doc__.split("\n\n")[:2]), allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--model-name", default="meta-llama/Llama-2-7b-hf",
        help=f"hub id, directory, config.json, or one of {', '.join(BUILT_IN)}")  # fmt: skip
    add("--script", help="your training script (default: the one for this model type)")
    for name, (default, _, text) in NUMBERS.items():
        add(name, type=type(default), default=default, help=f"{text} (default: {default})")
    add("--precision", choices=policies.PRECISIONS, default="bf16", help="compute dtype")
    add("--fsdp", type=int, choices=(1, 2),
        help="as in the scripts (default: 1, or 2 for adapters and offload)")  # fmt: skip
    add("--attention", choices=ATTENTIONS, default="fused",
        help="fused: flash, varlen or sdpa; eager also keeps the score matrices")  # fmt: skip
    add("--activation-checkpointing", action=argparse.BooleanOptionalAction,
        help="recompute blocks (default: the script's)")  # fmt: skip
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="paged: moments on the CPU")
    add("--lora-targets", nargs="+", default=(), help="projections (default: all in the blocks)")
    add("--load-in-4bit", action="store_true", help="hold frozen projections in NF4 (QLoRA)")
    add("--json", action="store_true", help="print JSON, in bytes and seconds")
    args = parser.parse_args(argv)
    problems = []
    for name, (_, limits, _) in NUMBERS.items():
        value = getattr(args, name[2:].replace("-", "_"))
        if not limits.low <= value < limits.high:
            problems.append(f"{name} is {value}, but must be at least {limits.low}.")
    problems = problems or fit_global_batch(args, args.nodes * args.gpus_per_node)
    if args.lora_rank:
        args.fsdp = args.fsdp or 2
    rules = {
        "--lora-rank needs --fsdp 2.": args.lora_rank and args.fsdp == 1,
        "--load-in-4bit needs --lora-rank.": args.load_in_4bit and not args.lora_rank,
        "--lora-targets needs --lora-rank.": args.lora_targets and not args.lora_rank,
        f"--optimizer {args.optimizer} needs --fsdp 1 and no adapters.": (
            args.fsdp == 2 and args.optimizer != "adamw"
        ),
    }
    if problems := [*problems, *(text for text, is_wrong in rules.items() if is_wrong)]:
        ranks.exit_with(" ".join(problems))
    return args


def changed(args: Namespace, **values: Any) -> Namespace:
    """Return a copy of `args` with other values."""
    return Namespace(**vars(args) | values)


def built_in_size(name: str) -> str | None:
    """Return the key of `name` in BUILT_IN, or None if it is a path or not built in."""
    size = short_name(name)
    return size if size in BUILT_IN and not Path(name).exists() else None


def load_config(name: str) -> transformers.PretrainedConfig:
    """Return the config of a path, a built-in size or a hub id. Raise Problem if there is none."""
    if size := built_in_size(name):
        _, config_class, keys, values = BUILT_IN[size]
        return config_class(**dict(zip(keys, values, strict=True)))
    path = Path(name)
    if not path.exists():
        try:
            path = weights.find_directory(name, ["config.json"])
        except ranks.Problem as error:
            raise ranks.Problem(f"{error} Built-in sizes: {', '.join(BUILT_IN)}.") from None
    try:
        return transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # any type: a file may contain any JSON
        raise ranks.Problem(
            f"--model-name {name}: its config is invalid: {' '.join(str(error).split())}"
        ) from None


def hub_id(name: str) -> str:
    """Return the --model-name to pass to a script for the estimator's model `name`."""
    if Path(name).is_file():  # a config.json
        return str(Path(name).parent)
    size = built_in_size(name)
    if size is None or "/" in name:
        return name
    return "tiny" if size.partition("-")[0] == "tiny" else BUILT_IN[size][0]


def load_script(args: Namespace, config: transformers.PretrainedConfig) -> ModuleType:
    """Return the module of --script, or of the script for the model's type."""
    if args.script is None:
        other = "T5_training" if config.is_encoder_decoder else "llama_fsdp"
        return importlib.import_module(SCRIPTS.get(config.model_type, other))
    return load_file(Path(args.script))


def load_file(path: Path) -> ModuleType:
    """Return the module of a training script. Raise Problem if there is no such file."""
    if not path.is_file():
        raise ranks.Problem(f"{path} does not exist. Pass a training script.")
    sys.path.append(str(path.parent))  # for its data module, which may be in the same directory
    spec = importlib.util.spec_from_file_location(path.stem, path)
    script = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def flags_of(section: Any) -> dict[str, Any]:
    """Return the flags of a script with their values, by field, from its sections."""
    flags = {}
    for field in fields(section):
        value = getattr(section, field.name)
        flags |= flags_of(value) if is_dataclass(value) else {field.name: value}
    return flags


def build(
    script: ModuleType, config: transformers.PretrainedConfig, name: str
) -> tuple[nn.Module, Classes]:
    """Return the model of a config on meta and the classes of its blocks: the script's own model,
    or the one that the Auto class has for it. Of a multimodal model, return the text part. Raise
    Problem if there is none."""
    config, kind = weights.choose_class(config, script.MODEL)
    if kind is None:
        raise ranks.Problem(f"--model-name {name} is a {config.model_type}, which "
                            f"{script.__name__} cannot train. {script.OTHER}")  # fmt: skip
    config._attn_implementation = "estimate"
    if config.model_type == "gpt2":  # as the script does
        config.activation_function = "gelu_pytorch_tanh"
    with torch.device("meta"):
        model = kind(config)
    fused_norms.fuse(model, script.MODEL, getattr(script, "NORMS", ()))  # optional: fused_norms
    with contextlib.redirect_stdout(io.StringIO()):  # the estimate is printed first
        blocks = policies.layer_classes(model, script.MODEL, script.BLOCKS)
    return model, blocks


class FusedAttention(torch.autograd.Function):
    """Attention for meta tensors, which saves the tensors that a fused kernel saves: no scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """Return an empty output [batch, length, heads, head size] for a query [batch, heads,
        length, head size], and save an empty fp32 log-sum-exp of the scores."""
        batch, heads, length, size = query.shape
        output = query.new_empty(batch, length, heads, size)
        log_sums = query.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, log_sums, bias)
        return output


def fused_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None,
    position_bias: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return FusedAttention's output and None; set `module.kernel_flops` to its forward FLOPs. T5's
    bias is masked by padding, so every layer saves a bias [batch, heads, length, length]."""
    if position_bias is not None:
        shape = (query.size(0), 1, 1, key.size(2))
        padding = torch.empty(shape, dtype=torch.bool, device=query.device)
        position_bias = torch.where(padding, position_bias, 0.0)
    module.kernel_flops = 4 * query.numel() * key.size(2)
    return FusedAttention.apply(query, key, value, position_bias), None


def eager_attention(module: nn.Module, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the output and weights of the eager attention of the module's own architecture."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *inputs, **options)


ATTENTIONS = {"fused": fused_attention, "eager": eager_attention}


class Weight(NamedTuple):
    """A parameter's shape and storage."""

    shape: torch.Size
    is_trained: bool = True  # frozen weights are stored in the compute dtype
    in_4bit: bool = False


@dataclass
class Unit:
    """The memory of one FSDP unit and the elements it trains, including padding."""

    gathered: int  # bytes of its unsharded parameters, in the compute dtype or 4 bits
    held: int  # bytes of rank 0's shard
    trained: int  # elements that have gradients


@dataclass
class Model:
    """A model and one micro-batch of it on one GPU."""

    units: list[list[Weight]]  # parameters by FSDP unit, the root's first
    parameters: int  # elements, as below
    trained: int
    largest_in_4bit: int
    head: int  # parameters of the output head
    head_is_trained: bool
    tied: bool  # the output head shares its weight with the input embedding
    checkpointing: bool  # as requested, or the script's default
    script: str  # path
    flags: dict[str, Any]  # the script's flags with their defaults
    chunked: bool  # the loss computes the logits of one chunk of tokens at a time
    logit_count: int  # elements of the logits held at a time
    logits: int  # their bytes
    activations: int  # bytes without activation checkpointing
    stays: int  # bytes of activations that stay with activation checkpointing
    block: int  # bytes added when the largest block is recomputed
    flops: int  # FLOPs of a forward pass
    head_flops: int


def read_model(args: Namespace) -> Model:
    """Return the sizes of --model-name, built on meta; replace lengths of 0 in `args`. Raise
    Problem if the model does not exist or does not fit the script or the sequence length.

    T5_training.py holds the logits of all target tokens: as computed, in fp32, and their fp32
    log-softmax or its gradient. The other scripts hold the logits of CHUNK tokens at a time.
    """
    config = load_config(args.model_name)
    script = load_script(args, config)
    flags = flags_of(script.TINY if hub_id(args.model_name) == "tiny" else script.Args())
    for name, default in (("lora_rank", 0), ("optimizer", "adamw")):
        if getattr(args, name) != default and name not in flags:
            raise ranks.Problem(f"{script.__name__} has no --{name.replace('_', '-')}. Remove it.")
    lengths = [flags[name] for name in LENGTH_FLAGS if name in flags]
    args.seq_length = args.seq_length or max(lengths, default=OTHER_LENGTH)
    args.target_length = args.target_length or flags.get("target_length", args.seq_length)
    AttentionInterface.register("estimate", ATTENTIONS[args.attention])
    AttentionMaskInterface.register("estimate", lambda **_: None)
    compute = policies.PRECISIONS[args.precision].param_dtype
    model, blocks = build(script, config, args.model_name)
    config = model.config
    checks.check_length(args, "seq_length", config)  # optional: startup_checks
    in_4bit = add_adapters(args, model, blocks) if args.lora_rank else set()
    if not getattr(config, "scale_decoder_outputs", True):  # FLAN-T5's head is not tied
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    units = weights_by_unit(script, model, blocks, in_4bit)
    head = model.get_output_embeddings().weight
    checkpointing = args.activation_checkpointing
    if checkpointing is None:
        checkpointing = flags["activation_checkpointing"]
    chunked = hasattr(script, "LossModel")
    tokens = args.batch_size * args.target_length
    if chunked:
        tokens = min(args.batch_size * args.seq_length, CHUNK)
    return Model(
        units=units,
        parameters=sum(p.numel() for p in model.parameters()),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        largest_in_4bit=max((weight.numel() for weight in in_4bit), default=0),
        head=head.numel(),
        head_is_trained=head.requires_grad,
        tied=head is model.get_input_embeddings().weight,
        checkpointing=checkpointing,
        script=args.script or f"{script.__name__}.py",
        flags=flags,
        chunked=chunked,
        logit_count=tokens * config.vocab_size,
        logits=tokens * config.vocab_size * (8 + compute.itemsize % 4),
        **forward_pass(model.to(compute).train(), blocks, args),
    )


def weights_by_unit(
    script: ModuleType, model: nn.Module, blocks: Classes, in_4bit: set[nn.Parameter]
) -> list[list[Weight]]:
    """Return a list of Weights for the root unit, then one for each other unit: a block or, if
    `wrap_model` names nn.Embedding, an embedding or a head that are not tied."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    others = set()
    is_tied = head.weight is embedding.weight
    if not is_tied and "nn.Embedding" in inspect.getsource(script.wrap_model):
        others = {head, *(x for x in model.modules() if isinstance(x, nn.Embedding))}
    wrapped = [x for x in model.modules() if isinstance(x, blocks) or x in others]
    inner = {p for module in wrapped for p in module.parameters()}
    root = [p for p in model.parameters() if p not in inner]
    units = []
    for parameters in (root, *(list(module.parameters()) for module in wrapped)):
        units.append([Weight(p.shape, p.requires_grad, p in in_4bit) for p in parameters])
    return units


class Adapted(nn.Module):
    """A projection with an adapter of --lora-rank, which computes as peft's does."""

    def __init__(self, args: Namespace, layer: nn.Module) -> None:
        super().__init__()
        outputs, width = layer.weight.shape
        if isinstance(layer, Conv1D):
            width, outputs = layer.weight.shape
        self.base_layer = layer
        self.lora_dropout = nn.Dropout(args.lora_dropout)
        self.lora_A = nn.Linear(width, args.lora_rank, bias=False, device="meta")
        self.lora_B = nn.Linear(args.lora_rank, outputs, bias=False, device="meta")
        self.scaling = args.lora_alpha / args.lora_rank

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the sum of the outputs of the projection and of its adapter."""
        change = self.lora_B(self.lora_A(self.lora_dropout(inputs))) * self.scaling
        return self.base_layer(inputs) + change


def add_adapters(args: Namespace, model: nn.Module, blocks: Classes) -> set[nn.Parameter]:
    """Freeze a model on meta and add adapters to the projections in its blocks. Return the weights
    that --load-in-4bit quantizes, whose shapes stay. Raise Problem if a target is none."""
    model.requires_grad_(False)
    inner = {x for block in model.modules() if isinstance(block, blocks) for x in block.modules()}
    linear = (nn.Linear.forward, Conv1D.forward)  # not Llama 4's router
    layers = {n: x for n, x in model.named_modules() if x in inner and type(x).forward in linear}
    names = {name.rpartition(".")[2] for name in layers}
    targets = set(args.lora_targets or names)
    if not targets <= names:
        raise ranks.Problem(f"--lora-targets: {', '.join(sorted(targets - names))} is not one of "
                            f"{', '.join(sorted(names))}.")  # fmt: skip
    in_4bit = set()
    for name, layer in layers.items():
        last = name.rpartition(".")[2]
        if args.load_in_4bit and last not in (model._keep_in_fp32_modules or []):
            in_4bit.add(layer.weight)
        if last in targets:
            model.set_submodule(name, Adapted(args, layer))
    return in_4bit


def storages(weights: set[int], *tensors: Any) -> dict[int, torch.UntypedStorage]:
    """Return the storages of tensors by address, except addresses in `weights`. Keep the result
    as long as you compare addresses, so that none is reused."""
    all_storages = [x.untyped_storage() for x in tensors if isinstance(x, Tensor)]
    return {storage._cdata: storage for storage in all_storages if storage._cdata not in weights}


def storage_bytes(*parts: dict[int, torch.UntypedStorage]) -> int:
    """Return the bytes of all storages in `parts`, each address counted once."""
    return sum(storage.nbytes() for storage in ChainMap(*parts).values())


def forward_pass(model: nn.Module, classes: Classes, args: Namespace) -> dict[str, Any]:
    """Return Model's fields for the bytes that autograd keeps after a forward pass, and its FLOPs.

    Each tensor counts once, and weights do not count. With activation checkpointing the blocks'
    inputs stay, and one block's tensors at a time.
    """
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    # Storages that autograd keeps, by address: outside of the blocks, and in each block.
    outside: dict[int, torch.UntypedStorage] = {}
    blocks: list[dict[int, torch.UntypedStorage]] = []
    inputs: dict[int, torch.UntypedStorage] = {}  # inputs of all blocks
    scopes = [outside]  # a stack; the last item is for the module that is running

    def keep(tensor: Tensor) -> Tensor:
        scopes[-1].update(storages(weights, tensor))
        return tensor

    def enter(_: nn.Module, args: tuple, options: dict[str, Any]) -> None:
        leaves = pytree.tree_leaves((args, options))  # rotary embeddings are in a tuple
        inputs.update(storages(weights, *leaves))
        blocks.append({})
        scopes.append(blocks[-1])

    def leave(*_: Any) -> None:
        scopes.pop()

    for module in model.modules():
        if isinstance(module, classes):
            module.register_forward_pre_hook(enter, with_kwargs=True)
            module.register_forward_hook(leave)
        if isinstance(module, nn.Dropout) and module.p:  # on a GPU, autograd keeps a mask of bytes
            module.forward = lambda x, p=module.p: torch.native_dropout(x, p, True)[0]
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    ids = torch.empty(args.batch_size, args.seq_length, dtype=torch.int64, device="meta")
    batch = {"input_ids": ids, "attention_mask": torch.empty_like(ids)}
    targets = ids
    if model.config.is_encoder_decoder:
        targets = ids.new_empty(args.batch_size, args.target_length)
        batch["decoder_input_ids"] = targets
    with hooks, FlopCounterMode(display=False) as counter:
        model(**batch, use_cache=False)
    attention_flops = sum(getattr(m, "kernel_flops", 0) for m in model.modules())
    stays = storage_bytes(outside, inputs)
    return {
        "activations": storage_bytes(outside, *blocks),
        "stays": stays,
        "block": max(storage_bytes(outside, inputs, block) for block in blocks) - stays,
        "flops": counter.get_total_flops() + attention_flops,
        "head_flops": 2 * targets.numel() * model.get_output_embeddings().weight.numel(),
    }


@functools.cache
def flat_parameter(sizes: tuple[int, ...], shards: int, aligned: int) -> tuple[int, int]:
    """Return the elements of an FSDP1 unit with padding, and rank 0's elements without padding.
    Each parameter starts at a multiple of `aligned` elements, 16 bytes in the compute dtype. All
    shards have one size."""
    spans, end = [], 0
    for size in sizes:
        start = -(-end // aligned) * aligned
        end = start + size
        spans.append((start, end))
    shard = -(-end // shards)
    return shards * shard, sum(max(0, min(end, shard) - start) for start, end in spans)


def sharded_by_rows(weights: list[Weight], shards: int, itemsize: int) -> Unit:
    """Return the sizes of an FSDP2 unit. Each parameter is split by rows and padded to rank 0's
    number of rows (torch/distributed/fsdp/_fully_shard/_fsdp_param.py). 4-bit weights are rows of
    one byte. `itemsize` is the bytes of the compute dtype."""
    unit = Unit(gathered=0, held=0, trained=0)
    for weight in weights:
        shard = -(-weight.shape[0] // shards) * weight.shape[1:].numel()
        if weight.in_4bit:
            shard = -(-weight.shape.numel() // 2 // shards)
            unit.held += shard
            unit.gathered += shards * shard
            continue
        unit.gathered += itemsize * shards * shard
        if weight.is_trained:
            unit.trained += shards * shard
            unit.held += 4 * shard
        else:
            unit.held += itemsize * shard
    return unit


def scale_bytes(model: Model) -> int:
    """Return the bytes of the scales of 4-bit weights, all of which every GPU holds: 8 bits per 64
    weights, 32 bits per 256 of those, and for each tensor their mean and the 16 values in fp32."""
    total = 0
    for weight in itertools.chain.from_iterable(model.units):
        if weight.in_4bit:
            blocks = -(-weight.shape.numel() // 64)
            total += blocks + 4 * -(-blocks // 256) + 4 * (1 + 16)
    return total


def layout(model: Model, args: Namespace, strategy: str) -> tuple[int, int, list[Unit]]:
    """Return the number of GPUs that share the model, the elements that rank 0 trains without
    padding, and the units. DDP has one unit without padding."""
    itemsize = policies.PRECISIONS[args.precision].param_dtype.itemsize
    if strategy == "ddp":
        count = model.parameters
        return 1, count, [Unit(gathered=itemsize * count, held=4 * count, trained=count)]
    shards = args.gpus_per_node
    if strategy != "hybrid_shard":
        shards *= args.nodes
    if args.fsdp == 2:
        units = [sharded_by_rows(unit, shards, itemsize) for unit in model.units]
        return shards, sum(unit.trained for unit in units) // shards, units
    units = []
    rank0_elements = 0
    for unit in model.units:
        sizes = tuple(weight.shape.numel() for weight in unit)
        whole, rank_0 = flat_parameter(sizes, shards, aligned=16 // itemsize)
        units.append(Unit(gathered=itemsize * whole, held=4 * whole // shards, trained=whole))
        rank0_elements += rank_0
    return shards, rank0_elements, units


def state_dicts(
    fsdp: int, strategy: str, offload: bool, states: list[int], moments: int, unit: int
) -> tuple[int, int, int]:
    """Return a GPU's peak bytes in a save and in a resume, and the bytes of the save's CPU copies.

    `states` are the GPU bytes of parameters, gradients and moments, `moments` the bytes of all
    moments, also on the CPU, `unit` those of the largest FSDP unit in fp32. FSDP1 starts a save
    with the last gradients, frees them when it gathers the first unit, and holds two units, or
    three with offload. Its loaded moments then pass through the GPU. FSDP2 and DDP copy nothing.
    """
    parameters, gradients, optimizer = states
    if strategy == "ddp":
        return sum(states), sum(states), 0
    if fsdp == 2:
        return (0, 0, 0) if offload else (parameters + optimizer, sum(states), 0)
    copies = parameters + moments
    if offload:
        return 3 * unit, unit + moments, copies
    peak = parameters + optimizer + max(gradients, 2 * unit)
    return peak, peak, copies


def memory(model: Model, args: Namespace, *choice: Any) -> dict[str, int]:
    """Return the bytes on each GPU, by term and at the peaks, and of CPU memory in each node. A
    `choice` is strategy, CPU offload, activation checkpointing, optimizer.

    Parameters, gradients and AdamW's moments take 4 + 4 + 8 bytes per parameter, divided by the
    shards. Offload moves them to the CPU. Frozen weights take the bytes of the compute dtype, or
    half a byte plus the scales.
    """
    strategy, offload, checkpointing, optimizer = choice
    shards, rank0_elements, units = layout(model, args, strategy)
    trained = sum(unit.trained for unit in units) // shards
    scales = scale_bytes(model)
    on_gpu, on_cpu = OPTIMIZERS[optimizer]
    # parameters, gradients, moments
    states = [sum(unit.held for unit in units) + scales, 4 * trained, on_gpu * rank0_elements]
    cpu = on_cpu * rank0_elements
    moments = states[2] + cpu
    unit = 4 * max(unit.trained for unit in units)
    save, resume, copies = state_dicts(args.fsdp, strategy, offload, states, moments, unit)
    if offload:
        cpu = pinned_bytes(model, args, units, shards) + moments
        states = [scales, 0, 0]
    kept, block = model.activations, 0
    if checkpointing:
        kept, block = model.stays, model.block
    find_peak = fsdp1_peak
    if args.fsdp == 2 and strategy != "ddp":
        find_peak = fsdp2_peak
    unsharded, logits, total = find_peak(model, args, strategy, states, kept, block)
    terms = [*states, unsharded, kept + block, logits]
    sizes = {f"{term}_bytes": size for term, size in zip(TERMS, terms, strict=True)}
    peak = max(total, save, resume)
    return sizes | {
        "total_bytes": total,
        "save_bytes": save,
        "resume_bytes": resume,
        "peak_bytes": peak,
        "fits": peak <= (args.gpu_memory_gb - args.reserve_gb) * 1e9,
        "cpu_bytes_per_node": args.gpus_per_node * cpu,
        "save_cpu_bytes_per_node": args.gpus_per_node * (cpu + copies),
        "resume_cpu_bytes_per_node": args.gpus_per_node * (cpu + min(copies, moments)),
    }


def pinned_bytes(model: Model, args: Namespace, units: list[Unit], shards: int) -> int:
    """Return the bytes of pinned memory for a GPU's offloaded parameters and gradients. PyTorch's
    CachingHostAllocator rounds each allocation up to a power of two: the shard of a unit under
    FSDP1, of a parameter under FSDP2."""
    pieces = units
    if args.fsdp == 2:
        itemsize = policies.PRECISIONS[args.precision].param_dtype.itemsize
        weights = itertools.chain.from_iterable(model.units)
        pieces = [sharded_by_rows([weight], shards, itemsize) for weight in weights]
    sizes = [size for piece in pieces for size in (piece.held, 4 * piece.trained // shards)]
    return sum(1 << (size - 1).bit_length() for size in sizes if size)


def loss_bytes(model: Model, args: Namespace, itemsize: int) -> int:
    """Return the peak bytes of the loss; `itemsize` is the bytes of the compute dtype. For a chunk,
    it holds three tensors in fp32 (log-softmax, its gradient, the logits' gradient), then the
    logits' gradient and that of a trained head in the compute dtype, beside the head's sum over
    several chunks in fp32. The backward pass multiplies a gradient by a factor."""
    if not model.chunked:
        return model.logits
    gradient = itemsize * model.head if model.head_is_trained else 0
    several = args.batch_size * args.seq_length > CHUNK
    held = 4 * model.head if several and model.head_is_trained else 0
    at_work = max(12 * model.logit_count, gradient + itemsize * model.logit_count)
    return max(held + at_work, 2 * gradient)


def fsdp1_peak(
    model: Model, args: Namespace, strategy: str, states: list[int], kept: int, block: int
) -> tuple[int, int, int]:
    """Return FSDP1's and DDP's bytes of unsharded tensors, of the loss, and at the peak.

    `states` are the bytes of parameters, gradients and moments, `kept` the bytes that autograd
    keeps, `block` those added while a block is recomputed.

    FULL_SHARD and HYBRID_SHARD hold unsharded parameters, in the compute dtype, of the root, the
    current unit and the prefetched one; SHARD_GRAD_OP those of all units. Unsharded gradients are
    those of the root, the current unit and the one being reduced. A single GPU shards nothing, but
    casts a unit at a time. DDP holds the casts of autocast, and its gradients are in buckets.

    The peak is in the loss, before there are gradients, or in the blocks, after the logits are
    freed. In the blocks activations are freed as gradients arrive, so only the larger of the two
    counts. With accumulation both phases have all gradients.
    """
    itemsize = policies.PRECISIONS[args.precision].param_dtype.itemsize
    shards, _, units = layout(model, args, strategy)
    root, *others = (unit.trained for unit in units)
    pairs = itertools.pairwise([*others, 0])
    at_work = root + max((unit + next_unit for unit, next_unit in pairs), default=0)
    parameters = at_work
    if strategy == "shard_grad_op" and shards > 1:
        parameters = root + sum(others)
    unsharded = itemsize * (parameters + at_work)
    if strategy == "ddp":
        unsharded = root * (itemsize % 4)
    logits = loss_bytes(model, args, itemsize)
    in_loss = kept + logits
    in_block = kept + states[1] + block
    if args.gradient_accumulation_steps > 1 or strategy == "ddp":
        in_loss += states[1]
    else:
        in_block -= min(states[1], kept)
    return unsharded, logits, states[0] + states[2] + unsharded + max(in_loss, in_block)


def fsdp2_peak(
    model: Model, args: Namespace, strategy: str, states: list[int], kept: int, block: int
) -> tuple[int, int, int]:
    """Return FSDP2's bytes of unsharded tensors in a block's backward pass, of the loss, and at
    the peak. The arguments are those of `fsdp1_peak`.

    The peak is in one of three phases, according to FSDPMemTracker of torch 2.13: the loss; a
    block, with its parameters and gradients, the next block's parameters and the previous block's
    gradients; or the root, with all gradients and, for a tied weight, those of both uses and their
    sum.
    """
    precision = policies.PRECISIONS[args.precision]
    compute, reduce = precision.param_dtype.itemsize, precision.reduce_dtype.itemsize
    _, _, (root, *others) = layout(model, args, strategy)
    gathered = root.gathered
    if strategy == "shard_grad_op":
        gathered += sum(unit.gathered for unit in others)
    at_work = 0
    for unit, next_unit in itertools.pairwise([*others, Unit(0, 0, 0)]):
        gradients = (compute + reduce) * unit.trained
        at_work = max(at_work, unit.gathered + gradients + next_unit.gathered)
    at_work += compute * model.largest_in_4bit  # dequantized for one matrix product
    tied_gradient = 0
    if model.tied and model.head_is_trained:
        tied_gradient = compute * model.head
    logits = loss_bytes(model, args, compute)
    in_loss = kept + others[-1].gathered + logits
    in_block = kept + states[1] + at_work + tied_gradient + block
    in_root = states[1] + reduce * others[-1].trained + 3 * tied_gradient
    if args.gradient_accumulation_steps == 1:
        in_block -= min(states[1], kept)  # activations are freed as gradients arrive
    else:
        in_loss += states[1]
    peak = states[0] + states[2] + gathered + max(in_loss, in_block, in_root)
    return gathered + at_work, logits, peak


def traffic(
    model: Model, args: Namespace, strategy: str, checkpointing: bool | str
) -> dict[str, Any]:
    """Return the bytes that each GPU and each node sends in a step, and the minimum seconds for it.

    In a ring of k GPUs each sends (k - 1) / k of a tensor to gather or reduce-scatter it, and twice
    that to all-reduce it. All units but the root are gathered twice, except under shard_grad_op.
    hybrid_shard does this within a node and all-reduces shards between nodes. A ring leaves each
    node once. A step takes the FLOPs of three forward passes, or of two for frozen weights, plus
    those of recomputed blocks. PCIe traffic and the optimizer's step are not counted.
    """
    precision = policies.PRECISIONS[args.precision]
    steps = args.gradient_accumulation_steps
    ring_size, _, (root, *others) = layout(model, args, strategy)
    gathered = root.gathered + 2 * sum(unit.gathered for unit in others)
    if strategy == "shard_grad_op":
        gathered = root.gathered + sum(unit.gathered for unit in others)
    reduced = precision.reduce_dtype.itemsize * sum(unit.trained for unit in (root, *others))
    ring = gathered + reduced
    between_nodes = 0.0
    if strategy == "ddp":
        ring = 2 * 4 * root.trained
        ring_size = args.nodes * args.gpus_per_node
    elif strategy == "hybrid_shard":
        between_nodes = steps * 2 * reduced / ring_size * (args.nodes - 1) / args.nodes
    ring *= steps * (ring_size - 1) / ring_size
    node = args.gpus_per_node * between_nodes
    if ring_size > args.gpus_per_node:
        node += ring
    flops = (2 + model.trained / model.parameters) * model.flops
    if checkpointing:
        flops += model.flops - model.head_flops
    seconds = {
        "intranode_seconds": ring * 8e-9 / args.intranode_gbps if args.gpus_per_node > 1 else 0.0,
        "internode_seconds": node * 8e-9 / args.internode_gbps,
        "compute_seconds": steps * flops * 1e-12 / args.peak_tflops,
    }
    sent = {"sent_bytes_per_gpu": round(ring + between_nodes), "sent_bytes_per_node": round(node)}
    return sent | seconds | {"bound_by": max(seconds, key=seconds.get).removesuffix("_seconds")}


def smallest_nodes(model: Model, args: Namespace, *choice: Any) -> int | None:
    """Return the smallest of NODE_COUNTS on which a `choice` (see `memory`) fits, or None."""
    for nodes in NODE_COUNTS:
        if memory(model, changed(args, nodes=nodes), *choice)["fits"]:
            return nodes
    return None


def estimate(model: Model, args: Namespace, *choice: Any) -> dict[str, Any]:
    """Return a table row: memory, traffic and smallest node count. For `choice`, see `memory`."""
    strategy, offload, checkpointing, optimizer = choice
    return {
        "strategy": strategy,
        "activation_checkpointing": checkpointing,
        "optimizer": optimizer,
        "cpu_offload": offload,
        **memory(model, args, *choice),
        "smallest_nodes": smallest_nodes(model, args, *choice),
        **traffic(model, args, strategy, checkpointing),
    }


def takes_offload(args: Namespace) -> bool:
    """Return whether the scripts accept --cpu-offload with these flags, see policies.py."""
    if args.fsdp == 2:
        return args.precision != "fp16"
    return args.nodes * args.gpus_per_node > 1 and args.gradient_accumulation_steps == 1


def choices(model: Model, args: Namespace) -> list[tuple[str, bool, bool, str]]:
    """Return every `choice` (see `memory`) that the scripts accept with these flags."""
    accepted = []
    for strategy, offload in MODES:
        is_refused = (
            (strategy == "ddp" and args.fsdp == 2)
            or (strategy == "hybrid_shard" and args.gpus_per_node == 1)
            or (offload and (args.optimizer != "adamw" or not takes_offload(args)))
        )
        if not is_refused:
            accepted.append((strategy, offload, model.checkpointing, args.optimizer))
    return accepted


def candidates(model: Model, args: Namespace) -> list[tuple[Namespace, dict[str, Any]]]:
    """Return flags that may fit better than `args`, each with its estimate of full_shard: the flags
    as given; activation checkpointing, which costs a third more compute; CPU offload, which is
    slower but needs no more machines. Unless --fsdp is given, offload tries both, first the one
    that needs less memory on the host."""
    offloaded = []
    for fsdp in (args.fsdp,) if args.fsdp else (None, 2):
        flags = changed(args, fsdp=fsdp, optimizer="adamw")
        if takes_offload(flags):
            row = estimate(model, flags, "full_shard", True, True, "adamw")
            offloaded.append((flags, row))
    offloaded.sort(key=lambda candidate: host_bytes(candidate[1]))
    switches = (model.checkpointing, True)
    rows = [estimate(model, args, "full_shard", False, x, args.optimizer) for x in switches]
    return [*((args, row) for row in rows), *offloaded]


def host_bytes(row: dict[str, Any]) -> int:
    """Return the peak of an estimate's CPU memory in each node."""
    return max(row[f"{phase}cpu_bytes_per_node"] for phase in ("", "save_", "resume_"))


def advise(model: Model, args: Namespace) -> tuple[Namespace, dict[str, Any]] | None:
    """Return flags with which full_shard fits, and its estimate, or None if it never fits: the
    first of `candidates` that fits, or else the first that fits on more nodes, on these nodes."""
    options = candidates(model, args)
    if not any(row["fits"] for _, row in options):
        node_counts = [row["smallest_nodes"] for _, row in options[1:] if row["smallest_nodes"]]
        if not node_counts:
            return None
        options = candidates(model, changed(args, nodes=node_counts[0]))
    return next((flags, row) for flags, row in options if row["fits"])


def verdict(model: Model, given: Namespace, args: Namespace, row: dict[str, Any]) -> str:
    """Return how full_shard fits with the flags `args` and the estimate `row`, and its command. Say
    what was added to the `given` flags."""
    added = []
    if args.fsdp != given.fsdp:
        added.append(f"--fsdp {args.fsdp}")
    if row["activation_checkpointing"] != model.checkpointing:
        added.append("--activation-checkpointing")
    if row["cpu_offload"]:
        added.append("--cpu-offload")
    extra = f" with {' '.join(added)}" if added else ""
    line = f"full_shard{extra} fits on {args.nodes} x {args.gpus_per_node} GPUs: "
    line += f"{row['peak_bytes'] / 1e9:.1f} of {args.gpu_memory_gb:g} GB"
    if row["cpu_offload"]:
        line += f", and {host_bytes(row) / 1e9:,.0f} GB of CPU memory per node"
    return f"{line}. Command for each node:\n{command(model, args, row)}"


def command(model: Model, args: Namespace, row: dict[str, Any]) -> str:
    """Return the torchrun command for a table row of full_shard, without the flags of the data."""
    words = ["torchrun", "--nnodes", args.nodes, "--nproc_per_node", args.gpus_per_node]
    if args.nodes > 1:
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29500", "--rdzv-id", 1]
    words += [model.script, "--model-name", hub_id(args.model_name), "--strategy", "full_shard"]
    names = ["fsdp", *LENGTH_FLAGS, "batch_size", "gradient_accumulation_steps", "target_length"]
    names += ["precision", "lora_rank", "lora_targets", "load_in_4bit"]
    names += ["activation_checkpointing", "cpu_offload", "optimizer"]
    values = vars(args) | row | dict.fromkeys(LENGTH_FLAGS, args.seq_length)
    values["fsdp"] = args.fsdp or model.flags["fsdp"]
    for name in names:
        flag, value = name.replace("_", "-"), values[name]
        if model.flags.get(name, value) == value:  # the default, or a flag that the script lacks
            continue
        if value is False:
            words.append(f"--no-{flag}")
        elif value is True:
            words.append(f"--{flag}")
        else:
            words += [f"--{flag}", *(value if isinstance(value, list) else [value])]
    return shlex.join(map(str, words))


def cell(key: str, value: Any) -> str:
    """Return `value` as text for a table cell, in GB if its name `key` contains `bytes`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if "bytes" in key:
        return f"{value / 1e9:,.2f}"
    if isinstance(value, float):
        return f"{value:,.2f}"
    return "none" if value is None else str(value)


def print_table(title: str, rows: list[dict[str, Any]], columns: dict[str, str]) -> None:
    """Print rows of `estimate` as a table; `columns` maps each heading to a key of the rows."""
    print(f"\n{title:30}" + "".join(f"{heading:>10}" for heading in columns))
    for row in rows:
        name = f"  {row['strategy']}"
        if row["cpu_offload"]:
            name += " + offload"
        cells = [cell(key, row[key]) for key in columns.values()]
        print(f"{name:30}" + "".join(f"{text:>10}" for text in cells))


def print_estimates(model: Model, args: Namespace, rows: list[dict[str, Any]]) -> None:
    """Print the model and the flags of `rows` on one line, then the tables."""
    recomputed = "with" if rows[0]["activation_checkpointing"] else "no"
    print(
        f"{args.model_name}: {model.parameters:,} parameters in {len(model.units)} units; "
        f"{args.nodes} x {args.gpus_per_node} GPUs of {args.gpu_memory_gb:g} GB; {args.precision}, "
        f"{args.batch_size} x {args.seq_length} tokens per GPU, FSDP{args.fsdp or 1}, "
        f"{args.optimizer}, {recomputed} activation checkpointing"
    )
    for title, columns in TABLES.items():
        print_table(title, rows, columns)
    print(f"\n{LEGEND}\nfits: leaves --reserve-gb {args.reserve_gb:g} for what is not counted.")


def main(argv: list[str] | None = None) -> None:
    """Print how full_shard fits and a table of estimates; exit with code 1 if it never fits."""
    args = parse_args(argv)
    model = read_model(args)
    advice = advise(model, args)
    if args.json:
        rows = [estimate(model, args, *choice) for choice in choices(model, args)]
        print(json.dumps({"estimates": rows}))
    else:
        text, flags = "full_shard does not fit.", args
        if advice:
            flags, row = advice
            text = verdict(model, args, flags, row)
            model = replace(model, checkpointing=row["activation_checkpointing"])
        rows = [estimate(model, flags, *choice) for choice in choices(model, flags)]
        print(f"{text}\n")
        print_estimates(model, flags, rows)
    if advice is None:
        most = changed(args, nodes=NODE_COUNTS[-1])
        peak = memory(model, most, "full_shard", False, True, args.optimizer)["peak_bytes"]
        ranks.exit_with(
            f"{args.model_name} does not fit on GPUs of {args.gpu_memory_gb:g} GB. On {most.nodes} "
            f"nodes full_shard needs {peak / 1e9:.1f} GB plus --reserve-gb {args.reserve_gb:g}. "
            "Reduce --batch-size or --seq-length, or raise --gpu-memory-gb."
        )


if __name__ == "__main__":
    try:
        main()
    except (OSError, ranks.Problem) as error:
        ranks.exit_with(error)
