"""Ten steps of a script with detailed records, which the parity tests run on every rank."""

import contextlib
import functools
import inspect
import itertools
import json
import sys
import traceback
import types
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import policies
from core import ranks, weights

TWO_MICRO_BATCHES = ["--batch-size", "2", "--gradient-accumulation-steps", "2"]
SHARED_VARIANTS = {
    "full_shard": [],
    "shard_grad_op": ["--strategy", "shard_grad_op"],
    "ddp": ["--strategy", "ddp"],
    "accumulate": TWO_MICRO_BATCHES,
    "accumulate_no_sync": [*TWO_MICRO_BATCHES, "--accumulate-no-sync"],
    "ddp_accumulate": ["--strategy", "ddp", *TWO_MICRO_BATCHES],
    "activation_checkpointing": ["--activation-checkpointing", "blocks"],
    "ddp_activation_checkpointing": ["--activation-checkpointing", "blocks", "--strategy", "ddp"],
    "selective": ["--activation-checkpointing", "selective"],
    "fsdp2": ["--fsdp", "2"],
    "fsdp2_shard_grad_op": ["--fsdp", "2", "--strategy", "shard_grad_op"],
    "fsdp2_accumulate": ["--fsdp", "2", *TWO_MICRO_BATCHES],
    "fsdp2_accumulate_no_sync": ["--fsdp", "2", *TWO_MICRO_BATCHES, "--accumulate-no-sync"],
    "fsdp2_activation_checkpointing": ["--fsdp", "2", "--activation-checkpointing", "blocks"],
    "fsdp2_selective": ["--fsdp", "2", "--activation-checkpointing", "selective"],
}
PAGED = {  # for Llama
    "paged": ["--optimizer", "paged_adamw_32bit"],
    "ddp_paged": ["--optimizer", "paged_adamw_32bit", "--strategy", "ddp"],
}
# Micro-batches of 2 with a short last one give batches of several lengths and sizes.
RECOMPUTED = SHARED_VARIANTS["activation_checkpointing"]
COMPILED = ["--compile", *RECOMPUTED, *SHARED_VARIANTS["accumulate_no_sync"]]
patched = mock.patch.multiple  # a context in which a module has other attributes


def compile_without_compiler(backend: str = "aot_eager") -> None:
    """Make --compile trace its graphs without compiling them, with "eager" only those of forward
    passes. This takes seconds, not minutes."""
    torch.compile = functools.partial(torch.compile, backend=backend)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a DTensor, or a plain tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def strategy_flags(name: str) -> list[str]:
    """Return the flags for a --strategy, or for FSDP2 with its default strategy."""
    return ["--fsdp", "2"] if name == "fsdp2" else ["--strategy", name]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the full gradient of each parameter, by its name before wrapping."""
    if isinstance(model, FSDP) and model.sharding_strategy != ShardingStrategy.NO_SHARD:
        with FSDP.summon_full_params(model, with_grads=True, writeback=False):
            full = {name: p.grad.clone() for name, p in model.named_parameters()}
    else:
        trained = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
        full = {name: whole(p.grad).clone() for name, p in trained}
    full = {weights.plain_name(name): grad for name, grad in full.items()}
    return {name.removeprefix("module."): grad for name, grad in full.items()}


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Return the total size in bytes of the tensors' storages, each counted once."""
    shards = [local(tensor) for tensor in tensors if tensor is not None]
    storages = [shard.untyped_storage() for shard in shards if shard.numel()]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


class Watch(TorchDispatchMode):
    """Counts collectives and, by file, the host's reads of a tensor's value. On a GPU, each read
    waits for all queued kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives = 0
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its inner calls are dispatched here
        reduction = torch.ops._c10d_functional.all_reduce.default  # DTensor's
        self.collectives += function.namespace == "c10d" or function is reduction
        if function is torch.ops.aten._local_scalar_dense.default:
            frames = traceback.extract_stack()[:-1]
            callers = [f.filename for f in frames if "/torch/_" not in f.filename]
            self.waits[Path(callers[-1]).name] += 1
        return function(*args, **(kwargs or {}))


def parse_args(script: types.ModuleType, flags: list[str]) -> Any:
    """Return a script's arguments for these flags."""
    with mock.patch.object(sys, "argv", [f"{script.__name__}.py", *map(str, flags)]):
        return script.parse_args()


