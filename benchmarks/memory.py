"""Compare estimated with measured memory of training steps, and measure their time.

    python benchmarks/memory.py                                    # tiny models, two CPU processes
    python benchmarks/memory.py --models llama-2-7b --processes 1 --length 4096         # one GPU
    python benchmarks/memory.py --models llama-2-7b --ranks 8 --length 4096   # rank 0 of 8, one GPU
    python benchmarks/memory.py --models gpt2-xl --processes 2 --length 128 --precision fp32 \\
        --memory-limit-gb 24 --largest-batch --strategies ddp full_shard "full_shard --cpu-offload"

Each row is a launch of a script's own `wrap_model` and `train` on random tokens and weights. MB are
10^6 bytes on one rank, estimated by tools/memory_estimator.py / measured: parameters, gradients,
AdamW's moments and, on GPUs, the allocator's peak. TFLOP/s are those of a GPU, without the FLOPs of
recomputation; MFU is their share of --peak-tflops. Flags that this program does not know go to the
script.

--largest-batch raises the batch size by an eighth until it does not fit, with a row for each size.

--ranks measures rank 0 of so many, in nodes of 8, in torch's fake process group, whose collectives
do not communicate: an all-gather repeats this rank's shard, a reduce-scatter keeps this rank's
part. So kernels, shapes, buffers and streams are those of a real rank, but the weights and the loss
are meaningless. NCCL's time and buffers (1 to 3 GB), and waits for other ranks are not measured.
"""

import functools
import importlib
import itertools
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
from common import ENDLESS, OUT_OF_MEMORY, TREE, Steps, launch, parse, synchronize, train
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode
from transformers import ByT5Tokenizer

from core import ranks, weights
from core.ranks import Batch
from tools import memory_estimator

LENGTH = {  # the flag for tokens in a sequence of each script
    "T5_training": "--source-length",
    "gpt2_fsdp": "--block-size",
    "llama_fsdp": "--max-seq-length",
}
STATES = ("parameter", "gradient", "optimizer")


@dataclass
class Args:
    """The flags; others go to the script."""

    models: tuple[Literal[*memory_estimator.BUILT_IN], ...] = ("tiny-t5", "tiny-gpt2", "tiny")
    strategies: tuple[str, ...] = ("ddp", "shard_grad_op", "full_shard")  # each may have more flags
    processes: int = 2  # ranks, one per GPU
    ranks: int = 0  # measure rank 0 of so many, in one process
    length: int = 256  # tokens in a sequence
    batch_size: int = 1  # sequences per rank
    steps: int = 2  # timed steps, after two others
    peak_tflops: float = 989.0  # of the data sheet (default: H100, bf16)
    memory_limit_gb: float = 0.0  # of a GPU (0: all)
    largest_batch: bool = False  # search the largest batch that fits
    max_batch_size: int = 1024  # limit of the search
    trial: tuple[str, ...] = ()  # passed by this program: a model, its directory


