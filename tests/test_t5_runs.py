"""Test whole runs of T5_training.py: resume after a kill, export, and reject bad input."""

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
    error_lines,
    launch,
    losses,
    metrics,
    status,
    weights,
)
from safetensors.torch import load_file, save_file
from transformers import ByT5Tokenizer

import T5_training
from benchmarks.driven import parse_flags
from runtime import export


@pytest.fixture(scope="module")
def flags(pairs: Path) -> list[str]:
    """Return flags for eight steps of `tiny`, which has dropout, five to an epoch."""
    return ["--dataset", str(pairs), "--num-train-samples", "0", "--max-steps", "8", "--log-every",
            "1", "--eval-every", "3", "--save-every", "2", "--lr", "1e-3", "--rouge-samples", "0",
            "--model-name", "tiny"]  # fmt: skip


def two_ranks(output: Path) -> list[str]:
    return ["--batch-size", "4", "--output-dir", str(output)]


def run_one_process(flags: list[str], output: Path) -> None:
    """Run the script in this process with a global batch of 8."""
    T5_training.fsdp_main(
        parse_flags(T5_training, [*flags, "--batch-size", "8", "--output-dir", str(output)])
    )


@pytest.fixture(scope="module")
def reference_run(tmp_path_factory: pytest.TempPathFactory, flags: list[str]) -> Path:
    """Return the directory of a finished run of two ranks, with dropout."""
    output = tmp_path_factory.mktemp("run") / "uninterrupted"
    launch(2, "T5_training.py", *flags, *two_ranks(output))
    return output


@pytest.fixture(scope="module")
def solo(tmp_path_factory: pytest.TempPathFactory, flags: list[str], t5_directory: Path) -> Path:
    """Return the directory of a finished run of one process, without dropout."""
    output = tmp_path_factory.mktemp("run") / "solo"
    run_one_process([*flags, "--model-name", str(t5_directory)], output)
    return output


@pytest.fixture
def run_copy(reference_run: Path, tmp_path: Path) -> Path:
    """Return a copy of `reference_run` that a test may change."""
    return Path(shutil.copytree(reference_run, tmp_path / "finished"))


def test_killed_run_resumes_bit_for_bit(reference_run, flags, tmp_path):
    command = [*flags, *two_ranks(tmp_path)]
    killed = launch(2, "tests/workers/killed.py", "T5_training", 1, 8, *command, check=False)
    assert killed.returncode != 0
    assert status(tmp_path) != "finished"
    assert max(losses(tmp_path)) == 7  # step 7 was not saved
    launch(2, "T5_training.py", *command)
    assert status(tmp_path) == "finished"
    assert [line["step"] for line in metrics(tmp_path, "start")] == [0, 6]
    assert losses(tmp_path) == losses(reference_run)
    assert list(losses(tmp_path)) == list(range(1, 9))
    assert losses(tmp_path, "val") == losses(reference_run, "val")
    for kind in ("final", "best"):
        check_equal_weights(tmp_path / kind, reference_run / kind)


@pytest.mark.slow
def test_ddp_process_resumes_two_full_shard_ranks(solo, flags, t5_directory, tmp_path, capfd):
    flags = [*flags, "--model-name", str(t5_directory)]
    assert launch(
        2, "tests/workers/killed.py", "T5_training", 0, 7, *flags, *two_ranks(tmp_path), check=False
    ).returncode
    run_one_process([*flags, "--strategy", "ddp"], tmp_path)
    assert [line["world_size"] for line in metrics(tmp_path, "start")] == [2, 1]
    assert "Saved by 2 processes, resuming with 1" in capfd.readouterr().out
    assert losses(tmp_path) == pytest.approx(losses(solo), abs=1e-5)
    assert losses(tmp_path, "val") == pytest.approx(losses(solo, "val"), abs=1e-5)


def test_validation_loss_is_equal_on_one_two_and_three_processes(
    solo, flags, t5_directory, tmp_path
):
    flags = [*flags, "--model-name", t5_directory, "--max-steps", 1, "--batch-size", 2]
    for processes in (2, 3):
        output = tmp_path / str(processes)
        launch(processes, "T5_training.py", *flags, "--output-dir", output)
        assert losses(output, "val")[0] == pytest.approx(losses(solo, "val")[0], abs=1e-5)


