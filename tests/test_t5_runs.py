"""Whole runs of T5_training.py: killed and resumed, exported and reloaded, refused."""

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import (
    ROOT,
    check_equal_weights,
    check_tied_once,
    errors_said,
    launch,
    losses,
    metrics,
    status,
    weights,
)
from safetensors.torch import load_file, save_file
from transformers import ByT5Tokenizer

import T5_training
from runtime import export


@pytest.fixture(scope="module")
def flags(pairs: Path) -> list[str]:
    """Return flags for eight steps of a global batch of 8, five to an epoch; `tiny` has dropout."""
    return ["--dataset", str(pairs), "--num-train-samples", "0", "--max-steps", "8", "--log-every",
            "1", "--eval-every", "3", "--save-every", "2", "--lr", "1e-3", "--rouge-samples", "0",
            "--model-name", "tiny"]  # fmt: skip


def two_ranks(output: Path) -> list[str]:
    return ["--batch-size", "4", "--output-dir", str(output)]


def one_process(flags: list[str], output: Path) -> None:
    """Run the script here, as one process with the same global batch."""
    T5_training.fsdp_main(
        T5_training.parse_args([*flags, "--batch-size", "8", "--output-dir", str(output)])
    )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, flags: list[str]) -> Path:
    """Return a finished run of two ranks, with dropout."""
    output = tmp_path_factory.mktemp("run") / "uninterrupted"
    launch(2, "T5_training.py", *flags, *two_ranks(output))
    return output


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, flags: list[str], t5_directory: Path) -> Path:
    """Return a finished run of one process, without dropout."""
    output = tmp_path_factory.mktemp("run") / "alone"
    one_process([*flags, "--model-name", str(t5_directory)], output)
    return output


@pytest.fixture
def finished(uninterrupted: Path, tmp_path: Path) -> Path:
    """Return a copy of a finished run, to do things to."""
    return Path(shutil.copytree(uninterrupted, tmp_path / "finished"))


def test_killed_run_resumes_bit_for_bit(uninterrupted, flags, tmp_path):
    command = [*flags, *two_ranks(tmp_path)]
    killed = launch(2, "tests/workers/killed.py", "T5_training", 1, 8, *command, check=False)
    assert killed.returncode != 0
    assert status(tmp_path) != "finished"
    assert max(losses(tmp_path)) == 7  # of which step 7 is lost
    launch(2, "T5_training.py", *command)
    assert status(tmp_path) == "finished"
    assert [line["step"] for line in metrics(tmp_path, "start")] == [0, 6]
    assert losses(tmp_path) == losses(uninterrupted)
    assert list(losses(tmp_path)) == list(range(1, 9))
    assert losses(tmp_path, "val") == losses(uninterrupted, "val")
    for kind in ("final", "best"):
        check_equal_weights(tmp_path / kind, uninterrupted / kind)


@pytest.mark.slow
def test_one_ddp_process_resumes_two_full_shard_ranks(alone, flags, t5_directory, tmp_path, capfd):
    flags = [*flags, "--model-name", str(t5_directory)]
    assert launch(
        2, "tests/workers/killed.py", "T5_training", 0, 7, *flags, *two_ranks(tmp_path), check=False
    ).returncode
    one_process([*flags, "--strategy", "ddp"], tmp_path)
    assert [line["world_size"] for line in metrics(tmp_path, "start")] == [2, 1]
    assert "Saved by 2 processes, resuming with 1" in capfd.readouterr().out
    assert losses(tmp_path) == pytest.approx(losses(alone), abs=1e-5)
    assert losses(tmp_path, "val") == pytest.approx(losses(alone, "val"), abs=1e-5)


def test_validation_loss_is_equal_on_one_two_and_three_processes(
    alone, flags, t5_directory, tmp_path
):
    flags = [*flags, "--model-name", t5_directory, "--max-steps", 1, "--batch-size", 2]
    for processes in (2, 3):
        output = tmp_path / str(processes)
        launch(processes, "T5_training.py", *flags, "--output-dir", output)
        assert losses(output, "val")[0] == pytest.approx(losses(alone, "val")[0], abs=1e-5)


