"""Scripts that come to harm in every phase: what comes out is as if nothing had been."""

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
def test_fsdp1_and_2_in_turn(tmp_path: Path) -> None:
    """Each start goes on where the other was killed."""
    launch = Launch("gpt2_fsdp.py", [])
    found = chaos(launch, tmp_path, ["SIGKILL all"], PHASES, seed=3, alternate=True)
    assert len(found) >= 8
