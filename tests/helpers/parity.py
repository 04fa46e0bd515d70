"""Ten steps of the scripts, compared with plain single-process PyTorch."""

import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import launch
from plain import mean_loss
from ten_steps import parse_args
from transformers import ByT5Tokenizer

from prepare import templates

WORKER = "tests/workers/parity_worker.py"
HYBRID = ["--strategy", "hybrid_shard", "--shard-group-size", "2"]


def run_worker(ranks: int, path: Path, directory: Path, data: Iterable, variants: dict) -> dict:
    """Return the results by variant of the model in `directory` at a global batch of 8."""
    launch(ranks, WORKER, path, directory, *data, 8 // ranks, json.dumps(variants))
    return torch.load(path, weights_only=False)


def reference(model: torch.nn.Module, steps: list[list], is_linear: bool = False) -> dict:
    """Train a model on these samples of ten steps in a plain loop, one text at a time."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return plain_steps(model.train(), groups, steps, is_linear)


def plain_steps(
    model: torch.nn.Module, groups: list[dict], steps: list[list], is_linear: bool = False
) -> dict:
    """Return the losses and norms of ten steps on these samples and the first step's gradient."""
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    rates = torch.linspace(1, 0, 10)
    if not is_linear:
        rates = (1 + torch.cos(torch.pi * (1 - rates))) / 2
    rates = [0.5, *rates.tolist()]  # one step of warm-up
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rates.__getitem__)
    results: dict[str, Any] = {"losses": [], "norms": []}
    for samples in steps:
        loss = mean_loss(model, samples)
        loss.backward()
        trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        results.setdefault("gradient", {n: p.grad.clone() for n, p in trainable})
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        results["norms"].append(norm.item())
        results["losses"].append(loss.item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return results


def check_parity(result: dict, expected: dict) -> None:
    """Check that the losses are within 1e-5 and the first gradient within 1e-5 of its norm."""
    assert len(result["losses"]) == 10
    assert result["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    assert result["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    assert result["gradient"].keys() == expected["gradient"].keys()
    reference_gradient = torch.cat([grad.flatten() for grad in expected["gradient"].values()])
    gradient = torch.cat([result["gradient"][name].flatten() for name in expected["gradient"]])
    assert (gradient - reference_gradient).norm() <= 1e-5 * reference_gradient.norm()


def val_rows(script: str, flags: list) -> dict[str, list[dict]]:
    """Return a script's validation samples, with token ids, by data set. Packs are documents."""
    module = importlib.import_module(script)
    (data,) = (value for name, value in vars(module).items() if name.endswith("_dataset"))
    tokenizer = ByT5Tokenizer(chat_template=templates.LLAMA_2)
    _, sets = data.load(parse_args(module, flags).data, tokenizer)
    rows = {name: getattr(samples, "dataset", samples) for name, samples in sets.items()}
    return {name: list(samples.with_format(None)) for name, samples in rows.items()}


def val_documents(flags: list) -> dict[str, list[dict]]:
    """Return llama_fsdp.py's validation documents by data set."""
    return val_rows("llama_fsdp", flags)


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, documents: list[dict]) -> float:
    """Return the mean loss over the target tokens of documents."""
    return mean_loss(model, documents).item()
