"""Estimate the memory of FSDP training from a model's config.

    python tools/memory_estimator.py --model-name meta-llama/Llama-2-70b-hf --nodes 2
    python tools/memory_estimator.py --model-name DIRECTORY --json  # or a config.json
    python tools/memory_estimator.py --model-name DIRECTORY --script my_script.py

The table compares all strategies, with and without --cpu-offload and --activation-checkpointing
(blocks: "recomputed"). 1 GB is 10^9 bytes. No weights are read or allocated: the model is built on
the meta device, split into the script's FSDP units, and one forward pass shows which tensors
autograd keeps. Padding is not counted. The last line is the command of the fastest row that fits.

A strategy fits if the largest of three peaks (training, saving, resuming) leaves --reserve-gb: for
the CUDA context, NCCL's buffers, workspaces of kernels, and memory that the allocator reserves but
does not use (32.14 GiB for 23.58 GiB active in torchtitan's issue 165, less with
PYTORCH_ALLOC_CONF=expandable_segments:True). CPU memory excludes the processes, the page cache and
the copy of --checkpoint-type full. With --accumulate-no-sync every GPU also holds the whole
gradient. Under DDP, autocast keeps 5% (GPT-2, T5) to 22% (Llama) more activations than shown.
"""

import contextlib
import functools
import importlib
import inspect
import io
import itertools
import json
import os
import sys
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any, Literal, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any directory

import torch
import transformers
import tyro
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.pytorch_utils import Conv1D

import policies
from core import ranks, weights
from core.args import Names
from core.chunked_loss import CHUNK

Storages = dict[int, torch.UntypedStorage]  # by address

SCRIPTS = {"llama": "llama_fsdp", "gpt2": "gpt2_fsdp", "t5": "T5_training"}  # by type of model
KEYS = {  # what the columns of SIZES are called in a config
    "llama": "hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads vocab_size",
    "gpt2": "n_embd n_layer n_head vocab_size",
    "t5": "d_model d_kv d_ff num_layers num_heads vocab_size",
}
OTHERS = {"llama": {"max_position_embeddings": 4096}, "t5": {"decoder_start_token_id": 0}}
SIZES = """
llama  meta-llama/Llama-2-7b-hf     4096  11008  32  32  32  32000
llama  meta-llama/Llama-2-13b-hf    5120  13824  40  40  40  32000
llama  meta-llama/Llama-2-70b-hf    8192  28672  80  64   8  32000
llama  TinyLlama/TinyLlama-1.1B-Chat-v1.0 2048   5632  22  32   4  32000
llama  tiny                          128    384   4   4   2    384
gpt2   openai-community/gpt2         768     12  12  50257
gpt2   openai-community/gpt2-medium 1024     24  16  50257
gpt2   openai-community/gpt2-large  1280     36  20  50257
gpt2   openai-community/gpt2-xl     1600     48  25  50257
gpt2   tiny-gpt2                     128      4   4    384
t5     google-t5/t5-small            512     64   2048   6    8  32128
t5     google-t5/t5-base             768     64   3072  12   12  32128
t5     google-t5/t5-large           1024     64   4096  24   16  32128
t5     google-t5/t5-3b              1024    128  16384  24   32  32128
t5     google-t5/t5-11b             1024    128  65536  24  128  32128
t5     tiny-t5                       128     32    512   2    4    384
"""
STRATEGIES = ("ddp", "shard_grad_op", "full_shard", "hybrid_shard")
LENGTH_FLAGS = ("max_seq_length", "block_size", "source_length")  # --seq-length in the scripts
OTHER_LENGTH = 1024  # tokens, for a script that has none of them
NODE_COUNTS = [*range(1, 65), 128, 256, 512, 1024, 2048, 4096]  # for the column "nodes"
COLUMNS = {  # of the table: keys of an estimate
    "states": "state_bytes",
    "units": "unsharded_bytes",
    "activ.": "activation_bytes",
    "loss": "logit_bytes",
    "step": "total_bytes",
    "save": "save_bytes",
    "resume": "resume_bytes",
    "CPU/node": "cpu_peak_bytes_per_node",
    "fits": "fits",
    "nodes": "smallest_nodes",
}
# The attention kernel for CPUs saves what fused kernels for GPUs save, and no scores.
KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
# --activation-checkpointing, the fastest first, and its part of a row's name
RECOMPUTED = {"none": "", "selective": ", selective", "blocks": ", recomputed"}
# Flags of the scripts that the command has if they are not the defaults.
COMMAND = ("fsdp", "precision", "batch_size", "gradient_accumulation_steps", "optimizer",
           "cpu_offload", "lora_rank", "lora_targets", "load_in_4bit")  # fmt: skip
