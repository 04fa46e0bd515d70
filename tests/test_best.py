"""best/: exports during training change no results, and a stop in one repeats the validation."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import check_equal_weights, launch, losses, metrics, status
from in_process import start

import gpt2_fsdp
from core.ranks import STOPPED, Stopped


@pytest.fixture(scope="module")
def flags(texts: tuple[Path, Path]) -> list[str]:
    """Return flags for six steps of `tiny`, which has dropout, that validate and save every second
    step."""
    return ["--dataset", str(texts[0]), "--val-dataset", str(texts[1]), "--block-size", "32",
            "--num-train-samples", "0", "--num-val-samples", "0", "--log-every", "1",
            "--save-every", "2", "--eval-every", "2", "--model-name", "tiny", "--lr", "1e-3",
            "--max-steps", "6"]  # fmt: skip


def step_of_best(output: Path) -> int:
    """Return the step of best/ that the newest checkpoint records."""
    newest = max(output.glob("checkpoints/step-*"))
    return json.loads((newest / "train_state.json").read_text())["best_step"]


VARIANTS = [  # --cpu-offload needs a GPU
    ["--fsdp", "2", "--compile"], ["--strategy", "ddp"],
    ["--activation-checkpointing", "--precision", "bf16"],
    ["--lora-rank", "2"], ["--lora-rank", "2", "--load-in-4bit"],
]  # fmt: skip


@pytest.mark.parametrize(
    "more", [[], *(pytest.param(more, marks=pytest.mark.slow) for more in VARIANTS)], ids=" ".join
)
def test_exports_during_training_do_not_change_results(more, flags, chats, wide_llama, tmp_path):
    """Losses and weights are equal to the last bit, on two ranks."""
    script = "gpt2_fsdp"
    if "--lora-rank" in more:
        pytest.importorskip("peft")
        pytest.importorskip("bitsandbytes")
        script = "llama_fsdp"
        flags = ["--dataset", chats, "--max-seq-length", "64", "--model-name", wide_llama]
        flags += ["--log-every", "1", "--eval-every", "2", "--max-steps", "6", "--lr", "1e-2"]
        flags += ["--lora-dropout", "0.1"]
    command = ["tests/workers/compiled.py", script, *flags, "--batch-size", "2", *more]
    launch(2, *command, "--save-best", "--output-dir", tmp_path / "with")
    launch(2, *command, "--no-save-best", "--output-dir", tmp_path / "without")
    for event in ("train", "val"):
        assert losses(tmp_path / "with", event) == losses(tmp_path / "without", event)
    check_equal_weights(tmp_path / "with/final", tmp_path / "without/final")
    assert (tmp_path / "with/best").exists() and not (tmp_path / "without/best").exists()
    (done,) = metrics(tmp_path / "with", "done")
    assert step_of_best(tmp_path / "with") == done["best_step"] > 0
    assert metrics(tmp_path / "without", "done")[0]["best_step"] == done["best_step"]


def test_resume_after_stop_during_export_repeats_validation(flags, tmp_path, monkeypatch):
    assert start(gpt2_fsdp, *flags, "--batch-size", 4, "--output-dir", tmp_path / "whole") == 0
    export_model, names = gpt2_fsdp.export_model, []

    def stop_in_third(model: Any, tokenizer: Any, path: Path, *rest: Any) -> None:
        names.append(path.name)
        calls = itertools.count(1)

        def stop_at_tenth_tensor() -> None:
            if next(calls) == 10:
                raise Stopped

        rest = (rest[0], stop_at_tenth_tensor) if names == ["best"] * 3 else rest
        export_model(model, tokenizer, path, *rest)

    monkeypatch.setattr(gpt2_fsdp, "export_model", stop_in_third)
    flags = [*flags, "--batch-size", 4, "--output-dir", tmp_path / "stopped"]
    assert start(gpt2_fsdp, *flags) == STOPPED and status(tmp_path / "stopped") == "stopped"
    assert sorted(losses(tmp_path / "stopped", "val")) == [0, 2]
    assert step_of_best(tmp_path / "stopped") == 2
    assert start(gpt2_fsdp, *flags) == 0
    assert losses(tmp_path / "stopped", "val") == losses(tmp_path / "whole", "val")
    check_equal_weights(tmp_path / "stopped/best", tmp_path / "whole/best")