def test_run_keeps_two_checkpoints_best_final_and_metrics(uninterrupted):
    trained = {step: loss for step, loss in losses(uninterrupted, "val").items() if step}
    best = min(trained.items(), key=lambda item: (item[1], item[0]))
    names = sorted(path.name for path in (uninterrupted / "checkpoints").iterdir())
    assert best[0] == 8 and names == ["step-00000006", "step-00000008"]
    assert sorted(path.name for path in uninterrupted.iterdir()) == [
        "best", "checkpoints", "final", "metrics.jsonl", "status"]  # fmt: skip
    assert sorted(losses(uninterrupted, "val")) == [0, 3, 5, 6, 8]
    (start,) = metrics(uninterrupted, "start")
    assert start["arguments"]["lr"] == 1e-3 and start["world_size"] == 2
    line = metrics(uninterrupted, "train")[-1]
    assert {"loss", "lr", "grad_norm", "tokens", "tokens_per_second"} <= line.keys()
    assert line["peak_memory_mb"] > 100
    assert metrics(uninterrupted, "done")[0]["best_loss"] == best[1]
    check_tied_once(uninterrupted)


def reloaded(directory: Path, pairs: Path) -> dict:
    """Return the results of reload.py for an exported model, in a fresh process."""
    args = T5_training.parse_args(["--model-name", "tiny", "--dataset", str(pairs)])
    tokenizer = ByT5Tokenizer()
    _, sets = T5_training.data.load(args, tokenizer)
    val_set = sets[str(pairs)].with_format(None)
    texts = [
        [tokenizer.decode(row[key], skip_special_tokens=True) for key in ("input_ids", "labels")]
        for row in val_set
    ]
    (directory.parent / "validation.json").write_text(json.dumps(texts))
    command = [sys.executable, ROOT / "tests/workers/reload.py", directory]
    return json.loads(
        subprocess.check_output([*command, directory.parent / "validation.json"], text=True)
    )


def test_exports_reload_with_the_same_loss(finished, flags, pairs, monkeypatch):
    val = losses(finished, "val")
    best = min(loss for step, loss in val.items() if step)  # the initial model is not exported
    for kind, loss in (("final", val[8]), ("best", best)):
        found = reloaded(finished / kind, pairs)
        assert found["loss"] == pytest.approx(loss, abs=1e-5)
        assert found["tied"] and found["dtype"] == "torch.float32"
    before = weights(finished / "final")
    assert "lm_head.weight" not in before  # ties are written once
    shutil.rmtree(finished / "final")
    monkeypatch.setattr(export, "FILE_BYTES", 1e5)
    one_process([*flags, "--export-only"], finished)
    assert len(list((finished / "final").glob("model-*.safetensors"))) > 2
    after = weights(finished / "final")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert reloaded(finished / "final", pairs)["loss"] == pytest.approx(val[8], abs=1e-5)
    one_process([*flags, "--export-only", "--export-dtype", "bf16"], finished)
    found = reloaded(finished / "final", pairs)
    assert found["dtype"] == "torch.bfloat16"
    assert found["loss"] == pytest.approx(val[8], abs=0.02)


def test_finished_run_continues_with_more_steps(finished, flags, capfd):
    before = (finished / "metrics.jsonl").read_text()
    one_process(flags, finished)
    assert "is finished" in capfd.readouterr().out
    assert (finished / "metrics.jsonl").read_text() == before
    one_process([*flags, "--max-steps", "5"], finished)
    assert "is finished at 5 steps. Raise --max-steps or --epochs" in capfd.readouterr().out
    one_process([*flags, "--max-steps", "10", "--lr", "2e-3"], finished)
    assert list(losses(finished)) == list(range(1, 11))
    rates = [line["lr"] for line in metrics(finished, "train")[-2:]]
    assert rates == pytest.approx([2e-3 * 2 / 9, 2e-3 * 1 / 9])  # of the schedule as it is now


def refused(flags: list[str], output: Path, capfd: pytest.CaptureFixture) -> str:
    """Return the one sentence that the script ends with."""
    with pytest.raises(SystemExit) as end:
        one_process(flags, output)
    assert end.value.code
    said = capfd.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("error: ") and "Traceback" not in said
    return said