LEGEND = """states: parameters, gradients and moments. units: unsharded parameters and gradients.
step: below the sum, as activations and gradients do not peak together. CPU/node: memory of
all processes of a node. nodes: the fewest on which it fits."""


@dataclass
class Args:
    """The flags, and one choice of strategy, offload and activation checkpointing."""

    model_name: str = "meta-llama/Llama-2-7b-hf"  # hub id, directory, config.json; or gpt2-xl, tiny
    script: str = ""  # your training script (default: the one for this type of model)
    nodes: int = 1  # number of machines
    gpus_per_node: int = 8  # GPUs in each machine
    gpu_memory_gb: float = 80.0  # memory of each GPU
    reserve_gb: float = 4.0  # GPU memory for what is not counted
    batch_size: int = 1  # samples per GPU and micro-batch
    gradient_accumulation_steps: int = 1  # micro-batches per step
    seq_length: int = 0  # tokens, T5: of the source; 0: the script's default
    target_length: int = 0  # tokens of the target, T5; 0: the script's default
    precision: Literal[*policies.PRECISIONS] = "bf16"  # compute dtype
    fsdp: Literal[1, 2] = 1  # as in the scripts; adapters use 2
    attention: Literal["fused", "eager"] = "fused"  # eager also keeps the score matrices
    optimizer: Literal["adamw", "paged_adamw_32bit"] = "adamw"  # paged: moments on the CPU
    lora_rank: int = 0  # adapters of this rank; 0: train all weights
    # projections with adapters; none: all in the blocks
    lora_targets: Annotated[Names, tyro.conf.arg(help_behavior_hint="")] = ()
    load_in_4bit: bool = False  # hold frozen projections in NF4 (QLoRA)
    json: bool = False  # print JSON, in bytes
    strategy: Annotated[str, tyro.conf.Suppress] = "full_shard"
    cpu_offload: Annotated[bool, tyro.conf.Suppress] = False
    activation_checkpointing: Annotated[str, tyro.conf.Suppress] = "none"

    accumulate_no_sync = False  # read by policies.Sharding

    @property
    def itemsize(self) -> int:
        """Bytes of the compute dtype."""
        return policies.PRECISIONS[self.precision].param_dtype.itemsize

    def __post_init__(self) -> None:
        """Use FSDP2 for adapters. Raise Problem if the flags do not fit each other."""
        if self.lora_rank:
            self.fsdp = 2
        elif self.load_in_4bit or self.lora_targets:
            raise ranks.Problem("--load-in-4bit and --lora-targets need --lora-rank.")
        if min(self.nodes, self.gpus_per_node, self.batch_size) < 1:
            raise ranks.Problem("--nodes, --gpus-per-node and --batch-size must be at least 1.")


def parse_args(argv: list[str] | None = None) -> Args:
    """Return the flags of `argv` (default: sys.argv), or exit with a message."""
    return tyro.cli(Args, args=argv, description=__doc__)


def short_name(name: str) -> str:
    """Return the last part of a hub id in lower case without suffixes, such as llama-2-7b."""
    return name.rpartition("/")[2].lower().removesuffix("-hf").removesuffix("-chat-v1.0")


