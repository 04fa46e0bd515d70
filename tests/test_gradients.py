"""Gradients of the head in bf16, and DDP's gradients as they lie in its buckets."""

from pathlib import Path

import pytest
import torch
from conftest import launch
from gradients_worker import IN_BUCKETS, head_gradient_error


def test_head_gradient_in_bf16_is_within_one_percent():
    """test_gpu.py repeats it on CUDA, where linear_cross_entropy is less accurate."""
    assert head_gradient_error("cpu") < 0.01


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, gpt2_directory: Path) -> list[dict]:
    """Return the results of gradients_worker.py by rank."""
    path = tmp_path_factory.mktemp("gradients")
    launch(2, "tests/workers/gradients_worker.py", path / "found.pt", gpt2_directory, path / "run")
    return torch.load(path / "found.pt")


@pytest.mark.parametrize("name", IN_BUCKETS)
def test_ddp_gradients_are_views_of_its_buckets(name, ranks):
    for found in ranks:
        found = found[f"in buckets, {name}"]
        for one, other in zip(found["ours"], found["plain"], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        storages, size = found["ours, storages"]
        alone, same_size = found["plain, storages"]
        parameters = found["ours"][2]
        assert alone == len(parameters)
        assert storages <= 2
        assert size == same_size == 4 * sum(p.numel() for p in parameters)
