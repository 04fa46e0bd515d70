"""What a run says of how far it is, at 80 columns, on a terminal and in a file."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import tqdm
from conftest import ROOT

from runtime import ranks, screen
from runtime.metrics import shown

TINY = "--model-name tiny --dataset docstrings --num-train-samples 64 --num-val-samples 16"


def test_numbers() -> None:
    """Those above a thousand are whole, with commas."""
    assert [shown(x, 4) for x in (0.011843, 2.3456, 12380.4, 1e-5)] == [
        "0.01184", "2.346", "12,380", "1e-05"
    ]  # fmt: skip


def test_lines_in_a_file(
    alone: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """After 30 seconds each: the work done, how fast, and the time left. The end prints nothing."""
    clock = [0.0]
    monkeypatch.setattr(tqdm.std, "time", lambda: clock[0])
    bar = screen.Progress("validation on x", 4000, done=1000)
    bar._time = lambda: clock[0]
    for clock[0], count in ((29, 290), (31, 20), (40, 90), (62, 220), (90, 2380)):
        bar.update(count)
    assert capsys.readouterr().out.splitlines() == [
        "validation on x 1310/4000  10.00it/s  left 04:29",
        "validation on x 1620/4000  10.00it/s  left 03:57",
    ]
    assert bar.disable  # it is closed


def test_a_terminal_of_80_columns(tmp_path: Path) -> None:
    """No line of numbers is wider, none shares its line with a bar."""
    main, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "T5_training.py", *TINY.split(), "--max-steps", "4", "--log-every"]
    command += ["2", "--target-length", "8", "--output-dir", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=child, stderr=child)
    os.close(child)
    text = b""
    while True:
        try:
            text += os.read(main, 65536)
        except OSError:  # the other end is closed
            break
    os.close(main)
    assert process.wait() == 0
    lines = text.decode().replace("\r\n", "\n").split("\n")
    left = [line.rsplit("\r", 1)[-1] for line in lines]  # a bar is drawn over, then cleared
    kinds = [line.split()[0] for line in left if line.split()[1:2] == ["2/4"]]
    assert kinds == ["train"]
    for line in left:
        if line.startswith(("train ", "val  ", "save ", "done ", "64 samples", "1 x cpu")):
            assert len(line) <= 80, line
    assert "validation on docstrings: " in text.decode()


def test_torchrun_repeats_the_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its report shows what the error file says."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    with pytest.raises(SystemExit):
        ranks.exit_with("no such thing")
    assert '"error: no such thing"' in path.read_text()
