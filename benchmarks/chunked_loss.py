"""Time and peak memory of GPT-2's loss, with all the logits at once and in chunks.

    python benchmarks/chunked_loss.py [--tokens 2048] [--width 768] [--vocabulary 50257]

Forward and backward of head and cross-entropy, each variant in a process of its own, because peak
RSS never falls; they take turns three times, and medians are printed.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

VARIANTS = ["plain"]
if hasattr(F, "linear_cross_entropy"):  # since torch 2.13
    VARIANTS += ["auto", "256", "512", "1024", "2048"]


def measure(variant: str, tokens: int, width: int, vocabulary: int) -> dict[str, float]:
    """Measure seconds, growth of the peak in MB (10^6 bytes), and the loss per token."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, device=device, dtype=dtype) * 0.02
    weight.requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), device=device)

    def peak() -> float:
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 1e6
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1.024e-3

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before, seconds = peak(), []
    for _ in range(3):
        start = time.perf_counter()
        if variant == "plain":
            loss = F.cross_entropy((hidden @ weight.T).float(), targets, reduction="sum")
        else:
            size = {} if variant == "auto" else {"chunking_method": None}
            size |= {} if variant == "auto" else {"batch_chunk_size": int(variant)}
            options = nn.LinearCrossEntropyOptions(**size)
            how = "sum" if dtype == torch.float32 else "none"  # as in the scripts
            losses = F.linear_cross_entropy(hidden, weight, targets, reduction=how, options=options)
            loss = losses.sum(dtype=torch.float32)
        loss.backward()
        hidden.grad = weight.grad = None
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {"seconds": min(seconds), "mb": peak() - before, "loss": loss.item() / tokens}


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048, help="of a batch")
    parser.add_argument("--width", type=int, default=768, help="of the hidden states")
    parser.add_argument("--vocabulary", type=int, default=50257, help="size")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant:
        print(json.dumps(measure(args.variant, args.tokens, args.width, args.vocabulary)))
        return
    results: dict[str, list[dict]] = {variant: [] for variant in VARIANTS}
    for _ in range(3):
        for variant, found in results.items():
            command = [sys.executable, *sys.argv, "--variant", variant]
            found.append(json.loads(subprocess.check_output(command)))
    print(f"{args.tokens} x {args.width} x {args.vocabulary}, torch {torch.__version__}\n")
    print("| chunk | s | of plain | MB above inputs | loss per token |\n|---|---|---|---|---|")
    base = statistics.median(found["seconds"] for found in results["plain"])
    for variant, found in results.items():
        seconds = statistics.median(result["seconds"] for result in found)
        peak = statistics.median(result["mb"] for result in found)
        loss = found[0]["loss"]
        print(f"| {variant} | {seconds:.2f} | {seconds / base:.2f} | {peak:,.0f} | {loss:.6f} |")


if __name__ == "__main__":
    main()
