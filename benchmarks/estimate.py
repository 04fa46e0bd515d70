"""Compare the memory that the estimator predicts with the memory of a training step.

    python benchmarks/estimate.py                              # the tiny models, two CPU processes
    python benchmarks/estimate.py --models gpt2-large llama-2-7b --processes 1       # one GPU
    python benchmarks/estimate.py --models gpt2-large --processes 8 --strategies full_shard

`--models` are built-in names of the estimator. The table shows MB (10^6 bytes) of one rank, as
estimated / measured: parameters, gradients and AdamW's moments, and on GPUs the total, measured as
the allocator's peak. Weights and full-length batches are random, so no files are needed. Adapters
are trained under FSDP2.
"""

import argparse
import importlib
import json
import tempfile

import torch
import torch.distributed as dist
from common import (
    ENDLESS,
    LENGTH,
    Held,
    Steps,
    launch,
    parse,
    random_batch,
    train,
    use_random_weights,
    write_config,
)

from core import ranks
from tools import memory_estimator

TERMS = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")


def worker(script_name: str, flags: list[str]) -> None:
    """Make two steps; rank 0 prints its bytes by kind, and the peak, as JSON."""
    script = importlib.import_module(script_name)
    args = parse(script, *flags, "--dataset", "docstrings.jsonl", *ENDLESS)
    device = ranks.setup(args.run.timeout_minutes)
    use_random_weights()
    held, batch = Held(), random_batch(script, args)

    def steps(_: Steps) -> Steps:
        yield [batch]
        if device.type == "cuda":  # the first step starts without moments
            torch.cuda.reset_peak_memory_stats()
            yield [batch]

    train(script, args, device, steps)
    if device.type == "cuda":
        held.bytes["peak_bytes"] = torch.cuda.max_memory_allocated()
    if dist.get_rank() == 0:
        print(json.dumps(held.bytes))
    ranks.leave(0)


def compare(options: argparse.Namespace, name: str, strategy: str, recompute: bool) -> list[str]:
    """Return a row of the table, with cells such as 12.3 / 12.5 (estimated / measured)."""
    config = memory_estimator.load_config(name)
    script = memory_estimator.SCRIPTS[config.model_type]
    gpu = torch.cuda.is_available()
    switch = f"--{'' if recompute else 'no-'}activation-checkpointing"
    common = ["--batch-size", str(options.batch_size), switch]
    if options.lora_rank:
        common += ["--lora-rank", str(options.lora_rank)]
    if options.load_in_4bit:
        common.append("--load-in-4bit")
    precision = "bf16" if gpu else "fp32"
    args = memory_estimator.parse_args(
        ["--model-name", name, "--gpus-per-node", str(options.processes), "--precision", precision,
         "--seq-length", str(options.seq_length), *common]
    )  # fmt: skip
    model = memory_estimator.read_model(args)
    choice = (strategy, False, recompute, "adamw")
    expected = memory_estimator.estimate(model, args, *choice)
    with tempfile.TemporaryDirectory() as directory:
        write_config(name, directory)
        flags = ["--model-name", directory, "--precision", precision, "--strategy", strategy,
                 LENGTH[script], str(args.seq_length), "--output-dir", f"{directory}/run",
                 *common]  # fmt: skip
        if script == "T5_training":
            flags += ["--target-length", str(args.target_length)]
        measured = launch(options.processes, __file__, "--worker", script, json.dumps(flags))
    cells = [f"{expected[term] / 1e6:,.2f} / {measured[term] / 1e6:,.2f}" for term in TERMS]
    if gpu:
        total, peak = expected["total_bytes"], measured["peak_bytes"]
        cells += [f"{total / 1e6:,.0f} / {peak / 1e6:,.0f}", f"{total / peak:.3f}"]
    return [name, strategy, "yes" if recompute else "no", *cells]


def main() -> None:
    """Print a table with a row for each model, strategy and recomputation."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(memory_estimator.BUILT_IN)
    tiny = ["tiny-t5", "tiny-gpt2", "tiny"]
    parser.add_argument("--models", nargs="+", choices=names, default=tiny)
    parser.add_argument("--strategies", nargs="+", default=["ddp", "shard_grad_op", "full_shard"])
    parser.add_argument("--processes", type=int, default=2, help="ranks, one per GPU")
    parser.add_argument("--batch-size", type=int, default=1, help="sequences per rank")
    parser.add_argument("--seq-length", type=int, default=0, help="tokens (0: the script's)")
    parser.add_argument("--lora-rank", type=int, default=0, help="train adapters (0: all weights)")
    parser.add_argument("--load-in-4bit", action="store_true", help="frozen projections in NF4")
    parser.add_argument("--recomputed", action="store_true", help="only with recomputation")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)  # script, flags as JSON
    options = parser.parse_args()
    if options.worker:
        worker(options.worker[0], json.loads(options.worker[1]))
        return
    print("| model | strategy | recomputed | parameters | gradients | moments "
          + ("| peak | ratio |" if torch.cuda.is_available() else "|"))  # fmt: skip
    print("|---|---|---|---|---|---|" + "---|---|" * torch.cuda.is_available())
    for name in options.models:
        for strategy in options.strategies:
            # Recomputation changes only activations, which are measured on GPUs.
            both = torch.cuda.is_available() and not options.recomputed
            for recompute in (False, True) if both else (options.recomputed,):
                row = compare(options, name, strategy, recompute)
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
