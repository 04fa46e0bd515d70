"""Generated summaries, their ROUGE scores, and T5_training.py --evaluate-only."""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, launch, losses, metrics
from in_process import start
from slurm_cluster import wait_until
from transformers import ByT5Tokenizer, T5ForConditionalGeneration

import policies
import summarization_dataset
import T5_training
from core.args import Optim, Run
from optional import rouge

TOKENIZER = ByT5Tokenizer()


@pytest.mark.parametrize(
    "text, count",
    [
        ("今天 天气好。", 5),
        ("Zażółć gęślą jaźń!", 3),
        ("ภาษาไทย", 7),
        ("नमस्ते दुनिया", 2),
        ("カタ kana1", 3),
    ],
)
def test_equal_texts_in_other_scripts_score_100(text, count):
    assert len(rouge.Words().tokenize(text)) == count
    assert rouge.score([("", text, text)]) == dict.fromkeys(("rouge1", "rouge2", "rougeL"), 100)


def test_english_words_are_those_of_rouge_score():
    from rouge_score.tokenizers import DefaultTokenizer

    text = (ROOT / "README.md").read_text().encode("ascii", "ignore").decode()
    assert rouge.Words().tokenize(text) == DefaultTokenizer(use_stemmer=True).tokenize(text)


def test_scores_are_mean_f_measures():
    assert rouge.score([]) == {}
    triples = [("", "one two", "one three"), ("", "a", "a")]
    assert rouge.score(triples)["rouge1"] == pytest.approx(75)
    assert rouge.format_triples(triples[:1]).splitlines()[2] == "generated: one three"


@dataclasses.dataclass
class Args:
    """The sections of a script's arguments that `summarize` uses."""

    summaries: rouge.Rouge
    data: summarization_dataset.Data
    optim: Optim = dataclasses.field(default_factory=lambda: Optim(batch_size=2))
    sharding: policies.Sharding = dataclasses.field(
        default_factory=lambda: policies.Sharding(precision="fp32")
    )
    run: Run = dataclasses.field(default_factory=Run)


def rows(texts: list[str]) -> list[dict]:
    """Return samples whose targets are their sources."""
    ids = [TOKENIZER(text)["input_ids"] for text in texts]
    return [{"input_ids": x, "labels": x} for x in ids]


@pytest.mark.parametrize("count, expected", [(None, 5), (3, 3), (0, 0)])
def test_summaries_equal_those_of_transformers(count, expected, t5_directory, process_group):
    """Also in batches with padding, of which the last one is short."""
    model = T5ForConditionalGeneration.from_pretrained(t5_directory)
    args = Args(rouge.Rouge(count, num_beams=2), summarization_dataset.Data(target_length=7))
    texts = ["a", "some words", "b" * 9, "", "the end"]
    collate, val_sets = summarization_dataset.collator(model), {"x": rows(texts), "y": rows(["z"])}
    device = torch.device("cpu")
    rouge.check_generation(args, device, model, collate)
    triples = rouge.summarize(args, device, model, TOKENIZER, collate, val_sets)
    assert len(triples) == expected
    for text, (source, reference, generated) in zip(texts, triples, strict=False):
        inputs = TOKENIZER(text, return_tensors="pt")
        output = model.generate(**inputs, num_beams=2, max_new_tokens=7, do_sample=False)
        assert generated == TOKENIZER.decode(output[0], skip_special_tokens=True)
        assert source == reference == text


def test_settings_that_cannot_generate_are_refused(t5_directory, process_group):
    model = T5ForConditionalGeneration.from_pretrained(t5_directory)
    model.generation_config.update(num_beams=4, num_beam_groups=3)
    args = Args(rouge.Rouge(), summarization_dataset.Data())
    collate = summarization_dataset.collator(model)
    with pytest.raises(ValueError, match="cannot generate texts for ROUGE: .*rouge-samples 0."):
        rouge.check_generation(args, torch.device("cpu"), model, collate)
    args.summaries.rouge_samples = 0
    rouge.check_generation(args, torch.device("cpu"), model, collate)


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
    return ["--dataset", str(path), "--num-train-samples", "0", "--num-val-samples", "0",
            "--target-length", "20", "--max-steps", "90", "--lr", "2e-2", "--batch-size", "8",
            "--eval-every", "30", "--save-every", "30"]  # fmt: skip


