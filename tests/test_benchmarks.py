"""The benchmark programs run on two CPU processes and print their tables."""

import re
import subprocess
import sys
import time

import pytest
from conftest import ROOT


@pytest.mark.slow
def test_compare_strategies() -> None:
    """Within three minutes; FULL_SHARD holds half of what DDP does, and DDP is 1.00 of DDP."""
    start = time.monotonic()
    command = [sys.executable, ROOT / "benchmarks/compare_strategies.py", "--steps", "3"]
    table = subprocess.check_output(command, text=True)
    assert time.monotonic() - start < 180
    rows = {
        name: [float(cell.replace(",", "")) for cell in cells.strip("| ").split("|")]
        for name, cells in re.findall(r"^\| (ddp|shard_grad_op|full_shard) \|(.*)\|$", table, re.M)
    }
    assert rows.keys() == {"ddp", "shard_grad_op", "full_shard"}
    assert rows["ddp"][-1] == 1.0
    for column in (1, 2, 3):  # parameters, gradients, optimizer
        assert rows["full_shard"][column] == pytest.approx(rows["ddp"][column] / 2, abs=0.1)


@pytest.mark.slow
def test_chunked_loss() -> None:
    """On small sizes every variant gives the same loss."""
    sizes = ["--tokens", "64", "--width", "16", "--vocabulary", "100"]
    table = subprocess.check_output(
        [sys.executable, ROOT / "benchmarks/chunked_loss.py", *sizes], text=True
    )
    losses = [float(line.split("|")[-2]) for line in table.splitlines() if "0." in line]
    assert len(losses) == 6 and max(losses) - min(losses) < 1e-5
