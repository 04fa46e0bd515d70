"""Advice on flags and variables that cannot be right. Without this file, an empty --output-dir is
the current directory, only the last part of a repeated list counts, flags without effect are not
named, and errors are harder to read.
"""

import os
import re
import sys
from typing import Any

from core.ranks import Problem, finish, print0

RECIPE = "see the recipes in docs/change-a-script.md of the repository"
GPUS = "set the variable CUDA_VISIBLE_DEVICES (empty: the CPU)"
TOKENIZER = "pass --model-name, a directory that has it"
TORCHRUN = "pass it to torchrun, before the script's name"
OTHER_NAMES = {  # flags of other programs, and what to do here
    "--adam-beta1": "pass --betas",
    "--adam-beta2": "pass --betas",
    "--beta1": "pass --betas",
    "--beta2": "pass --betas",
    "--bf16": "pass --precision bf16",
    "--config": "pass flags: no file of them is read",
    "--dataset-name": "pass --dataset",
    "--deepspeed": "see --strategy and --cpu-offload",
    "--device": GPUS,
    "--dropout": RECIPE,
    "--early-stopping-patience": RECIPE,
    "--eval-interval": "pass --eval-every",
    "--eval-steps": "pass --eval-every",
    "--fp16": "pass --precision fp16",
    "--grad-clip": "pass --max-grad-norm",
    "--gradient-checkpointing": "pass --activation-checkpointing blocks",
    "--label-smoothing-factor": RECIPE,
    "--learning-rate": "pass --lr",
    "--log-interval": "pass --log-every",
    "--logging-steps": "pass --log-every",
    "--lr-scheduler-type": "pass --lr-schedule",
    "--max-iters": "pass --max-steps",
    "--min-lr": "pass --min-lr-ratio, a fraction of --lr",
    "--model-name-or-path": "pass --model-name",
    "--nnodes": TORCHRUN,
    "--no-cuda": GPUS,
    "--nproc-per-node": TORCHRUN,
    "--num-epochs": "pass --epochs",
    "--num-train-epochs": "pass --epochs",
    "--optim": RECIPE,
    "--optimizer": RECIPE,
    "--out-dir": "pass --output-dir",
    "--overwrite-output-dir": "delete the directory, or pass another --output-dir",
    "--per-device-eval-batch-size": "pass --batch-size",
    "--per-device-train-batch-size": "pass --batch-size",
    "--push-to-hub": "run hf upload NAME/MODEL OUTPUT_DIR/final afterwards",
    "--report-to": "pass --track",
    "--resume-from-checkpoint": "pass the same command again: the run in --output-dir resumes",
    "--run-name": "set the variable WANDB_NAME, and pass --track wandb",
    "--save-steps": "pass --save-every",
    "--save-total-limit": "pass --keep-checkpoints",
    "--tokenizer": TOKENIZER,
    "--tokenizer-name": TOKENIZER,
    "--torch-dtype": "pass --precision",
    "--train-file": "pass --dataset",
    "--validation-file": "pass --val-dataset",
    "--wandb-project": "set the variable WANDB_PROJECT, and pass --track wandb",
    "--warmup-iters": "pass --warmup-steps",
}
WRONG = {  # patterns of a flag and a word that cannot be right, and what to pass
    "--output-dir ": "a directory",
    "--(?!output-dir|source-prefix)[a-z-]+ ": "a value, or leave it out",
    "--[a-z-]+ -1": "a number that its --help allows, or leave it out",
    r"--betas (-.*|[1-9][\d.]*)": "two numbers from 0 to below 1",
    r"--model-name .*\.(safetensors|bin|gguf|pth?|ckpt)": "the directory of the file",
    r"--(val-)?dataset .*\.(csv|tsv|jsonl?|parquet|txt),.*": "names with spaces, not commas",
}
NO_EFFECT = {  # flags, and patterns of others with which they do nothing
    "--gamma": "--lr-schedule (linear|cosine|constant)",
    "--min-lr-ratio": "--lr-schedule (constant|step)",
    "--warmup-ratio": "--lr-schedule step|--warmup-steps [1-9].*",
    "--warmup-steps": "--lr-schedule step",
    "--epochs": "--max-steps [1-9].*",
    "--shard-group-size": "--strategy (?!hybrid_shard).*",
}


def check(args: Any) -> None:
    """Exit with one message for all that is wrong in sys.argv and the variables of a launcher, or
    print a line for each flag without effect. `args` are a script's, with defaults. Any rank."""
    defaults, problems = flags(args)
    given = words_by_flag()
    for flag in given:
        if flag in OTHER_NAMES and flag not in defaults:
            problems.append(f"For {flag}, {OTHER_NAMES[flag]}.")
    for word in sys.argv[1:]:
        name = re.sub("^-|=.*", "", word)  # of -lr or lr=1e-3
        flag = "--" + name.replace("_", "-")
        if name != word and flag in defaults:
            problems.append(f"{word} is not a flag. Pass {flag}.")
    notes = []
    settings = []
    for flag, default in defaults.items():
        lists = given.get(flag, []) + given.get(f"--no-{flag[2:]}", [])
        words = [word for words in lists for word in words]
        settings.append(f"{flag} {words[-1] if words else default}")
        if isinstance(default, bool) and words and words[0].lower() in ("true", "false"):
            problems.append(f"{flag} takes no value. Pass {flag} or --no-{flag[2:]}.")
        if isinstance(default, tuple) and flag != "--betas":
            are_different = len(set(map(os.path.realpath, words))) == len(words)
            if len(lists) > 1 or not are_different:
                problems.append(f"Pass {flag} once, with all its values, each of them once.")
            if lists == [[]]:
                words = [""]
        elif len(lists) > 1:
            notes.append(f"{flag} is passed {len(lists)} times: the last one counts.")
        for pattern, advice in WRONG.items():
            for word in words:
                if re.fullmatch(pattern, f"{flag} {word}"):
                    problems.append(f"{flag} is {word or 'empty'}. Pass {advice}.")
    for flag, pattern in NO_EFFECT.items():
        for setting in settings:
            if flag in given and re.fullmatch(pattern, setting):
                notes.append(f"{flag} has no effect with {setting}.")
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "")
    if rank is not None and rank not in map(str, range(int(size or 0))):
        # No other rank would print it.
        sys.exit(f"error: RANK is {rank}, but WORLD_SIZE {size}. Unset RANK, or use torchrun.")
    if problems:
        finish(Problem(" ".join(problems)))
    for note in notes:
        print0(note)


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
