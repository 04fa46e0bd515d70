"""Whole runs of each script: killed and resumed, exported and reloaded, continued, evaluated."""

import functools
import json
import math
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from conftest import (
    check_equal_runs,
    check_equal_weights,
    error_lines,
    launch,
    losses,
    metrics,
    status,
    weights,
)
from in_process import start
from parity import val_rows
from transformers import ByT5Tokenizer

from prepare import templates

SCRIPTS = pytest.mark.parametrize("script", [
    "T5_training",  # `make test` runs those of T5
    pytest.param("gpt2_fsdp", marks=pytest.mark.ci),
    pytest.param("llama_fsdp", marks=pytest.mark.ci),
])  # fmt: skip


@pytest.fixture(scope="module")
def flags(pairs, block_flags, chats, llama_directory, dropout, tmp_path_factory) -> dict[str, list]:
    """Return flags for 8 or 12 steps of two ranks by script: more than one epoch, with dropout but
    for Llama, which has two data sets."""
    csv = tmp_path_factory.mktemp("pairs") / "pairs.csv"
    rows = "".join(f"how much is {i}?,it is {'x' * (i % 5)}\n" for i in range(30))
    csv.write_text("prompt,completion\n" + rows)
    tiny = ["--log-every", 1, "--save-every", 2, "--eval-every", 3, "--max-steps", 8, "--lr", 1e-3,
            "--batch-size", 4, "--model-name", "tiny"]  # fmt: skip
    return {
        "T5_training": [*tiny, "--model-name", dropout["T5_training"], "--dataset", pairs,
                        "--num-train-samples", 0, "--rouge-samples", 0],
        "gpt2_fsdp": [*tiny, *block_flags, "--fsdp", 2],
        "llama_fsdp": [*tiny, "--model-name", llama_directory, "--dataset", chats, csv,
                       "--max-seq-length", 96, "--num-train-samples", 20, "--max-steps", 12,
                       "--batch-size", 2, "--eval-every", 4, "--lr", 1e-2, "--export-dtype",
                       "fp32"],
    }  # fmt: skip


@pytest.fixture(scope="module")
def finished(flags, tmp_path_factory) -> Callable[[str], Path]:
    """Return a function that returns the directory of a finished run of two ranks."""

    @functools.cache
    def run(script: str) -> Path:
        output = tmp_path_factory.mktemp(script) / "uninterrupted"
        launch(2, f"{script}.py", *flags[script], "--output-dir", output, torchrun=True)
        return output

    return run


@SCRIPTS
def test_killed_run_resumes_bit_for_bit(script, finished, flags, tmp_path):
    command = [*flags[script], "--output-dir", tmp_path]
    if script == "llama_fsdp":
        command += ["--checkpoint-type", "full"]
    killed = launch(2, "tests/workers/killed.py", script, 1, 8, *command, check=False)
    assert killed.returncode and status(tmp_path) != "finished"
    assert max(losses(tmp_path)) == 7  # step 7 was not saved
    newest = tmp_path / "checkpoints/step-00000006"
    assert (newest / "full.pt").exists() == (script == "llama_fsdp")
    launch(2, f"{script}.py", *command)
    assert status(tmp_path) == "finished"
    assert [line["step"] for line in metrics(tmp_path, "start")] == [0, 6]
    exports = ("final",) if script == "llama_fsdp" else ("final", "best")
    check_equal_runs(tmp_path, finished(script), exports)


def reload(directory: Path, script: str, flags: list, tmp_path: Path) -> dict:
    """Load an exported model with plain Transformers in a fresh process; see reload.py."""
    (tmp_path / "rows.json").write_text(json.dumps(val_rows(script, flags)))
    worker = launch(0, "tests/workers/reload.py", directory, tmp_path / "rows.json")
    return json.loads(worker.stdout)


def check_tied_once(output: Path) -> None:
    """Check that the last sharded checkpoint has as many weights as the exported model."""
    last = max((output / "checkpoints").glob("step-*"))
    names = dcp.FileSystemReader(last).read_metadata().state_dict_metadata
    assert sum(x.startswith("model.") for x in names) == len(weights(output / "final"))


@SCRIPTS
def test_exports_reload_with_the_same_loss(script, finished, flags, tmp_path):
    """The losses are those of each data set and of all together. Tied weights are written once."""
    run, is_llama = finished(script), script == "llama_fsdp"
    val = metrics(run, "val")
    best = min(val[1:], key=lambda line: line["loss"])  # the initial model is not exported
    for kind, line in {"final": val[-1], "best": best}.items():
        if is_llama and kind == "best":
            continue
        result = reload(run / kind, script, flags[script], tmp_path)
        assert result["loss"] == pytest.approx(line["loss"], rel=1e-5)
        assert result["losses"] == pytest.approx(line["losses"], rel=1e-5)
        assert line["perplexity"] == pytest.approx(math.exp(line["loss"]))
        assert result["is_tied"] != is_llama
        assert ("lm_head.weight" in weights(run / kind)) == is_llama
        assert result["dtype"] == "torch.float32"
        assert result["ids"] == ByT5Tokenizer()("a text").input_ids
        assert result["class"] == import_module(script).MODEL.__name__
    check_tied_once(run)
    assert result["template"] == (templates.LLAMA_2 if is_llama else None)
    assert not is_llama or result["temperature"] == 0.6  # the base's
    assert losses(run)[8] < 0.9 * losses(run)[1] or not is_llama


