"""Run a script with a fault before a step on one rank: faulty.py SCRIPT FAULT RANK STEP FLAGS...

raise: raise NCCL's exception class. problem: raise Problem, while saves take two seconds. nan: set
the parameters to NaN. hang: sleep in the forward pass. full: limit files to 100 kB, as if the disk
were full, until the next step. full for good: the same until the end. worker: kill a process of
the loader. worker in save: kill one in each save, while it writes.
"""

import importlib
import multiprocessing
import os
import resource
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from killed import before_each_step
from ten_steps import parse_args

from core import checkpoint, ranks


def limit(size: int) -> None:
    """Limit the size of the files that this process writes, in bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def kill_worker() -> None:
    """Kill a worker process of a loader, and give this process time to notice."""
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    for _ in range(20):
        time.sleep(0.02)


def resolve(self: checkpoint.Planner, item: Any) -> Any:
    """Return what is written, after the death of a worker."""
    if multiprocessing.active_children():
        kill_worker()
    return resolve_data(self, item)


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
            if fault == "worker":
                kill_worker()
            if fault.startswith("full"):
                limit(100_000)

    def save_slowly(*args: object, **options: object) -> None:
        time.sleep(2)
        save(*args, **options)

    resolve_data = checkpoint.Planner.resolve_data
    if fault == "worker in save":
        checkpoint.Planner.resolve_data = resolve
    save = checkpoint.dcp.save
    if fault == "problem":
        checkpoint.dcp.save = save_slowly

    def keep_model(*args: object) -> torch.nn.Module:
        models.append(wrap_model(*args))
        return models[0]

    wrap_model, script.wrap_model = script.wrap_model, keep_model
    before_each_step(script, inject)
    ranks.run(script.fsdp_main, parse_args(script, sys.argv[5:]))
