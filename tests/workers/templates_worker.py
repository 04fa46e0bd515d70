"""Train edited scripts one after another under torchrun, for test_templates.py.

templates_worker.py CASES.json

CASES.json maps names to [script, replacements in its text, flags]. The first gradient is written to
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
from copied import edited_script

import llama_fsdp
import policies
from benchmarks.driven import parse_flags
from runtime import weights

clip_gradients = policies.clip_gradients


def save_next_gradient(path: Path) -> None:
    """Make the next clipping of gradients write the full gradients by name to `path`."""

    def clip(model: torch.nn.Module, max_norm: float) -> torch.Tensor:
        gradients = {}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[weights.plain_name(name)] = parameter.grad.full_tensor().clone()
        if dist.get_rank() == 0:
            torch.save(gradients, path)
        policies.clip_gradients = clip_gradients
        return clip_gradients(model, max_norm)

    policies.clip_gradients = clip


def main() -> None:
    """Run each edited script to its export, in one process group."""
    device = llama_fsdp.setup(parse_flags(llama_fsdp, ["--model-name", "tiny"]))

    def setup(args: Namespace) -> torch.device:
        torch.manual_seed(args.seed)
        return device

    for name, changes, flags in json.loads(Path(sys.argv[1]).read_text()).values():
        script = edited_script(name, changes)
        script.setup, script.cleanup = setup, lambda: None
        args = parse_flags(script, flags)
        save_next_gradient(Path(args.output_dir) / "gradient.pt")
        script.fsdp_main(args)
    llama_fsdp.cleanup()


if __name__ == "__main__":
    main()
    os._exit(0)  # as the scripts do
