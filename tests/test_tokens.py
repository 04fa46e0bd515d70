"""Tokens made beforehand: used as they are, and refused where they cannot be right."""

import json
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from conftest import losses
from datasets import Dataset, load_from_disk
from transformers import ByT5Tokenizer, GPT2Tokenizer

import gpt2_fsdp
import llama_fsdp
import T5_training
from runtime.rows import readers, tokens

SCRIPTS = {
    "T5": (T5_training, ["--source-length", "64", "--target-length", "16", "--rouge-samples", "0"]),
    "GPT-2": (gpt2_fsdp, ["--block-size", "64"]),
    "Llama": (llama_fsdp, ["--max-seq-length", "128"]),
}
SMALL = ["--model-name", "tiny", "--max-steps", "2", "--log-every", "1"]


def run(script: ModuleType, output: Path, *flags: object) -> None:
    """In this process."""
    command = [*SMALL, "--output-dir", output, *flags]
    assert script.fsdp_main(script.parse_args(list(map(str, command)))) == 0


@pytest.mark.parametrize("name", SCRIPTS)
def test_prepared_tokens_train_as_the_raw_rows(name: str, tmp_path: Path) -> None:
    """To the last bit; and a run that began with one goes on with the other."""
    script, lengths = SCRIPTS[name]
    some = ["--dataset", "docstrings", "--num-train-samples", "16", "--num-val-samples", "4"]
    run(script, tmp_path / "raw", *lengths, *some)
    for _ in range(2):  # the second replaces the first
        run(script, tmp_path / "made", *lengths, *some, "--prepare-only")
    prepared = tmp_path / "made" / tokens.PREPARED
    made_from = json.loads(load_from_disk(str(prepared))["train"].info.description)
    assert made_from["arguments"]["num_train_samples"] == 16
    again = ["--dataset", prepared]
    with pytest.raises(SystemExit):  # it would replace what it reads
        run(script, tmp_path / "made", *lengths, *again, "--prepare-only")
    run(script, tmp_path / "made", *lengths, *again)
    for event in ("train", "val"):
        found = losses(tmp_path / "made", event)
        assert found == losses(tmp_path / "raw", event) and len(found) == 2
    run(script, tmp_path / "raw", *lengths, *again, "--max-steps", "3")
    assert list(losses(tmp_path / "raw")) == [1, 2, 3]


def test_prepared_chats_tell_how_many_are_lost(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """As the raw rows do, and they train alike."""
    rows = [{"prompt": "?" * (90 * (i % 4 == 0) + i), "completion": "x"} for i in range(1, 41)]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--max-seq-length", 64, "--dataset"]
    run(llama_fsdp, tmp_path / "raw", *flags, path)
    (said,) = re.findall(r"WARNING: .*chats.jsonl: (10 of 40 .*)", capfd.readouterr().out)
    run(llama_fsdp, tmp_path / "made", *flags, path, "--prepare-only")
    assert said in capfd.readouterr().out
    prepared = tmp_path / "made" / tokens.PREPARED
    run(llama_fsdp, tmp_path / "made", *flags, prepared)
    assert f"WARNING: {prepared}: {said}" in capfd.readouterr().out
    assert losses(tmp_path / "made") == losses(tmp_path / "raw")


def pairs(**changes: object) -> list[dict]:
    """Twenty rows of a few tokens, the third of which has `changes`."""
    rows = [{"input_ids": [5 + i, 6, 1], "labels": [7, 8 + i, 1]} for i in range(20)]
    rows[2] |= changes
    return rows


WRONG = {
    "an id": (
        {"input_ids": [5, 384]},
        " 3: input_ids has 384, which is none of the",
    ),
    "negative": ({"input_ids": [5, -1]}, " 3: input_ids has -1, which is none of"),
    "too long": ({"input_ids": [5] * 300}, " 3: input_ids has 300 tokens, more than the "),
    "empty": ({"input_ids": []}, " 3: input_ids is empty"),
    "none": ({"input_ids": None}, "input_ids has rows or numbers missing"),
}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ""])
@pytest.mark.parametrize("name", SCRIPTS)
def test_rows_of_tokens(
    name: str, suffix: str, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """From a file or a directory; what is wrong with one is said before any training."""
    script, lengths = SCRIPTS[name]
    write: dict[str, Callable] = {".jsonl": Dataset.to_json, ".parquet": Dataset.to_parquet}
    path = tmp_path / f"rows{suffix}"

    def flags_of(rows: list[dict]) -> list[object]:
        shutil.rmtree(path, ignore_errors=True)
        write.get(suffix, Dataset.save_to_disk)(Dataset.from_list(rows), path)
        if name == "GPT-2" and suffix:
            return [*lengths, "--train-file", path, "--val-file", path]
        if name == "GPT-2":
            return [*lengths, "--dataset", path, "--val-split", "train"]
        return [*lengths, "--dataset", path]

    if (name, suffix) != ("GPT-2", ""):
        run(script, tmp_path / "good", *flags_of(pairs()))
    for changes, said in WRONG.values():
        if name == "GPT-2" and not suffix:
            continue
        with pytest.raises(SystemExit):
            run(script, tmp_path / "bad", *flags_of(pairs(**changes)))
        error = capfd.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("error: ") and said in error


def test_what_was_made_for_something_else(tmp_path: Path) -> None:
    """Another tokenizer, another script, other flags; and padding: all would be trained on."""
    rows = Dataset.from_list(pairs())
    made_from = {"script": "my_t5", "arguments": {"source_length": 9}}
    tokens.save(tmp_path / "made", rows, rows, ByT5Tokenizer(), made_from)
    made = load_from_disk(str(tmp_path / "made"))["train"]

    def check(columns: tuple, source_length: int, tokenizer: object) -> None:
        args = Namespace(source_length=source_length)
        rules = readers.token_rules(tokenizer)
        tokens.check_origin("x", made, columns, args, ["source_length"], rules)

    own = ("input_ids", "labels")
    check(own, 9, ByT5Tokenizer())
    for wrong, said in (
        (
            (own, 9, GPT2Tokenizer({"a": 0}, [])),
            "x was made with another vocabulary, or rules of splitting, ",
        ),
        (
            ((*own, "cut"), 9, ByT5Tokenizer()),
            "x was made for another script, or by another version of my_t5",
        ),
        ((own, 8, ByT5Tokenizer()), "x was made with --source-length 9, not 8: give the same"),
    ):
        with pytest.raises(ValueError, match=said):
            check(*wrong)
    padded = rows.add_column("attention_mask", [[1, 1, 0]] * len(rows))
    with pytest.raises(ValueError, match="x has padding"):
        tokens.checked_columns("x", padded, {"input_ids": ("--source-length", 9)}, ByT5Tokenizer())