def hub_id(name: str) -> str:
    """Return the --model-name that a script takes for one of this program."""
    if Path(name).exists() or short_name(name) not in BUILT_IN:
        return name
    full_name = BUILT_IN[short_name(name)].split()[1]
    return full_name if "/" in full_name else "tiny"


BUILT_IN = {short_name(line.split()[1]): line for line in SIZES.strip().splitlines()}


def new_config(line: str, **others: Any) -> transformers.PretrainedConfig:
    """Return the config for a line of a table such as SIZES, with other values."""
    kind, _, *sizes = line.split()
    values = dict(zip(KEYS[kind].split(), map(int, sizes), strict=True))
    return transformers.AutoConfig.for_model(kind, **values | OTHERS.get(kind, {}) | others)


def load_config(name: str) -> transformers.PretrainedConfig:
    """Return the config of a path, a built-in size or a hub id. Raise Problem if there is none."""
    path = Path(name)
    if not path.exists():
        if short_name(name) in BUILT_IN:
            return new_config(BUILT_IN[short_name(name)])
        path = weights.find_directory(name, ["config.json"])
    return weights.read_settings(transformers.AutoConfig, path)


def load_script(args: Args, config: transformers.PretrainedConfig) -> ModuleType:
    """Return the module of --script, or of the script for the model's type. Raise Problem if there
    is no such file."""
    other = "T5_training" if config.is_encoder_decoder else "llama_fsdp"
    path = Path(args.script or SCRIPTS.get(config.model_type, other))
    if args.script:
        if not path.is_file():
            raise ranks.Problem(f"{path} does not exist. Pass a training script.")
        sys.path.insert(0, str(path.resolve().parent))  # its data module may be there, too
    return importlib.import_module(path.stem)


def build(
    script: ModuleType, config: transformers.PretrainedConfig
) -> tuple[nn.Module, policies.Classes]:
    """Return the model of a config on meta and the classes of its blocks: the script's own model,
    or the one that the Auto class has for it. Of a multimodal model, return the text part. Raise
    Problem if there is none."""
    config, model_class = weights.choose_class(config, script.MODEL)
    config._attn_implementation = "estimate"
    with contextlib.redirect_stdout(io.StringIO()):
        weights.prepare_config(config)
        with torch.device("meta"):
            model = model_class(config)
        blocks = policies.layer_classes(model, script.MODEL, script.BLOCKS)
    if not getattr(config, "scale_decoder_outputs", True):  # FLAN-T5's head is not tied
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    if hasattr(script, "fused_norms"):  # an optional module
        script.fused_norms.fuse(model)
    return model, blocks


def fused_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    position_bias: Tensor | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the output [batch, length, heads, head size] of KERNEL for meta tensors, and None.
    T5's bias is masked by padding, so every layer saves a bias [batch, heads, length, length]."""
    if position_bias is not None:
        padding = query.new_empty(query.size(0), 1, 1, key.size(2), dtype=torch.bool)
        position_bias = torch.where(padding, position_bias, 0.0).detach()
    output, _ = KERNEL(query, key, value, dropout, attn_mask=position_bias)
    return output.transpose(1, 2), None


