"""Communication of the ranks besides FSDP's parameters and gradients, and how it grows.

    python benchmarks/growth.py                          # on 2, 4 and 8 CPU processes, 4 minutes
    python benchmarks/growth.py --fsdp 2 --processes 2 4

A tiny GPT-2 makes a step on docstrings, validates, saves, and resumes. All calls of
torch.distributed are counted but those of tensors that FSDP gathers and scatters itself, and those
that make process groups. Bytes and messages are those of rank 0, the busiest: the
larger of what it sends and what it receives, in gloo's algorithms (all-gather and all-reduce pass
along a ring; a broadcast and a barrier take log2 N turns; of a gather and a scatter rank 0 does
all). Where a call's size differs between 4 and 8 processes, it is taken to grow linearly.
"""

import argparse
import functools
import inspect
import json
import math
import os
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from common import launch
from torch.distributed import distributed_c10d

import gpt2_fsdp

ROOT = Path(__file__).resolve().parent.parent
OBJECTS = ("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list")
TENSORS = ("all_reduce", "all_gather", "gather", "scatter", "broadcast", "barrier")
PHASES = {  # the phase, by the innermost of these functions
    "open_output": "start", "finish": "start", "load_checkpoint": "resume", "_save": "save",
    "progress": "validation batch", "validation": "validation", "save_best": "best weights",
    "continue_prompts": "generation", "export": "export",
}  # fmt: skip
ONCE = ("start", "resume", "step", "validation batch", "validation", "log", "save", "best weights")
OTHERS = {"/distributed/checkpoint/": "DCP", "/distributed/": "FSDP", "/transformers/": "HF"}
VALIDATIONS, VALIDATION_SAMPLES = 2, 8
FACTORS = {"all_reduce": "2(N-1)/N", "broadcast": "log2 N", "barrier": "0"}  # others: N-1
RANKS = (8, 64, 512, 4096)
Sizes = dict[str, list[float]]  # by the collective of tensors: calls, numbers, bytes


def place() -> tuple[str, str]:
    """Return the phase of the call under way, and whose code makes it."""
    whose, frame = None, sys._getframe(2)
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        who = next((who for part, who in OTHERS.items() if part in path), "other")
        if path.startswith(str(ROOT)) and "site-packages" not in path:
            who = "ours"
        if path != __file__ and "c10d" not in path:
            whose = whose or who
        if who == "ours" and name == "open_output" and frame.f_locals.get("candidates"):
            return "resume", whose  # it looks at a checkpoint
        if who == "ours" and name in PHASES:
            return PHASES[name], whose
        if who == "ours" and name == "train" and "step" in frame.f_locals:
            return "log" if frame.f_locals["step"].is_over else "step", whose
        frame = frame.f_back
    return "start", whose


class Watch:
    """A counter of torch.distributed's calls, from when it is made."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.sizes: dict[str, Sizes] = defaultdict(lambda: defaultdict(lambda: [0, 0, 0]))
        self.key: str | None = None  # of the call of objects under way
        self.sockets = 0  # in the step
        for name in (*OBJECTS, *TENSORS):
            call = functools.partial(self._call, name, getattr(dist, name))
            setattr(dist, name, call)
            setattr(distributed_c10d, name, call)

    def _call(self, name: str, function: Callable, *args: Any, **options: Any) -> Any:
        if self.key is not None:  # the tensors that a call of objects consists of
            self._add(name, function, args, options)
            return function(*args, **options)
        phase, whose = place()
        if phase == "step":
            descriptors = Path("/proc/self/fd").iterdir()
            self.sockets = sum("socket" in os.readlink(path) for path in list(descriptors)[:-1])
        self.key = f"{phase}|{whose}|{name}"
        self.calls[self.key] += 1
        if name in TENSORS:
            self._add(name, function, args, options)
        try:
            return function(*args, **options)
        finally:
            self.key = None

    def _add(self, name: str, function: Callable, args: tuple, options: dict) -> None:
        tensor = inspect.signature(function).bind(*args, **options).arguments.get("tensor")
        seen = self.sizes[self.key][name]
        seen[0] += 1
        if tensor is not None:
            seen[1] += tensor.numel()
            seen[2] += tensor.nbytes


def worker(flags: list[str]) -> None:
    """Run the script with these flags, and print rank 0's counts as JSON."""
    watch = Watch()
    rank = int(os.environ["RANK"])
    gpt2_fsdp.fsdp_main(gpt2_fsdp.parse_args(flags))
    if rank == 0:
        found = {"calls": watch.calls, "sizes": watch.sizes, "sockets": watch.sockets}
        print(json.dumps(found), flush=True)


