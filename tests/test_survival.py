"""What a run survives, and how it ends: signals, lost ranks, torn saves, full disks, two starts."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chaos import workers
from conftest import (
    ROOT,
    check_equal_weights,
    errors_said,
    launch,
    logged,
    losses,
    metrics,
    status,
)
from slurm_cluster import wait_until

import gpt2_fsdp
import runtime.lock
from runtime import checkpoints
from runtime.lock import Lock


@pytest.fixture(scope="module")
def flags(texts: tuple[Path, Path]) -> list[str]:
    """Ten steps of a global batch of 8 of `tiny`, which has dropout."""
    return ["--dataset", str(texts[0]), "--val-dataset", str(texts[1]), "--block-size", "32",
            "--num-train-samples", "0", "--num-val-samples", "0", "--max-steps", "10",
            "--log-every", "1", "--save-every", "2", "--lr", "1e-3", "--model-name", "tiny",
            "--batch-size", "4"]  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, flags: list[str]) -> Path:
    """A finished run of two ranks."""
    output = tmp_path_factory.mktemp("run") / "uninterrupted"
    launch(2, "gpt2_fsdp.py", *flags, "--output-dir", output)
    return output


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun waits longer for a rank that it told to end than a test does."""
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "95")


def check_equal(output: Path, uninterrupted: Path) -> None:
    """To the last bit, each step logged once; finished, with nothing left lying about."""
    for event in ("train", "val"):
        assert losses(output, event) == losses(uninterrupted, event)
    check_equal_weights(output / "final", uninterrupted / "final")
    assert status(output) == "finished"
    assert not [*output.rglob("tmp-*"), *output.glob("lock*")]


def begin(*command: object, torchrun: tuple = ("--nproc-per-node", "2")) -> subprocess.Popen:
    """A launch that goes on in the background."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", *torchrun]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*start, *map(str, command)], cwd=ROOT, **pipes)


def wait_for_step(output: Path, step: int) -> None:
    """Until that step is logged."""
    deadline = time.monotonic() + 100
    while step not in [line["step"] for line in logged(output, "train")]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_stopped_by_a_signal_to_torchrun(
    uninterrupted: Path, flags: list[str], tmp_path: Path
) -> None:
    """SIGUSR1, and again: a clean save at the step's end, the word `stopped`, and no step lost."""
    command = [*flags, "--output-dir", tmp_path, "--save-every", "0"]
    handled = ["--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1", "--nproc-per-node", "2"]
    process = begin("tests/slowed.py", "gpt2_fsdp", *command, torchrun=handled)
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
    for name in ("checkpoints/tmp-step-00000099", "tmp-final-7"):  # left by a kill inside a save
        (tmp_path / name).mkdir()
    launch(2, "gpt2_fsdp.py", *command)
    check_equal(tmp_path, uninterrupted)


def test_stopped_without_torchrun(flags: list[str], tmp_path: Path) -> None:
    """SIGTERM and Ctrl-C: exit code 75, and no traceback."""
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


def test_orphans_stop(flags: list[str], tmp_path: Path) -> None:
    """Workers whose torchrun was killed save and end, and let the next start in."""
    process = begin("gpt2_fsdp.py", *flags, "--output-dir", tmp_path, "--max-steps", "1000")
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


def test_a_rank_that_waits_for_another_ends_soon(
    flags: list[str], tmp_path: Path, patient: None
) -> None:
    """SIGTERM, when one rank hangs and the other waits for it: torchrun need not kill them. Before
    that each has said where it is, once: which of the two hangs can be seen."""
    command = ["tests/faulty.py", "gpt2_fsdp", "hang", 1, 3, *flags, "--output-dir", tmp_path]
    process = begin(*command, "--stall-minutes", 0.1)
    saved = tmp_path / "checkpoints/step-00000002"
    wait_until(saved.is_dir, 100, str)
    time.sleep(12)  # for the step after it, in which one rank hangs
    process.terminate()
    start = time.monotonic()
    assert process.wait(timeout=100) != 0
    assert time.monotonic() - start < 60
    said = process.stdout.read()
    for rank in (0, 1):
        assert said.count(f"rank {rank} has been in step 3 for") == 1
    assert "in summed_loss" in said or "in <lambda>" in said  # tests/faulty.py's
    assert "distributed_c10d.py" in said or "in backward" in said
    assert saved.is_dir() and max(losses(tmp_path)) == 2


def test_a_killed_rank_ends_the_job_at_once(flags: list[str], tmp_path: Path) -> None:
    """The other one, at work then, is told by torchrun, and waits for nothing when it is alone."""
    process = begin("tests/slowed.py", "gpt2_fsdp", *flags, "--output-dir", tmp_path)
    wait_for_step(tmp_path, 2)
    os.kill(workers(process.pid)[-1], signal.SIGKILL)
    start = time.monotonic()
    assert process.wait(timeout=100) != 0
    assert time.monotonic() - start < 5
    assert status(tmp_path) == "failed"


