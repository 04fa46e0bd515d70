"""The flags of LoRA, whose adapters are made by adapters.py, and their check."""

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
    """Declare the flags."""
    add = parser.add_argument_group("adapters, under --fsdp 2").add_argument
    add("--lora-rank", type=int, default=0, help="train adapters of this rank (0: all weights)")
    add("--lora-alpha", type=float, help="their output is scaled by alpha / rank")
    add("--lora-dropout", type=float, help="share of their inputs that is dropped")
    add("--lora-targets", nargs="+", metavar="NAME",
        help="the projections that get one, such as q_proj v_proj (default: all of the blocks)"
    )  # fmt: skip
    add("--load-in-4bit", **OFF, help="hold the blocks' frozen projections in NF4 (QLoRA)")
    add("--merge", **OFF, help="write best/ and final/ as whole models, not as adapters")
    parser.set_defaults(**DEFAULTS)


def resolve_arguments(args: Namespace) -> dict[str, Any]:
    """Resolve --fsdp: adapters make FSDP2 the default."""
    return {"fsdp": 2} if args.lora_rank and args.fsdp is None else {}


def check_arguments(args: Namespace) -> list[str]:
    """Return an error message for each flag that cannot work."""
    problems = []
    if not args.lora_rank:
        for name, default in DEFAULTS.items():
            if getattr(args, name) != default:
                problems.append(f"--{name.replace('_', '-')} needs adapters: give a --lora-rank")
        return problems
    if args.fsdp == 1:
        problems.append("--lora-rank needs --fsdp 2: 1 holds gradients of frozen weights too")
    if args.merge and args.model_name == "tiny":
        problems.append("--merge needs a model in files: tiny is in none")
    for package, is_needed in (("peft", True), ("bitsandbytes", args.load_in_4bit)):
        if is_needed and importlib.util.find_spec(package) is None:
            problems.append(f"--lora-rank needs {package}: {INSTALL}")
    if args.load_in_4bit and torch.__version__ < "2.13":  # FSDP2 would cast the bytes
        problems.append(f"--load-in-4bit needs torch 2.13 or newer, this is {torch.__version__}")
    return problems
