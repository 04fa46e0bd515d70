"""Measure tokens/s, MFU and peak memory of a 7B Llama on one GPU, for ours and the Trainer.

    python benchmarks/one_gpu.py                                   # bf16, length 4096, 110 GB
    python benchmarks/one_gpu.py --lora-rank 16                    # frozen weights in bf16, 20 GB
    python benchmarks/one_gpu.py --model tiny --length 256         # on a CPU, to check that it runs

The model has random fp32 weights, AdamW and sequences of one document.
MFU divides the FLOPs that the model needs by the datasheet's peak, and by the speed of a bf16
matrix product measured in the same process. The two
programs do not fit into memory together, so they run in separate launches that take turns. The
table shows the launch with the median step. Adapters, on all projections of the blocks, are fp32.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
import warnings

import torch
import transformers
from common import (
    ENDLESS,
    Steps,
    launch,
    limit_memory,
    parse,
    random_batch,
    train,
    use_random_weights,
    write_config,
)
from transformers import LlamaConfig

import llama_fsdp
from core import ranks
from core.weights import unwrapped
from tools import memory_estimator

# Peak TFLOP/s in dense bf16 by GPU name: half of the figures with sparsity in NVIDIA's data sheets.
PEAK_TFLOPS = {
    "NVIDIA A100-SXM4-40GB": 312, "NVIDIA A100-SXM4-80GB": 312, "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H200": 989, "NVIDIA B200": 2250, "NVIDIA L40S": 362,
}  # fmt: skip


def flops_per_token(config: LlamaConfig, length: int, frozen: bool) -> int:
    """Return the FLOPs of a token's forward and backward pass in a document of `length` tokens.

    They are 6 N + 12 L d T (Chowdhery et al. 2022, PaLM, appendix B): N are the weights that a
    token is multiplied with, L the layers, d the hidden size, T the length. Recomputation does not
    count. `frozen` weights below adapters have no gradients: 4 N.
    """
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    weights = sum(
        p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n
    )
    attention = 12 * config.num_hidden_layers * config.hidden_size * length
    return (4 if frozen else 6) * weights + attention


def matmul_tflops(size: int) -> float:
    """Return the TFLOP/s of a square matrix product in bf16, the median of 20 measurements."""
    left, right = torch.randn(2, size, size, device="cuda", dtype=torch.bfloat16)
    seconds = []
    for _ in range(25):
        torch.cuda.synchronize()
        start = time.perf_counter()
        left @ right
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(seconds[5:]) / 1e12


def peak_mb() -> float:
    """Return the peak of CUDA's allocator in MB (10^6 bytes), or 0 on a CPU."""
    return torch.cuda.max_memory_allocated() / 1e6 if torch.cuda.is_available() else 0.0


def ours(options: argparse.Namespace, directory: str) -> dict[str, float]:
    """Run steps of llama_fsdp.py; return median seconds, TFLOP/s, peak memory and attention."""
    flags = ["--model-name", directory, "--attention", options.attention, "--max-seq-length",
             options.length, "--batch-size", options.batch_size, "--lora-rank", options.lora_rank,
             "--output-dir", f"{directory}/ours", *ENDLESS]  # fmt: skip
    for name in ("compile", "load_in_4bit", "activation_checkpointing"):
        prefix = "--" if getattr(options, name) else "--no-"
        flags.append(prefix + name.replace("_", "-"))
    args = parse(llama_fsdp, *flags)
    device = ranks.setup(args.run.timeout_minutes)
    limit_memory(device, options.memory_limit_gb)
    seconds: list[float] = []
    gpu = device.type == "cuda"
    result = {"matmul_tflops": matmul_tflops(8192)} if gpu else {}
    use_random_weights()

    def steps(_: Steps) -> Steps:
        for _ in range(options.steps + 2):
            start = time.perf_counter()
            yield [random_batch(llama_fsdp, args)]  # inside the timing, like the Trainer's loader
            if gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)

    config = unwrapped(train(llama_fsdp, args, device, steps)).config
    median, tokens = statistics.median(seconds[2:]), options.batch_size * options.length
    flops = flops_per_token(config, options.length, options.lora_rank > 0)
    result["tflops_per_gpu"] = tokens / median * flops / 1e12
    name = torch.cuda.get_device_name() if gpu else "cpu"
    result["assumed_peak_tflops"] = PEAK_TFLOPS.get(name, math.inf)
    kernel = config._attn_implementation
    return result | {"seconds": median, "peak_mb": peak_mb(), "attention": kernel}