def test_an_error_on_one_rank(flags: list[str], tmp_path: Path, patient: None) -> None:
    """Its traceback alone is shown, and again in torchrun's report, even if it is of the class that
    NCCL's have; the other ends soon, with one line that has its own error's text."""
    start = time.monotonic()
    command = ["gpt2_fsdp", "raise", 1, 3, *flags, "--output-dir", tmp_path]
    error = launch(2, "tests/faulty.py", *command, check=False).stderr
    assert time.monotonic() - start < 90
    shown, report = error.split("tests/faulty.py FAILED")
    fault = "DistBackendError: NCCL error: the fault of rank 1"
    assert shown.count("]: Traceback (most") == shown.count("[rank1]: Traceback") == 1
    assert shown.count(fault) == 1 and fault in report.split("Root Cause")[1]
    (lost,) = [line for line in shown.splitlines() if "lost another rank" in line]
    assert lost.startswith("rank 0 has lost") and "Connection " in lost
    assert status(tmp_path) == "failed"


def test_a_failure_of_which_nobody_sends_a_signal(flags: list[str], tmp_path: Path) -> None:
    """As from another node's torchrun: the rank that waits for the failed one ends itself."""
    start = time.monotonic()
    command = ["gpt2_fsdp", "told", 1, 3, *flags, "--output-dir", tmp_path]
    error = launch(2, "tests/faulty.py", *command, check=False).stderr
    assert time.monotonic() - start < 90
    assert errors_said(error) == ["error: another rank failed 2 s ago: see that one's error"]
    assert status(tmp_path) == "failed" and not list(tmp_path.glob("lock*"))


def test_a_loss_that_is_not_finite(flags: list[str], tmp_path: Path) -> None:
    """All ranks stop in the step after it, with its own number, rank and samples named; nothing is
    saved over the good state."""
    command = ["gpt2_fsdp", "nan", 1, 5, *flags, "--log-every", 100, "--output-dir", tmp_path]
    result = launch(2, "tests/faulty.py", *command, check=False)
    assert result.returncode
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    (error,) = errors
    assert "step 5: gradient norm nan" in error and "samples [" in error and "ranks [" in error
    assert ": lower --lr, or look at these samples, which the script's load_data gives" in error
    assert error in result.stderr.split("Root Cause")[1]  # the last on the screen
    names = sorted(path.name for path in tmp_path.glob("checkpoints/step-*"))
    assert names == ["step-00000002", "step-00000004"]


@pytest.mark.slow
def test_restarted_by_torchrun(uninterrupted: Path, flags: list[str], tmp_path: Path) -> None:
    """--max-restarts goes on from the last save, and the lock of before does not stop it."""
    command = ["tests/faulty.py", "gpt2_fsdp", "once", 1, 6, *flags, "--output-dir", tmp_path]
    process = begin(*command, torchrun=("--nproc-per-node", "2", "--max-restarts", "3"))
    printed, _ = process.communicate(timeout=200)
    assert process.returncode == 0, printed
    assert "waiting for process" not in printed
    assert [line["step"] for line in metrics(tmp_path, "start")] == [0, 5]
    check_equal(tmp_path, uninterrupted)


@pytest.mark.slow
def test_a_disk_that_is_full_for_a_while(
    uninterrupted: Path, flags: list[str], tmp_path: Path
) -> None:
    """On one rank: the save is given up on both, the next one is made, the run is as ever."""
    command = ["gpt2_fsdp", "full", 1, 6, *flags, "--output-dir", tmp_path]
    result = launch(2, "tests/faulty.py", *command)
    said = [line for line in result.stdout.splitlines() if "could not be saved" in line]
    assert len(said) == 1 and "step-00000006" in said[0] and "tries again" in said[0]
    assert 6 not in [line["step"] for line in metrics(tmp_path, "save")]
    check_equal(tmp_path, uninterrupted)


@pytest.mark.parametrize(
    "mode", ["--no-async-save", pytest.param("--async-save", marks=pytest.mark.slow)]
)
def test_a_disk_that_stays_full(mode: str, flags: list[str], tmp_path: Path) -> None:
    """The second failure ends the run with one sentence; what was saved before is whole."""
    command = ["gpt2_fsdp", "full for good", 0, 6, *flags, "--output-dir", tmp_path, mode]
    result = launch(0, "tests/faulty.py", *command, check=False)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    error = result.stderr.strip().splitlines()[-1]
    assert error.startswith("error: ") and error.endswith("the second time in a row")
    assert status(tmp_path) == "failed"
    names = sorted(path.name for path in tmp_path.glob("checkpoints/*"))
    assert names in (["step-00000002", "step-00000004"], ["step-00000002"])  # 4 was on its way
    launch(0, "gpt2_fsdp.py", *flags, "--output-dir", tmp_path)
    assert [line["step"] for line in metrics(tmp_path, "start")] == [0, 2 * len(names)]


