"""Memory that tools/memory_estimator.py says against figures that others measured on GPUs.

    python tests/published.py

Prints a markdown table, the median and the largest error; a minute on a CPU, no GPU, no download.

A run has a row if its model, batch, flags and program are known and the estimator has its kind, and
if the figure is what was allocated or active at the peak, or reserved in expandable segments:
otherwise far more is reserved than is active, a third more in torchtitan's pull request 165. So no
row has an optimizer in the backward pass, offloaded activations or float8, and only those that
recompute all blocks are compiled, since torch.compile decides what is kept of others.

A row's fields say what its program does otherwise than the scripts here; `estimate` has the
formulas, and comments beside the rows say where it is seen in the program.
"""

import dataclasses
import statistics
import tempfile
from dataclasses import dataclass

from transformers import LlamaConfig

from tools import memory_estimator

UNITS = {"GB": 10**9, "GiB": 1 << 30}
FAR = 0.25  # an error above this needs a reason


def llama(*sizes: int, **others: bool) -> LlamaConfig:
    """Return a Llama's config of these sizes: width, width of the MLP, layers, heads, heads of keys
    and values, words."""
    keys = memory_estimator.LLAMA_KEYS.split()
    sizes = dict(zip(keys, sizes, strict=True))
    return LlamaConfig(**sizes, max_position_embeddings=1 << 15, **others)


LLAMA_2_7B = llama(4096, 11008, 32, 32, 32, 32000)
LLAMA_3_8B = llama(4096, 14336, 32, 32, 8, 128256)
LLAMA_3_70B = llama(8192, 28672, 80, 64, 8, 128256)
LLAMA_3_3B = llama(3072, 8192, 28, 24, 8, 128256, tie_word_embeddings=True)
LONGCHAT_13B = llama(5120, 13824, 40, 40, 40, 32000)
CODE_LLAMA_34B = llama(8192, 22016, 48, 64, 8, 32000)
MISTRAL_7B = llama(4096, 14336, 32, 32, 8, 32000)


@dataclass
class Row:
    """A published figure, and what its program does otherwise than the scripts here."""

    source: str
    run: str
    measured: float
    unit: str
    config: LlamaConfig
    flags: str  # of tools/memory_estimator.py
    logit_bytes: float  # for each of the whole logits, when the loss holds the most
    strategy: str = "full_shard"
    offload: bool = False
    alone: bool = False  # one GPU without FSDP
    one_root: bool = True  # embeddings and head are in the root unit
    in_16_bits: bool = False  # all that is trained, its gradients and moments: no fp32 anywhere
    selective: bool = False  # a recomputed block keeps every second matrix product
    cache: bool = False  # keys and values of all layers stay until the loss is computed
    outputs_stay: bool = False  # they and the logits in fp32 stay in the backward pass, too
    others: str = ""  # what else is counted or not, in words
    reason: str = ""  # of an error above FAR


