"""Flags: suggestions for those of other tools, limits, warm-up steps and loader processes."""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, live_metrics, losses, status

import gpt2_fsdp
import llama_fsdp
from benchmarks.driven import parse_flags
from runtime import options
from runtime.batches import learning_rate
from runtime.run import launch

SCRIPTS = ("T5_training", "gpt2_fsdp", "llama_fsdp")
NAMES = {  # flags of Transformers and TRL, and ours: in all scripts, or one for each of SCRIPTS
    "--learning-rate": "--lr",
    "--learning_rate=1e-4": "--lr",
    "--num-train-epochs": "--epochs",
    "--per-device-train-batch-size": "--batch-size",
    "--per_device_eval_batch_size": "--batch-size",
    "--gradient-checkpointing": "--activation-checkpointing",
    "--bf16": "--precision bf16",
    "--fp16": "--precision fp16",
    "--report-to": "--track",
    "--dataset-name": "--dataset",
    "--dataset_config_name": "--dataset-config",
    "--model-name-or-path": "--model-name",
    "--lr-scheduler-type": "--lr-schedule",
    "--eval-steps": "--eval-every",
    "--save-steps": "--save-every",
    "--logging-steps": "--log-every",
    "--save-total-limit": "--keep-checkpoints",
    "--dataloader-num-workers": "--num-workers",
    "--max-train-samples": "--num-train-samples",
    "--torch-compile": "--compile",
    "--max-seq-len": ("--source-length", "--block-size", "--max-seq-length"),
    "--max_length": ("--source-length", "--block-size", "--max-seq-length"),
    "--lora-r": (None, None, "--lora-rank"),
    # Misspelled flags of ours.
    "--batch-sze": "--batch-size",
    "--lr-schedul": "--lr-schedule",
    "--dataset-cofnig": "--dataset-config",
}


def error(script: str, *words: str) -> str:
    """Return the message with which a script rejects its flags."""
    words = ("--model-name", "tiny", "--dataset", "docstrings", *words)
    command = [sys.executable, str(ROOT / f"{script}.py"), *words]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr.count("\n") == 1, result.stderr
    return result.stderr


@pytest.mark.parametrize("number, script", list(enumerate(SCRIPTS)))
def test_flags_of_other_tools_get_a_suggestion(number, script, capfd):
    module = importlib.import_module(script)
    for name, expected in NAMES.items():
        with contextlib.suppress(SystemExit):
            parse_flags(module, ["--model-name", "tiny", "--dataset", "docstrings", name])
        suggestion = expected if isinstance(expected, str) else expected[number]
        message = f"error: unrecognized arguments: {name}"
        if suggestion:
            message += f" (did you mean {suggestion}?)"
        assert capfd.readouterr().err == f"{message}\n"


def test_help_shows_the_defaults_of_the_script(monkeypatch):
    monkeypatch.setattr(llama_fsdp, "__doc__", "A docstring of one line.")
    text = " ".join(options.make_parser(llama_fsdp.Options).format_help().split())
    assert "A docstring of one line." in text
    assert "--eval-every N steps between validations; 0: at the end (default: 100)" in text


def test_message_of_sys_exit_is_printed(monkeypatch, capfd):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    launch(lambda _: sys.exit("no data"), None)
    launch(lambda _: sys.exit(), None)
    assert codes == [1, 0] and capfd.readouterr().err == "no data\n"


def test_learning_rate_above_its_limit_is_refused():
    assert error("gpt2_fsdp", "--lr", "1e30") == (
        "error: --lr 1e+30 is out of range. It must be above 0, below 10.\n"
    )


def test_warmup_steps_replace_the_ratio():
    flags = ["--model-name", "tiny", "--dataset", "docstrings", "--lr-schedule", "constant"]
    for more, count in (["--warmup-ratio", "0.5"], 20), (["--warmup-steps", "4"], 4):
        factor = learning_rate(parse_flags(gpt2_fsdp, [*flags, *more]), 40, 10)
        rates = [factor(step) for step in range(40)]
        assert rates == [min(1, (step + 1) / (count + 1)) for step in range(40)]


SMALL = ["--model-name", "tiny", "--dataset", "docstrings", "--num-train-samples", "60",
         "--num-val-samples", "4", "--batch-size", "4", "--log-every", "1",
         "--precision", "fp32"]  # fmt: skip
LENGTHS = {  # and what needs no time
    "T5_training": ["--source-length", "32", "--target-length", "8", "--rouge-samples", "0"],
    "gpt2_fsdp": ["--block-size", "32"],
    "llama_fsdp": ["--max-seq-length", "64"],
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_worker_processes_do_not_change_the_losses(script, tmp_path):
    """T5 and GPT-2 have dropout. The last run resumes within the second epoch."""
    module = importlib.import_module(script)
    for name, *more in (
        ("none", "--max-steps", "22"),
        ("two", "--max-steps", "22", "--num-workers", "2"),
        ("resumed", "--max-steps", "18", "--num-workers", "2"),
        ("resumed", "--max-steps", "22", "--num-workers", "2"),
    ):
        flags = [*SMALL, *LENGTHS[script], "--lr-schedule", "constant"]
        flags += ["--output-dir", str(tmp_path / name), *more, "--warmup-steps", "1"]
        assert module.fsdp_main(parse_flags(module, flags)) == 0
    expected = losses(tmp_path / "none")
    assert len(expected) == 22
    assert losses(tmp_path / "two") == expected == losses(tmp_path / "resumed")
    assert losses(tmp_path / "two", "val") == losses(tmp_path / "none", "val")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_signal_to_all_processes_saves_despite_workers(number, tmp_path):
    """As Ctrl-C in a terminal, or scancel: the loader's processes get the signal too."""
    command = [sys.executable, str(ROOT / "gpt2_fsdp.py"), *SMALL, *LENGTHS["gpt2_fsdp"],
               "--num-workers", "2", "--max-steps", "5000", "--num-train-samples", "4000",
               "--output-dir", str(tmp_path)]  # fmt: skip
    log = tmp_path.with_suffix(".log")
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)

    def wait_for_steps(count: int) -> None:
        deadline = time.monotonic() + 120
        while len(live_metrics(tmp_path, "train")) < count:
            assert time.monotonic() < deadline and process.poll() is None, log.read_text()
            time.sleep(0.05)

    wait_for_steps(2)
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        os.kill(int(child), number)  # first, so that the rank has time to notice
    wait_for_steps(len(live_metrics(tmp_path, "train")) + 10)
    os.killpg(process.pid, number)
    assert process.wait(timeout=60) == 75, log.read_text()
    assert status(tmp_path) == "stopped" and "Traceback" not in log.read_text()
    children = [x for x in Path("/proc").glob("[0-9]*/stat") if is_in_session(x, process.pid)]
    assert not children


def is_in_session(stat: Path, session: int) -> bool:
    """Return whether a /proc/PID/stat is of a process in a session."""
    with contextlib.suppress(OSError):
        return int(stat.read_text().rpartition(")")[2].split()[3]) == session
    return False
