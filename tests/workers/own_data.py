"""Run a script on a user's own data, plain lists of samples: own_data.py SCRIPT FLAGS..."""

import importlib
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests")]

from benchmarks.driven import parse_flags
from runtime.run import launch


def samples(script: str, count: int) -> list:
    """Return `count` samples of random tokens, in the format of the script's `collate`."""
    rng = random.Random(count)
    rows = [[rng.randrange(3, 259) for _ in range(rng.randrange(9, 30))] for _ in range(count)]
    if script == "gpt2_fsdp":
        return [{"input_ids": row} for row in rows]
    if script == "T5_training":
        return [{"input_ids": row, "labels": row[:8]} for row in rows]
    return [[{"input_ids": row, "labels": row}, {"input_ids": row, "labels": row}] for row in rows]


if __name__ == "__main__":
    script = importlib.import_module(sys.argv[1])
    sets = samples(sys.argv[1], 12), {"validation": samples(sys.argv[1], 3)}
    script.load_data = lambda *_: sets
    launch(script.fsdp_main, parse_flags(script, sys.argv[2:]))
