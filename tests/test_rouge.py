"""Generated summaries, their ROUGE scores, and T5_training.py --evaluate-only."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, launch, losses, metrics
from in_process import start
from transformers import ByT5Tokenizer, T5ForConditionalGeneration

import policies
import summarization_dataset
import T5_training
from core.args import Optim, Run
from optional import rouge

TOKENIZER = ByT5Tokenizer()
KINDS = ("rouge1", "rouge2", "rougeL")


@pytest.mark.parametrize("text, count", [
    ("今天 天气好。", 5), ("Zażółć gęślą jaźń!", 3), ("ภาษาไทย", 7), ("नमस्ते दुनिया", 2),
    ("カタ kana1", 3),
])  # fmt: skip
def test_equal_texts_in_other_scripts_score_100(text, count):
    assert len(rouge.Words().tokenize(text)) == count
    assert rouge.score([("", text, text)]) == dict.fromkeys(KINDS, 100)


def test_english_words_are_those_of_rouge_score():
    from rouge_score.tokenizers import DefaultTokenizer

    text = (ROOT / "README.md").read_text().encode("ascii", "ignore").decode()
    assert rouge.Words().tokenize(text) == DefaultTokenizer(use_stemmer=True).tokenize(text)


def test_scores_are_mean_f_measures():
    assert rouge.score([]) == {}
    triples = [("", "one two", "one three"), ("", "a", "a")]
    assert rouge.score(triples)["rouge1"] == pytest.approx(75)


def arguments(**summaries: int | None) -> SimpleNamespace:
    """Return the sections of a script's arguments that rouge.py uses."""
    return SimpleNamespace(
        summaries=rouge.Rouge(**summaries), data=summarization_dataset.Data(target_length=7),
        optim=Optim(batch_size=2), sharding=policies.Sharding(precision="fp32"), run=Run(),
    )  # fmt: skip


@pytest.mark.parametrize("count, expected", [(None, 5), (3, 3), (0, 0)])
def test_summaries_equal_those_of_transformers(count, expected, t5_directory, process_group):
    """Also in batches with padding, of which the last one is short."""
    model = T5ForConditionalGeneration.from_pretrained(t5_directory)
    args, device = arguments(rouge_samples=count, num_beams=2), torch.device("cpu")
    texts = ["a", "some words", "b" * 9, "", "the end"]
    rows = [{"input_ids": x, "labels": x} for x in map(TOKENIZER.encode, texts)]
    collate, sets = summarization_dataset.collator(model), {"x": rows, "y": rows[:1]}
    triples = rouge.summarize(args, device, model, TOKENIZER, collate, sets)
    assert len(triples) == expected
    for text, (source, reference, generated) in zip(texts, triples, strict=False):
        inputs = TOKENIZER(text, return_tensors="pt")
        output = model.generate(**inputs, num_beams=2, max_new_tokens=7, do_sample=False)
        assert generated == TOKENIZER.decode(output[0], skip_special_tokens=True)
        assert source == reference == text


def test_final_is_written_before_summaries_that_fail(t5_directory, tmp_path):
    """Transformers divides by the 0 beams in the base's generation config."""
    model = Path(shutil.copytree(t5_directory, tmp_path / "model"))
    settings = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps(settings | {"num_beams": 0}))
    data = tmp_path / "rows.csv"
    data.write_text("text,headline\n" + "".join(f"{i} and more,the sum\n" for i in range(40)))
    flags = ["--dataset", data, "--model-name", model, "--max-steps", 1, "--output-dir", tmp_path]
    with pytest.raises(ZeroDivisionError):
        start(T5_training, *flags)
    T5ForConditionalGeneration.from_pretrained(tmp_path / "final")


def test_two_processes_evaluate_like_one_and_like_the_training(t5_directory, tmp_path):
    """All report the same loss and beam search texts. The base's generation settings that would
    change the outputs are ignored, and exported. A damaged checkpoint has no effect."""
    model = Path(shutil.copytree(t5_directory, tmp_path / "model"))
    settings = json.loads((model / "generation_config.json").read_text())
    settings |= {"num_return_sequences": 2, "num_beams": 2, "return_dict_in_generate": True}
    settings |= {"output_scores": True, "stop_strings": ["x"]}
    (model / "generation_config.json").write_text(json.dumps(settings))
    # The model learns to write the same words for any text, and each headline has some of them.
    rows = [f"{i} and{' more' * (i % 7)},the sum so {i % 3}\n" for i in range(200)]
    data = tmp_path / "sums.csv"
    data.write_text("".join(["text,headline\n", *rows]))
    flags = ["--dataset", data, "--target-length", "20", "--max-steps", "90", "--lr", "2e-2",
             "--batch-size", "8", "--eval-every", "30"]  # fmt: skip
    run, two = tmp_path / "run", tmp_path / "two"
    assert start(T5_training, *flags, "--model-name", model, "--output-dir", run) == 0
    exported = json.loads((run / "final/generation_config.json").read_text())
    assert exported["num_return_sequences"] == 2
    (done,) = metrics(run, "done")
    (run / "status").write_text("running\nsaved step 90\n")  # as a kill in ROUGE leaves it
    assert start(T5_training, *flags, "--model-name", model, "--output-dir", run) == 0
    (again,) = metrics(run, "done")
    assert [again[kind] for kind in KINDS] == [done[kind] for kind in KINDS]
    (run / "checkpoints/step-00000090/.metadata").write_bytes(b"")
    files = [run / "metrics.jsonl", run / "final/model.safetensors"]
    before = [path.read_bytes() for path in files]
    final = [*flags, "--model-name", run / "final", "--evaluate-only"]
    assert start(T5_training, *final, "--strategy", "ddp", "--output-dir", run) == 0
    assert [path.read_bytes() for path in files] == before
    launch(2, "T5_training.py", *final, "--batch-size", 3, "--fsdp", 2, "--output-dir", two)
    for output in (run, two):
        result = json.loads((output / "evaluation.json").read_text())
        assert result["loss"] == pytest.approx(losses(run, "val")[90], rel=1e-6)
        assert result["losses"] == {str(data): result["loss"]}
        for kind in KINDS:
            assert result[kind] == done[kind] > 0
    assert result["arguments"]["sharding"]["fsdp"] == 2
    predictions = (run / "predictions.jsonl").read_text()
    assert (two / "predictions.jsonl").read_text() == predictions
    assert predictions.count("\n") > 6
