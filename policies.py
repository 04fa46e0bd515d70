"""What every script here selects by flag: precision, wrapping, sharding, data order.

Copy this file along with a script; it imports nothing else of this repository. Nothing in it
names a model: the classes of its transformer blocks and the device are arguments.
"""

import argparse
import contextlib
import copy
import functools
import math
import os
import re
import resource
import signal
import sys
import threading
import time
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.flop_counter import FlopCounterMode

# One process always falls back to NO_SHARD, and a state dict of NO_SHARD is always whole.
warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
warnings.filterwarnings("ignore", message="When using ``NO_SHARD`` for ``ShardingStrategy``")
warnings.filterwarnings("ignore", message="The `NO_SHARD` sharding strategy is deprecated")

# Buffers are never cast: in bf16 the rotary frequencies of Llama are off by whole turns at
# position 4096. Inputs are cast for each unit, which generation outside the root's forward needs.
_policy = functools.partial(MixedPrecision, cast_forward_inputs=True)
bfSixteen = _policy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
bfSixteen_fp32_reduce = _policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
fpSixteen = _policy(param_dtype=torch.float16, reduce_dtype=torch.float16)
fp32_policy = _policy(param_dtype=torch.float32, reduce_dtype=torch.float32)
grad_bf16 = _policy(param_dtype=torch.float32, reduce_dtype=torch.bfloat16)  # for slow networks

PRECISIONS = {"bf16": bfSixteen, "bf16-fp32-reduce": bfSixteen_fp32_reduce}
PRECISIONS |= {"fp16": fpSixteen, "fp32": fp32_policy}
STRATEGIES = {
    name: ShardingStrategy[name.upper()]
    for name in ("full_shard", "shard_grad_op", "hybrid_shard", "no_shard")
} | {"ddp": None}  # DistributedDataParallel, the baseline

Classes = tuple[type[nn.Module], ...]  # all of a model's blocks: an encoder's, a decoder's

WINDOW = 50  # global batches at most that are sorted by length together: more pad less, mix less
PARENT, ELASTIC = os.getppid(), "TORCHELASTIC_RUN_ID" in os.environ  # torchrun, if there is one
STOPPED = 75  # exit code of a run that stopped on request, and goes on when it is started again


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Show the defaults, and the script's docstring as it is written."""


