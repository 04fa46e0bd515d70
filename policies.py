"""Parallelism for any model: precision, wrapping, sharding, recomputation, compilation."""

import contextlib
import functools
import inspect
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from transformers.activations import NewGELUActivation

from runtime import ranks
from runtime.batches import Batch
from runtime.options import flag
from runtime.steps import Step

# On one process FSDP1 always falls back to NO_SHARD, with three different warnings.
warnings.filterwarnings("ignore", message=r".*NO_SHARD")
# A block may return a view, such as a position bias. No script modifies it in place.
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(\w+\) returned a view tensor")

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
    "no_shard": ShardingStrategy.NO_SHARD,
    "ddp": None,  # DistributedDataParallel, the baseline
}
Classes = tuple[type[nn.Module], ...]  # the classes of a model's blocks


@dataclass
class Options:
    """sharding"""

    fsdp: Literal[1, 2] | None = flag(None, "1: FullyShardedDataParallel; 2: fully_shard (default: "
        "1, with adapters 2)")  # fmt: skip
    strategy: Literal[*STRATEGIES] = flag("full_shard", "what to shard")
    shard_group_size: int = flag(0, "for hybrid_shard (0: ranks of a node)", low=0)
    cpu_offload: bool = flag(False, "keep parameters, gradients and optimizer state on the CPU")
    precision: Literal["auto", *PRECISIONS] = flag("auto", "compute dtype; auto: bf16 if the GPU "
        "supports it, else fp32")  # fmt: skip
    activation_checkpointing: bool = flag(False, "recompute each block in the backward pass")
    compile: bool = flag(False, "torch.compile each block")

    def derive(self) -> None:
        """Set the defaults of --fsdp, and of --precision: bf16 if native to the GPU, else fp32."""
        self.fsdp = self.fsdp or 1
        if self.precision == "auto":
            self.precision = "bf16" if ranks.has_bf16() else "fp32"

    def problems(self) -> list[str]:
        """Return a message for each combination of parallelism flags that cannot work."""
        if self.prepare_only:
            return []
        processes = int(os.environ.get("WORLD_SIZE", 1))
        group = self.shard_group_size or int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        strategy = self.strategy
        fsdp1 = self.fsdp == 1 and strategy != "ddp"
        fsdp2 = self.fsdp == 2
        no_sync = self.accumulate_no_sync
        syncs_each_batch = self.gradient_accumulation_steps > 1 and not (no_sync and processes > 1)
        accumulates = fsdp1 and syncs_each_batch
        is_unsharded = fsdp1 and (processes == 1 or strategy == "no_shard")
        offloads = self.cpu_offload and torch.accelerator.device_count() > 0 and strategy != "ddp"
        rules = {
            "--cpu-offload needs a GPU, and not --strategy ddp.": self.cpu_offload and not offloads,
            # Offload on CUDA trains incorrectly: https://github.com/pytorch/pytorch/issues/118245
            "--cpu-offload needs --fsdp 2, or several processes and a --strategy that shards.": (
                offloads and is_unsharded and not (self.export_only or self.evaluate_only)
            ),
            "--cpu-offload with accumulation needs --fsdp 2, or --accumulate-no-sync on two or "
            "more processes.": offloads and accumulates,
            # The scaler would all-reduce `found_inf` of CPU gradients, which NCCL cannot: torch
            # 2.13, distributed/tensor/_dispatch.py, lines 117 to 158.
            "--cpu-offload with --precision fp16 needs --fsdp 1.": (
                offloads and fsdp2 and self.precision == "fp16"
            ),
            # Below 2.13 its DefaultStager closes itself after one save.
            f"--async-save needs PyTorch 2.13 or newer, not {torch.__version__}.": (
                self.async_save and torch.__version__ < (2, 13)
            ),
            # In the next pass FSDP1's gradient differs from the parameter in shape or dtype.
            "--compile with accumulation needs --fsdp 2, or --accumulate-no-sync on two or more "
            "processes, or --strategy ddp.": self.compile and accumulates,
            f"--strategy {strategy} needs --fsdp 1.": fsdp2 and strategy in ("no_shard", "ddp"),
            "--accumulate-no-sync cannot be used with no_shard.": (
                no_sync and strategy == "no_shard"
            ),
            # A group of 1 never synchronizes gradients.
            "--strategy hybrid_shard needs a --shard-group-size above 1 that divides the "
            "processes.": strategy == "hybrid_shard" and (group <= 1 or processes % group),
        }
        return [message for message, is_wrong in rules.items() if is_wrong]