def run(script: types.ModuleType, args: Any, device: torch.device) -> tuple[int, dict[str, Any]]:
    """Run a script's `fsdp_main` in the process group of this process. Return its exit code, and
    by name the arguments of `train`, the optimizer, and the adapters before training."""
    seen: dict[str, Any] = {}
    train = script.train

    def train_and_keep(*values: Any) -> bool:
        names = inspect.unwrap(train).__code__.co_varnames
        seen.update(zip(names, values, strict=False))
        seen["initial_adapters"] = {
            weights.plain_name(name): whole(parameter).clone()
            for name, parameter in seen["model"].named_parameters()
            if ".lora_" in name
        }
        return train(*values)

    def finish(error: BaseException | None = None, code: int = 0) -> None:
        raise error or SystemExit(code)

    hook = register_optimizer_step_post_hook(lambda x, *_: seen.update(optimizer=x))
    with (
        patched(ranks, setup=lambda _: device, finish=finish),
        patched(script, train=train_and_keep),
    ):
        try:
            script.fsdp_main.__wrapped__(args)  # without torchrun's record of errors
        except SystemExit as end:
            return end.code, seen
        finally:
            hook.remove()
    raise AssertionError("fsdp_main returned")


def ten_steps(script: types.ModuleType, args: Any, device: torch.device) -> dict[str, Any]:
    """Train ten steps. Return losses, norms, samples and their rows, the first gradient before
    clipping, bytes of the first step's tensors, and collectives and waits of step 4."""
    result: dict[str, Any] = {"samples": [], "rows": [], "shapes": set()}
    clip, progress, loader_class = policies.clip_gradients, script.progress, script.DataLoader
    samplers: list[Any] = []

    def keep_gradient(model: torch.nn.Module, max_norm: float) -> torch.Tensor:
        if "gradient" not in result:
            result["gradient_bytes"] = storage_bytes(p.grad for p in model.parameters())
            result["parameter_bytes"] = storage_bytes(model.parameters())
            result["gradient"] = gradients(model)
        return clip(model, max_norm)

    def keep_sampler(*values: Any, **options: Any) -> Any:
        samplers.append(values[0].sampler)
        return loader_class(*values, **options)

    def watch_fourth(items: Any, text: str, *values: Any) -> Iterator[Any]:
        iterator = iter(progress(items, text, *values))
        for number in itertools.count(1):
            is_watched = text == "step" and number == 4 and not args.sharding.compile
            with Watch() if is_watched else contextlib.nullcontext() as watch:
                item = next(iterator, None)
                if item is None:
                    return
                if text == "step":
                    result["shapes"] |= {tuple(batch["input_ids"].shape) for batch in item}
                yield item
            if watch is not None:
                result.update(collectives=watch.collectives, waits=dict(watch.waits))

    counters.clear()
    with (
        patched(policies, clip_gradients=keep_gradient),
        patched(script, progress=watch_fourth, DataLoader=keep_sampler),
    ):
        code, seen = run(script, args, device)
    assert code == 0
    result["graphs"] = counters["stats"]["unique_graphs"]
    result["graph_breaks"] = list(counters["graph_break"])
    (val_set, *_) = seen["val_sets"].values()
    result["val_rows"] = [val_set[i] for i in range(len(val_set))]
    for step in range(args.optim.max_steps):
        samples = samplers[0].samples(step).tolist()
        result["samples"].append(samples)
        rows = [seen["train_set"][i] for i in samples]
        result["rows"].append(tree_map(lambda x: x.tolist() if hasattr(x, "tolist") else x, rows))
    model = seen["model"]
    moments = [v for s in seen["optimizer"].state.values() for k, v in s.items() if k != "step"]
    result["optimizer_bytes"] = storage_bytes(moments)
    result["units"] = sum(isinstance(module, FSDPModule | FSDP) for module in model.modules())
    result["buffers"] = {name: buffer.clone() for name, buffer in model.named_buffers()}
    result["initial_adapters"] = seen["initial_adapters"]
    inner = weights.unwrapped(model)
    head, embedding = inner.get_output_embeddings(), inner.get_input_embeddings()
    result["tied"] = head is not None and head.weight is embedding.weight
    return result | logged(args.run.output_dir)


def logged(output: Path) -> dict[str, Any]:
    """Return losses and norms of a run, and its last validation loss."""
    events = [json.loads(line) for line in (output / "metrics.jsonl").open()]
    trained = [event for event in events if event["event"] == "train"]
    return {
        "losses": [event["loss"] for event in trained],
        "norms": [event["grad_norm"] for event in trained],
        "validation": [event["loss"] for event in events if event["event"] == "val"][-1],
    }