def test_run_keeps_two_checkpoints_best_final_and_metrics(reference_run):
    val_losses = {step: loss for step, loss in losses(reference_run, "val").items() if step}
    best = min(val_losses.items(), key=lambda item: (item[1], item[0]))
    names = sorted(path.name for path in (reference_run / "checkpoints").iterdir())
    assert best[0] == 8 and names == ["step-00000006", "step-00000008"]
    assert sorted(path.name for path in reference_run.iterdir()) == [
        "best", "checkpoints", "final", "metrics.jsonl", "status"]  # fmt: skip
    assert sorted(losses(reference_run, "val")) == [0, 3, 5, 6, 8]
    (start,) = metrics(reference_run, "start")
    assert start["arguments"]["lr"] == 1e-3 and start["world_size"] == 2
    line = metrics(reference_run, "train")[-1]
    assert {"loss", "lr", "grad_norm", "tokens", "tokens_per_second"} <= line.keys()
    assert line["peak_memory_mb"] > 100
    assert metrics(reference_run, "done")[0]["best_loss"] == best[1]
    check_tied_once(reference_run)


def reload(directory: Path, pairs: Path) -> dict:
    """Run reload.py on an exported model in a new process and return its results."""
    args = parse_flags(T5_training, ["--model-name", "tiny", "--dataset", str(pairs)])
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


def test_exports_reload_with_the_same_loss(run_copy, flags, pairs, monkeypatch):
    val = losses(run_copy, "val")
    best = min(loss for step, loss in val.items() if step)  # the initial model is not exported
    for kind, loss in (("final", val[8]), ("best", best)):
        result = reload(run_copy / kind, pairs)
        assert result["loss"] == pytest.approx(loss, abs=1e-5)
        assert result["tied"] and result["dtype"] == "torch.float32"
    before = weights(run_copy / "final")
    assert "lm_head.weight" not in before  # tied weights are written once
    shutil.rmtree(run_copy / "final")
    monkeypatch.setattr(export, "FILE_BYTES", 1e5)
    run_one_process([*flags, "--export-only"], run_copy)
    assert len(list((run_copy / "final").glob("model-*.safetensors"))) > 2
    after = weights(run_copy / "final")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert reload(run_copy / "final", pairs)["loss"] == pytest.approx(val[8], abs=1e-5)
    run_one_process([*flags, "--export-only", "--export-dtype", "bf16"], run_copy)
    result = reload(run_copy / "final", pairs)
    assert result["dtype"] == "torch.bfloat16"
    assert result["loss"] == pytest.approx(val[8], abs=0.02)


def test_finished_run_continues_with_more_steps(run_copy, flags, capfd):
    before = (run_copy / "metrics.jsonl").read_text()
    run_one_process(flags, run_copy)
    assert "is finished" in capfd.readouterr().out
    assert (run_copy / "metrics.jsonl").read_text() == before
    run_one_process([*flags, "--max-steps", "5"], run_copy)
    assert "is finished at 5 steps. To train longer," in capfd.readouterr().out
    run_one_process([*flags, "--max-steps", "10", "--lr", "2e-3"], run_copy)
    assert "With these flags the learning rate goes from 0 to " in capfd.readouterr().out
    assert list(losses(run_copy)) == list(range(1, 11))
    rates = [line["lr"] for line in metrics(run_copy, "train")[-2:]]
    assert rates == pytest.approx([2e-3 * 2 / 9, 2e-3 * 1 / 9])  # on the new schedule


def error_message(flags: list[str], output: Path, capfd: pytest.CaptureFixture) -> str:
    """Run the script and return the error message that it exits with."""
    with pytest.raises(SystemExit) as end:
        run_one_process(flags, output)
    assert end.value.code
    message = capfd.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ") and "Traceback" not in message
    return message


