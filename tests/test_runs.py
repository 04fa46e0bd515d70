"""Runs resume or end cleanly after signals, lost ranks, damaged saves, full disks and changes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chaos import workers
from conftest import (
    ROOT,
    check_equal_weights,
    error_lines,
    launch,
    live_metrics,
    losses,
    metrics,
    status,
)
from in_process import start

import gpt2_fsdp
from core import export


@pytest.fixture(scope="module")
def flags(texts: tuple[Path, Path]) -> list[str]:
    """Return flags for ten steps of `tiny`, which has dropout, with a global batch of 8."""
    return ["--dataset", str(texts[0]), "--val-dataset", str(texts[1]), "--block-size", "32",
            "--num-train-samples", "0", "--num-val-samples", "0", "--max-steps", "10",
            "--log-every", "1", "--save-every", "2", "--lr", "1e-3", "--model-name", "tiny",
            "--batch-size", "4"]  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, flags: list[str]) -> Path:
    """Return a finished run of two ranks."""
    output = tmp_path_factory.mktemp("run") / "uninterrupted"
    launch(2, "gpt2_fsdp.py", *flags, "--output-dir", output)
    return output


@pytest.fixture
def long_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torchrun wait longer for a rank that it terminates than the tests do."""
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "95")


def check_equal(output: Path, uninterrupted: Path) -> None:
    """Check that a finished run equals another bit for bit and that it left no temporary
    files."""
    for event in ("train", "val"):
        assert losses(output, event) == losses(uninterrupted, event)
    check_equal_weights(output / "final", uninterrupted / "final")
    assert status(output) == "finished"
    assert not list(output.rglob("tmp-*"))