def eager_attention(module: nn.Module, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the output and weights of the eager attention of the module's own architecture."""
    architecture = sys.modules[type(module).__module__]
    return architecture.eager_attention_forward(module, *inputs, **options)


ATTENTIONS = {"fused": fused_attention, "eager": eager_attention}


class Sizes(NamedTuple):
    """What a parameter, or an FSDP unit of them, takes on all GPUs together."""

    trained: int  # elements that have gradients
    held: int  # bytes of the shards: fp32 if trained, else the compute dtype or 4 bits
    gathered: int  # bytes of the unsharded parameters


class Model:
    """A model and one micro-batch of it on one GPU."""

    state_itemsize = 4  # bytes of a gradient, and of a moment

    def __init__(self, args: Args) -> None:
        """Build --model-name on meta; replace lengths of 0 in `args`. Raise Problem if the model
        does not exist or does not fit the script or the sequence length."""
        config = load_config(args.model_name)
        script = load_script(args, config)
        is_tiny = "tiny" in short_name(args.model_name).split("-")
        data = vars(script.TINY.data if is_tiny else script.Args().data)
        default = max(data.get(name, 0) for name in LENGTH_FLAGS) or OTHER_LENGTH
        args.seq_length = args.seq_length or default
        args.target_length = args.target_length or data.get("target_length", args.seq_length)
        self.lengths = [name for name in (*LENGTH_FLAGS, "target_length") if name in data]
        self.script = args.script or f"{script.__name__}.py"
        AttentionInterface.register("estimate", ATTENTIONS[args.attention])
        AttentionMaskInterface.register("estimate", lambda **_: None)
        model, blocks = build(script, config)
        if hasattr(script, "checks"):  # an optional module
            script.checks.check_length(args, "seq_length", model.config)
        quantized = add_adapters(args, script, model, blocks) if args.lora_rank else set()
        sizes = {p: sizes_of(p, p in quantized, args.itemsize) for p in model.parameters()}
        self.units = units_of(script, model, blocks, sizes)
        self.parameters = sum(p.numel() for p in sizes)  # elements, as below
        self.trained = sum(weight.trained for weight in sizes.values())
        self.in_4bit = [p.numel() for p in quantized]
        head = model.get_output_embeddings().weight
        trained_head = head.numel() * head.requires_grad
        is_tied = head is model.get_input_embeddings().weight
        self.tied_head = trained_head * is_tied
        self.loss = loss_bytes(script, trained_head, model.config.vocab_size, args)
        model.to(policies.PRECISIONS[args.precision].param_dtype).train()
        self.activations = forward_pass(model, blocks, args)


def sizes_of(parameter: nn.Parameter, in_4bit: bool, itemsize: int) -> Sizes:
    """Return the Sizes of a parameter. `itemsize` is the bytes of the compute dtype."""
    count = parameter.numel()
    gathered = count // 2 if in_4bit else itemsize * count
    if parameter.requires_grad:
        return Sizes(count, 4 * count, gathered)
    return Sizes(0, gathered, gathered)


def units_of(
    script: ModuleType,
    model: nn.Module,
    blocks: policies.Classes,
    sizes: dict[nn.Parameter, Sizes],
) -> list[list[Sizes]]:
    """Return the Sizes of the parameters in the root unit, then of those in each other unit: a
    block or, if `wrap_model` names nn.Embedding, an embedding or a head that are not tied."""
    head = model.get_output_embeddings()
    is_tied = head.weight is model.get_input_embeddings().weight
    wraps_embeddings = not is_tied and "nn.Embedding" in inspect.getsource(script.wrap_model)
    root = dict(sizes)
    units = []
    for module in model.modules():
        is_other = wraps_embeddings and (module is head or isinstance(module, nn.Embedding))
        if isinstance(module, blocks) or is_other:
            units.append([sizes[parameter] for parameter in module.parameters()])
            for parameter in module.parameters():
                root.pop(parameter, None)
    return [list(root.values()), *units]


def add_adapters(
    args: Args, script: ModuleType, model: nn.Module, blocks: policies.Classes
) -> set[nn.Parameter]:
    """Freeze a model on meta and add adapters to the projections in its blocks. Return the weights
    that --load-in-4bit quantizes, whose shapes stay. Raise Problem if a target is not one, or if
    the script has no adapters."""
    if not hasattr(script, "lora"):  # an optional module
        raise ranks.Problem(f"{script.__name__} has no adapters. Leave --lora-rank at 0.")
    model.requires_grad_(False)
    layers, targets = script.lora.projections(model, blocks, args.lora_targets)
    in_4bit = set()
    for path, layer in layers.items():
        name = path.rpartition(".")[2]
        if args.load_in_4bit and name not in (model._keep_in_fp32_modules or []):
            in_4bit.add(layer.weight)
        if name in targets:
            outputs, width = layer.weight.shape
            if isinstance(layer, Conv1D):
                width, outputs = layer.weight.shape
            layer.lora_A = nn.Linear(width, args.lora_rank, bias=False, device="meta")
            layer.lora_B = nn.Linear(args.lora_rank, outputs, bias=False, device="meta")
            layer.register_forward_hook(add_adapter)  # keeps the tensors that peft's layer keeps
    return in_4bit


def add_adapter(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """Return the sum of the outputs of a projection and of its adapter."""
    return output + layer.lora_B(layer.lora_A(inputs[0])) * 0.5


def loss_bytes(script: ModuleType, trained_head: int, vocabulary: int, args: Args) -> int:
    """Return the peak bytes of the loss.

    A script without LossModel, such as T5_training.py, holds the logits of all target tokens: as
    computed, in fp32, and their fp32 log-softmax or its gradient. Others hold the logits of CHUNK
    tokens at a time: three tensors in fp32 (log-softmax, its gradient, the logits' gradient), then
    the logits' gradient and that of a trained head in the compute dtype, beside the head's sum over
    several chunks in fp32. The backward pass multiplies a gradient by a factor.
    """
    if not hasattr(script, "LossModel"):
        tokens = args.batch_size * args.target_length
        return tokens * vocabulary * (8 + args.itemsize % 4)
    tokens = args.batch_size * args.seq_length
    logits = min(tokens, CHUNK) * vocabulary
    gradient = args.itemsize * trained_head
    held = 4 * trained_head if tokens > CHUNK else 0
    at_work = max(12 * logits, gradient + args.itemsize * logits)
    return max(held + at_work, 2 * gradient)


def storage_bytes(*parts: Storages) -> int:
    """Return the bytes of all storages in `parts`, each address counted once."""
    return sum(storage.nbytes() for storage in ChainMap(*parts).values())


def forward_pass(
    model: nn.Module, classes: policies.Classes, args: Args
) -> dict[str, tuple[int, int]]:
    """Return the bytes that autograd keeps after a forward pass, and those of the largest
    recomputed block, by --activation-checkpointing.

    Each tensor counts once, and weights do not count. With activation checkpointing the blocks'
    inputs stay, and one block's tensors at a time. `selective` also keeps what
    optional/selective.py's contexts store.
    """
    room = getattr(policies, "selective", None)  # an optional module
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    outside: Storages = {}  # what autograd keeps outside of the blocks
    blocks: list[Storages] = []  # and in each block
    inputs: Storages = {}  # of all blocks
    kept: Storages = {}  # by `selective`, besides the inputs

    def note(storages: Storages, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            storages[storage._cdata] = storage  # lives on, so that no address is reused
        return tensor

    def saved_in(storages: Storages) -> Any:
        keep = functools.partial(note, storages)
        return torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)

    def run_block(block: nn.Module, forward: Callable, *values: Any, **options: Any) -> Any:
        pytree.tree_map_only(Tensor, functools.partial(note, inputs), (values, options))
        blocks.append({})
        context: Any = contextlib.nullcontext()
        if room:
            context, _ = room.selective_contexts(room.count_products(block))
        with saved_in(blocks[-1]), context:
            output = forward(*values, **options)
        results = getattr(context, "storage", {})  # private, but the results it keeps
        for result in pytree.tree_leaves(results):
            if hasattr(result, "val"):  # else a mark of one that is recomputed
                note(kept, result.val)
        return output

    for module in model.modules():
        if isinstance(module, classes):
            module.forward = functools.partial(run_block, module, module.forward)
        if isinstance(module, nn.Dropout) and module.p:  # on a GPU, autograd keeps a mask of bytes
            module.forward = lambda x, p=module.p: torch.native_dropout(x, p, True)[0]
    ids = torch.empty(args.batch_size, args.seq_length, dtype=torch.int64, device="meta")
    batch = {"input_ids": ids, "attention_mask": ids}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = ids.new_empty(args.batch_size, args.target_length)
    with saved_in(outside):
        model(**batch, use_cache=False)
    activations = {}
    stays = {"none": blocks, "selective": [inputs, kept], "blocks": [inputs]}
    for name, parts in stays.items():
        size = storage_bytes(outside, *parts)
        largest = max(storage_bytes(outside, *parts, block) for block in blocks)
        activations[name] = size, largest - size
    return activations


def total(parts: list[Sizes]) -> Sizes:
    """Return the sum of Sizes."""
    return Sizes(*map(sum, zip(Sizes(0, 0, 0), *parts, strict=True)))


def shard_count(args: Args) -> int:
    """Return the number of GPUs that share a model."""
    if args.strategy == "ddp":
        return 1
    return args.gpus_per_node * (1 if args.strategy == "hybrid_shard" else args.nodes)


def memory(model: Model, args: Args) -> dict[str, int]:
    """Return the bytes on each GPU, by term and at the peaks, and of CPU memory in each node.

    Parameters, gradients and AdamW's moments take 4 + 4 + 8 bytes per parameter, divided by the
    shards. Offload moves them to the CPU, and paged moments count as CPU memory, because the driver
    moves them there when the GPU is full (Dettmers et al. 2023). Frozen weights take the bytes of
    the compute dtype, or half a byte plus scales, all of which every GPU holds: 8 bits per 64
    weights, 32 bits per 256 of those, and for each tensor 17 values in fp32.
    """
    shards = shard_count(args)
    units = [total(unit) for unit in model.units]
    whole = total(units)
    scales = sum(count // 64 + count // 64**2 + 4 * 17 for count in model.in_4bit)
    parameters = whole.held // shards + scales
    gradients = model.state_itemsize * whole.trained // shards
    all_moments = 2 * gradients
    moments = all_moments if args.optimizer == "adamw" else 0
    cpu = all_moments - moments
    save, resume, copies = state_dicts(model, args, parameters + moments, gradients)
    if args.cpu_offload:
        cpu = all_moments + pinned_bytes(model, args, units, shards)
        parameters = scales
        gradients = moments = 0
    unsharded, step = step_peak(model, args, units, gradients)
    step += parameters + moments
    peak = max(step, save, resume)
    return {
        "state_bytes": parameters + gradients + moments,
        "parameter_bytes": parameters,
        "gradient_bytes": gradients,
        "optimizer_bytes": moments,
        "unsharded_bytes": unsharded,
        "activation_bytes": sum(model.activations[args.activation_checkpointing]),
        "logit_bytes": model.loss,
        "total_bytes": step,
        "save_bytes": save,
        "resume_bytes": resume,
        "peak_bytes": peak,
        "fits": peak <= (args.gpu_memory_gb - args.reserve_gb) * 1e9,
        "cpu_peak_bytes_per_node": args.gpus_per_node * (cpu + copies),
        "save_cpu_bytes_per_node": args.gpus_per_node * copies,
    }


def state_dicts(model: Model, args: Args, held: int, gradients: int) -> tuple[int, int, int]:
    """Return a GPU's peak bytes in a save and in a resume, and the bytes of the save's CPU copies.

    `held` are the bytes of its parameters and moments. FSDP1 starts a save with the last gradients,
    frees them when it gathers the first unit, and holds two units, or three with offload, in fp32.
    Its loaded moments then pass through the GPU. FSDP2 and DDP copy the shard of one trained tensor
    at a time.
    """
    if args.fsdp == 1 and args.strategy != "ddp":
        unit = 4 * max(total(unit).trained for unit in model.units)
        copies = 3 * gradients
        if args.cpu_offload:
            return 3 * unit, unit + 2 * gradients, copies
        peak = held + max(gradients, 2 * unit)
        return peak, peak, copies
    if args.cpu_offload:
        return 0, 0, 0
    largest = max(weight.trained for weight in itertools.chain(*model.units))
    copies = 4 * largest // shard_count(args)
    resume = held + gradients
    return held if args.fsdp == 2 else resume, resume, copies


def pinned_bytes(model: Model, args: Args, units: list[Sizes], shards: int) -> int:
    """Return the bytes of pinned memory for a GPU's offloaded parameters and gradients. PyTorch's
    CachingHostAllocator rounds each allocation up to a power of two: the shard of a unit under
    FSDP1, of a parameter under FSDP2."""
    pieces = units if args.fsdp == 1 else itertools.chain(*model.units)
    sizes = [size // shards for piece in pieces for size in (piece.held, 4 * piece.trained)]
    return sum(1 << (size - 1).bit_length() for size in sizes if size)


def unsharded_by_fsdp1(model: Model, args: Args, units: list[Sizes]) -> tuple[int, ...]:
    """Return the bytes of unsharded tensors of FSDP1 or DDP as `unsharded_by_fsdp2` does.

    FSDP1 holds unsharded parameters, in the compute dtype, of the root, the current unit and the
    prefetched one (SHARD_GRAD_OP: of all units), and unsharded gradients of the root, the current
    unit and the one being reduced. A single GPU shards nothing, but casts a unit at a time. DDP
    holds the casts of autocast, and its gradients are in buckets.
    """
    root, *others = [unit.gathered for unit in units]
    parameters = root + sum(others)
    if args.strategy == "ddp":
        return parameters * (args.itemsize < 4), 0, 0, 0
    at_work = root + max(map(sum, itertools.pairwise([*others, 0])))
    if args.strategy != "shard_grad_op" or shard_count(args) == 1:
        parameters = at_work
    return parameters + at_work, 0, 0, 0


def unsharded_by_fsdp2(model: Model, args: Args, units: list[Sizes]) -> tuple[int, ...]:
    """Return the bytes of unsharded tensors: held all the time, and added in the loss, in a block
    and at the end of the root's backward pass.

    According to FSDPMemTracker of torch 2.13, a block has its parameters and gradients, the next
    block's parameters and the previous block's gradients. In the root a tied weight has the
    gradients of both uses and their sum.
    """
    reduce = policies.PRECISIONS[args.precision].reduce_dtype.itemsize
    root, *others = units
    held = root.gathered
    if args.strategy == "shard_grad_op":
        held += total(others).gathered
    in_block = 0
    for unit, next_unit in itertools.pairwise([*others, Sizes(0, 0, 0)]):
        gradients = (args.itemsize + reduce) * unit.trained
        in_block = max(in_block, unit.gathered + gradients + next_unit.gathered)
    tied_gradient = args.itemsize * model.tied_head
    in_block += tied_gradient
    in_block += args.itemsize * max(model.in_4bit, default=0)  # dequantized for a matrix product
    in_root = reduce * others[-1].trained + 3 * tied_gradient
    return held, others[-1].gathered, in_block, in_root


UNSHARDED = {1: unsharded_by_fsdp1, 2: unsharded_by_fsdp2}


def step_peak(model: Model, args: Args, units: list[Sizes], gradients: int) -> tuple[int, int]:
    """Return the bytes of unsharded tensors, and at the peak of a step of all but parameters and
    moments. `gradients` are the bytes of their shards on the GPU.

    The peak is in the loss, before there are gradients; in the blocks, after the logits are freed;
    or in the root, with all gradients. In the blocks activations are freed as gradients arrive, so
    only the larger of the two counts. With accumulation, and in DDP's buckets, all phases have all
    gradients.
    """
    held, in_loss, in_block, in_root = UNSHARDED[args.fsdp](model, args, units)
    unsharded = held + in_block
    kept, block = model.activations[args.activation_checkpointing]
    in_loss += kept + model.loss
    in_block += kept + gradients + block
    in_root += gradients
    if args.gradient_accumulation_steps > 1 or args.strategy == "ddp":
        in_loss += gradients
    else:
        in_block -= min(gradients, kept)
    return unsharded, held + max(in_loss, in_block, in_root)


def estimate(model: Model, args: Args) -> dict[str, Any]:
    """Return a row of the tables for one choice: its memory, and the smallest of NODE_COUNTS on
    which it fits, or None."""
    row = {
        "strategy": args.strategy,
        "cpu_offload": args.cpu_offload,
        "activation_checkpointing": args.activation_checkpointing,
        "optimizer": args.optimizer,
    } | memory(model, args)
    # More nodes never need more memory on a GPU, so the first that fits is the smallest number.
    fits = (x for x in NODE_COUNTS if memory(model, replace(args, nodes=x))["fits"])
    return row | {"smallest_nodes": next(fits, None)}


def is_accepted(args: Args) -> bool:
    """Return whether the scripts accept the flags in `args`."""
    if args.optimizer != "adamw" and (args.fsdp == 2 or args.cpu_offload):
        return False
    sharding = policies.Sharding(
        fsdp=args.fsdp,
        strategy=args.strategy,
        cpu_offload=args.cpu_offload,
        precision=args.precision,
    )
    launcher = {
        "RANK": "0",
        "WORLD_SIZE": str(args.nodes * args.gpus_per_node),
        "LOCAL_WORLD_SIZE": str(args.gpus_per_node),
    }
    with mock.patch.dict(os.environ, launcher):
        return not sharding.problems(SimpleNamespace(optim=args))


def estimates(model: Model, args: Args) -> list[dict[str, Any]]:
    """Return a row for each strategy, offload and recomputation that the scripts accept."""
    rows = []
    for strategy, offload, recomputed in itertools.product(
        STRATEGIES, (False, True), policies.RECOMPUTATION
    ):
        choice = replace(
            args, strategy=strategy, cpu_offload=offload, activation_checkpointing=recomputed
        )
        if is_accepted(choice):
            rows.append(estimate(model, choice))
    return rows


def command(model: Model, args: Args, rows: list[dict[str, Any]]) -> str:
    """Return the torchrun command, without the flags of the data, of the fastest row of full_shard
    that fits, or else of one that fits on the fewest nodes."""
    rows = [row for row in rows if row["strategy"] == "full_shard" and row["smallest_nodes"]]
    if not rows:
        return "full_shard fits on no number of nodes. Lower --batch-size or --seq-length."
    # The first of several with as many nodes is the fastest.
    row = min(rows, key=lambda row: max(args.nodes, row["smallest_nodes"]))
    nodes = max(args.nodes, row["smallest_nodes"])
    host = "HOST" if nodes > 1 else "localhost"
    line = f"torchrun --nnodes {nodes} --nproc_per_node {args.gpus_per_node} "
    line += f"--rdzv-backend c10d --rdzv-endpoint {host}:29500 --rdzv-id 1 "
    line += f"{model.script} --model-name {hub_id(args.model_name)} --strategy full_shard"
    line += f" --activation-checkpointing {row['activation_checkpointing']}"
    values = dict.fromkeys(LENGTH_FLAGS, args.seq_length) | vars(args) | row
    values["lora_targets"] = " ".join(args.lora_targets)
    for name in (*model.lengths, *COMMAND):
        value = values[name]
        if value and value != getattr(Args, name, None):
            text = "" if value is True else f" {value}"
            line += f" --{name.replace('_', '-')}{text}"
    return line


def main(argv: list[str] | None = None) -> None:
    """Print the table and a command, or JSON."""
    args = parse_args(argv)
    model = Model(args)
    rows = estimates(model, args)
    if args.json:
        print(json.dumps({"estimates": rows}))
        return
    print(f"{args.model_name}: {model.parameters:,} parameters in {len(model.units)} units")
    print(f"{args}\n\n{'GB per GPU':34}" + "".join(f"{name:>9}" for name in COLUMNS))
    for row in rows:
        name = row["strategy"] + ", offload" * row["cpu_offload"]
        line = f"{name + RECOMPUTED[row['activation_checkpointing']]:34}"
        for key in COLUMNS.values():
            value = f"{row[key] / 1e9:,.2f}" if "bytes" in key else row[key]
            line += f"{value!s:>9}"
        print(line)
    print(f"\n{LEGEND}\n\n{command(model, args, rows)}")


if __name__ == "__main__":
    try:
        main()
    except (OSError, ranks.Problem) as error:
        ranks.finish(error)
