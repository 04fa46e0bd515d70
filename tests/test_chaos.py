"""Scripts that come to harm in every phase: what comes out is as if nothing had been."""

import shutil
from pathlib import Path

import pytest
from chaos import PHASES, Launch, chaos

SCRIPTS = ["T5_training.py", "gpt2_fsdp.py", "llama_fsdp.py"]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("fsdp", ["1", "2"])
def test_killed_in_every_phase(script: str, fsdp: str, tmp_path: Path) -> None:
    """Equal to the last bit."""
    found = chaos(Launch(script, ["--fsdp", fsdp]), tmp_path, ["SIGKILL rank 1"], PHASES, seed=2)
    assert len(found) >= 8


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
def test_files_that_fail_or_are_slow(tmp_path: Path) -> None:
    """For some seconds, in a save and in the export."""
    launch = Launch("gpt2_fsdp.py", ["--fsdp", "2"])
    found = chaos(launch, tmp_path, ["EIO", "slow files"], ["save", "export"], seed=4)
    assert len(found) == 4
