"""Generated summaries, their ROUGE scores, and T5_training.py --evaluate-only."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, launch, losses, metrics
from in_process import start
from parity import val_rows
from transformers import ByT5Tokenizer, T5ForConditionalGeneration

import policies
import summarization_dataset
import T5_training
from core.args import Optim, Run
from optional import rouge

TOKENIZER = ByT5Tokenizer()


@pytest.mark.parametrize("text, count", [
    ("今天 天气好。", 5), ("Zażółć gęślą jaźń!", 3), ("ภาษาไทย", 7), ("नमस्ते दुनिया", 2),
    ("カタ kana1", 3),
])  # fmt: skip
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


def arguments(summaries: rouge.Rouge) -> SimpleNamespace:
    """Return the sections of a script's arguments that `summarize` uses."""
    data, sharding = (
        summarization_dataset.Data(target_length=7),
        policies.Sharding(precision="fp32"),
    )
    optim = Optim(batch_size=2)
    return SimpleNamespace(
        summaries=summaries, data=data, optim=optim, sharding=sharding, run=Run()
    )


def rows(texts: list[str]) -> list[dict]:
    """Return samples whose targets are their sources."""
    ids = [TOKENIZER(text)["input_ids"] for text in texts]
    return [{"input_ids": x, "labels": x} for x in ids]


@pytest.mark.parametrize("count, expected", [(None, 5), (3, 3), (0, 0)])
def test_summaries_equal_those_of_transformers(count, expected, t5_directory, process_group):
    """Also in batches with padding, of which the last one is short."""
    model = T5ForConditionalGeneration.from_pretrained(t5_directory)
    args, device = arguments(rouge.Rouge(count, num_beams=2)), torch.device("cpu")
    texts = ["a", "some words", "b" * 9, "", "the end"]
    collate, val_sets = summarization_dataset.collator(model), {"x": rows(texts), "y": rows(["z"])}
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
    collate, device = summarization_dataset.collator(model), torch.device("cpu")
    with pytest.raises(ValueError, match="cannot generate texts for ROUGE: .*rouge-samples 0."):
        rouge.check_generation(arguments(rouge.Rouge()), device, model, collate)
    rouge.check_generation(arguments(rouge.Rouge(rouge_samples=0)), device, model, collate)


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
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
def original_run(tmp_path_factory, flags, t5_directory) -> Path:
    """Return the directory of a finished run of one process."""
    output = tmp_path_factory.mktemp("run") / "trained"
    assert start(T5_training, *flags, "--model-name", t5_directory, "--output-dir", output) == 0
    return output


@pytest.fixture
def run_copy(original_run, tmp_path) -> Path:
    """Return a copy of `original_run` to evaluate."""
    return Path(shutil.copytree(original_run, tmp_path / "finished"))


def evaluation(output: Path) -> dict:
    """Return the content of evaluation.json."""
    return json.loads((output / "evaluation.json").read_text())


def training_files(output: Path) -> dict[str, tuple[bytes, int]]:
    """Return the content and modification time of each file that the training wrote."""
    others = "evaluation.json", "predictions.jsonl", "lock", "status"
    files = [path for path in output.rglob("*") if path.is_file() and path.name not in others]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_two_processes_evaluate_like_one(run_copy, flags, tmp_path):
    """Both report the training's loss and the same beam search texts. A damaged checkpoint has no
    effect."""
    (run_copy / "checkpoints/step-00000090/.metadata").write_bytes(b"")
    before = training_files(run_copy)
    final = [*flags, "--model-name", run_copy / "final", "--evaluate-only", "--num-beams", "2"]
    assert start(T5_training, *final, "--strategy", "ddp", "--output-dir", run_copy) == 0
    assert training_files(run_copy) == before
    two_ranks = ["--batch-size", "3", "--fsdp", "2", "--output-dir", tmp_path / "two"]
    launch(2, "T5_training.py", *final, *two_ranks)
    one, two = evaluation(run_copy), evaluation(tmp_path / "two")
    for result in (one, two):
        assert result["loss"] == pytest.approx(losses(run_copy, "val")[90], rel=1e-6)
        assert result["losses"] == {flags[1]: result["loss"]}
    assert two["arguments"]["sharding"]["fsdp"] == 2

    predictions = (run_copy / "predictions.jsonl").read_text()
    lines = [json.loads(line) for line in predictions.splitlines()]
    keys = {"source": "input_ids", "reference": "labels"}
    for line, row in zip(lines, val_rows("T5_training", flags)[flags[1]], strict=True):
        for name, key in keys.items():
            assert line[name] == TOKENIZER.decode(row[key], skip_special_tokens=True)
    assert len(lines) > 6
    assert (tmp_path / "two/predictions.jsonl").read_text() == predictions
    for kind in ("rouge1", "rouge2", "rougeL"):
        assert one[kind] == two[kind] > 0


def test_training_logs_the_scores_of_an_evaluation(run_copy, flags, t5_directory):
    final = [*flags, "--model-name", run_copy / "final", "--output-dir", run_copy]
    assert start(T5_training, *final, "--evaluate-only", "--rouge-samples", "32") == 0
    (done,) = metrics(run_copy, "done")
    scores = {key: value for key, value in done.items() if "rouge" in key}
    assert len(scores) == 3 and scores == {key: evaluation(run_copy)[key] for key in scores}
    (run_copy / "status").write_text("running\nsaved step 90\n")  # as a kill in ROUGE leaves it
    own = ["--model-name", t5_directory, "--output-dir", run_copy]
    assert start(T5_training, *flags, *own) == 0
    (again,) = metrics(run_copy, "done")
    assert {key: again[key] for key in scores} == scores


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
