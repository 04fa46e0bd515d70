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
from conftest import ROOT

from runtime import ranks, screen
from runtime.metrics import shown

TINY = "--model-name tiny --dataset docstrings --num-train-samples 64 --num-val-samples 16"


def test_numbers() -> None:
    """Those above a thousand are whole, with commas."""
    assert [shown(x, 4) for x in (0.011843, 2.3456, 12380.4, 1e-5)] == [
        "0.01184", "2.346", "12,380", "1e-05"
    ]  # fmt: skip


def test_lines_in_a_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """One says what is done, how fast and what is left; none comes before its time."""
    clock = [0.0]
    monkeypatch.setattr(screen.time, "monotonic", lambda: clock[0])
    lines = screen.Lines("validation on x", 4000, done=1000)
    said = []
    for clock[0], done in ((29, 1300), (31, 1310), (40, 1400), (62, 1620), (6200, 1999)):
        lines.show(done)
        said.append(capsys.readouterr().out)
    assert said == [
        "",
        "validation on x 1,310/4,000  10 a second  left 04:29\n",
        "",
        "validation on x 1,620/4,000  10 a second  left 03:58\n",
        "validation on x 1,999/4,000  6.21 s each  left 3:26:58\n",
    ]


def test_a_line_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though tqdm, when it has written one, draws the bars again of which the line speaks."""
    lines, said = screen.Lines("preparing rows", 10), []

    def say(text: str) -> None:
        said.append(text)
        lines.show(1)

    monkeypatch.setattr(screen, "say", say)
    lines._last -= 2 * screen.LINE_SECONDS
    lines.show(1)
    assert len(said) == 1


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
    assert "validation on docstrings:   0%" in text.decode()  # of a total that is known


def test_torchrun_repeats_the_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its report shows what the error file says."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    ranks.say_error("no such thing")
    assert '"error: no such thing"' in path.read_text()
