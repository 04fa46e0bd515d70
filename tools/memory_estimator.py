"""Estimate the memory of FSDP training from a model's config.

    python tools/memory_estimator.py --model-name meta-llama/Llama-2-70b-hf --nodes 2
    python tools/memory_estimator.py --model-name DIRECTORY --json  # or a config.json
    python tools/memory_estimator.py --model-name DIRECTORY --script my_script.py

The tables compare all strategies, with and without --cpu-offload and --activation-checkpointing
(blocks: "recomputed"). 1 GB is 10^9 bytes. No weights are read or allocated: the model is built on
the meta device, split into the script's FSDP units, and one forward pass shows which tensors
autograd keeps.

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
import sys
from collections import ChainMap, Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any directory

import torch
import transformers
import tyro
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.pytorch_utils import Conv1D

import policies
from core import ranks, weights
from core.args import Names, Switch
from core.chunked_loss import CHUNK

Classes = tuple[type[nn.Module], ...]
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
# GPU and CPU bytes per parameter of AdamW's fp32 moments. Paged moments count as CPU memory,
# because the driver moves them there when the GPU is full (Dettmers et al. 2023).
OPTIMIZERS = {"adamw": (8, 0), "paged_adamw_32bit": (0, 8)}
STRATEGIES = ("ddp", "shard_grad_op", "full_shard", "hybrid_shard")
LENGTH_FLAGS = ("max_seq_length", "block_size", "source_length")  # --seq-length in the scripts
OTHER_LENGTH = 1024  # tokens, for a script that has none of them
NODE_COUNTS = [*range(1, 65), 128, 256, 512, 1024, 2048, 4096]  # for "min nodes"
TABLES = {  # title: the key of an estimate for each column
    "GB on each GPU in training": {
        "params": "parameter_bytes", "grads": "gradient_bytes", "optim.": "optimizer_bytes",
        "units": "unsharded_bytes", "activ.": "activation_bytes", "logits": "logit_bytes",
        "peak": "total_bytes",
    },
    "GB, other peaks": {
        "save": "save_bytes", "resume": "resume_bytes", "fits": "fits",
        "min nodes": "smallest_nodes", "CPU, node": "cpu_peak_bytes_per_node", "compute": "compute",
    },
}  # fmt: skip
COMMAND = ("fsdp", "precision", "batch_size", "gradient_accumulation_steps", "optimizer",
           "cpu_offload", "lora_rank", "load_in_4bit")  # fmt: skip
LEGEND = """units: unsharded parameters and gradients. peak: below the sum, as activations and
gradients do not peak together. CPU, node: memory of all processes of a node, with offload.
compute: FLOPs of a step, relative to those without recomputation."""
# The attention kernel for CPUs saves what fused kernels for GPUs save, and no scores.
KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
# --activation-checkpointing, and its part of a row's name
RECOMPUTED = {"none": "", "blocks": ", recomputed", "selective": ", selective"}


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
    optimizer: Literal[*OPTIMIZERS] = "adamw"  # paged: moments on the CPU
    lora_rank: int = 0  # adapters of this rank; 0: train all weights
    lora_targets: Names = ()  # projections with adapters; none: all in the blocks
    load_in_4bit: Switch = False  # hold frozen projections in NF4 (QLoRA)
    json: Switch = False  # print JSON, in bytes
    strategy: Annotated[str, tyro.conf.Suppress] = "full_shard"
    cpu_offload: Annotated[bool, tyro.conf.Suppress] = False
    activation_checkpointing: Annotated[str, tyro.conf.Suppress] = "none"

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
    if not args.script:
        other = "T5_training" if config.is_encoder_decoder else "llama_fsdp"
        return importlib.import_module(SCRIPTS.get(config.model_type, other))
    path = Path(args.script)
    if not path.is_file():
        raise ranks.Problem(f"{path} does not exist. Pass a training script.")
    sys.path.insert(0, str(path.resolve().parent))  # its data module may be there, too
    return importlib.import_module(path.stem)


def build(script: ModuleType, config: transformers.PretrainedConfig) -> tuple[nn.Module, Classes]:
    """Return the model of a config on meta and the classes of its blocks: the script's own model,
    or the one that the Auto class has for it. Of a multimodal model, return the text part. Raise
    Problem if there is none."""
    config, model_class = weights.choose_class(config, script.MODEL)
    if model_class is None:
        kind = config.model_type
        raise ranks.Problem(f"{script.__name__} cannot train a {kind}. {script.OTHER_SCRIPT}")
    config._attn_implementation = "estimate"
    if config.model_type == "gpt2":  # as the script does
        config.activation_function = "gelu_pytorch_tanh"
    with torch.device("meta"):
        model = model_class(config)
    if hasattr(script, "fused_norms"):  # an optional module
        script.fused_norms.fuse(model, script.MODEL, script.NORMS)
    with contextlib.redirect_stdout(io.StringIO()):
        blocks = policies.layer_classes(model, script.MODEL, script.BLOCKS)
    return model, blocks


def fused_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None,
    position_bias: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return the output [batch, length, heads, head size] of KERNEL for meta tensors, and None;
    set `module.kernel_results`. T5's bias is masked by padding, so every layer saves a bias [batch,
    heads, length, length]."""
    if position_bias is not None:
        shape = (query.size(0), 1, 1, key.size(2))
        padding = torch.empty(shape, dtype=torch.bool, device=query.device)
        position_bias = torch.where(padding, position_bias, 0.0).detach()
    module.kernel_results = KERNEL(query, key, value, attn_mask=position_bias)
    return module.kernel_results[0].transpose(1, 2), None


