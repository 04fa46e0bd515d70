"""T5_training.py until a rank dies: killed.py RANK STEP FLAGS... (SIGKILL before that step)."""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import T5_training

if __name__ == "__main__":
    rank, step = int(sys.argv[1]), int(sys.argv[2])
    train_step = T5_training.train_step

    def killed_step(args, state, batches, samples):
        """Die where the real one would begin."""
        if state.step + 1 == step and int(os.environ.get("RANK", 0)) == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(args, state, batches, samples)

    T5_training.train_step = killed_step
    T5_training.fsdp_main(T5_training.parse_args(sys.argv[3:]))
