"""Ten steps of a script with detailed records, which the parity tests run on every rank."""

import contextlib
import functools
import importlib.util
import json
import sys
import traceback
import types
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import policies
from core import checkpoint, ranks, weights

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


def check_no_host_sync(results: dict, variants: Iterable[str]) -> None:
    """Check that a step and the fetch of its micro-batches read no tensor's value on the host.
    Transformers' check of its masks is exempt."""
    for name in variants:
        assert results[name]["waits"].keys() <= {"masking_utils.py"}, (name, results[name]["waits"])


class Left(Exception):
    """A script has ended its run, with this exit code."""


def parse_args(script: types.ModuleType, flags: list[str]) -> Any:
    """Return a script's arguments for these flags."""
    before, sys.argv = sys.argv, [f"{script.__name__}.py", *map(str, flags)]
    try:
        return script.parse_args()
    finally:
        sys.argv = before


@contextlib.contextmanager
def patched(module: Any, **values: Any) -> Iterator[None]:
    """A context in which a module has other attributes."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def run(script: types.ModuleType, args: Any, device: torch.device) -> tuple[int, dict[str, Any]]:
    """Run a script's `fsdp_main` in the process group of this process. Return its exit code, and
    the arguments of `train` and `snapshot` (of the last save) by name."""
    seen: dict[str, Any] = {}
    train, snapshot = script.train, checkpoint.snapshot

    def train_and_keep(*values: Any) -> bool:
        names = train.__code__.co_varnames
        seen.update(zip(names, values, strict=False))
        return train(*values)

    def snapshot_and_keep(model: Any, optimizer: Any, state: Any) -> Any:
        seen.update(optimizer=optimizer)
        return snapshot(model, optimizer, state)

    def leave(code: int) -> None:
        raise Left(code)

    with (
        patched(ranks, setup=lambda _: device, leave=leave),
        patched(script, train=train_and_keep),
        patched(checkpoint, snapshot=snapshot_and_keep),
    ):
        try:
            script.fsdp_main.__wrapped__(args)  # without torchrun's record of errors
        except Left as left:
            return left.args[0], seen
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
        samplers.append(options["batch_sampler"])
        return loader_class(*values, **options)

    def watch_fourth(items: Any, text: str, *values: Any) -> Iterator[Any]:
        iterator = iter(progress(items, text, *values))
        number = 0
        while True:
            number += 1
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
    events = [json.loads(x) for x in (args.run.output_dir / "metrics.jsonl").open()]
    trained = [event for event in events if event["event"] == "train"]
    result["losses"] = [event["loss"] for event in trained]
    result["norms"] = [event["grad_norm"] for event in trained]
    result["validation"] = [event["loss"] for event in events if event["event"] == "val"][-1]
    for step in range(trained[-1]["step"]):
        samples = samplers[0].samples(step).tolist()
        result["samples"].append(samples)
        rows = [seen["train_set"][i] for i in samples]
        result["rows"].append(tree_map(lambda x: x.tolist() if hasattr(x, "tolist") else x, rows))
    model, optimizer = seen["model"], seen["optimizer"]
    moments = [v for s in optimizer.state.values() for k, v in s.items() if k != "step"]
    result["optimizer_bytes"] = storage_bytes(moments)
    result["graphs"] = counters["stats"]["unique_graphs"]
    result["graph_breaks"] = list(counters["graph_break"])
    unit = FSDPModule if args.sharding.fsdp == 2 else FSDP
    result["units"] = sum(isinstance(module, unit) for module in model.modules())
    inner = weights.unwrapped(model)
    head, embedding = inner.get_output_embeddings(), inner.get_input_embeddings()
    result["tied"] = head is not None and head.weight is embedding.weight
    return result
