"""Scripts killed at random times, again and again: what comes out is as if nothing was."""

from pathlib import Path

import pytest
from chaos import chaos

SCRIPTS = ["T5_training.py", "gpt2_fsdp.py", "llama_fsdp.py"]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("fsdp", ["1", "2"])
def test_killed_five_times(script: str, fsdp: str, tmp_path: Path) -> None:
    """Equal to the last bit."""
    flags = ["--max-steps", "30", "--fsdp", fsdp]
    assert chaos(script, flags, tmp_path, kills=5, seed=2)["kills"] >= 3


@pytest.mark.slow
def test_fsdp1_and_2_in_turn(tmp_path: Path) -> None:
    """Each start goes on where the other was killed."""
    flags = ["--max-steps", "30"]
    found = chaos("gpt2_fsdp.py", flags, tmp_path, kills=5, seed=3, alternate=True)
    assert found["kills"] >= 3
