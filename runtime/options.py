"""Flags as typed fields of dataclasses, each declared once, and the check of all values at once.

The annotation of a field is the flag's type: int, float, str, bool (--x, --no-x), Literal (choices)
or list[str] (one or more words), each also `| None`. The first line of a class's docstring is the
title of its flags in --help. A subclass redeclares a field to change only its default.

A class may have two methods: `derive` sets values that depend on other flags, and raises ValueError
if it cannot; `problems` returns a message for each combination of values that cannot work.
"""

import argparse
import difflib
import importlib.util
import inspect
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

from . import ranks

INSTALL = "Run `pip install -r requirements-extras.txt`."
MODEL_NAME = "hub id, directory, or tiny (random, no download)"
BadRows = Literal["fail", "skip"]
Tracker = Literal["tensorboard", "wandb", "trackio"]
OTHERS = {  # flags of Transformers and TRL, and ours: the first that the script has
    "--learning-rate": "--lr", "--lr-scheduler-type": "--lr-schedule", "--report-to": "--track",
    "--bf16": "--precision bf16", "--fp16": "--precision fp16", "--num-train-epochs": "--epochs",
    "--save-steps": "--save-every", "--eval-steps": "--eval-every", "--logging-steps":
    "--log-every", "--save-total-limit": "--keep-checkpoints", "--train-file": "--dataset",
    "--validation-file": "--val-dataset", "--text-column": "--source-column", "--summary-column":
    "--target-column", "--max-seq-len": "--block-size/--source-length", "--max-length":
    "--block-size/--source-length", "--torch-compile": "--compile",
}  # fmt: skip


def flag(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    above: float | None = None,
    below: float = 2**31,
    metavar: str | None = None,
    convert: Callable[[str], Any] | None = None,
) -> Any:
    """Return the dataclass field of a flag. A number must be at least `low`, or greater than
    `above`, and less than `below`. `convert` makes the value from a word of the command line; by
    default that is the field's type."""
    metadata = {"help": help, "metavar": metavar, "convert": convert}
    if low is not None or above is not None:
        metadata |= {"low": low, "above": above, "below": below}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


class Parser(argparse.ArgumentParser):
    """A parser that rejects abbreviations and reports an error once, on rank 0. Its help starts
    with the first line and the commands of `docstring`."""

    def __init__(self, docstring: str) -> None:
        super().__init__(
            description="\n\n".join(docstring.split("\n\n")[:2]),
            usage="%(prog)s [flags]",
            formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=34),
            allow_abbrev=False,
        )

    def error(self, message: str) -> None:
        """Exit with code 1 and the message, with a suggestion for each misspelled flag."""
        flags = re.findall(r"--[\w-]+", self.format_help())
        for word in re.findall(r"--[\w-]+", message.partition("unrecognized arguments: ")[2]):
            name = word.replace("_", "-")
            close = [x for x in OTHERS.get(name, "").split("/") if x.split(" ")[0] in flags]
            close += difflib.get_close_matches(name, flags, n=1, cutoff=0.7)
            close += [x for x in flags if f"{x[1:]}-" in f"{name[1:]}-"]  # whose words it contains
            message += f" (did you mean {close[0]}?)" if close else ""
        ranks.exit_with(message)


def as_flag(name: str) -> str:
    """Return the flag of a field, such as --batch-size of batch_size."""
    return f"--{name.replace('_', '-')}"


def declarations(options: type) -> dict[str, tuple[type, Any, Any]]:
    """Return by field the class that declares it, its annotation, and its metadata there."""
    result = {}
    for base in options.__mro__:  # the first class that declares a field comes last
        for name, annotation in get_type_hints(base).items():
            metadata = base.__dataclass_fields__[name].metadata
            if metadata and name in inspect.get_annotations(base):
                result[name] = base, annotation, metadata
    return result


def make_parser(options: type) -> Parser:
    """Return the parser of a class of options, with a group of flags for each title."""
    parser = Parser(inspect.getmodule(options).__doc__ or "\n\n")
    groups: dict[str, Any] = {}
    values = vars(options())
    for name, (base, annotation, metadata) in declarations(options).items():
        title = base.__doc__.partition("\n")[0]
        group = groups.setdefault(title, parser.add_argument_group(title))
        group.add_argument(as_flag(name), **_argument(annotation, values[name], metadata))
    return parser


def _argument(annotation: Any, default: Any, metadata: Any) -> dict[str, Any]:
    """Return the keyword arguments of `add_argument` for a flag."""
    if type(None) in get_args(annotation):
        annotation = get_args(annotation)[0]  # of X | None
    text = metadata["help"].replace("%", "%%")
    if default not in (None, False, []):
        text = re.sub(r" \(default: .*\)$", "", text) + f" (default: {default})"
    result = {"help": text, "default": default}
    if annotation is bool:
        return result | {"action": argparse.BooleanOptionalAction}
    if get_origin(annotation) is list:
        result |= {"nargs": "+", "action": "extend"}
        (annotation,) = get_args(annotation)
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        return result | {"choices": choices, "type": type(choices[0])}
    metavar = metadata["metavar"] or {int: "N", float: "X"}.get(annotation, "TEXT")
    return result | {"type": metadata["convert"] or annotation, "metavar": metavar}


def out_of_range(options: type, values: dict[str, Any]) -> Iterator[str]:
    """Yield a message for each number in `values`, by name, outside the limits of its flag."""
    for name, (_, _, metadata) in declarations(options).items():
        value = values[name]
        if value is None or "low" not in metadata:
            continue
        low, above, below = metadata["low"], metadata["above"], metadata["below"]
        is_above = value > above if low is None else value >= low
        if not (is_above and value < below):  # also if it is nan
            bound = f"above {above}" if low is None else f"at least {low}"
            yield f"{as_flag(name)} {value} is out of range. It must be {bound}, below {below:,}."


