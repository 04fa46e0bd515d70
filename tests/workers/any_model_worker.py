"""Run scripts one after another under torchrun, for test_any_model.py.

any_model_worker.py RUNS.json

RUNS.json has a list [script, flags] for each run. OUTPUT_DIR/seen.pt receives the result of
`ten_steps`, which are fewer here.
"""

import importlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from ten_steps import parse_args, ten_steps

from core import ranks

if __name__ == "__main__":
    device = ranks.setup(7)
    for name, flags in json.loads(Path(sys.argv[1]).read_text()):
        script = importlib.import_module(name)
        args = parse_args(script, flags)
        result = ten_steps(script, args, device)
        if dist.get_rank() == 0:
            torch.save(result, args.run.output_dir / "seen.pt")
    ranks.finish()
