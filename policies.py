"""Parallelism for any model: precision, sharding, and what differs between FSDP1, FSDP2 and DDP."""

import contextlib
import functools
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from core.args import Size, Switch
from core.ranks import Problem, environment_size, print0
from core.weights import library_class

# Buffers are never cast: in bf16, Llama's rotary angles are off by full rotations at position
# 4096. Inputs are cast for each unit, because generation runs outside the root's forward.
_policy = functools.partial(MixedPrecision, cast_forward_inputs=True)
bfSixteen = _policy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
PRECISIONS = {
    "bf16": bfSixteen,
    "bf16-fp32-reduce": _policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "fp16": _policy(param_dtype=torch.float16, reduce_dtype=torch.float16),
    "fp32": _policy(param_dtype=torch.float32, reduce_dtype=torch.float32),
}
STRATEGIES = {
    "full_shard": ShardingStrategy.FULL_SHARD,
    "shard_grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "hybrid_shard": ShardingStrategy.HYBRID_SHARD,
    "ddp": None,  # DistributedDataParallel, the baseline
}
Classes = tuple[type[nn.Module], ...]


@dataclass
class Sharding:
    """How the model is spread over the processes, and in which precision it computes."""

    fsdp: Literal[1, 2] = 1
    """1: FullyShardedDataParallel; 2: fully_shard"""
    strategy: Literal[*STRATEGIES] = "full_shard"
    """what to shard; ddp is DistributedDataParallel"""
    shard_group_size: Size = 0
    """for hybrid_shard; 0: the processes of a node"""
    cpu_offload: Switch = False
    """keep parameters, gradients and optimizer state on the CPU"""
    precision: Literal["auto", *PRECISIONS] = "auto"
    """compute dtype; auto: bf16 if the GPU supports it, else fp32"""
    activation_checkpointing: Switch = False
    """recompute each block in the backward pass"""
    compile: Switch = False
    """torch.compile each block"""

    def problems(self, args: Any) -> list[str]:
        """Choose --precision auto; return a message if the flags of a script's `args` would not
        train as asked for."""
        self.precision = compute_precision(self.precision)
        processes = environment_size()
        group = self.shard_group_size or int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        accumulates = args.optim.gradient_accumulation_steps > 1
        is_unsafe = processes == 1 or (accumulates and not args.optim.accumulate_no_sync)
        if self.strategy == "ddp" and (self.fsdp == 2 or self.cpu_offload):
            return ["--strategy ddp needs --fsdp 1, without --cpu-offload."]
        if self.cpu_offload and self.fsdp == 1 and is_unsafe:
            # It trains incorrectly: https://github.com/pytorch/pytorch/issues/118245
            return ["--cpu-offload needs --fsdp 2, or several processes and --accumulate-no-sync."]
        # A group of 1 never synchronizes gradients.
        if self.strategy == "hybrid_shard" and (group == 1 or processes % group):
            return ["hybrid_shard needs a --shard-group-size above 1 that divides the processes."]
        return []


def compute_precision(precision: str) -> str:
    """Return `precision`, or for auto bf16 if the GPU supports it natively, else fp32."""
    if precision != "auto":
        return precision
    has_gpu = torch.accelerator.is_available()
    is_native = has_gpu and torch.get_device_module().is_bf16_supported(including_emulation=False)
    return "bf16" if is_native else "fp32"


def layer_classes(model: nn.Module, own: type[nn.Module], blocks: Classes) -> Classes:
    """Return, and print, the classes of a model's layers, which become FSDP units: `blocks` for a
    model of class `own`, else those of the items of its outermost ModuleLists with two or more,
    except torch.nn's. Raise Problem if `blocks` lacks one: it would be in the root unit."""
    classes = {}
    inner: set[nn.Module] = set()
    for stack in model.modules():  # outer ones first
        if isinstance(stack, nn.ModuleList) and len(stack) > 1 and stack not in inner:
            classes |= dict.fromkeys(map(type, stack))
            inner.update(stack.modules())
    units = tuple(x for x in classes if not x.__module__.startswith("torch.nn."))
    if isinstance(model, own):
        if missing := [x.__name__ for x in units if not issubclass(x, blocks)]:
            raise Problem(f"BLOCKS lacks {', '.join(missing)}. List all layers of {own.__name__}.")
        units = blocks
    names = ", ".join(x.__name__ for x in units)
    print0(f"{library_class(type(model)).__name__}, units: {names}, {model.num_parameters():,} "
           f"parameters, attention {model.config._attn_implementation}")  # fmt: skip
    return units


def wrap_policy(blocks: Classes) -> functools.partial:
    """Return an auto-wrap policy that makes each instance of the classes `blocks` an FSDP unit and
    leaves all other modules, such as those with tied weights, in the root unit."""
    # On one process FSDP1 always falls back to NO_SHARD, with three different warnings.
    warnings.filterwarnings("ignore", message=r".*NO_SHARD")
    return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=set(blocks))


