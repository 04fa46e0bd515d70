"""Estimate from a config alone the memory and the traffic of training under FSDP.

    python memory_estimator.py --model-name meta-llama/Llama-2-70b-hf --nodes 2
    python memory_estimator.py --model-name gpt2-xl --gpus-per-node 2 --all
    python memory_estimator.py --model-name DIRECTORY --json  # or a config.json
    python memory_estimator.py --model-name DIRECTORY --script my_script.py

The first lines are a verdict: the least of means with which full_shard fits, as `verdict` says, and
the command that trains so. The tables below show the other strategies.

Nothing is allocated and no weights are read: the model is built on meta, cut into FSDP units by the
scripts' policy, and run forward once on meta, to see what autograd keeps. A GB is 10^9 bytes. The
formulas and their sources stand with `read_model`, `forward_pass`, `memory` and `traffic`.

`fits` compares the largest of three peaks, of training, of a save and of a resume, with the memory
of a GPU less --reserve-gb. The reserve is for what is not counted: the CUDA context, NCCL's
buffers, what kernels use while they run, and what the allocator reserves beyond what is active. The
latter can be far more: 32.14 GiB were reserved where 23.58 were active (torchtitan's issue 165);
with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True it is less. Not counted on the CPU: the
processes themselves, and files in the page cache. Saves are sharded ones: for --checkpoint-type
full rank 0 holds 12 bytes per parameter of the model twice. "async save" is the CPU's memory with
--async-save: pinned copies under FSDP2 and DDP, from the first save on. With --accumulate-no-sync
every GPU also holds the whole gradient, in the compute dtype under FSDP1, in the reduction's under
FSDP2, in fp32 under DDP: 2 bytes per parameter of the model, or 4.

DDP is shown with the activations of FSDP; autocast keeps 5% (GPT-2, T5) to 22% (Llama) more, as
residuals and norms stay in fp32.
"""

import argparse
import bisect
import functools
import importlib
import importlib.util
import itertools
import json
import math
import shlex
import sys
from argparse import Namespace
from collections import ChainMap
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, AttentionMaskInterface, GPT2Config, T5Config

import policies
from runtime import adapters, arguments, chunked_loss, hf_load, model_checks, ranks

