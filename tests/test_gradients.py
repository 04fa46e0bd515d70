"""The gradients of the chunked loss, and DDP gradients as views of DDP's buckets."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import launch
from gradients_worker import IN_BUCKETS, head_gradient_error
from torch import Tensor, nn
from transformers import GPT2Config

from runtime import chunked_loss
from runtime.chunked_loss import LossHead


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="sum")


def with_z_loss(logits: Tensor, targets: Tensor) -> Tensor:
    z = logits.logsumexp(-1)[targets != -100]
    return torch.stack([cross_entropy(logits, targets), 1e-2 * (z * z).sum()])


def with_accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.stack([cross_entropy(logits, targets), (logits.argmax(-1) == targets).sum()])


EDITS = {  # token_loss, and the part of `share` that is trained
    "plain": (cross_entropy, lambda share: share),
    "z-loss": (with_z_loss, lambda share: share.sum()),
    "accuracy": (with_accuracy, lambda share: share[0]),
    "terms with weights": (with_z_loss, lambda share: share[0] + 0.1 * share[1]),
    "logged term with a gradient": (with_z_loss, lambda share: share[0]),
    "negative weight": (with_z_loss, lambda share: share[0] - 2 * share[1]),
}


def head_gradients(
    token_loss: Callable, trained: Callable, *, plain: bool, dtype: torch.dtype = torch.float32,
    scale: float = 1.0, targets: int = 500, frozen: str = "", autocast: bool = False,
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of hidden states, weight and bias of a head in fp32, without `scale`,
    from the chunked loss or from autograd over all logits (`plain`)."""
    torch.manual_seed(0)
    head = LossHead(nn.Linear(64, 500), GPT2Config(), token_loss)
    hidden = torch.randn(600, 64)
    nn.init.normal_(head.weight, std=0.6)
    labels = torch.randint(0, 500, (600,)).index_fill(0, torch.randperm(600)[targets:], -100)
    if not autocast:
        head, hidden = head.to(dtype), hidden.to(dtype)
    hidden.requires_grad_("hidden" not in frozen)
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(name not in frozen)
    with torch.autocast("cpu", dtype, enabled=autocast):
        if plain:
            share = token_loss(head.loss_logits(hidden), labels) / targets
        else:
            share = head(hidden, labels) / targets
    (trained(share) * scale).backward()
    tensors = (hidden, head.weight, head.bias)
    return [None if x.grad is None else x.grad.float() / scale for x in tensors]


@pytest.mark.parametrize("frozen", ["", "weight bias", "hidden", "bias"])
@pytest.mark.parametrize("edit", EDITS)
def test_chunked_gradients_of_edited_losses_equal_plain_ones(edit, frozen, monkeypatch):
    monkeypatch.setattr(chunked_loss, "CHUNK", 128)
    ours, plain = (head_gradients(*EDITS[edit], plain=p, frozen=frozen) for p in (False, True))
    for one, other in zip(ours, plain, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one - other).norm() <= 1e-6 * other.norm()


def test_logged_term_does_not_change_the_bits_of_the_gradients(monkeypatch):
    monkeypatch.setattr(chunked_loss, "CHUNK", 128)
    plain, accuracy = (head_gradients(*EDITS[e], plain=False) for e in ("plain", "accuracy"))
    assert all(map(torch.equal, plain, accuracy))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("edit", ["plain", "terms with weights"])
def test_small_gradients_survive_in_fp16(edit, autocast):
    """With a scale of 65,536 and 8 targets. Without our own factor, 1% of the weight's are 0."""
    options = {"dtype": torch.float16, "targets": 8, "autocast": autocast}
    exact = head_gradients(*EDITS[edit], plain=True, targets=8)
    plain = head_gradients(*EDITS[edit], plain=True, scale=65_536, **options)
    ours = head_gradients(*EDITS[edit], plain=False, scale=65_536, **options)
    for one, other, fp32 in zip(ours, plain, exact, strict=True):
        assert (one == 0).sum() == (fp32 == 0).sum()
        assert (one - fp32).norm() <= 2 * (other - fp32).norm()


@pytest.mark.parametrize("autocast", [False, True])
def test_large_hidden_states_do_not_overflow_in_fp16(autocast):
    """The loss scaler cannot lower our own factor."""
    dtype = torch.float32 if autocast else torch.float16
    head = LossHead(nn.Linear(64, 500, bias=False), GPT2Config(), cross_entropy).to(dtype)
    hidden = torch.full((1024, 64), 200.0, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        loss = head(hidden, torch.zeros(1024, dtype=torch.int64))
    (loss / 1024).backward()
    assert head.weight.grad.isfinite().all() and head.weight.grad[0].abs().max() > 100
    assert hidden.grad.isfinite().all()


def test_no_gradient_is_computed_that_nothing_needs(monkeypatch):
    head = LossHead(nn.Linear(64, 500, bias=False), GPT2Config(), cross_entropy)
    hidden, targets = torch.randn(8, 64), torch.zeros(8, dtype=torch.int64)
    monkeypatch.setattr(torch.autograd, "grad", lambda *_: pytest.fail("a gradient"))
    with torch.no_grad():
        assert not head(hidden, targets).requires_grad
    assert not head.requires_grad_(False)(hidden, targets).requires_grad


def test_head_gradient_in_bf16_is_within_one_percent():
    """test_gpu.py repeats this on CUDA, where linear_cross_entropy is less accurate."""
    assert head_gradient_error("cpu") < 0.01


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, gpt2_directory: Path) -> list[dict]:
    """Return the results of gradients_worker.py by rank."""
    path = tmp_path_factory.mktemp("gradients")
    launch(2, "tests/workers/gradients_worker.py", path / "out.pt", gpt2_directory, path / "run")
    return torch.load(path / "out.pt")


@pytest.mark.parametrize("name", IN_BUCKETS)
def test_ddp_gradients_are_views_of_its_buckets(name, ranks):
    for results in ranks:
        result = results[f"in buckets, {name}"]
        for one, other in zip(result["ours"], result["plain"], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        storages, size = result["ours, storages"]
        plain_storages, plain_size = result["plain, storages"]
        parameters = result["ours"][2]
        assert plain_storages == len(parameters)
        assert storages <= 2
        assert size == plain_size == 4 * sum(p.numel() for p in parameters)


def test_weights_changed_after_an_evaluation_are_used(tmp_path):
    """FSDP1's root, or all units, would stay gathered, with the weights of before."""
    launch(2, "tests/workers/evaluation_worker.py", tmp_path / "losses.json")
    results = json.loads((tmp_path / "losses.json").read_text())
    before, after = results.pop("ddp")
    assert abs(after - before) > 1
    for losses in results.values():
        assert losses == pytest.approx([before, after], rel=1e-6)
