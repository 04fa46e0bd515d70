"""Command lines from dataclasses: a field is a flag, the docstring below it is its help. A script's
arguments are sections, each a dataclass: the field `args.optim.lr` is --lr."""

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

import tyro

from .ranks import Problem, finish


class Range(NamedTuple):
    """The values that a number may have, from `low` to below `high`, in its annotation."""

    low: float
    high: float = 2**31


Count = Annotated[int, Range(1)]
Size = Annotated[int, Range(0)]  # the help says what 0 means
Interval = Annotated[int | None, Range(0)]
Positive = Annotated[float, Range(1e-12)]
NonNegative = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1)]
Names = tuple[str, ...]


@dataclass
class Model:
    """What is trained."""

    model_name: str
    """hub id, directory, or tiny (random, no download)"""


@dataclass
class Run:
    """What is written, where and when. Its directory says whether a run resumes."""

    output_dir: Path = Path("output")
    """directory of checkpoints, metrics.jsonl and final/; a run in it resumes"""
    log_every: Count = 10
    """steps between training metrics"""
    eval_every: Interval = None
    """unset: validate after each epoch and at the end; N: also every N steps; 0: only at the end"""
    save_every: Size = 50
    """save a checkpoint every N steps, after each epoch and at the end; 0: only at the end"""
    checkpoint_type: Literal["sharded", "full"] = "sharded"
    """full: besides a file per rank, rank 0 writes full.pt of the whole state"""
    keep_checkpoints: Count = 2
    """newest checkpoints to keep"""
    export_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """dtype of exported weights"""
    timeout_minutes: Positive = 30.0
    """limit for a collective or download"""


@dataclass
class Optim:
    """A step trains on batch size x accumulation steps x processes samples."""

    batch_size: Count = 4
    """samples per process and micro-batch"""
    gradient_accumulation_steps: Count = 1
    """micro-batches per step"""
    accumulate_no_sync: bool = False
    """communicate once per step; each process then holds the whole gradient"""
    num_workers: Size = 0
    """processes per rank that load samples"""
    epochs: Count = 2
    """passes over the training set"""
    max_steps: Size = 0
    """steps to train; 0: --epochs"""
    lr: Annotated[float, Range(1e-12, 10)] = 3e-4
    """peak learning rate"""
    lr_schedule: Literal["linear", "cosine", "constant", "step"] = "linear"
    """after the warm-up, linear or cosine to 0 or --min-lr-ratio; step: times --gamma per epoch"""
    min_lr_ratio: Fraction = 0.0
    """lowest learning rate of linear and cosine, as a fraction of --lr"""
    gamma: Positive = 0.85
    """factor of --lr-schedule step"""
    warmup_ratio: Fraction = 0.03
    """fraction of the steps for warm-up"""
    warmup_steps: Size = 0
    """steps of warm-up; 0: --warmup-ratio"""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the two moments"""
    weight_decay: NonNegative = 0.01
    """AdamW's weight decay, except for biases and norms"""
    max_grad_norm: NonNegative = 1.0
    """clip gradients to this norm; 0: do not clip"""
    seed: Size = 0
    """random seed of weights, data order and dropout"""


def flags_of(*sections: Any) -> dict[str, str]:
    """Return the values of sections of arguments, as text, by flag, such as --lr."""
    return {
        "--" + name.replace("_", "-"): str(value)
        for section in sections
        for name, value in vars(section).items()
    }


def parse(kind: type, docstring: str, tiny: Any) -> Any:
    """Return the arguments of sys.argv, or exit with a message for all that is wrong. `tiny` are
    the defaults if `model.model_name` is tiny."""
    options = {
        "description": "\n".join(docstring.split("\n\n")[:2]),  # the first line and the commands
        # --lr, not --optim.lr; no help from comments
        "config": (tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff),
    }
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message):
            args = tyro.cli(kind, **options)
            if args.model.model_name == "tiny":
                args = tyro.cli(kind, default=tiny, **options)
    except SystemExit as end:
        if end.code == 0:  # --help
            raise
        finish(Problem(f"\n{message.getvalue()}"))
    return _validate(args)


def _validate(args: Any) -> Any:
    """Return `args`, after each section's `resolve` has chosen what flags leave open. Exit with a
    message for numbers out of their Range or, if there are none, for the sections' `problems`."""
    sections = vars(args).values()
    problems = []
    for section in sections:
        hints = get_type_hints(type(section), include_extras=True)
        for name, value in vars(section).items():
            for limit in get_args(hints[name]):
                if not isinstance(limit, Range) or value is None:
                    continue
                if not limit.low <= value < limit.high:
                    flag = "--" + name.replace("_", "-")
                    problems.append(
                        f"{flag} is {value}, but must be at least {limit.low}, "
                        f"below {limit.high:,}."
                    )
    if not problems:
        for section in sections:
            if hasattr(section, "resolve"):
                section.resolve(args)
        for section in sections:
            if hasattr(section, "problems"):
                problems += section.problems(args)
    if problems:
        finish(Problem(" ".join(problems)))
    return args
