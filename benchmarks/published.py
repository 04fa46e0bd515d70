"""Compare the estimator's peaks with published measurements on GPUs.

    python benchmarks/published.py  # prints a Markdown table; a minute on a CPU

A run has a row if its model, batch, flags and program are known, and if its figure is the allocated
or active memory at the peak, or the memory reserved with expandable segments. No row has float8,
offloaded activations, or an optimizer in the backward pass. Compiled runs recompute all blocks.
"""

import dataclasses
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from transformers import LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools import memory_estimator

UNITS = {"GB": 10**9, "GiB": 1 << 30}


def llama(*sizes: int, **others: bool) -> LlamaConfig:
    """Return a Llama config with these values of memory_estimator.LLAMA_KEYS."""
    values = dict(zip(memory_estimator.LLAMA_KEYS.split(), sizes, strict=True))
    return LlamaConfig(**values, max_position_embeddings=1 << 15, **others)


LLAMA_2_7B = llama(4096, 11008, 32, 32, 32, 32000)
LLAMA_3_8B = llama(4096, 14336, 32, 32, 8, 128256)
LLAMA_3_70B = llama(8192, 28672, 80, 64, 8, 128256)
LLAMA_3_3B = llama(3072, 8192, 28, 24, 8, 128256, tie_word_embeddings=True)
LONGCHAT_13B = llama(5120, 13824, 40, 40, 40, 32000)
CODE_LLAMA_34B = llama(8192, 22016, 48, 64, 8, 32000)
MISTRAL_7B = llama(4096, 14336, 32, 32, 8, 32000)


@dataclass
class Row:
    """A published measurement, and how its program differs from our scripts."""

    source: str
    run: str
    measured: float
    flags: str  # for tools/memory_estimator.py
    unit: str
    config: LlamaConfig
    logit_bytes: float  # bytes per logit at the peak of the loss
    strategy: str = "full_shard"
    offload: bool = False
    no_fsdp: bool = False  # one GPU without FSDP
    one_root: bool = True  # embeddings and head are in the root unit
    in_16_bits: bool = False  # trained weights, gradients and moments are not fp32
    selective: bool = False  # a recomputed block keeps every second matrix product
    outputs_stay: bool = False  # the cache and fp32 logits stay in the backward pass


# logit_bytes: fp32 logits, log-softmax, its gradient and that of the logits are 4 x 4 if `pred` or
# `output` keeps the logits (torchtitan in March 2024, fsdp_qlora), else 3 x 4 (torchtitan since,
# llama-cookbook, torchtune), and in bf16 4 x 2 (thunder's benchmark_litgpt.py). torchtune's chunked
# loss has all logits in bf16 and the gradient of one of 8 chunks, 2 + 2 / 8. in_16_bits:
# `model.to(dtype=torch.bfloat16)` in benchmark_litgpt.py, --pure_bf16, `dtype: bf16`.
RECOMPUTED = "--activation-checkpointing --seq-length"
SEVEN = f"{RECOMPUTED} 2048 --batch-size 8 --precision bf16-fp32-reduce"
EIGHT = f"{RECOMPUTED} 8192 --batch-size 2 --precision bf16-fp32-reduce --fsdp 2"
KEPT = "--no-activation-checkpointing --seq-length 4096"
LORA_8 = f"{RECOMPUTED} 2048 --batch-size 4 --gpus-per-node 4 --lora-rank 8 --attention eager"
LORA_64 = "--activation-checkpointing --gpus-per-node 2 --lora-rank 64 --seq-length"
PULL_165 = {"unit": "GiB", "config": LLAMA_2_7B, "logit_bytes": 16}
DECEMBER = {"unit": "GiB", "config": LLAMA_3_8B, "logit_bytes": 12, "selective": True}
THUNDER = {"unit": "GB", "logit_bytes": 8, "in_16_bits": True}
COOKBOOK = {"unit": "GB", "config": LLAMA_2_7B, "logit_bytes": 12, "in_16_bits": True}
QLORA = {"unit": "GiB", "config": LLAMA_2_7B, "logit_bytes": 16, "in_16_bits": True}
TUNE = {"unit": "GiB", "in_16_bits": True}
TITAN, LATER, LITGPT = "torchtitan#165", "torchtitan, December 2024", "lightning-thunder#1261"
COOKBOOK_41, TORCHTUNE = "llama-cookbook#41", "torchtune, README"
ROWS = [
    Row(TITAN, "Llama 2 7B, FSDP1, 8 GPUs, 8 x 2,048", 23.58, SEVEN, **PULL_165),
    Row(TITAN, "the same, selective recomputation", 50.35, SEVEN, selective=True, **PULL_165),
    Row(TITAN, "Llama 2 7B, FSDP2, 8 GPUs, 8 x 2,048", 22.73, f"{SEVEN} --fsdp 2", **PULL_165),
    Row(TITAN, "the same, selective recomputation", 49.54, f"{SEVEN} --fsdp 2", selective=True,
        **PULL_165),
    Row(LATER, "Llama 3.1 8B, FSDP2, 8 GPUs, 2 x 8,192, selective", 82.4, EIGHT, **DECEMBER),
    Row(LATER, "the same, 128 GPUs", 67.0, f"{EIGHT} --nodes 16", **DECEMBER),
    Row("lightning-thunder#940", "Llama 2 7B, FSDP2, ZeRO-2, 8 GPUs, 1 x 4,096, all kept", 47.45,
        f"{KEPT} --fsdp 2", config=LLAMA_2_7B, strategy="shard_grad_op", **THUNDER),
    Row(LITGPT, "vicuna 7B, FSDP1, compiled, 8 GPUs, 5 x 16,384", 51.0,
        f"{RECOMPUTED} 16384 --batch-size 5", config=LLAMA_2_7B, **THUNDER),
    Row(LITGPT, "LongChat 13B, the same, 3 x 16,384", 48.59,
        f"{RECOMPUTED} 16384 --batch-size 3", config=LONGCHAT_13B, **THUNDER),
    Row(LITGPT, "Code Llama 34B, the same, 1 x 16,384", 50.8,
        f"{RECOMPUTED} 16384", config=CODE_LLAMA_34B, **THUNDER),
    Row(LITGPT, "Mistral 7B, the same, 3 x 32,768", 64.63,
        f"{RECOMPUTED} 32768 --batch-size 3", config=MISTRAL_7B, **THUNDER),
    Row(COOKBOOK_41, "Llama 2 7B, LoRA 8, FSDP1, 4 GPUs, 4 x 2,048", 15.22, LORA_8, **COOKBOOK),
    Row(COOKBOOK_41, "the same, outputs are kept", 20.20, LORA_8, outputs_stay=True, **COOKBOOK),
    Row("fsdp_qlora", "Llama 2 7B, LoRA 64, FSDP1, 2 GPUs, 1 x 512", 8.28, f"{LORA_64} 512",
        **QLORA),
    Row("fsdp_qlora", "the same, 1 x 2,048", 9.16, f"{LORA_64} 2048", **QLORA),
    Row(TORCHTUNE, "Llama 3.1 70B, LoRA 16, FSDP2, compiled, 8 GPUs, 2 x 2,048", 27.6,
        f"{RECOMPUTED} 2048 --batch-size 2 --lora-rank 16", config=LLAMA_3_70B,
        logit_bytes=2.25, **TUNE),
    Row(TORCHTUNE, "Llama 3.1 70B, FSDP2, offload, compiled, 8 GPUs, 2 x 2,048", 13.9,
        f"{RECOMPUTED} 2048 --batch-size 2 --fsdp 2", config=LLAMA_3_70B, offload=True,
        one_root=False, logit_bytes=2.25, **TUNE),
    Row(TORCHTUNE, "Llama 3.2 3B, one GPU, 2 x 4,096, all kept", 60.0,
        f"{KEPT} --gpus-per-node 1 --batch-size 2", config=LLAMA_3_3B, no_fsdp=True,
        logit_bytes=12, **TUNE),
    Row(TORCHTUNE, "the same, compiled, chunked loss, recomputed", 24.9,
        f"{RECOMPUTED} 4096 --gpus-per-node 1 --batch-size 2", config=LLAMA_3_3B, no_fsdp=True,
        logit_bytes=2.25, **TUNE),
]  # fmt: skip


