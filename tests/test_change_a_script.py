"""The diffs of docs/change-a-script.md, applied to copies of the scripts."""

import ast
import json
import math
import re
import shutil

import pytest
import torch
from conftest import ROOT, TINY, launch, losses, metrics, weights
from copied import EMA_SECTION, PAGE, diffs, edited_script, edited_text
from in_process import start

from tools.copy_script import needed_files

EDITS = re.search("<!-- z-loss -->(.*)<!-- accuracy -->(.*)<!-- end -->", PAGE, re.S)
Z_LOSS, ACCURACY = EDITS.groups()
BEFORE, SECTION = PAGE.replace(Z_LOSS, "").replace(ACCURACY, "").split("## Recipes")
SECTION, AFTER = SECTION.split("<!-- recipes end -->")
RECIPES = dict(re.findall(r"<!-- ([a-z ]+) -->\n(.*?)(?=<!--|\Z)", SECTION, re.S))
OTHERS = BEFORE + AFTER
RECIPES["average"] += EMA_SECTION


MY_MODEL = """
from transformers.models.t5.modeling_t5 import T5Block, T5ForConditionalGeneration

class MyLayer(T5Block):
    pass

class MyModel(T5ForConditionalGeneration):
    def __init__(self, config):
        super().__init__(config)
        for layer in (*self.encoder.block, *self.decoder.block):
            layer.__class__ = MyLayer
"""


def run(script: str, text: str, flags: list, output: object) -> int:
    """Train with a copy of a script that the diffs in `text` have changed; return its exit code."""
    return start(edited_script(script, diffs(text)), *flags, "--output-dir", output)


def test_all_diffs_train_and_resume_in_one_copy(tmp_path):
    """An own model with Lion, label smoothing, another schedule and an average of the weights."""
    (tmp_path / "my_model.py").write_text(MY_MODEL)
    (tmp_path / "my_script.py").write_text(edited_text("T5_training", diffs(OTHERS)))
    for name in ("lion", "ema"):
        shutil.copy(ROOT / f"docs/examples/{name}.py", tmp_path)
    for file in needed_files(ROOT / "T5_training.py", []):
        target = tmp_path / file.relative_to(ROOT)
        target.parent.mkdir(exist_ok=True)
        shutil.copy(file, target)
    output = tmp_path / "output"
    flags = ["--model-name", "tiny", "--batch-size", 8, "--lr", 1e-3, "--log-every", 1,
             "--rouge-samples", 4, "--target-length", 8, "--output-dir", output]  # fmt: skip
    for steps in (20, 22):
        command = [tmp_path / "my_script.py", *flags, "--max-steps", steps]
        assert ", units: MyLayer, " in launch(0, *command, cwd=tmp_path).stdout
    history = losses(output)
    assert list(history) == list(range(1, 23)) and history[22] < 0.8 * history[1]
    assert [line["updates"] for line in metrics(output, "train")] == list(range(1, 23))
    assert [line["step"] for line in metrics(output, "start")] == [0, 20]
    assert '"T5ForConditionalGeneration"' in (output / "final/config.json").read_text()


@pytest.mark.parametrize("script", ["T5_training", "llama_fsdp"])
def test_diffs_fit_the_other_scripts(script):
    edits = RECIPES | {"z-loss": Z_LOSS, "accuracy": ACCURACY}
    for name in edits.keys() - {"exact answers", "average"}:
        ast.parse(edited_text(script, diffs(edits[name])))


GPT2 = [*TINY, "--block-size=32", "--num-train-samples=40", "--num-val-samples=4",
        "--precision=fp32", "--lr=1e-2", "--batch-size=2", "--max-steps=6"]  # fmt: skip


def test_documented_diffs_add_z_loss_and_accuracy(gpt2_directory, tmp_path):
    flags = [*GPT2, "--model-name", gpt2_directory, "--gradient-accumulation-steps=2"]
    runs = []
    for edit, text in {"plain": "", "z_loss": Z_LOSS, "accuracy": ACCURACY}.items():
        assert text.count("\n+") <= 10
        assert run("gpt2_fsdp", text, flags, tmp_path / edit) == 0
        runs.append(metrics(tmp_path / edit, "train"))
    plain, z_loss, accuracy = runs

    # The z-loss is about 1e-4 * log(vocabulary)**2 and affects the gradients.
    added = z_loss[0]["loss"] - plain[0]["loss"]
    assert added == pytest.approx(1e-4 * math.log(384) ** 2, rel=0.2)
    assert z_loss[0]["grad_norm"] != plain[0]["grad_norm"]

    # The accuracy is between 0 and 1 and changes nothing else.
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in accuracy] == [line[name] for line in plain]
    assert losses(tmp_path / "accuracy", "val") == losses(tmp_path / "plain", "val")
    accuracies = [line["accuracy"] for line in accuracy]
    assert min(accuracies) >= 0 and 0 < max(accuracies) < 1


def test_exact_answers_are_counted(tmp_path):
    turns = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": "Yes."}]
    path = tmp_path / "chats.jsonl"
    path.write_text((json.dumps({"messages": turns}) + "\n") * 40)
    flags = ["--model-name=tiny", "--attention=sdpa", f"--dataset={path}", f"--val-dataset={path}",
             "--max-seq-length=32", "--max-steps=60", "--lr=1e-2"]  # fmt: skip
    assert RECIPES["exact answers"].count("\n+") <= 10
    assert run("llama_fsdp", RECIPES["exact answers"], flags, tmp_path / "output") == 0
    values = [line["exact"] for line in metrics(tmp_path / "output", "val")]
    assert values[0] == 0 and values[-1] == 1


def test_recipes_do_what_they_say(gpt2_directory, tmp_path, capfd):
    flags = [*GPT2, "--model-name", gpt2_directory, "--eval-every=1", "--lr-schedule=constant",
             "--warmup-ratio=0"]  # fmt: skip
    models = {}
    for name in ("plain", "own metric", "freezing", "head", "average"):
        assert run("gpt2_fsdp", RECIPES.get(name, ""), flags, tmp_path / name) == 0
        models[name] = weights(tmp_path / name / "final")
        assert name == "average" or RECIPES.get(name, "").count("\n+") <= 10
    base = weights(gpt2_directory)
    key, first = "transformer.wte.weight", "transformer.h.0.mlp.c_fc.weight"
    assert torch.equal(models["freezing"][key], base[key])
    assert not torch.equal(models["plain"][key], base[key])
    assert not torch.equal(models["freezing"][first], base[first])
    # AdamW's first steps have the size of the learning rate.
    moved = {name: (models[name][key] - base[key]).abs().max() for name in ("plain", "head")}
    assert moved["head"] > 3 * moved["plain"]
    assert not torch.equal(models["average"][first], models["plain"][first])
    values = metrics(tmp_path / "own metric", "val")
    best = min(values[1:], key=lambda line: line["own"])
    assert metrics(tmp_path / "own metric", "done")[0]["best_step"] == best["step"]

    # A rate that is too high ends the run early; the same command says so.
    recipe = RECIPES["early stopping"].replace("500", "2")
    output = tmp_path / "early stopping"
    capfd.readouterr()
    for message in ("done ", "is finished at"):
        assert run("gpt2_fsdp", recipe, [*flags, "--lr=0.5"], output) == 0
        assert message in capfd.readouterr().out
    steps = list(losses(output))
    assert steps == list(range(1, len(steps) + 1)) and 2 <= len(steps) < 6
    assert (output / f"checkpoints/step-{len(steps):08d}").is_dir()
    assert len(weights(output / "final")) > 10