def eager_attention(module: nn.Module, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the output and weights of the eager attention of the module's own architecture."""
    architecture = sys.modules[type(module).__module__]
    return architecture.eager_attention_forward(module, *inputs, **options)


ATTENTIONS = {"fused": fused_attention, "eager": eager_attention}


class Weight(NamedTuple):
    """A parameter: its shape, in bytes if it is in 4 bits, and the bytes of an element."""

    shape: torch.Size
    held: int = 4  # of the shard: fp32 if trained, else the compute dtype
    gathered: int = 4  # of the unsharded parameter
    is_trained: bool = True
    in_4bit: bool = False


@dataclass
class Unit:
    """The memory and the elements of one FSDP unit, including padding."""

    gathered: int = 0  # bytes of its unsharded parameters, in the compute dtype or 4 bits
    held: int = 0  # bytes of rank 0's shard
    trained: int = 0  # elements that have gradients
    updated: int = 0  # elements that rank 0's optimizer updates, without FSDP1's padding


class States(NamedTuple):
    """Bytes on a GPU that are as many in each step."""

    parameters: int
    gradients: int
    moments: int


@dataclass
class Model:
    """A model and one micro-batch of it on one GPU."""

    script: str  # the file
    lengths: dict[str, int]  # the script's flags for tokens in a sample
    units: list[list[Weight]]  # parameters by FSDP unit, the root's first
    parameters: int  # elements, as below
    trained: int
    largest_in_4bit: int
    trained_head: int  # of the output head; 0 if it is frozen
    is_tied: bool  # the output head shares its weight with the input embedding
    chunked: bool  # the loss computes the logits of one chunk of tokens at a time
    logit_count: int  # elements of the logits held at a time
    logits: int  # their bytes
    # By --activation-checkpointing: bytes that stay, and those of the largest recomputed block.
    activations: dict[str, tuple[int, int]] = field(default_factory=dict)
    recomputed: Counter[str] = field(default_factory=Counter)  # FLOPs, by the same
    flops: int = 0  # of a forward pass


def read_model(args: Args) -> Model:
    """Return the sizes of --model-name, built on meta; replace lengths of 0 in `args`. Raise
    Problem if the model does not exist or does not fit the script or the sequence length.

    T5_training.py holds the logits of all target tokens: as computed, in fp32, and their fp32
    log-softmax or its gradient. The other scripts hold the logits of CHUNK tokens at a time.
    """
    config = load_config(args.model_name)
    script = load_script(args, config)
    is_tiny = "tiny" in short_name(args.model_name).split("-")
    data = script.TINY.data if is_tiny else script.Args().data
    names = [name for name in LENGTH_FLAGS if hasattr(data, name)]
    defaults = [getattr(data, name) for name in names] or [OTHER_LENGTH]
    args.seq_length = args.seq_length or max(defaults)
    args.target_length = args.target_length or getattr(data, "target_length", args.seq_length)
    lengths = dict.fromkeys(names, args.seq_length)
    if hasattr(data, "target_length"):
        lengths["target_length"] = args.target_length
    AttentionInterface.register("estimate", ATTENTIONS[args.attention])
    AttentionMaskInterface.register("estimate", lambda **_: None)
    compute = policies.PRECISIONS[args.precision].param_dtype
    model, blocks = build(script, config)
    config = model.config
    if hasattr(script, "checks"):  # an optional module
        script.checks.check_length(args, "seq_length", config)
    in_4bit = add_adapters(args, script, model, blocks) if args.lora_rank else set()
    if not getattr(config, "scale_decoder_outputs", True):  # FLAN-T5's head is not tied
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    head = model.get_output_embeddings().weight
    chunked = hasattr(script, "LossModel")
    tokens = args.batch_size * args.target_length
    if chunked:
        tokens = min(args.batch_size * args.seq_length, CHUNK)
    # The fields for activations are filled by the forward pass below.
    result = Model(
        script=args.script or f"{script.__name__}.py",
        lengths=lengths,
        units=weights_by_unit(script, model, blocks, in_4bit, args.itemsize),
        parameters=sum(p.numel() for p in model.parameters()),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        largest_in_4bit=max((weight.numel() for weight in in_4bit), default=0),
        trained_head=head.numel() * head.requires_grad,
        is_tied=head is model.get_input_embeddings().weight,
        chunked=chunked,
        logit_count=tokens * config.vocab_size,
        logits=tokens * config.vocab_size * (8 + args.itemsize % 4),
    )
    add_forward_pass(result, model.to(compute).train(), blocks, args)
    return result


def new_weight(parameter: nn.Parameter, itemsize: int, in_4bit: bool) -> Weight:
    """Return the Weight of a parameter. `itemsize` is the bytes of the compute dtype."""
    if in_4bit:
        return Weight(
            shape=torch.Size([parameter.numel() // 2]),
            held=1,
            gathered=1,
            is_trained=False,
            in_4bit=True,
        )
    is_trained = parameter.requires_grad
    return Weight(
        shape=parameter.shape,
        held=4 if is_trained else itemsize,
        gathered=itemsize,
        is_trained=is_trained,
    )


def weights_by_unit(
    script: ModuleType, model: nn.Module, blocks: Classes, in_4bit: set[nn.Parameter], itemsize: int
) -> list[list[Weight]]:
    """Return a list of Weights for the root unit, then one for each other unit: a block or, if
    `wrap_model` names nn.Embedding, an embedding or a head that are not tied."""
    head = model.get_output_embeddings()
    is_tied = head.weight is model.get_input_embeddings().weight
    wraps_embeddings = not is_tied and "nn.Embedding" in inspect.getsource(script.wrap_model)
    root = dict.fromkeys(model.parameters())
    units = [root]
    for module in model.modules():
        is_other = wraps_embeddings and (module is head or isinstance(module, nn.Embedding))
        if isinstance(module, blocks) or is_other:
            unit = list(module.parameters())
            units.append(unit)
            for parameter in unit:
                root.pop(parameter, None)
    return [[new_weight(p, itemsize, p in in_4bit) for p in unit] for unit in units]


class Adapted(nn.Module):
    """A projection with an adapter of --lora-rank, which keeps the tensors that peft's keeps."""

    def __init__(self, rank: int, layer: nn.Module) -> None:
        super().__init__()
        outputs, width = layer.weight.shape
        if isinstance(layer, Conv1D):
            width, outputs = layer.weight.shape
        self.base_layer = layer
        self.lora_A = nn.Linear(width, rank, bias=False, device="meta")
        self.lora_B = nn.Linear(rank, outputs, bias=False, device="meta")

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the sum of the outputs of the projection and of its adapter."""
        return self.base_layer(inputs) + self.lora_B(self.lora_A(inputs)) * 0.5


def add_adapters(
    args: Args, script: ModuleType, model: nn.Module, blocks: Classes
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
            model.set_submodule(path, Adapted(args.lora_rank, layer))
    return in_4bit


def storage_bytes(*parts: Storages) -> int:
    """Return the bytes of all storages in `parts`, each address counted once."""
    storages = ChainMap(*parts).values()
    return sum(storage.nbytes() for storage in storages)


def kernel_flops(query: torch.Size, key: torch.Size, *_: Any, **__: Any) -> int:
    """Return the FLOPs of KERNEL for the shapes of a query and a key."""
    return 4 * query.numel() * key[2]


def meta_batch(model: nn.Module, args: Args) -> dict[str, Tensor]:
    """Return the inputs of a micro-batch on meta."""
    ids = torch.empty(args.batch_size, args.seq_length, dtype=torch.int64, device="meta")
    batch = {"input_ids": ids, "attention_mask": ids}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = ids.new_empty(args.batch_size, args.target_length)
    return batch


def add_forward_pass(result: Model, model: nn.Module, classes: Classes, args: Args) -> None:
    """Write into `result` the bytes that autograd keeps after a forward pass, and FLOPs.

    Each tensor counts once, and weights do not count. With activation checkpointing the blocks'
    inputs stay, and one block's tensors at a time. `selective` also keeps what
    policies.selective_contexts say. No last product of a block is recomputed, as nothing needs it.
    """
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    outside: Storages = {}  # what autograd keeps outside of the blocks
    blocks: list[Storages] = []  # and in each block
    inputs: Storages = {}  # of all blocks
    kept: Storages = {}  # by `selective`, besides the inputs
    products: list[Tensor] = []  # of the running block
    flops: list[int] = []  # for each of them

    def note(storages: Storages, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            storages[storage._cdata] = storage  # lives on, so that no address is reused
        return tensor

    def saved_in(storages: Storages) -> Any:
        keep = functools.partial(note, storages)
        return torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)

    def run_block(forward: Callable, *values: Any, **options: Any) -> Any:
        pytree.tree_map_only(Tensor, functools.partial(note, inputs), (values, options))
        blocks.append({})
        with saved_in(blocks[-1]):
            output = forward(*values, **options)
        for product in products[::2]:
            note(kept, product)
        result.recomputed["blocks"] += sum(flops[:-1])
        result.recomputed["selective"] += sum(flops[1:-1:2])
        products.clear()
        flops.clear()
        return output

    def multiply(_: nn.Module, values: tuple[Tensor, ...], output: Tensor) -> None:
        products.append(output)
        flops.append(2 * values[0].numel() * output.size(-1))

    for module in model.modules():
        if isinstance(module, classes):
            module.forward = functools.partial(run_block, module.forward)
            for layer in module.modules():
                if isinstance(layer, nn.Linear | Conv1D):
                    layer.register_forward_hook(multiply)
        if isinstance(module, nn.Dropout) and module.p:  # on a GPU, autograd keeps a mask of bytes
            module.forward = lambda x, p=module.p: torch.native_dropout(x, p, True)[0]
    counter = FlopCounterMode(display=False, custom_mapping={KERNEL: kernel_flops})
    with saved_in(outside), counter:
        model(**meta_batch(model, args), use_cache=False)
    result.flops = counter.get_total_flops()
    result.recomputed["blocks"] += counter.get_flop_counts()["Global"].get(KERNEL, 0)
    for module in model.modules():
        for output in getattr(module, "kernel_results", ()):
            note(kept, output)
    stays = {"none": blocks, "blocks": [inputs], "selective": [inputs, kept]}
    for name, parts in stays.items():
        size = storage_bytes(outside, *parts)
        largest = max(storage_bytes(outside, *parts, block) for block in blocks)
        result.activations[name] = size, largest - size


@functools.cache
def flat_parameter(unit: tuple[Weight, ...], shards: int) -> Unit:
    """Return the sizes of an FSDP1 unit. Each parameter starts at a multiple of 16 bytes in the
    compute dtype. All shards have one size."""
    itemsize = unit[0].gathered if unit else 1  # a root may have no weights of its own
    aligned = 16 // itemsize
    spans = []
    end = 0
    for weight in unit:
        start = -(-end // aligned) * aligned
        end = start + weight.shape.numel()
        spans.append((start, end))
    shard = -(-end // shards)
    whole = shards * shard
    updated = sum(max(0, min(end, shard) - start) for start, end in spans)
    return Unit(
        gathered=itemsize * whole,
        held=4 * shard,
        trained=whole,
        updated=updated,
    )


@functools.cache
def sharded_by_rows(unit: tuple[Weight, ...], shards: int) -> Unit:
    """Return the sizes of an FSDP2 unit. Each parameter is split by rows and padded to rank 0's
    number of rows (torch/distributed/fsdp/_fully_shard/_fsdp_param.py). 4-bit weights are rows of
    one byte."""
    sizes = Unit()
    for weight in unit:
        shard = -(-weight.shape[0] // shards) * weight.shape[1:].numel()
        sizes.held += weight.held * shard
        sizes.gathered += weight.gathered * shards * shard
        sizes.updated += weight.is_trained * shard
    sizes.trained = shards * sizes.updated
    return sizes


SHARDING = {1: flat_parameter, 2: sharded_by_rows}  # by --fsdp


def scale_bytes(model: Model) -> int:
    """Return the bytes of the scales of 4-bit weights, all of which every GPU holds: 8 bits per 64
    weights, 32 bits per 256 of those, and for each tensor their mean and the 16 values in fp32."""
    total = 0
    for weight in itertools.chain(*model.units):
        if weight.in_4bit:
            blocks = -(-weight.shape.numel() // 32)
            total += blocks + 4 * -(-blocks // 256) + 4 * (1 + 16)
    return total


def layout(model: Model, args: Args) -> tuple[int, list[Unit]]:
    """Return the number of GPUs that share the model, and its units. DDP has one, without
    padding."""
    if args.strategy == "ddp":
        whole = Weight(torch.Size([model.parameters]), gathered=args.itemsize)
        return 1, [flat_parameter((whole,), 1)]
    shards = args.gpus_per_node
    if args.strategy != "hybrid_shard":
        shards *= args.nodes
    return shards, [SHARDING[args.fsdp](tuple(unit), shards) for unit in model.units]


def memory(model: Model, args: Args) -> dict[str, int]:
    """Return the bytes on each GPU, by term and at the peaks, and of CPU memory in each node.

    Parameters, gradients and AdamW's moments take 4 + 4 + 8 bytes per parameter, divided by the
    shards. Offload moves them to the CPU. Frozen weights take the bytes of the compute dtype, or
    half a byte plus the scales.
    """
    shards, units = layout(model, args)
    trained = sum(unit.trained for unit in units) // shards
    updated = sum(unit.updated for unit in units)
    scales = scale_bytes(model)
    held = sum(unit.held for unit in units) + scales
    on_gpu, on_cpu = OPTIMIZERS[args.optimizer]
    states = States(held, 4 * trained, on_gpu * updated)
    cpu = on_cpu * updated
    moments = states.moments + cpu
    unit = 4 * max(unit.trained for unit in units)
    sizes = (weight.shape.numel() for weight in itertools.chain(*model.units))
    tensor = 4 * max(sizes) // shards
    save, resume, copies = state_dicts(args, states, moments, unit, tensor)
    if args.cpu_offload:
        cpu = pinned_bytes(model, args, units, shards) + moments
        states = States(scales, 0, 0)
    kept, block = model.activations[args.activation_checkpointing]
    unsharded, logits, total = peaks(model, args, states, kept, block)
    peak = max(total, save, resume)
    return {
        "parameter_bytes": states.parameters,
        "gradient_bytes": states.gradients,
        "optimizer_bytes": states.moments,
        "unsharded_bytes": unsharded,
        "activation_bytes": kept + block,
        "logit_bytes": logits,
        "total_bytes": total,
        "save_bytes": save,
        "resume_bytes": resume,
        "peak_bytes": peak,
        "fits": peak <= (args.gpu_memory_gb - args.reserve_gb) * 1e9,
        "cpu_peak_bytes_per_node": args.gpus_per_node * (cpu + copies),
        "save_cpu_bytes_per_node": args.gpus_per_node * copies,
    }


def state_dicts(
    args: Args, states: States, moments: int, unit: int, tensor: int
) -> tuple[int, int, int]:
    """Return a GPU's peak bytes in a save and in a resume, and the bytes of the save's CPU copies.

    `moments` are the bytes of all moments, also on the CPU, `unit` those of the largest FSDP unit
    in fp32, `tensor` those of the largest shard of a tensor. FSDP1 starts a save with the last
    gradients, frees them when it gathers the first unit, and holds two units, or three with
    offload. Its loaded moments then pass through the GPU. FSDP2 and DDP copy one tensor at a time.
    """
    if args.strategy == "ddp":
        return sum(states), sum(states), tensor
    held = states.parameters + states.moments
    if args.fsdp == 2:
        return (0, 0, 0) if args.cpu_offload else (held, sum(states), tensor)
    copies = states.parameters + moments
    if args.cpu_offload:
        return 3 * unit, unit + moments, copies
    held += max(states.gradients, 2 * unit)
    return held, held, copies


def pinned_bytes(model: Model, args: Args, units: list[Unit], shards: int) -> int:
    """Return the bytes of pinned memory for a GPU's offloaded parameters and gradients. PyTorch's
    CachingHostAllocator rounds each allocation up to a power of two: the shard of a unit under
    FSDP1, of a parameter under FSDP2."""
    pieces = units
    if args.fsdp == 2:
        weights = itertools.chain(*model.units)
        pieces = [sharded_by_rows((weight,), shards) for weight in weights]
    total = 0
    for piece in pieces:
        for size in (piece.held, 4 * piece.trained // shards):
            if size:
                total += 1 << (size - 1).bit_length()
    return total


def loss_bytes(model: Model, args: Args) -> int:
    """Return the peak bytes of the loss. For a chunk, it holds three tensors in fp32 (log-softmax,
    its gradient, the logits' gradient), then the logits' gradient and that of a trained head in the
    compute dtype, beside the head's sum over several chunks in fp32. The backward pass multiplies a
    gradient by a factor."""
    if not model.chunked:
        return model.logits
    gradient = args.itemsize * model.trained_head
    held = 0
    if args.batch_size * args.seq_length > CHUNK:
        held = 4 * model.trained_head
    at_work = max(12 * model.logit_count, gradient + args.itemsize * model.logit_count)
    return max(held + at_work, 2 * gradient)


class Unsharded(NamedTuple):
    """Bytes of unsharded tensors on a GPU: shown in the tables, held all the time, and added in the
    loss, in a block and at the end of the root's backward pass."""

    shown: int
    held: int
    in_loss: int = 0
    in_block: int = 0
    in_root: int = 0


def unsharded_by_fsdp1(model: Model, args: Args) -> Unsharded:
    """Return the unsharded tensors of FSDP1 or DDP.

    FULL_SHARD and HYBRID_SHARD hold unsharded parameters, in the compute dtype, of the root, the
    current unit and the prefetched one; SHARD_GRAD_OP those of all units. Unsharded gradients are
    those of the root, the current unit and the one being reduced. A single GPU shards nothing, but
    casts a unit at a time. DDP holds the casts of autocast, and its gradients are in buckets.
    """
    shards, units = layout(model, args)
    root, *others = (unit.trained for unit in units)
    if args.strategy == "ddp":
        casts = root * (args.itemsize % 4)
        return Unsharded(casts, casts)
    pairs = itertools.pairwise([*others, 0])
    at_work = root + max(unit + next_unit for unit, next_unit in pairs)
    parameters = at_work
    if args.strategy == "shard_grad_op" and shards > 1:
        parameters = root + sum(others)
    held = args.itemsize * (parameters + at_work)
    return Unsharded(held, held)


def unsharded_by_fsdp2(model: Model, args: Args) -> Unsharded:
    """Return the unsharded tensors of FSDP2, according to FSDPMemTracker of torch 2.13.

    A block has its parameters and gradients, the next block's parameters and the previous block's
    gradients. In the root a tied weight has the gradients of both uses and their sum.
    """
    compute = args.itemsize
    reduce = policies.PRECISIONS[args.precision].reduce_dtype.itemsize
    _, (root, *others) = layout(model, args)
    held = root.gathered
    if args.strategy == "shard_grad_op":
        held += sum(unit.gathered for unit in others)
    at_work = 0
    for unit, next_unit in itertools.pairwise([*others, Unit()]):
        gradients = (compute + reduce) * unit.trained
        at_work = max(at_work, unit.gathered + gradients + next_unit.gathered)
    at_work += compute * model.largest_in_4bit  # dequantized for one matrix product
    tied_gradient = compute * model.trained_head * model.is_tied
    return Unsharded(
        shown=held + at_work,
        held=held,
        in_loss=others[-1].gathered,
        in_block=at_work + tied_gradient,
        in_root=reduce * others[-1].trained + 3 * tied_gradient,
    )


UNSHARDED = {1: unsharded_by_fsdp1, 2: unsharded_by_fsdp2}


def peaks(model: Model, args: Args, states: States, kept: int, block: int) -> tuple[int, int, int]:
    """Return the bytes of unsharded tensors, of the loss, and at the peak of a step. `kept` are the
    bytes that autograd keeps, `block` those added while one is recomputed.

    The peak is in the loss, before there are gradients; in the blocks, after the logits are freed;
    or in the root, with all gradients. In the blocks activations are freed as gradients arrive, so
    only the larger of the two counts. With accumulation, and in DDP's buckets, all phases have all
    gradients.
    """
    unsharded = UNSHARDED[args.fsdp](model, args)
    logits = loss_bytes(model, args)
    in_loss = kept + logits + unsharded.in_loss
    in_block = kept + states.gradients + block + unsharded.in_block
    if args.gradient_accumulation_steps > 1 or args.strategy == "ddp":
        in_loss += states.gradients
    else:
        in_block -= min(states.gradients, kept)
    phases = in_loss, in_block, states.gradients + unsharded.in_root
    peak = states.parameters + states.moments + unsharded.held + max(phases)
    return unsharded.shown, logits, peak


def estimate(model: Model, args: Args) -> dict[str, Any]:
    """Return a row of the tables for one choice: its memory, and the smallest of NODE_COUNTS on
    which it fits, or None."""
    names = ("strategy", "cpu_offload", "activation_checkpointing", "optimizer")
    row = {name: getattr(args, name) for name in names} | memory(model, args)
    recomputed = model.recomputed[args.activation_checkpointing]
    row["compute"] = round(1 + recomputed / (3 * model.flops), 2)
    # More nodes never need more memory on a GPU, so the first that fits is the smallest number.
    fits = (x for x in NODE_COUNTS if memory(model, replace(args, nodes=x))["fits"])
    return row | {"smallest_nodes": next(fits, None)}


def is_accepted(args: Args) -> bool:
    """Return whether the scripts accept the strategy and the offload of `args`, see policies.py."""
    if args.fsdp == 2 and args.optimizer != "adamw":
        return False
    if args.strategy == "ddp":
        return args.fsdp == 1 and not args.cpu_offload
    if args.strategy == "hybrid_shard" and args.gpus_per_node == 1:
        return False
    if not args.cpu_offload:
        return True
    if args.fsdp == 2:
        return args.precision != "fp16"
    is_simple = args.optimizer == "adamw" and args.gradient_accumulation_steps == 1
    return is_simple and args.nodes * args.gpus_per_node > 1


def estimates(model: Model, args: Args) -> list[dict[str, Any]]:
    """Return a row for each strategy, offload and recomputation that the scripts accept."""
    rows = []
    for strategy, offload, recomputed in itertools.product(STRATEGIES, (False, True), RECOMPUTED):
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
    for row in rows:
        row["nodes"] = args.nodes if row["fits"] else row["smallest_nodes"]
    row = min(rows, key=lambda row: (row["nodes"], row["cpu_offload"], row["compute"]))
    host = "HOST" if row["nodes"] > 1 else "localhost"
    line = f"torchrun --nnodes {row['nodes']} --nproc_per_node {args.gpus_per_node} "
    line += f"--rdzv-backend c10d --rdzv-endpoint {host}:29500 --rdzv-id 1 "
    line += f"{model.script} --model-name {hub_id(args.model_name)} --strategy full_shard"
    line += f" --activation-checkpointing {row['activation_checkpointing']}"
    values = vars(args) | row | model.lengths
    for name in (*model.lengths, *COMMAND):
        value = values[name]
        if value != getattr(Args, name, None):
            text = "" if value is True else f" {value}"
            line += f" --{name.replace('_', '-')}{text}"
    if args.lora_targets:
        line += f" --lora-targets {' '.join(args.lora_targets)}"
    return line


def main(argv: list[str] | None = None) -> None:
    """Print the tables, or JSON."""
    args = parse_args(argv)
    model = read_model(args)
    rows = estimates(model, args)
    if args.json:
        print(json.dumps({"estimates": rows}))
        return
    print(f"{args.model_name}: {model.parameters:,} parameters in {len(model.units)} units")
    print(args)
    for title, columns in TABLES.items():
        print(f"\n{title:36}" + "".join(f"{heading:>10}" for heading in columns))
        for row in rows:
            name = row["strategy"] + ", offload" * row["cpu_offload"]
            name += RECOMPUTED[row["activation_checkpointing"]]
            line = f"  {name:34}"
            for key in columns.values():
                value = f"{row[key] / 1e9:,.2f}" if "bytes" in key else str(row[key])
                line += f"{value:>10}"
            print(line)
    print(f"\n{LEGEND}\n\n{command(model, args, rows)}")


if __name__ == "__main__":
    try:
        main()
    except (OSError, ranks.Problem) as error:
        ranks.finish(error)
