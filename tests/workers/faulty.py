"""Run a script with a fault before a step on one rank: faulty.py SCRIPT FAULT RANK STEP FLAGS...

raise: raise NCCL's exception class. problem: raise Problem, while saves take two seconds. nan: set
the parameters to NaN. hang: sleep in the forward pass. full: limit files to 100 kB, as if the disk
were full, until the next step. full for good: the same until the end.
"""

import importlib
import os
import resource
import sys
import time

import torch
import torch.distributed as dist
from killed import before_each_step
from ten_steps import parse_args

from core import checkpoint, ranks


def limit(size: int) -> None:
    """Limit the size of the files that this process writes, in bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


if __name__ == "__main__":
    script, fault = importlib.import_module(sys.argv[1]), sys.argv[2]
    rank, faulty_step = int(sys.argv[3]), int(sys.argv[4])
    models = []

    def inject(step: int) -> None:
        is_target = int(os.environ.get("RANK", 0)) == rank
        if fault == "full" and step == faulty_step + 1:
            limit(resource.RLIM_INFINITY)
        if is_target and step == faulty_step:
            if fault == "raise":
                raise dist.DistBackendError(f"NCCL error: the fault of rank {rank}")
            if fault == "problem":
                raise ranks.Problem("the fault")
            if fault == "nan":
                with torch.no_grad():
                    for parameter in models[0].parameters():
                        parameter.fill_(float("nan"))
            if fault == "hang":
                script.summed_loss = lambda *_: time.sleep(100_000)
            if fault.startswith("full"):
                limit(100_000)

    def save_slowly(*args: object, **options: object) -> None:
        time.sleep(2)
        save(*args, **options)

    save = checkpoint.dcp.save
    if fault == "problem":
        checkpoint.dcp.save = save_slowly

    def keep_model(*args: object) -> torch.nn.Module:
        models.append(wrap_model(*args))
        return models[0]

    wrap_model, script.wrap_model = script.wrap_model, keep_model
    before_each_step(script, inject)
    ranks.run(script.fsdp_main, parse_args(script, sys.argv[5:]))