def test_a_last_save_that_fails(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:  # fmt: skip
    """No next save can make up for it: the run has failed, and says so."""
    write = checkpoints._write

    def no_last_step(path: Path, *args: object) -> None:
        if path.name == "step-00000010":
            raise OSError("no")
        write(path, *args)

    monkeypatch.setattr(checkpoints, "_write", no_last_step)
    with pytest.raises(SystemExit):
        run(flags, tmp_path)
    assert "error: the last save failed" in capfd.readouterr().err
    assert status(tmp_path) == "failed"


@pytest.mark.slow
def test_async_save_is_exact(uninterrupted: Path, flags: list[str], tmp_path: Path) -> None:
    """Killed and run again: the copy is of the step it was made in, not of later ones."""
    command = [*flags, "--output-dir", tmp_path, "--async-save"]
    assert launch(2, "tests/killed.py", "gpt2_fsdp", 0, 8, *command, check=False).returncode
    launch(2, "gpt2_fsdp.py", *command)
    assert metrics(tmp_path, "start")[-1]["step"] in (4, 5, 6)
    check_equal(tmp_path, uninterrupted)


def run(flags: list[str], output: Path, *more: str) -> None:
    """In this process."""
    gpt2_fsdp.fsdp_main(gpt2_fsdp.parse_args([*flags, "--output-dir", str(output), *more]))


@pytest.mark.parametrize("damage", ["missing", "truncated", "altered", "state", "step"])
def test_a_damaged_checkpoint_is_passed_over(
    damage: str, flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """With a sentence that names the file; the one before is used. A given PATH is refused."""
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
    with pytest.raises(SystemExit):
        run(flags, tmp_path, "--max-steps", "6", "--resume", str(newest))
    assert f"{file} is damaged" in capfd.readouterr().err
    run(flags, tmp_path, "--max-steps", "6")
    assert f"{file} is damaged" in capfd.readouterr().out
    assert [line["step"] for line in metrics(tmp_path, "start")] == [0, 2]
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "checkpoints/damaged-step-00000004").is_dir()
    assert metrics(tmp_path, "done")[-1]["best_step"] > 0


def test_no_whole_checkpoint_is_no_fresh_start(
    flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """The run does not begin again over what is lost without a word, even at the second start."""
    run(flags, tmp_path, "--max-steps", "2")
    (tmp_path / "checkpoints/step-00000002/__0_0.distcp").unlink()
    for _ in range(2):
        with pytest.raises(SystemExit):
            run(flags, tmp_path)
        said = capfd.readouterr().err
        assert "is whole" in said and "give another --output-dir" in said


@pytest.mark.slow
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGUSR1])
def test_asked_to_stop_during_a_slow_save(first: int, flags: list[str], tmp_path: Path) -> None:
    """It is no rank that hangs: SIGTERM, also after SIGUSR1, lets the save end."""
    script = [sys.executable, ROOT / "tests/faulty.py", "gpt2_fsdp", "slow", 0, 0]
    process = subprocess.Popen([*map(str, script), *flags, "--output-dir", str(tmp_path)])
    deadline = time.monotonic() + 100
    wait_for_step(tmp_path, 2)
    process.send_signal(first)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=100) == 75 and time.monotonic() < deadline
    assert status(tmp_path) == "stopped"
    assert (tmp_path / "checkpoints/step-00000002").is_dir()


def test_pruning(tmp_path: Path) -> None:
    """It keeps the newest, the best, and the best of each that is kept; the newest damaged one."""
    for step in (3, 5):
        (tmp_path / f"damaged-step-{step:08d}").mkdir()
    for step, best in ((2, 1), (4, 3), (6, 3)):
        path = tmp_path / f"step-{step:08d}"
        path.mkdir()
        saved = {"step": step, "best_step": best}
        text = json.dumps(saved | {"crc": checkpoints.json_sum(saved)})
        (path / "train_state.json").write_text(text)
    for step in (1, 3, 5):
        (tmp_path / f"best-{step:08d}").mkdir()
    checkpoints._prune(tmp_path, 2, tmp_path / "best-00000005")
    kept = {"step-00000004", "step-00000006", "best-00000003", "best-00000005"}
    kept.add("damaged-step-00000005")
    assert {path.name for path in tmp_path.iterdir()} == kept
    checkpoints._prune(tmp_path, 1, tmp_path / "best-00000005")
    assert (tmp_path / "step-00000006").is_dir() and (tmp_path / "best-00000003").is_dir()


