"""The diffs of docs/change-a-script.md, applied to copies of the scripts."""

import json
import math
import re
import shutil
from types import ModuleType

import pytest
import torch
from conftest import ROOT, launch, losses, metrics, weights

from benchmarks.driven import parse_flags
from tools.copy_script import needed_files

PAGE = (ROOT / "docs/change-a-script.md").read_text()
EDITS = re.search("<!-- z-loss -->(.*)<!-- accuracy -->(.*)<!-- end -->", PAGE, re.S)
Z_LOSS, ACCURACY = EDITS.groups()
BEFORE, SECTION = PAGE.replace(Z_LOSS, "").replace(ACCURACY, "").split("## Recipes")
SECTION, AFTER = SECTION.split("<!-- recipes end -->")
RECIPES = dict(re.findall(r"<!-- ([a-z ]+) -->\n(.*?)(?=<!--|\Z)", SECTION, re.S))
OTHERS = BEFORE + AFTER


def apply_diffs(script: str, text: str) -> str:
    """Return the script's text with all diffs in `text` applied. Fail if one does not match."""
    source = (ROOT / f"{script}.py").read_text()
    for diff in re.findall(r"```diff\n(.*?)```", text, re.DOTALL):
        lines = diff.splitlines()
        old = "".join(f"{line[1:]}\n" for line in lines if line[0] != "+")
        new = "".join(f"{line[1:]}\n" for line in lines if line[0] != "-")
        assert source.count(old) == 1, diff
        source = source.replace(old, new)
    return source


def test_all_diffs_train_and_resume_in_one_copy(tmp_path):
    """BART with Lion, label smoothing, a cosine schedule and an average of the weights."""
    (tmp_path / "my_script.py").write_text(apply_diffs("T5_training", OTHERS))
    for name in ("lion", "ema"):
        shutil.copy(ROOT / f"tests/helpers/{name}.py", tmp_path)
    (tmp_path / "runtime").mkdir()
    for file in needed_files(ROOT / "T5_training.py"):
        shutil.copy(file, tmp_path / file.relative_to(ROOT))

    output = tmp_path / "output"
    flags = ["--model-name", "tiny", "--batch-size", 8, "--lr", 1e-3, "--log-every", 1,
             "--rouge-samples", 4, "--target-length", 8, "--output-dir", output]  # fmt: skip
    for steps in (20, 22):
        launch(0, tmp_path / "my_script.py", *flags, "--max-steps", steps, cwd=tmp_path)
    history = losses(output)
    assert list(history) == list(range(1, 23)) and history[22] < 0.8 * history[1]
    assert [line["updates"] for line in metrics(output, "train")] == list(range(1, 23))
    assert [line["step"] for line in metrics(output, "start")] == [0, 20]
    assert '"BartForConditionalGeneration"' in (output / "final/config.json").read_text()


