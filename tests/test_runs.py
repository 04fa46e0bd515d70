"""Runs resume or end cleanly after signals, lost ranks, damaged saves, full disks and changes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import killed
import pytest
from chaos import is_over, workers
from conftest import (
    ROOT,
    check_equal_runs,
    check_equal_weights,
    error_lines,
    finish,
    launch,
    losses,
    metrics,
    status,
    wait_for_step,
    wait_until,
    weights,
)
from in_process import start
from safetensors.torch import load_file, save_file

import gpt2_fsdp
from core import export, ranks
from core.checkpoint import read_state

pytestmark = pytest.mark.usefixtures("real_torchrun")


@pytest.fixture(scope="module")
def flags(block_flags: list[str]) -> list[str]:
    """Return flags for ten steps with a global batch of 8 on two ranks."""
    return [*block_flags, "--max-steps", "10", "--save-every", "2", "--lr", "1e-3",
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


def spawn(*command: object, torchrun: list, cwd: Path = ROOT) -> subprocess.Popen:
    """Start torchrun in the background and return its process."""
    words = ["-m", "torch.distributed.run", *torchrun, *command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *map(str, words)], cwd=cwd, **pipes)


def test_run_stopped_by_a_signal_or_killed_torchrun_resumes(uninterrupted, flags, tmp_path):
    command = [*flags, "--output-dir", tmp_path, "--save-every", "0"]
    torchrun = ["--standalone", "--nproc-per-node", 2, "--signals-to-handle",
                "SIGTERM,SIGINT,SIGUSR1"]  # fmt: skip
    last = 0
    for number in (signal.SIGKILL, signal.SIGUSR1):
        process = spawn("tests/workers/slowed.py", "gpt2_fsdp", *command, torchrun=torchrun)
        wait_for_step(tmp_path, last + 2)
        pids = workers(process.pid)
        assert len(pids) == 2
        process.send_signal(number)
        for pid in pids if number == signal.SIGUSR1 else ():  # as Slurm does
            os.kill(pid, number)
        assert finish(process).returncode != 0
        wait_until(lambda pids=pids: all(map(is_over, pids)))
        assert status(tmp_path) == "stopped"
        last = max(losses(tmp_path))
        assert last < 10 and (tmp_path / f"checkpoints/step-{last:08d}").is_dir()
    # Left by a kill during a save.
    for name in ("checkpoints/step-00000099", "tmp-final"):
        (tmp_path / name).mkdir()
    launch(2, "gpt2_fsdp.py", *command)
    assert status(tmp_path) == "finished"
    check_equal_runs(tmp_path, uninterrupted)


def test_signal_without_torchrun_saves_and_exits_with_75(flags, tmp_path):
    """The losses are means over three steps, also if the run stops between log lines."""
    flags = [*flags, "--log-every", "3", "--max-steps", "9", "--eval-every", "0"]
    run(flags, tmp_path / "whole")
    output = tmp_path / "stopped"
    worker = ["tests/workers/slowed.py", "gpt2_fsdp", *flags, "--output-dir", output]
    for number, step in ((signal.SIGTERM, 3), (signal.SIGINT, 6)):
        command = [sys.executable, *map(str, worker)]
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        wait_for_step(output, step)
        process.send_signal(number)
        result = finish(process)
        assert result.returncode == 75
        assert "Traceback" not in result.stderr and status(output) == "stopped"
        newest = max(output.glob("checkpoints/*")).name
        assert newest in (f"step-0000000{step + 1}", f"step-0000000{step + 2}")
    run(flags, output)
    assert losses(output) == losses(tmp_path / "whole")
    assert list(losses(output)) == [3, 6, 9]


def test_hanging_rank_ends_the_run_and_shows_its_stack(flags, tmp_path, long_shutdown):
    command = ["gpt2_fsdp", "hang", 1, 3, *flags, "--output-dir", tmp_path]
    launch(2, "tests/workers/faulty.py", *command, "--timeout-minutes", 0.5, check=False)
    waiting, hanging = (tmp_path / f"stacks-rank-{rank}.txt" for rank in (0, 1))
    assert "tests/workers/faulty.py" in hanging.read_text() and "distributed" in waiting.read_text()
    assert status(tmp_path) == "running" and max(losses(tmp_path)) == 2
    assert (tmp_path / "checkpoints/step-00000002").is_dir()


def test_error_on_one_rank_is_shown_with_its_traceback(flags, tmp_path, long_shutdown):
    command = ["gpt2_fsdp", "raise", 1, 3, *flags, "--output-dir", tmp_path]
    error = launch(2, "tests/workers/faulty.py", *command, check=False).stderr
    shown, report = error.split("tests/workers/faulty.py FAILED")
    fault = "DistBackendError: NCCL error: the fault of rank 1"
    assert shown.count("[rank1]: Traceback") == shown.count(fault) == 1
    assert fault in report.split("Root Cause")[1]


def test_nan_loss_ends_all_ranks_and_saves_nothing(flags, tmp_path):
    command = ["gpt2_fsdp", "nan", 1, 5, *flags, "--log-every", 100, "--output-dir", tmp_path]
    result = launch(2, "tests/workers/faulty.py", *command, check=False)
    assert result.returncode
    (error,) = error_lines(result.stderr)
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
    check_equal_runs(tmp_path, uninterrupted)


def test_disk_that_stays_full_ends_the_run(flags, tmp_path):
    command = ["gpt2_fsdp", "full for good", 0, 6, *flags, "--output-dir", tmp_path]
    result = launch(0, "tests/workers/faulty.py", *command, check=False)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    error = result.stderr.strip().splitlines()[-1]
    assert error.startswith("error: ") and "File too large" in error
    assert status(tmp_path) == "running"
    names = sorted(path.name for path in tmp_path.glob("checkpoints/*"))
    assert names == ["step-00000002", "step-00000004"]
    launch(0, "gpt2_fsdp.py", *flags, "--output-dir", tmp_path)
    assert [line["step"] for line in metrics(tmp_path, "start")] == [0, 4]


# The loader may read from the worker before it knows that the worker has ended.
WORKER_DIED = r"DataLoader worker \(pid\(s\) |Connection reset by peer"


@pytest.mark.parametrize("more", [[], ["--async-save"]])
def test_worker_that_dies_in_a_save_does_not_interrupt_it(flags, tmp_path, more):
    command = ["gpt2_fsdp", "worker in save", 0, 0, *flags, "--num-workers", 1, *more]
    result = launch(0, "tests/workers/faulty.py", *command, "--output-dir", tmp_path, check=False)
    assert result.returncode == 1 and "could not be saved" not in result.stdout
    assert re.search(WORKER_DIED, result.stderr) and metrics(tmp_path, "save")


def test_worker_that_dies_between_saves_is_noticed(flags, tmp_path):
    command = ["gpt2_fsdp", "worker", 0, 3, *flags, "--num-workers", 1, "--output-dir", tmp_path]
    result = launch(0, "tests/workers/faulty.py", *command, check=False)
    assert result.returncode == 1 and re.search(WORKER_DIED, result.stderr)
    assert max(losses(tmp_path)) == 3


def run(flags: list[str], output: Path, *more: object) -> int:
    """Run the script in this process, on one rank; return its exit code."""
    return start(gpt2_fsdp, *flags, "--output-dir", output, *more)


def test_stopped_run_resumes_bit_for_bit_between_two_lines_of_its_log(flags, tmp_path, monkeypatch):
    """A loss in the log is the mean of three steps. The run has dropout."""
    flags = [*flags, "--log-every", "3", "--save-every", "0", "--eval-every", "0", "--max-steps",
             "9"]  # fmt: skip
    run(flags, tmp_path / "whole")
    output = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        patch.setattr(gpt2_fsdp, "progress", gpt2_fsdp.progress)
        killed.before_each_step(
            gpt2_fsdp, lambda step: step == 5 and os.kill(os.getpid(), signal.SIGTERM)
        )
        assert run(flags, output) == ranks.STOPPED
    ranks.StopRequest().forget()
    assert (output / "status").read_text() == "stopped\nsaved step 5\n"
    assert run(flags, output) == 0
    assert list(losses(output)) == [3, 6, 9]
    check_equal_runs(output, tmp_path / "whole")


def test_scale_of_fp16_is_resumed(flags, tmp_path):
    flags = [*flags, "--precision", "fp16", "--lr-schedule", "constant", "--max-steps"]
    for name, steps in (("whole", "4"), ("parts", "2"), ("parts", "4")):
        assert run([*flags, steps], tmp_path / name) == 0
    whole, parts = (tmp_path / name / "checkpoints/step-00000004" for name in ("whole", "parts"))
    assert read_state(parts)["scaler"] == read_state(whole)["scaler"] != {}
    check_equal_weights(tmp_path / "parts/final", tmp_path / "whole/final")


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
    flags = [*flags, "--max-steps", "4", "--eval-every", "2"]
    assert run(flags, tmp_path) == 1
    assert "best/ could not be written (no space left)" in capfd.readouterr().out
    assert paths == ["best", "best", "best", "final"] and status(tmp_path) == "running"
    assert read_state(max(tmp_path.glob("checkpoints/*")))["best_step"] == 2
    assert run(flags, tmp_path) == 0 and status(tmp_path) == "finished"
    assert paths[4:] == ["best", "final"] and metrics(tmp_path, "done")[0]["best_step"] == 4


def test_resume_from_an_older_checkpoint_exports_best_again(flags, tmp_path):
    flags = [*flags, "--max-steps", "6", "--eval-every", "2"]
    run(flags, tmp_path / "whole")
    path = Path(shutil.copytree(tmp_path / "whole", tmp_path / "older"))
    shutil.rmtree(path / "checkpoints/step-00000006")
    shutil.rmtree(path / "best")
    run(flags, path)
    check_equal_runs(path, tmp_path / "whole", ("best", "final"))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, flags: list[str]) -> Path:
    """Return a finished run of one process, of four steps."""
    path = tmp_path_factory.mktemp("original") / "run"
    run(flags, path, "--max-steps", "4")
    return path


@pytest.fixture
def finished(original: Path, tmp_path: Path) -> Path:
    """Return a copy of the finished run."""
    return Path(shutil.copytree(original, tmp_path / "run"))


def test_finished_run_exports_again_and_can_train_longer(finished, flags, capfd):
    whole = shutil.copytree(finished, finished.with_name("whole"))
    shutil.rmtree(finished / "final")  # as a killed export leaves it
    for steps in ("4", "2"):
        assert run(flags, finished, "--max-steps", steps) == 0
        output = capfd.readouterr().out
        assert "\ndone  4/4 " in output
        assert "is finished at 4 steps. To train longer, raise --max-steps" in output
        check_equal_runs(finished, whole)
        assert status(finished) == "finished" and len(metrics(finished, "done")) == 1
    more = ["--lr", "1e-4", "--weight-decay", "0.5", "--max-steps", "6"]
    capfd.readouterr()
    assert run(flags, finished, *more) == 0
    output = capfd.readouterr().out
    assert "--lr is 0.0001, was 0.001." in output and "--weight-decay is 0.5, was 0.01." in output
    assert status(finished) == "finished" and list(losses(finished)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("state", ["damaged", "deleted"])
def test_run_without_intact_checkpoint_does_not_start_over(state, finished, flags, capfd):
    (finished / "status").write_text("running\nsaved step 4\n")
    if state == "deleted":
        shutil.rmtree(finished / "checkpoints")
    else:
        for path in finished.glob("checkpoints/*/__0_0.distcp"):
            path.unlink()
    for _ in range(2):
        assert run(flags, finished) == 1
        assert "is intact. Pass another" in capfd.readouterr().err


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
    error = capfd.readouterr().err
    data = r"a different run: data is \['\d+ samples, crc .*\], was \['\d+ samples, crc .*\]\. "
    assert re.search(data, error)
    assert f" --dataset is ('{file}',), was ('{flags[1]}',). " in error
    blocks = [*flags[: flags.index("--block-size")], "--block-size", "16"]
    assert run([*blocks, *flags[len(blocks) :], "--lr", "1e-5"], finished) == 1
    error = capfd.readouterr().err
    assert re.search(data + "--block-size is 16, was 32. .*Pass its model", error)
    assert run(flags, finished, "--batch-size", "2") == 1
    assert "--batch-size x accumulation steps x processes is 2, was 4." in capfd.readouterr().err
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
        assert "Pass a model with its tokenizer, such as final/ of a run." in capfd.readouterr().err
    with mock.patch.object(gpt2_fsdp.checks, "check_model") as check:
        assert run([*flags, "--model-name", f"{finished}/final", "--evaluate-only"], finished) == 0
    check.assert_called_once()


def test_evaluation_and_export_of_the_newest_checkpoint_go_together(finished, flags, tmp_path):
    before = weights(finished / "final")
    shutil.rmtree(finished / "final")
    assert run([*flags, "--evaluate-only", "--export-only"], finished) == 0
    check_equal_weights(finished / "final", finished / "best")
    assert before.keys() == weights(finished / "final").keys()
    evaluation = json.loads((finished / "evaluation.json").read_text())
    assert evaluation["loss"] == losses(finished, "val")[4]
    output = tmp_path / "nothing"
    assert run([*flags, "--evaluate-only", "--export-only"], output) == 1
    assert not (output / "final").exists()


def test_weights_that_are_not_finite_end_the_run_before_training(
    flags, gpt2_directory, tmp_path, capfd
):
    model = Path(shutil.copytree(gpt2_directory, tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    tensors["transformer.h.1.mlp.c_fc.weight"][0, 0] = float("nan")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    assert run([*flags, "--model-name", str(model)], tmp_path / "run") == 1
    error = capfd.readouterr().err
    assert "loss before training is nan. The weights of --model-name are not finite" in error


def test_validation_asks_for_a_stop_at_every_eighth_batch(flags, tmp_path, monkeypatch):
    check = mock.Mock()
    monkeypatch.setattr(ranks.StopRequest, "check", check)
    data = ["--dataset", flags[1], "--val-dataset", flags[1], *flags[4:]]
    assert run(data, tmp_path, "--batch-size", "1", "--max-steps", "1", "--no-save-best") == 0
    assert check.call_count == 2 * 5  # two validations of 35 batches


def test_ddp_does_not_broadcast_buffers(flags, tmp_path, monkeypatch):
    """Nothing changes them."""
    wrapped = mock.Mock(wraps=gpt2_fsdp.DDP)
    monkeypatch.setattr(gpt2_fsdp, "DDP", wrapped)
    assert run(flags, tmp_path, "--strategy", "ddp", "--max-steps", "1") == 0
    assert wrapped.call_args.kwargs["forward_sync_buffers"] is False


def test_validation_before_training_counts_for_best(flags, gpt2_directory, tmp_path):
    more = ["--model-name", str(gpt2_directory), "--lr", "9", "--max-steps", "4"]
    assert run([*flags, *more], tmp_path) == 0
    assert losses(tmp_path, "val")[0] < losses(tmp_path, "val")[4]
    check_equal_weights(tmp_path / "best", gpt2_directory)
    assert metrics(tmp_path, "done")[0]["best_step"] == 0


@pytest.mark.parametrize("flags, name", [([], "data"), (["--async-save"], "--async-save")])
def test_nodes_with_different_data_or_flags_are_refused(flags, name, texts, tmp_path, monkeypatch):
    words = ["--dataset", "train.txt", "--val-dataset", "val.txt", "--block-size", "32"]
    words += ["--model-name", "tiny", "--output-dir", tmp_path / "run"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:29411", "--rdzv-id", "d"]
    processes = []
    for rank, word in enumerate(("sine", "sign")):
        folder = Path(shutil.copytree(texts[0].parent, tmp_path / word))
        (folder / "train.txt").write_text(texts[0].read_text().replace("sine", word, 1))
        monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        node = ["--nnodes", 2, "--node-rank", rank, "--nproc-per-node", 1, *rendezvous]
        more = flags if rank else []
        processes.append(spawn(ROOT / "gpt2_fsdp.py", *words, *more, torchrun=node, cwd=folder))
    outputs = [finish(process).stdout for process in processes]
    assert all(process.returncode for process in processes)
    message = error_lines(outputs[0])[0]
    assert f"{name} is " in message and " on one rank, " in message
    assert not (tmp_path / "run/metrics.jsonl").exists()
