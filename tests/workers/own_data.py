"""Run a script on a user's own data, plain lists of samples: own_data.py SCRIPT FLAGS..."""

import importlib
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from core import ranks

DATA = {
    "T5_training": "summarization_dataset",
    "gpt2_fsdp": "block_dataset",
    "llama_fsdp": "chat_dataset",
}


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
    name = sys.argv.pop(1)
    script = importlib.import_module(name)
    val_sets = {"mine": samples(name, 3), "validation": samples(name, 2)}
    importlib.import_module(DATA[name]).load = lambda *_: (samples(name, 12), val_sets)
    ranks.run(script.fsdp_main, script.parse_args())
