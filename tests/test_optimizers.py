"""Schedules, and optimizers that cannot be sharded or saved."""

import pytest
import torch
from in_process import start
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

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


def test_optimizer_without_some_trained_parameters_is_refused():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="lacks bias. Add it, or freeze it"):
        startup_checks.check_optimizer(model, torch.optim.SGD([model.weight]))
    model.bias.requires_grad_(False)
    startup_checks.check_optimizer(model, torch.optim.SGD([model.weight]))


class Counting(torch.optim.SGD):
    """Step n moves each weight by lr / n; n is outside of the optimizer's `state`."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["n"] = group.get("n", 0) + 1
            group["lr"] /= group["n"]
        super().step()


def test_optimizer_that_changes_its_groups_is_refused_at_the_first_save(
    block_flags, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(torch.optim, "AdamW", lambda groups, lr, fused: Counting(groups, lr=lr))
    assert start(gpt2_fsdp, *block_flags, "--save-every", "2", "--output-dir", tmp_path) == 1
    assert "not changed param_groups" in capfd.readouterr().err


class Custom(torch.optim.SGD):
    """An optimizer whose name is not known."""


@pytest.mark.parametrize("base, advice", [(FSDPModule, ""), (FSDP, "pass --fsdp 2")])
def test_optimizers_of_shards_are_elementwise(base, advice, monkeypatch, capfd):
    """Adafactor is refused; under FSDP1, one line names those that are not known."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model = torch.nn.Linear(2, 2)
    factored, other = torch.optim.Adafactor(model.parameters()), Custom(model.parameters())
    for optimizer in factored, other:
        startup_checks.check_optimizer(model, optimizer)  # as in DDP
    shards = object.__new__(type("Sharded", (base,), {"named_parameters": lambda _: ()}))
    with pytest.raises(ValueError, match="Pass --strategy ddp"):
        startup_checks.check_optimizer(shards, factored)
    startup_checks.check_optimizer(shards, torch.optim.SGD(model.parameters(), lr=1.0))
    assert capfd.readouterr().out == ""
    startup_checks.check_optimizer(shards, other)
    lines = capfd.readouterr().out.splitlines()
    assert [advice in line for line in lines] == [True] * bool(advice)
