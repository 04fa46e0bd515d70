"""Parallelism of a model: precision, wrapping, sharding, recomputation, compilation.

Copy this file along with a script and the folder runtime/. It names no model: the classes of the
transformer blocks and the device are arguments.
"""

import contextlib
import functools
import itertools
import os
import re
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.optim import Optimizer
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers.activations import NewGELUActivation

from runtime import ranks, weights
from runtime.batches import Batch
from runtime.steps import Step

# One process always falls back to NO_SHARD, and a state dict of NO_SHARD is always whole.
warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
warnings.filterwarnings("ignore", message="When using ``NO_SHARD`` for ``ShardingStrategy``")
warnings.filterwarnings("ignore", message="The `NO_SHARD` sharding strategy is deprecated")
# A block may hand on a view, such as a bias of positions, which none here changes in place.
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(\w+\) returned a view tensor")

# Buffers are never cast: in bf16 the rotary frequencies of Llama are off by whole turns at
# position 4096. Inputs are cast for each unit, which generation outside the root's forward needs.
_policy = functools.partial(MixedPrecision, cast_forward_inputs=True)
bfSixteen = _policy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
bfSixteen_fp32_reduce = _policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
fpSixteen = _policy(param_dtype=torch.float16, reduce_dtype=torch.float16)
fp32_policy = _policy(param_dtype=torch.float32, reduce_dtype=torch.float32)

PRECISIONS = {
    "bf16": bfSixteen,
    "bf16-fp32-reduce": bfSixteen_fp32_reduce,
    "fp16": fpSixteen,
    "fp32": fp32_policy,
}
STRATEGIES = {
    "full_shard": ShardingStrategy.FULL_SHARD,
    "shard_grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "hybrid_shard": ShardingStrategy.HYBRID_SHARD,
    "no_shard": ShardingStrategy.NO_SHARD,
    "ddp": None,  # DistributedDataParallel, the baseline
}
# Operators that compute a whole attention: PyTorch's, and those of the packages flash-attn.
ATTENTION = re.compile(r"^aten\._scaled_dot_product_|^torch_attn\._varlen_attn|^flash_attn")
Classes = tuple[
    type[nn.Module], ...
]  # of a model's blocks: an encoder's and a decoder's may differ


def resolve_arguments(args: Namespace) -> dict[str, Any]:
    """Resolve --precision auto, bf16 where the GPU computes it natively and fp32 elsewhere, and
    --fsdp, 1 by default."""
    precision = args.precision
    if precision == "auto":
        precision = "bf16" if ranks.has_bf16() else "fp32"
    elif precision == "fp16" and ranks.accelerator() is None:
        ranks.say("--precision fp16 is slow on a CPU: use it for trials")
    return {"precision": precision, "fsdp": args.fsdp or 1}


def check_arguments(args: Namespace) -> list[str]:
    """List what is wrong with how the model would be parallel, a sentence each."""
    if args.prepare_only:
        return []
    gpus = ranks.device_count()
    processes = int(os.environ.get("WORLD_SIZE", 1))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    fsdp1 = args.fsdp == 1 and args.strategy != "ddp"
    syncs_once = args.accumulate_no_sync and processes > 1
    accumulates = args.gradient_accumulation_steps > 1 and not syncs_once
    shards_nothing = processes == 1 or args.strategy == "no_shard"
    trains = not (args.export_only or args.evaluate_only)
    offloads = args.cpu_offload and gpus and args.strategy != "ddp"
    group = args.shard_group_size or local_size
    rules = [
        (0 < gpus < local_size, f"--nproc_per_node {local_size} is above the {gpus} GPUs"),
        (
            args.cpu_offload and not offloads,
            "--cpu-offload needs a GPU and a --strategy other than ddp",
        ),
        (  # the scaler looks for overflow in gradients on the CPU, and asks the other ranks there
            offloads and args.fsdp == 2 and args.precision == "fp16",
            "--cpu-offload with --precision fp16 needs --fsdp 1",
        ),
        (  # it trains wrongly, on CUDA: https://github.com/pytorch/pytorch/issues/118245
            offloads and fsdp1 and shards_nothing and trains,
            "--cpu-offload needs --fsdp 2, or several processes and a --strategy that shards",
        ),
        (
            offloads and fsdp1 and accumulates,
            "--cpu-offload accumulates gradients only with --fsdp 2, or with --accumulate-no-sync "
            "on two processes or more",
        ),
        (
            args.fsdp == 2 and args.strategy in ("no_shard", "ddp"),
            f"--fsdp 2 always shards: --strategy {args.strategy} is --fsdp 1's",
        ),
        (
            args.compile and not gpus and not has_cpp_compiler(),
            "--compile on a CPU needs a C++ compiler: install g++, or name one in CXX",
        ),
        (  # FSDP1 keeps a shard, or fp32, as the gradient of what is whole, or bf16, in the next
            # forward pass. A new shape is traced there, and torch.compile does not take the two.
            args.compile and fsdp1 and accumulates,
            "--compile accumulates gradients only with --fsdp 2, with --strategy ddp, or with "
            "--accumulate-no-sync on two processes or more",
        ),
        (
            args.accumulate_no_sync and args.strategy == "no_shard",
            "--accumulate-no-sync cannot be used with no_shard",
        ),
        (  # a group of 1 would never synchronise
            args.strategy == "hybrid_shard" and (group <= 1 or processes % group),
            "--strategy hybrid_shard needs a --shard-group-size above 1 that divides the processes",
        ),
    ]
    return [sentence for is_wrong, sentence in rules if is_wrong]


