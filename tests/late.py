"""preflight.py with a late rank: late.py LIMIT_OF_START RANK SECONDS FLAGS..."""

import functools
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import preflight

if __name__ == "__main__":
    start_limit, rank, seconds = float(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    if os.environ.get("RANK") == rank:
        time.sleep(seconds)
    measure = functools.partial(preflight.preflight, start_limit=start_limit)
    preflight.launch(measure, preflight.parse_args(sys.argv[4:]))
