"""Slow a script to two seconds a step until Slurm restarts it: slowed.py SCRIPT FLAGS..."""

import os
import time

from killed import before_each_step, import_script

from core import ranks

if __name__ == "__main__":
    script = import_script()
    if "SLURM_RESTART_COUNT" not in os.environ:
        before_each_step(script, lambda _: time.sleep(2))  # Slurm checks limits twice a minute
    ranks.run(script.fsdp_main, script.parse_args())