def exit_with(error: object) -> NoReturn:
    """End with exit code 1 and one sentence, said by rank 0."""
    if int(os.environ.get("RANK", 0)) != 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(20)  # rank 0's end ends this one too, unless this one alone is in trouble
    print(f"error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(1)


class StopRequest:
    """While entered, tells whether this process was asked to stop: by SIGTERM, SIGINT or SIGUSR1,
    or by the end of its torchrun, which leaves its workers running when it is killed.

    Python runs a signal's handler between bytecodes, so not in a rank that waits in a collective
    for another that is gone. A thread that reads the wakeup descriptor can: after SIGTERM in a step
    it sets an alarm that ends the process, unless the step ends before.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self) -> None:
        self.asked = self.terminated = self.in_step = False
        self.lock = threading.Lock()  # of `in_step` and the alarm, which belong together
        self.slowest, self.began = 0.0, time.monotonic()  # seconds of a step

    def __enter__(self) -> "StopRequest":
        reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        self.before = [signal.signal(number, lambda *_: None) for number in self.SIGNALS]
        threading.Thread(target=self._watch, args=(reader,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.alarm(0)
        for number, handler in zip(self.SIGNALS, self.before, strict=True):
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        os.close(self.writer)

    def _watch(self, reader: int) -> None:
        while number := os.read(reader, 1):
            self.asked = True
            self.terminated |= number[0] == signal.SIGTERM
            with self.lock:
                self._set_alarm()
        os.close(reader)

    def _set_alarm(self) -> None:
        hurry = self.terminated and self.in_step
        signal.alarm(math.ceil(5 + 2 * self.slowest) if hurry else 0)

    def __call__(self) -> bool:
        """Whether this rank was asked to stop; call it where a step begins, on every rank."""
        with self.lock:
            self.in_step, self.began = True, time.monotonic()
            self._set_alarm()
        return self.asked or (ELASTIC and os.getppid() != PARENT)

    def rest(self) -> None:
        """The step is over: a save, a validation or an export may take its time."""
        with self.lock:
            self.in_step, self.slowest = False, max(self.slowest, time.monotonic() - self.began)
            self._set_alarm()


def ranks_where(here: bool) -> list[int]:
    """The ranks on which it is so; all ranks."""
    flags = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    flags[dist.get_rank()] = here
    dist.all_reduce(flags)
    return flags.nonzero().flatten().tolist()


def exit_if_peer_lost(error: RuntimeError) -> None:
    """End quietly if a collective failed for want of another rank, whose error is the cause."""
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    if isinstance(error, dist.DistError) or any(sign in str(error) for sign in signs):
        rank = dist.get_rank()
        print(f"rank {rank} has lost another rank: see that one's error", file=sys.stderr)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(20)  # torchrun ends this one as soon as it sees the other's end
        os._exit(1)


def common_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that mean the same in every script; `set_defaults` changes a default."""
    parser.formatter_class, parser.error, parser.allow_abbrev = HelpFormatter, exit_with, False
    switch = {"action": argparse.BooleanOptionalAction, "default": False}

    add = parser.add_argument_group("run").add_argument
    add("--output-dir", default="output", help="checkpoints, metrics and the final model")
    add("--resume", default="auto", help="auto (newest complete checkpoint), none, or a PATH")
    add("--export-only", **switch, help="write the newest checkpoint to final/ and exit")
    add("--log-every", type=int, default=10, help="steps between training metrics")
    add("--eval-every", type=int, default=0, help="steps between validations (0: epochs only)")
    add("--save-every", type=int, default=50, help="steps between checkpoints (0: epochs only)")
    add("--checkpoint-type", choices=["sharded", "full"], default="sharded",
        help="a file per rank, or one file, for which rank 0 holds the whole state")  # fmt: skip
    add("--async-save", **switch, help="save while training goes on, from a copy in host memory")
    add("--keep-checkpoints", type=int, default=2, help="how many of the newest to keep")
    add("--export-dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help="of best/, final/")
    add("--max-shard-size", type=float, default=5.0, help="largest exported file, in GB")
    add("--track-memory", **switch, help="report peak memory: allocated and reserved, or RSS")
    add("--timeout-minutes", type=float, default=30.0, help="limit of a collective or a download")

    add = parser.add_argument_group("optimization").add_argument
    add("--batch-size", type=int, default=4, help="samples per rank and micro-batch")
    add("--gradient-accumulation-steps", type=int, default=1, help="micro-batches per step")
    add("--accumulate-no-sync", **switch, help="communicate once per step, not per micro-batch; "
        "costs every rank the memory of the whole unsharded gradient")  # fmt: skip
    add("--epochs", type=int, default=2, help="passes over the training set")
    add("--max-steps", type=int, default=0, help="train just so many steps (0: --epochs decides)")
    add("--lr", type=float, default=3e-4, help="peak learning rate")
    add("--lr-schedule", choices=["linear", "cosine", "constant", "step"], default="linear",
        help="after the warm-up; step multiplies by --gamma after every epoch")  # fmt: skip
    add("--gamma", type=float, default=0.85, help="factor of --lr-schedule step")
    add("--warmup-ratio", type=float, default=0.03, help="share of the steps with rising rate")
    add("--weight-decay", type=float, default=0.01, help="AdamW's, not for biases and norms")
    add("--max-grad-norm", type=float, default=1.0, help="gradients are clipped to this norm")
    add("--seed", type=int, default=0, help="of weights, data order and dropout")

    add = parser.add_argument_group("sharding").add_argument
    add("--strategy", choices=list(STRATEGIES), default="full_shard", help="what is sharded")
    add("--shard-group-size", type=int, default=0, help="hybrid_shard's (0: the ranks of a node)")
    add("--cpu-offload", **switch, help="keep parameters, gradients and optimizer state on the CPU")
    add("--precision", choices=["auto", *PRECISIONS], default="auto",
        help="auto: bf16 where the GPU has it, else fp32; weights stay fp32")  # fmt: skip
    add("--activation-checkpointing", **switch, help="recompute blocks in the backward pass")
    add("--compile", **switch, help="torch.compile of each block, on GPUs")


def common_problems(args: Namespace) -> list[str]:
    """What is wrong with the values of `common_arguments`, a sentence each."""
    problems = []
    for low, high, names in (
        (1, 2**31, "batch_size gradient_accumulation_steps epochs log_every keep_checkpoints"),
        (0, 2**31, "max_steps eval_every save_every weight_decay shard_group_size seed"),
        (1e-12, 1e6, "lr gamma max_grad_norm max_shard_size timeout_minutes"),
        (0, 1, "warmup_ratio"),
    ):
        for name in (name for name in names.split() if not low <= getattr(args, name) < high):
            problems.append(f"--{name.replace('_', '-')} must be at least {low} and below {high}")
    gpus = torch.cuda.device_count()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    group = args.shard_group_size or local_size
    processes = int(os.environ.get("WORLD_SIZE", 1))
    uneven = group <= 1 or processes % group  # 1 would never synchronise
    checks = {
        "--precision fp16 needs a GPU, use bf16 or fp32": args.precision == "fp16" and not gpus,
        f"--nproc_per_node {local_size} is above the {gpus} GPUs": 0 < gpus < local_size,
        "--cpu-offload needs a GPU and a --strategy other than ddp": args.cpu_offload
        and (args.strategy == "ddp" or not gpus),
        "--compile needs a GPU": args.compile and not gpus,
        "--cpu-offload accumulates gradients only with --accumulate-no-sync, on two processes or "
        "more": args.cpu_offload and args.gradient_accumulation_steps > 1
        and not (args.accumulate_no_sync and processes > 1),
        "--accumulate-no-sync cannot be used with no_shard": args.accumulate_no_sync
        and args.strategy == "no_shard",
        "--strategy hybrid_shard needs a --shard-group-size above 1 that divides the processes":
        args.strategy == "hybrid_shard" and uneven,
    }  # fmt: skip
    return problems + [problem for problem, found in checks.items() if found]


def resolve_precision(precision: str) -> str:
    """`auto` is bf16 where the GPU computes it natively, and fp32 elsewhere."""
    native = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return precision if precision != "auto" else "bf16" if native else "fp32"


def wrap_policy(classes: Classes) -> functools.partial:
    """Every module of `classes` becomes an FSDP unit; what is left is the root, as must be what is
    tied: a unit of its own could not give its weight to the other use."""
    return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=set(classes))


def size_policy(model: nn.Module, min_num_params: int) -> Callable[..., bool]:
    """Modules of `min_num_params` become units; those that hold a tied parameter stay in the root,
    where both its uses are, and so do those that contain one."""
    names = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    root = {m for m in model.modules() if any(names[p] > 1 for p in m.parameters())}

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        large = size_based_auto_wrap_policy(module, recurse, nonwrapped_numel, min_num_params)
        return large and (recurse or module not in root)

    return policy


def device_mesh(args: Namespace, device: torch.device) -> DeviceMesh:
    """The ranks as FSDP sees them: 1-D, or (replicas, shards) under hybrid_shard."""
    world_size = dist.get_world_size()
    if args.strategy != "hybrid_shard":
        return init_device_mesh(device.type, (world_size,))
    shards = args.shard_group_size or int(os.environ["LOCAL_WORLD_SIZE"])
    names = ("replicate", "shard")
    return init_device_mesh(device.type, (world_size // shards, shards), mesh_dim_names=names)


def checkpoint_activations(model: nn.Module, blocks: Classes) -> None:
    """Recompute each block in the backward pass; call it after FSDP, which then stays outside."""
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, blocks))


def compile_blocks(model: nn.Module, blocks: Classes) -> None:
    """Compile each block by itself; call it before FSDP, which then stays outside."""
    # T5 needs more kinds than the 8 after which torch.compile gives up: encoder and decoder, the
    # first block and the others, training and validation, one length and any.
    torch.compiler.config.recompile_limit = 64
    for module in model.modules():
        if isinstance(module, blocks):
            module.compile()


def flops_per_token(model: nn.Module, length: float) -> float | None:
    """FLOP that a token costs in a forward and a backward pass, in a document of `length` tokens.

    They are 6 N + 12 L d T (Chowdhery et al. 2022, PaLM, appendix B): N parameters stand in matrix
    products, the head's among them, L layers have heads of d in all, and T is the length, masked or
    not. Recomputed activations do not count. Both terms are read off two forward passes of a copy
    of the unwrapped Transformers `model` on meta: a pass over n tokens costs a n + b n^2. None
    where the model looks at values in its forward pass, for on meta there are none.
    """
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"  # other kernels are not counted, or do not run on meta
    with torch.device("meta"):
        twin = type(model)(config)

    def cost(tokens: int) -> int:
        ids = torch.empty(1, tokens, dtype=torch.int64, device="meta")
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            twin(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        return counter.get_total_flops()

    try:
        short, long = cost(8), cost(16)
    except RuntimeError:
        return None
    quadratic = (long - 2 * short) / (2 * 8**2)
    linear = (short - quadratic * 8**2) / 8
    return 3 * linear + 3 * quadratic * length


@torch.no_grad()
def check_head(
    args: Namespace, device: torch.device, model: nn.Module, inputs: dict[str, torch.Tensor]
) -> None:
    """Raise ValueError, on all ranks, if the loss is not computed from the model's own logits.

    `inputs` are keywords of the wrapped `model`, alike on all ranks, of a few tokens. With empty
    `targets` besides, the model returns the logits of its loss, [positions, vocabulary]; without,
    its own, [batch, length, vocabulary], as `logits`. The model runs as in evaluation, without
    torch.compile, and the random states stay as they are.
    """
    inputs = {key: value.to(device) for key, value in inputs.items()}
    gpus = [device] if device.type == "cuda" else []
    training = model.training
    model.eval()
    with (
        torch.compiler.set_stance("force_eager"),
        torch.random.fork_rng(gpus),
        autocast(args, device),
    ):
        # The first pass sets FSDP's order of prefetching: it is the one that training makes.
        found = model(**inputs, targets=inputs["input_ids"].new_empty(0)).float()
        own = model(**inputs, use_cache=False).logits.flatten(0, 1).float()
    model.train(training)
    # A scale before the head rounds otherwise than one behind it.
    rounding = max(1e-5, 4 * torch.finfo(PRECISIONS[args.precision].param_dtype).eps)
    largest = own.abs().nan_to_num(0, 0).max().item()
    # Values that are not finite in both are left to the first step, which names the samples.
    same = torch.allclose(found, own, rtol=0, atol=rounding * largest, equal_nan=True)
    if ranks_where(not same):
        difference = (found - own).abs().max().item()
        raise ValueError(
            f"the logits behind the loss differ by {difference:.3g} from the model's own, which "
            f"reach {largest:.3g}: have forward and chunked_loss scale or cap them as the model's "
            "own forward does; or take the loss from the model's own logits, as T5_training.py "
            "does, and leave out check_head"
        )


# The next three functions hold all that differs between FSDP and DistributedDataParallel.
def autocast(args: Namespace, device: torch.device) -> contextlib.AbstractContextManager:
    """Mixed precision under DDP; FSDP casts by its MixedPrecision policy instead."""
    dtype = PRECISIONS[args.precision].param_dtype
    enabled = args.strategy == "ddp" and dtype != torch.float32
    return torch.autocast(device.type, dtype, enabled=enabled)


def gradient_scaler(args: Namespace, device: torch.device) -> torch.amp.GradScaler:
    """The loss scaler of fp16, which passes everything through in other precisions."""
    scaler = torch.amp.GradScaler if args.strategy == "ddp" else ShardedGradScaler
    return scaler(device.type, enabled=args.precision == "fp16")


def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Clip to the global norm and return it from before; torch.nn.utils sees only a shard."""
    if isinstance(model, FSDP):
        return model.clip_grad_norm_(max_norm)
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """AdamW groups: no decay for biases and norms, told by name as shards are one-dimensional."""
    groups = [{"params": [], "weight_decay": decay} for decay in (weight_decay, 0.0)]
    for name, parameter in model.named_parameters():
        exempt = re.search(r"(\.bias|norm\w*\.weight|ln_\w+\.weight)$", name) is not None
        groups[exempt]["params"].append(parameter)
    return groups


def lr_schedule(args: Namespace, optimizer: Optimizer, total: int, epoch_steps: int) -> LambdaLR:
    """The learning rate by optimizer step: warm-up, then the shape of --lr-schedule."""
    warmup = math.ceil(args.warmup_ratio * total)

    def factor(step: int) -> float:
        if args.lr_schedule == "step":
            return args.gamma ** (step // epoch_steps)
        if step < warmup:
            return (step + 1) / (warmup + 1)  # no step is wasted on a rate of 0
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        shapes = {"linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
        return shapes.get(args.lr_schedule, 1.0)

    return LambdaLR(optimizer, factor)


class GlobalBatchSampler:
    """Batch sampler for a DataLoader, in an order that does not depend on the number of ranks.

    The epoch's permutation, a function of (seed, epoch), is cut into global batches, one per
    optimizer step; each is dealt out to the ranks in turn, then cut into micro-batches. No sample
    is dropped or repeated: some micro-batches of the last step may be short or empty.

    Given `lengths`, one of each sample, a global batch is of samples of about one length, so that
    little is padding and no rank waits for another; the batches come in random order, but for the
    longest, which comes first, so that one that does not fit in memory is seen at once.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        accumulation: int,
        seed: int | None,
        lengths: list[int] | None = None,
    ):
        self.num_samples, self.batch_size, self.seed = num_samples, batch_size, seed
        self.lengths = None if lengths is None else torch.tensor(lengths)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.global_batch = batch_size * accumulation * self.world_size
        self.steps_per_epoch = math.ceil(num_samples / self.global_batch)
        self.epoch = self.consumed = 0  # set these to continue anywhere, without loading anything

    def steps(self) -> Iterator[list[int]]:
        """The samples, of all ranks, in each remaining step of the epoch."""
        order = torch.arange(self.num_samples)
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            order = torch.randperm(self.num_samples, generator=generator)
            if self.lengths is not None:
                order = self._grouped(order, generator)
        for start in range(self.consumed, self.num_samples, self.global_batch):
            yield order[start : start + self.global_batch].tolist()

    def _grouped(self, order: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Sort each window of global batches by length, and shuffle all the batches; the last, if
        it is short, stays as it is."""
        whole = len(order) // self.global_batch
        if not whole:
            return order
        order, short = order.tensor_split([whole * self.global_batch])
        # Several windows in an epoch, or each epoch would have the same batches.
        parts = order.split(max(1, min(WINDOW, whole // 8)) * self.global_batch)
        order = torch.cat([part[self.lengths[part].argsort(stable=True)] for part in parts])
        batches = order.view(whole, self.global_batch)
        batches = batches[torch.randperm(whole, generator=generator)]
        longest = self.lengths[batches].sum(dim=1).argmax().item()
        batches[[0, longest]] = batches[[longest, 0]]
        return torch.cat((batches.flatten(), short))

    def __iter__(self) -> Iterator[list[int]]:
        for samples in self.steps():
            mine = samples[self.rank :: self.world_size]
            for start in range(0, self.global_batch // self.world_size, self.batch_size):
                yield mine[start : start + self.batch_size]


def first_on_node(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function` on one process per node, then on the others, which find its files cached.

    Returns its result; its ValueError or OSError on any rank is raised on all of them.
    """
    for first in (True, False):
        error, errors = None, [None] * dist.get_world_size()
        if first == (int(os.environ.get("LOCAL_RANK", 0)) == 0):
            try:
                result = function(*args)
            except (OSError, ValueError) as raised:
                error = raised
        dist.all_gather_object(errors, error)
        if any(errors):
            raise next(filter(None, errors))
    return result


def peak_memory(args: Namespace, device: torch.device) -> dict[str, float]:
    """For --track-memory, this process's peak in 10^6 bytes: CUDA's two, or RSS (on Linux)."""
    if not args.track_memory:
        return {}
    if device.type == "cpu":
        return {"peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1.024e-3}
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"peak_memory_mb": allocated / 1e6, "peak_reserved_mb": reserved / 1e6}
