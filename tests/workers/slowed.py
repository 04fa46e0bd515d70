"""Slow a script, until Slurm restarts it: slowed.py SCRIPT FLAGS..."""

import os
import time

from killed import before_each_step, import_script

from core import ranks

if __name__ == "__main__":
    script = import_script()
    seconds = 2 if "SLURM_JOB_ID" in os.environ else 1  # Slurm checks limits twice a minute
    if "SLURM_RESTART_COUNT" not in os.environ:
        before_each_step(script, lambda _: time.sleep(seconds))
    ranks.run(script.fsdp_main, script.parse_args())
