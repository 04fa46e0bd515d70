"""Ten steps of a script with detailed records, which the parity tests run on every rank."""

import argparse
import functools
import importlib.util
import traceback
import types
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import policies
from benchmarks.driven import Driven

SHARED_VARIANTS = {
    "full_shard": [],
    "shard_grad_op": ["--strategy", "shard_grad_op"],
    "no_shard": ["--strategy", "no_shard"],
    "ddp": ["--strategy", "ddp"],
    "accumulate": ["--batch-size", "2", "--gradient-accumulation-steps", "2"],
    "accumulate_no_sync": ["--batch-size", "2", "--gradient-accumulation-steps", "2",
                           "--accumulate-no-sync"],
    "ddp_accumulate": ["--strategy", "ddp", "--batch-size", "2", "--gradient-accumulation-steps",
                       "2"],
    "activation_checkpointing": ["--activation-checkpointing"],
    "ddp_activation_checkpointing": ["--activation-checkpointing", "--strategy", "ddp"],
    "fsdp2": ["--fsdp", "2"],
    "fsdp2_shard_grad_op": ["--fsdp", "2", "--strategy", "shard_grad_op"],
    "fsdp2_accumulate": ["--fsdp", "2", "--batch-size", "2", "--gradient-accumulation-steps", "2"],
    "fsdp2_accumulate_no_sync": ["--fsdp", "2", "--batch-size", "2",
                                 "--gradient-accumulation-steps", "2", "--accumulate-no-sync"],
    "fsdp2_activation_checkpointing": ["--fsdp", "2", "--activation-checkpointing"],
}  # fmt: skip
# GPT-2 runs all of them. The scripts share the text of the wrapping and the loop, as test_gpt2.py
# checks, so the other models run only the variants that depend on a model's own forward pass.
CORE_VARIANTS = {
    name: SHARED_VARIANTS[name]
    for name in (
        "full_shard",
        "ddp",
        "accumulate",
        "activation_checkpointing",
        "fsdp2",
        "fsdp2_accumulate_no_sync",
    )
}
PAGED = {  # for Llama
    "paged": ["--optimizer", "paged_adamw_32bit"],
    "ddp_paged": ["--optimizer", "paged_adamw_32bit", "--strategy", "ddp"],
}
if not importlib.util.find_spec("bitsandbytes"):  # skips their tests
    PAGED = {}
# Micro-batches of 2 with a short last one give batches of several lengths and sizes.
COMPILED = ["--compile", "--activation-checkpointing", *SHARED_VARIANTS["accumulate_no_sync"]]