def parse(options: type, argv: list[str] | None = None, tiny: type | None = None) -> Any:
    """Return the options of `argv` (default: sys.argv), or exit with one message for all problems.
    With --model-name tiny they are of the class `tiny`, a subclass with other defaults."""
    values = vars(make_parser(options).parse_args(argv))
    if tiny and values["model_name"] == "tiny":
        options, values = tiny, vars(make_parser(tiny).parse_args(argv))
    args = options(**values)
    problems = [*out_of_range(options, values), *derive(args)]
    if problems:
        ranks.exit_with(" ".join(problems))
    return args


def derive(args: Any) -> list[str]:
    """Set the values that depend on others; return a message for each problem."""
    problems = []
    for base in type(args).__mro__:
        try:
            vars(base).get("derive", lambda _: None)(args)
        except ValueError as error:
            problems.append(str(error))
    for base in type(args).__mro__:
        problems += vars(base).get("problems", lambda _: [])(args)
    return problems


def cut_global_batch(args: Any, processes: int) -> None:
    """Cut --global-batch-size, if it is set, into the fewest micro-batches of at most --batch-size.
    Raise ValueError if that fails."""
    total = args.global_batch_size
    if total <= 0 or args.batch_size < 1:
        return
    if args.gradient_accumulation_steps > 1:
        raise ValueError("Pass --global-batch-size or --gradient-accumulation-steps, not both.")
    per_rank, remainder = divmod(total, processes)
    if remainder:
        raise ValueError(
            f"--global-batch-size {total} is not a multiple of {processes} processes. "
            f"Pass {total - remainder + processes}."
        )
    sizes = range(min(args.batch_size, per_rank), 0, -1)
    args.batch_size = next(size for size in sizes if per_rank % size == 0)
    args.gradient_accumulation_steps = per_rank // args.batch_size


@dataclass
class Run:
    """run"""

    output_dir: str = flag("output", "for checkpoints, metrics, exports", metavar="DIR")
    evaluate_only: bool = flag(False, "validate --model-name, or the adapters in --output-dir")
    export_only: bool = flag(False, "export the newest checkpoint to final/")
    prepare_only: bool = flag(False, "tokenize into OUTPUT_DIR/prepared, for --dataset")
    log_every: int = flag(10, "steps between training metrics", low=1)
    eval_every: int | None = flag(
        None, "steps between validations; 0: at the end (default: after each epoch)", low=0
    )
    save_every: int | None = flag(50, "steps between checkpoints; 0: at the end", low=0)
    checkpoint_type: Literal["sharded", "full"] = flag(
        "sharded", "one file per rank; full: one file, for which rank 0 holds the whole state"
    )
    async_save: bool = flag(False, "save in the background, from a host copy")
    keep_checkpoints: int = flag(2, "newest checkpoints to keep", low=1)
    save_best: bool = flag(True, "export best/ after each validation with the lowest loss so far")
    export_dtype: Literal["fp32", "bf16", "fp16"] = flag("fp32", "of best/, final/")
    track: list[Tracker] = flag([], "also send metrics to these")
    profile: int = flag(0, "trace step N of rank 0 (0: none)", low=0)
    timeout_minutes: float = flag(30.0, "limit for a collective or download", above=0)

    def problems(self) -> list[str]:
        """Return a message for each missing tracker, and for flags that contradict."""
        missing = [name for name in self.track if importlib.util.find_spec(name) is None]
        problems = [f"--track {name} is not installed. {INSTALL}" for name in missing]
        problems += [] if self.output_dir else ["--output-dir is empty. Pass a directory."]
        if self.evaluate_only + self.export_only + self.prepare_only > 1:
            problems.append("Pass only one of --evaluate-only, --export-only and --prepare-only.")
        return problems


@dataclass
class Optimization:
    """optimization"""

    batch_size: int = flag(4, "samples per rank and micro-batch", low=1)
    gradient_accumulation_steps: int = flag(1, "micro-batches per step", low=1)
    global_batch_size: int = flag(0, "samples per step on all ranks, in micro-batches of at most "
        "--batch-size (0: use the two flags above)", low=0)  # fmt: skip
    accumulate_no_sync: bool = flag(False, "communicate once per step, not per micro-batch; every "
        "rank then holds the whole gradient")  # fmt: skip
    num_workers: int = flag(0, "processes per rank that load samples", low=0)
    epochs: int = flag(2, "passes over the training set", low=1)
    max_steps: int = flag(0, "steps to train (0: --epochs)", low=0)
    lr: float = flag(3e-4, "peak learning rate", above=0, below=10)
    lr_schedule: Literal["linear", "cosine", "constant", "step"] = flag(
        "linear", "after the warm-up; step has none, and multiplies by --gamma every epoch"
    )
    gamma: float = flag(0.85, "factor of --lr-schedule step", above=0)
    warmup_ratio: float = flag(0.03, "fraction of steps for warm-up", low=0, below=1)
    warmup_steps: int = flag(0, "steps of warm-up (0: --warmup-ratio)", low=0)
    weight_decay: float = flag(0.01, "except for biases and norms", low=0)
    max_grad_norm: float = flag(1.0, "clip gradients to this norm", above=0)
    seed: int = flag(0, "for weights, data order and dropout", low=0, below=2**31)

    def derive(self) -> None:
        """Cut --global-batch-size into micro-batches. Raise ValueError if that fails."""
        if not self.export_only:
            cut_global_batch(self, int(os.environ.get("WORLD_SIZE", 1)))