def spawn(*command: object, torchrun: tuple = ("--nproc-per-node", "2")) -> subprocess.Popen:
    """Start torchrun in the background and return its process."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", *torchrun]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*start, *map(str, command)], cwd=ROOT, **pipes)


def wait_for_step(output: Path, step: int) -> None:
    """Wait until the step is logged."""
    deadline = time.monotonic() + 100
    while step not in [line["step"] for line in live_metrics(output, "train")]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_signal_to_torchrun_saves_and_resumes_bit_for_bit(uninterrupted, flags, tmp_path):
    command = [*flags, "--output-dir", tmp_path, "--save-every", "0"]
    handled = ["--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1", "--nproc-per-node", "2"]
    process = spawn("tests/workers/slowed.py", "gpt2_fsdp", *command, torchrun=handled)
    wait_for_step(tmp_path, 2)
    pids = workers(process.pid)
    assert len(pids) == 2
    process.send_signal(signal.SIGUSR1)
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    assert process.wait(timeout=100) != 0
    assert status(tmp_path) == "stopped"
    last = max(losses(tmp_path))
    assert last < 10 and (tmp_path / f"checkpoints/step-{last:08d}").is_dir()
    # Left by a kill during a save.
    for name in ("checkpoints/step-00000099", "tmp-final"):
        (tmp_path / name).mkdir()
    launch(2, "gpt2_fsdp.py", *command)
    check_equal(tmp_path, uninterrupted)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_without_torchrun_exits_with_75(number, flags, tmp_path):
    command = [sys.executable, ROOT / "gpt2_fsdp.py", *flags, "--output-dir", tmp_path]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*map(str, command), "--max-steps", "500"], **pipes)
    wait_for_step(tmp_path, 1)
    process.send_signal(number)
    assert process.wait(timeout=60) == 75
    assert "Traceback" not in process.stderr.read()
    assert status(tmp_path) == "stopped"


def test_workers_of_a_killed_torchrun_save_and_exit(flags, tmp_path):
    process = spawn("gpt2_fsdp.py", *flags, "--output-dir", tmp_path, "--max-steps", "1000")
    wait_for_step(tmp_path, 2)
    pids = workers(process.pid)
    assert len(pids) == 2
    process.kill()
    deadline = time.monotonic() + 100
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert status(tmp_path) == "stopped"


def test_hanging_rank_ends_the_run_and_shows_its_stack(flags, tmp_path, long_shutdown):
    command = ["gpt2_fsdp", "hang", 1, 3, *flags, "--output-dir", tmp_path]
    start = time.monotonic()
    launch(2, "tests/workers/faulty.py", *command, "--timeout-minutes", 0.5, check=False)
    assert time.monotonic() - start < 120
    waiting, hanging = (tmp_path / f"stacks-rank-{rank}.txt" for rank in (0, 1))
    assert "tests/workers/faulty.py" in hanging.read_text() and "distributed" in waiting.read_text()
    assert status(tmp_path) == "running" and max(losses(tmp_path)) == 2
    assert (tmp_path / "checkpoints/step-00000002").is_dir()


def test_killed_rank_ends_the_job_soon(flags, tmp_path):
    process = spawn("tests/workers/slowed.py", "gpt2_fsdp", *flags, "--output-dir", tmp_path)
    wait_for_step(tmp_path, 2)
    os.kill(workers(process.pid)[-1], signal.SIGKILL)
    start = time.monotonic()
    assert process.wait(timeout=100) != 0
    assert time.monotonic() - start < 60


def test_error_on_one_rank_is_shown_with_its_traceback(flags, tmp_path, long_shutdown):
    start = time.monotonic()
    command = ["gpt2_fsdp", "raise", 1, 3, *flags, "--output-dir", tmp_path]
    error = launch(2, "tests/workers/faulty.py", *command, check=False).stderr
    assert time.monotonic() - start < 90
    shown, report = error.split("tests/workers/faulty.py FAILED")
    fault = "DistBackendError: NCCL error: the fault of rank 1"
    assert shown.count("[rank1]: Traceback") == shown.count(fault) == 1
    assert fault in report.split("Root Cause")[1]


def test_nan_loss_ends_all_ranks_and_saves_nothing(flags, tmp_path):
    command = ["gpt2_fsdp", "nan", 1, 5, *flags, "--log-every", 100, "--output-dir", tmp_path]
    result = launch(2, "tests/workers/faulty.py", *command, check=False)
    assert result.returncode
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    (error,) = errors
    assert "The gradient norm of step 5 is not finite, in samples [" in error
    message = error.removeprefix("error: ")
    assert message in result.stderr.split("Root Cause")[1]  # the last lines on the screen
    names = sorted(path.name for path in tmp_path.glob("checkpoints/step-*"))
    assert names == ["step-00000002", "step-00000004"]


@pytest.mark.slow
def test_full_disk_skips_one_save(uninterrupted, flags, tmp_path):
    command = ["gpt2_fsdp", "full", 1, 6, *flags, "--output-dir", tmp_path]
    result = launch(2, "tests/workers/faulty.py", *command)
    warnings = [line for line in result.stdout.splitlines() if "tries again" in line]
    assert len(warnings) == 1 and "step-00000006 could not be saved" in warnings[0]
    assert 6 not in [line["step"] for line in metrics(tmp_path, "save")]
    check_equal(tmp_path, uninterrupted)


def test_disk_that_stays_full_ends_the_run(flags, tmp_path):
    command = ["gpt2_fsdp", "full for good", 0, 6, *flags, "--output-dir", tmp_path]
    result = launch(0, "tests/workers/faulty.py", *command, check=False)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    error = result.stderr.strip().splitlines()[-1]
    assert error.startswith("error: ") and error.endswith("Is the disk full?")
    assert status(tmp_path) == "running"
    names = sorted(path.name for path in tmp_path.glob("checkpoints/*"))
    assert names == ["step-00000002", "step-00000004"]
    launch(0, "gpt2_fsdp.py", *flags, "--output-dir", tmp_path)
    assert [line["step"] for line in metrics(tmp_path, "start")] == [0, 4]


def run(flags: list[str], output: Path, *more: object) -> int:
    """Run the script in this process, on one rank; return its exit code."""
    return start(gpt2_fsdp, *flags, "--output-dir", output, *more)


@pytest.mark.parametrize("damage", ["truncated", "altered"])
def test_damaged_checkpoint_is_skipped_and_replaced(damage, flags, tmp_path, capfd):
    run(flags, tmp_path, "--max-steps", "4")
    newest = tmp_path / "checkpoints/step-00000004"
    content = bytearray((newest / "__0_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    (newest / "__0_0.distcp").write_bytes(content[: None if damage == "altered" else -20])
    capfd.readouterr()
    run(flags, tmp_path, "--max-steps", "6")
    assert "step-00000004" in capfd.readouterr().out
    assert [line["step"] for line in metrics(tmp_path, "start")] == [0, 2]
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]
    names = sorted(path.name for path in tmp_path.glob("checkpoints/*"))
    assert names == ["step-00000004", "step-00000006"]


def test_failed_export_keeps_the_previous_best(flags, tmp_path, monkeypatch, capfd):
    export_model = export.export_model
    paths = []

    def fail_third(model: object, tokenizer: object, path: Path, *rest: object) -> None:
        paths.append(path.name)
        if paths == ["best"] * 3:
            raise OSError("no space left")
        export_model(model, tokenizer, path, *rest)

    monkeypatch.setattr(gpt2_fsdp, "export_model", fail_third)
    run(flags, tmp_path, "--max-steps", "4", "--eval-every", "2")
    assert "best/ could not be written (no space left)" in capfd.readouterr().out
    assert paths == ["best", "best", "best", "final"] and status(tmp_path) == "finished"
    assert metrics(tmp_path, "done")[0]["best_step"] == 2


def test_resume_from_an_older_checkpoint_exports_best_again(flags, tmp_path):
    flags = [*flags, "--max-steps", "6", "--eval-every", "2"]
    run(flags, tmp_path / "whole")
    path = Path(shutil.copytree(tmp_path / "whole", tmp_path / "older"))
    shutil.rmtree(path / "checkpoints/step-00000006")
    shutil.rmtree(path / "best")
    run(flags, path)
    assert losses(path) == losses(tmp_path / "whole")
    for name in ("best", "final"):
        check_equal_weights(path / name, tmp_path / "whole" / name)


def test_log_lines_after_a_stop_equal_those_of_an_uninterrupted_run(flags, tmp_path):
    """Their losses are means over three steps, and the run stops after four."""
    flags = [*flags, "--log-every", "3", "--max-steps", "9", "--eval-every", "0"]
    run(flags, tmp_path / "whole")
    worker = ["tests/workers/slowed.py", "gpt2_fsdp", *flags, "--output-dir", tmp_path / "stopped"]
    command = [sys.executable, *map(str, worker)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    wait_for_step(tmp_path / "stopped", 3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 75
    assert max(losses(tmp_path / "stopped")) == 3
    assert max(tmp_path.glob("stopped/checkpoints/*")).name in ("step-00000004", "step-00000005")
    run(flags, tmp_path / "stopped")
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    assert list(losses(tmp_path / "whole")) == [3, 6, 9]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, flags: list[str]) -> Path:
    """Return the output directory of a finished run of one process, of four steps."""
    path = tmp_path_factory.mktemp("original") / "run"
    run(flags, path, "--max-steps", "4")
    return path


@pytest.fixture
def finished(original: Path, tmp_path: Path) -> Path:
    """Return a copy of the finished run."""
    return Path(shutil.copytree(original, tmp_path / "run"))


def test_finished_run_changes_nothing_and_can_train_longer(finished, flags, capfd):
    files = {path: path.stat().st_mtime_ns for path in (finished / "final").iterdir()}
    assert run(flags, finished, "--max-steps", "4") == 0
    assert "is finished at 4 steps. To train longer, raise --max-steps" in capfd.readouterr().out
    assert files == {path: path.stat().st_mtime_ns for path in (finished / "final").iterdir()}
    shutil.rmtree(finished / "final")
    (finished / "status").write_text("running\nsaved step 4\n")  # as a killed export leaves it
    assert run(flags, finished, "--max-steps", "4") == 0
    assert (finished / "final/model.safetensors").exists() and status(finished) == "finished"
    assert run(flags, finished, "--max-steps", "6") == 0
    assert status(finished) == "finished" and list(losses(finished)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("state", ["damaged", "deleted"])
def test_run_without_intact_checkpoint_does_not_start_over(state, finished, flags, capfd):
    if state == "deleted":
        shutil.rmtree(finished / "checkpoints")
    else:
        (finished / "status").write_text("running\nsaved step 4\n")
        for path in finished.glob("checkpoints/*/__0_0.distcp"):
            path.unlink()
    for _ in range(2):
        assert run(flags, finished) == 1
        assert "is intact, but the run had some" in capfd.readouterr().err


def test_user_files_beside_checkpoints_are_kept(finished, flags):
    checkpoints = finished / "checkpoints"
    shutil.copytree(checkpoints / "step-00000002", checkpoints / "step-00000002-keep")
    user_files = ["step-00000004.bak", "step-5", "step-latest", "best-of-all", "tmp-notes"]
    for name in user_files:
        (checkpoints / name).mkdir()
    (checkpoints / "step-00000099").mkdir()  # as a killed save leaves it
    assert run(flags, finished, "--max-steps", "6", "--keep-checkpoints", "1") == 0
    names = {path.name for path in checkpoints.iterdir()}
    assert names == {*user_files, "step-00000002-keep", "step-00000006"}


def test_resume_rejects_changed_data_and_models(finished, flags, gpt2_directory, tmp_path, capfd):
    file = tmp_path / "train.txt"
    file.write_text(Path(flags[1]).read_text().replace("sine", "sign"))
    assert run(["--dataset", str(file), *flags[2:]], finished) == 1
    assert "was saved by a different run: data is " in capfd.readouterr().err
    assert run(flags, finished, "--batch-size", "2") == 1
    assert "--global-batch-size 4 keeps its batch" in capfd.readouterr().err
    other = Path(shutil.copytree(gpt2_directory, tmp_path / "heads"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"n_head": 2}))
    output = tmp_path / "other"
    assert run([*flags, "--model-name", str(gpt2_directory)], output, "--max-steps", "2") == 0
    for more in ["--max-steps", "4"], ["--export-only"]:
        assert run([*flags, "--model-name", str(other)], output, *more) == 1
        assert "model is gpt2, " in capfd.readouterr().err


def test_evaluation_rejects_models_that_the_run_has_not_trained(
    finished, flags, gpt2_directory, capfd
):
    for model in ("tiny", str(gpt2_directory)):
        assert run([*flags, "--model-name", model, "--evaluate-only"], finished) == 1
        assert f"Pass --model-name {finished}/final" in capfd.readouterr().err
    for model in (finished / "checkpoints/step-00000004", finished):
        assert run([*flags, "--model-name", str(model)], finished.with_name("new")) == 1
        assert "such as a run's final/ (from --export-only" in capfd.readouterr().err
    assert run([*flags, "--model-name", f"{finished}/final", "--evaluate-only"], finished) == 0


def test_validation_before_training_counts_for_best(flags, gpt2_directory, tmp_path):
    more = ["--model-name", str(gpt2_directory), "--lr", "9", "--max-steps", "4"]
    assert run([*flags, *more], tmp_path) == 0
    assert losses(tmp_path, "val")[0] < losses(tmp_path, "val")[4]
    check_equal_weights(tmp_path / "best", gpt2_directory)
    assert metrics(tmp_path, "done")[0]["best_step"] == 0


def test_resume_names_changed_flags(finished, flags, capfd):
    more = ["--lr", "1e-4", "--weight-decay", "0.5", "--max-steps", "6"]
    assert run(flags, finished, *more) == 0
    output = capfd.readouterr().out
    assert "--lr is 0.0001, was 0.001." in output and "--weight-decay is 0.5, was 0.01." in output


def test_nodes_with_different_data_are_refused(texts, tmp_path, monkeypatch):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        shutil.copy(texts[0], folder / "train.txt")
        shutil.copy(texts[1], folder / "val.txt")
    text = texts[0].read_text()
    (folders[1] / "train.txt").write_text(text.replace("sine", "sign", 1))
    files = ["--dataset", "train.txt", "--val-dataset", "val.txt", "--block-size", "32"]
    flags = [*files, "--model-name", "tiny", "--output-dir", str(tmp_path / "run")]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:29411", "--rdzv-id", "d"]
    processes = []
    for rank, folder in enumerate(folders):
        monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", *rendezvous]
        command += ["--node-rank", str(rank), "--nproc-per-node", "1", ROOT / "gpt2_fsdp.py"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen([*command, *flags], cwd=folder, **pipes))
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert all(process.returncode for process in processes)
    message = error_lines(errors[0])[0]
    assert "data is " in message and " on one rank and " in message
    assert not (tmp_path / "run/metrics.jsonl").exists()
