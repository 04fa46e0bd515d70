"""Advice on flags and variables that cannot be right. Without this file, an empty --output-dir is
the current directory, only the last part of a repeated list counts, and errors are harder to read.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

from core.ranks import Problem, finish

OTHER_NAMES = {  # flags of other programs, and what to pass here
    "--bf16": "--precision bf16",
    "--dataset-name": "--dataset",
    "--eval-steps": "--eval-every",
    "--fp16": "--precision fp16",
    "--gradient-checkpointing": "--activation-checkpointing blocks",
    "--learning-rate": "--lr",
    "--logging-steps": "--log-every",
    "--lr-scheduler-type": "--lr-schedule",
    "--model-name-or-path": "--model-name",
    "--num-epochs": "--epochs",
    "--num-train-epochs": "--epochs",
    "--per-device-eval-batch-size": "--batch-size",
    "--per-device-train-batch-size": "--batch-size",
    "--report-to": "--track",
    "--resume-from-checkpoint": "the same command again: the run in --output-dir resumes",
    "--save-steps": "--save-every",
    "--save-total-limit": "--keep-checkpoints",
}


def check(args: Any) -> None:
    """Exit with one message for all that is wrong in sys.argv and the variables of a launcher.
    `args` are a script's, with defaults. Any rank."""
    defaults, problems = flags(args)
    given = words_by_flag()
    for flag in given:
        if flag in OTHER_NAMES and flag not in defaults:
            problems.append(f"For {flag}, pass {OTHER_NAMES[flag]}.")
    for flag, default in defaults.items():
        lists = given.get(flag, []) + given.get(f"--no-{flag[2:]}", [])
        words = [word for words in lists for word in words]
        if isinstance(default, bool) and words and words[0].lower() in ("true", "false"):
            problems.append(f"{flag} takes no value. Pass {flag} or --no-{flag[2:]}.")
        if isinstance(default, Path) and "" in words:
            problems.append(f"{flag} is empty. Pass a directory.")
        if isinstance(default, tuple):
            are_different = len(set(map(os.path.realpath, words))) == len(words)
            if len(lists) > 1 or not are_different:
                problems.append(f"Pass {flag} once, with all its values, each of them once.")
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "")
    if rank is not None and rank not in map(str, range(int(size or 0))):
        # No other rank would print it.
        sys.exit(f"error: RANK is {rank}, but WORLD_SIZE {size}. Unset RANK, or use torchrun.")
    if problems:
        finish(Problem(" ".join(problems)))


def flags(args: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the default of each flag, and a message for each that two sections of `args` have."""
    defaults: dict[str, Any] = {}
    problems = []
    for section in vars(args).values():
        for name, default in vars(section).items():
            flag = "--" + name.replace("_", "-")
            if flag in defaults:
                problems.append(f"Two sections of Args have a field {name}. Rename one.")
            defaults[flag] = default
    return defaults, problems


def words_by_flag() -> dict[str, list[list[str]]]:
    """Return by flag the words after it in sys.argv, a list for each time that it is passed."""
    given: dict[str, list[list[str]]] = {}
    words: list[str] = []
    for word in sys.argv[1:]:
        if re.match("--[a-z]", word):
            flag, sign, value = word.partition("=")
            words = [value] if sign else []
            given.setdefault(flag.replace("_", "-"), []).append(words)
        else:
            words.append(word)
    return given