def has_cpp_compiler() -> bool:
    """Return whether torch.compile finds the C++ compiler that it needs on a CPU, not on a GPU."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # takes a second to import

    try:
        get_cpp_compiler()
    except (RuntimeError, OSError):
        return False
    return True


def check_blocks(model: nn.Module, blocks: Classes) -> None:
    """Raise ValueError unless `blocks` are the classes of the model's layers.

    Layers are the members of a ModuleList of two or more, except torch.nn's own modules. Those that
    are in no block would silently become part of the root unit.
    """
    in_block = {
        x for block in model.modules() if isinstance(block, blocks) for x in block.modules()
    }
    absent = [c for c in blocks if not any(isinstance(module, c) for module in in_block)]
    lacking = set()
    for layers in model.modules():
        if isinstance(layers, nn.ModuleList) and len(layers) > 1:
            lacking |= {type(x) for x in layers if x not in in_block}
    lacking = {c for c in lacking if not c.__module__.startswith("torch.nn.")}
    problems = [f"it names {c.__name__}, which the model does not contain" for c in absent]
    problems += [f"it lacks {name}" for name in sorted(c.__name__ for c in lacking)]
    if problems:
        raise ValueError(
            f"BLOCKS does not fit {type(model).__name__}: {'; '.join(problems)}. BLOCKS must name "
            "the classes of all its layers."
        )


def wrap_policy(blocks: Classes) -> functools.partial:
    """Each module of one of these classes becomes an FSDP unit.

    Everything else stays in the root unit. Tied weights must: in a unit of its own, one use would
    find them resharded.
    """
    return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=set(blocks))


def size_policy(model: nn.Module, min_num_params: int) -> Callable[..., bool]:
    """Each module of at least `min_num_params` parameters becomes an FSDP unit.

    Modules that hold a tied parameter stay in the root unit, where both its uses are, and so do
    those that contain one.
    """
    uses = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    tied = {parameter for parameter, count in uses.items() if count > 1}
    in_root = {module for module in model.modules() if tied & set(module.parameters())}

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        large = size_based_auto_wrap_policy(module, recurse, nonwrapped_numel, min_num_params)
        return large and (recurse or module not in in_root)

    return policy


def device_mesh(args: Namespace, device: torch.device) -> DeviceMesh:
    """The ranks as FSDP sees them: 1-D, or (replicas, shards) under hybrid_shard."""
    world_size = dist.get_world_size()
    if args.strategy != "hybrid_shard":
        return init_device_mesh(device.type, (world_size,))
    shards = args.shard_group_size or int(os.environ["LOCAL_WORLD_SIZE"])
    names = ("replicate", "shard")
    timeout = timedelta(minutes=args.timeout_minutes)
    with ranks.joining(timeout):
        mesh = init_device_mesh(device.type, (world_size // shards, shards), mesh_dim_names=names)
    for group in mesh.get_all_groups():  # which have the backend's own limit, 10 minutes of nccl
        _set_pg_timeout(timeout, group)
    return mesh


def fsdp2_units(model: nn.Module, policy: Callable[..., bool]) -> list[nn.Module]:
    """List the modules that become FSDP2 units: those that the policy names, each after the units
    inside it, and at last the root with all the rest."""
    inner = [
        module
        for module in reversed(list(model.modules()))
        if module is not model and policy(module=module, recurse=False, nonwrapped_numel=0)
    ]
    return [*inner, model]


def fsdp2_options(args: Namespace, device: torch.device) -> dict[str, Any]:
    """Return the keywords of `fully_shard`: the mesh, resharding, precision and offload."""
    precision = PRECISIONS[args.precision]
    reshard = None  # after the forward pass: all but the root, with which the backward pass begins
    if args.strategy == "shard_grad_op":
        reshard = False
    offload = OffloadPolicy()
    if args.cpu_offload:
        offload = CPUOffloadPolicy()
    return {
        "mesh": device_mesh(args, device),
        "reshard_after_forward": reshard,
        "mp_policy": MixedPrecisionPolicy(precision.param_dtype, precision.reduce_dtype),
        "offload_policy": offload,
    }


def plan_gathers(model: nn.Module) -> None:
    """Have FSDP2 ask for units early, and for none that is not needed; call it when the root is
    sharded.

    - In the forward pass the next unit is gathered before a unit computes, so a slow host delays
      it less. Where units run in another order, this only costs. The backward pass does so itself.
    - The head stays gathered until the backward pass, which begins with it.
    - Embeddings are not gathered in the backward pass, where their tokens suffice.
    """
    units = [x for x in model.modules() if isinstance(x, FSDPModule) and x is not model]
    for unit, following in itertools.pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
    for unit in units:
        if unit is model.get_output_embeddings():
            unit.set_reshard_after_forward(False)
        elif isinstance(unit, nn.Embedding):
            unit.set_unshard_in_backward(False)


def checkpoint_activations(model: nn.Module, blocks: Classes, how: str = "blocks") -> None:
    """Recompute each block in the backward pass; call it after FSDP, which then stays outside.

    With `how` "attention" the block keeps what its attention gives, and recomputes the rest.
    """
    if how == "attention":
        keep_attention(model, blocks)
    else:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, blocks))


def keep_attention(model: nn.Module, blocks: Classes) -> None:
    """Recompute each block in the backward pass, but for the operators in ATTENTION.

    The blocks' `forward` is replaced, so that torch.compile sees what is kept. Around a compiled
    block the outputs would be kept without its knowledge, and it may write another tensor in their
    place: gradients were wrong without a word where the attention's weights are frozen.

    The first forward pass in training ends the run if no such operator was called, or if one drew
    dropout: not drawn again, it would shift the random numbers of the rest.
    """
    dropouts = set()  # of the operators that were kept

    def policy(_: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        if not ATTENTION.match(str(operator)):
            return CheckpointPolicy.PREFER_RECOMPUTE
        names = [argument.name for argument in operator._schema.arguments]
        options |= dict(zip(names, args, strict=False))
        dropouts.add(options.get("dropout_p", 0.0))
        return CheckpointPolicy.MUST_SAVE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def recomputed(forward: Callable) -> Callable:
        @functools.wraps(forward)  # torch.compile leaves out a functools.partial of `checkpoint`
        def keeps_attention(*args: Any, **options: Any) -> Any:
            return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **options)

        return keeps_attention

    def check(*_: Any) -> None:
        if not torch.is_grad_enabled():
            return
        handle.remove()
        wrong = None
        if not dropouts:
            wrong = "no kernel computes this model's attention as one here"
        elif any(dropouts):
            wrong = "the attention has dropout, which would shift the random numbers after it"
        if wrong:
            flag = "--activation-checkpointing"
            ranks.exit_with(f"{flag} attention: {wrong}: use {flag} blocks")

    for module in model.modules():
        if isinstance(module, blocks):
            module.forward = recomputed(module.forward)
    handle = model.register_forward_hook(check)


def recomputed_sum(
    function: Callable[..., torch.Tensor], size: int, *tensors: torch.Tensor
) -> torch.Tensor:
    """Sum `function` over chunks of `size` rows of the `tensors`; the backward pass recomputes what
    it holds of a chunk."""
    total = torch.zeros((), device=tensors[0].device)
    for chunk in zip(*(tensor.split(size) for tensor in tensors), strict=True):
        total = total + checkpoint(function, *chunk, use_reentrant=False, preserve_rng_state=False)
    return total


def fuse_gelu(model: nn.Module) -> None:
    """Compute GELU's tanh approximation in one kernel; Transformers' `gelu_new` takes eight, and
    has autograd keep four tensors where this keeps one. The results are equal to rounding."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, nn.GELU(approximate="tanh"))


