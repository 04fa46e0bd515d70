"""Command lines from dataclasses: a field is a flag, the docstring below it is its help.

A script's arguments are a dataclass of sections, each a dataclass. Flags have no prefix: the field
`args.optim.lr` is --lr. The sections that all scripts share are here.
"""

import contextlib
import dataclasses
import io
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import tyro

from .ranks import GRACE_SECONDS, environment_size, exit_with

T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """The values that a number may have: from `low`, or above it if `is_open`, to below `high`."""

    low: float
    high: float = 2**31
    is_open: bool = False

    def __contains__(self, value: float) -> bool:
        return (value > self.low if self.is_open else value >= self.low) and value < self.high

    def __str__(self) -> str:
        return f"{'above' if self.is_open else 'at least'} {self.low}, below {self.high:,}"


Count = Annotated[int, Range(1), tyro.conf.arg(metavar="N")]
Size = Annotated[int, Range(0), tyro.conf.arg(metavar="N")]  # the help says what 0 means
Interval = Annotated[int | None, Range(0), tyro.conf.arg(metavar="N")]
Positive = Annotated[float, Range(0, is_open=True), tyro.conf.arg(metavar="X")]
Fraction = Annotated[float, Range(0, 1), tyro.conf.arg(metavar="X")]
Switch = Annotated[bool, tyro.conf.arg(help_behavior_hint="")]  # off by default
Names = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")]


@dataclass
class Model:
    """What is trained."""

    model_name: str
    """hub id, directory, or tiny (random, no download)"""


@dataclass
class Run:
    """What is written, where and when. Its directory says whether a run resumes."""

    output_dir: Path = Path("output")
    """for checkpoints, metrics.jsonl, best/ and final/; a run in it resumes"""
    evaluate_only: Switch = False
    """validate --model-name, or the adapters in --output-dir"""
    export_only: Switch = False
    """export the newest checkpoint to final/"""
    log_every: Count = 10
    """steps between training metrics"""
    eval_every: Interval = None
    """steps between validations, besides those after each epoch; 0: only at the end"""
    save_every: Interval = 50
    """steps between checkpoints, besides those after each epoch; 0: only at the end"""
    checkpoint_type: Literal["sharded", "full"] = "sharded"
    """full: besides a file per rank, rank 0 writes full.pt of the whole state"""
    keep_checkpoints: Count = 2
    """newest checkpoints to keep"""
    save_best: bool = True
    """export best/ after each validation with the lowest loss so far"""
    export_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """of the weights in best/ and final/"""
    timeout_minutes: Positive = 30.0
    """limit for a collective or download"""


@dataclass
class Optim:
    """A step trains on batch size x accumulation steps x processes samples."""

    batch_size: Count = 4
    """samples per process and micro-batch"""
    gradient_accumulation_steps: Count = 1
    """micro-batches per step"""
    global_batch_size: Size = 0
    """samples per step of all processes, in micro-batches of at most --batch-size; 0: use the two
    flags above"""
    accumulate_no_sync: Switch = False
    """communicate once per step; each process then holds the whole gradient"""
    num_workers: Size = 0
    """processes per rank that load samples"""
    epochs: Count = 2
    """passes over the training set"""
    max_steps: Size = 0
    """steps to train; 0: --epochs"""
    lr: Annotated[float, Range(0, 10, is_open=True), tyro.conf.arg(metavar="X")] = 3e-4
    """peak learning rate"""
    lr_schedule: Literal["linear", "cosine", "constant", "step"] = "linear"
    """after the warm-up; step has none, and multiplies by --gamma every epoch"""
    gamma: Positive = 0.85
    """factor of --lr-schedule step"""
    warmup_ratio: Fraction = 0.03
    """fraction of the steps for warm-up"""
    warmup_steps: Size = 0
    """steps of warm-up; 0: --warmup-ratio"""
    weight_decay: Annotated[float, Range(0), tyro.conf.arg(metavar="X")] = 0.01
    """except for biases and norms"""
    max_grad_norm: Positive = 1.0
    """clip gradients to this norm"""
    seed: Size = 0
    """of weights, data order and dropout"""


def parse(kind: type[T], docstring: str, tiny: T) -> tuple[T, list[str]]:
    """Return the arguments of sys.argv, and a message for each number that is out of range. `tiny`
    are the defaults if `model.model_name` is tiny.

    --global-batch-size is cut into micro-batches. If the arguments cannot be parsed, exit with code
    1 and a message, which only rank 0 prints.
    """
    is_first = int(os.environ.get("RANK", 0)) == 0
    description = "\n".join(docstring.split("\n\n")[:2])  # the first line and the commands
    # --lr, not --optim.lr; no help from the comments that mark optional lines
    config = tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff
    # tyro prints some errors in spite of console_outputs
    hidden = contextlib.nullcontext() if is_first else contextlib.redirect_stderr(io.StringIO())
    options = {"description": description, "config": config, "console_outputs": is_first}
    try:
        with hidden:
            args = tyro.cli(kind, **options)
            if args.model.model_name == "tiny":
                args = tyro.cli(kind, default=tiny, **options)
    except SystemExit as end:
        if end.code and not is_first:
            time.sleep(GRACE_SECONDS)  # rank 0 prints first: its exit ends this rank
        raise SystemExit(1 if end.code else 0) from None
    problems = out_of_range(args)
    if not problems and not args.run.export_only:
        problems = fit_global_batch(args.optim, environment_size())
    return args, problems


def checked(args: T, problems: list[str]) -> T:
    """Return `args`, or exit with one message for all `problems` and those that the methods
    `problems` of its sections return, given `args`."""
    for section in vars(args).values():
        problems += section.problems(args) if hasattr(section, "problems") else []
    if problems:
        exit_with(" ".join(problems))
    return args


def out_of_range(section: Any) -> list[str]:
    """Return a message for each number in a section, or in those that it contains, that is not in
    the Range of its annotation, and for a repeated list, of which tyro keeps only the last part."""
    problems = []
    for name, hint in get_type_hints(type(section), include_extras=True).items():
        value = getattr(section, name)
        if isinstance(value, tuple) and sys.argv.count(f"--{name.replace('_', '-')}") > 1:
            problems.append(f"Pass --{name.replace('_', '-')} once, with all its values.")
        if dataclasses.is_dataclass(value):
            problems += out_of_range(value)
        for limit in getattr(hint, "__metadata__", ()):
            if isinstance(limit, Range) and value is not None and value not in limit:
                problems.append(f"--{name.replace('_', '-')} is {value}, but must be {limit}.")
    return problems


def fit_global_batch(optim: Optim, processes: int) -> list[str]:
    """Cut --global-batch-size, if it is set, into the fewest micro-batches of at most --batch-size.
    Return a message if that fails."""
    total = optim.global_batch_size
    if total == 0:
        return []
    if optim.gradient_accumulation_steps > 1:
        return ["Pass --global-batch-size or --gradient-accumulation-steps, not both."]
    per_rank, remainder = divmod(total, processes)
    if remainder:
        multiple = total - remainder + processes
        return [f"--global-batch-size {total} is not a multiple of {processes} processes. "
                f"Pass {multiple}."]  # fmt: skip
    sizes = range(min(optim.batch_size, per_rank), 0, -1)
    optim.batch_size = next(size for size in sizes if per_rank % size == 0)
    optim.gradient_accumulation_steps = per_rank // optim.batch_size
    return []
