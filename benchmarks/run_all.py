"""Run all benchmarks and write their tables into RESULTS.md, with machine, versions and commands.

    pip install -r benchmarks/requirements.txt
    python benchmarks/run_all.py --preset cpu                    # two CPU processes, an hour
    python benchmarks/run_all.py --preset gpu --processes 8      # one process per GPU
    python benchmarks/run_all.py --preset gpu --minutes 10       # the most important ones first

`--data` is a directory with seed_tasks.jsonl of self-instruct and xsum_200.jsonl (`document` and
`summary` in each line). By default docstrings are used. `--only` selects titles that contain one of
these words. After each program, its section in the preset's part of the file is replaced.

After `--minutes`, the running program is stopped. Run the same command again to measure the rest:
it keeps sections that were measured by the same command, at the same commit, with the same device
and versions. A program that failed or was stopped keeps its output in the file, and runs again
after all others.
"""

import argparse
import contextlib
import importlib.util
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

START = time.monotonic()  # before the import of torch, which takes seconds

import torch  # noqa: E402

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "RESULTS.md"
TITLES = {"cpu": "On a CPU", "gpu": "On GPUs"}
PACKAGES = ("torch", "transformers", "accelerate", "trl", "peft", "bitsandbytes")
LARGE_GPU = 110e9  # bytes for Llama 2 7B with AdamW, recomputation and a length of 4096
KEPT_SECONDS = 10  # reserved for start and end; at most a tenth of --minutes
LEAST_SECONDS = 20  # least time left to start another program
UNFINISHED = ("It ended with exit code", "It was ended after")  # in the last line of these entries


def gpu_programs(processes: int, large: bool) -> dict[str, str]:
    """Return the command of each section on GPUs by title, the most important first.

    `large` means that a GPU has 110 GB or more.
    """
    n = f" --processes {processes}"
    size, model = ("7B", "llama-2-7b") if large else ("1.1B", "tinyllama-1.1b")
    one = f"one_gpu.py --turns 1 --model {model}"
    adapters = {"One GPU, 7B with LoRA": "one_gpu.py --turns 1 --lora-rank 16"}
    first = {f"One GPU, {size}": one, f"One GPU, {size}, compiled": one + " --compile --loops ours"}
    held = "estimate.py --strategies full_shard --recomputed --models "
    beside = f"side_by_side.py --preset gpu{n} --peers "
    commands = first | ({} if large else adapters) | {
        "Estimate and measurement": held + model + n,
        "Estimate and measurement, LoRA": held + "llama-2-7b --lora-rank 16" + n,
        "Side by side with the Trainer": beside + "trainer",
        "Load, save, resume and export": "saving.py --model 1.1B --saves 3 --turns 1"
        " --ways ours-fsdp2 --stages save" + n,
    }  # fmt: skip
    # These fail on torch 2.11 or without TRL, or take dozens of launches.
    last = {
        "Estimate and measurement, QLoRA": held + "llama-2-7b --lora-rank 16 --load-in-4bit" + n,
        "Side by side with TRL": beside + "trl",
    }
    wide = "gpt2-xl" if processes > 1 else "gpt2-large"
    if torch.__version__ < (2, 13) or not importlib.util.find_spec("bitsandbytes"):
        del last["Estimate and measurement, QLoRA"]
    if not importlib.util.find_spec("trl"):
        del last["Side by side with TRL"]
    return commands | adapters | {
        "Side by side with the Seq2SeqTrainer": beside + "seq2seq",
        "FSDP against FSDP": "step_time.py --model 1.1B --length 2048 --steps 30" + n,
        "Estimate and measurement of other models": "estimate.py --models gpt2-large t5-large"
        " --strategies full_shard" + n,
        "One GPU, three launches": f"one_gpu.py --model {model}",
    } | last | {
        "Strategies": "compare_strategies.py --block-size 1024 --memory-limit-gb 24"
        f" --model {wide}" + n,
    }  # fmt: skip