def compile_without_compiler() -> None:
    """Make --compile trace its graphs without compiling them. This takes seconds, not minutes."""
    torch.nn.Module.compile = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a DTensor, or a plain tensor itself."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, or a plain tensor itself."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def strategy_flags(name: str) -> list[str]:
    """Return the flags for a --strategy, or for FSDP2 with its default strategy."""
    if name == "fsdp2":
        return ["--fsdp", "2"]
    return ["--strategy", name]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the full gradient of each parameter, by its name before wrapping."""
    is_sharded = isinstance(model, FSDP) and model.sharding_strategy != ShardingStrategy.NO_SHARD
    if is_sharded:
        with FSDP.summon_full_params(model, with_grads=True, writeback=False):
            full = {name: p.grad.clone() for name, p in model.named_parameters()}
    else:
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        full = {name: whole(p.grad).clone() for name, p in trainable}
    for wrapper in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        full = {name.replace(wrapper, ""): grad for name, grad in full.items()}
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
        """Count the call and execute it."""
        if DTensor in types:
            return NotImplemented  # its inner calls are dispatched here
        reduction = torch.ops._c10d_functional.all_reduce.default  # DTensor's
        self.collectives += function.namespace == "c10d" or function is reduction
        if function is torch.ops.aten._local_scalar_dense.default:
            frames = traceback.extract_stack()[:-1]
            callers = [f.filename for f in frames if "/torch/_" not in f.filename]
            self.waits[Path(callers[-1]).name] += 1
        return function(*args, **(kwargs or {}))


def check_recomputation(results: dict, **pairs: str) -> None:
    """Check that variants with recomputation have bit-for-bit the losses of those without."""
    for name, plain in pairs.items():
        assert results[name]["losses"] == results[plain]["losses"], name


def check_no_host_sync(results: dict, variants: Iterable[str], exempt: str = "") -> None:
    """Check that a step and the fetch of its micro-batches read no tensor's value on the host,
    except in the file `exempt`."""
    for name in variants:
        assert results[name]["waits"].keys() <= {exempt}, (name, results[name]["waits"])


def resume(
    script: types.ModuleType, args: argparse.Namespace, device: torch.device
) -> dict[str, tuple[list[float], list[torch.Tensor]]]:
    """Return the losses of steps 4 to 6 and the weights after them: for a run, its resume from step
    3 and a resume with AdamW."""

    def three_steps(driven: Driven) -> list[float]:
        losses = []
        for loss, _ in driven.all(3):
            dist.all_reduce(loss)
            losses.append(loss.item())
        return losses

    uninterrupted = Driven(script, args, device)
    three_steps(uninterrupted)
    checkpoint = uninterrupted.save()
    runs = {"uninterrupted": uninterrupted}
    for optimizer in (args.optimizer, "adamw"):
        other = argparse.Namespace(**vars(args) | {"optimizer": optimizer})
        runs[optimizer] = Driven(script, other, device, checkpoint)
    results = {}
    for name, driven in runs.items():
        losses = three_steps(driven)
        results[name] = losses, [whole(p).clone() for p in driven.model.parameters()]
    return results


def check_resume(result: dict) -> None:
    """Check that a resume is exact with the same optimizer and close with the other."""
    losses, parameters = result["uninterrupted"]
    resumed, resumed_parameters = result["paged_adamw_32bit"]
    assert losses == resumed and len(losses) == 3
    for one, other in zip(parameters, resumed_parameters, strict=True):
        assert torch.equal(one, other)
    assert result["adamw"][0] == pytest.approx(losses, abs=1e-5)


def ten_steps(
    script: types.ModuleType, args: argparse.Namespace, device: torch.device
) -> tuple[dict, Driven]:
    """Train ten steps. Return the results (losses, rows, the first gradient before clipping, bytes)
    and the driven script."""
    driven = Driven(script, args, device)
    result: dict = {"losses": [], "rows": [], "samples": [], "norms": [], "shapes": set()}
    clip = policies.clip_gradients

    def keep_gradient(model: torch.nn.Module, max_norm: float) -> torch.Tensor:
        policies.clip_gradients = clip
        result["gradient_bytes"] = storage_bytes(p.grad for p in model.parameters())
        result["parameter_bytes"] = storage_bytes(model.parameters())
        result["gradient"] = gradients(model)
        return clip(model, max_norm)

    policies.clip_gradients = keep_gradient
    counters.clear()
    while True:
        watch = None
        if len(result["losses"]) == 3 and not args.compile:  # no epoch starts at step 4
            watch = Watch()
        outcome = driven.step(around=watch)
        if outcome is None:
            break
        loss, norm = outcome
        if watch is not None:
            result |= {"collectives": watch.collectives, "waits": dict(watch.waits)}
        batches, samples = driven.fetched._batches, driven.fetched.samples
        result["shapes"] |= {tuple(batch["input_ids"].shape) for batch in batches}
        dist.all_reduce(loss)
        result["losses"].append(loss.item())
        result["norms"].append(norm.item())
        result["samples"].append((driven.state.epoch, samples))
        rows = [driven.loader.dataset[i] for i in samples]
        result["rows"].append(tree_map(lambda x: x.tolist() if hasattr(x, "tolist") else x, rows))
    moments = [
        v for s in driven.state.optimizer.state.values() for k, v in s.items() if k != "step"
    ]
    result["optimizer_bytes"] = storage_bytes(moments)
    result["graphs"] = counters["stats"]["unique_graphs"]
    result["graph_breaks"] = list(counters["graph_break"])
    validation = script.validation(args, driven.model, driven.val_loaders, driven)
    result["validation"] = validation["loss"]
    if getattr(args, "optimizer", "adamw") != "adamw":
        result["resume"] = resume(script, args, device)
    return result, driven
