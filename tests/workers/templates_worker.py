"""Run under torchrun by test_templates.py: copies of the scripts train, one after the other.

templates_worker.py CASES.json

CASES holds a script, the changes to its text and flags, by name. The first gradient goes to
OUTPUT_DIR/gradient.pt.
"""

import json
import os
import sys
from argparse import Namespace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests")]

import torch
import torch.distributed as dist
from copied import copied

import llama_fsdp
import policies
from runtime import weights

clip_gradients = policies.clip_gradients


def save_first(path: Path) -> None:
    """Have the next clipping of gradients, whole and by name, write them to `path`."""

    def clip(model: torch.nn.Module, max_norm: float) -> torch.Tensor:
        found = {}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[weights.plain_name(name)] = parameter.grad.full_tensor().clone()
        if dist.get_rank() == 0:
            torch.save(found, path)
        policies.clip_gradients = clip_gradients
        return clip_gradients(model, max_norm)

    policies.clip_gradients = clip


def main() -> None:
    """Run each copy from its beginning to its export, in one process group."""
    device = llama_fsdp.setup(llama_fsdp.parse_args(["--model-name", "tiny"]))

    def setup(args: Namespace) -> torch.device:
        torch.manual_seed(args.seed)
        return device

    for name, changes, flags in json.loads(Path(sys.argv[1]).read_text()).values():
        script = copied(name, changes)
        script.setup, script.cleanup = setup, lambda: None
        args = script.parse_args(flags)
        save_first(Path(args.output_dir) / "gradient.pt")
        script.fsdp_main(args)
    llama_fsdp.cleanup()


if __name__ == "__main__":
    main()
    os._exit(0)  # as the scripts do, and why
