"""Compare the estimator's peaks with published measurements on GPUs, in published.csv.

    python benchmarks/published.py  # prints a Markdown table; a minute on a CPU

A run has a row if its model, batch, flags and program are known, and if its figure is the allocated
or active memory at the peak, or the memory reserved with expandable segments. No row has float8,
offloaded activations, or an optimizer in the backward pass. Compiled runs recompute all blocks.

Bytes of a logit: fp32 logits, log-softmax, its gradient and that of the logits are 4 x 4 if `pred`
or `output` keeps the logits (torchtitan in March 2024, fsdp_qlora), else 3 x 4 (torchtitan since,
llama-cookbook, torchtune), and in bf16 4 x 2 (thunder's benchmark_litgpt.py). torchtune's chunked
loss has all logits in bf16 and the gradient of one of 8 chunks, 2 + 2 / 8.

Differences of the program from our scripts:
- 16-bit-states: trained weights, gradients and moments are not fp32
- selective: a recomputed block keeps half of the matrix products
- own-head: embeddings and head are not in the root unit
- no-fsdp: one GPU without FSDP
- cache: keys and values are kept until the loss; outputs: they and fp32 logits, in the backward too
"""

import csv
import sys
import tempfile
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools import memory_estimator

UNITS = {"GB": 10**9, "GiB": 1 << 30}
SIZES = """
llama  llama-2-7b      4096  11008  32  32  32   32000
llama  llama-3-8b      4096  14336  32  32   8  128256
llama  llama-3-70b     8192  28672  80  64   8  128256
llama  llama-3-3b      3072   8192  28  24   8  128256
llama  longchat-13b    5120  13824  40  40  40   32000
llama  code-llama-34b  8192  22016  48  64   8   32000
llama  mistral-7b      4096  14336  32  32   8   32000
"""
LINES = {line.split()[1]: line for line in SIZES.strip().splitlines()}


def estimate(row: dict[str, str]) -> float:
    """Return the estimated peak memory of a GPU for a row, in its unit."""
    differences = row["differences"].split()
    is_tied = row["model"] == "llama-3-3b"
    others = {"max_position_embeddings": 1 << 15, "tie_word_embeddings": is_tied}
    config = memory_estimator.new_config(LINES[row["model"]], **others)
    args = memory_estimator.parse_args(row["flags"].split())
    if "recomputed" in differences:
        args.activation_checkpointing = "selective" if "selective" in differences else "blocks"
    args.cpu_offload = "offload" in differences
    if "shard_grad_op" in differences:
        args.strategy = "shard_grad_op"
    with tempfile.TemporaryDirectory() as args.model_name:
        config.save_pretrained(args.model_name)
        model = memory_estimator.Model(args)
    if "own-head" not in differences:  # embeddings, head and last norm are units of one weight
        root = [weight for unit in model.units if len(unit) == 1 for weight in unit]
        model.units = [root, *(unit for unit in model.units if len(unit) > 1)]
    tokens = args.batch_size * args.seq_length
    keys = config.num_key_value_heads * config.head_dim
    cache = 2 * 2 * keys * tokens * config.num_hidden_layers  # keys and values, 2 bytes each
    kept, block = model.activations[args.activation_checkpointing]
    model.loss = int(float(row["logit_bytes"]) * tokens * config.vocab_size)
    if "outputs" in differences:
        kept += cache + 4 * tokens * config.vocab_size
    if "cache" in differences:
        model.loss += cache
    model.activations[args.activation_checkpointing] = kept, block
    if "16-bit-states" in differences:  # frozen weights always are
        model.state_itemsize = 2
        for unit in model.units:
            unit[:] = [weight._replace(held=weight.held - 2 * weight.trained) for weight in unit]
    sizes = memory_estimator.memory(model, args)
    peak = sizes["total_bytes"]
    if "no-fsdp" in differences:
        peak -= sizes["unsharded_bytes"]
    return peak / UNITS[row["unit"]]


def compare() -> list[tuple[dict[str, str], float, float]]:
    """Return each row with its estimate and relative error."""
    results = []
    with Path(__file__).with_suffix(".csv").open() as file:
        for row in csv.DictReader(file, delimiter=";"):
            ours = estimate(row)
            results.append((row, ours, ours / float(row["measured"]) - 1))
    return results


def main() -> None:
    """Print the table of all rows, the median error and the largest error."""
    print("| source | run | measured | estimated | error | bytes of a logit |")
    print("|---|---|---|---|---|---|")
    results = compare()
    for row, ours, error in results:
        figures = f"{row['measured']} {row['unit']} | {ours:.2f} | {error:+.1%}"
        print(f"| {row['source']} | {row['run']} | {figures} | {row['logit_bytes']} |")
    errors = [abs(error) for _, _, error in results]
    print(f"\nmedian error {median(errors):.1%}, largest {max(errors):.1%}")


if __name__ == "__main__":
    main()
