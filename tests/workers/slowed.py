"""Slow a script to two seconds a step until Slurm restarts it: slowed.py SCRIPT FLAGS..."""

import importlib
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests")]

from killed import before_each_step

from benchmarks.driven import parse_flags

if __name__ == "__main__":
    script = importlib.import_module(sys.argv[1])
    if "SLURM_RESTART_COUNT" not in os.environ:
        before_each_step(lambda _: time.sleep(2))  # Slurm checks time limits twice a minute
    code = script.fsdp_main(parse_flags(script, sys.argv[2:]))
    sys.stdout.flush()
    os._exit(code)
