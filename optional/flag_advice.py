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
    "--[a-z-]+ ([Tt]rue|[Ff]alse)": "--NAME or --no-NAME, without a value",
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
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "0")
    if rank and int(rank) >= int(size):  # no other rank would print it
        sys.exit(f"error: RANK is {rank}, but WORLD_SIZE {size}. Unset RANK, or use torchrun.")
    defaults = flags(args)
    given = words_by_flag()
    problems = []
    notes = []
    settings = []
    for word in sys.argv[1:]:
        name = re.sub("^-|=.*", "", word)
        flag = "--" + name.replace("_", "-")
        if flag in defaults and name != word:  # -lr or lr=1e-3
            problems.append(f"{word} is not a flag. Pass {flag}.")
        flag = flag[1:]
        if flag in OTHER_NAMES and flag not in defaults:
            problems.append(f"For {flag}, {OTHER_NAMES[flag]}.")
    for flag, default in defaults.items():
        times = given.get(flag, []) + given.get(f"--no-{flag[2:]}", [])
        words = [word for words in times for word in words]
        settings.append(f"{flag} {words[-1] if words else default}")
        if isinstance(default, tuple) and flag != "--betas":
            if len(times) > 1 or len(set(map(os.path.realpath, words))) < len(words):
                problems.append(f"Pass {flag} once, with all its values, each of them once.")
            if times == [[]]:
                words = [""]
        elif len(times) > 1:
            notes.append(f"{flag} is passed {len(times)} times: the last one counts.")
        for pattern, advice in WRONG.items():
            for word in words:
                if re.fullmatch(pattern, f"{flag} {word}"):
                    problems.append(f"{flag} is {word or 'empty'}. Pass {advice}.")
    for flag, pattern in NO_EFFECT.items():
        for setting in settings:
            if flag in given and re.fullmatch(pattern, setting):
                notes.append(f"{flag} has no effect with {setting}.")
    if problems:
        finish(Problem(" ".join(problems)))
    for note in notes:
        print0(note)


def flags(args: Any) -> dict[str, Any]:
    """Return the default of each flag of a script."""
    defaults = {}
    for section in vars(args).values():
        for name, default in vars(section).items():
            defaults["--" + name.replace("_", "-")] = default
    return defaults


def words_by_flag() -> dict[str, list[list[str]]]:
    """Return by flag the words after it in sys.argv, a list for each time that it is passed."""
    given: dict[str, list[list[str]]] = {}
    words: list[str] = []
    for word in sys.argv[1:]:
        if word.startswith("--"):
            flag, *words = word.split("=", 1)
            given.setdefault(flag.replace("_", "-"), []).append(words)
        else:
            words.append(word)
    return given
