"""Runs resume or end cleanly after signals, lost ranks, damaged saves, full disks and takeovers."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import containers
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
from slurm_cluster import wait_until

import gpt2_fsdp
from benchmarks.driven import parse_flags
from runtime.run import Lock


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
    assert not [*output.rglob("tmp-*"), *output.glob("lock*")]


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
    for name in ("checkpoints/step-00000099", "tmp-final-1764115200000000000"):
        (tmp_path / name).mkdir()
    launch(2, "gpt2_fsdp.py", *command)
    check_equal(tmp_path, uninterrupted)


def test_signal_without_torchrun_exits_with_75(flags, tmp_path):
    for number, steps in ((signal.SIGTERM, 1), (signal.SIGINT, 1)):
        output = tmp_path / number.name
        command = [sys.executable, ROOT / "gpt2_fsdp.py", *flags, "--output-dir", output]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen([*map(str, command), "--max-steps", "500"], **pipes)
        wait_for_step(output, steps)
        process.send_signal(number)
        assert process.wait(timeout=60) == 75
        assert "Traceback" not in process.stderr.read()
        assert status(output) == "stopped"


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
    assert not list(tmp_path.glob("lock*"))


def test_hanging_rank_ends_the_run_and_shows_its_stack(flags, tmp_path, long_shutdown):
    command = ["gpt2_fsdp", "hang", 1, 3, *flags, "--output-dir", tmp_path]
    start = time.monotonic()
    launch(2, "tests/workers/faulty.py", *command, "--timeout-minutes", 0.5, check=False)
    assert time.monotonic() - start < 120
    waiting, hanging = (tmp_path / f"stacks-rank-{rank}.txt" for rank in (0, 1))
    assert "tests/workers/faulty.py" in hanging.read_text() and "distributed" in waiting.read_text()
    assert status(tmp_path) == "failed" and max(losses(tmp_path)) == 2
    assert (tmp_path / "checkpoints/step-00000002").is_dir()


def test_killed_rank_ends_the_job_at_once(flags, tmp_path):
    process = spawn("tests/workers/slowed.py", "gpt2_fsdp", *flags, "--output-dir", tmp_path)
    wait_for_step(tmp_path, 2)
    os.kill(workers(process.pid)[-1], signal.SIGKILL)
    start = time.monotonic()
    assert process.wait(timeout=100) != 0
    assert time.monotonic() - start < 5
    assert status(tmp_path) == "failed"


def test_error_on_one_rank_shows_one_traceback(flags, tmp_path, long_shutdown):
    start = time.monotonic()
    command = ["gpt2_fsdp", "raise", 1, 3, *flags, "--output-dir", tmp_path]
    error = launch(2, "tests/workers/faulty.py", *command, check=False).stderr
    assert time.monotonic() - start < 90
    shown, report = error.split("tests/workers/faulty.py FAILED")
    fault = "DistBackendError: NCCL error: the fault of rank 1"
    assert shown.count("]: Traceback (most") == shown.count("[rank1]: Traceback") == 1
    assert shown.count(fault) == 1 and fault in report.split("Root Cause")[1]
    assert status(tmp_path) == "failed"


def test_nan_loss_ends_all_ranks_and_saves_nothing(flags, tmp_path):
    command = ["gpt2_fsdp", "nan", 1, 5, *flags, "--log-every", 100, "--output-dir", tmp_path]
    result = launch(2, "tests/workers/faulty.py", *command, check=False)
    assert result.returncode
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    (error,) = errors
    assert "Step 5: gradient norm nan" in error and "samples [" in error and "ranks [" in error
    assert "Lower --lr, or check these samples, which the script's load_data returns" in error
    assert error in result.stderr.split("Root Cause")[1]  # the last lines on the screen
    names = sorted(path.name for path in tmp_path.glob("checkpoints/step-*"))
    assert names == ["step-00000002", "step-00000004"]


@pytest.mark.slow
def test_torchrun_restart_resumes_the_last_save(uninterrupted, flags, tmp_path):
    command = ["gpt2_fsdp", "once", 1, 6, *flags, "--output-dir", tmp_path]
    torchrun = ("--nproc-per-node", "2", "--max-restarts", "3")
    process = spawn("tests/workers/faulty.py", *command, torchrun=torchrun)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert "waiting for process" not in output
    assert [line["step"] for line in metrics(tmp_path, "start")] == [0, 5]
    check_equal(tmp_path, uninterrupted)


@pytest.mark.slow
def test_full_disk_skips_one_save(uninterrupted, flags, tmp_path):
    command = ["gpt2_fsdp", "full", 1, 6, *flags, "--output-dir", tmp_path]
    result = launch(2, "tests/workers/faulty.py", *command)
    warnings = [line for line in result.stdout.splitlines() if "tries again" in line]
    assert len(warnings) == 1 and "step-00000006 could not be saved" in warnings[0]
    assert 6 not in [line["step"] for line in metrics(tmp_path, "save")]
    check_equal(tmp_path, uninterrupted)


@pytest.mark.parametrize(
    "mode", ["--no-async-save", pytest.param("--async-save", marks=pytest.mark.slow)]
)
def test_disk_that_stays_full_ends_the_run(mode, flags, tmp_path):
    command = ["gpt2_fsdp", "full for good", 0, 6, *flags, "--output-dir", tmp_path, mode]
    result = launch(0, "tests/workers/faulty.py", *command, check=False)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    error = result.stderr.strip().splitlines()[-1]
    assert error.startswith("error: ") and error.endswith("This is the second failure in a row.")
    assert status(tmp_path) == "failed"
    names = sorted(path.name for path in tmp_path.glob("checkpoints/*"))
    assert names in (["step-00000002", "step-00000004"], ["step-00000002"])  # 4 was pending
    launch(0, "gpt2_fsdp.py", *flags, "--output-dir", tmp_path)
    assert [line["step"] for line in metrics(tmp_path, "start")] == [0, 2 * len(names)]


@pytest.mark.slow
def test_async_save_resumes_bit_for_bit(uninterrupted, flags, tmp_path):
    command = [*flags, "--output-dir", tmp_path, "--async-save"]
    assert launch(2, "tests/workers/killed.py", "gpt2_fsdp", 0, 8, *command, check=False).returncode
    launch(2, "gpt2_fsdp.py", *command)
    assert metrics(tmp_path, "start")[-1]["step"] in (4, 5, 6)
    check_equal(tmp_path, uninterrupted)


def run(flags: list[str], output: Path, *more: str) -> None:
    """Run the script in this process."""
    gpt2_fsdp.fsdp_main(parse_flags(gpt2_fsdp, [*flags, "--output-dir", str(output), *more]))


@pytest.mark.parametrize("damage", ["missing", "truncated", "altered", "state", "step"])
def test_damaged_checkpoint_is_skipped_and_replaced(damage, flags, tmp_path, capfd):
    run(flags, tmp_path, "--max-steps", "4")
    newest = tmp_path / "checkpoints/step-00000004"
    file = newest / ("train_state.json" if damage in ("state", "step") else "__0_0.distcp")
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "step":
        file.write_bytes(content.replace(b'"consumed": 16', b'"consumed": 12'))
    elif damage == "altered":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    else:
        file.write_bytes(content[:-20])
    capfd.readouterr()
    run(flags, tmp_path, "--max-steps", "6")
    assert f"{file} is damaged" in capfd.readouterr().out
    assert [line["step"] for line in metrics(tmp_path, "start")] == [0, 2]
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]
    names = sorted(path.name for path in tmp_path.glob("checkpoints/*"))
    assert names == ["step-00000004", "step-00000006"]
    assert metrics(tmp_path, "done")[-1]["best_step"] > 0


def test_run_without_intact_checkpoint_does_not_start_over(flags, tmp_path, capfd):
    run(flags, tmp_path, "--max-steps", "2")
    (tmp_path / "checkpoints/step-00000002/__0_0.distcp").unlink()
    for _ in range(2):
        with pytest.raises(SystemExit):
            run(flags, tmp_path)
        error = capfd.readouterr().err
        assert "is intact. Pass another --output-dir" in error


@pytest.mark.slow
def test_suspended_run_writes_nothing_after_a_takeover(flags, tmp_path):
    if not containers.is_available():
        pytest.skip("needs unshare and the permission to create namespaces")
    output, log = tmp_path / "output", tmp_path / "log"
    (tmp_path / "hosts").write_text("127.0.0.1 localhost a\n")
    flags = [*flags, "--max-steps", "400", "--save-every", "0", "--eval-every", "400"]
    command = [sys.executable, "gpt2_fsdp.py", *flags, "--output-dir", str(output)]
    suspended = containers.Container("a", tmp_path / "hosts", log, command)
    try:
        wait_until(lambda: len(live_metrics(output, "train")) > 5, 120, str)
        suspended.send(signal.SIGSTOP)
        launch(0, "gpt2_fsdp.py", *flags, "--max-steps", "20", "--output-dir", output)
        files = {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()}
        suspended.send(signal.SIGCONT)
        assert suspended.process.wait(timeout=60) == 75
    finally:
        suspended.process.kill()
    error = f"error: Another run has taken over --output-dir {output}. This one ends."
    assert error_lines(log.read_text()) == [error]
    assert files == {path: path.stat().st_mtime_ns for path in files}
    assert not [path for path in output.rglob("*") if path.is_file() and path not in files]
    assert status(output) == "finished" and sorted(losses(output)) == list(range(1, 21))


HOLDER = """
import pathlib, sys, time, torch.distributed as dist
from runtime.run import Lock
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with Lock(pathlib.Path(sys.argv[1])):
    time.sleep(100)
"""


def test_lock_of_killed_process_is_replaced(process_group, tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], cwd=ROOT)
    try:
        wait_until((tmp_path / "lock").exists, 60, str)
        start = time.monotonic()
        who = f"in use by process {holder.pid} on {socket.gethostname()}"
        with pytest.raises(ValueError, match=who), Lock(tmp_path):
            pass
        assert time.monotonic() - start < 3
    finally:
        holder.kill()
        holder.wait()
    with Lock(tmp_path):
        assert time.monotonic() - start < 5
    assert not (tmp_path / "lock").exists()
