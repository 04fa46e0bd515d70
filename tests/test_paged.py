"""Test bitsandbytes' paged AdamW: ten steps, and resumes from its checkpoints."""

from pathlib import Path

import pytest
import torch
from in_process import start
from parity import check_parity, reference, run_worker
from ten_steps import PAGED
from transformers import LlamaForCausalLM

import llama_fsdp

pytest.importorskip("bitsandbytes")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, llama_directory: Path, chats: Path) -> dict:
    """Return two ranks' results for each variant, at a global batch of 8 sequences."""
    path = tmp_path_factory.mktemp("results") / "two.pt"
    return run_worker(2, path, llama_directory, [chats], PAGED)


@pytest.mark.parametrize("variant", PAGED)
def test_ten_steps_equal_plain_pytorch_and_resume(variant, results, llama_directory):
    """A resume is exact with the same optimizer, and close with PyTorch's."""
    model = LlamaForCausalLM.from_pretrained(llama_directory, dtype=torch.float32)
    check_parity(results[variant], reference(model, results[variant]["rows"]))
    losses, parameters = results[variant]["resume"]["uninterrupted"]
    resumed, resumed_parameters = results[variant]["resume"]["paged"]
    assert losses == resumed and len(losses) == 3
    for one, other in zip(parameters, resumed_parameters, strict=True):
        assert torch.equal(one, other)
    assert results[variant]["resume"]["adamw"][0] == pytest.approx(losses, abs=1e-5)


@pytest.mark.parametrize("flags", [["--fsdp", "2"], ["--lora-rank", "4"]])
def test_fsdp2_and_adapters_are_refused(flags, capfd):
    assert start(llama_fsdp, "--optimizer", "paged_adamw_32bit", *flags) == 1
    assert "needs --fsdp 1, and no --lora-rank: it rejects DTensors" in capfd.readouterr().err
