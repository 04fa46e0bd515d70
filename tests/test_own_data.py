"""Scripts accept any data set that has len() and [i], such as a list of samples."""

import importlib
import random

import pytest
from conftest import SCRIPTS, losses
from in_process import start


def samples(script: str, count: int) -> list:
    """Return `count` samples of random tokens, in the format of the script's `collate`."""
    rng = random.Random(count)
    rows = [[rng.randrange(3, 259) for _ in range(rng.randrange(9, 30))] for _ in range(count)]
    if script == "gpt2_fsdp":
        return [{"input_ids": row} for row in rows]
    if script == "T5_training":
        return [{"input_ids": row, "labels": row[:8]} for row in rows]
    return [[{"input_ids": row, "labels": row}] * 2 for row in rows]


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_train_on_a_list_of_samples(script, tmp_path, monkeypatch):
    module = importlib.import_module(script)
    (data,) = (value for name, value in vars(module).items() if name.endswith("_dataset"))
    val_sets = {"mine": samples(script, 3), "validation": samples(script, 2)}
    monkeypatch.setattr(data, "load", lambda *_, **__: (samples(script, 12), val_sets))
    flags = ["--model-name", "tiny", "--output-dir", tmp_path, "--log-every", 1, "--batch-size", 4]
    evaluated = ["--evaluate-only", "--model-name", tmp_path / "final"]
    for more in (["--max-steps", 2], ["--max-steps", 5], evaluated):
        assert start(module, *flags, *more) == 0
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5]
    assert (tmp_path / "final/model.safetensors").is_file()
    assert (tmp_path / "evaluation.json").is_file()
