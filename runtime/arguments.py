"""The flags that mean the same in every script, and the check of all values at once."""

import argparse
import difflib
import importlib.util
import os
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from . import ranks

OFF = {"action": argparse.BooleanOptionalAction, "default": False}
ON = {"action": argparse.BooleanOptionalAction, "default": True}
INSTALL = "pip install -r requirements-extras.txt"
METAVARS = {int: "N", float: "X", Path: "PATH"}
COMMON = (  # what nine of ten runs set
    "model_name", "dataset", "val_dataset", "source_column", "target_column", "source_prefix",
    "output_dir", "epochs", "max_steps", "batch_size", "gradient_accumulation_steps",
    "lr", "block_size", "max_seq_length", "strategy", "fsdp", "activation_checkpointing",
    "lora_rank", "load_in_4bit", "evaluate_only",
)  # fmt: skip
TRACKERS = ["tensorboard", "wandb", "trackio"]


class Extend(argparse.Action):
    """Collects the words of a flag that may be repeated; argparse's extend keeps the default."""

    def __call__(self, parser: Any, namespace: Namespace, values: Any, _: Any = None) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, values if before is self.default else [*before, *values])


WORDS = {"nargs": "+", "action": Extend}
BAD_ROWS = {"choices": ["fail", "skip"], "default": "fail", "help": "skip: leave out unusable rows"}


def at_least(low: int) -> dict[str, Any]:
    """Return the options of a flag that takes an integer of at least `low`."""

    def integer(text: str) -> int:
        if int(text) < low:
            raise argparse.ArgumentTypeError(f"{text} is out of range: it must be at least {low}")
        return int(text)

    return {"type": integer, "metavar": "N"}


