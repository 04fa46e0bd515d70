"""Flags that do not do in silence what they say. Without this file, an empty --output-dir is the
current directory, other empty values are defaults, only the last part of a repeated list counts,
and flags without effect are not named."""

import re
import sys
from typing import Any

from core.args import flags_of
from core.ranks import Problem, finish, print0

NO_EFFECT = {  # flags, and patterns of others with which they do nothing
    "--dataset-config": r"--dataset .*\.(csv|tsv|jsonl?|parquet|txt)",
    "--gamma": "--lr-schedule (linear|cosine|constant)",
    "--min-lr-ratio": "--lr-schedule (constant|step)",
    "--warmup-ratio": "--lr-schedule step|--warmup-steps [1-9].*",
    "--warmup-steps": "--lr-schedule step",
    "--epochs": "--max-steps [1-9].*",
    "--shard-group-size": "--strategy (?!hybrid_shard).*",
}


def check(args: Any) -> None:
    """Exit with one message for all that is empty or repeated in sys.argv, or print a line for each
    flag without effect. `args` are a script's, with defaults. Any rank."""
    values = flags_of(*vars(args).values())
    problems = []
    given = words_by_flag()
    for flag, times in given.items():
        words = times[-1]
        if values.get(flag, "").startswith("("):  # a tuple
            words = words or [""]
            if len(times) > 1:
                problems.append(f"Pass {flag} once, with all its values.")
        if "" in words and flag != "--source-prefix":
            problems.append(f"{flag} is empty. Pass a value, or leave it out.")
        if words:
            values[flag] = words[-1]
    if problems:
        finish(Problem(" ".join(problems)))
    settings = [f"{flag} {value}" for flag, value in values.items()]
    for flag in given.keys() & NO_EFFECT.keys():
        for setting in settings:
            if re.fullmatch(NO_EFFECT[flag], setting):
                print0(f"{flag} has no effect with {setting}.")


def words_by_flag() -> dict[str, list[list[str]]]:
    """Return by flag the words after it in sys.argv, a list for each time that it is passed."""
    given = {}
    words = []  # before the first flag
    for word in sys.argv[1:]:
        if word.startswith("--"):
            flag, *words = word.split("=", 1)
            given.setdefault(flag.replace("_", "-"), []).append(words)
        else:
            words.append(word)
    return given
