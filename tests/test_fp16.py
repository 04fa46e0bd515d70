"""fp16 with its loss scaler on two CPU processes."""

import json
from pathlib import Path

import pytest
from conftest import launch
from fp16_worker import STRATEGIES

CASES = [(script, strategy) for script, names in STRATEGIES.items() for strategy in names]


@pytest.fixture(scope="module")
def results(
    t5_directory: Path, pairs: Path, gpt2_directory: Path, texts: tuple, llama_directory: Path,
    chats: Path, tmp_path_factory: pytest.TempPathFactory,
) -> dict:  # fmt: skip
    """Return the results of fp16_worker.py by script and strategy, and its completed process."""
    directory = tmp_path_factory.mktemp("fp16")
    scripts = {
        "T5_training": ["--model-name", t5_directory, "--dataset", pairs, "--batch-size", "8"],
        "gpt2_fsdp": ["--model-name", gpt2_directory, "--dataset", texts[0], "--val-dataset",
                      texts[1], "--block-size", "32"],
        "llama_fsdp": ["--model-name", llama_directory, "--dataset", chats, "--max-seq-length",
                       "64", "--batch-size", "2"],
    }  # fmt: skip
    shared = ["--max-steps", "12", "--lr", "1e-3", "--lr-schedule", "constant"]
    flags = {name: [*map(str, own), *shared] for name, own in scripts.items()}
    result = directory / "result.json"
    process = launch(2, "tests/workers/fp16_worker.py", result, directory, json.dumps(flags))
    return {"process": process} | json.loads(result.read_text())


@pytest.mark.parametrize("script, strategy", CASES)
def test_fp16_losses_are_close_to_fp32_and_scale_is_resumed(script, strategy, results):
    result = results[f"{script} {strategy}"]
    assert len(result["fp16"]["losses"]) == 12
    assert result["fp16"]["losses"] == pytest.approx(result["fp32"]["losses"], rel=2e-3)
    assert result["fp16"]["losses"] != result["fp32"]["losses"]
    assert result["fp16"]["scale"] == 2**12
    assert result["scaler_resumed"]


@pytest.mark.parametrize("script, strategy", CASES)
def test_overflow_changes_no_weight_and_halves_the_scale(script, strategy, results):
    """A scale below 1 ends the run. The schedule counts skipped steps."""
    steps = results[f"{script} {strategy}"]["overflows"]
    applied = {"changed": [True] * 2, "scale": 1, "schedule": 1, "ended": [False] * 2}
    skipped = applied | {"changed": [False] * 2, "scale": 0.5}
    ended = skipped | {"ended": [True] * 2}
    expected = {"loss": skipped, "shard": skipped, "none": applied, "last": ended}
    if strategy == "ddp":
        del expected["shard"]
    assert steps == expected


def test_run_reports_the_final_loss_scale_when_it_ends(results):
    assert "at loss scale 0.75" in results["process"].stderr
