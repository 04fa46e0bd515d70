"""best/: exports during training change no results, and a stop in one repeats the validation."""

import itertools
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from conftest import (
    check_equal_runs,
    check_equal_weights,
    launch,
    losses,
    metrics,
    status,
    weights,
)
from in_process import start

import gpt2_fsdp
from core import export
from core.args import Run
from core.checkpoint import State
from core.ranks import STOPPED, Stopped
from optional import save_best


@pytest.fixture(scope="module")
def flags(block_flags: list[str]) -> list[str]:
    """Return flags for six steps that validate and save every second step."""
    return [*block_flags, "--save-every", "2", "--eval-every", "2", "--lr", "1e-3", "--max-steps",
            "6"]  # fmt: skip


@pytest.fixture(scope="module")
def finished(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run of one process, with all its checkpoints."""
    output = tmp_path_factory.mktemp("finished") / "run"
    more = ["--batch-size", 4, "--keep-checkpoints", 9, "--output-dir", output]
    assert start(gpt2_fsdp, *flags, *more) == 0
    return output


def test_validation_loss_of_nan_does_not_replace_best(tmp_path):
    export_model = mock.Mock()
    args = SimpleNamespace(run=Run(tmp_path), best=save_best.Best())
    state = State({}, {}, step=20, best_loss=2.0, best_step=10)
    assert math.isnan(save_best.write(args, state, math.nan, export_model, None, None))
    export_model.assert_not_called()


def step_of_best(output: Path) -> int:
    """Return the step of best/ that the newest checkpoint records."""
    newest = max(output.glob("checkpoints/step-*"))
    return json.loads((newest / "train_state.json").read_text())["best_step"]


VARIANTS = [  # --cpu-offload needs a GPU
    ["--fsdp", "2", "--compile"], ["--strategy", "ddp"],
    ["--activation-checkpointing", "blocks", "--precision", "bf16"],
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
        flags = ["--dataset", chats, "--max-seq-length", "64", "--model-name", wide_llama,
                 "--log-every", "1", "--eval-every", "2", "--max-steps", "6", "--lr", "1e-2",
                 "--lora-dropout", "0.1"]  # fmt: skip
    command = ["tests/workers/compiled.py", script, *flags, "--batch-size", "2", *more]
    launch(2, *command, "--save-best", "--output-dir", tmp_path / "with")
    launch(2, *command, "--no-save-best", "--output-dir", tmp_path / "without")
    check_equal_runs(tmp_path / "with", tmp_path / "without")
    assert (tmp_path / "with/best").exists() and not (tmp_path / "without/best").exists()
    (done,) = metrics(tmp_path / "with", "done")
    assert step_of_best(tmp_path / "with") == done["best_step"] > 0
    assert metrics(tmp_path / "without", "done")[0]["best_step"] == done["best_step"]


def test_resume_after_stop_during_export_repeats_validation(finished, flags, tmp_path, monkeypatch):
    flags = [*flags, "--batch-size", 4, "--output-dir"]
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
    output = tmp_path / "stopped"
    assert start(gpt2_fsdp, *flags, output) == STOPPED and status(output) == "stopped"
    # The third validation is logged before its export, and again by the resume.
    assert sorted(losses(output, "val")) == [0, 2, 4] and step_of_best(output) == 2
    assert start(gpt2_fsdp, *flags, output) == 0
    assert losses(output, "val") == losses(finished, "val")
    check_equal_weights(output / "best", finished / "best")


def test_resume_writes_best_that_could_not_be_written(flags, tmp_path, monkeypatch, capfd):
    """The run that could not write it ends with an error, but has written final/."""
    output = tmp_path / "run"
    flags = [*flags, "--batch-size", 4, "--eval-every", 0, "--max-steps", 3, "--output-dir", output]
    make_empty = export._make_empty

    def fail_for_best(directory: Path) -> None:
        if directory.name == "tmp-best":
            raise OSError("No space left")
        make_empty(directory)

    with monkeypatch.context() as patch:
        patch.setattr(export, "_make_empty", fail_for_best)
        assert start(gpt2_fsdp, *flags) == 1
    assert "error: best/ could not be written. Run the same command" in capfd.readouterr().err
    assert status(output) == "running" and (output / "final").is_dir()
    for _ in range(2):
        assert start(gpt2_fsdp, *flags) == 0 and status(output) == "finished"
        check_equal_weights(output / "best", output / "final")
    assert [line["step"] for line in metrics(output, "val")] == [0, 3]


def test_best_of_abandoned_steps_is_replaced(finished, flags, tmp_path):
    """After a return to an earlier checkpoint, with a rate at which the losses rise."""
    assert step_of_best(finished) == 6 == int((finished / "best/step").read_text())
    output, other = (Path(shutil.copytree(finished, tmp_path / name)) for name in ("run", "other"))
    for path in (output, other):
        shutil.rmtree(path / "checkpoints/step-00000006")
    flags = [*flags, "--batch-size", 4, "--keep-checkpoints", 9, "--output-dir"]
    abandoned = weights(output / "best")

    # The next validation is worse than those before, but best/ does not have these any more.
    assert start(gpt2_fsdp, *flags, output, "--lr", "5") == 0
    check_equal_weights(output / "best", output / "final")
    (done,) = metrics(output, "done")
    assert done["best_step"] == 6 and done["best_loss"] == losses(output, "val")[6]
    assert losses(output, "val")[6] > losses(output, "val")[4]
    assert any(not x.equal(abandoned[name]) for name, x in weights(output / "best").items())

    # If no step is left, the last validation is repeated.
    assert start(gpt2_fsdp, *flags, other, "--max-steps", "4") == 0
    check_equal_weights(other / "best", other / "final")
    assert sorted(losses(other, "val")) == [0, 2, 4]
    assert metrics(other, "done")[0]["best_step"] == 4
