"""--evaluate-only of T5_training.py: what is evaluated, what is found, and what stays as it was."""

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


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory, t5_directory: Path) -> list[str]:
    """Return a model that learns to write the same words under any text, and so some of each
    headline."""
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
    T5_training.fsdp_main(T5_training.parse_args(words))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, flags: list[str]) -> Path:
    """Return a finished run of one process."""
    output = tmp_path_factory.mktemp("run") / "trained"
    run(flags, output)
    return output


@pytest.fixture
def finished(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of it, to evaluate."""
    return Path(shutil.copytree(trained, tmp_path / "finished"))


def evaluation(output: Path) -> dict:
    """Return the content of evaluation.json."""
    return json.loads((output / "evaluation.json").read_text())


def predictions(output: Path) -> list[dict[str, str]]:
    """Return the lines of predictions.jsonl."""
    return [json.loads(line) for line in (output / "predictions.jsonl").read_text().splitlines()]


def contents(output: Path) -> dict[str, tuple[bytes, int]]:
    """Return all that a training has left, and when each file was written."""
    found = {}
    for path in output.rglob("*"):
        if path.is_file() and path.name not in ("evaluation.json", "predictions.jsonl"):
            name = str(path.relative_to(output))
            found[name] = path.read_bytes(), path.stat().st_mtime_ns
    return found


def test_two_processes_evaluate_like_one(finished, flags, tmp_path):
    """The loss of the training, and the same texts by beam search. Damaged checkpoints do not
    matter."""
    (finished / "checkpoints/step-00000090/.metadata").write_bytes(b"")
    before = contents(finished)
    final = ["--model-name", finished / "final"]
    run(flags, finished, "--evaluate-only", "--strategy", "ddp", "--num-beams", "2", *final)
    assert contents(finished) == before
    one = evaluation(finished)
    command = [*flags, *final, "--batch-size", "3", "--num-beams", "2"]
    two_ranks = ["--evaluate-only", "--fsdp", "2", "--output-dir", tmp_path / "two"]
    said = launch(2, "T5_training.py", *command, *two_ranks).stdout
    assert f"Evaluating {finished / 'final'}, without training" in said
    two = evaluation(tmp_path / "two")
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == [
        "evaluation.json", "predictions.jsonl"]  # fmt: skip

    (name,) = one["losses"]
    assert name == flags[3]
    for found in (one, two):
        assert found["loss"] == pytest.approx(losses(finished, "val")[90], rel=1e-6)
        assert found["losses"] == {name: found["loss"]}
    assert one["arguments"]["model_name"] == str(finished / "final")
    assert two["arguments"]["fsdp"] == 2

    rows = predictions(finished)
    _, sets = summarization_dataset.load(T5_training.parse_args(flags), ByT5Tokenizer())
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


def test_beam_search_equals_transformers(finished, flags):
    final = ["--model-name", finished / "final"]
    run(flags, finished, "--evaluate-only", "--rouge-samples", "3", "--num-beams", "4", *final)
    rows = predictions(finished)
    assert len(rows) == 3
    tokenizer = ByT5Tokenizer()
    model = T5ForConditionalGeneration.from_pretrained(finished / "final")
    for row in rows:
        inputs = tokenizer(row["source"], return_tensors="pt")
        output = model.generate(**inputs, num_beams=4, max_new_tokens=20, do_sample=False)
        assert row["generated"] == tokenizer.decode(output[0], skip_special_tokens=True)
    run(flags, finished, "--evaluate-only", *final)
    (done,) = metrics(finished, "done")
    assert {key: evaluation(finished)[key] for key in done if "rouge" in key} == {
        key: value for key, value in done.items() if "rouge" in key
    }


def test_stopped_evaluation_keeps_the_status(finished, flags):
    before = contents(finished)
    worker = ["tests/workers/phases.py", "T5_training", "generation", "100"]
    command = [sys.executable, *worker, *flags, "--evaluate-only", "--output-dir", str(finished)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    there = finished.with_name("finished.generation-0")
    wait_until(there.exists, 100, str)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 75 and "SIGTERM: nothing" in said
    assert contents(finished) == before
    assert not (finished / "evaluation.json").exists() and not (finished / "lock").exists()
