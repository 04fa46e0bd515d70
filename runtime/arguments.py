"""The flags that all scripts share, and the check of all values at once."""

import argparse
import difflib
import importlib.util
import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType
from typing import Any

from . import ranks

OFF = {"action": argparse.BooleanOptionalAction, "default": False}
ON = {"action": argparse.BooleanOptionalAction, "default": True}
COUNT = {"type": int, "metavar": "N"}
NUMBER = {"type": float, "metavar": "X"}
DATA = {"nargs": "+", "action": "extend", "default": [], "metavar": "DATA"}  # may be repeated
BAD_ROWS = {"choices": ["fail", "skip"], "default": "fail", "help": "skip: drop unusable rows"}
INSTALL = "Run `pip install -r requirements-extras.txt`."
TRACKERS = ["tensorboard", "wandb", "trackio"]

POSITIVE = 1e-12  # lower limit of values that must be above 0
NO_LIMIT = 2**31  # an upper limit that no user reaches
LIMITS = {  # of the flags of all scripts; a flag may be missing or None
    **dict.fromkeys(("batch_size", "gradient_accumulation_steps", "epochs"), (1, NO_LIMIT)),
    **dict.fromkeys(("log_every", "keep_checkpoints", "num_beams"), (1, NO_LIMIT)),
    **dict.fromkeys(("source_length", "target_length", "block_size"), (2, NO_LIMIT)),
    **dict.fromkeys(("max_steps", "eval_every", "save_every", "profile", "seed"), (0, NO_LIMIT)),
    **dict.fromkeys(("global_batch_size", "weight_decay", "shard_group_size"), (0, NO_LIMIT)),
    **dict.fromkeys(("num_train_samples", "num_val_samples", "rouge_samples"), (0, NO_LIMIT)),
    **dict.fromkeys(("lr", "gamma", "max_grad_norm", "timeout_minutes"), (POSITIVE, NO_LIMIT)),
    "max_seq_length": (8, NO_LIMIT),
    "lora_rank": (0, NO_LIMIT),
    "lora_alpha": (POSITIVE, NO_LIMIT),
    "lora_dropout": (0, 1),
    "warmup_ratio": (0, 1),
}


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """A help formatter that shows each flag's default, and the description verbatim."""

    def _get_help_string(self, action: argparse.Action) -> str:
        # argparse has no public hook for this, and its default shows "(default: None)".
        if action.default in (None, False, []) or "(default" in action.help:
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """A parser that rejects abbreviations and reports an error once, on rank 0.

    Its help starts with the first line and the commands of a script's docstring.
    """

    def __init__(self, docstring: str) -> None:
        title, commands, *_ = docstring.split("\n\n")
        super().__init__(
            description=f"{title}\n\n{commands}",
            usage="%(prog)s [flags]",
            formatter_class=partial(Help, max_help_position=34),
            allow_abbrev=False,
        )

    def parse(
        self, argv: list[str] | None, defaults: dict[str, Any], tiny_defaults: dict[str, Any]
    ) -> Namespace:
        """Return the flags of the command line. `defaults` are the script's, `tiny_defaults` those
        of --model-name tiny."""
        self.set_defaults(**defaults)
        if self.parse_args(argv).model_name == "tiny":
            self.set_defaults(**tiny_defaults)
        return self.parse_args(argv)

    def error(self, message: str) -> None:
        """Exit with code 1 and the message, with a suggestion for each misspelled flag."""
        flags = re.findall(r"--[\w-]+", self.format_help())
        for word in message.partition("unrecognized arguments: ")[2].split():
            for flag in difflib.get_close_matches(word, flags, n=1):
                message += f" (did you mean {flag}?)"
        ranks.exit_with(message)


def add_model(parser: argparse.ArgumentParser) -> Callable:
    """Declare --model-name in the group "model"; return the group's `add_argument`."""
    add = parser.add_argument_group("model").add_argument
    add("--model-name", metavar="NAME", help="hub id, directory, or tiny (random, no download)")
    return add