def test_resume_rejects_changed_seed_data_model_and_batch(finished, flags, t5_directory, capfd):
    before = sorted((path, path.stat().st_mtime) for path in finished.rglob("*") if path.is_file())
    said = refused([*flags, "--seed", "1"], finished, capfd)
    assert "run: --seed is 1, was 0. Pass" in said
    said = refused([*flags, "--source-length", "8"], finished, capfd)
    assert "training data is " in said and "validation data 1 is " in said
    said = refused([*flags, "--no-group-by-length"], finished, capfd)
    assert "--group-by-length is False, was True" in said
    said = refused([*flags, "--model-name", str(t5_directory)], finished, capfd)
    assert "model is t5, crc " in said
    said = refused([*flags, "--gradient-accumulation-steps", "2"], finished, capfd)
    assert "global batch is 16, was 8" in said and "--global-batch-size 8 keeps the batch" in said
    after = sorted((path, path.stat().st_mtime) for path in finished.rglob("*") if path.is_file())
    assert before == after


@pytest.mark.parametrize("flag, said", [
    (["--model-name", "/no/such/directory"], "/no/such/directory is neither a directory nor"),
    (["--model-name", "no-such/model"], "is not cached, and the hub cannot be reached"),
    (["--output-dir", "/dev/null/here"], "/dev/null/here"),
    (["--export-only"], "--export-only needs a checkpoint"),
    (["--source-column", "body"], "has columns text, headline"),
])  # fmt: skip
def test_bad_input_is_one_message(flag, said, flags, tmp_path, capfd):
    args = [*flags, "--output-dir", str(tmp_path), *flag]
    with pytest.raises(SystemExit) as end:
        T5_training.fsdp_main(T5_training.parse_args(args))
    assert end.value.code
    error = capfd.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and said in error


def test_wrong_values_are_one_message(pairs, capfd):
    wrong = {
        "--batch-size": 0, "--lr": -1, "--warmup-ratio": 2, "--epochs": 0,
        "--rouge-samples": -1, "--max-grad-norm": 0, "--keep-checkpoints": 0,
        "--strategy": "hybrid_shard",
    }  # fmt: skip
    words = [str(word) for item in wrong.items() for word in item]
    with pytest.raises(SystemExit) as end:
        T5_training.parse_args(["--model-name", "tiny", "--dataset", str(pairs), *words])
    assert end.value.code
    error = capfd.readouterr().err
    assert all(flag in error for flag in wrong) and len(error.splitlines()) == 1
    for word in (["--strategy", "zero3"], ["--no-such-flag"], ["--lr", "high"]):
        with contextlib.suppress(SystemExit):
            T5_training.parse_args(word)
        assert word[0] in capfd.readouterr().err


def test_foreign_files_and_runs_stay(finished, flags, tmp_path, capfd, monkeypatch):
    (finished / "tmp-mine").mkdir()
    one_process(flags, finished)
    assert (finished / "tmp-mine").is_dir()
    (tmp_path / "foreign/final").mkdir(parents=True)
    assert "of another program" in refused(flags, tmp_path / "foreign", capfd)
    monkeypatch.setattr(T5_training, "SCRIPT", "my_script")
    assert "script is my_script, was T5_training" in refused(flags, finished, capfd)


def test_two_ranks_report_bad_data_once(flags, tmp_path):
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    command = [*flags, "--dataset", tmp_path / "bad.csv", "--output-dir", tmp_path / "run"]
    result = launch(2, "T5_training.py", *command, check=False)
    assert result.returncode != 0
    assert len(errors_said(result.stderr)) == 1 and "has columns a, b" in result.stderr
    ours = result.stderr[: result.stderr.index("torch/distributed/elastic")]
    assert "Traceback" not in ours and "Connection closed" not in result.stderr


@pytest.mark.slow
def test_untied_head_stays_untied(flags, t5_directory, pairs, tmp_path):
    for path in t5_directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(t5_directory / "model.safetensors")
    torch.manual_seed(1)
    tensors["lm_head.weight"] = torch.randn_like(tensors["shared.weight"]) * 0.1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    flags, output = [*flags, "--model-name", str(tmp_path)], tmp_path / "run"
    launch(2, "T5_training.py", *flags, *two_ranks(output), "--max-steps", "2")
    assert losses(output, "val")[0] == pytest.approx(reloaded(tmp_path, pairs)["loss"], abs=1e-5)
    one_process(flags, output)
    found = reloaded(output / "final", pairs)
    assert found["loss"] == pytest.approx(losses(output, "val")[8], abs=1e-5)
    assert not found["tied"] and "lm_head.weight" in weights(output / "final")
