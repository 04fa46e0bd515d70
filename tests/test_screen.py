"""Progress messages on a terminal of 80 columns and in a file."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import tqdm
from conftest import ROOT

from runtime import screen

TINY = "--model-name tiny --dataset docstrings --num-train-samples 64 --num-val-samples 16"


def test_progress_in_a_file_adds_a_line_every_30_seconds(process_group, monkeypatch, capsys):
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
    assert bar.disable  # the bar is closed


def test_lines_fit_a_terminal_of_80_columns(tmp_path):
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
    visible = [line.rsplit("\r", 1)[-1] for line in lines]  # \r overwrites a progress bar
    kinds = [line.split()[0] for line in visible if line.split()[1:2] == ["2/4"]]
    assert kinds == ["train"]
    for line in visible:
        if line.startswith(("train ", "val  ", "save ", "done ", "64 samples", "1 x cpu")):
            assert len(line) <= 80, line
    assert "validation on docstrings: " in text.decode()
