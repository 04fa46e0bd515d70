"""ROUGE in other scripts, and what an optimizer keeps outside of its `state`."""

import json

import pytest
import torch
from conftest import ROOT, losses
from copied import edited_script
from schedulefree import AdamWScheduleFree
from torch.distributed.fsdp import FSDPModule

from benchmarks.driven import parse_flags
from runtime import rouge
from runtime.state import State


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


class Counting(torch.optim.Optimizer):
    """Step n moves each weight by lr / n; n is a number in the param_groups and an attribute."""

    total = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.total += 1
        for group in self.param_groups:
            group["n"] += 1
            for parameter in group["params"]:
                parameter -= group["lr"] / max(self.total, group["n"]) * parameter.grad


def make_counting(groups: list[dict], lr: float) -> torch.optim.Optimizer:
    """Return a Counting optimizer."""
    return Counting(groups, {"lr": lr, "n": 0})


def make_schedule_free(groups: list[dict], lr: float) -> torch.optim.Optimizer:
    """Return a schedule-free AdamW in training mode."""
    optimizer = AdamWScheduleFree(groups, lr=lr)
    optimizer.train()
    return optimizer


@pytest.mark.parametrize("make", [make_counting, make_schedule_free])
def test_resume_restores_the_numbers_of_an_optimizer(make, texts, tmp_path):
    """lr comes from the flags. k and weight_sum, or n, continue."""
    call = "torch.optim.AdamW(groups, lr=args.lr, fused=True)"
    script = edited_script("gpt2_fsdp", {call: "make(groups, args.lr)"})
    script.make = make
    flags = ["--model-name", "tiny", "--dataset", str(texts[0]), "--val-dataset", str(texts[1]),
             "--block-size", "32", "--log-every", "1", "--lr", "1e-2", "--num-val-samples", "4",
             "--lr-schedule", "constant"]  # fmt: skip
    for name, steps in (("whole", [6]), ("parts", [3, 6])):
        for count in steps:
            output = ["--output-dir", str(tmp_path / name), "--max-steps", str(count)]
            script.fsdp_main(parse_flags(script, [*flags, *output]))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    state = json.loads((tmp_path / "parts/checkpoints/step-00000006/train_state.json").read_text())
    *groups, attributes = state["numbers"]
    assert all(numbers.get("k", numbers.get("n")) == 6 for numbers in groups)
    assert attributes.get("total", 6) == 6


@pytest.mark.parametrize(
    "first, second", [(torch.zeros(3), torch.ones(3)), ([1], [1, 2]), ({}, {"x": 1})]
)
def test_values_that_checkpoints_do_not_contain_may_not_change(first, second):
    """A value that changes from None to a number may."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])
    values = optimizer.param_groups[0]
    values |= {"mine": first, "number": None}
    state = State(None, None, optimizer, None, None, total_steps=1)
    optimizer.param_groups[0]["params"][0].data += 1
    values["number"] = 5
    assert state.changed_numbers() == [{"number": 5}, {}]
    values["mine"] = second
    with pytest.raises(ValueError, match="changes tensors or lists in its param_groups. Keep"):
        state.changed_numbers()


def test_optimizer_that_factors_tensors_is_refused_for_shards(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adafactor(model.parameters())
    State(model, None, optimizer, None, None, total_steps=1)  # as in DDP
    model.__class__ = type("FSDPLinear", (FSDPModule, torch.nn.Linear), {})
    with pytest.raises(ValueError, match="Pass --strategy ddp"):
        State(model, None, optimizer, None, None, total_steps=1)
