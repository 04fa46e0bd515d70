"""Test T5_training.py --evaluate-only: its losses, its predictions and the files that it keeps."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, launch, losses, metrics
from slurm_cluster import wait_until
from transformers import ByT5Tokenizer, T5ForConditionalGeneration

import summarization_dataset
import T5_training
from benchmarks.driven import parse_flags


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory, t5_directory: Path) -> list[str]:
    """Return flags for a run that learns to write the same words for any text. Each headline
    contains some of them, so ROUGE is above 0."""
    path = tmp_path_factory.mktemp("pairs") / "sums.jsonl"
    rows = []
    for i in range(200):
        end = "so it is" if i % 3 else "odd"
        rows.append({"text": f"{i} and" + " more" * (i % 7), "headline": f"the sum {end}"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--model-name", str(t5_directory), "--dataset", str(path), "--num-train-samples", "0",
            "--num-val-samples", "0", "--target-length", "20", "--max-steps", "90", "--lr", "2e-2",
            "--batch-size", "8", "--eval-every", "30", "--save-every", "30"]  # fmt: skip


def run(flags: list[str], output: Path, *more: object) -> None:
    """Run the script in this process."""
    words = [*flags, "--output-dir", str(output), *map(str, more)]
    T5_training.fsdp_main(parse_flags(T5_training, words))


@pytest.fixture(scope="module")
def original_run(tmp_path_factory: pytest.TempPathFactory, flags: list[str]) -> Path:
    """Return the directory of a finished run of one process."""
    output = tmp_path_factory.mktemp("run") / "trained"
    run(flags, output)
    return output


@pytest.fixture
def run_copy(original_run: Path, tmp_path: Path) -> Path:
    """Return a copy of `original_run` to evaluate."""
    return Path(shutil.copytree(original_run, tmp_path / "finished"))


def evaluation(output: Path) -> dict:
    """Return the content of evaluation.json."""
    return json.loads((output / "evaluation.json").read_text())


def predictions(output: Path) -> list[dict[str, str]]:
    """Return the lines of predictions.jsonl."""
    return [json.loads(line) for line in (output / "predictions.jsonl").read_text().splitlines()]


def training_files(output: Path) -> dict[str, tuple[bytes, int]]:
    """Return the content and modification time of each file that the training wrote."""
    files = {}
    for path in output.rglob("*"):
        others = ("evaluation.json", "predictions.jsonl", "lock", "stacks-rank-0.txt")
        if path.is_file() and path.name not in others:
            name = str(path.relative_to(output))
            files[name] = path.read_bytes(), path.stat().st_mtime_ns
    return files


def test_two_processes_evaluate_like_one(run_copy, flags, tmp_path):
    """Both report the training's loss and the same beam search texts. A damaged checkpoint has no
    effect."""
    (run_copy / "checkpoints/step-00000090/.metadata").write_bytes(b"")
    before = training_files(run_copy)
    final = ["--model-name", run_copy / "final"]
    run(flags, run_copy, "--evaluate-only", "--strategy", "ddp", "--num-beams", "2", *final)
    assert training_files(run_copy) == before
    one = evaluation(run_copy)
    command = [*flags, *final, "--batch-size", "3", "--num-beams", "2"]
    two_ranks = ["--evaluate-only", "--fsdp", "2", "--output-dir", tmp_path / "two"]
    stdout = launch(2, "T5_training.py", *command, *two_ranks).stdout
    assert f"Evaluating {run_copy / 'final'}" in stdout
    two = evaluation(tmp_path / "two")
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == [
        "evaluation.json", "predictions.jsonl"]  # fmt: skip

    (name,) = one["losses"]
    assert name == flags[3]
    for result in (one, two):
        assert result["loss"] == pytest.approx(losses(run_copy, "val")[90], rel=1e-6)
        assert result["losses"] == {name: result["loss"]}
    assert one["arguments"]["model_name"] == str(run_copy / "final")
    assert two["arguments"]["fsdp"] == 2

    rows = predictions(run_copy)
    _, sets = summarization_dataset.load(parse_flags(T5_training, flags), ByT5Tokenizer())
    val_set = sets[name].with_format(None)
    decode = ByT5Tokenizer().decode
    assert [(row["source"], row["reference"]) for row in rows] == [
        tuple(decode(row[key], skip_special_tokens=True) for key in ("input_ids", "labels"))
        for row in val_set
    ]
    assert len(rows) > 6
    assert predictions(tmp_path / "two") == rows
    for kind in ("rouge1", "rouge2", "rougeL"):
        assert one[kind] == two[kind] > 0


def test_beam_search_equals_transformers(run_copy, flags):
    final = ["--model-name", run_copy / "final"]
    run(flags, run_copy, "--evaluate-only", "--rouge-samples", "3", "--num-beams", "4", *final)
    rows = predictions(run_copy)
    assert len(rows) == 3
    tokenizer = ByT5Tokenizer()
    model = T5ForConditionalGeneration.from_pretrained(run_copy / "final")
    for row in rows:
        inputs = tokenizer(row["source"], return_tensors="pt")
        output = model.generate(**inputs, num_beams=4, max_new_tokens=20, do_sample=False)
        assert row["generated"] == tokenizer.decode(output[0], skip_special_tokens=True)
    run(flags, run_copy, "--evaluate-only", *final)
    (done,) = metrics(run_copy, "done")
    assert {key: evaluation(run_copy)[key] for key in done if "rouge" in key} == {
        key: value for key, value in done.items() if "rouge" in key
    }


def test_stopped_evaluation_changes_no_files(run_copy, flags):
    before = training_files(run_copy)
    worker = ["tests/workers/phases.py", "T5_training", "generation", "100"]
    command = [sys.executable, *worker, *flags, "--evaluate-only", "--output-dir", str(run_copy)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    phase_file = run_copy.with_name("finished.generation-0")
    wait_until(phase_file.exists, 100, str)
    process.send_signal(signal.SIGTERM)
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM, stdout  # nothing could be lost
    assert training_files(run_copy) == before
    assert not (run_copy / "evaluation.json").exists()