SCRIPTS = {  # ({flag: fixture}, other flags)
    "T5_training": ({"--model-name": "t5_directory", "--dataset": "pairs"}, ["--rouge-samples=0"]),
    "gpt2_fsdp": ({"--model-name": "gpt2_directory"}, ["--dataset=docstrings", "--block-size=32"]),
    "llama_fsdp": (
        {"--model-name": "llama_directory", "--dataset": "chats"}, ["--max-seq-length=64"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
def test_documented_diffs_add_z_loss_and_accuracy(script, request, tmp_path):
    """Validation, perplexity and best/ still use only the cross-entropy."""
    fixtures, flags = SCRIPTS[script]
    for flag, fixture in fixtures.items():
        flags = [*flags, flag, str(request.getfixturevalue(fixture))]
    flags += ["--max-steps=10", "--log-every=1", "--eval-every=5", "--num-train-samples=40",
              "--num-val-samples=4", "--precision=fp32", "--lr=1e-2", "--batch-size=2",
              "--gradient-accumulation-steps=2"]  # fmt: skip
    runs = {}
    for edit, text in {"plain": "", "z_loss": Z_LOSS, "accuracy": ACCURACY}.items():
        assert text.count("\n+") <= 6
        module = ModuleType(script)
        module.__file__ = str(ROOT / f"{script}.py")
        exec(compile(apply_diffs(script, text), module.__file__, "exec"), vars(module))
        output = tmp_path / edit
        assert module.fsdp_main(parse_flags(module, [*flags, f"--output-dir={output}"])) == 0
        runs[edit] = metrics(output, "train")
        values = metrics(output, "val")
        perplexities = [math.exp(line["loss"]) for line in values]
        assert [line["perplexity"] for line in values] == pytest.approx(perplexities, rel=1e-12)
        (done,) = metrics(output, "done")
        assert done["best_loss"] == min(line["loss"] for line in values[1:])
        runs[edit, "val"] = [line["loss"] for line in values]
    plain, z_loss, accuracy = runs["plain"], runs["z_loss"], runs["accuracy"]

    # The z-loss is about 1e-4 * log(vocabulary)**2 and affects the gradients.
    assert z_loss[0]["z_loss"] == pytest.approx(1e-4 * math.log(384) ** 2, rel=0.2)
    assert z_loss[0]["loss"] == plain[0]["loss"] != z_loss[0]["z_loss"]
    assert z_loss[0]["grad_norm"] != plain[0]["grad_norm"]
    assert runs["z_loss", "val"][0] == runs["plain", "val"][0]

    # The accuracy is between 0 and 1 and changes nothing else.
    for name in ("loss", "mean_loss", "grad_norm"):
        assert [line[name] for line in accuracy] == [line[name] for line in plain]
    assert runs["accuracy", "val"] == runs["plain", "val"]
    accuracies = [line["accuracy"] for line in accuracy]
    assert min(accuracies) >= 0 and 0 < max(accuracies) < 1


def run_recipe(
    name: str, flags: list[str], monkeypatch: pytest.MonkeyPatch, script: str = "gpt2_fsdp"
) -> None:
    """Train with a copy of a script that one recipe, or none, has changed."""
    text = RECIPES.get(name, "")
    if name == "average":
        monkeypatch.syspath_prepend(ROOT / "tests/helpers")
        start = BEFORE.index("## EMA weights")
        ema = BEFORE[start:].replace("+from lion import Lion\n", "")
        text = ema + text
    assert text.count("\n+") <= 10
    module = ModuleType(script)
    module.__file__ = str(ROOT / f"{script}.py")
    exec(compile(apply_diffs(script, text), module.__file__, "exec"), vars(module))
    assert module.fsdp_main(parse_flags(module, flags)) == 0


def test_exact_answers_are_counted(tmp_path, monkeypatch):
    turns = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": "Yes."}]
    path = tmp_path / "chats.jsonl"
    path.write_text((json.dumps({"messages": turns}) + "\n") * 40)
    flags = ["--model-name=tiny", "--attention=sdpa", f"--dataset={path}", f"--val-dataset={path}",
             "--max-seq-length=32", "--max-steps=60", "--lr=1e-2",
             f"--output-dir={tmp_path / 'output'}"]  # fmt: skip
    run_recipe("exact answers", flags, monkeypatch, "llama_fsdp")
    values = [line["exact"] for line in metrics(tmp_path / "output", "val")]
    assert values[0] == 0 and values[-1] == 1


def test_recipes_do_what_they_say(gpt2_directory, tmp_path, monkeypatch, capfd):
    flags = ["--model-name", str(gpt2_directory), "--dataset=docstrings", "--block-size=32",
             "--num-train-samples=40", "--num-val-samples=4", "--precision=fp32", "--lr=1e-2",
             "--batch-size=2", "--max-steps=6", "--eval-every=1", "--log-every=1",
             "--lr-schedule=constant", "--warmup-ratio=0"]  # fmt: skip
    outputs = {name: tmp_path / name for name in ["plain", *RECIPES] if name != "exact answers"}
    for name, output in outputs.items():
        if name != "early stopping":
            run_recipe(name, [*flags, f"--output-dir={output}"], monkeypatch)
    models = {name: weights(path / "final") for name, path in outputs.items() if path.exists()}
    base = weights(gpt2_directory)
    key = "transformer.wte.weight"
    assert torch.equal(models["freezing"][key], base[key])
    assert not torch.equal(models["plain"][key], base[key])
    first = "transformer.h.0.mlp.c_fc.weight"
    assert not torch.equal(models["freezing"][first], base[first])
    # AdamW's first steps have the size of the learning rate.
    moved = {name: (models[name][key] - base[key]).abs().max() for name in ("plain", "head")}
    assert moved["head"] > 3 * moved["plain"]
    assert not torch.equal(models["average"][first], models["plain"][first])
    values = metrics(outputs["own metric"], "val")
    best = min(values[1:], key=lambda line: line["own"])
    assert metrics(outputs["own metric"], "done")[0]["best_step"] == best["step"]

    # Other groups of parameters resume: the moments are saved by name.
    run_recipe("head", [*flags, f"--output-dir={outputs['plain']}", "--max-steps=8"], monkeypatch)
    assert list(losses(outputs["plain"])) == list(range(1, 9))

    # A rate that is too high ends the run early; the same command says so.
    flags += ["--lr=0.5", f"--output-dir={outputs['early stopping']}"]
    monkeypatch.setitem(RECIPES, "early stopping", RECIPES["early stopping"].replace("500", "2"))
    capfd.readouterr()
    for message in ("done ", "is finished at"):
        run_recipe("early stopping", flags, monkeypatch)
        assert message in capfd.readouterr().out
    steps = list(losses(outputs["early stopping"]))
    assert steps == list(range(1, len(steps) + 1)) and 2 <= len(steps) < 6
    assert (outputs["early stopping"] / f"checkpoints/step-{len(steps):08d}").is_dir()
    assert len(weights(outputs["early stopping"] / "final")) > 10
    run_recipe("early stopping", [*flags, "--max-steps=8"], monkeypatch)
    assert len(losses(outputs["early stopping"])) > len(steps)
