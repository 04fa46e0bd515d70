"""A script at two seconds a step, until Slurm starts it anew: slowed.py SCRIPT FLAGS..."""

import importlib
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if __name__ == "__main__":
    script = importlib.import_module(sys.argv[1])
    train_step = script.train_step

    def slow_step(args, state, *others):
        """The real one, after a while."""
        if "SLURM_RESTART_COUNT" not in os.environ:
            time.sleep(2)  # Slurm looks at the time twice a minute
        return train_step(args, state, *others)

    script.train_step = slow_step
    code = script.fsdp_main(script.parse_args(sys.argv[2:]))
    sys.stdout.flush()
    os._exit(code)
