"""OUTPUT_DIR/lock, which one run at a time holds, and the stacks of a process that hangs."""

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest import mock

import pytest
from conftest import ROOT, wait_until

from core.args import Run
from core.ranks import Problem
from optional import lock, watchdog

HOLDER = """
import os, pathlib, sys, time
import torch.distributed as dist
from optional import lock

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
lock.hold(pathlib.Path(sys.argv[1]))
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(10_000)
os._exit(0)  # a normal exit could hang
"""


def test_lock_is_refused_while_its_process_lives(process_group, tmp_path):
    command = [sys.executable, "-c", HOLDER, tmp_path / "run"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    who = re.escape(f"in use by process {process.pid} on {socket.gethostname()}. End it first")
    for _ in range(2):
        with pytest.raises(Problem, match=f"{who}, or pass another"):
            lock.hold(tmp_path / "run")
    process.kill()
    process.wait()
    lock.hold(tmp_path / "run")
    os.kill(child, signal.SIGKILL)  # fails if it did not live


def test_file_system_without_locks_is_named(process_group, tmp_path, monkeypatch, capsys):
    error = OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(fcntl, "lockf", mock.Mock(side_effect=error))
    lock.hold(tmp_path / "run")
    assert f"{tmp_path}/run has no locks" in capsys.readouterr().out
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file/run"):
        lock.hold(tmp_path / "file/run")


def test_exports_of_others_are_refused(process_group, tmp_path):
    """Empty links to other disks are allowed."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "best").symlink_to(tmp_path / "disk")
    (tmp_path / "final").symlink_to(tmp_path / "disk/not yet")
    lock.hold(tmp_path)
    (tmp_path / "disk/config.json").touch()
    with pytest.raises(Problem, match="best has files, but not of this run"):
        lock.hold(tmp_path)
    (tmp_path / "status").touch()
    with pytest.raises(Problem, match="best has files, but not of this run"):
        lock.hold(tmp_path)
    (tmp_path / "disk/tokenizer_config.json").touch()  # an export
    lock.hold(tmp_path)
    with pytest.raises(FileExistsError, match="status"):
        lock.hold(tmp_path / "status")


def test_watchdog_writes_stacks_of_a_process_that_hangs(process_group, tmp_path):
    file = tmp_path / "stacks-rank-0.txt"
    hanging = Run(tmp_path, timeout_minutes=0.3 / 20)  # the stacks are written after 0.3 seconds
    working = Run(tmp_path, timeout_minutes=2 / 20)

    @watchdog.watched
    def train(args: SimpleNamespace, seconds: float) -> None:
        for _ in range(5):  # longer than the limit in all
            watchdog.restart()
            time.sleep(seconds)
        assert file.exists()
        if args.run is hanging:
            wait_until(lambda: "test_watchdog_writes_stacks" in file.read_text(), 1)
            raise OSError("the disk is full")

    train(SimpleNamespace(run=working), 0.5)
    assert not file.exists()
    with pytest.raises(OSError, match="full"):
        train(SimpleNamespace(run=hanging), 0.1)
    assert "test_watchdog_writes_stacks" in file.read_text()
    watchdog.restart()  # outside, it does nothing


def test_watchdog_leaves_no_empty_file_after_an_error(process_group, tmp_path):
    @watchdog.watched
    def train(_: SimpleNamespace) -> None:
        assert (tmp_path / "stacks-rank-0.txt").exists()
        raise Problem("a step is not finite")

    with pytest.raises(Problem):
        train(SimpleNamespace(run=Run(tmp_path)))
    assert not list(tmp_path.iterdir())
