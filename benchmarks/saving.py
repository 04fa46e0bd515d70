"""Time that a step waits for a save: sharded, full, and sharded in the background (--async-save).

    python benchmarks/saving.py                      # tiny and 300M parameters, 2 CPU processes
    python benchmarks/saving.py --processes 8 --shapes gpt2-xl

GPT-2 is trained on random weights; each mode runs in a launch of its own, saves after every other
step, and reports the median seconds that save_checkpoint took (the stall), the seconds until the
checkpoint is on disk, and the seconds of a step alone and beside a save.
"""

import argparse
import json
import os
import queue
import shutil
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from common import GPT2, launch, write_gpt2
from driven import Driven

import gpt2_fsdp
from runtime import ranks

MODES = {"sharded": [], "full": ["--checkpoint-type", "full"], "async": ["--async-save"]}


def worker(directory: str, flags: list[str], saves: int) -> None:
    """Train and save, and print rank 0's medians as JSON."""
    common = ["--model-name", directory, "--from-scratch", "--dataset", "docstrings"]
    common += ["--block-size", "64", "--batch-size", "1", "--keep-checkpoints", "1"]
    args = gpt2_fsdp.parse_args([*common, *flags])
    device = gpt2_fsdp.setup(args)
    driven = Driven(gpt2_fsdp, args, device)
    saver = driven._new_saver()
    found: dict[str, list[float]] = {"stall": [], "total": [], "step": [], "step_beside": []}

    def step(name: str) -> None:
        start = time.perf_counter()
        driven.step()
        found[name].append(time.perf_counter() - start)

    step("step")
    for _ in range(saves):
        step("step")
        dist.barrier(group=ranks.cpu_group())
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        saver.save()
        found["stall"].append(time.perf_counter() - start)
        ends: queue.SimpleQueue = queue.SimpleQueue()
        if saver.under_way:
            saver.under_way.add_done_callback(lambda _, ends=ends: ends.put(time.perf_counter()))
        else:
            ends.put(time.perf_counter())
        step("step_beside")
        saver.wait()
        found["total"].append(ends.get() - start)
    if dist.get_rank() == 0:
        print(json.dumps({name: statistics.median(values) for name, values in found.items()}))
    gpt2_fsdp.cleanup()


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2, help="ranks")
    parser.add_argument("--saves", type=int, default=5, help="saves of each kind")
    parser.add_argument("--shapes", nargs="+", choices=list(GPT2), default=["tiny", "300M"])
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)  # directory, flags as JSON
    args = parser.parse_args()
    if args.worker:
        worker(args.worker[0], json.loads(args.worker[1]), args.saves)
        return
    print("| model | save | stall, s | of sharded | until on disk, s | step, s | step beside, s |")
    print("|---|---|---|---|---|---|---|")
    for name in args.shapes:
        with tempfile.TemporaryDirectory() as directory:
            write_gpt2(name, directory)
            sharded = None
            for mode, flags in MODES.items():
                flags = json.dumps([*flags, "--output-dir", f"{directory}/{mode}"])
                command = [__file__, "--saves", args.saves, "--worker", directory, flags]
                found = launch(args.processes, *command)
                sharded = sharded or found["stall"]
                shutil.rmtree(f"{directory}/{mode}")  # three of a large model fill a disk
                row = [f"{found['stall']:.3f}", f"{found['stall'] / sharded:.2f}"]
                row += [f"{found[key]:.2f}" for key in ("total", "step", "step_beside")]
                print(f"| {name} | {mode} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # as `launch` of runtime/run.py, which says why