def compile_blocks(model: nn.Module, blocks: Classes) -> None:
    """Compile each block by itself; call it before FSDP, which then stays outside."""
    # T5 needs more kinds than the 8 after which torch.compile gives up: encoder and decoder, the
    # first block and the others, training and validation, one length and any.
    torch.compiler.config.recompile_limit = 64
    for module in model.modules():
        if isinstance(module, blocks):
            module.compile()


# The functions below hold all that differs between FSDP1, FSDP2 and DistributedDataParallel.
def autocast(args: Namespace, device: torch.device) -> contextlib.AbstractContextManager:
    """Mixed precision under DDP; FSDP casts by its MixedPrecision policy instead."""
    dtype = PRECISIONS[args.precision].param_dtype
    enabled = args.strategy == "ddp" and dtype != torch.float32
    return torch.autocast(device.type, dtype, enabled=enabled)


def gradient_scaler(
    args: Namespace, device: torch.device, optimizer: Optimizer
) -> torch.amp.GradScaler:
    """The loss scaler of fp16. In other precisions it passes everything through.

    A fused optimizer skips a step by itself, in its kernel, where the scaler's `found_inf` is 1.
    ShardedGradScaler, which FSDP1 needs, sums `found_inf` over the ranks, in shape (1,), which the
    kernel takes for another number or not at all. So there the scaler decides, before it calls the
    optimizer. Under FSDP2 the gradients are DTensors, of which the plain scaler sees all shards.
    """
    enabled = args.precision == "fp16"
    if not enabled or args.strategy == "ddp" or args.fsdp == 2:
        return torch.amp.GradScaler(device.type, enabled=enabled)
    optimizer._step_supports_amp_scaling = False
    return ShardedGradScaler(device.type)