# Bytes for each logit where the loss holds the most:
# - train.py of torchtitan in March 2024 has fp32 logits, which `pred` keeps in the backward pass,
#   their log-softmax, its gradient, and theirs: 4 x 4. In December `del pred` leaves 3 x 4.
# - thunder's benchmark_litgpt.py has the same four in bf16, as `logits` stays: 4 x 2.
# - train.py of fsdp_qlora keeps `output`, whose logits Transformers made fp32: 4 x 4. Those of
#   llama-cookbook are gone where `outputs` is not kept: 3 x 4, and these once more where it is.
# - torchtune deletes its fp32 logits before the backward pass: 3 x 4. Its chunked loss has all
#   logits in bf16 and the gradient of one of 8 chunks: 2 + 2 / 8, as it is compiled.
# bf16 without fp32 copies: `model.to(dtype=torch.bfloat16)` in benchmark_litgpt.py, --pure_bf16 in
# llama-cookbook, `dtype: bf16` in torchtune's configs, --precision bf16 in fsdp_qlora.
SEVEN = "--batch-size 8 --seq-length 2048 --precision bf16-fp32-reduce --activation-checkpointing"
EIGHT = "--batch-size 2 --seq-length 8192 --precision bf16-fp32-reduce --activation-checkpointing"
PULL_165 = {"unit": "GiB", "config": LLAMA_2_7B, "logit_bytes": 16}
DECEMBER = {"unit": "GiB", "config": LLAMA_3_8B, "logit_bytes": 12, "selective": True}
THUNDER = {"unit": "GB", "logit_bytes": 8, "in_16_bits": True}
COOKBOOK = {"unit": "GB", "config": LLAMA_2_7B, "logit_bytes": 12, "in_16_bits": True}
COOKBOOK |= {"cache": True}
QLORA = {"unit": "GiB", "config": LLAMA_2_7B, "logit_bytes": 16, "in_16_bits": True}
TUNE = {"unit": "GiB", "in_16_bits": True}
SELECTED = "every second matrix product"
RESERVED = f"{SELECTED}; measured is what was reserved"
PURE = "bf16 states"
EAGER = f"{PURE}, keys and values; not the gradients of eager attention's scores"
RECOMPUTED = "--activation-checkpointing --seq-length"
ROWS = [
    Row("torchtitan#165", "Llama 2 7B, FSDP1, 8 GPUs, 8 x 2,048", 23.58,
        flags=SEVEN, **PULL_165),
    Row("torchtitan#165", "the same, selective recomputation", 50.35,
        flags=SEVEN, others=SELECTED, selective=True, **PULL_165),
    Row("torchtitan#165", "Llama 2 7B, FSDP2, 8 GPUs, 8 x 2,048", 22.73,
        flags=f"{SEVEN} --fsdp 2", **PULL_165),
    Row("torchtitan#165", "the same, selective recomputation", 49.54,
        flags=f"{SEVEN} --fsdp 2", others=SELECTED, selective=True, **PULL_165),
    Row("torchtitan, December 2024", "Llama 3.1 8B, FSDP2, 8 GPUs, 2 x 8,192, selective", 82.4,
        flags=f"{EIGHT} --fsdp 2", others=RESERVED, **DECEMBER),
    Row("torchtitan, December 2024", "the same, 128 GPUs", 67.0,
        flags=f"{EIGHT} --fsdp 2 --nodes 16", others=RESERVED, **DECEMBER),
    Row("lightning-thunder#940", "Llama 2 7B, FSDP2, ZeRO-2, 8 GPUs, 1 x 4,096, all kept", 47.45,
        config=LLAMA_2_7B, flags="--fsdp 2 --seq-length 4096 --no-activation-checkpointing",
        strategy="shard_grad_op", others=f"{PURE}; not that q, k and v are one tensor", **THUNDER),
    Row("lightning-thunder#1261", "vicuna 7B, FSDP1, compiled, 8 GPUs, 5 x 16,384", 51.0,
        config=LLAMA_2_7B, flags=f"{RECOMPUTED} 16384 --batch-size 5", others=PURE, **THUNDER),
    Row("lightning-thunder#1261", "LongChat 13B, the same, 3 x 16,384", 48.59,
        config=LONGCHAT_13B, flags=f"{RECOMPUTED} 16384 --batch-size 3", others=PURE, **THUNDER),
    Row("lightning-thunder#1261", "Code Llama 34B, the same, 1 x 16,384", 50.8,
        config=CODE_LLAMA_34B, flags=f"{RECOMPUTED} 16384", others=PURE, **THUNDER),
    Row("lightning-thunder#1261", "Mistral 7B, the same, 3 x 32,768", 64.63,
        config=MISTRAL_7B, flags=f"{RECOMPUTED} 32768 --batch-size 3", others=PURE, **THUNDER),
    Row("llama-cookbook#41", "Llama 2 7B, LoRA 8, FSDP1, 4 GPUs, 4 x 2,048", 15.22,
        flags=f"{RECOMPUTED} 2048 --batch-size 4 --gpus-per-node 4 --lora-rank 8 --attention eager",
        others=EAGER, **COOKBOOK),
    Row("llama-cookbook#41", "the same, outputs are kept", 20.20,
        flags=f"{RECOMPUTED} 2048 --batch-size 4 --gpus-per-node 4 --lora-rank 8 --attention eager",
        others=EAGER, outputs_stay=True, **COOKBOOK),
    Row("fsdp_qlora", "Llama 2 7B, LoRA 64, FSDP1, 2 GPUs, 1 x 512", 8.28,
        flags=f"{RECOMPUTED} 512 --gpus-per-node 2 --lora-rank 64", others=PURE, **QLORA),
    Row("fsdp_qlora", "the same, 1 x 2,048", 9.16,
        flags=f"{RECOMPUTED} 2048 --gpus-per-node 2 --lora-rank 64", others=PURE, **QLORA),
    Row("torchtune, README", "Llama 3.1 70B, LoRA 16, FSDP2, compiled, 8 GPUs, 2 x 2,048", 27.6,
        config=LLAMA_3_70B, flags=f"{RECOMPUTED} 2048 --batch-size 2 --lora-rank 16",
        logit_bytes=2.25, others=PURE, **TUNE),
    Row("torchtune, README", "Llama 3.1 70B, FSDP2, offload, compiled, 8 GPUs, 2 x 2,048", 13.9,
        config=LLAMA_3_70B, flags=f"{RECOMPUTED} 2048 --batch-size 2 --fsdp 2", offload=True,
        one_root=False, logit_bytes=2.25, others=PURE, **TUNE),
    Row("torchtune, README", "Llama 3.2 3B, one GPU, 2 x 4,096, all kept", 60.0,
        config=LLAMA_3_3B, alone=True, others=PURE, logit_bytes=12, **TUNE,
        flags="--no-activation-checkpointing --gpus-per-node 1 --seq-length 4096 --batch-size 2"),
    Row("torchtune, README", "the same, compiled, chunked loss, recomputed", 24.9,
        config=LLAMA_3_3B, alone=True, others=PURE, logit_bytes=2.25, **TUNE,
        flags=f"{RECOMPUTED} 4096 --gpus-per-node 1 --batch-size 2"),
]  # fmt: skip