def test_a_best_that_cannot_be_saved(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before stays the best, and is what best/ holds."""
    write = checkpoints._write

    def no_second_best(path: Path, *args: object) -> None:
        if path.name == "best-00000010":
            raise OSError("no")
        write(path, *args)

    monkeypatch.setattr(checkpoints, "_write", no_second_best)
    run(flags, tmp_path)
    assert metrics(tmp_path, "done")[-1]["best_step"] == 9  # the end of the first epoch
    assert status(tmp_path) == "finished"


@pytest.mark.slow
def test_a_run_that_was_silent_for_too_long(flags: list[str], tmp_path: Path) -> None:
    """As in a pod that was cut off, and replaced: another has taken its directory over meanwhile.
    It wakes up, writes nothing more, and leaves the other's status."""
    flags = [*flags, "--max-steps", "400", "--save-every", "0", "--eval-every", "400"]
    command = [sys.executable, "gpt2_fsdp.py", *flags, "--output-dir", str(tmp_path)]
    silent = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: len(logged(tmp_path, "train")) > 5, 120, str)
        silent.send_signal(signal.SIGSTOP)
        start = time.monotonic()
        launch(0, "gpt2_fsdp.py", *flags, "--max-steps", "20", "--output-dir", tmp_path)
        time.sleep(max(0, 90 - (time.monotonic() - start)))
        files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
        silent.send_signal(signal.SIGCONT)
        _, errors = silent.communicate(timeout=60)
    finally:
        silent.kill()
    assert silent.returncode == 75
    assert errors_said(errors) == [
        f"error: --output-dir {tmp_path} is another run's: this one was silent for too long"
    ]
    assert files == {path: path.stat().st_mtime_ns for path in files}
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path not in files]
    assert status(tmp_path) == "finished" and sorted(losses(tmp_path)) == list(range(1, 21))


def test_a_lock_that_is_another_s(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """It is looked at after a silence, and one that was deleted by mistake is made again."""
    monkeypatch.setattr(runtime.lock, "LOCK_SECONDS", 0.6)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with Lock(tmp_path) as lock:
        lock.path.unlink()
        wait_until(lock.path.exists, 10, str)
        lock.left.set()  # no more heartbeats
        lock.heart.join()
        lock.left.clear()
        other = json.loads(lock.path.read_text()) | {"pid": 1}
        lock.path.write_text(json.dumps(other))
        lock.beaten = time.time()
        lock.check()
        lock.beaten -= 1
        with pytest.raises(SystemExit) as end:
            lock.check()
        assert end.value.code == 75 and "is another run's" in capfd.readouterr().err
        lock.path.unlink()  # the other has come and gone
        with pytest.raises(SystemExit):
            lock.check()


def test_lock(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held by a run that lives: refused, and named. Left behind: taken over."""
    monkeypatch.setattr(runtime.lock, "LOCK_SECONDS", 2)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    lock = tmp_path / "lock"
    code = ("import sys, time, torch.distributed as dist, pathlib\n"
            "import runtime.lock\n"
            "runtime.lock.LOCK_SECONDS = 2\n"
            "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
            "with runtime.lock.Lock(pathlib.Path(sys.argv[1])): time.sleep(100)\n")  # fmt: skip
    holder = subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=ROOT)
    try:
        wait_until(lock.exists, 60, str)
        who = f"process {holder.pid} on {socket.gethostname()}"
        said = f"is in use by {who}: stop that with Ctrl-C there, or give another --output-dir"
        with pytest.raises(ValueError, match=said), Lock(tmp_path):
            pass
    finally:
        holder.kill()
        holder.wait()
    keys = {"host", "pid", "pids", "job", "restart", "heartbeat"}
    assert json.loads(lock.read_text()).keys() == keys
    start = time.monotonic()
    with Lock(tmp_path):  # its process is dead
        assert json.loads(lock.read_text())["pid"] == os.getpid()
    assert time.monotonic() - start < 2 and not lock.exists()
    lock.write_bytes(b"\0\0")  # as a power failure may leave it
    with Lock(tmp_path):
        pass
    other = {"host": "elsewhere", "pid": 1, "heartbeat": 0.0}
    container = {"host": socket.gethostname(), "pid": os.getpid(), "pids": "of another container"}
    # Our job before its restart; another step of it; no heartbeat; and none of what looks like
    # this very process.
    for holder, least, most in (
        (other | {"job": "7"}, 0, 2),
        (other | {"job": "7", "restart": 1}, 2, 20),
        (other | {"job": "8"}, 2, 20),
        (container | {"job": "8"}, 2, 20),
    ):
        lock.write_text(json.dumps(holder))
        start = time.monotonic()
        with Lock(tmp_path):
            assert least <= time.monotonic() - start < most