def check_blocks(model: nn.Module, blocks: Classes) -> None:
    """Raise ValueError unless `blocks` are the classes of all the model's layers.

    Layers are the items of a ModuleList with two or more, except torch.nn's own modules. A layer
    outside of every block would silently become part of the root unit.
    """
    units = [module for module in model.modules() if isinstance(module, blocks)]
    inside = {module for unit in units for module in unit.modules()}
    stacks = [x for x in model.modules() if isinstance(x, nn.ModuleList) and len(x) > 1]
    layers = {type(layer) for stack in stacks for layer in stack if layer not in inside}
    missing = {x.__name__ for x in layers if not x.__module__.startswith("torch.nn.")}
    if missing:
        raise ValueError(
            f"BLOCKS does not fit {type(model).__name__}: it lacks {', '.join(sorted(missing))}. "
            "List the classes of all layers of the model."
        )


def wrap_policy(blocks: Classes) -> functools.partial:
    """Return an auto-wrap policy that makes each instance of the classes `blocks` an FSDP unit and
    leaves all other modules, such as those with tied weights, in the root unit."""
    return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=set(blocks))


def device_mesh(
    device: torch.device, strategy: str, shards: int, timeout_minutes: float
) -> DeviceMesh:
    """Return FSDP's mesh of all ranks: 1-D, or with hybrid_shard (replicas, shards), where 0 shards
    are the ranks of a node."""
    world_size = dist.get_world_size()
    if strategy != "hybrid_shard":
        return init_device_mesh(device.type, (world_size,))
    shards = shards or int(os.environ["LOCAL_WORLD_SIZE"])
    timeout = timedelta(minutes=timeout_minutes)
    grid = torch.arange(world_size).view(-1, shards)
    groups = []
    with ranks.join_deadline():
        for rows in (grid.T, grid):  # init_device_mesh would ignore the time-out
            group, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timeout)
            groups.append(group)
    return DeviceMesh.from_group(groups, device.type, grid, mesh_dim_names=("replicate", "shard"))


def fsdp2_units(model: nn.Module, policy: Callable[..., bool]) -> list[nn.Module]:
    """Return the modules that `policy` makes FSDP2 units, inner ones first, then `model` itself."""
    others = list(model.modules())[:0:-1]
    return [*(x for x in others if policy(x, recurse=False, nonwrapped_numel=0)), model]


def fsdp2_options(strategy: str, precision: str, cpu_offload: bool) -> dict[str, Any]:
    """Return keyword arguments of `fully_shard`: resharding, precision and offload."""
    dtypes = PRECISIONS[precision]
    return {
        # None: all units except the root, because the backward pass begins with it.
        "reshard_after_forward": False if strategy == "shard_grad_op" else None,
        "mp_policy": MixedPrecisionPolicy(dtypes.param_dtype, dtypes.reduce_dtype),
        "offload_policy": CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
    }


def plan_gathers(model: nn.Module) -> None:
    """Make FSDP2 all-gather each unit before the previous one computes, keep the head gathered for
    the backward pass, and not gather embeddings in it. Call this after sharding `model` itself."""
    units = [x for x in model.modules() if isinstance(x, FSDPModule) and x is not model]
    for unit, next_unit in itertools.pairwise(units):
        unit.set_modules_to_forward_prefetch([next_unit])
    for unit in units:
        if unit is model.get_output_embeddings():
            unit.set_reshard_after_forward(False)
        elif isinstance(unit, nn.Embedding):
            unit.set_unshard_in_backward(False)
    register_fsdp_forward_method(model, "generate")  # gathers the root, as forward does


def checkpoint_activations(model: nn.Module, blocks: Classes) -> None:
    """Recompute each module of the classes `blocks` in the backward pass. Call after FSDP wraps."""
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, blocks))