def setup_first_rank(world_size: int) -> torch.device:
    """Join torch's fake process group as rank 0 of `world_size`; return the device. Call this
    before a script's arguments are parsed."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    os.environ["LOCAL_WORLD_SIZE"] = str(math.gcd(world_size, 8))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    ranks.cpu_group = None
    if torch.__version__ < (2, 13):
        dist.reduce_scatter_tensor = keep_own_part
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def keep_own_part(output: torch.Tensor, input: torch.Tensor, **_: Any) -> None:
    """Write the first part of a reduce-scatter's input, as torch 2.13's fake group does. That of
    2.11 leaves the output uninitialized, and AdamW skips a step with a NaN."""
    output.copy_(input.flatten()[: output.numel()].view_as(output))


def ddp_without_communication(*args: Any, **options: Any) -> DDP:
    """Return DistributedDataParallel that keeps this rank's gradients, because its own all-reduce
    fails in a fake process group."""

    def keep_bucket(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model = DDP(*args, **options)
    model.register_comm_hook(None, keep_bucket)
    return model


class RandomWeights(weights.Initializer):
    """A loader that needs only a config: each rank draws each tensor."""

    def __init__(self, model: torch.nn.Module, *options: Any) -> None:
        super().__init__(model, *options)
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self.stored = {name: tensor.shape for name, tensor in tensors}
        for path, module in model.named_modules():
            if hasattr(module, "quantize"):  # its weight is packed
                self.stored[f"{path}.weight"] = module.out_features, module.in_features

    def receive(self, name: str) -> torch.Tensor:
        return torch.randn(self.stored[name], device=self.device).mul_(0.02)


def new_model(model_class: type, config: Any, *_: object) -> tuple[torch.nn.Module, dict]:
    """Return a model on meta, as `weights.new_model` does, for a directory without weights."""
    weights.prepare_config(config)
    with torch.device("meta"):
        return model_class(config), {}


def random_batch(script: ModuleType, args: Any) -> Batch:
    """Return a random micro-batch for a script, on the CPU, of full length without padding."""
    data = sys.modules[type(args.data).__module__]

    def ids(length: int) -> list[list[int]]:
        return torch.randint(3, 256, (args.optim.batch_size, length)).tolist()

    if script.__name__ == "gpt2_fsdp":
        return data.collate([{"input_ids": row} for row in ids(args.data.block_size + 1)])
    if script.__name__ == "llama_fsdp":
        rows = ids(args.data.max_seq_length + 1)
        return data.collate([[{"input_ids": row, "labels": row}] for row in rows])
    pairs = zip(ids(args.data.source_length), ids(args.data.target_length), strict=True)
    rows = [{"input_ids": source, "labels": target} for source, target in pairs]
    return data.collate(rows, pad_token_id=0, decoder_start_token_id=0)


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Return the bytes on this rank of the storages of these tensors, each counted once."""
    sizes = {}
    for tensor in tensors:
        if tensor is not None and tensor.numel():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def measure_states(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return this rank's bytes of parameters, gradients and AdamW's moments after a step. The
    scales of 4-bit weights count as parameters."""
    tensors = list(model.parameters())
    for module in model.modules():
        if scales := getattr(module, "quant_state", None):
            tensors += [scales.absmax, scales.state2.absmax, scales.offset, scales.code]
    moments = [x for values in optimizer.state.values() for x in values.values()]
    return {
        "parameter": storage_bytes(tensors),
        "gradient": storage_bytes(p.grad for p in model.parameters()),
        "optimizer": storage_bytes(x for x in moments if x.ndim),  # not the number of the step
    }


def estimate(args: Any, options: Args) -> dict[str, float]:
    """Return the estimator's bytes of a rank, and the FLOPs of its step without recomputation."""
    sharding = args.sharding
    count = dist.get_world_size()
    node = math.gcd(count, 8)
    flags = memory_estimator.Args(
        model_name=options.trial[0],
        nodes=count // node,
        gpus_per_node=node,
        batch_size=args.optim.batch_size,
        seq_length=options.length,
        target_length=getattr(args.data, "target_length", 0),
        precision=sharding.precision,
        fsdp=sharding.fsdp,
        strategy=sharding.strategy,
        cpu_offload=sharding.cpu_offload,
        activation_checkpointing=sharding.activation_checkpointing,
    )
    if hasattr(args, "adapters"):  # an optional module
        flags.lora_rank = args.adapters.lora_rank
        flags.load_in_4bit = args.adapters.load_in_4bit

    kernels = {
        memory_estimator.KERNEL: lambda query, key, *_, **__: 4 * query.numel() * key[2],
    }
    with FlopCounterMode(display=False, custom_mapping=kernels) as forward:
        model = memory_estimator.Model(flags)
    sizes = memory_estimator.memory(model, flags)
    # Frozen weights have no gradients, but pass them on.
    flops = (2 + model.trained / model.parameters) * forward.get_total_flops()
    result = {"flops": flops, "peak": sizes["total_bytes"]}
    for state in STATES:
        result[state] = sizes[f"{state}_bytes"]
    return result


def trial(options: Args, flags: list[str]) -> None:
    """Train on random tokens; rank 0 prints a line of JSON for each batch size that fits."""
    model, directory = options.trial
    config = memory_estimator.load_config(model)
    script = importlib.import_module(memory_estimator.SCRIPTS[config.model_type])
    if options.ranks:
        device = setup_first_rank(options.ranks)
        script.DDP = ddp_without_communication
    else:
        device = ranks.setup(30)
    args = parse(script, "--model-name", directory, "--dataset", TREE / "README.md", *ENDLESS,
                 "--output-dir", f"{directory}/run", LENGTH[script.__name__], options.length,
                 "--log-every", 10**6, "--batch-size", options.batch_size, *flags)  # fmt: skip
    if options.memory_limit_gb and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(options.memory_limit_gb * 1e9 / total)
    weights.new_model, weights.Initializer = new_model, RandomWeights
    try:
        train(script, args, device, functools.partial(measured_steps, script, args, options))
    except torch.OutOfMemoryError:
        os._exit(OUT_OF_MEMORY)  # at once: the other ranks wait, and torchrun ends them
    ranks.finish()


def measured_steps(
    script: ModuleType, args: Any, options: Args, _: Steps, model: torch.nn.Module
) -> Steps:
    """Yield the steps of each batch size; print what was measured as JSON on rank 0."""
    held: dict[str, float] = {}
    register_optimizer_step_post_hook(lambda x, *_: held.update(measure_states(model, x)))
    on_gpu = torch.cuda.is_available()
    limit = options.max_batch_size if options.largest_batch else args.optim.batch_size
    # Without a search, this is one round.
    while args.optim.batch_size <= limit:
        batch = random_batch(script, args)
        yield [batch]  # AdamW's moments exist after the first step
        yield [batch]
        synchronize()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for _ in range(options.steps):
            yield [batch]
        synchronize()
        seconds = (time.perf_counter() - start) / options.steps
        held["peak"] = torch.cuda.max_memory_allocated() if on_gpu else 0
        size = args.optim.batch_size
        result = {"batch": size, "tokens": size * options.length, "seconds": seconds}
        if dist.get_rank() == 0:
            result |= {"measured": held, "estimated": estimate(args, options)}
            print(json.dumps(result), flush=True)
        args.optim.batch_size += max(1, size // 8)


def row(name: str, result: dict | None, processes: int, peak_tflops: float) -> str:
    """Return a row of the table."""
    if result is None:
        return f"| {name} | does not fit |"
    measured, expected, seconds = result["measured"], result["estimated"], result["seconds"]
    cells = [name, str(result["batch"])]
    # On a CPU there is no peak of an allocator.
    for term in (*STATES, "peak"):
        held = f"{measured[term] / 1e6:,.2f}" if measured[term] else "-"
        cells.append(f"{expected[term] / 1e6:,.2f} / {held}")
    cells += [f"{seconds:.3f}", f"{result['tokens'] * processes / seconds:,.0f}"]
    tflops = expected["flops"] / seconds / 1e12
    cells += [f"{tflops:,.1f}", f"{tflops / peak_tflops:.3f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print a table with a row for each model and strategy, as soon as it is measured."""
    options, flags = tyro.cli(Args, description=__doc__, return_unknown_args=True)
    if options.trial:
        trial(options, flags)
        return
    processes = 1 if options.ranks else options.processes
    print(f"{options.ranks or processes} ranks; MB of one, estimated / measured\n")
    print("| model | batch per rank | parameters | gradients | moments | peak | s | tokens/s "
          "| TFLOP/s | MFU |\n|---|---|---|---|---|---|---|---|---|---|", flush=True)  # fmt: skip
    for model, strategy in itertools.product(options.models, options.strategies):
        name = f"{model}, {strategy}"

        def report(result: dict | None, name: str = name) -> None:
            print(row(name, result, processes, options.peak_tflops), flush=True)

        with tempfile.TemporaryDirectory() as directory:
            memory_estimator.load_config(model).save_pretrained(directory)
            ByT5Tokenizer().save_pretrained(directory)
            words = [*sys.argv[1:], "--trial", model, directory, "--strategy", *strategy.split()]
            if launch(processes, __file__, *words, report=report) is None:
                report(None)


if __name__ == "__main__":
    main()