SCRIPTS = {"llama": "llama_fsdp", "gpt2": "gpt2_fsdp", "t5": "T5_training"}
READ = ("MODEL", "BLOCKS", "RECIPE", "units")  # of a script
LENGTHS = {"llama": 2048, "gpt2": 1024, "t5": 512}  # the scripts' defaults, in tokens
OTHER_LENGTH = 1024
LLAMA = functools.partial(transformers.LlamaConfig, max_position_embeddings=4096)
T5 = functools.partial(T5Config, decoder_start_token_id=0)
FLAN = functools.partial(T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
LLAMA_KEYS = "hidden_size intermediate_size num_hidden_layers num_attention_heads "
LLAMA_KEYS += "num_key_value_heads vocab_size"
GPT2_KEYS = "n_embd n_layer n_head vocab_size"
T5_KEYS = "d_model d_kv d_ff num_layers num_heads vocab_size"
SIZES = [  # as published, and the scripts' tiny models
    (LLAMA, LLAMA_KEYS, {
        "llama-2-7b": (4096, 11008, 32, 32, 32, 32000), "tiny": (128, 384, 4, 4, 2, 384),
        "llama-2-13b": (5120, 13824, 40, 40, 40, 32000),
        "llama-2-70b": (8192, 28672, 80, 64, 8, 32000),
        "tinyllama-1.1b": (2048, 5632, 22, 32, 4, 32000),
    }),
    (GPT2Config, GPT2_KEYS, {
        "gpt2": (768, 12, 12, 50257), "gpt2-medium": (1024, 24, 16, 50257),
        "gpt2-large": (1280, 36, 20, 50257), "gpt2-xl": (1600, 48, 25, 50257),
        "tiny-gpt2": (128, 4, 4, 384),
    }),
    (T5, T5_KEYS, {
        "t5-small": (512, 64, 2048, 6, 8, 32128), "t5-base": (768, 64, 3072, 12, 12, 32128),
        "t5-large": (1024, 64, 4096, 24, 16, 32128), "t5-3b": (1024, 128, 16384, 24, 32, 32128),
        "t5-11b": (1024, 128, 65536, 24, 128, 32128), "tiny-t5": (128, 32, 512, 2, 4, 384),
    }),
    (FLAN, T5_KEYS, {
        "flan-t5-small": (512, 64, 1024, 8, 6, 32128),
        "flan-t5-base": (768, 64, 2048, 12, 12, 32128),
        "flan-t5-large": (1024, 64, 2816, 24, 16, 32128),
        "flan-t5-xl": (2048, 64, 5120, 24, 32, 32128),
        "flan-t5-xxl": (4096, 64, 10240, 24, 64, 32128),
    }),
]  # fmt: skip
BUILT_IN = {name: (cls, keys, row) for cls, keys, rows in SIZES for name, row in rows.items()}
HUB_IDS = {  # of built-in sizes, by how their names begin
    "tiny-": "tiny",  # no hub id, but what the scripts call it
    "tinyllama-1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "llama-2-": "meta-llama/Llama-2-{}-hf",
    "gpt2": "openai-community/gpt2{}",
    "t5-": "google-t5/t5-{}",
    "flan-t5-": "google/flan-t5-{}",
}
# Bytes per parameter on the GPU and in CPU memory: AdamW's two moments in fp32. Paged ones are in
# unified memory, which the driver moves to the CPU when the GPU is full: they count as wholly there
# (Dettmers et al. 2023, QLoRA; bitsandbytes' PagedAdamW, by transformers' names).
OPTIMIZERS = {"adamw": (8, 0), "paged_adamw_32bit": (0, 8)}
SHARDED = itertools.product(("shard_grad_op", "full_shard", "hybrid_shard"), (False, True))
MODES = [("ddp", False), *SHARDED]  # strategy, CPU offload
LENGTH_FLAGS = ("max_seq_length", "block_size", "source_length")  # the scripts' for --seq-length
TERMS = ("parameter", "gradient", "optimizer", "unsharded", "activation", "logit")
MOST_NODES = 4096
SAID = {"True": "yes", "False": "no", "None": "none"}
TABLES = {  # title: columns, and the key of an estimate that each shows
    "GB on each GPU in training": {
        "params": "parameter_bytes",
        "grads": "gradient_bytes",
        "optim.": "optimizer_bytes",
        "units": "unsharded_bytes",
        "activ.": "activation_bytes",
        "logits": "logit_bytes",
        "peak": "total_bytes",
    },
    "GB on each GPU, peaks": {
        "training": "total_bytes",
        "save": "save_bytes",
        "resume": "resume_bytes",
        "fits": "fits",
        "least nodes": "smallest_nodes",
    },
    "GB of CPU memory in each node": {
        "load": "load_cpu_bytes_per_node",
        "load whole": "load_cpu_bytes_per_node_whole",
        "training": "cpu_bytes_per_node",
        "save": "save_cpu_bytes_per_node",
        "async save": "async_save_cpu_bytes_per_node",
        "resume": "resume_cpu_bytes_per_node",
    },
    "GB sent in a step": {"by a GPU": "sent_bytes_per_gpu", "by a node": "sent_bytes_per_node"},
    "seconds of a step, at least": {
        "in node": "intranode_seconds",
        "between": "internode_seconds",
        "FLOPs": "compute_seconds",
        "bound by": "bound_by",
    },
}
LEGEND = """units: what is whole for a while; peak: activations and gradients do not peak together.
load whole: if every rank read the whole model. in node, between: what is sent, at full speed."""


def parse_args(argv: list[str] | None = None) -> Namespace:
    """Read the command line; what is wrong is said at once."""
    parser = arguments.Parser(__doc__)
    add = parser.add_argument_group("model").add_argument
    add("--model-name", default="meta-llama/Llama-2-7b-hf", help="hub id, directory, config.json, "
        f"or one of {', '.join(BUILT_IN)}")  # fmt: skip
    add("--script", help="the script that trains it, a copy of one of ours (default: ours)")
    add("--batch-size", type=int, default=1, help="sequences per GPU and micro-batch")
    add("--gradient-accumulation-steps", type=int, default=1, help="micro-batches per step")
    arguments.add_global_batch(add)
    add("--seq-length", type=int, default=0, help="tokens, of T5's source (0: as the script)")
    add("--target-length", type=int, default=150, help="tokens of T5's target")
    add("--precision", choices=list(policies.PRECISIONS), default="bf16", help="weights stay fp32")
    add("--fsdp", type=int, choices=[1, 2], help="as the scripts' flag (default: 1, adapters: 2)")
    add("--lora-rank", type=int, default=0, help="of adapters on all projections (0: all weights "
        "are trained)")  # fmt: skip
    add("--load-in-4bit", **arguments.OFF, help="hold the blocks' frozen projections in NF4")
    add("--attention", choices=list(ATTENTIONS), default="fused",
        help="fused is flash, varlen or sdpa; eager keeps the score matrices")  # fmt: skip
    arguments.add_recomputation(add, default=None, note=" (default: as the script)")
    add("--optimizer", choices=list(OPTIMIZERS), default="adamw", help="paged: moments on the CPU")
    add = parser.add_argument_group("machine (defaults: DGX A100)").add_argument
    add("--nodes", type=int, default=1, help="number of machines")
    add("--gpus-per-node", type=int, default=8, help="GPUs in each")
    add("--gpu-memory-gb", type=float, default=80.0, help="memory of a GPU")
    add("--reserve-gb", type=float, default=2.0, help="what of it is left to what is not counted")
    add("--intranode-gbps", type=float, default=2400.0, help="Gbit/s a GPU sends within its node")
    add("--internode-gbps", type=float, default=1600.0, help="Gbit/s a node sends to others")
    add("--peak-tflops", type=float, default=312.0, help="TFLOP/s of a GPU at this precision")
    add = parser.add_argument_group("output").add_argument
    add("--all", **arguments.OFF, help="with and without activation checkpointing, and every "
        "optimizer of the script")  # fmt: skip
    add("--json", **arguments.OFF, help="all of these as a JSON object, in bytes and seconds")
    parser.set_defaults(**adapters.DEFAULTS)
    args = parser.parse_args(argv)
    gpus = max(1, args.nodes * args.gpus_per_node)
    args, problems = arguments.resolved(args, adapters, processes=gpus)
    at_least_one = ("batch_size", "gradient_accumulation_steps", "target_length")
    at_least_one += ("nodes", "gpus_per_node")
    above_zero = ("gpu_memory_gb", "intranode_gbps", "internode_gbps", "peak_tflops")
    limits = {
        **dict.fromkeys(("seq_length", "reserve_gb", "global_batch_size"), (0, arguments.ANY)),
        **dict.fromkeys(at_least_one, (1, arguments.ANY)),
        **dict.fromkeys(above_zero, (arguments.LEAST, arguments.ANY)),
    }
    problems = arguments.out_of_range(args, limits) + problems
    if args.fsdp == 2 and args.optimizer != "adamw":
        problems.append(f"--optimizer {args.optimizer} needs --fsdp 1, and no adapters")
    if args.attention == "eager" and args.activation_checkpointing == "attention":
        problems.append("--activation-checkpointing attention keeps what --attention fused gives")
    if problems:
        parser.error("; ".join(problems))
    args.activation_checkpointing = in_a_row(args.activation_checkpointing)
    args.fsdp = args.fsdp or 1
    return args


def in_a_row(recomputation: Any) -> Any:
    """Return what a row says of a script's --activation-checkpointing: True for whole blocks."""
    return True if recomputation == "blocks" else recomputation


def built_in_size(name: str) -> str | None:
    """Return the key in BUILT_IN of the model that `name` means, None if it is no such."""
    size = Path(name).name.lower().removesuffix("-hf").removesuffix("-chat")
    return size if size in BUILT_IN and not Path(name).exists() else None


def load_config(name: str) -> transformers.PretrainedConfig:
    """Return the configuration that `name` means: files, a built-in size, or a model of the hub.

    Raises ValueError if there is none.
    """
    place = Path(name)
    size = built_in_size(name)
    if size:
        config_class, keys, values = BUILT_IN[size]
        return config_class(**dict(zip(keys.split(), values, strict=True)))
    if not place.exists():
        try:
            place = hf_load.model_directory(name, BUILT_IN, ["config.json"])
        except ValueError as error:
            raise ValueError(f"{error}; --help lists the built-in sizes") from None
    try:
        return transformers.AutoConfig.from_pretrained(place, trust_remote_code=False)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise ValueError(
            f"--model-name {name}: no config of it can be read ({type(error).__name__}): name a "
            "directory with a config.json of a model that Transformers knows"
        ) from None


def hub_id(name: str) -> str:
    """Return what a script takes as --model-name for the model that `name` means here."""
    if Path(name).is_file():  # a config.json
        return str(Path(name).parent)
    size = built_in_size(name)
    if size is None or "/" in name:
        return name
    for start, full in HUB_IDS.items():
        if size.startswith(start):
            return full.format(size.removeprefix(start))
    return size


def load_script(args: Namespace, config: transformers.PretrainedConfig) -> ModuleType:
    """Return the script that trains a model of this configuration: --script, or one of ours.

    Raises ValueError if there is none, if it lacks what is read of it, or if it is for models of
    another type.
    """
    if args.script is None:
        if config.model_type not in SCRIPTS:
            known = ", ".join(SCRIPTS)
            raise ValueError(
                f"--model-name {args.model_name} is a {config.model_type}, not one of {known}: "
                "give the script that trains it as --script"
            )
        return importlib.import_module(SCRIPTS[config.model_type])
    path = Path(args.script)
    if not path.is_file():
        raise ValueError(f"--script {path} is no file")
    sys.path.append(str(path.parent))  # its data set module may lie beside it
    spec = importlib.util.spec_from_file_location(path.stem, path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    missing = [name for name in READ if name not in vars(script)]
    if missing:
        raise ValueError(f"--script {path} has no {', '.join(missing)}, as the scripts here have")
    hf_load.check_type(config, script.MODEL, args.model_name)
    return script


def script_flags(script: ModuleType) -> dict[str, Any]:
    """Return the flags that a script has, by name, with its defaults."""
    parser = argparse.ArgumentParser()
    arguments.add_model(parser)
    for room in ("data", "adapters", "paged"):  # as the scripts call them
        if hasattr(getattr(script, room, None), "add_arguments"):
            vars(script)[room].add_arguments(parser)
    arguments.add_common(parser, policies.STRATEGIES, policies.PRECISIONS)
    parser.set_defaults(**script.RECIPE)
    flags = vars(parser.parse_args([]))
    return flags | {"activation_checkpointing": in_a_row(flags["activation_checkpointing"])}


def check_flags(args: Namespace, flags: dict[str, Any]) -> None:
    """Raise ValueError if what is asked for is not among the script's `flags`."""
    asked = {"--lora-rank": args.lora_rank, "--optimizer": args.optimizer != "adamw"}
    for flag, is_given in asked.items():
        if is_given and flag[2:].replace("-", "_") not in flags:
            raise ValueError(
                f"{flag} is no flag of the script that trains {args.model_name}: leave it out"
            )


def model_class(script: ModuleType) -> type[nn.Module]:
    """Return the class of the model that a script trains: its LossModel, else its MODEL."""
    return getattr(script, "LossModel", script.MODEL)


class FusedAttention(torch.autograd.Function):
    """A stand-in for a fused kernel: keeps for the backward pass what such a kernel keeps, which is
    not the scores."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Take [batch, heads, length, head size], return [batch, length, heads, head size] and the
        sums of the scores' exponentials, as logarithms."""
        groups = query.size(1) // key.size(1)
        keys, values = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        output = (query @ keys.mT @ values).transpose(1, 2).contiguous()
        log_sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, log_sums, bias)
        ctx.mark_non_differentiable(log_sums)
        return output, log_sums


def fused_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None,
    position_bias: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute attention as a fused kernel, called as Transformers calls one. T5's bias is masked by
    each sequence's padding, so every layer keeps one of [batch, heads, length, length]."""
    if position_bias is not None:
        padding = torch.empty(query.size(0), 1, 1, key.size(2), dtype=torch.bool, device="meta")
        position_bias = torch.where(padding, position_bias, 0.0)
    module.kernel_flops = 4 * query.numel() * key.size(2)
    module.kernel_gives = FusedAttention.apply(query, key, value, position_bias)
    return module.kernel_gives[0], None


def eager_attention(module: nn.Module, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Compute attention by the eager function of the module's own architecture."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *inputs, **options)


ATTENTIONS = {"fused": fused_attention, "eager": eager_attention}


class Weight(NamedTuple):
    """A parameter, and how it is held."""

    shape: torch.Size
    trained: bool = True  # frozen ones are held in the compute dtype
    in_4bit: bool = False


@dataclass
class Unit:
    """The size of an FSDP unit in elements and bytes, with padding."""

    gathered: int  # bytes of its parameters when gathered, in the compute dtype or 4 bits
    held: int  # bytes of rank 0's shard
    trained: int  # elements that have gradients


@dataclass
class Model:
    """A model and one micro-batch of it on one GPU."""

    units: list[list[Weight]]  # the parameters, by FSDP unit, the root's first
    parameters: int  # how many, in elements
    trained: int  # how many of them
    largest: int  # elements of the largest parameter
    largest_in_4bit: int
    head: int  # elements of the output head's weight
    head_is_trained: bool
    tied: bool  # the output head's weight is the input embedding, too
    checkpointing: bool  # the script's default
    script: str  # its file
    flags: dict[str, Any]  # those it has, with their defaults
    chunked: bool  # the loss computes the logits of a chunk of tokens at a time
    logit_count: int  # elements of the logits that are held at a time
    logits: int  # their bytes
    activations: int  # bytes, without activation checkpointing
    stays: dict[Any, int]  # bytes of activations that stay, by activation checkpointing
    block: dict[Any, int]  # bytes that the largest block adds when it is recomputed, likewise
    flops: int  # of a forward pass
    head_flops: int
    attention_flops: int  # of fused kernels


def read_model(args: Namespace) -> Model:
    """Return the model that `args` names, as seen on meta, in units of the script's `wrap_model`.

    The logits are held in T5_training.py for all target tokens: as computed, in fp32, and their
    log-softmax, or its gradient, in fp32. The others hold them for CHUNK tokens at a time.

    Raises ValueError if there is no such model, or it is too short for the sequences.
    """
    config = load_config(args.model_name)
    script = load_script(args, config)
    flags = script_flags(script)
    check_flags(args, flags)
    config = hf_load.text_part(config, script.MODEL)
    args.seq_length = args.seq_length or LENGTHS.get(config.model_type, OTHER_LENGTH)
    model_checks.check_length("--seq-length", args.seq_length, config)
    AttentionInterface.register("estimate", ATTENTIONS[args.attention])
    AttentionMaskInterface.register("estimate", lambda **_: None)
    config._attn_implementation = "estimate"
    compute = policies.PRECISIONS[args.precision].param_dtype
    with torch.device("meta"):
        model = model_class(script)(config)
    policies.fuse_gelu(model)
    if args.lora_rank:
        add_adapters(args, script, model, compute)
    if not getattr(config, "scale_decoder_outputs", True):  # FLAN-T5, whose head is not tied
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    policy = policies.wrap_policy(script.units(model))
    wrapped = [m for m in model.modules() if policy(m, recurse=False, nonwrapped_numel=0)]
    units = weights_by_unit(args, model, wrapped)
    in_4bit = [w.shape.numel() for unit in units for w in unit if w.in_4bit]
    head = model.get_output_embeddings().weight
    chunked = isinstance(model.get_output_embeddings(), chunked_loss.LossHead)
    tokens = args.batch_size * args.target_length
    if chunked:
        tokens = min(args.batch_size * args.seq_length, chunked_loss.CHUNK)
    return Model(
        units=units,
        parameters=sum(p.numel() for p in model.parameters()),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        largest=max(p.numel() for p in model.parameters()),
        largest_in_4bit=max(in_4bit, default=0),
        head=head.numel(),
        head_is_trained=head.requires_grad,
        tied=head is model.get_input_embeddings().weight,
        checkpointing=flags["activation_checkpointing"],
        script=args.script or f"{script.__name__}.py",
        flags=flags,
        chunked=chunked,
        logit_count=tokens * config.vocab_size,
        logits=tokens * config.vocab_size * (8 + compute.itemsize % 4),
        **forward_pass(model.to(compute).train(), script.BLOCKS, args),
    )


def weights_by_unit(
    args: Namespace, model: nn.Module, wrapped: list[nn.Module]
) -> list[list[Weight]]:
    """Return the parameters of the root unit, and of each of the `wrapped` modules."""
    in_4bit = set()
    if args.load_in_4bit:
        for name, parameter in model.named_parameters():
            stem = name.removesuffix(".base_layer.weight")
            if stem != name and adapters.fits_4bit(model, stem):
                in_4bit.add(parameter)
    inner = {p for module in wrapped for p in module.parameters()}
    root = [p for p in model.parameters() if p not in inner]
    units = []
    for parameters in (root, *(list(module.parameters()) for module in wrapped)):
        units.append([Weight(p.shape, p.requires_grad, p in in_4bit) for p in parameters])
    return units


def add_adapters(args: Namespace, script: ModuleType, model: nn.Module, dtype: torch.dtype) -> None:
    """Add the adapters of the script's --lora-rank, on all projections; no weight becomes 4 bits,
    as those bytes are counted elsewhere."""
    in_16_bits = Namespace(**vars(args) | {"load_in_4bit": False})
    adapters.add(in_16_bits, model, script.BLOCKS, dtype, torch.device("meta"))


def storage_bytes(*parts: dict[int, torch.UntypedStorage]) -> int:
    """Return the bytes of all storages, by address, that are in at least one of the parts."""
    return sum(storage.nbytes() for storage in ChainMap(*parts).values())


def micro_batch(model: nn.Module, args: Namespace) -> dict[str, Tensor]:
    """Return the model's inputs for one forward pass on a GPU, int64 [batch, length] on meta."""
    ids = torch.empty(args.batch_size, args.seq_length, dtype=torch.int64, device="meta")
    batch = {"input_ids": ids, "attention_mask": torch.empty_like(ids)}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = ids.new_empty(args.batch_size, args.target_length)
    return batch


def keep_dropout_masks(model: nn.Module) -> None:
    """Have dropout keep a mask of bytes, as it does on a GPU."""
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p:
            module.forward = lambda x, p=module.p: torch.native_dropout(x, p, True)[0]


def storages(weights: set[int], *tensors: Any) -> dict[int, torch.UntypedStorage]:
    """Return, by address, the storages of tensors that are no weights. They are held, so that no
    other takes their address."""
    found = [x.untyped_storage() for x in tensors if isinstance(x, Tensor)]
    return {storage._cdata: storage for storage in found if storage._cdata not in weights}


def recomputation_bytes(
    kept: list[dict], given: dict, blocks: list[dict]
) -> dict[str, dict[bool | str, int]]:
    """Return, by --activation-checkpointing, what stays until the backward pass, and what the
    largest of the blocks adds while it is recomputed.

    Storages are by address: those `kept` either way, those that attention kernels have `given`, and
    those of each block.
    """
    stays, added = {}, {}
    for how, held in {True: kept, "attention": [*kept, given]}.items():
        stays[how] = storage_bytes(*held)
        added[how] = max(storage_bytes(*held, block) for block in blocks) - stays[how]
    return {"stays": stays, "block": added}


def forward_pass(model: nn.Module, classes: policies.Classes, args: Namespace) -> dict[str, int]:
    """Return the bytes that autograd keeps of a forward pass, and its FLOPs, as seen on meta.

    Each tensor counts once, weights do not. With activation checkpointing, autograd keeps the
    blocks' inputs, or these and what attention kernels give, and while a block is recomputed all
    that this one keeps.

    For comparison, Korthikanti et al. 2022 (Reducing Activation Recomputation in Large Transformer
    Models, section 4.1) derive for a GPT-2 block s b h (34 + 5 a s / h) bytes: b sequences of s
    tokens, width h, a heads, 16 bits. That is 34 s b h with fused attention, and 2 s b h with
    checkpointing. Transformers' models keep more: gpt2-large has 56 s b h in a block, because its
    GELU is made of eight operations.

    The FLOPs of a token are 2 N + 4 L a q T: N weights in matrix products, the head's among them,
    L layers, a heads of size q, T tokens, masked or not (Chowdhery et al. 2022, PaLM, appendix B).
    The backward pass costs twice as much again.
    """
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    # Storages that autograd keeps, by address: outside of the blocks, and in each block.
    outside: dict[int, torch.UntypedStorage] = {}
    blocks: list[dict[int, torch.UntypedStorage]] = []
    inputs: dict[int, torch.UntypedStorage] = {}  # of all blocks
    scopes = [outside]  # a stack: the last one is the part of the model that is running

    def keep(tensor: Tensor) -> Tensor:
        scopes[-1].update(storages(weights, tensor))
        return tensor

    def enter(_: nn.Module, args: tuple, options: dict[str, Any]) -> None:
        leaves = pytree.tree_leaves((args, options))  # rotary ones are in a tuple
        inputs.update(storages(weights, *leaves))
        blocks.append({})
        scopes.append(blocks[-1])

    def leave(*_: Any) -> None:
        scopes.pop()

    keep_dropout_masks(model)
    for module in model.modules():
        if isinstance(module, classes):
            module.register_forward_pre_hook(enter, with_kwargs=True)
            module.register_forward_hook(leave)
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    batch = micro_batch(model, args)
    with hooks, FlopCounterMode(display=False) as counter:
        model(**batch, use_cache=False)
    targets = batch.get("decoder_input_ids", batch["input_ids"]).numel()
    given: dict[int, torch.UntypedStorage] = {}  # by attention kernels
    for module in model.modules():
        given |= storages(weights, *getattr(module, "kernel_gives", ()))
    return {
        "activations": storage_bytes(outside, *blocks),
        **recomputation_bytes([outside, inputs], given, blocks),
        "flops": counter.get_total_flops(),
        "head_flops": 2 * targets * model.lm_head.weight.numel(),
        "attention_flops": sum(getattr(m, "kernel_flops", 0) for m in model.modules()),
    }


@functools.cache
def flat_parameter(sizes: tuple[int, ...], shards: int, aligned: int) -> tuple[int, int]:
    """Return the elements of a unit with padding, and how many of rank 0's are no padding.

    FSDP1 with use_orig_params=True (torch/distributed/fsdp/_flat_param.py) has each parameter begin
    at a multiple of `aligned`, 16 bytes in the compute dtype, and makes the shards equal.
    """
    spans, end = [], 0
    for size in sizes:
        start = -(-end // aligned) * aligned
        end = start + size
        spans.append((start, end))
    shard = -(-end // shards)
    return shards * shard, sum(max(0, min(end, shard) - start) for start, end in spans)


def sharded_by_rows(weights: list[Weight], shards: int, itemsize: int) -> Unit:
    """Return a unit as FSDP2 shards it, with `itemsize` bytes of the compute dtype.

    Each parameter is split by rows, padded to as many as rank 0 has
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py). Weights in 4 bits have a byte in a row.
    """
    unit = Unit(gathered=0, held=0, trained=0)
    for weight in weights:
        mine = -(-weight.shape[0] // shards) * weight.shape[1:].numel()
        if weight.in_4bit:
            mine = -(-weight.shape.numel() // 2 // shards)
            unit.held += mine
            unit.gathered += shards * mine
            continue
        unit.gathered += itemsize * shards * mine
        if weight.trained:
            unit.trained += shards * mine
            unit.held += 4 * mine
        else:
            unit.held += itemsize * mine
    return unit


def scale_bytes(model: Model) -> int:
    """Return the bytes of the scales of weights in 4 bits, whole on every GPU: 8 bits for 64
    weights, 32 bits for 256 of those, and for each tensor their mean and the 16 values, in fp32."""
    total = 0
    for weight in itertools.chain.from_iterable(model.units):
        if weight.in_4bit:
            blocks = -(-weight.shape.numel() // 64)
            total += blocks + 4 * -(-blocks // 256) + 4 * (1 + 16)
    return total


def layout(model: Model, args: Namespace, strategy: str) -> tuple[int, int, list[Unit]]:
    """Return how many GPUs share the model, the elements that rank 0 trains, without padding, and
    the units. DDP has one unit, and no padding."""
    itemsize = policies.PRECISIONS[args.precision].param_dtype.itemsize
    if strategy == "ddp":
        count = model.parameters
        return 1, count, [Unit(gathered=itemsize * count, held=4 * count, trained=count)]
    shards = args.gpus_per_node
    if strategy != "hybrid_shard":
        shards *= args.nodes
    if args.fsdp == 2:
        units = [sharded_by_rows(weights, shards, itemsize) for weights in model.units]
        return shards, sum(unit.trained for unit in units) // shards, units
    units = []
    mine = 0
    for weights in model.units:
        sizes = tuple(weight.shape.numel() for weight in weights)
        whole, rank_0 = flat_parameter(sizes, shards, aligned=16 // itemsize)
        units.append(Unit(gathered=itemsize * whole, held=4 * whole // shards, trained=whole))
        mine += rank_0
    return shards, mine, units


def power_of_two(size: int) -> int:
    """Return the least power of two that is not below `size`; 0 for 0."""
    return 1 << (size - 1).bit_length() if size else 0


def state_dicts(
    fsdp: int, strategy: str, offload: bool, states: list[int], moments: int, unit: int
) -> tuple[int, int, int]:
    """Return bytes on each GPU at the peak of a save and of a resume, and of the save's copies on
    the CPU.

    `states` are the bytes of parameters, gradients and moments on a GPU, `moments` those of all
    moments, also on the CPU, `unit` those of the largest FSDP unit in fp32. This is what
    runtime/checkpoints.py takes with torch 2.13, counted on a simulated device:

    - A save begins with the last gradients, which go when FSDP gathers the first unit in fp32, and
      then holds two units; the copies, of weights and moments, go to the host.
    - A resume loads the weights, then makes moments, for which it needs gradients.
    - With offload a save holds three units on the GPU; a resume puts the loaded moments together
      there.
    - DDP's and FSDP2's state dicts are made of the tensors themselves, where they are.
    """
    if strategy == "ddp":
        return sum(states), sum(states), 0
    if fsdp == 2 and offload:
        return 0, 0, 0
    if fsdp == 2:
        return states[0] + states[2], states[0] + states[2], 0
    copies = states[0] + moments
    if offload:
        return 3 * unit, unit + moments, copies
    parameters, gradients, optimizer = states
    peak = parameters + optimizer + max(gradients, 2 * unit)
    return peak, peak, copies


def memory(
    model: Model,
    args: Namespace,
    strategy: str,
    offload: bool,
    checkpointing: bool | str,
    optimizer: str,
) -> dict[str, int]:
    """Return bytes on each GPU by term and at the peak, and of CPU memory in each node.

    Parameters, gradients and AdamW's moments are fp32, 4 + 4 + 8 bytes per parameter, divided by
    the shards (Rajbhandari et al. 2020, ZeRO, section 3.1, where a 16-bit copy of parameters and
    gradients comes on top: here only units that are whole have one). Offload holds them on the CPU.
    With adapters, only these have 16 bytes; the frozen weights are held in the compute dtype, or in
    half a byte and the scales, which are whole on every GPU.
    """
    shards, mine, units = layout(model, args, strategy)
    trained = sum(unit.trained for unit in units) // shards
    scales = scale_bytes(model)
    on_gpu, on_cpu = OPTIMIZERS[optimizer]
    # parameters, gradients, moments
    states = [sum(unit.held for unit in units) + scales, 4 * trained, on_gpu * mine]
    cpu = on_cpu * mine
    moments = states[2] + cpu
    unit = 4 * max(unit.trained for unit in units)
    save, resume, copies = state_dicts(args.fsdp, strategy, offload, states, moments, unit)
    in_background = copies or async_copies(model, shards, offload, sum(OPTIMIZERS[optimizer]))
    load = 4 * model.largest  # a tensor at a time
    if offload:
        cpu = pinned_bytes(model, args, units, shards) + moments
        load += args.gpus_per_node * (states[0] - scales)
        states = [scales, 0, 0]
    kept, block = model.activations, 0
    if checkpointing:
        kept, block = model.stays[checkpointing], model.block[checkpointing]
    find_peak = fsdp1_peak
    if args.fsdp == 2 and strategy != "ddp":
        find_peak = fsdp2_peak
    whole, logits, total = find_peak(model, args, strategy, states, kept, block)
    terms = [*states, whole, kept + block, logits]
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
        "async_save_cpu_bytes_per_node": args.gpus_per_node * (cpu + in_background),
        "resume_cpu_bytes_per_node": args.gpus_per_node * (cpu + min(copies, moments)),
        "load_cpu_bytes_per_node": load,
        "load_cpu_bytes_per_node_whole": args.gpus_per_node * 4 * model.parameters,
    }


def pinned_bytes(model: Model, args: Namespace, units: list[Unit], shards: int) -> int:
    """Return the bytes of pinned memory for offloaded parameters and gradients; moments are not
    pinned.

    Each piece, a unit's shard under FSDP1 and a parameter's under FSDP2, takes memory of a power of
    two (PyTorch's CachingHostAllocator).
    """
    pieces = units
    if args.fsdp == 2:
        itemsize = policies.PRECISIONS[args.precision].param_dtype.itemsize
        weights = itertools.chain.from_iterable(model.units)
        pieces = [sharded_by_rows([weight], shards, itemsize) for weight in weights]
    total = 0
    for piece in pieces:
        total += power_of_two(piece.held) + power_of_two(4 * piece.trained // shards)
    return total


def async_copies(model: Model, shards: int, offload: bool, moments: int) -> int:
    """Return the bytes that a GPU's copies take on the CPU with --async-save, under FSDP2 and DDP.

    Copied are the trained parameters, in fp32, and their moments, of `moments` bytes per parameter.
    Each tensor from the GPU has a copy of its own in pinned memory, which is kept. FSDP1 has no
    copies but those that `state_dicts` counts, which are freed when they are written.
    """
    total = 0
    for weight in itertools.chain.from_iterable(model.units):
        if weight.trained:
            mine = 4 * -(-weight.shape[0] // shards) * weight.shape[1:].numel()
            total += mine if offload else power_of_two(mine)
    return total * (4 + moments) // 4


def loss_bytes(model: Model, itemsize: int) -> int:
    """Return the bytes that the loss holds at once, with `itemsize` bytes of the compute dtype.

    While the chunked loss recomputes a chunk in the backward pass, it holds the chunk's
    log-softmax, its gradient and that of the logits in fp32. If the head is trained, its gradient
    so far is held in the compute dtype.
    """
    if not model.chunked:
        return model.logits
    gradient = itemsize * model.head if model.head_is_trained else 0
    return gradient + 12 * model.logit_count


def fsdp1_peak(
    model: Model, args: Namespace, strategy: str, states: list[int], kept: int, block: int
) -> tuple[int, int, int]:
    """Return the bytes of unsharded tensors, of the logits, and at the peak, of FSDP1 and of DDP.

    `states` are bytes of parameters, gradients and moments, `kept` and `block` what autograd keeps
    of all blocks, and of one while it is recomputed.

    FSDP holds some parameters whole, in the compute dtype. Under FULL_SHARD and HYBRID_SHARD these
    are the root, from its forward to its backward pass, the unit at work, and the one prefetched;
    under SHARD_GRAD_OP all units, from forward to backward. The gradients of the root, of the unit
    at work, and of the one being reduced are whole. One GPU alone shards nothing, but casts a unit
    at a time. DDP holds what autocast has cast; its gradients lie in buckets, which stay.

    The peak is in the loss, with all activations and no gradients yet, or in the blocks, after the
    logits are freed: activations are freed as gradients come, so the larger of the two counts, and
    what a block keeps while it is recomputed. With accumulation both phases have all gradients.
    """
    itemsize = policies.PRECISIONS[args.precision].param_dtype.itemsize
    shards, _, units = layout(model, args, strategy)
    root, *others = (unit.trained for unit in units)
    neighbours = itertools.pairwise([*others, 0])
    at_work = root + max((one + next_one for one, next_one in neighbours), default=0)
    whole_parameters = at_work
    if strategy == "shard_grad_op" and shards > 1:
        whole_parameters = root + sum(others)
    whole = itemsize * (whole_parameters + at_work)
    if strategy == "ddp":
        whole = root * (itemsize % 4)
    logits = loss_bytes(model, itemsize)
    in_loss = kept + logits
    in_block = kept + states[1] + block
    if args.gradient_accumulation_steps > 1 or strategy == "ddp":
        in_loss += states[1]
    else:
        in_block -= min(states[1], kept)
    return whole, logits, states[0] + states[2] + whole + max(in_loss, in_block)


def fsdp2_peak(
    model: Model, args: Namespace, strategy: str, states: list[int], kept: int, block: int
) -> tuple[int, int, int]:
    """Return the bytes of unsharded tensors while a block's gradients are computed, of the loss,
    and at the peak, of FSDP2.

    Takes what `fsdp1_peak` takes. The peak is in one of three phases (as FSDPMemTracker finds them,
    with torch 2.13):

    - the loss: no gradients yet. If the head is frozen, the block before is gathered;
    - a block: its parameters, gathered, and its gradients; the next block's parameters as they are
      gathered; the gradients of the block before as they are reduced;
    - the root, at last: all gradients, and of a tied weight three, of both its uses and the sum.

    The forward pass prefetches a unit as well, but has fewer activations then than the loss.
    """
    precision = policies.PRECISIONS[args.precision]
    compute, reduce = precision.param_dtype.itemsize, precision.reduce_dtype.itemsize
    _, _, (root, *others) = layout(model, args, strategy)
    gathered = root.gathered
    if strategy == "shard_grad_op":
        gathered += sum(unit.gathered for unit in others)
    at_work = 0
    for unit, following in itertools.pairwise([*others, Unit(0, 0, 0)]):
        gradients = (compute + reduce) * unit.trained
        at_work = max(at_work, unit.gathered + gradients + following.gathered)
    at_work += compute * model.largest_in_4bit  # for one matrix product in the compute dtype
    of_tied = 0
    if model.tied and model.head_is_trained:
        of_tied = compute * model.head
    logits = loss_bytes(model, compute)
    in_loss = kept + others[-1].gathered + logits
    if model.chunked and not model.head_is_trained:
        in_loss += others[-2].gathered
    in_block = kept + states[1] + at_work + of_tied + block
    in_root = states[1] + reduce * others[-1].trained + 3 * of_tied
    if args.gradient_accumulation_steps == 1:
        in_block -= min(states[1], kept)  # activations go while gradients come
    else:
        in_loss += states[1]
    peak = states[0] + states[2] + gathered + max(in_loss, in_block, in_root)
    return gathered + at_work, logits, peak


def traffic(
    model: Model, args: Namespace, strategy: str, checkpointing: bool | str
) -> dict[str, Any]:
    """Return the bytes that each GPU and each node sends in a step, and the least time it takes.

    When k GPUs gather or reduce-scatter a tensor in a ring, each sends (k - 1) / k of it; in an
    all-reduce twice that (Rajbhandari et al. 2020, section 7). P parameters have c bytes each in
    the compute dtype and r in the reduction's. A micro-batch under
    - ddp all-reduces 4 P;
    - shard_grad_op gathers c P and reduce-scatters r P;
    - full_shard gathers every unit but the root again in the backward pass; FSDP2 leaves out
      embeddings and a head that are units, which are counted here (4% of TinyLlama's bytes);
    - hybrid_shard does so within a node, and all-reduces each shard, r P / shards, among the nodes.
    A ring through all GPUs leaves a node once, so a node sends what a GPU sends.

    A step costs the FLOPs of three forward passes, of two where weights are frozen. Blocks are
    computed once more under activation checkpointing, but for an attention that is kept, and so
    are chunked logits. The longest of the three times bounds the step, however well they
    overlap. PCIe, under CPU offload, and the optimizer's step are left out.
    """
    precision = policies.PRECISIONS[args.precision]
    steps = args.gradient_accumulation_steps
    ring_size, _, (root, *others) = layout(model, args, strategy)
    gathered = root.gathered + 2 * sum(unit.gathered for unit in others)
    if strategy == "shard_grad_op":
        gathered = root.gathered + sum(unit.gathered for unit in others)
    reduced = precision.reduce_dtype.itemsize * sum(unit.trained for unit in (root, *others))
    ring = gathered + reduced
    across = 0.0
    if strategy == "ddp":
        ring = 2 * 4 * root.trained
        ring_size = args.nodes * args.gpus_per_node
    elif strategy == "hybrid_shard":
        across = steps * 2 * reduced / ring_size * (args.nodes - 1) / args.nodes
    ring *= steps * (ring_size - 1) / ring_size
    node = args.gpus_per_node * across
    if ring_size > args.gpus_per_node:
        node += ring
    flops = (2 + model.trained / model.parameters) * model.flops
    if model.chunked:
        flops += model.head_flops
    if checkpointing:
        flops += model.flops - model.head_flops
    if checkpointing == "attention":
        flops -= model.attention_flops
    seconds = {
        "intranode_seconds": ring * 8e-9 / args.intranode_gbps if args.gpus_per_node > 1 else 0.0,
        "internode_seconds": node * 8e-9 / args.internode_gbps,
        "compute_seconds": steps * flops * 1e-12 / args.peak_tflops,
    }
    sent = {"sent_bytes_per_gpu": round(ring + across), "sent_bytes_per_node": round(node)}
    return sent | seconds | {"bound_by": max(seconds, key=seconds.get).removesuffix("_seconds")}


def estimate(model: Model, args: Namespace, *choice: Any) -> dict[str, Any]:
    """Return a row for a `choice`: strategy, CPU offload, activation checkpointing, optimizer."""
    strategy, offload, checkpointing, optimizer = choice

    def at(nodes: int) -> dict[str, Any]:
        return memory(model, Namespace(**vars(args) | {"nodes": nodes}), *choice)

    def fits(nodes: int) -> bool:
        return at(nodes)["fits"]

    enough = 1
    while enough < MOST_NODES and not fits(enough):
        enough *= 2
    candidates = range(enough // 2 + 1, enough + 1)
    nodes = candidates.start + bisect.bisect_left(candidates, True, key=fits)
    row = {"strategy": strategy, "activation_checkpointing": checkpointing}
    row |= {"optimizer": optimizer, "cpu_offload": offload} | at(args.nodes)
    row |= {"smallest_nodes": nodes if nodes in candidates else None}
    return row | traffic(model, args, strategy, checkpointing)


def group_of(row: dict[str, Any]) -> str:
    """Return the heading of a row's group: optimizer and activation checkpointing."""
    checkpointing = "with" if row["activation_checkpointing"] else "no"
    heading = f"{row['optimizer']}, {checkpointing} activation checkpointing"
    if row["activation_checkpointing"] == "attention":
        heading += " that keeps attention"
    return heading


def print_table(title: str, rows: list[dict[str, Any]], columns: dict[str, str]) -> None:
    """Print rows as a table; `columns` are keys of the rows by heading; bytes are shown as GB."""
    table = [[title, *columns]]
    for row in rows:
        values = [row[key] / 1e9 if "bytes" in key else row[key] for key in columns.values()]
        values = [f"{x:,.2f}" if isinstance(x, float) else SAID.get(str(x), str(x)) for x in values]
        table.append([f"  {row['strategy']}{' + offload' * row['cpu_offload']}", *values])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    group = ""
    for (name, *cells), row in zip(table, [None, *rows], strict=True):
        if row and group != group_of(row):
            group = group_of(row)
            print(group)
        aligned = [f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)]
        print(f"{name:{widths[0]}}  {'  '.join(aligned)}")


def takes_offload(args: Namespace) -> bool:
    """Tell whether the scripts take --cpu-offload with what is asked for, see policies.py."""
    if args.fsdp == 2:
        return args.precision != "fp16"
    return args.nodes * args.gpus_per_node > 1 and args.gradient_accumulation_steps == 1


def choices(model: Model, args: Namespace) -> list[tuple[str, bool, bool | str, str]]:
    """Return what to estimate: strategy, CPU offload, activation checkpointing, optimizer."""
    recomputing = [args.activation_checkpointing]
    if args.activation_checkpointing is None:
        recomputing = [model.checkpointing]
    optimizers = [args.optimizer]
    if args.all or args.json:
        recomputing = [True, False]
        if args.activation_checkpointing == "attention":
            recomputing.insert(1, "attention")
        optimizers = list(OPTIMIZERS) if "optimizer" in model.flags else ["adamw"]
    found = []
    for recompute, optimizer, mode in itertools.product(recomputing, optimizers, MODES):
        strategy, offload = mode
        if args.lora_rank and strategy == "ddp":  # the scripts refuse it
            continue
        if offload and optimizer != "adamw":  # a paged optimizer's moments are on the CPU already
            continue
        if args.fsdp == 2 and optimizer != "adamw":  # the scripts refuse it
            continue
        if strategy == "hybrid_shard" and args.gpus_per_node == 1:  # the scripts refuse it
            continue
        if offload and not takes_offload(args):
            continue
        found.append((strategy, offload, recompute, optimizer))
    return found


def verdict(model: Model, args: Namespace) -> str | None:
    """Return a sentence with the least of means with which full_shard fits, and on a line of its
    own the command; None if it fits on no number of nodes.

    In this order: what is asked for; activation checkpointing, which costs a third more compute;
    CPU offload, which costs more time, but no machine; more nodes; more nodes with offload.
    """
    asked = args.activation_checkpointing
    if asked is None:
        asked = model.checkpointing
    means = [(False, asked, args.optimizer), (False, True, args.optimizer)]
    if takes_offload(args):
        means.append((True, True, "adamw"))
    rows = [estimate(model, args, "full_shard", *choice) for choice in means]
    without_offload = rows[1]["smallest_nodes"]
    if not any(row["fits"] for row in rows):
        more = [row["smallest_nodes"] for row in rows[1:] if row["smallest_nodes"]]
        if not more:
            return None
        args = Namespace(**vars(args) | {"nodes": more[0]})
        rows = [estimate(model, args, "full_shard", *choice) for choice in means]
    row = next(row for row in rows if row["fits"])
    added = []
    if row["activation_checkpointing"] != asked:
        added.append("whole blocks recomputed" if asked else "activation checkpointing")
    if row["cpu_offload"]:
        added.append("CPU offload")
    how = f" with {' and '.join(added)}" if added else ""
    sentence = f"full_shard{how} fits on {in_words(args.nodes)}: {row['peak_bytes'] / 1e9:.1f} of "
    sentence += f"{args.gpu_memory_gb:g} GB"
    if row["cpu_offload"]:
        on_cpu = max(row[f"{when}cpu_bytes_per_node"] for when in ("", "save_", "resume_"))
        sentence += f", and {on_cpu / 1e9:,.0f} GB of CPU memory in each"
        if without_offload:
            sentence += f"; without offload on {in_words(without_offload)}"
    on_each = ", on each node" * (args.nodes > 1)
    return f"{sentence}; command{on_each}:\n{command(model, args, row)}"


def in_words(nodes: int) -> str:
    """Return a number of nodes in words."""
    return f"{nodes} node{'s' * (nodes > 1)}"


def command(model: Model, args: Namespace, row: dict[str, Any]) -> str:
    """Return the command that trains as a row of full_shard says; the data are the user's."""
    words = ["torchrun", "--nnodes", args.nodes, "--nproc_per_node", args.gpus_per_node]
    if args.nodes > 1:
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29500", "--rdzv-id", 1]
    words += [model.script, "--model-name", hub_id(args.model_name), "--strategy", "full_shard"]
    wanted = {
        "fsdp": 2 if args.fsdp == 2 else None,
        **dict.fromkeys(LENGTH_FLAGS, args.seq_length),
    }
    same = ("batch_size", "gradient_accumulation_steps", "target_length", "precision", "lora_rank")
    wanted |= {name: getattr(args, name) for name in (*same, "load_in_4bit")}
    wanted |= {name: row[name] for name in ("activation_checkpointing", "cpu_offload", "optimizer")}
    for name, value in wanted.items():
        flag = name.replace("_", "-")
        if model.flags.get(name, value) == value:  # the script's default, or no flag of it
            continue
        words += [f"--{flag}" if value else f"--no-{flag}"]
        if not isinstance(value, bool):
            words[-1:] = [f"--{flag}", value]
    return shlex.join(map(str, words))


def why_nothing_fits(model: Model, args: Namespace) -> str:
    """Return a sentence: what is largest on as many nodes as are looked at, and what would help."""
    most = Namespace(**vars(args) | {"nodes": MOST_NODES})
    rows = [estimate(model, most, "full_shard", False, True, args.optimizer)]
    if takes_offload(most):
        rows.append(estimate(model, most, "full_shard", True, True, "adamw"))
    best = min(rows, key=lambda row: row["peak_bytes"])
    term = max(TERMS, key=lambda term: best[f"{term}_bytes"])
    remedy = "give a smaller --batch-size or --seq-length"
    if term not in ("activation", "logit"):
        needed = math.ceil(best["peak_bytes"] / 1e9 + args.reserve_gb)
        remedy = f"it takes GPUs of {needed} GB, --gpu-memory-gb {needed}"
    offload = " and CPU offload" * best["cpu_offload"]
    sizes = f"{best[f'{term}_bytes'] / 1e9:.1f} GB of {best['peak_bytes'] / 1e9:.1f}"
    return (
        f"{args.model_name} fits {args.gpu_memory_gb:g} GB, less --reserve-gb {args.reserve_gb:g}, "
        f"on no number of nodes: on {MOST_NODES}, under full_shard with activation checkpointing"
        f"{offload}, the largest term is {term}_bytes, {sizes}: {remedy}"
    )


def main(argv: list[str] | None = None) -> None:
    """Print the verdict and the estimates; end with exit code 1 if nothing fits on any number of
    nodes."""
    args = parse_args(argv)
    try:
        model = read_model(args)
    except ValueError as error:
        ranks.exit_with(error)
    found = verdict(model, args)
    if found is None:
        ranks.say_error(why_nothing_fits(model, args))
    rows = [estimate(model, args, *choice) for choice in choices(model, args)]
    if args.json:
        print(json.dumps({"estimates": rows}))
    else:
        print_estimates(model, args, found, rows)
    if found is None:
        raise SystemExit(1)


def print_estimates(
    model: Model, args: Namespace, found: str | None, rows: list[dict[str, Any]]
) -> None:
    """Print the verdict that was `found`, if any, and the tables."""
    if found is not None:
        print(f"{found}\n")
    print(
        f"{args.model_name}: {model.parameters:,} parameters in {len(model.units)} "
        f"units; {args.nodes} x {args.gpus_per_node} GPUs of {args.gpu_memory_gb:g} GB; "
        f"{args.precision}, {args.batch_size} x {args.seq_length} tokens per GPU"
    )
    for title, columns in TABLES.items():
        print_table(f"\n{title}", rows, columns)
    share = 100 * args.reserve_gb / args.gpu_memory_gb
    print(
        f"\n{LEGEND}\nfits: --reserve-gb {args.reserve_gb:g} ({share:.1f}% of a GPU) is left "
        "to what is not counted, see --help."
    )


if __name__ == "__main__":
    main()