def cpu_programs(processes: int) -> dict[str, str]:
    """Return the command of each section on a CPU by title."""
    n = f" --processes {processes}"
    return {
        "FSDP against FSDP": "step_time.py --steps 7" + n,
        "Strategies": "compare_strategies.py --steps 9" + n,
        "Load, save, resume and export": "saving.py --model 254M --saves 3" + n,
        "Estimate and measurement": "estimate.py" + n,
        "Side by side": "side_by_side.py --preset cpu" + n,
    }


def programs(preset: str, processes: int, data: Path | None, large: bool) -> dict[str, str]:
    """Return the command of each section of a preset by title, in the order of running."""
    commands = cpu_programs(processes) if preset == "cpu" else gpu_programs(processes, large)
    if data is None:
        return commands
    for title, command in commands.items():
        if command.startswith("side_by_side"):
            commands[title] += f" --tasks {data / 'seed_tasks.jsonl'}"
            commands[title] += f" --articles {data / 'xsum_200.jsonl'}"
    return commands


def commit() -> str:
    """Return the last commit that changed more than the results, with a note if there are local
    changes."""

    def git(command: str) -> subprocess.CompletedProcess:
        command = f"git {command} -- :/ ':(exclude,top)benchmarks/RESULTS.md'"
        return subprocess.run(command, shell=True, cwd=FOLDER, capture_output=True, text=True)

    name = git("log -1 --format=%h").stdout.strip() or "unknown"
    if git("diff --quiet HEAD").returncode == 1:
        name += " with changes"
    return name


def about() -> str:
    """Return a line with the machine, the package versions and the commit."""
    versions = []
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions.append(f"{name} {version(name)}")
    cores = len(os.sched_getaffinity(0))
    machine = f"{cores} {platform.machine()} cores"
    if torch.cuda.is_available():
        machine = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {machine}"
    return f"{machine}; {', '.join(versions)}; commit {commit()}."


def parse(text: str, heading: str) -> tuple[str, dict[str, str]]:
    """Split text at headings such as ##; return the text before them, and the rest by heading."""
    before, *parts = re.split(rf"^{heading} ", text, flags=re.MULTILINE)
    return before, {part.split("\n", 1)[0]: part.split("\n", 1)[1] for part in parts}


def replace_section(text: str, preset: str, title: str, body: str) -> str:
    """Return the text of RESULTS.md with one section of a preset replaced, or appended to
    it."""
    head, known = parse(text, "##")
    intro, sections = parse(known.get(TITLES[preset], "\n"), "###")
    sections[title] = f"\n{body.strip()}\n\n"
    known[TITLES[preset]] = intro + "".join(f"### {name}\n{x}" for name, x in sections.items())
    titles = [name for name in TITLES.values() if name in known]
    return (head + "".join(f"## {name}\n{known[name]}" for name in titles)).rstrip() + "\n"


def entries(text: str, preset: str, title: str) -> list[str]:
    """Return the entries of a section of RESULTS.md, each of which starts with a date: a complete
    one, a later unfinished one, or both."""
    _, known = parse(text, "##")
    _, sections = parse(known.get(TITLES[preset], ""), "###")
    parts = re.split(r"^(?=\d{4}-\d\d-\d\d; )", sections.get(title, ""), flags=re.MULTILINE)
    return [part.strip() for part in parts if part.strip()]


def is_complete(entry: str) -> bool:
    """Return whether the program of an entry finished."""
    return not entry.splitlines()[-1].startswith(UNFINISHED)


def as_code(command: str) -> str:
    """Return a command as Markdown code, without the directory of --data."""
    command = re.sub(r"\S*/(\w+\.jsonl)", r"\1", command)
    return f"`python benchmarks/{command}`"


def left_to_do(
    commands: dict[str, str], text: str, preset: str, machine: str
) -> tuple[dict[str, str], list[str]]:
    """Return the commands without complete results in RESULTS.md, unfinished ones last, and the
    titles of the others."""
    new, tried, done = {}, {}, []
    for title, command in commands.items():
        matches = [
            entry
            for entry in entries(text, preset, title)
            if entry.partition("; ")[2].splitlines()[:2] == [machine, as_code(command)]
        ]
        if any(map(is_complete, matches)):
            done.append(title)
        elif matches:
            tried[title] = command
        else:
            new[title] = command
    return new | tried, done


