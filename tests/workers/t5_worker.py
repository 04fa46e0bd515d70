"""Train T5 briefly in several ways in one process group under torchrun, for test_t5.py.

t5_worker.py OUTPUT.pt MODEL_DIRECTORY SHALLOW_DIRECTORY PAIRS.jsonl
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests")]

import torch
import torch.distributed as dist
from ten_steps import CORE_VARIANTS, compile_without_compiler, parse_args, run, strategy_flags
from ten_steps import ten_steps as run_ten_steps

import summarization_dataset
import T5_training
from core import checkpoint, ranks
from optional import rouge

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
              "0.5", "--weight-decay", "0.1", "--log-every", "1", "--eval-every", "0",
              "--save-every", "0", "--rouge-samples", "0", "--no-save-best"]  # fmt: skip
    # Sources have two lengths. Each graph takes seconds, so stacks have one block.
    compiled = ["--model-name", shallow, "--activation-checkpointing", "--no-group-by-length",
                "--num-train-samples", "36", "--batch-size", "2", "--source-length", "40",
                "--target-length", "8"]  # fmt: skip
    both = {name: [*compiled, name] for name in ("--no-compile", "--compile")}
    device = ranks.setup(7)
    results = {}
    for name, flags in (VARIANTS | both).items():
        args = parse_args(T5_training, [*common, *flags, "--output-dir", f"{output}.{name}"])
        results[name] = run_ten_steps(T5_training, args, device)

    # Train on eight samples until the model has memorized them.
    flags = ["--num-train-samples", "8", "--lr", "1e-2", "--lr-schedule", "constant",
             "--target-length", "12", "--max-steps", "150"]  # fmt: skip
    args = parse_args(T5_training, [*common, *flags, "--output-dir", f"{output}.overfitted"])
    _, seen = run(T5_training, args, device)
    newest = checkpoint.find_newest(args.run.output_dir / "checkpoints")
    val_sets = {"": seen["train_set"]}

    # Generate with that model. Of seven samples in batches of 2, one rank's last batch has none.
    flags += ["--rouge-samples", "7", "--batch-size", "2"]
    for precision in ("fp32", "bf16"):
        for strategy in ("full_shard", "shard_grad_op", "ddp", "fsdp2"):
            options = ["--precision", precision, *strategy_flags(strategy)]
            args = parse_args(T5_training, [*common, *flags, *options])
            model, blocks, tokenizer, source = T5_training.load_model(args, needs_weights=True)
            model = T5_training.wrap_model(args, device, model, blocks, source)
            checkpoint.load_weights(newest, model)
            collate = summarization_dataset.collator(model)
            triples = rouge.summarize(args, device, model, tokenizer, collate, val_sets)
            results[f"generated {precision} {strategy}"] = triples
    if dist.get_rank() == 0:
        torch.save(results, output)


if __name__ == "__main__":
    main()
    ranks.leave(0)
