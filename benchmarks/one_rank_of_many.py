"""Measure on one GPU what one rank of many needs: its memory, and its time without communication.

    python benchmarks/one_rank_of_many.py --ranks 8                              # Llama 2 7B
    python benchmarks/one_rank_of_many.py --ranks 32 --model llama-2-70b --fsdp 2
    python benchmarks/one_rank_of_many.py --ranks 2 --model gpt2-xl --length 128 --precision fp32 \\
        --memory-limit-gb 24 --largest-batch
    python benchmarks/one_rank_of_many.py --ranks 8 --model tiny --length 64 --steps 2  # on a CPU

Rank 0 of `--ranks`, in nodes of 8, runs a script's own `wrap_model` and `train` in torch's fake
process group, whose collectives do not communicate: an all-gather repeats this rank's shard, a
reduce-scatter keeps this rank's part. So kernels, shapes, buffers and streams are those of a real
rank, but the weights and the loss are meaningless. Flags that this program does not know go to the
script. The estimate is the one of tools/memory_estimator.py.

`--largest-batch` raises the batch size by an eighth, until it does not fit.

Not measured: NCCL's time and buffers (1 to 3 GB), and waits for other ranks.
"""

import argparse
import contextlib
import importlib
import json
import math
import tempfile
import time
from types import ModuleType
from typing import Any

import torch
from common import (
    ENDLESS,
    LENGTH,
    Held,
    Steps,
    ddp_without_communication,
    limit_memory,
    parse,
    random_batch,
    setup_first_rank,
    train,
    use_random_weights,
    write_config,
)

from core import ranks
from tools import memory_estimator

ROWS = {  # measured: estimated
    "parameter_bytes": "parameter_bytes",
    "gradient_bytes": "gradient_bytes",
    "optimizer_bytes": "optimizer_bytes",
    "peak_bytes": "total_bytes",
}


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(
    script: ModuleType, args: Any, device: torch.device, options: argparse.Namespace
) -> dict[str, float]:
    """Return the bytes that rank 0 holds, the mean seconds of a step and, on a GPU, its peaks."""
    held = Held()
    result = {}

    def steps(_: Steps) -> Steps:
        result["load_peak_bytes"] = allocated_peak()
        batch = random_batch(script, args)
        yield [batch]  # AdamW's moments exist after the first step
        yield [batch]
        synchronize()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for _ in range(options.steps):
            yield [batch]
        synchronize()
        result["seconds"] = (time.perf_counter() - start) / options.steps

    train(script, args, device, steps)
    if device.type == "cuda":
        memory = torch.cuda.memory_stats()
        result["peak_bytes"] = memory["allocated_bytes.all.peak"]
        result["reserved_bytes"] = memory["reserved_bytes.all.peak"]
        result["retries"] = memory["num_alloc_retries"]
    return held.bytes | result


def allocated_peak() -> int:
    """Return the peak of CUDA's allocator in bytes, or 0 on a CPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def largest_batch(script: ModuleType, args: Any, device: torch.device, limit: int) -> int:
    """Return the largest batch size, up to `limit`, whose steps fit in memory (0: none)."""
    fits = [0]

    def steps(_: Steps) -> Steps:
        size = 1
        while size <= limit:
            args.optim.batch_size = size
            yield [random_batch(script, args)]
            yield [random_batch(script, args)]  # the first step of all starts without moments
            synchronize()
            fits.append(size)
            size += max(1, size // 8)

    with contextlib.suppress(torch.OutOfMemoryError):
        train(script, args, device, steps)
    return fits[-1]


def estimated(args: Any, options: argparse.Namespace) -> dict[str, float]:
    """Return the estimator's bytes of one of the ranks."""
    sharding = args.sharding
    node = math.gcd(options.ranks, 8)
    words = ["--model-name", options.model, "--precision", sharding.precision, "--fsdp",
             sharding.fsdp, "--seq-length", options.length, "--batch-size", args.optim.batch_size,
             "--gpus-per-node", node, "--nodes", options.ranks // node]  # fmt: skip
    adapters = getattr(args, "adapters", None)
    if adapters and adapters.lora_rank:
        words += ["--lora-rank", adapters.lora_rank]
        words += ["--load-in-4bit"] if adapters.load_in_4bit else []
    flags = memory_estimator.parse_args(list(map(str, words)))
    model = memory_estimator.read_model(flags)
    choice = sharding.strategy, sharding.cpu_offload, sharding.activation_checkpointing, "adamw"
    return memory_estimator.estimate(model, flags, *choice)


def print_table(measured: dict[str, float], expected: dict[str, float]) -> None:
    """Print measured and estimated MB, and their ratio."""
    print("| | measured, MB | estimated, MB | ratio |\n|---|---|---|---|")
    for name, key in ROWS.items():
        if name in measured:
            size = measured[name]
            print(f"| {name.removesuffix('_bytes')} | {size / 1e6:,.2f} "
                  f"| {expected[key] / 1e6:,.2f} | {expected[key] / size:.3f} |")  # fmt: skip


def main() -> None:
    """Print a table of measured and estimated bytes and, as JSON, all that was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(memory_estimator.BUILT_IN)
    parser.add_argument("--ranks", type=int, default=8, help="of the training that is imitated")
    parser.add_argument("--model", choices=names, default="llama-2-7b", help="shape")
    parser.add_argument("--length", type=int, default=4096, help="tokens in a sequence")
    parser.add_argument("--steps", type=int, default=6, help="timed steps, after two others")
    parser.add_argument("--memory-limit-gb", type=float, default=0, help="of the GPU (0: all)")
    parser.add_argument("--largest-batch", action="store_true", help="search the largest batch")
    parser.add_argument("--max-batch-size", type=int, default=1024, help="limit of the search")
    options, flags = parser.parse_known_args()
    config = memory_estimator.load_config(options.model)
    script = importlib.import_module(memory_estimator.SCRIPTS[config.model_type])
    device = setup_first_rank(options.ranks)
    limit_memory(device, options.memory_limit_gb)
    use_random_weights()
    script.DDP = ddp_without_communication
    print(f"rank 0 of {options.ranks}: {options.model}, {options.length} tokens, {' '.join(flags)}")
    with tempfile.TemporaryDirectory() as directory:
        write_config(options.model, directory)
        args = parse(script, "--model-name", directory, LENGTH[script.__name__], options.length,
                     "--dataset", "docstrings.jsonl", "--output-dir", f"{directory}/run", *ENDLESS,
                     *flags)  # fmt: skip
        if options.largest_batch:
            size = largest_batch(script, args, device, options.max_batch_size)
            print(f"the largest batch that fits: {size}")
        else:
            measured = measure(script, args, device, options)
            print_table(measured, estimated(args, options))
            print(json.dumps(measured))
    ranks.end(0)


if __name__ == "__main__":
    main()
