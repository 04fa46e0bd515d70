"""The flags that mean the same in every script, and the check of all values at once."""

import argparse
import importlib.util
import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from . import ranks

OFF = {"action": argparse.BooleanOptionalAction, "default": False}
ON = {"action": argparse.BooleanOptionalAction, "default": True}
INSTALL = "pip install -r requirements-extras.txt"
STRATEGIES = ["full_shard", "shard_grad_op", "hybrid_shard", "no_shard", "ddp"]
TRACKERS = ["tensorboard", "wandb", "trackio"]
PAGED = "paged_adamw_32bit"
PRECISIONS = ["bf16", "bf16-fp32-reduce", "fp16", "fp32"]


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the defaults that are not None, and the program's docstring as it is written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None:
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, said by rank 0, and which takes no abbreviations."""

    def __init__(self, description: str) -> None:
        super().__init__(description=description, formatter_class=HelpFormatter, allow_abbrev=False)

    def error(self, message: str) -> None:
        """End with exit code 1."""
        ranks.exit_with(message)


def add_model(parser: argparse.ArgumentParser, default: str) -> Callable:
    """Declare --model-name in the group "model"; return what adds a flag to that."""
    add = parser.add_argument_group("model").add_argument
    add("--model-name", default=default, help="hub id, local directory, or tiny (random weights, "
        "bytes as tokens, no download)")  # fmt: skip
    return add


def add_common(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of every script; `set_defaults` changes a default. `began`, which is no
    flag, is the day on which the run began, such as 2026-11-23, once `Run` knows it."""
    parser.set_defaults(began=None)
    _add_run(parser)
    _add_optimization(parser)
    _add_sharding(parser)


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("run").add_argument
    add("--output-dir", default="output", help="checkpoints, metrics and the final model")
    add("--resume", default="auto", help="auto (newest complete checkpoint), none, or a PATH")
    add("--export-only", **OFF, help="write the newest checkpoint to final/ and exit")
    add("--prepare-only", **OFF, help="write the tokens to OUTPUT_DIR/prepared, for --dataset, "
        "and exit")  # fmt: skip
    add(
        "--evaluate-only",
        **OFF,
        help="validate without training, into evaluation.json: the newest checkpoint, or that of "
        "--resume; --model-name itself if there is none, with --resume none, or if it is another "
        "directory than the training's, such as final/",
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
    add("--export-dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help="of best/, final/")
    add("--max-shard-size", type=float, default=5.0, help="largest exported file, in GB")
    add("--ignore-free-space", **OFF, help="begin though the disk is too full for what it saves")
    add(
        "--track",
        nargs="+",
        choices=TRACKERS,
        default=[],
        help="send the numbers of metrics.jsonl to these trackers too",
    )
    add("--profile", type=int, default=0, metavar="N", help="trace step N of rank 0 into "
        "OUTPUT_DIR, and write there what fills a GPU's memory if it is not enough")  # fmt: skip
    add("--track-memory", **OFF, help="report peak memory: allocated and reserved, or RSS")
    add("--stall-minutes", type=float, default=10.0, help="a step, save or load that takes longer "
        "has every rank print where it is (0: never)")  # fmt: skip
    add("--timeout-minutes", type=float, default=30.0, help="limit of a collective or a download")


def _add_optimization(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("optimization").add_argument
    add("--batch-size", type=int, default=4, help="samples per rank and micro-batch")
    add("--gradient-accumulation-steps", type=int, default=1, help="micro-batches per step")
    add(
        "--accumulate-no-sync",
        **OFF,
        help="communicate once per step, not per micro-batch; every rank then holds the whole "
        "gradient, summed in the compute dtype (--fsdp 2: in that of the reduction)",
    )
    add("--epochs", type=int, default=2, help="passes over the training set")
    add("--max-steps", type=int, default=0, help="train just so many steps (0: --epochs decides)")
    add(
        "--optimizer",
        choices=["adamw", PAGED],
        default="adamw",
        help="paged: bitsandbytes' AdamW, whose moments a full GPU moves to the CPU; --fsdp 1",
    )
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


def _add_sharding(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sharding").add_argument
    add(
        "--fsdp",
        type=int,
        choices=[1, 2],
        help="1: FullyShardedDataParallel, 2: fully_shard (default: 1)",
    )
    add("--strategy", choices=STRATEGIES, default="full_shard", help="what is sharded")
    add("--shard-group-size", type=int, default=0, help="hybrid_shard's (0: the ranks of a node)")
    add("--cpu-offload", **OFF, help="keep parameters, gradients and optimizer state on the CPU")
    add(
        "--precision",
        choices=["auto", *PRECISIONS],
        default="auto",
        help="auto: bf16 where the GPU has it, else fp32; what is trained stays fp32",
    )
    add("--activation-checkpointing", **OFF, help="recompute blocks in the backward pass")
    add("--compile", **OFF, help="torch.compile of each block; on a CPU with a C++ compiler")


def fill_samples(args: Namespace, train: int, val: int) -> None:
    """What --num-train-samples and --num-val-samples are where the user has said nothing."""
    if args.num_train_samples is None:
        args.num_train_samples = train
    if args.num_val_samples is None:
        args.num_val_samples = val


def out_of_range(args: Namespace, limits: dict[str, tuple[float, float]]) -> list[str]:
    """One sentence for each value below its lower limit, or not below its upper one."""
    problems = []
    for name, (low, high) in limits.items():
        value = getattr(args, name)
        if low <= value < high:
            continue
        flag = f"--{name.replace('_', '-')}"
        bounds = "above 0" if low == TINY else f"at least {low}"
        if high < ANY:
            bounds += f" and below {high:,}"
        problems.append(f"{flag} {value} is out of range: it must be {bounds}")
    return problems


TINY = 1e-12  # the lower limit of what must be above 0
ANY = 2**31  # an upper limit that no user meets
LIMITS = {
    **dict.fromkeys(("batch_size", "gradient_accumulation_steps", "epochs"), (1, ANY)),
    **dict.fromkeys(("log_every", "keep_checkpoints"), (1, ANY)),
    **dict.fromkeys(("max_steps", "eval_every", "save_every", "profile", "seed"), (0, ANY)),
    **dict.fromkeys(("weight_decay", "shard_group_size"), (0, ANY)),
    **dict.fromkeys(("lr", "gamma", "max_grad_norm"), (TINY, 1_000_000)),
    **dict.fromkeys(("max_shard_size", "timeout_minutes"), (TINY, 1_000_000)),
    "stall_minutes": (0, ANY),
    "warmup_ratio": (0, 1),
}


def common_problems(args: Namespace) -> list[str]:
    """What is wrong with the values of `add_common`, a sentence each."""
    problems = out_of_range(args, LIMITS)
    if args.export_only + args.prepare_only + args.evaluate_only > 1:
        problems.append("--export-only, --prepare-only and --evaluate-only: give one of them")
    gpus = ranks.device_count()
    processes = int(os.environ.get("WORLD_SIZE", 1))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    accumulates = args.gradient_accumulation_steps > 1
    syncs_once = args.accumulate_no_sync and processes > 1
    output = Path(args.output_dir)
    if output.is_file():
        problems.append(f"--output-dir {output} is a file: name a directory")
    if output.is_dir() and output.resolve() == Path(args.model_name).expanduser().resolve():
        problems.append(f"--output-dir {output} is the model's own directory: name another")
    if args.prepare_only:
        return problems  # what follows is about training, and about GPUs
    if 0 < gpus < local_size:
        problems.append(f"--nproc_per_node {local_size} is above the {gpus} GPUs")
    if args.cpu_offload:
        problems += offload_problems(args, gpus, processes)
    if args.fsdp == 2 and args.strategy in ("no_shard", "ddp"):
        reason = ""
        if getattr(args, "lora_rank", 0):
            reason = " (adapters need it)"
        problems.append(f"--fsdp 2 always shards{reason}: --strategy {args.strategy} is --fsdp 1's")
    if args.optimizer == PAGED and args.fsdp == 2:
        problems.append(f"--optimizer {PAGED} needs --fsdp 1: bitsandbytes takes no DTensors")
    for name in args.track:
        if importlib.util.find_spec(name) is None:
            problems.append(f"--track {name} needs {name}: {INSTALL}")
    if args.optimizer == PAGED and importlib.util.find_spec("bitsandbytes") is None:
        problems.append(f"--optimizer {PAGED} needs bitsandbytes: {INSTALL}")
    if args.compile and not gpus and not has_cpp_compiler():
        problems.append("--compile on a CPU needs a C++ compiler: install g++, or name one in CXX")
    # FSDP1 keeps a shard, or fp32, as the gradient of what is whole, or bf16, in the next forward
    # pass. A new shape is traced there, and torch.compile does not take the two.
    fsdp1 = args.strategy != "ddp" and args.fsdp != 2
    if args.compile and accumulates and fsdp1 and not syncs_once:
        problems.append(
            "--compile accumulates gradients only with --fsdp 2, with --strategy ddp, or with "
            "--accumulate-no-sync on two processes or more"
        )
    if args.accumulate_no_sync and args.strategy == "no_shard":
        problems.append("--accumulate-no-sync cannot be used with no_shard")
    if args.strategy == "hybrid_shard":
        group = args.shard_group_size or local_size
        if group <= 1 or processes % group:  # a group of 1 would never synchronise
            problems.append(
                "--strategy hybrid_shard needs a --shard-group-size above 1 that divides the "
                "processes"
            )
    return problems


def offload_problems(args: Namespace, gpus: int, processes: int) -> list[str]:
    """Where --cpu-offload cannot be, or would train wrongly, a sentence each."""
    if args.strategy == "ddp" or not gpus:
        return ["--cpu-offload needs a GPU and a --strategy other than ddp"]
    problems = []
    if args.fsdp == 2 and args.precision == "fp16":
        # The scaler looks for overflow in gradients on the CPU, and asks the other ranks there.
        problems.append("--cpu-offload with --precision fp16 needs --fsdp 1")
    if args.fsdp == 2:
        return problems
    trains = not (args.export_only or args.evaluate_only)
    if (processes == 1 or args.strategy == "no_shard") and trains:
        # FSDP1 then trains wrongly, on CUDA: https://github.com/pytorch/pytorch/issues/118245
        problems.append(
            "--cpu-offload needs --fsdp 2, or several processes and a --strategy that shards"
        )
    syncs_once = args.accumulate_no_sync and processes > 1
    if args.gradient_accumulation_steps > 1 and not syncs_once:
        problems.append(
            "--cpu-offload accumulates gradients only with --fsdp 2, or with --accumulate-no-sync "
            "on two processes or more"
        )
    return problems


def has_cpp_compiler() -> bool:
    """Whether torch.compile finds the C++ compiler that it needs on a CPU, but not on a GPU."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # takes a second to import

    try:
        get_cpp_compiler()
    except (RuntimeError, OSError):
        return False
    return True


def resolve_precision(precision: str) -> str:
    """`auto` is bf16 where the GPU computes it natively, and fp32 elsewhere."""
    if precision == "auto":
        return "bf16" if ranks.has_bf16() else "fp32"
    on_cpu = ranks.accelerator() is None
    if precision == "fp16" and on_cpu and os.environ.get("RANK", "0") == "0":
        print("--precision fp16 is slow on a CPU: use it for trials", flush=True)
    return precision


def checked(args: Namespace, problems: list[str]) -> Namespace:
    """The arguments with their precision and FSDP's version resolved.

    Ends with all that is wrong in one line: the `problems` of the script's own flags, and those of
    the common ones.
    """
    problems = common_problems(args) + problems
    if problems:
        ranks.exit_with("; ".join(problems))
    args.precision = resolve_precision(args.precision)
    args.fsdp = args.fsdp or 1
    on_cpu = ranks.accelerator() is None or args.cpu_offload
    if args.optimizer == PAGED and on_cpu and os.environ.get("RANK", "0") == "0":
        print(f"--optimizer {PAGED} pages nothing on a CPU", flush=True)
    return args


def without_training(args: Namespace) -> dict[str, Any]:
    """The values that an evaluation depends on: all but those of the run and its optimization."""
    parser = argparse.ArgumentParser()
    _add_run(parser)
    _add_optimization(parser)
    unused = vars(parser.parse_args([])).keys() - {"batch_size", "seed"}
    return {name: value for name, value in vars(args).items() if name not in unused}


def check_length(flag: str, length: int, config: PretrainedConfig) -> None:
    """Raise ValueError if a model of this configuration has fewer positions than `length`.

    A configuration that names no number, such as one with relative positions, has no limit.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise ValueError(f"{flag} {length} is above the model's {positions} positions")