def add_common(
    parser: argparse.ArgumentParser, strategies: Iterable[str], precisions: Iterable[str]
) -> None:
    """Declare the flags that all scripts share, with the choices of --strategy and --precision."""
    add = parser.add_argument_group("run").add_argument
    add("--output-dir", default="output", metavar="DIR", help="for checkpoints, metrics, exports")
    add("--evaluate-only", **OFF, help="validate --model-name, or the adapters in --output-dir")
    add("--export-only", **OFF, help="export the newest checkpoint to final/")
    add("--prepare-only", **OFF, help="tokenize into OUTPUT_DIR/prepared, for --dataset")
    add("--log-every", **COUNT, default=10, help="steps between training metrics")
    add("--eval-every", **COUNT, default=0, help="steps between validations (0: epochs only)")
    add("--save-every", **COUNT, default=50, help="steps between checkpoints (0: epochs only)")
    add("--checkpoint-type", choices=["sharded", "full"], default="sharded", help="one file per "
        "rank; full: one file, for which rank 0 holds the whole state")  # fmt: skip
    add("--async-save", **OFF, help="save in the background, from a copy in host memory")
    add("--keep-checkpoints", **COUNT, default=2, help="newest checkpoints to keep")
    add("--save-best", **ON, help="export best/ after each validation with the lowest loss so far")
    add("--export-dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help="of best/, final/")
    add("--track", nargs="+", choices=TRACKERS, default=[], help="also send metrics to these")
    add("--profile", **COUNT, default=0, help="trace step N of rank 0 (0: none)")
    add("--timeout-minutes", **NUMBER, default=30.0, help="limit for a collective or download")

    add = parser.add_argument_group("optimization").add_argument
    add("--batch-size", **COUNT, default=4, help="samples per rank and micro-batch")
    add("--gradient-accumulation-steps", **COUNT, default=1, help="micro-batches per step")
    add("--global-batch-size", **COUNT, default=0, help="samples per step on all "
        "ranks, in micro-batches of at most --batch-size (0: use the two flags above)")  # fmt: skip
    add("--accumulate-no-sync", **OFF, help="communicate once per step, not per micro-batch; every "
        "rank then holds the whole gradient")  # fmt: skip
    add("--epochs", **COUNT, default=2, help="passes over the training set")
    add("--max-steps", **COUNT, default=0, help="steps to train (0: --epochs)")
    add("--lr", **NUMBER, default=3e-4, help="peak learning rate")
    add("--lr-schedule", choices=["linear", "cosine", "constant", "step"], default="linear",
        help="after the warm-up; step multiplies by --gamma every epoch")  # fmt: skip
    add("--gamma", **NUMBER, default=0.85, help="factor of --lr-schedule step")
    add("--warmup-ratio", **NUMBER, default=0.03, help="fraction of steps for warm-up")
    add("--weight-decay", **NUMBER, default=0.01, help="except for biases and norms")
    add("--max-grad-norm", **NUMBER, default=1.0, help="clip gradients to this norm")
    add("--seed", **COUNT, default=0, help="for weights, data order and dropout")

    add = parser.add_argument_group("sharding").add_argument
    add("--fsdp", type=int, choices=[1, 2], help="1: FullyShardedDataParallel; 2: fully_shard "
        "(default: 1, with adapters 2)")  # fmt: skip
    add("--strategy", choices=list(strategies), default="full_shard", help="what to shard")
    add("--shard-group-size", **COUNT, default=0, help="for hybrid_shard (0: ranks of a node)")
    add("--cpu-offload", **OFF, help="keep parameters, gradients and optimizer state on the CPU")
    add("--precision", choices=["auto", *precisions], default="auto", help="compute dtype; "
        "auto: bf16 if the GPU supports it, else fp32")  # fmt: skip
    add("--activation-checkpointing", **OFF, help="recompute each block in the backward pass")
    add("--compile", **OFF, help="torch.compile each block")


def out_of_range(args: Namespace, limits: dict[str, tuple[float, float]] = LIMITS) -> list[str]:
    """Return an error message for each flag below its lower limit or not below its upper limit."""
    problems = []
    for name, (low, high) in limits.items():
        value = getattr(args, name, None)
        if value is None or low <= value < high:
            continue
        bounds = "above 0" if low == POSITIVE else f"at least {low}"
        if high < NO_LIMIT:
            bounds += f" and below {high:,}"
        flag = f"--{name.replace('_', '-')}"
        problems.append(f"{flag} {value} is out of range. It must be {bounds}.")
    return problems


def check_arguments(args: Namespace) -> list[str]:
    """Return an error message for each invalid value of the flags that all scripts share."""
    problems = out_of_range(args)
    modes = ("evaluate_only", "export_only", "prepare_only")
    if sum(getattr(args, name) for name in modes) > 1:
        problems.append("Pass only one of --evaluate-only, --export-only and --prepare-only.")
    for name in args.track:
        if importlib.util.find_spec(name) is None:
            problems.append(f"--track {name} is not installed. {INSTALL}")
    return problems


def resolve(
    args: Namespace, *modules: ModuleType, processes: int | None = None
) -> tuple[Namespace, list[str]]:
    """Return the arguments, with defaults that depend on other flags, and a message per mistake.

    Each module has `check_arguments`, which returns messages, and may have `resolve_arguments`,
    which returns defaults by name. `processes` is the world size (None: torchrun's).
    """
    args, problems = _resolve_micro_batches(args, processes or int(os.environ.get("WORLD_SIZE", 1)))
    for module in modules:
        if hasattr(module, "resolve_arguments"):
            args = Namespace(**vars(args) | module.resolve_arguments(args))
    for module in modules:
        problems += module.check_arguments(args)
    return args, problems


def validate(args: Namespace, *modules: ModuleType) -> Namespace:
    """Return the arguments with all defaults, or exit with one message that lists all mistakes."""
    args, problems = resolve(args, *modules)
    problems = check_arguments(args) + problems
    if problems:
        ranks.exit_with(" ".join(problems))
    return args


def _resolve_micro_batches(args: Namespace, processes: int) -> tuple[Namespace, list[str]]:
    """Return the flags with --global-batch-size cut into the fewest micro-batches, and errors."""
    total, limit = args.global_batch_size, args.batch_size
    if total <= 0 or limit < 1 or getattr(args, "export_only", False):
        return args, []
    if args.gradient_accumulation_steps > 1:
        return args, ["Pass --global-batch-size or --gradient-accumulation-steps, not both."]
    per_rank, remainder = divmod(total, processes)
    if remainder:
        return args, [f"--global-batch-size {total} is not a multiple of {processes} processes. "
                      f"Pass {total - remainder + processes}."]  # fmt: skip
    count = next(n for n in range(1, per_rank + 1) if per_rank % n == 0 and per_rank // n <= limit)
    batch = {"batch_size": per_rank // count, "gradient_accumulation_steps": count}
    return Namespace(**vars(args) | batch), []
