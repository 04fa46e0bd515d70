"""Train T5 briefly in several ways in one process group under torchrun, for test_t5.py.

t5_worker.py OUTPUT.pt MODEL_DIRECTORY SHALLOW_DIRECTORY PAIRS.jsonl
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests")]

import torch
import torch.distributed as dist
from ten_steps import CORE_VARIANTS, compile_without_compiler, strategy_flags, ten_steps

import T5_training
from benchmarks.driven import Driven, parse_flags
from runtime import checkpoints
from runtime.run import prepare_directory

VARIANTS = CORE_VARIANTS | {
    "bf16": ["--precision", "bf16"],
    "fsdp2_bf16": ["--precision", "bf16", "--fsdp", "2"],
}


def main() -> None:
    """Write rank 0's results of each variant to the first argument."""
    compile_without_compiler()
    output, model, shallow, data = sys.argv[1:]
    common = ["--model-name", model, "--dataset", data, "--num-train-samples", "0", "--precision",
              "fp32", "--lr", "1e-3", "--batch-size", "4", "--max-steps", "10", "--max-grad-norm",
              "0.5", "--output-dir", f"{output}.run", "--weight-decay", "0.1"]  # fmt: skip
    args = parse_flags(T5_training, common)
    device = T5_training.setup(args)
    prepare_directory(Path(args.output_dir))
    results = {}
    for name, flags in VARIANTS.items():
        args = parse_flags(T5_training, [*common, *flags])
        results[name], _ = ten_steps(T5_training, args, device)

    # Sources have two lengths. Each graph takes seconds, so stacks have one block.
    flags = ["--model-name", shallow, "--activation-checkpointing", "--no-group-by-length",
             "--num-train-samples", "36", "--batch-size", "2", "--source-length", "40",
             "--target-length", "8"]  # fmt: skip
    for name in ("--no-compile", "--compile"):
        args = parse_flags(T5_training, [*common, *flags, name])
        results[name], _ = ten_steps(T5_training, args, device)

    # Train on one batch until the model has memorized it.
    flags = ["--num-train-samples", "8", "--lr", "1e-2", "--lr-schedule", "constant",
             "--target-length", "12", "--max-steps", "400"]  # fmt: skip
    args = parse_flags(T5_training, [*common, *flags])
    driven = Driven(T5_training, args, device)
    batch = [driven.batch()]
    for _ in range(400):
        loss, _ = driven.step(batch)
        dist.all_reduce(loss)
        if loss < 0.05:
            break
    results["overfitted"] = loss.item()
    best = driven.save()

    # Generate with that model. Of seven samples in batches of 2, one rank's last batch has none.
    flags += ["--rouge-samples", "7", "--batch-size", "2"]
    for precision in ("fp32", "bf16"):
        for strategy in ("full_shard", "shard_grad_op", "ddp", "fsdp2"):
            options = ["--precision", precision, *strategy_flags(strategy)]
            args = parse_flags(T5_training, [*common, *flags, *options])
            driven = Driven(T5_training, args, device)
            checkpoints.load_weights(best, driven.model)
            driven.loader.batch_sampler.seed = None  # no shuffling
            loaders = {"": driven.loader}
            triples = T5_training.summarize(
                args, device, driven.model, driven.facts.tokenizer, loaders
            )
            results[f"generated {precision} {strategy}"] = triples
    if dist.get_rank() == 0:
        torch.save(results, output)
    T5_training.cleanup()


if __name__ == "__main__":
    main()
    os._exit(0)  # as the scripts do