def measure(processes: int, flags: list[str]) -> tuple[dict[str, tuple[float, Sizes]], int]:
    """Measure calls and sizes of one event of each phase, and rank 0's sockets in a step."""
    with tempfile.TemporaryDirectory() as directory:
        common = ["--model-name", "tiny", "--dataset", "docstrings", "--block-size", "64"]
        common += ["--batch-size", "1", "--num-train-samples", "64", "--output-dir", directory]
        common += ["--num-val-samples", str(VALIDATION_SAMPLES), "--log-every", "1", *flags]
        new, again = (
            launch(processes, __file__, "--worker", json.dumps([*common, "--max-steps", steps]))
            for steps in ("1", "2")
        )
    times = {"validation": VALIDATIONS}
    times["validation batch"] = VALIDATIONS * math.ceil(VALIDATION_SAMPLES / processes)
    found = {}
    for run in (new, again):
        for key, count in run["calls"].items():
            phase, whose, name = key.split("|")
            if whose == "FSDP" and name == "all_gather":
                continue  # FSDP's own, of parameters and states
            if phase in ONCE and (run is again) == (phase == "resume"):
                found[key] = (
                    count / times.get(phase, 1),
                    {
                        part: [number / times.get(phase, 1) for number in numbers]
                        for part, numbers in run["sizes"][key].items()
                    },
                )
    return found, new["sockets"]


def cost(name: str, numbers: float, size: float, ranks: int) -> tuple[float, float]:
    """Return messages and bytes of rank 0 in a collective of a tensor of so many numbers and
    bytes."""
    if name == "barrier":
        return math.ceil(math.log2(ranks)), 0
    if name == "broadcast":
        return math.ceil(math.log2(ranks)), size * math.ceil(math.log2(ranks))
    if name == "all_reduce":  # in parts of at least one number each
        return 2 * min(numbers, 2 * ranks), size * 2 * (ranks - 1) / ranks
    parts = 2 if name == "all_gather" else 1
    return parts * (ranks - 1), size * (ranks - 1)


def total(sizes: Sizes, ranks: int) -> tuple[float, float]:
    """Return messages and bytes of rank 0 in all collectives of `sizes`."""
    messages = data = 0.0
    for name, (calls, numbers, size) in sizes.items():
        one = cost(name, numbers / calls, size / calls, ranks)
        messages, data = messages + calls * one[0], data + calls * one[1]
    return messages, data


def grown(few: Sizes, many: Sizes, ranks: tuple[int, int], wanted: int) -> Sizes:
    """Return the sizes at `wanted` ranks, on the line through those at two numbers of `ranks`."""
    found = {}
    for name, values in many.items():
        slopes = [(b - a) / (ranks[1] - ranks[0]) for a, b in zip(few[name], values, strict=True)]
        grows = [x * ranks[1] > 0.1 * y for x, y in zip(slopes, values, strict=True)]
        found[name] = [
            value + (wanted - ranks[1]) * slope * it_grows
            for value, slope, it_grows in zip(values, slopes, grows, strict=True)
        ]
    return found


def formula(few: Sizes, many: Sizes, ranks: tuple[int, int]) -> str:
    """Return the formula of rank 0's bytes among N ranks."""
    terms: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name in many:
        at_0 = grown(few, many, ranks, 0)[name][2]
        factor = FACTORS.get(name, "(N-1)")
        terms[factor][0] += at_0
        terms[factor][1] += (many[name][2] - at_0) / ranks[1]
    texts = []
    for factor, (fixed, by_rank) in terms.items():
        if fixed or by_rank:
            size = f"{fixed:,.0f}"
            if by_rank:
                size = f"({fixed:,.0f} + {by_rank:,.0f} N)"
            texts.append(f"{size} {factor}")
    return " + ".join(texts) or "0"


def main() -> None:
    """Print what was measured, and what it grows to on more ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8], help="ranks")
    parser.add_argument("--fsdp", choices=["1", "2"], default="1", help="version")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # flags as JSON
    args = parser.parse_args()
    if args.worker:
        worker(json.loads(args.worker))
        return
    counts = sorted(args.processes)
    found, sockets = zip(*(measure(n, ["--fsdp", args.fsdp]) for n in counts), strict=True)
    last = tuple(counts[-2:])
    keys = sorted(found[-1], key=lambda key: (ONCE.index(key.split("|")[0]), key))
    head = ["phase", "whose", "call", "times", *(f"bytes, {n}" for n in counts), "bytes, N"]
    print("\n| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for key in keys:
        times = " / ".join(dict.fromkeys(f"{one[key][0]:.3g}" for one in found if key in one))
        row = [*key.split("|"), times]
        row += [f"{total(one[key][1], n)[1]:,.0f}" for one, n in zip(found, counts, strict=True)]
        print(f"| {' | '.join(row)} | {formula(found[-2][key][1], found[-1][key][1], last)} |")
    head = ["phase", "whose", "call", *(f"messages, {n:,}" for n in RANKS)]
    head += [f"bytes, {n:,}" for n in RANKS]
    print("\n| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for key in keys:
        few, many = (one[key][1] for one in found[-2:])
        totals = [total(grown(few, many, last, n), n) for n in RANKS]
        row = [*key.split("|"), *(f"{messages:,.0f}" for messages, _ in totals)]
        print(f"| {' | '.join(row + [f'{data:,.0f}' for _, data in totals])} |")
    held = ", ".join(f"{held} of {n} ranks" for held, n in zip(sockets, counts, strict=True))
    print(f"\nsockets that rank 0 holds in a step: {held}")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # as `launch` of runtime/run.py, which says why
