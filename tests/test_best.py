"""Test best/: each validation with the lowest loss so far exports the weights."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import check_equal_weights, launch, losses, metrics, status

import gpt2_fsdp
from benchmarks.driven import parse_flags
from runtime import export


@pytest.fixture(scope="module")
def flags(texts: tuple[Path, Path]) -> list[str]:
    """Return flags for six steps of `tiny`, which has dropout, that validate and save every second
    step."""
    return ["--dataset", str(texts[0]), "--val-dataset", str(texts[1]), "--block-size", "32",
            "--num-train-samples", "0", "--num-val-samples", "0", "--log-every", "1",
            "--save-every", "2", "--eval-every", "2", "--model-name", "tiny", "--lr", "1e-3",
            "--max-steps", "6"]  # fmt: skip


def run(flags: list[str], output: Path, *more: str) -> None:
    """Run the script in this process."""
    words = [*flags, "--output-dir", str(output), "--batch-size", "4", *more]
    gpt2_fsdp.fsdp_main(parse_flags(gpt2_fsdp, words))


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
    launch(2, *command, "--output-dir", tmp_path / "with")
    launch(2, *command, "--no-save-best", "--output-dir", tmp_path / "without")
    for event in ("train", "val"):
        assert losses(tmp_path / "with", event) == losses(tmp_path / "without", event)
    check_equal_weights(tmp_path / "with/final", tmp_path / "without/final")
    assert not (tmp_path / "without/best").exists()
    done = metrics(tmp_path / "with", "done")[0]
    assert step_of_best(tmp_path / "with") == done["best_step"] > 0
    assert metrics(tmp_path / "without", "done")[0]["best_step"] == done["best_step"]


def test_failed_export_keeps_the_previous_best(flags, tmp_path, monkeypatch, capfd):
    export_model = export.export_model
    paths = []

    def fail_second(model: object, tokenizer: object, path: Path, *rest: object) -> None:
        paths.append(path.name)
        if paths == ["best"] * 2:
            raise OSError("no space left")
        export_model(model, tokenizer, path, *rest)

    monkeypatch.setattr(export, "export_model", fail_second)
    run(flags, tmp_path, "--max-steps", "4")
    assert "best/ could not be written (no space left)" in capfd.readouterr().out
    assert paths == ["best", "best", "final"] and status(tmp_path) == "finished"
    assert metrics(tmp_path, "done")[0]["best_step"] == step_of_best(tmp_path) == 2


def test_resume_from_older_checkpoint_exports_best_again(flags, tmp_path):
    run(flags, tmp_path / "whole")
    for damage in ("older", "without best"):
        path = Path(shutil.copytree(tmp_path / "whole", tmp_path / damage))
        shutil.rmtree(path / "checkpoints/step-00000006")
        if damage == "without best":
            shutil.rmtree(path / "best")
        run(flags, path)
        assert losses(path) == losses(tmp_path / "whole")
        for name in ("best", "final"):
            check_equal_weights(path / name, tmp_path / "whole" / name)
        assert step_of_best(path) == 6


def test_resume_after_stop_during_export_repeats_validation(flags, tmp_path, monkeypatch):
    run(flags, tmp_path / "whole")
    check = gpt2_fsdp.Output._stop_if_asked
    steps = []

    def stop_at_tenth_tensor(output: gpt2_fsdp.Output) -> None:
        steps.append(output.run.state.step)
        output.run.stop.is_asked = steps.count(4) == 10
        check(output)

    monkeypatch.setattr(gpt2_fsdp.Output, "progress", lambda output, loader, text: loader)
    monkeypatch.setattr(gpt2_fsdp.Output, "_stop_if_asked", stop_at_tenth_tensor)
    run(flags, tmp_path / "stopped")
    assert status(tmp_path / "stopped") == "stopped"
    assert sorted(losses(tmp_path / "stopped", "val")) == [0, 2]
    assert step_of_best(tmp_path / "stopped") == 2
    run(flags, tmp_path / "stopped")
    assert losses(tmp_path / "stopped", "val") == losses(tmp_path / "whole", "val")
    check_equal_weights(tmp_path / "stopped/best", tmp_path / "whole/best")
