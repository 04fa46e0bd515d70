"""Start ranks of which the last cannot be reached, with a limit of 3 seconds: ranks_worker.py FAULT

default group: the rank never joins. mesh: it joins, but not the groups of a device mesh.
"""

import functools
import os
import sys
import time
from argparse import Namespace
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests")]

import torch
import torch.distributed as dist

import gpt2_fsdp
import policies
from runtime import ranks

if __name__ == "__main__":
    ranks.join_deadline = functools.partial(ranks.join_deadline, limit=3.0)
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        if sys.argv[1] == "mesh":
            dist.new_subgroups_by_enumeration = lambda *_, **options: time.sleep(100)
        else:
            dist.init_process_group = lambda *_, **options: time.sleep(100)
    args = Namespace(
        timeout_minutes=7.0,
        seed=0,
        cpu_offload=False,
    )
    device = gpt2_fsdp.setup(args)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.options._timeout == timedelta(minutes=7)
    print("joined", flush=True)
    policies.device_mesh(device, "hybrid_shard", 2, args.timeout_minutes)
