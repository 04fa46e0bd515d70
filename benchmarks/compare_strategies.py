"""Compare batch size, memory and time of GPT-2 under each sharding strategy, in one table.

    python benchmarks/compare_strategies.py --processes 2                          # on a CPU
    python benchmarks/compare_strategies.py --processes 2 --model gpt2-xl --memory-limit-gb 24

On GPUs it searches for the largest batch per rank that fits, by doubling and then bisecting. On a
CPU it compares the bytes that a rank holds and the time of a step at one batch size. Each trial is
a separate torchrun launch, because a rank that runs out of memory leaves the others waiting.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from common import (
    ENDLESS,
    GPT2,
    Held,
    Steps,
    environment_for,
    limit_memory,
    parse,
    random_batch,
    train,
    use_random_weights,
    write_gpt2,
)

import gpt2_fsdp
from core import ranks
from core.log import peak_memory

OUT_OF_MEMORY = 3  # exit code of a trial


def parse_args() -> argparse.Namespace:
    """Return the flags of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(GPT2), default="tiny", help="shape of GPT-2")
    parser.add_argument("--processes", type=int, default=2, help="ranks, one per GPU")
    parser.add_argument("--block-size", type=int, default=256, help="tokens in a sample")
    parser.add_argument("--batch-size", type=int, default=8, help="samples per rank, on a CPU")
    parser.add_argument("--max-batch-size", type=int, default=1024, help="limit of the search")
    parser.add_argument("--memory-limit-gb", type=float, default=0, help="per GPU (0: all of it)")
    parser.add_argument("--precision", default="auto", help="as in gpt2_fsdp.py")
    parser.add_argument("--steps", type=int, default=5, help="timed steps per trial")
    parser.add_argument("--timeout", type=int, default=300, help="limit for a trial in seconds")
    parser.add_argument("--trial", nargs=2, help=argparse.SUPPRESS)  # directory, flags as JSON
    return parser.parse_args()


def trial(options: argparse.Namespace, directory: str, flags: list[str]) -> None:
    """Train a few steps on random tokens; rank 0 prints time and memory as JSON."""
    common = ["--model-name", directory, "--output-dir", f"{directory}/run", *ENDLESS]
    args = parse(gpt2_fsdp, *common, *flags)
    device = ranks.setup(args.run.timeout_minutes)
    limit_memory(device, options.memory_limit_gb)
    seconds: list[float] = []

    def steps(_: Steps) -> Steps:
        batch = random_batch(gpt2_fsdp, args)
        for _ in range(options.steps + 2):
            start = time.perf_counter()
            yield [batch]
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)

    try:
        use_random_weights()
        held = Held()
        train(gpt2_fsdp, args, device, steps)
    except torch.OutOfMemoryError:
        os._exit(OUT_OF_MEMORY)  # at once: the other ranks wait, and torchrun ends them
    peak = torch.tensor(peak_memory())
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=ranks.cpu_group)
    if dist.get_rank() == 0:
        median = statistics.median(seconds[2:])
        samples = args.optim.batch_size * dist.get_world_size() / median
        sizes = {key.removesuffix("_bytes"): size / 1e6 for key, size in held.bytes.items()}
        measured = {"seconds": median, "samples_per_second": samples, "peak": peak.item()}
        print(json.dumps(measured | sizes))
    ranks.leave(0)


def launch(options: argparse.Namespace, directory: str, flags: list[str]) -> dict | None:
    """Return the result of a trial in a separate launch, or None without enough memory or time."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", str(options.processes), __file__]
    command += ["--steps", str(options.steps), "--memory-limit-gb", str(options.memory_limit_gb)]
    command += ["--trial", directory, json.dumps(flags)]
    pipe, environment = subprocess.PIPE, environment_for(options.processes)
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as run:
        try:
            output, errors = run.communicate(timeout=options.timeout)
        except subprocess.TimeoutExpired:
            run.terminate()  # torchrun ends its ranks
            run.communicate()
            return None
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if lines:
        return json.loads(lines[-1])
    if f"exitcode  : {OUT_OF_MEMORY}" in errors or "OutOfMemory" in errors or run.returncode < 0:
        return None
    raise SystemExit(f"{' '.join(flags)} failed:\n{errors[-3000:]}")


def largest_batch(options: argparse.Namespace, directory: str, flags: list[str]) -> tuple:
    """Find the largest batch per rank that fits, by doubling, then bisecting. Return it with its
    result."""
    results: dict[int, dict | None] = {}

    def fits(size: int) -> bool:
        results[size] = launch(options, directory, [*flags, "--batch-size", str(size)])
        print(
            f"  {' '.join(flags)} at {size}: {'fits' if results[size] else 'does not'}", flush=True
        )
        return results[size] is not None

    if not fits(1):
        return 0, None
    low = 1
    while low < options.max_batch_size and fits(2 * low):
        low *= 2
    high = 2 * low
    while high - low > 1 and low < options.max_batch_size:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, results[low]


def row(name: str, batch: int, result: dict | None, base: float | None) -> str:
    """Return a strategy's row of the table; `base` is the samples/s of DDP, or None."""
    if result is None:
        return f"| {name} | does not fit | | | | | | | |"
    sizes = " | ".join(f"{result[k]:,.1f}" for k in ("parameter", "gradient", "optimizer"))
    samples = result["samples_per_second"]
    relative = f"{samples / base:.2f}" if base else "-"
    return (f"| {name} | {batch} | {sizes} | {result['peak']:,.0f} | {result['seconds']:.3f} "
            f"| {samples:.1f} | {relative} |")  # fmt: skip


def main() -> None:
    """Run all trials and print a table, each row as soon as it is measured."""
    options = parse_args()
    if options.trial:
        return trial(options, options.trial[0], json.loads(options.trial[1]))
    gpu = torch.cuda.is_available()
    strategies = [["ddp"], ["shard_grad_op"], ["full_shard"]]
    if gpu:
        offload = ["--cpu-offload", "--fsdp", "2"]  # under FSDP1 it needs two GPUs
        strategies += [["shard_grad_op", *offload], ["full_shard", *offload]]
    if options.processes == 1:  # nothing is sharded, so shard_grad_op would repeat full_shard
        strategies = [strategy for strategy in strategies if strategy[0] != "shard_grad_op"]
    device = torch.cuda.get_device_name() if gpu else "CPU"
    print(f"\n{options.model}, blocks of {options.block_size}, {options.processes} x {device}, "
          f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}; MB of one rank")  # fmt: skip
    print("\n| strategy | batch per rank | parameters | gradients | optimizer | peak | s per step "
          "| samples/s | of DDP |\n|---|---|---|---|---|---|---|---|---|", flush=True)  # fmt: skip
    base = None
    with tempfile.TemporaryDirectory() as directory:
        write_gpt2(options.model, directory, options.block_size)
        for strategy in strategies:
            flags = ["--strategy", *strategy, "--block-size", str(options.block_size)]
            flags += ["--precision", options.precision]
            if gpu:
                batch, result = largest_batch(options, directory, flags)
            else:
                batch = options.batch_size
                result = launch(options, directory, [*flags, "--batch-size", str(batch)])
            if strategy == ["ddp"] and result:
                base = result["samples_per_second"]
            print(row(" ".join(strategy).replace("--", "+ "), batch, result, base), flush=True)


if __name__ == "__main__":
    main()
