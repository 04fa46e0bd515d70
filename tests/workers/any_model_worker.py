"""Run scripts one after another under torchrun, for test_any_model.py.

any_model_worker.py RUNS.json

RUNS.json has a list [script, flags] for each run. OUTPUT_DIR/seen.pt receives the samples of each
split and the first gradient.
"""

import importlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests")]

import torch
import torch.distributed as dist
from ten_steps import gradients, parse_args, patched, run

import policies
from core import ranks

clip_gradients = policies.clip_gradients


def main() -> None:
    """Run each script to its export, in one process group."""
    device = ranks.setup(7)
    for name, flags in json.loads(Path(sys.argv[1]).read_text()):
        script = importlib.import_module(name)
        args = parse_args(script, flags)
        kept: list[dict[str, torch.Tensor]] = []

        def keep(model: torch.nn.Module, max_norm: float) -> torch.Tensor:
            kept.append(gradients(model))  # noqa: B023
            return clip_gradients(model, max_norm)

        with patched(policies, clip_gradients=keep):
            code, seen = run(script, args, device)
        assert code == 0, flags
        (val_set,) = seen["val_sets"].values()
        splits = {"train": seen["train_set"], "val": val_set}
        rows = {split: [rows[i] for i in range(len(rows))] for split, rows in splits.items()}
        if dist.get_rank() == 0:
            torch.save({"gradient": kept[0], **rows}, args.run.output_dir / "seen.pt")


if __name__ == "__main__":
    main()
    ranks.leave(0)
