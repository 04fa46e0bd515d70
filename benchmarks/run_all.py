"""Run all benchmarks and write their tables into RESULTS.md, with machine, versions and commands.

    pip install -r benchmarks/requirements.txt
    python benchmarks/run_all.py --preset cpu                    # two CPU processes, an hour
    python benchmarks/run_all.py --preset gpu --processes 8      # one process per GPU

`--data` is a directory with seed_tasks.jsonl of self-instruct and xsum_200.jsonl (`document` and
`summary` in each line); without it docstrings stand in. `--only` takes words of the titles. A
preset replaces its own part of the file and leaves the other's.
"""

import argparse
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent
TITLES = {"cpu": "On a CPU", "gpu": "On GPUs"}


def programs(preset: str, processes: int, data: Path | None) -> dict[str, str]:
    """The command of each section, by its title."""
    cpu, n = preset == "cpu", f" --processes {processes}"
    tasks = f" --tasks {data / 'seed_tasks.jsonl'}" if data else ""
    commands = {
        "Step time": "step_time.py" + n
        + (" --steps 7" if cpu else " --model gpt2-large --block-size 1024 --steps 30"),
        "Useful tokens of T5": "useful_tokens.py" + n + ("" if cpu else " --model t5-base"),
        "Useful tokens of Llama, packed and padded": "packing.py" + tasks
        + ("" if cpu else " --max-seq-length 2048"),
        "Strategies": "compare_strategies.py" + n
        + (" --steps 9" if cpu else " --block-size 1024 --memory-limit-gb 24"
           + (" --model gpt2-xl" if processes > 1 else " --model gpt2-large")),
        "Loading and export": "load_memory.py" + n,
        "Loading and export, stored in 16 bits": "load_memory.py" + n + " --stored-dtype bfloat16",
        "Saving": "saving.py" + n + (" --saves 3" if cpu else " --shapes 300M gpt2-xl"),
        "The loss in chunks": "chunked_loss.py" + ("" if cpu else " --tokens 8192 --width 1600"),
        "Estimate and measurement": "estimate.py" + n
        + ("" if cpu else " --models gpt2-large t5-large llama-2-7b --strategies full_shard"),
    }  # fmt: skip
    if data:
        articles = f"{'' if cpu else ' --model t5-base'} --dataset {data / 'xsum_200.jsonl'}"
        columns = " --source-column document --target-column summary"
        commands["Useful tokens of T5, news"] = "useful_tokens.py" + n + articles + columns
    own = f" --articles {data / 'xsum_200.jsonl'}" if data else ""
    commands["Side by side"] = f"side_by_side.py --preset {preset}" + n + tasks + own
    if not cpu:
        commands["Llama 2 7B on one GPU"] = "one_gpu.py"
    return commands


def about() -> str:
    """Date, machine and versions."""
    names = ("torch", "transformers", "accelerate")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    cores = len(os.sched_getaffinity(0))
    machine = f"{cores} {platform.machine()} cores"
    if torch.cuda.is_available():
        machine = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {machine}"
    return f"{time.strftime('%Y-%m-%d')}; {machine}; {versions}."


def with_section(text: str, preset: str, title: str, body: str) -> str:
    """The text of RESULTS.md with one section of a preset's part replaced, or added at its end."""
    head, *parts = re.split(r"^## ", text, flags=re.MULTILINE)
    known = {part.split("\n", 1)[0]: part.split("\n", 1)[1] for part in parts}
    intro, *sections = re.split(r"^### ", known.get(TITLES[preset], "\n"), flags=re.MULTILINE)
    found = {section.split("\n", 1)[0]: section.split("\n", 1)[1] for section in sections}
    found[title] = f"\n{body.strip()}\n\n"
    known[TITLES[preset]] = intro + "".join(f"### {name}\n{x}" for name, x in found.items())
    titles = [name for name in TITLES.values() if name in known]
    return (head + "".join(f"## {name}\n{known[name]}" for name in titles)).rstrip() + "\n"


def main() -> int:
    """Run the programs; 1 if one of them failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=list(TITLES), required=True, help="sizes")
    parser.add_argument("--processes", type=int, default=0, help="ranks (0: 2, or all the GPUs)")
    parser.add_argument("--data", type=Path, help="directory with seed_tasks.jsonl, xsum_200.jsonl")
    parser.add_argument("--only", nargs="+", default=[""], help="words of titles")
    args = parser.parse_args()
    if args.preset == "gpu" and not torch.cuda.is_available():
        parser.error("--preset gpu needs a GPU")
    processes = args.processes or (torch.cuda.device_count() if args.preset == "gpu" else 2)
    path = FOLDER / "RESULTS.md"
    failed = 0
    for title, command in programs(args.preset, processes, args.data).items():
        if not any(word.lower() in title.lower() for word in args.only):
            continue
        print(f"{title}: {command}", flush=True)
        run = subprocess.run(
            [sys.executable, *shlex.split(f"{FOLDER}/{command}")], stdout=subprocess.PIPE, text=True
        )
        lines = [line for line in run.stdout.splitlines() if not line.startswith(("{", "  "))]
        if run.returncode:
            failed += 1
            lines += ["", f"It ended with exit code {run.returncode}."]
            print(f"{title}: exit code {run.returncode}", file=sys.stderr)
        shown = re.sub(r"\S*/(\w+\.jsonl)", r"\1", command)
        body = "\n".join([about(), f"`python benchmarks/{shown}`", "", *lines])
        path.write_text(with_section(path.read_text(), args.preset, title, body))
    return failed > 0


if __name__ == "__main__":
    raise SystemExit(main())
