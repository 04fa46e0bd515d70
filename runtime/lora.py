"""The flags of LoRA and their checks; adapters.py makes the adapters."""

import argparse
import importlib.util
from argparse import Namespace
from typing import Any

import torch

from .arguments import INSTALL, OFF

DEFAULTS = {
    "lora_alpha": 16.0,
    "lora_dropout": 0.0,
    "lora_targets": None,
    "load_in_4bit": False,
    "merge": False,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of LoRA and 4-bit weights in `parser`, with their defaults."""
    add = parser.add_argument_group("adapters, under --fsdp 2").add_argument
    add("--lora-rank", type=int, default=0, help="train adapters of this rank (0: all weights)")
    add("--lora-alpha", type=float, help="scales their output by alpha / rank")
    add("--lora-dropout", type=float, help="dropout rate of their inputs")
    add("--lora-targets", nargs="+", metavar="NAME",
        help="projections with adapters, such as q_proj v_proj (default: all in the blocks)"
    )  # fmt: skip
    add("--load-in-4bit", **OFF, help="hold the blocks' frozen projections in NF4 (QLoRA)")
    add("--merge", **OFF, help="export whole models to best/ and final/, not adapters")
    parser.set_defaults(**DEFAULTS)


def resolve_arguments(args: Namespace) -> dict[str, Any]:
    """Return {"fsdp": 2} if adapters are trained and --fsdp is not passed, otherwise {}."""
    shards = args.strategy not in ("ddp", "no_shard")  # with these, --fsdp 2 is a second mistake
    return {"fsdp": 2} if args.lora_rank and args.fsdp is None and shards else {}


def check_arguments(args: Namespace) -> list[str]:
    """Return an error message for each flag of LoRA or 4-bit weights that cannot work."""
    problems = []
    if not args.lora_rank:
        for name, default in DEFAULTS.items():
            if getattr(args, name) != default:
                problems.append(f"--{name.replace('_', '-')} needs adapters. Pass --lora-rank.")
        return problems
    if args.strategy in ("ddp", "no_shard"):
        return [f"--lora-rank cannot be used with --strategy {args.strategy}. Pass full_shard."]
    if args.fsdp == 1:
        problems.append("--lora-rank needs --fsdp 2. FSDP1 holds gradients of frozen weights.")
    if args.merge and args.model_name == "tiny":
        problems.append("--merge needs a model in files, not --model-name tiny.")
    for package, is_needed in (("peft", True), ("bitsandbytes", args.load_in_4bit)):
        if is_needed and importlib.util.find_spec(package) is None:
            problems.append(f"--lora-rank needs {package}. {INSTALL}")
    if args.load_in_4bit and torch.__version__ < "2.13":  # FSDP2 would cast the bytes
        problems.append(f"--load-in-4bit needs torch 2.13 or newer, not {torch.__version__}.")
    return problems
