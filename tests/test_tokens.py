"""Test prepared tokens: they train like raw rows, and invalid ones are refused."""

import json
from pathlib import Path
from types import ModuleType

import pytest
from conftest import losses
from datasets import Dataset, load_from_disk
from transformers import ByT5Tokenizer

import gpt2_fsdp
import llama_fsdp
import summarization_dataset
import T5_training
from benchmarks.driven import parse_flags
from runtime import ranks, readers

SCRIPTS = {  # each script and its flags for short texts
    "T5": (T5_training, ["--source-length", "64", "--target-length", "16"]),
    "GPT-2": (gpt2_fsdp, ["--block-size", "32"]),
    "Llama": (llama_fsdp, ["--max-seq-length", "128"]),
}


def run(script: ModuleType, output: Path, *flags: object) -> None:
    """Run the script for two steps in this process."""
    common = [
        "--model-name",
        "tiny",
        "--max-steps",
        "2",
        "--log-every",
        "1",
        "--output-dir",
        output,
    ]
    if script is T5_training:
        common += ["--rouge-samples", "0"]
    args = parse_flags(script, list(map(str, [*common, *flags])))
    assert script.fsdp_main(args) == 0


@pytest.mark.parametrize("name", SCRIPTS)
def test_prepared_rows_train_like_raw_rows(name, tmp_path, capfd):
    script, lengths = SCRIPTS[name]
    data = ["--dataset", "docstrings", "--num-train-samples", "16", "--num-val-samples", "4"]
    run(script, tmp_path / "raw", *lengths, *data)
    run(script, tmp_path / "made", *lengths, *data, "--prepare-only")
    prepared = tmp_path / "made" / readers.PREPARED
    assert json.loads((prepared / readers.ORIGIN).read_text())["version"] == 1
    run(script, tmp_path / "made", *lengths, "--dataset", prepared)
    for event in ("train", "val"):
        values = losses(tmp_path / "made", event)
        assert values == losses(tmp_path / "raw", event) and len(values) == 2
    with pytest.raises(SystemExit):
        run(script, tmp_path / "other", lengths[0], "48", *lengths[2:], "--dataset", prepared)
    flag = f"{lengths[0]} {lengths[1]}, not 48"
    assert f"was prepared with {flag}. Pass the same" in capfd.readouterr().err


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ""])
@pytest.mark.parametrize("name", SCRIPTS)
def test_foreign_tokens_are_read(name, suffix, tmp_path):
    script, lengths = SCRIPTS[name]
    rows = [{"input_ids": [5 + i, 6, 1], "labels": [-100, 6, 1]} for i in range(60)]
    if name == "T5":
        rows = [row | {"labels": [6, 1]} for row in rows]
    path = tmp_path / f"rows{suffix}"
    write = {".jsonl": Dataset.to_json, ".parquet": Dataset.to_parquet, "": Dataset.save_to_disk}
    write[suffix](Dataset.from_list(rows), path)
    args = parse_flags(script, ["--model-name", "tiny", *lengths, "--dataset", str(path)])
    train, val = script.data.load(args, ByT5Tokenizer())
    sets = [getattr(part, "dataset", part) for part in (train, val[str(path)])]
    token_ids = [tuple(ids.tolist()) for part in sets for ids in part["input_ids"]]
    assert sorted(token_ids) == sorted(tuple(row["input_ids"]) for row in rows)
    assert 1 <= len(sets[1]) <= 6


@pytest.mark.parametrize(
    "row, message",
    [
        ({"input_ids": [5, 384]}, "token 384 is not one of the tokenizer's 384"),
        ({"input_ids": [5, -1]}, "token -1 is not one"),
        ({"input_ids": [5] * 300}, "300 tokens, but --max-seq-length allows 129"),
        ({"input_ids": []}, "tokens are empty or not a list of integers"),
        ({"input_ids": ["a"]}, "tokens are empty or not a list"),
        ({"labels": [5]}, "labels must be one per token"),
        ({"labels": [5, 9, 7]}, "labels must be one per token"),
        ({"labels": [-100] * 3}, "labels must be one per token"),
        ({"labels": [6, 7, -100]}, "labels must be one per token"),
        ({"input_ids": [5, 6, 0]}, "the tokens end in padding"),
        ({"attention_mask": [0, 1, 1]}, "attention_mask excludes tokens"),
    ],
)
def test_invalid_tokens_are_refused(row, message, tmp_path):
    good = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(x) + "\n" for x in (good, good, good | row)))
    args = parse_flags(llama_fsdp, ["--dataset", str(path), *SCRIPTS["Llama"][1]])
    with pytest.raises(ValueError, match=f"rows.jsonl, row 3: {message}"):
        llama_fsdp.data.load(args, ByT5Tokenizer())


def test_tokens_of_another_tokenizer_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "on_rank_zero", lambda function: function())
    args = parse_flags(T5_training, ["--model-name", "tiny", "--dataset", "docstrings"])
    rows = Dataset.from_list([{"input_ids": [5, 1], "labels": [6, 1]}] * 3)
    origin = readers.token_origin(args, ByT5Tokenizer())
    path = str(tmp_path / "prepared")
    readers.write_prepared(tmp_path, rows, {"": rows}, origin)
    assert list(load_from_disk(path)) == ["train", "validation"]
    readers.compare_origin(path, origin)
    args.dataset = [path]
    with pytest.raises(ValueError, match="was prepared with tokenizer "):
        summarization_dataset.load(args, ByT5Tokenizer(extra_ids=3))
    with pytest.raises(ValueError, match="prepared exists. Delete it"):
        readers.write_prepared(tmp_path, rows, {"": rows}, origin)


@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks", "loss_mask"])
@pytest.mark.parametrize("script", [gpt2_fsdp, llama_fsdp])
def test_masks_without_labels_are_refused(script, name, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"input_ids": [5, 6, 7], name: [0, 1, 1]}) + "\n")
    args = parse_flags(script, ["--dataset", str(path), "--model-name", "tiny"])
    with pytest.raises(ValueError, match=f"{name} excludes tokens"):
        script.data.load(args, ByT5Tokenizer())