def estimate(row: Row) -> float:
    """Return the peak of a GPU's memory, in the row's unit."""
    config = row.config
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        args = memory_estimator.parse_args(["--model-name", directory, *row.flags.split()])
        model = memory_estimator.read_model(args)
    if row.one_root:  # units of a single weight are the embeddings, the head, and the last norm
        root = [weight for unit in model.units if len(unit) == 1 for weight in unit]
        model.units = [root, *(unit for unit in model.units if len(unit) > 1)]
    tokens = args.batch_size * args.seq_length
    logits = tokens * config.vocab_size
    at_layers = tokens * config.num_hidden_layers
    keys = config.num_key_value_heads * config.head_dim
    loss = int(row.logit_bytes * logits)
    kept, block = model.activations, 0
    if args.activation_checkpointing:
        kept, block = model.stays[True], model.block[True]
    if row.selective:
        # Of a block's seven products the first, third, fifth and last, which are q, v, the MLP's
        # gate and its output, and the attention with a sum in fp32 for each head (_save_list in
        # torchtitan's parallelize_llama.py).
        width = 3 * config.hidden_size + keys + config.intermediate_size
        kept += at_layers * (2 * width + 4 * config.num_attention_heads)
    if row.outputs_stay:
        kept += at_layers * 2 * 2 * keys + 4 * logits
    elif row.cache:  # the default of Transformers (llama-cookbook's pull request 165)
        loss += at_layers * 2 * 2 * keys
    model = dataclasses.replace(model, chunked=False, logits=loss)
    recompute = args.activation_checkpointing
    terms = memory_estimator.memory(model, args, row.strategy, row.offload, recompute, "adamw")
    weights, gradients, moments = (
        terms[f"{name}_bytes"] for name in ("parameter", "gradient", "optimizer")
    )
    if row.in_16_bits:  # frozen weights are so anyway
        weights, gradients, moments = weights - gradients // 2, gradients // 2, moments // 2
    peak = memory_estimator.fsdp2_peak if args.fsdp == 2 else memory_estimator.fsdp1_peak
    states = [weights, gradients, moments]
    whole, _, total = peak(model, args, row.strategy, states, kept, block)
    if row.alone:
        total -= whole
    return total / UNITS[row.unit]


def errors() -> list[tuple[Row, float, float]]:
    """Return the rows with their estimates and relative errors."""
    found = []
    for row in ROWS:
        ours = estimate(row)
        found.append((row, ours, ours / row.measured - 1))
    return found


def main() -> None:
    """Print the table, and how far off the estimates are."""
    print("| source | run | measured | estimated | error | bytes of a logit | counted besides |")
    print("|---|---|---|---|---|---|---|")
    found = errors()
    for row, ours, error in found:
        cells = [row.source, row.run, f"{row.measured:.2f} {row.unit}", f"{ours:.2f}"]
        cells += [f"{error:+.1%}", f"{row.logit_bytes:g}"]
        cells.append("; ".join(filter(None, [row.others, row.reason])))
        print(f"| {' | '.join(cells)} |")
    sizes = [abs(error) for *_, error in found]
    print(f"\nmedian error {statistics.median(sizes):.1%}, largest {max(sizes):.1%}")


if __name__ == "__main__":
    main()
