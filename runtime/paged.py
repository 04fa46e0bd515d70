"""The flag --optimizer, for a script that offers paged_adamw.py beside PyTorch's AdamW."""

import argparse
import importlib.util
from argparse import Namespace
from pathlib import Path

from . import ranks
from .arguments import INSTALL

PAGED = "paged_adamw_32bit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flag."""
    parser.add_argument_group("optimizer").add_argument(
        "--optimizer",
        choices=["adamw", PAGED],
        default="adamw",
        help="paged: bitsandbytes' AdamW, whose moments a full GPU moves to the CPU; --fsdp 1",
    )


def resolve_arguments(args: Namespace) -> dict[str, str]:
    """Leave nothing open; print what a paged optimizer does on a CPU."""
    if args.optimizer == PAGED and (ranks.accelerator() is None or args.cpu_offload):
        ranks.say(f"--optimizer {PAGED} pages nothing on a CPU")
    return {}


def check_arguments(args: Namespace) -> list[str]:
    """List what is wrong with the flag, a sentence each."""
    if args.optimizer != PAGED:
        return []
    has_file = Path(__file__).with_name("paged_adamw.py").is_file()
    rules = [
        (not has_file, "needs runtime/paged_adamw.py, which is not here"),
        (args.fsdp == 2, "needs --fsdp 1: bitsandbytes takes no DTensors"),
        (not importlib.util.find_spec("bitsandbytes"), f"needs bitsandbytes: {INSTALL}"),
    ]
    return [f"--optimizer {PAGED} {sentence}" for is_wrong, sentence in rules if is_wrong]
