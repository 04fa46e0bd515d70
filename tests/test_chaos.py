"""Kills and stops in every phase of a script leave its results bit-for-bit unchanged."""

import pytest
from chaos import LENGTHS, PHASES, Launch, chaos


@pytest.mark.slow
@pytest.mark.parametrize("script", LENGTHS)
@pytest.mark.parametrize("fsdp", ["1", "2"])
@pytest.mark.parametrize("fault", ["SIGKILL rank 1", "SIGTERM torchrun", "SIGUSR1 torchrun"])
def test_run_ended_in_every_phase_resumes_bit_for_bit(script, fsdp, fault, tmp_path):
    launch = Launch(script, ["--fsdp", fsdp, "--save-best"])  # not Llama's default
    outcomes = chaos(launch, tmp_path, [fault], PHASES, seed=2)
    assert len(outcomes) >= 8


@pytest.mark.slow
def test_torchrun_restarts_run_after_killed_rank(tmp_path):
    launch = Launch("gpt2_fsdp.py", [], restarts=True)
    outcomes = chaos(launch, tmp_path, ["SIGKILL rank 1"], ["save"], seed=5)
    assert [outcome["status"] for outcome in outcomes] == ["finished"]