@pytest.fixture(scope="module")
def original_run(
    tmp_path_factory: pytest.TempPathFactory, flags: list[str], t5_directory: Path
) -> Path:
    """Return the directory of a finished run of one process."""
    output = tmp_path_factory.mktemp("run") / "trained"
    assert start(T5_training, *flags, "--model-name", t5_directory, "--output-dir", output) == 0
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
        others = "evaluation.json", "predictions.jsonl", "lock", "status"
        if path.is_file() and path.name not in others:
            name = str(path.relative_to(output))
            files[name] = path.read_bytes(), path.stat().st_mtime_ns
    return files


def test_two_processes_evaluate_like_one(run_copy, flags, tmp_path):
    """Both report the training's loss and the same beam search texts. A damaged checkpoint has no
    effect."""
    (run_copy / "checkpoints/step-00000090/.metadata").write_bytes(b"")
    before = training_files(run_copy)
    final = [*flags, "--model-name", run_copy / "final", "--evaluate-only", "--num-beams", "2"]
    assert start(T5_training, *final, "--strategy", "ddp", "--output-dir", run_copy) == 0
    assert training_files(run_copy) == before
    one = evaluation(run_copy)
    two_ranks = ["--batch-size", "3", "--fsdp", "2", "--output-dir", tmp_path / "two"]
    launch(2, "T5_training.py", *final, *two_ranks)
    two = evaluation(tmp_path / "two")

    (name,) = one["losses"]
    assert name == flags[1]
    for result in (one, two):
        assert result["loss"] == pytest.approx(losses(run_copy, "val")[90], rel=1e-6)
        assert result["losses"] == {name: result["loss"]}
    assert two["arguments"]["sharding"]["fsdp"] == 2

    lines = predictions(run_copy)
    data = summarization_dataset.Data(dataset=(name,), num_val_samples=0, target_length=20)
    _, sets = summarization_dataset.load(data, TOKENIZER, evaluate_only=True)
    texts = [
        [TOKENIZER.decode(row[key], skip_special_tokens=True) for key in ("input_ids", "labels")]
        for row in sets[name].with_format(None)
    ]
    assert [[line["source"], line["reference"]] for line in lines] == texts
    assert len(lines) > 6
    assert predictions(tmp_path / "two") == lines
    for kind in ("rouge1", "rouge2", "rougeL"):
        assert one[kind] == two[kind] > 0


def test_training_logs_the_scores_of_an_evaluation(run_copy, flags):
    final = [*flags, "--model-name", run_copy / "final", "--output-dir", run_copy]
    assert start(T5_training, *final, "--evaluate-only", "--rouge-samples", "32") == 0
    (done,) = metrics(run_copy, "done")
    scores = {key: value for key, value in done.items() if "rouge" in key}
    assert len(scores) == 3 and scores == {key: evaluation(run_copy)[key] for key in scores}


def test_stopped_evaluation_changes_no_files(run_copy, flags):
    before = training_files(run_copy)
    worker = ["tests/workers/phases.py", "T5_training", "generation", "100"]
    more = ["--model-name", run_copy / "final", "--evaluate-only", "--output-dir", run_copy]
    command = [sys.executable, *map(str, [*worker, *flags, *more])]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    wait_until(run_copy.with_name("finished.generation-0").exists, 100, str)
    process.send_signal(signal.SIGTERM)
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM, stdout  # nothing could be lost
    assert training_files(run_copy) == before
    assert not (run_copy / "evaluation.json").exists()


def test_missing_package_is_named_before_training(monkeypatch):
    assert rouge.Rouge().problems(None) == []
    monkeypatch.setattr(rouge.importlib.util, "find_spec", lambda _: None)
    assert "pip install rouge-score" in rouge.Rouge().problems(None)[0]
    assert rouge.Rouge(rouge_samples=0).problems(None) == []


def test_settings_that_change_the_outputs_are_ignored(flags, t5_directory, tmp_path):
    """A base's generation_config.json is exported as it was."""
    model = Path(shutil.copytree(t5_directory, tmp_path / "model"))
    path = model / "generation_config.json"
    values = {"num_return_sequences": 2, "num_beams": 2, "return_dict_in_generate": True}
    values |= {"output_scores": True, "stop_strings": ["x"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    more = ["--model-name", model, "--output-dir", tmp_path / "run", "--rouge-samples", "2"]
    assert start(T5_training, *flags, *more, "--max-steps", "2") == 0
    assert "rouge1" in metrics(tmp_path / "run", "done")[0]
    exported = json.loads((tmp_path / "run/final/generation_config.json").read_text())
    assert exported["num_return_sequences"] == 2