def trainer(options: argparse.Namespace, directory: str) -> dict[str, float]:
    """Run the Trainer on the same shape, in bf16 autocast with fused AdamW; return the same."""
    warnings.filterwarnings("ignore")
    gpu, seconds = torch.cuda.is_available(), []
    config = transformers.AutoConfig.from_pretrained(directory)
    config.use_cache = False
    with torch.device("cuda" if gpu else "cpu"):
        model = transformers.LlamaForCausalLM(config)
    if options.lora_rank:
        import peft

        how = peft.LoraConfig(r=options.lora_rank, target_modules="all-linear")
        model = peft.get_peft_model(model.bfloat16() if gpu else model, how)
    if gpu:
        torch.cuda.reset_peak_memory_stats()  # without the peak of the fp32 model
    rows = [{"input_ids": torch.randint(3, 256, (options.length,))} for _ in range(8)]
    rows = [row | {"labels": row["input_ids"]} for row in rows]
    args = transformers.TrainingArguments(
        output_dir=f"{directory}/trainer", max_steps=options.steps + 2, report_to=[],
        per_device_train_batch_size=options.batch_size, save_strategy="no", disable_tqdm=True,
        bf16=gpu, use_cpu=not gpu, logging_steps=25,
        gradient_checkpointing=options.activation_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        optim="adamw_torch_fused" if gpu else "adamw_torch",
    )  # fmt: skip

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: object, **options: object) -> None:
            if gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter())

    transformers.Trainer(model, args, train_dataset=rows, callbacks=[Clock()]).train()
    steps = [end - start for start, end in zip(seconds[1:], seconds[2:], strict=False)]
    return {"seconds": statistics.median(steps), "peak_mb": peak_mb(), "attention": "sdpa"}


LOOPS = {"ours": ours, "trainer": trainer}


def main() -> None:
    """Print a table with a row per loop."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    load = memory_estimator.load_config
    names = [n for n in memory_estimator.BUILT_IN if load(n).model_type == "llama"]
    parser.add_argument("--model", choices=names, default="llama-2-7b", help="shape of Llama")
    parser.add_argument("--length", type=int, default=4096, help="tokens in a sequence")
    parser.add_argument("--batch-size", type=int, default=1, help="sequences in a step")
    parser.add_argument("--attention", default="auto", help="as in llama_fsdp.py")
    parser.add_argument("--compile", action="store_true", help="pass --compile to ours")
    parser.add_argument("--lora-rank", type=int, default=0, help="train adapters (0: all weights)")
    parser.add_argument("--load-in-4bit", action="store_true", help="frozen projections, of ours")
    parser.add_argument("--activation-checkpointing", action=argparse.BooleanOptionalAction,
        default=True, help="recompute the blocks")  # fmt: skip
    parser.add_argument("--memory-limit-gb", type=float, default=0, help="for ours (0: no limit)")
    parser.add_argument("--loops", nargs="+", choices=list(LOOPS), default=list(LOOPS))
    parser.add_argument("--steps", type=int, default=10, help="timed steps per launch")
    parser.add_argument("--turns", type=int, default=3, help="launches of each loop")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)  # loop, directory
    options = parser.parse_args()
    if options.worker:
        loop, directory = options.worker
        print(json.dumps(LOOPS[loop](options, directory)))
        ranks.end(0)
    print(f"{options.model}, {options.batch_size} x {options.length} tokens a step\n", flush=True)
    results: dict[str, list[dict]] = {loop: [] for loop in options.loops}
    with tempfile.TemporaryDirectory() as directory:
        write_config(options.model, directory)
        for _ in range(options.turns):
            for loop, launches in results.items():
                launches.append(launch(1, __file__, *sys.argv[1:], "--worker", loop, directory))
                print(f"a launch of {loop}: {launches[-1]['seconds']:.3f} s per step", flush=True)
    print_table(options, results)


def print_table(options: argparse.Namespace, results: dict[str, list[dict]]) -> None:
    """Print the launch with the median step of each loop. FLOPs are those of ours, because both
    need the same."""
    columns = "attention | s per step | tokens/s | TFLOP/s | MFU | of the matmul | peak, MB"
    print(f"\n| loop | {columns} |")
    print("|---|---|---|---|---|---|---|---|")
    medians = {
        loop: sorted(launches, key=lambda r: r["seconds"])[len(launches) // 2]
        for loop, launches in results.items()
    }
    first, tokens = medians.get("ours", {}), options.batch_size * options.length
    for loop, r in medians.items():
        tflops = first.get("tflops_per_gpu", 0.0) * first.get("seconds", 0.0) / r["seconds"]
        shares = [tflops / first.get(key, float("inf"))
                  for key in ("assumed_peak_tflops", "matmul_tflops")]  # fmt: skip
        print(
            f"| {loop} | {r['attention']} | {r['seconds']:.3f} | {tokens / r['seconds']:,.0f} | "
            f"{tflops:.1f} | {shares[0]:.3f} | {shares[1]:.3f} | {r['peak_mb']:,.0f} |"
        )
    if "matmul_tflops" in first:
        print(f"\na matmul of 8192 x 8192 in bf16: {first['matmul_tflops']:.0f} TFLOP/s; "
              f"datasheet: {first.get('assumed_peak_tflops', 'unknown')}")  # fmt: skip


if __name__ == "__main__":
    main()
