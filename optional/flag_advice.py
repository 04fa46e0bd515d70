"""Advice on flags that cannot be right. Without this file, an empty --output-dir is
the current directory, only the last part of a repeated list counts, flags without effect are not
named, and errors are harder to read.
"""

import os
import re
import sys
from typing import Any

from core.ranks import Problem, finish, print0

OTHER_NAMES = {  # what to do here, and the flags of other programs for it
    "delete the directory, or pass another --output-dir": "--overwrite-output-dir",
    "pass --activation-checkpointing blocks": "--gradient-checkpointing",
    "pass --batch-size": "--per-device-eval-batch-size --per-device-train-batch-size",
    "pass --betas": "--adam-beta1 --adam-beta2 --beta1 --beta2",
    "pass --dataset": "--dataset-name --train-file",
    "pass --epochs": "--num-epochs --num-train-epochs",
    "pass --eval-every": "--eval-interval --eval-steps",
    "pass --keep-checkpoints": "--save-total-limit",
    "pass --log-every": "--log-interval --logging-steps",
    "pass --lr": "--learning-rate",
    "pass --lr-schedule": "--lr-scheduler-type",
    "pass --max-grad-norm": "--grad-clip",
    "pass --max-steps": "--max-iters",
    "pass --min-lr-ratio, a fraction of --lr": "--min-lr",
    "pass --model-name": "--model-name-or-path",
    "pass --model-name, a directory that has it": "--tokenizer --tokenizer-name",
    "pass --output-dir": "--out-dir",
    "pass --precision": "--torch-dtype",
    "pass --precision bf16": "--bf16",
    "pass --precision fp16": "--fp16",
    "pass --save-every": "--save-steps",
    "pass --track": "--report-to",
    "pass --val-dataset": "--validation-file",
    "pass --warmup-steps": "--warmup-iters",
    "pass flags: no file of them is read": "--config",
    "pass it to torchrun, before the script's name": "--nnodes --nproc-per-node",
    "pass the same command again: the run in --output-dir resumes": "--resume-from-checkpoint",
    "run hf upload NAME/MODEL OUTPUT_DIR/final afterwards": "--push-to-hub",
    "see --strategy and --cpu-offload": "--deepspeed",
    "see the recipes in docs/change-a-script.md of the repository":
        "--dropout --early-stopping-patience --label-smoothing-factor --optim --optimizer",
    "set the variable CUDA_VISIBLE_DEVICES (empty: the CPU)": "--device --no-cuda",
    "set the variable WANDB_NAME, and pass --track wandb": "--run-name",
    "set the variable WANDB_PROJECT, and pass --track wandb": "--wandb-project",
}  # fmt: skip
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
    "--dataset-config": r"--dataset .*\.(csv|tsv|jsonl?|parquet|txt)",
    "--gamma": "--lr-schedule (linear|cosine|constant)",
    "--min-lr-ratio": "--lr-schedule (constant|step)",
    "--warmup-ratio": "--lr-schedule step|--warmup-steps [1-9].*",
    "--warmup-steps": "--lr-schedule step",
    "--epochs": "--max-steps [1-9].*",
    "--shard-group-size": "--strategy (?!hybrid_shard).*",
}


def check(args: Any) -> None:
    """Exit with one message for all that is wrong in sys.argv, or print a line for each flag
    without effect. `args` are a script's, with defaults. Any rank."""
    defaults = {}
    for section in vars(args).values():
        for name, default in vars(section).items():
            defaults["--" + name.replace("_", "-")] = default
    given = words_by_flag()
    problems = []
    notes = []
    settings = []
    for word in sys.argv[1:]:
        name = re.sub("^-|=.*", "", word)
        flag = "--" + name.replace("_", "-")
        if flag in defaults and name != word:  # -lr or lr=1e-3
            problems.append(f"{word} is not a flag. Pass {flag}.")
        flag = flag[1:]  # has two hyphens if the word has
        for advice, flags in OTHER_NAMES.items():
            if flag in flags.split() and flag not in defaults:
                problems.append(f"For {flag}, {advice}.")
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
