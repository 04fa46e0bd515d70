"""OUTPUT_DIR/lock, which one run at a time holds, and the stacks of a process that hangs."""

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
from unittest import mock

import pytest
from conftest import ROOT, wait_until

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
    with pytest.raises(OSError, match="file"):
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
    minutes = 0.3 / 20  # the stacks are written after 0.3 seconds
    watchdog.restart(tmp_path, 1.0)
    assert file.exists()
    watchdog.stop()
    assert not file.exists()
    watchdog.restart(tmp_path, minutes)
    wait_until(lambda: "test_watchdog_writes_stacks" in file.read_text(), 1)
    watchdog.stop()
    assert "test_watchdog_writes_stacks" in file.read_text()