def descendants(pid: int) -> list[int]:
    """Return the ids of all child processes of a process, and of their children."""
    pids = []
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for child in map(int, children):
            pids += [child, *descendants(child)]
    return pids


def run(command: str, seconds: float | None) -> tuple[list[str], str]:
    """Run a program; return its output, and a sentence if it failed or was stopped, else "".

    After `seconds` kill it with all its processes: torchrun's workers are in other groups.
    """
    words = [sys.executable, *shlex.split(f"{FOLDER}/{command}")]
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}  # otherwise a kill loses its output
        process = subprocess.Popen(words, stdout=output, env=environment)
        failure = ""
        try:
            if process.wait(seconds):
                failure = f"{UNFINISHED[0]} {process.returncode}."
        except subprocess.TimeoutExpired:
            for pid in [process.pid, *descendants(process.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
            failure = f"{UNFINISHED[1]} {time.monotonic() - start:.0f} s."
        output.seek(0)
        lines = output.read().splitlines()
    return [line for line in lines if not line.startswith(("{", "  "))], failure


def measure(title: str, command: str, preset: str, machine: str, seconds: float | None) -> bool:
    """Run a program and write its section; return whether it failed. An earlier measurement is
    kept until a new one is complete."""
    print(f"{title}: {command}", flush=True)
    lines, failure = run(command, seconds)
    if failure:
        lines += ["", failure]
        print(f"{title}: {failure}", file=sys.stderr, flush=True)
    body = "\n".join([f"{time.strftime('%Y-%m-%d')}; {machine}", as_code(command), "", *lines])
    text = RESULTS.read_text()
    if failure:
        whole = [entry for entry in entries(text, preset, title) if is_complete(entry)]
        body = "\n\n".join([*whole, body])
    RESULTS.write_text(replace_section(text, preset, title, body))
    return failure.startswith(UNFINISHED[0])


def parse_args() -> argparse.Namespace:
    """Return the flags of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=list(TITLES), required=True, help="sizes")
    parser.add_argument("--processes", type=int, default=0, help="ranks (0: 2, or all the GPUs)")
    parser.add_argument("--data", type=Path, help="directory with seed_tasks.jsonl, xsum_200.jsonl")
    parser.add_argument("--only", nargs="+", default=[""], help="words in titles")
    parser.add_argument("--minutes", type=float, help="limit for one start; the next start runs "
        "the rest (default: no limit, measures everything again)")  # fmt: skip
    args = parser.parse_args()
    if args.minutes is not None and not 0 < args.minutes < math.inf:
        parser.error(f"--minutes {args.minutes:g} must be above 0.")
    if args.preset == "gpu" and not torch.cuda.is_available():
        parser.error("--preset gpu needs a GPU.")
    return args


def main() -> int:
    """Run all programs; return True if one of them failed."""
    args = parse_args()
    processes, large = args.processes or 2, False
    if args.preset == "gpu":
        processes = args.processes or torch.cuda.device_count()
        large = torch.cuda.get_device_properties(0).total_memory >= LARGE_GPU
    machine = about()
    commands = {
        title: command
        for title, command in programs(args.preset, processes, args.data, large).items()
        if any(word.lower() in title.lower() for word in args.only)
    }
    end = math.inf
    if args.minutes:
        seconds = 60 * args.minutes
        end = START + seconds - min(KEPT_SECONDS, seconds / 10)
        commands, done = left_to_do(commands, RESULTS.read_text(), args.preset, machine)
        for title in done:
            print(f"{title}: measured before", flush=True)
    failed = 0
    for number, (title, command) in enumerate(commands.items()):
        left = end - time.monotonic()
        if number > 0 and left < LEAST_SECONDS:
            rest = ", ".join(list(commands)[number:])
            print(f"Time is up. Run the same command to measure the rest: {rest}", flush=True)
            break
        seconds = None if math.isinf(left) else max(0.0, left)
        failed += measure(title, command, args.preset, machine, seconds)
    return failed > 0


if __name__ == "__main__":
    raise SystemExit(main())
