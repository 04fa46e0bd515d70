"""Gradients as they are clipped under FSDP1, and as they lie in DDP's buckets: on four ranks."""

from pathlib import Path

import pytest
import torch
from conftest import launch
from gradients_worker import BAD, CLIPPED, IN_BUCKETS, head_gradient_error


def test_head_gradient_in_bf16_is_within_one_percent():
    """test_gpu.py repeats it on CUDA, where linear_cross_entropy is less accurate."""
    assert head_gradient_error("cpu") < 0.01


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, gpt2_directory: Path) -> list[dict]:
    """Return the results of gradients_worker.py by rank."""
    path = tmp_path_factory.mktemp("gradients")
    launch(4, "tests/workers/gradients_worker.py", path / "found.pt", gpt2_directory, path / "run")
    return torch.load(path / "found.pt")


def check_clipped(name: str, found: dict) -> None:
    """Compare with FSDP's clipping for a largest norm that clips, and one that does not."""
    for largest in (0.01, 1e3):
        norm, gradients, _ = found["ours", largest]
        expected, theirs, _ = found["FSDP", largest]
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0, equal_nan=True)
        assert norm.isfinite() == (name not in BAD)
        assert name in BAD or 0.01 < norm < 1e3
        for one, other in zip(gradients, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", CLIPPED)
def test_clipping_equals_fsdp_with_fewer_operations(name, ranks):
    for found in ranks:
        found = found[f"clipped, {name}"]
        check_clipped(name, found)
        assert found["ours", 0.01][2] < 12
        if name != "no_shard":  # whose own is torch.nn.utils', too
            assert found["FSDP", 0.01][2] > 2 * len(found["FSDP", 0.01][1]) > 0


def test_rank_without_gradients_gets_the_same_norm(ranks):
    assert [found["one parameter"]["has"] for found in ranks] == [True, False, False, False]
    assert {found["one parameter"]["norm"].item() for found in ranks} == {1.0}


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
