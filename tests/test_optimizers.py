"""Schedules, and optimizers that cannot be sharded or saved."""

from pathlib import Path

import pytest
import torch
from in_process import start
from torch.distributed.fsdp import FSDPModule

import gpt2_fsdp
from core.steps import schedule
from optional import startup_checks


def test_schedules_follow_their_formulas():
    """Ten steps, of which two are a warm-up, in epochs of four."""
    rates = {}
    for name in ("linear", "cosine", "constant", "step"):
        factor = schedule(name, 10, 2, 4, 0.5)
        rates[name] = [factor(step) for step in range(10)]
    assert rates["step"] == [1] * 4 + [0.5] * 4 + [0.25] * 2
    assert rates["constant"] == pytest.approx([1 / 3, 2 / 3] + [1] * 8)
    assert rates["linear"] == pytest.approx([1 / 3, 2 / 3] + [1 - i / 8 for i in range(8)])
    assert rates["cosine"][2] == 1 and rates["cosine"][6] == pytest.approx(0.5)


class Counting(torch.optim.SGD):
    """Step n moves each weight by lr / n; n is outside of the optimizer's `state`."""

    def step(self, closure=None):
        """Count, then step."""
        for group in self.param_groups:
            group["n"] = group.get("n", 0) + 1
            group["lr"] /= group["n"]
        super().step()


def test_optimizer_that_changes_its_groups_is_refused_at_the_first_save(
    texts: tuple[Path, Path], tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(torch.optim, "AdamW", lambda groups, lr, fused: Counting(groups, lr=lr))
    code = start(gpt2_fsdp, "--model-name", "tiny", "--dataset", texts[0], "--val-dataset",
                 texts[1], "--block-size", "32", "--num-val-samples", "4", "--save-every", "2",
                 "--output-dir", tmp_path)  # fmt: skip
    assert code == 1 and "values in its param_groups" in capfd.readouterr().err


def test_optimizer_that_factors_tensors_is_refused_for_shards(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adafactor(model.parameters())
    startup_checks.check_optimizer(model, optimizer)  # as in DDP
    model.__class__ = type("FSDPLinear", (FSDPModule, torch.nn.Linear), {})
    with pytest.raises(ValueError, match="Pass --strategy ddp"):
        startup_checks.check_optimizer(model, optimizer)
