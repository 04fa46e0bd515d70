"""Useful tokens per second on instructions: packed sequences against padded batches.

    python benchmarks/packing.py --tasks seed_tasks.jsonl              # CPU, length 1024
    python benchmarks/packing.py --tasks seed_tasks.jsonl --max-seq-length 2048 --batch-size 8

`--tasks` is a JSONL file of self-instruct (an `instruction` and `instances` with `input` and
`output` a line); without it Python's docstrings are used. Packed batches have as many positions as
padded ones have at most; padded ones are padded to their longest document. Both train the same
model on the same documents in one process, an epoch each in turn; medians of the epochs. A useful
token is one that is not padding.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from driven import Driven

import llama_fsdp


def instances(tasks: Path) -> Iterator[tuple[str, str]]:
    """Yield the prompt and the output of every instance of self-instruct that has an output."""
    for task in map(json.loads, tasks.read_text().splitlines()):
        for instance in task["instances"]:
            if instance["output"].strip():
                prompt = f"{task['instruction']}\n{instance['input']}".strip()
                yield prompt, instance["output"]


def write_chats(tasks: Path, chats: Path) -> None:
    """Write the instances as rows of a prompt and its completion."""
    with chats.open("w") as file:
        for prompt, output in instances(tasks):
            file.write(json.dumps({"prompt": prompt, "completion": output}) + "\n")


def epoch(driven: Driven) -> tuple[float, int, int]:
    """Train an epoch; return the seconds of its steps, and this rank's useful and target tokens."""
    seconds = 0.0
    tokens, targets = 0, 0
    for batch in driven.loader:
        tokens += batch["tokens"]
        targets += batch["targets"]
        start = time.perf_counter()
        driven.step([batch])
        if driven.device.type == "cuda":
            torch.cuda.synchronize()
        seconds += time.perf_counter() - start
    return seconds, tokens, targets


def main() -> None:
    """Print one table and the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=Path, help="a JSONL file of self-instruct")
    parser.add_argument("--max-seq-length", type=int, default=1024, help="of a sequence")
    parser.add_argument("--batch-size", type=int, default=8, help="documents of a padded batch")
    parser.add_argument("--epochs", type=int, default=5, help="of each kind")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        chats = "docstrings"
        if options.tasks:
            chats = f"{directory}/chats.jsonl"
            write_chats(options.tasks, Path(chats))
        common = ["--model-name", "tiny", "--dataset", chats, "--output-dir", f"{directory}/run"]
        common += ["--max-seq-length", str(options.max_seq_length), "--max-steps", "100000"]
        common += ["--batch-size", str(options.batch_size), "--no-activation-checkpointing"]
        kinds = {"packed": ["--packing"], "padded": ["--no-packing"]}
        args = {kind: llama_fsdp.parse_args([*common, *flag]) for kind, flag in kinds.items()}
        device = llama_fsdp.setup(args["packed"])
        with contextlib.redirect_stdout(sys.stderr):  # the script prints files and memory
            driven = {kind: Driven(llama_fsdp, args[kind], device) for kind in kinds}
        found: dict[str, list[tuple]] = {kind: [] for kind in kinds}
        for _ in range(options.epochs):
            for kind in kinds:
                found[kind].append(epoch(driven[kind]))
        llama_fsdp.cleanup()
    print("| batches | steps | useful tokens | targets | s an epoch | useful tokens/s |")
    print("|---|---|---|---|---|---|")
    speed = {}
    for kind, epochs in found.items():
        seconds = statistics.median(seconds for seconds, _, _ in epochs)
        _, tokens, targets = epochs[0]
        speed[kind], steps = tokens / seconds, driven[kind].loader.batch_sampler.steps_per_epoch
        numbers = f"{steps} | {tokens:,} | {targets:,} | {seconds:.2f} | {speed[kind]:,.0f}"
        print(f"| {kind} | {numbers} |")
    print(f"\npacked / padded: {speed['packed'] / speed['padded']:.2f}")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # as `launch` of runtime/run.py, which says why