def fuse(model: nn.Module) -> None:
    """Make `gelu_new` and RMS norms one kernel each, in place: 1/8 and 1/6 of the launches."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, nn.GELU(approximate="tanh"))
        for eps in [x for x in vars(module).values() if isinstance(x, float)]:
            if _is_rms_norm(module, eps):
                module.__class__ = _fused_class(type(module), eps)


@functools.cache
def _fused_class(kind: type[nn.Module], eps: float) -> type[nn.Module]:
    """Return the class of RMS norms with epsilon `eps`. All layers share it, so that torch.compile
    shares their graphs."""

    def forward(self: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.dtype != self.weight.dtype:  # models differ in the dtype that they return
            return kind.forward(self, hidden)
        return F.rms_norm(hidden, self.weight.shape, self.weight, eps)

    return type(kind.__name__, (kind,), {"forward": forward})


@torch.no_grad()
def _is_rms_norm(module: nn.Module, eps: float) -> bool:
    """Return whether a module, which may be on meta, computes `F.rms_norm` with `eps` and a weight.

    Names do not tell: Gemma's RMSNorm multiplies by 1 + weight. So compare results for vectors of
    several sizes. `eps` matters only for small ones.
    """
    parameters = dict(module.named_parameters())
    has_gate = len(inspect.signature(module.forward).parameters) > 1
    if has_gate or [*parameters] != ["weight"] or parameters["weight"].ndim > 1:
        return False
    weight = torch.linspace(-1, 2, len(parameters["weight"]))
    vectors = torch.outer(torch.tensor([1e-4, 1e-2, 1, 100]), weight.roll(1))
    try:
        output = torch.func.functional_call(module, {"weight": weight}, vectors)
    except Exception:  # of any type: it may need vectors of another shape
        return False
    return torch.allclose(output, F.rms_norm(vectors, weight.shape, weight, eps), 1e-6, 0)


def compile_blocks(model: nn.Module, blocks: Classes) -> None:
    """Compile each module of the classes `blocks` separately. Call this before FSDP wraps them."""
    # torch.compile gives up after 8 variants. T5 needs more: encoder or decoder, first or later
    # block, training or validation, static or dynamic length.
    torch.compiler.config.recompile_limit = 64
    for module in model.modules():
        if isinstance(module, blocks):
            module.compile()


# The functions below contain all differences between FSDP1, FSDP2 and DistributedDataParallel.
def autocast(model: nn.Module, precision: str) -> contextlib.AbstractContextManager:
    """Return an autocast context for DDP. FSDP casts by itself, so for it nothing changes."""
    dtype = PRECISIONS[precision].param_dtype
    enabled = isinstance(model, DDP) and dtype != torch.float32
    return torch.autocast(ranks.local_device().type, dtype, enabled=enabled)


def gradient_scaler(model: nn.Module, precision: str, optimizer: Optimizer) -> torch.amp.GradScaler:
    """Return a gradient scaler for fp16. With other precisions it does nothing."""
    enabled = precision == "fp16"
    device = ranks.local_device()
    if not enabled or not isinstance(model, FSDP):
        return torch.amp.GradScaler(device.type, enabled=enabled)
    # FSDP1's scaler sums `found_inf` over ranks, but a fused kernel skips a step only at exactly 1.
    # PyTorch has no public way to make the scaler itself skip the step.
    optimizer._step_supports_amp_scaling = False
    return ShardedGradScaler(device.type)


def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Clip gradients to a global norm; return the norm before clipping. Call on all ranks."""
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


def micro_batches(model: nn.Module, step: Step, no_sync: bool) -> Iterator[Batch]:
    """Yield a step's micro-batches; with `no_sync` only the last one syncs gradients."""
    for batch, is_last in step.micro_batches():
        syncs = is_last or not no_sync or dist.get_world_size() == 1
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(syncs)
            yield batch
        elif syncs:
            yield batch
        else:
            with model.no_sync():
                yield batch


@contextlib.contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Run a with block in evaluation mode, then reshard FSDP's units. Without a backward pass some
    stay gathered: state dicts would not match the optimizer's parameters, and changes of weights,
    such as EMA's, would be overlooked. Use on all ranks."""
    training = model.training
    model.eval()
    try:
        yield
    finally:  # a stop saves the model
        model.train(training)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
            # Private, because FSDP1 has no public method for it. A unit's parameter lacks the
            # attribute before the first forward pass, and without sharding.
            handle = getattr(module, "_handle", None)
            if handle and hasattr(handle.flat_param, "_full_param_padded"):
                # `_reshard` would also queue an event per unit: each lifts FSDP's limit of
                # all-gathers ahead, which is two, by one.
                handle.reshard(free_unsharded_flat_param=True)