def test_resume_rejects_changed_seed_data_model_and_batch(run_copy, flags, t5_directory, capfd):
    before = sorted((path, path.stat().st_mtime) for path in run_copy.rglob("*") if path.is_file())
    error = error_message([*flags, "--seed", "1"], run_copy, capfd)
    assert "run: --seed is 1, was 0. Pass" in error
    error = error_message([*flags, "--source-length", "8"], run_copy, capfd)
    assert "training data is " in error and "validation data 1 is " in error
    assert f", in --dataset {flags[flags.index('--dataset') + 1]}. Pass" in error
    error = error_message([*flags, "--no-group-by-length"], run_copy, capfd)
    assert "--group-by-length is False, was True" in error
    error = error_message([*flags, "--model-name", str(t5_directory)], run_copy, capfd)
    assert "model is t5, crc " in error
    error = error_message([*flags, "--gradient-accumulation-steps", "2"], run_copy, capfd)
    assert "global batch is 16, was 8" in error and "--global-batch-size 8 keeps the batch" in error
    after = sorted((path, path.stat().st_mtime) for path in run_copy.rglob("*") if path.is_file())
    assert before == after


@pytest.mark.parametrize("more_flags, message", [
    (["--model-name", "/no/such/directory"], "/no/such/directory is neither a directory nor"),
    (["--model-name", "no-such/model"], "is not cached, and the hub cannot be reached"),
    (["--output-dir", "/dev/null/here"], "/dev/null/here"),
    (["--export-only"], "--export-only needs a checkpoint"),
    (["--source-column", "body"], "has no column"),
])  # fmt: skip
def test_bad_input_exits_with_one_message(more_flags, message, flags, tmp_path, capfd):
    args = [*flags, "--output-dir", str(tmp_path), *more_flags]
    with pytest.raises(SystemExit) as end:
        T5_training.fsdp_main(parse_flags(T5_training, args))
    assert end.value.code
    error = capfd.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error


def test_invalid_values_exit_with_one_message(pairs, capfd):
    invalid = {
        "--batch-size": 0, "--lr": -1, "--warmup-ratio": 2, "--epochs": 0,
        "--rouge-samples": -1, "--max-grad-norm": 0, "--keep-checkpoints": 0,
        "--strategy": "hybrid_shard",
    }  # fmt: skip
    words = [str(word) for item in invalid.items() for word in item]
    with pytest.raises(SystemExit) as end:
        parse_flags(T5_training, ["--model-name", "tiny", "--dataset", str(pairs), *words])
    assert end.value.code
    error = capfd.readouterr().err
    assert all(flag in error for flag in invalid) and len(error.splitlines()) == 1
    for word in (["--strategy", "zero3"], ["--no-such-flag"], ["--lr", "high"]):
        with contextlib.suppress(SystemExit):
            parse_flags(T5_training, word)
        assert word[0] in capfd.readouterr().err


def test_foreign_files_are_kept_and_runs_refused(run_copy, flags, tmp_path, capfd, monkeypatch):
    (run_copy / "tmp-mine").mkdir()
    run_one_process(flags, run_copy)
    assert (run_copy / "tmp-mine").is_dir()
    (tmp_path / "foreign/final").mkdir(parents=True)
    assert "but no run" in error_message(flags, tmp_path / "foreign", capfd)
    monkeypatch.setattr(T5_training, "SCRIPT", "my_script")
    assert "script is my_script, was T5_training" in error_message(flags, run_copy, capfd)


def test_two_ranks_report_bad_data_once(flags, tmp_path):
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    command = [*flags, "--dataset", tmp_path / "bad.csv", "--output-dir", tmp_path / "run"]
    result = launch(2, "T5_training.py", *command, check=False)
    assert result.returncode != 0
    assert len(error_lines(result.stderr)) == 1 and "Its columns are: a, b" in result.stderr
    script_output = result.stderr[: result.stderr.index("torch/distributed/elastic")]
    assert "Traceback" not in script_output and "Connection closed" not in result.stderr


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
    assert losses(output, "val")[0] == pytest.approx(reload(tmp_path, pairs)["loss"], abs=1e-5)
    run_one_process(flags, output)
    result = reload(output / "final", pairs)
    assert result["loss"] == pytest.approx(losses(output, "val")[8], abs=1e-5)
    assert not result["tied"] and "lm_head.weight" in weights(output / "final")
