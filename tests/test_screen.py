"""Progress messages on a terminal of 80 columns and in a file."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import tqdm
from conftest import ROOT

from runtime import screen

TINY = "--model-name tiny --dataset docstrings --num-train-samples 64 --num-val-samples 16"


def test_progress_in_a_file_adds_a_line_every_30_seconds(process_group, monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(tqdm.std, "time", lambda: clock[0])
    bar = screen.Progress("validation on x", 4000, done=1000)
    bar._bar._time = lambda: clock[0]
    for clock[0], count in ((29, 290), (31, 20), (40, 90), (62, 220), (90, 2380)):
        bar.update(count)
    assert capsys.readouterr().out.splitlines() == [
        "validation on x 1310/4000  10.00it/s  left 04:29",
        "validation on x 1620/4000  10.00it/s  left 03:57",
    ]
    assert bar._bar.disable  # the bar is closed


def on_terminal(
    columns: int, tmp_path: Path, *flags: str, marker: str = "", **environment: str
) -> tuple[int, str]:
    """Run T5_training.py on a terminal; return its exit code and all that it wrote. Send SIGINT as
    Ctrl-C does when `marker` appears."""
    main, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "T5_training.py", *TINY.split(), "--target-length", "8",
               "--output-dir", str(tmp_path / "output"), *flags]  # fmt: skip
    cache = str(tmp_path / "cache")  # so that rows are read with a progress bar
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = os.environ | environment | {"HF_DATASETS_CACHE": cache}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=child, stderr=child)
    os.close(child)
    text = ""
    while True:
        try:
            text += os.read(main, 65536).decode(errors="replace")
        except OSError:  # the other end is closed
            break
        if marker and marker in text:
            process.send_signal(signal.SIGINT)
            marker = ""
    os.close(main)
    return process.wait(), text


def visible_lines(text: str) -> list[str]:
    """Return the lines as a terminal shows them: \r goes back to the start of a line."""
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        shown = ""
        for part in line.split("\r"):
            part = part.replace("\x1b[A", "")
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines


@pytest.mark.parametrize("columns", [80, 120])
def test_lines_of_a_good_run_fit_the_terminal_without_bars(columns, tmp_path):
    code, text = on_terminal(columns, tmp_path, "--max-steps", "4", "--log-every", "2")
    assert code == 0
    lines = visible_lines(text)
    kinds = [line.split()[0] for line in lines if line.split()[1:2] == ["2/4"]]
    assert kinds == ["train"]
    for line in lines:
        if line.startswith(("train ", "val  ", "save ", "done ", "64 samples", "1 x cpu")):
            assert len(line) <= columns, line
        assert not re.match(r"(load|step|summaries|validation.*):", line), line  # a bar
        assert not re.search(r"\].+\w|(?<!^)(Map|Generating)", line) or "«" in line, line  # glue
    assert "validation on docstrings: " in text and "load: " in text
    assert text.index("load: ") > text.index("rows used")  # after the data


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dataset", "no.csv"], "error: --dataset no.csv does not exist"),
        (["--batch-size", "4096", "--strategy", "hybrid_shard"], "error: "),
        (["--max-steps", "2", "--lr", "1e30"], "error: "),
    ],
)
def test_error_stands_on_a_line_of_its_own(flags, message, tmp_path):
    code, text = on_terminal(80, tmp_path, *flags)
    assert code == 1
    assert any(line.startswith(message) for line in visible_lines(text)), text


@pytest.mark.parametrize("marker, environment", [
    ("parameters", {}), ("torch.version", {"PYTHONPROFILEIMPORTTIME": "1"})
], ids=["load", "imports"])  # fmt: skip
def test_ctrl_c_ends_without_a_traceback(marker, environment, tmp_path):
    code, text = on_terminal(80, tmp_path, marker=marker, **environment)
    assert code == -signal.SIGINT and "Traceback" not in text
