"""Scripts that come to harm in every phase: what comes out is as if nothing had been."""

import shutil

import pytest
from chaos import PHASES, Launch, chaos

SCRIPTS = ["T5_training.py", "gpt2_fsdp.py", "llama_fsdp.py"]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("fsdp", ["1", "2"])
def test_run_killed_in_every_phase_ends_bit_for_bit(script, fsdp, tmp_path):
    found = chaos(Launch(script, ["--fsdp", fsdp]), tmp_path, ["SIGKILL rank 1"], PHASES, seed=2)
    assert len(found) >= 8


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
def test_failing_and_slow_files_change_nothing(tmp_path):
    launch = Launch("gpt2_fsdp.py", ["--fsdp", "2"])
    found = chaos(launch, tmp_path, ["EIO", "slow files"], ["save", "export"], seed=4)
    assert len(found) == 4


@pytest.mark.slow
def test_torchrun_restarts_after_a_killed_rank(tmp_path):
    launch = Launch("gpt2_fsdp.py", [], restarts=True)
    found = chaos(launch, tmp_path, ["SIGKILL rank 1"], ["save"], seed=5)
    assert [outcome["status"] for outcome in found] == ["finished"]