def test_export_only_writes_the_newest_checkpoint(finished, flags, tmp_path):
    run = Path(shutil.copytree(finished("T5_training"), tmp_path / "finished"))
    words = [*flags["T5_training"], "--output-dir", run, "--export-only", "--export-dtype"]
    assert start(import_module("T5_training"), *words, "fp32") == 0
    check_equal_weights(run / "final", run / "best")
    assert start(import_module("T5_training"), *words, "bf16") == 0
    result = reload(run / "final", "T5_training", flags["T5_training"], tmp_path)
    assert result["dtype"] == "torch.bfloat16"
    assert result["loss"] == pytest.approx(losses(run, "val")[8], abs=0.02)


def test_run_keeps_two_checkpoints_best_final_and_metrics(finished):
    run = finished("T5_training")
    val_losses = {step: loss for step, loss in losses(run, "val").items() if step}
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert min(val_losses, key=val_losses.get) == 8
    assert names == ["step-00000006", "step-00000008"]
    assert sorted(path.name for path in run.iterdir()) == [
        "best", "checkpoints", "final", "lock", "metrics.jsonl", "status"]  # fmt: skip
    assert sorted(val_losses) == [3, 5, 6, 8]
    line = metrics(run, "train")[-1]
    assert {"loss", "lr", "grad_norm", "tokens", "tokens_per_second"} <= line.keys()
    assert line["peak_memory_mb"] > 100
    assert metrics(run, "done")[0]["best_loss"] == val_losses[8]


@pytest.mark.parametrize("script, changed, message", [
    ("T5_training", ["--model-name", "/no/such/directory"], "directory is not a directory"),
    ("T5_training", ["--source-column", "body"], "has no --source-column body --target-column"),
    ("T5_training", ["--source-column", "body", "--target-column", "headline"],
     "column body --target-column headline. Its columns are: text, headline."),
    ("T5_training", ["--output-dir", __file__], f"File exists: {__file__!r}"),
    ("gpt2_fsdp", ["--block-size", 2000], "above the model's 1024 positions"),
])  # fmt: skip
def test_bad_input_exits_with_one_message(script, changed, message, flags, tmp_path, capfd):
    words = [*flags[script], "--output-dir", tmp_path, *changed]
    assert start(import_module(script), *words) == 1
    (error,) = error_lines(capfd.readouterr().err)
    assert message in error


def test_two_ranks_report_bad_data_once(flags, tmp_path):
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    more = ["--val-dataset", tmp_path / "bad.csv", "--output-dir", tmp_path / "run"]
    result = launch(2, "T5_training.py", *flags["T5_training"], *more, check=False, torchrun=True)
    (error,) = error_lines(result.stderr)
    assert result.returncode and "Its columns are: a, b" in error
    script_output = result.stderr[: result.stderr.index("torch/distributed/elastic")]
    assert "Traceback" not in script_output and "Connection closed" not in result.stderr


def test_one_ddp_process_resumes_two_shard_grad_op_ranks(gpt2_directory, flags, tmp_path):
    """Units are chosen by size. The model has no dropout. Validation on three ranks is equal."""
    script = import_module("gpt2_fsdp")
    flags = [*flags["gpt2_fsdp"], "--model-name", gpt2_directory, "--fsdp", 1]
    output = ["--output-dir", tmp_path / "parts"]
    assert start(script, *flags, "--batch-size", 8, "--output-dir", tmp_path / "whole") == 0
    killed = [*flags, *output, "--strategy", "shard_grad_op", "--wrap", "size:3000"]
    assert launch(2, "tests/workers/killed.py", "gpt2_fsdp", 0, 7, *killed, check=False).returncode
    assert start(script, *flags, *output, "--batch-size", 8, "--strategy", "ddp") == 0
    assert [line["world_size"] for line in metrics(tmp_path / "parts", "start")] == [2, 1]
    check_tied_once(tmp_path / "parts")
    for event in ("train", "val"):
        expected = losses(tmp_path / "whole", event)
        assert losses(tmp_path / "parts", event) == pytest.approx(expected, abs=1e-5)
    three = [*flags, "--max-steps", 1, "--batch-size", 2, "--output-dir", tmp_path / "three"]
    launch(3, "gpt2_fsdp.py", *three)
    assert losses(tmp_path / "three", "val")[0] == pytest.approx(expected[0], abs=1e-5)


def test_evaluation_reports_the_loss_of_each_data_set(finished, flags, tmp_path):
    original = finished("llama_fsdp")
    run = Path(shutil.copytree(original, tmp_path / "run"))
    words = [*flags["llama_fsdp"], "--evaluate-only", "--fsdp", "2", "--output-dir", run]
    assert start(import_module("llama_fsdp"), *words, "--model-name", run / "final") == 0
    evaluation = json.loads((run / "evaluation.json").read_text())
    expected = metrics(run, "val")[-1]
    assert evaluation["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert evaluation["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    for name in ("status", "metrics.jsonl"):
        assert (run / name).read_bytes() == (original / name).read_bytes()
