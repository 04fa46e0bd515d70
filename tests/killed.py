"""A script until a rank dies: killed.py SCRIPT RANK STEP FLAGS... (SIGKILL before that step)."""

import importlib
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if __name__ == "__main__":
    script, rank, step = importlib.import_module(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    train_step = script.train_step

    def killed_step(args, state, *others):
        """Die where the real one would begin."""
        if state.step + 1 == step and int(os.environ.get("RANK", 0)) == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(args, state, *others)

    script.train_step = killed_step
    script.fsdp_main(script.parse_args(sys.argv[4:]))