def device_mesh(device: torch.device, args: Sharding, timeout_minutes: float) -> DeviceMesh:
    """Return FSDP's mesh of all ranks: 1-D, or with hybrid_shard 2-D (replicas, shards). Call on
    all ranks."""
    world_size, timeout = dist.get_world_size(), timedelta(minutes=timeout_minutes)
    if args.strategy != "hybrid_shard":
        return init_device_mesh(device.type, (world_size,))
    shards = args.shard_group_size or int(os.environ["LOCAL_WORLD_SIZE"])
    grid = torch.arange(world_size).view(-1, shards)
    groups = [  # init_device_mesh would ignore the time-out
        dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timeout)[0]
        for rows in (grid.T, grid)
    ]
    return DeviceMesh.from_group(groups, device.type, grid, mesh_dim_names=("replicate", "shard"))


def fsdp2_units(model: nn.Module, policy: Callable[..., bool]) -> list[nn.Module]:
    """Return the modules that `policy` makes FSDP2 units, inner ones first, then `model` itself."""
    others = list(model.modules())[:0:-1]
    return [*(x for x in others if policy(x, recurse=False, nonwrapped_numel=0)), model]


def fsdp2_options(args: Sharding) -> dict[str, Any]:
    """Return keyword arguments of `fully_shard`: resharding, precision and offload."""
    # A block may return a view, such as a position bias. No script modifies it in place.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(\w+\) returned a view")
    dtypes = PRECISIONS[args.precision]
    return {
        # None: all units except the root, because the backward pass begins with it.
        "reshard_after_forward": False if args.strategy == "shard_grad_op" else None,
        "mp_policy": fsdp.MixedPrecisionPolicy(dtypes.param_dtype, dtypes.reduce_dtype),
        "offload_policy": fsdp.CPUOffloadPolicy() if args.cpu_offload else fsdp.OffloadPolicy(),
    }


def compile_blocks(model: nn.Module, blocks: Classes) -> None:
    """Compile each module of the classes `blocks` separately. Call this before FSDP wraps them."""
    # torch.compile gives up after 8 variants: training or validation, static or dynamic length,
    # and for T5 encoder or decoder, first or later block.
    torch.compiler.config.recompile_limit = 64
    for module in model.modules():
        if isinstance(module, blocks):
            module.compile()


def set_prefetch(model: nn.Module) -> None:
    """Make FSDP2 all-gather each unit before the previous one computes, keep the head gathered for
    the backward pass, and not gather embeddings in it. Call after sharding."""
    units = [x for x in model.modules() if isinstance(x, FSDPModule) and x is not model]
    for unit, next_unit in itertools.pairwise(units):
        unit.set_modules_to_forward_prefetch([next_unit])
    for unit in units:
        if unit is model.get_output_embeddings():
            unit.set_reshard_after_forward(False)
        elif isinstance(unit, nn.Embedding):
            unit.set_unshard_in_backward(False)
    fsdp.register_fsdp_forward_method(model, "generate")  # gathers the root, as forward does


# The functions below contain all differences between FSDP1, FSDP2 and DDP in a step.
def autocast(model: nn.Module, device: torch.device, precision: str) -> torch.autocast:
    """Return an autocast context for DDP. FSDP casts by itself, so for it nothing changes."""
    dtype = PRECISIONS[precision].param_dtype
    return torch.autocast(device.type, dtype, isinstance(model, DDP) and dtype != torch.float32)


def gradient_sync(model: nn.Module, syncs: bool) -> contextlib.AbstractContextManager:
    """Return a context for the forward and backward pass of a micro-batch, in which gradients are
    summed over ranks only if `syncs`."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(syncs)
    elif not syncs:
        return model.no_sync()
    return contextlib.nullcontext()


def gradient_scaler(
    model: nn.Module, device: torch.device, precision: str, optimizer: Optimizer
) -> torch.amp.GradScaler:
    """Return a gradient scaler for fp16. With other precisions it does nothing."""
    if precision != "fp16" or not isinstance(model, FSDP):
        return torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    # FSDP1's scaler sums `found_inf` over ranks, but a fused kernel skips a step only at exactly 1.
    # PyTorch has no public way to make the scaler itself skip the step.
    optimizer._step_supports_amp_scaling = False
    return ShardedGradScaler(device.type)


def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Clip gradients to a global norm; return the norm before, fp32 []. Call on all ranks."""
    if isinstance(model, FSDP):
        return model.clip_grad_norm_(max_norm)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if isinstance(model, FSDPModule):  # DTensors, which cannot communicate if they are offloaded
        mesh = gradients[0].device_mesh
        shards = [gradient.to_local() for gradient in gradients]
        square = nn.utils.get_total_norm(shards).square().to(mesh.device_type)
        dist.all_reduce(square, group=mesh.get_group(mesh.ndim - 1))  # ranks that share a model
        norm = square.sqrt()
    else:
        norm = nn.utils.get_total_norm(gradients)
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm, foreach=True)
    return norm


@contextlib.contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Run a with block in evaluation mode, then reshard FSDP's units, on all ranks. Without a
    backward pass some stay gathered, and would overlook changes of weights, such as EMA's."""
    training = model.training
    model.eval()
    try:
        yield
    finally:  # a stop saves the model
        model.train(training)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
            # Private, as FSDP1 has no method. `_reshard` would lift its limit on all-gathers.
            # A unit lacks the attribute before the first forward pass, and without sharding.
            handle = getattr(module, "_handle", None)
            if handle and hasattr(handle.flat_param, "_full_param_padded"):
                handle.reshard(free_unsharded_flat_param=True)