def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Clip to the global norm and return it from before; all ranks.

    Under FSDP the norm is of all shards. FSDP1's own `clip_grad_norm_` gives the same, but takes
    about three small kernels for each parameter. DTensors' cannot communicate where offload has
    them on the CPU.
    """
    sharded = isinstance(model, FSDP) and model.sharding_strategy != ShardingStrategy.NO_SHARD
    if not (sharded or isinstance(model, FSDPModule)):
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if sharded:
        device, group = model.compute_device, model.process_group
    else:
        mesh = gradients[0].device_mesh
        device, group = mesh.device_type, mesh.get_group(mesh.ndim - 1)
        gradients = [gradient.to_local() for gradient in gradients]
    square = nn.utils.get_total_norm(gradients).square().to(device)
    dist.all_reduce(square, group=group)  # of the ranks that share a model
    norm = square.sqrt()
    if gradients:  # under FSDP1 a rank may have none
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, scale.to(gradients[0].device))
    return norm


def micro_batches(args: Namespace, model: nn.Module, step: Step) -> Iterator[Batch]:
    """Yield a step's micro-batches; with --accumulate-no-sync only the last one communicates."""
    for batch, is_last in step.micro_batches():
        with gradient_sync(args, model, is_last):
            yield batch


@contextlib.contextmanager
def gradient_sync(args: Namespace, model: nn.Module, last: bool) -> Iterator[None]:
    """Surround a micro-batch: with --accumulate-no-sync only the `last` of a step communicates."""
    if last or not args.accumulate_no_sync or dist.get_world_size() == 1:
        yield
        return
    if not isinstance(model, FSDPModule):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


@contextlib.contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, for forward passes without a backward pass; all ranks.

    FSDP2 keeps root and head, and under shard_grad_op every unit, gathered until the backward pass.
    So they are resharded here, or a state dict would find other parameters than the optimizer has.
    """
    training = model.training
    model.eval()
    yield
    model.train(training)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextlib.contextmanager
def generation(
    args: Namespace, model: nn.Module, device: torch.device, num_beams: int | None = None
) -> Iterator[Callable]:
    """The wrapped model's `generate`, without sampling and in evaluation mode; all ranks.

    By default the number of beams is the model's own, 1 if it names none: greedy.

    Generation runs outside the root's forward, so FSDP1's root is gathered around it. The blocks
    gather themselves, and `synced_gpus` keeps the ranks at one number of forward passes.
    """
    dtype = PRECISIONS[args.precision].param_dtype
    root = contextlib.nullcontext()
    if isinstance(model, FSDP):
        root = FSDP.summon_full_params(model, recurse=False, writeback=False)
    half = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    with evaluation(model), root, half:
        generate = weights.unwrapped(model).generate
        options = {"do_sample": False, "synced_gpus": dist.get_world_size() > 1}
        if num_beams is not None:
            options["num_beams"] = num_beams
        yield functools.partial(generate, **options)