class Help(argparse.HelpFormatter):
    """Shows a flag with its default, and leaves examples as they are written."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        flag = action.option_strings[0]
        if isinstance(action, argparse.BooleanOptionalAction):
            return action.option_strings[1] if action.default else flag
        if action.nargs == 0:
            return ", ".join(action.option_strings)
        value = action.metavar or METAVARS.get(action.type, "NAME")
        return flag + {"+": f" {value} ...", "?": f" [{value}]"}.get(action.nargs, f" {value}")

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"do not {text}" if action.default else text
        if "(default" in text or action.nargs == 0:
            return text
        notes = []
        if action.choices:
            notes.append(", ".join(map(str, action.choices)))
        if action.default and action.default != argparse.SUPPRESS:
            notes.append(f"default {action.default}")
        return f"{text} ({'; '.join(notes)})" if notes else text

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith(" "):  # commands
            return text
        return super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, said by rank 0, and which takes no abbreviations.

    Its help begins with title and commands of the description, then what most runs set.
    """

    def __init__(self, description: str) -> None:
        super().__init__(description=description, formatter_class=Help, allow_abbrev=False)

    def format_help(self) -> str:
        """Return the text of --help."""
        title, commands, *rest = self.description.strip("\n").split("\n\n")
        formatter = self._get_formatter()
        formatter.add_usage(f"{self.prog} [flags]", [], [])
        formatter.add_text(title)
        formatter.add_text(commands)
        by_name = {action.dest: action for action in reversed(self._actions)}  # not the --no-...
        common = [by_name[name] for name in COMMON if name in by_name]
        groups = [("what most runs set", common)]
        for group in self._action_groups:
            others = [action for action in group._group_actions if action not in common]
            groups.append((group.title, others))
        for heading, actions in groups:
            formatter.start_section(heading)
            formatter.add_arguments(actions)
            formatter.end_section()
        for paragraph in rest:
            formatter.add_text(paragraph)
        return formatter.format_help()

    def error(self, message: str) -> None:
        """End with exit code 1, and for a flag that is none with one that looks like it."""
        start, colon, words = message.partition("unrecognized arguments: ")
        flags = [word for word in words.split() if word.startswith("--")]
        hints = [did_you_mean(flag, self._option_string_actions) for flag in flags]
        ranks.exit_with(start + colon + words + "".join(hints))


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return " (did you mean NAME?)" of the one of `names` that is nearest, "" if none is near.

    Of hub ids and paths the last parts are compared: a user knows these best.
    """
    others = [name for name in names if name != word]
    by_last_part = {name.rpartition("/")[2].lower(): name for name in reversed(others)}
    near = difflib.get_close_matches(word.rpartition("/")[2].lower(), by_last_part, n=1)
    return f" (did you mean {by_last_part[near[0]]}?)" if near else ""


def add_model(parser: argparse.ArgumentParser) -> Callable:
    """Declare --model-name in the group "model"; return what adds a flag to that."""
    add = parser.add_argument_group("model").add_argument
    add("--model-name", help="hub id, directory, or tiny (random, no download)")
    return add


def add_common(
    parser: argparse.ArgumentParser, strategies: Iterable[str], precisions: Iterable[str]
) -> None:
    """Declare the flags of every script; `set_defaults` changes a default.

    `strategies` and `precisions` are the choices that policies.py has.
    """
    _add_run(parser)
    _add_optimization(parser)
    _add_sharding(parser, list(strategies), list(precisions))


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("run").add_argument
    add("--output-dir", default="output", help="checkpoints, metrics and the final model")
    add("--export-only", **OFF, help="write the newest checkpoint to final/ and exit")
    add("--prepare-only", **OFF, help="write the tokens to OUTPUT_DIR/prepared, for --dataset, "
        "and exit")  # fmt: skip
    add(
        "--evaluate-only",
        **OFF,
        help="validate --model-name, such as OUTPUT_DIR/best; with --lora-rank the newest "
        "checkpoint of --output-dir",
    )
    add("--log-every", type=int, default=10, help="steps between training metrics")
    add("--eval-every", type=int, default=0, help="steps between validations (0: epochs only)")
    add("--save-every", type=int, default=50, help="steps between checkpoints (0: epochs only)")
    add(
        "--checkpoint-type",
        choices=["sharded", "full"],
        default="sharded",
        help="a file per rank, or one file, for which rank 0 holds the whole state",
    )
    add("--async-save", **OFF, help="save while training goes on, from a copy in host memory")
    add("--keep-checkpoints", type=int, default=2, help="how many of the newest to keep")
    add("--save-best", **ON, help="export best/ after each validation with the lowest loss so far")
    add("--export-dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help="of best/, final/")
    add(
        "--track",
        nargs="+",
        choices=TRACKERS,
        default=[],
        help="send the numbers of metrics.jsonl to these trackers too",
    )
    add(
        "--profile", type=int, default=0, metavar="N", help="trace step N of rank 0 into OUTPUT_DIR"
    )
    add(
        "--timeout-minutes",
        type=float,
        default=30.0,
        help="limit of a collective or a download; a rank without progress for a third of it "
        "writes its stacks into OUTPUT_DIR",
    )


def _add_optimization(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("optimization").add_argument
    add("--batch-size", type=int, default=4, help="samples per rank and micro-batch")
    add("--gradient-accumulation-steps", type=int, default=1, help="micro-batches of a step")
    add_global_batch(add)
    add(
        "--accumulate-no-sync",
        **OFF,
        help="communicate once per step, not per micro-batch; every rank then holds the whole "
        "gradient, summed in the compute dtype (--fsdp 2: in that of the reduction)",
    )
    add("--epochs", type=int, default=2, help="passes over the training set")
    add("--max-steps", type=int, default=0, help="train so many steps (0: --epochs decides)")
    add("--lr", type=float, default=3e-4, help="peak learning rate")
    add(
        "--lr-schedule",
        choices=["linear", "cosine", "constant", "step"],
        default="linear",
        help="after the warm-up; step multiplies by --gamma after every epoch",
    )
    add("--gamma", type=float, default=0.85, help="factor of --lr-schedule step")
    add("--warmup-ratio", type=float, default=0.03, help="share of the steps with rising rate")
    add("--weight-decay", type=float, default=0.01, help="AdamW's, not for biases and norms")
    add("--max-grad-norm", type=float, default=1.0, help="gradients are clipped to this norm")
    add("--seed", type=int, default=0, help="of weights, data order and dropout")


def _add_sharding(
    parser: argparse.ArgumentParser, strategies: list[str], precisions: list[str]
) -> None:
    add = parser.add_argument_group("sharding").add_argument
    add(
        "--fsdp",
        type=int,
        choices=[1, 2],
        help="1: FullyShardedDataParallel, 2: fully_shard (default: 1)",
    )
    add("--strategy", choices=strategies, default="full_shard", help="what is sharded")
    add("--shard-group-size", type=int, default=0, help="hybrid_shard's (0: the ranks of a node)")
    add("--cpu-offload", **OFF, help="keep parameters, gradients and optimizer state on the CPU")
    add(
        "--precision",
        choices=["auto", *precisions],
        default="auto",
        help="auto: bf16 where the GPU has it, else fp32; what is trained stays fp32",
    )
    add_recomputation(add)
    add("--compile", **OFF, help="torch.compile of each block; on a CPU with a C++ compiler")


def add_recomputation(add: Callable, default: str | bool | None = False, note: str = "") -> None:
    """Declare --activation-checkpointing, alone or with a value, and its --no- form; `note` ends
    its help."""
    add(
        "--activation-checkpointing",
        nargs="?",
        choices=["blocks", "attention"],
        const="blocks",
        default=default,
        help=f"recompute blocks in the backward pass; attention: all of them but that{note}",
    )
    add(
        "--no-activation-checkpointing",
        action="store_false",
        dest="activation_checkpointing",
        default=default,
        help="recompute nothing",
    )


def add_global_batch(add: Callable) -> None:
    """Declare --global-batch-size."""
    add(
        "--global-batch-size",
        type=int,
        default=0,
        help="samples of a step on all processes, however many these are: it chooses the "
        "accumulation, and micro-batches of at most --batch-size (0: the two flags above decide)",
    )


def out_of_range(args: Namespace, limits: dict[str, tuple[float, float]]) -> list[str]:
    """List a sentence for each value below its lower limit, or not below its upper one."""
    problems = []
    for name, (low, high) in limits.items():
        value = getattr(args, name)
        if low <= value < high:
            continue
        flag = f"--{name.replace('_', '-')}"
        bounds = "above 0" if low == LEAST else f"at least {low}"
        if high < ANY:
            bounds += f" and below {high:,}"
        problems.append(f"{flag} {value} is out of range: it must be {bounds}")
    return problems


LEAST = 1e-12  # the lower limit of what must be above 0
ANY = 2**31  # an upper limit that no user meets
LIMITS = {
    **dict.fromkeys(("batch_size", "gradient_accumulation_steps", "epochs"), (1, ANY)),
    **dict.fromkeys(("log_every", "keep_checkpoints"), (1, ANY)),
    **dict.fromkeys(("max_steps", "eval_every", "save_every", "profile", "seed"), (0, ANY)),
    "global_batch_size": (0, ANY),
    **dict.fromkeys(("weight_decay", "shard_group_size"), (0, ANY)),
    **dict.fromkeys(("lr", "gamma", "max_grad_norm"), (LEAST, 1_000_000)),
    "timeout_minutes": (LEAST, 1_000_000),
    "warmup_ratio": (0, 1),
}


OPTIONAL = {  # flags, by the file of this folder that a copy may leave out
    "track": "trackers.py",
    "prepare_only": "tokens.py",
    "load_in_4bit": "nf4.py",
}


def check_arguments(args: Namespace) -> list[str]:
    """List what is wrong with the flags of every script, a sentence each; policies has the rest."""
    output = Path(args.output_dir)
    is_model = output.is_dir() and output.resolve() == Path(args.model_name).expanduser().resolve()
    problems = out_of_range(args, LIMITS)
    if args.export_only + args.prepare_only + args.evaluate_only > 1:
        problems.append("--export-only, --prepare-only and --evaluate-only: give one of them")
    if output.is_file():
        problems.append(f"--output-dir {output} is a file: name a directory")
    if is_model:
        problems.append(f"--output-dir {output} is the model's own directory: name another")
    for name, file in OPTIONAL.items():
        if getattr(args, name, False) and not (Path(__file__).parent / file).is_file():
            problems.append(f"--{name.replace('_', '-')} needs runtime/{file}, which is not here")
    for name in args.track:
        if importlib.util.find_spec(name) is None:
            problems.append(f"--track {name} needs {name}: {INSTALL}")
    return problems


def resolved(
    args: Namespace, *rooms: ModuleType, processes: int | None = None
) -> tuple[Namespace, list[str]]:
    """Return the arguments with values for what was left open, and a sentence for each mistake.

    Each of the `rooms` has `resolve_arguments`, which returns such values by name, and
    `check_arguments`, which looks at the result. `processes` is by default torchrun's number.
    """
    args, problems = _micro_batches(args, processes or int(os.environ.get("WORLD_SIZE", 1)))
    for room in rooms:
        args = Namespace(**vars(args) | room.resolve_arguments(args))
    return args, problems + [problem for room in rooms for problem in room.check_arguments(args)]


def _micro_batches(args: Namespace, processes: int) -> tuple[Namespace, list[str]]:
    """Resolve --global-batch-size: as few micro-batches as can be, of at most --batch-size."""
    total, most = args.global_batch_size, args.batch_size
    only = ("prepare_only", "export_only", "evaluate_only")
    if total <= 0 or most < 1 or any(getattr(args, name, False) for name in only):
        return args, []
    if args.gradient_accumulation_steps > 1:
        return args, ["--global-batch-size chooses --gradient-accumulation-steps: give one of them"]
    per_rank, rest = divmod(total, processes)
    if rest:
        near = [str(n) for n in (total - rest, total - rest + processes) if n]
        return args, [
            f"--global-batch-size {total} is no multiple of the {processes} processes: "
            f"{' or '.join(near)} is"
        ]
    steps = next(n for n in range(1, per_rank + 1) if per_rank % n == 0 and per_rank // n <= most)
    found = {"batch_size": per_rank // steps, "gradient_accumulation_steps": steps}
    return Namespace(**vars(args) | found), []


def checked(args: Namespace, problems: list[str]) -> Namespace:
    """Return the arguments, or end with all that is wrong in one line.

    `problems` are those of the flags that are not declared here.
    """
    problems = check_arguments(args) + problems
    if problems:
        ranks.exit_with("; ".join(problems))
    return args


def without_training(args: Namespace) -> dict[str, Any]:
    """Return the values that an evaluation depends on: not the run's and the optimization's."""
    parser = argparse.ArgumentParser()
    _add_run(parser)
    _add_optimization(parser)
    unused = {"optimizer", *vars(parser.parse_args([]))} - {"batch_size", "seed"}
    return {name: value for name, value in vars(args).items() if name not in unused}
