"""metrics.jsonl, status, and lines on a terminal of 80 columns."""

import fcntl
import json
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
import torch
from conftest import DOCSTRINGS, ROOT, TINY, metrics
from tqdm import tqdm

from core import log, ranks
from core.log import Log


def new_log(directory: Path, step: int = 0, tokens: int = 0, eval_due: bool = False) -> Log:
    """Return the log of a run of ten steps that resumes at a step."""
    return Log(directory, {"step": step, "tokens": tokens, "eval_due": eval_due}, 10)


def test_events_that_will_be_repeated_and_broken_lines_are_deleted(process_group, tmp_path):
    events = [("train", 1), ("train", 2), ("val", 2), ("save", 2), ("done", 2), ("train", 3)]
    lines = [json.dumps({"event": event, "step": step}) for event, step in events]
    broken = ['{"event": "tr', "null", '{"note": "of a user"}', lines[-1]]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, *broken]))
    kept = {(2, False): lines[:4], (2, True): [*lines[:2], lines[3]], (0, False): []}
    for (step, eval_due), expected in kept.items():
        new_log(tmp_path, step, eval_due=eval_due)
        assert (tmp_path / "metrics.jsonl").read_text().splitlines() == expected


def test_numbers_are_exact_in_the_file_and_short_on_the_screen(process_group, tmp_path, capsys):
    values = {"loss": torch.tensor(2.123456789), "perplexity": 1.23456e20, "losses": {"x": 2.0}}
    event = new_log(tmp_path).write("train", 7, tokens=500, **values)
    (written,) = metrics(tmp_path, "train")
    assert written == event and written["loss"] == torch.tensor(2.123456789).item()
    assert written.keys() >= {"time", "tokens", "tokens_per_second", "peak_memory_mb"}
    line = capsys.readouterr().out
    assert line.startswith("train 7/10  loss 2.123  perplexity 1.235e20  tokens/s ")
    for value in (0.00123456, 0.123456, 12.3456, 1234.56, 999_998, 1_234_567, 1.2e99):
        assert len(log.short(value)) <= 8 and float(log.short(value).replace(",", ""))


def test_pause_does_not_count_in_tokens_per_second(process_group, tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(log.time, "perf_counter", lambda: clock[0])
    lines = new_log(tmp_path, tokens=100)
    clock[0] = 4
    with lines.pause():
        clock[0] = 10
    assert lines.write("train", 1, tokens=500)["tokens_per_second"] == 100
    clock[0] = 70
    assert lines.write("done", 1)["minutes"] == pytest.approx(70 / 60)


def test_status_names_the_saved_step(process_group, tmp_path):
    log.open_directory(tmp_path / "run")
    (tmp_path / "run/checkpoints/step-00000004").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step-00000004/train_state.json").touch()
    log.write_status(tmp_path / "run", "running")
    assert (tmp_path / "run/status").read_text() == "running\nsaved step 4\n"


def test_directory_that_a_node_does_not_see_is_refused(process_group, tmp_path, monkeypatch):
    monkeypatch.setattr(log, "on_every_rank", lambda _: [True, False])
    with pytest.raises(log.Problem, match="is not on a file system that all nodes share"):
        log.open_directory(tmp_path)


def on_terminal(tmp_path: Path, *flags: str, marker: str = "") -> tuple[int, str]:
    """Run T5_training.py on a terminal of 80 columns; return its exit code and all that it wrote.
    Send SIGINT as Ctrl-C does when `marker` appears."""
    main, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "T5_training.py", *TINY, "--target-length", "8", "--num-val-samples",
               "16", "--num-train-samples", "64", "--output-dir", tmp_path / "output",
               *flags]  # fmt: skip
    # Rows that are not cached are read with a progress bar.
    environment = {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    options = {"cwd": ROOT, "env": os.environ | environment}
    process = subprocess.Popen(command, stdout=child, stderr=child, **options)
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
    """Return the lines as a terminal shows them. Bars return to the start of a line, or go up."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[A|\r|\n|[^\x1b\r\n]+", text):
        if part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[A":
            row -= 1
        else:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + part + line[column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines]


def test_lines_of_a_good_run_fit_the_terminal_without_bars(tmp_path):
    code, text = on_terminal(tmp_path, "--max-steps", "4", "--log-every", "2")
    assert code == 0
    lines = visible_lines(text)
    kinds = [line.split()[0] for line in lines if line.split()[1:2] == ["2/4"]]
    assert kinds == ["train"]
    for line in lines:
        if line.startswith(("train ", "val  ", "save ", "done ", "start ", "1 x cpu")):
            assert len(line) <= 80, line
        assert not re.match(r"(step|summaries|validation.*):", line), line  # a bar
        assert not re.search(r"\].+\w|(?<!^)(Map|Generating)", line) or "«" in line, line  # glue
    assert f"validation on {DOCSTRINGS}: " in text and "step: " in text


def test_error_is_on_a_line_of_its_own(monkeypatch, capfd):
    monkeypatch.setattr(ranks, "end", lambda code: None)
    bar = tqdm(range(9), "step", mininterval=0, file=sys.stderr)
    bar.update()
    ranks.exit_with("no.csv is not a file.")
    assert "error: no.csv is not a file." in visible_lines(capfd.readouterr().err)
    bar.close()


def test_ctrl_c_in_the_load_ends_without_a_traceback(tmp_path):
    code, text = on_terminal(tmp_path, marker="parameters")
    assert code == -signal.SIGINT and "Traceback" not in text
