"""How a model is parallel: precision, wrapping, sharding, recomputation, compilation.

Copy this file along with a script and the folder runtime/. It names no model: the classes of the
transformer blocks and the device are arguments.
"""

import contextlib
import functools
import os
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta

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
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from transformers.activations import NewGELUActivation

from runtime import ranks

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
grad_bf16 = _policy(param_dtype=torch.float32, reduce_dtype=torch.bfloat16)  # for slow networks

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
Classes = tuple[
    type[nn.Module], ...
]  # of a model's blocks: an encoder's and a decoder's may differ


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


def fully_shard_units(
    args: Namespace, device: torch.device, model: nn.Module, policy: Callable[..., bool]
) -> nn.Module:
    """FSDP2: shard the modules that the policy names, and the rest as the root unit, in place.

    What is on meta stays there, sharded. Each parameter is a DTensor, split by rows.
    """
    precision = PRECISIONS[args.precision]
    reshard = None  # after the forward pass: all but the root, with which the backward pass begins
    if args.strategy == "shard_grad_op":
        reshard = False
    offload = OffloadPolicy()
    if args.cpu_offload:
        offload = CPUOffloadPolicy()
    mesh = device_mesh(args, device)
    for module in reversed(list(model.modules())):  # a unit after those inside it
        if module is model or policy(module=module, recurse=False, nonwrapped_numel=0):
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=reshard,
                mp_policy=MixedPrecisionPolicy(precision.param_dtype, precision.reduce_dtype),
                offload_policy=offload,
            )
    register_fsdp_forward_method(model, "generate")  # it gathers the root then, as forward does
    return model


def checkpoint_activations(model: nn.Module, blocks: Classes) -> None:
    """Recompute each block in the backward pass; call it after FSDP, which then stays outside."""
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, blocks))


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
def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside FSDP1 or DDP, with its own methods and config. FSDP2 does not wrap it."""
    if isinstance(model, FSDPModule):
        return model
    return model.module


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
    if args.strategy == "ddp" or args.fsdp == 2:
        return torch.amp.GradScaler(device.type, enabled=enabled)
    optimizer._step_supports_amp_scaling = False
    return ShardedGradScaler(device.type, enabled=enabled)


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


@contextlib.contextmanager
def gradient_sync(args: Namespace, model: nn.Module, last: bool) -> Iterator[None]:
    """Around a micro-batch of a step: with --accumulate-no-sync only the `last` communicates."""
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

    FSDP2 keeps the root, and under shard_grad_op every unit, gathered until the backward pass. So
    they are resharded here, or a state dict would find other parameters than the optimizer has.
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
        generate = unwrapped(model).generate
        options = {"do_sample": False, "synced_gpus": dist.get_world_size() > 1}
        if num_beams is not None:
            options["num_beams"] = num_beams
        yield functools.partial(generate, **options)
