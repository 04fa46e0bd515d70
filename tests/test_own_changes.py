"""Changes in a copy that would train incorrectly in silence, or die at the first save, are refused
before the first step or after it."""

import re

import pytest
from conftest import check_equal_weights, live_metrics, losses
from copied import edited_script
from in_process import start

import gpt2_fsdp
from core import checkpoint

FLAGS = ["--save-every", "2", "--eval-every", "0", "--max-steps", "4", "--no-save-best"]
WRAP = "    mesh = policies.device_mesh("  # in wrap_model
COUNT = "        # 3. Count over"  # at the start of a step
CLIP = "        grad_norm = policies.clip_gradients("
STOP = "        state.step = step\n"  # after the update
NOISY = '''class Noisy:
    """Samples with other tokens each time."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        ids = torch.tensor(self.rows[int(i)]["input_ids"])
        return {"input_ids": torch.where(torch.rand(ids.shape) < 0.1, 3, ids)}


class LossModel:'''
HIDE = """def hide(samples, collate):
    batch = collate(samples)
    is_hidden = torch.rand(batch["input_ids"].shape) < 0.3
    return batch | {"input_ids": batch["input_ids"].masked_fill(is_hidden, 3)}


class LossModel:"""
DATA = "    data = ranks.local_main_process_first(load)\n"
COLLATE = "    collate = block_dataset.collate\n"
HOOK = "    model.transformer.wte.weight.register_hook(lambda gradient: gradient * 0)\n"
BEFORE_A_STEP = {  # changes to gpt2_fsdp.py, and the message
    "samples": ({DATA: f"{DATA}    data = Noisy(data[0]), data[1]\n", "class LossModel:": NOISY},
                "or collate returns other values for the same samples.*MicroBatches in train"),
    "collate": ({COLLATE: COLLATE + "    collate = partial(hide, collate=collate)\n",
                 "class LossModel:": HIDE},
                "or collate returns other values for the same samples"),
    "hook": ({WRAP: HOOK + WRAP}, "The gradient hook of transformer.wte.weight is dropped"),
    "half": ({"    shapes = weights.wh": "    model = model.half()\n    shapes = weights.wh"},
             r"transformer.wte.weight is trained in torch.float16.*Leave it in fp32"),
    "two": ({"    scaler = ": "    optimizers *= 2\n    scaler = "}, "is in 2 optimizers"),
}  # fmt: skip
UNFREEZE = """        if step == 2:
            model.requires_grad_(True)
"""
COUNTER = """        for values in optimizer.state.values():
            values["calls"] = 1
"""
AFTER_A_STEP = {  # changes, the message, and the last step
    "unfrozen": ({WRAP: f"    model.transformer.h[0].requires_grad_(False)\n{WRAP}",
                  COUNT: UNFREEZE + COUNT}, "requires_grad of transformer.h.0.*has changed", 1),
    "int in the optimizer": ({"        scaler.update()\n": COUNTER + "        scaler.update()\n"},
                             "Of an optimizer's `state`, only tensors are saved", 0),
    "tensor in state": ({STOP: STOP + "        state.mean = grad_norm\n"},
                        r"state.mean is tensor\(.*Use numbers", 0),
    "numbers as keys": ({STOP: STOP + "        state.seen = {3: step}\n"},
                        "state.seen is {3: 1}, and would be {'3': 1} after a resume", 0),
    "scheduled": ({CLIP: "        group['weight_decay'] = 0.1 / step**2 + 0.1\n" + CLIP},
                  r"weight_decay of param_group 1 is 0.2, was 0.0\. It is not saved\. If", 0),
}  # fmt: skip


@pytest.mark.parametrize("name", [*BEFORE_A_STEP, *AFTER_A_STEP])
def test_change_is_refused_with_its_message(name, block_flags, tmp_path, capfd):
    changes, message, steps = AFTER_A_STEP.get(name) or (*BEFORE_A_STEP[name], 0)
    script = edited_script("gpt2_fsdp", changes)
    assert start(script, *block_flags, *FLAGS, "--output-dir", tmp_path) == 1
    (error,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error:")]
    assert re.search(message, error), error
    assert len(live_metrics(tmp_path, "train")) == steps


def test_scheduled_weight_decay_resumes_bit_for_bit(block_flags, tmp_path, monkeypatch):
    """If its name is in SET_BY_TRAIN."""
    monkeypatch.setattr(checkpoint, "SET_BY_TRAIN", {*checkpoint.SET_BY_TRAIN, "weight_decay"})
    script = edited_script("gpt2_fsdp", AFTER_A_STEP["scheduled"][0])
    for name, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        more = ["--lr", "1e-2", "--lr-schedule", "constant", "--max-steps", steps]
        assert start(script, *block_flags, *FLAGS, *more, "--output-dir", tmp_path / name) == 0
    check_equal_weights(tmp_path / "parts/final", tmp_path / "whole/final")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert start(gpt2_fsdp, *block_flags, *FLAGS, *more, "--output-dir", tmp_path / "plain") == 0
    assert losses(tmp_path / "plain") != losses(tmp_path / "whole")


def test_value_of_a_copy_comes_back_as_it_was(tmp_path):
    state = checkpoint.State({}, {})
    state.means = [0.5, float("nan"), None, {"a": "b"}]
    assert repr(checkpoint.state_values(state)["means"]) == repr(state.means)
    state.shape = (2, 3)
    with pytest.raises(checkpoint.Problem, match=r"state.shape is \(2, 3\), and would be \[2, 3\]"):
        checkpoint.state_values(state)