def estimate(row: Row) -> float:
    """Return the estimated peak memory of a GPU for a row, in its unit."""
    config = row.config
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        flags = ["--model-name", directory, *row.flags.split()]
        args = memory_estimator.parse_args(flags)
        model = memory_estimator.read_model(args)
    if row.one_root:  # embeddings, head and last norm are units of one weight
        root = [weight for unit in model.units if len(unit) == 1 for weight in unit]
        model.units = [root, *(unit for unit in model.units if len(unit) > 1)]
    tokens = args.batch_size * args.seq_length
    logits = tokens * config.vocab_size
    at_layers = tokens * config.num_hidden_layers
    keys = config.num_key_value_heads * config.head_dim
    loss = int(row.logit_bytes * logits)
    kept, block = model.activations, 0
    if args.activation_checkpointing:
        kept, block = model.stays, model.block
    if row.selective:
        # The first, third, fifth and last of a block's seven products (q, v, the MLP's gate and
        # output), and the attention with an fp32 sum per head: _save_list in torchtitan.
        width = 3 * config.hidden_size + keys + config.intermediate_size
        kept += at_layers * (2 * width + 4 * config.num_attention_heads)
    if row.outputs_stay:
        kept += at_layers * 2 * 2 * keys + 4 * logits
    elif row.source == COOKBOOK_41:  # the cache is kept until the loss is computed
        loss += at_layers * 2 * 2 * keys
    model = dataclasses.replace(model, chunked=False, logits=loss)
    recompute = args.activation_checkpointing
    terms = memory_estimator.memory(model, args, row.strategy, row.offload, recompute, "adamw")
    weights, gradients, moments = (terms[f"{x}_bytes"] for x in memory_estimator.TERMS[:3])
    if row.in_16_bits:  # frozen weights always are
        weights, gradients, moments = weights - gradients // 2, gradients // 2, moments // 2
    find_peak = memory_estimator.fsdp2_peak if args.fsdp == 2 else memory_estimator.fsdp1_peak
    states = [weights, gradients, moments]
    unsharded, _, total = find_peak(model, args, row.strategy, states, kept, block)
    if row.no_fsdp:
        total -= unsharded
    return total / UNITS[row.unit]


def compare() -> list[tuple[Row, float, float]]:
    """Return each row with its estimate and relative error."""
    estimates = [estimate(row) for row in ROWS]
    return [(row, ours, ours / row.measured - 1) for row, ours in zip(ROWS, estimates, strict=True)]


def main() -> None:
    """Print the table of all rows, the median error and the largest error."""
    print("| source | run | measured | estimated | error | bytes of a logit |")
    print("|---|---|---|---|---|---|")
    results = compare()
    for row, ours, error in results:
        print(f"| {row.source} | {row.run} | {row.measured:.2f} {row.unit} | {ours:.2f} | "
              f"{error:+.1%} | {row.logit_bytes:g} |")  # fmt: skip
    sizes = [abs(error) for *_, error in results]
    print(f"\nmedian error {statistics.median(sizes):.1%}, largest {max(sizes):.1%}")


if __name__ == "__main__":
    main()
