"""--compile on a CPU: single blocks with inductor, whole scripts (slow) and refused flags.

test_t5.py, test_gpt2.py and test_llama.py run whole scripts with traced but not compiled graphs.
"""

import copy
import importlib
import shutil

import pytest
import torch
import transformers
from conftest import launch, losses, weights
from torch._dynamo.utils import counters

import gpt2_fsdp
import policies
from benchmarks.driven import parse_flags
from tools import memory_estimator

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
SMALL = {  # one block in a stack
    "T5_training": transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0),
    "gpt2_fsdp": transformers.GPT2Config(
        vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=1,
        eos_token_id=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "llama_fsdp": transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(
    "name", ["gpt2_fsdp", "llama_fsdp", pytest.param("T5_training", marks=pytest.mark.slow)]
)
def test_compiled_block_equals_eager(name):
    """Inductor compiles one block in seconds and caches it."""
    script = importlib.import_module(name)
    torch.manual_seed(0)
    eager = memory_estimator.model_class(script)(SMALL[name]).train()
    compiled = copy.deepcopy(eager)
    stack = compiled.decoder if name == "T5_training" else compiled
    policies.compile_blocks(stack, script.BLOCKS)
    ids = torch.arange(24).reshape(2, 12)
    inputs = {"decoder_input_ids": ids} if name == "T5_training" else {}
    results = []
    counters.clear()
    for model in (eager, compiled):
        logits = model(input_ids=ids, use_cache=False, **inputs).logits
        logits.logsumexp(-1).sum().backward()
        results.append([logits.detach(), *(p.grad for p in model.parameters())])
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert counters["inductor"]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("fsdp", ["1", "2"])
@pytest.mark.parametrize("script", SMALL)
def test_compiled_scripts_train_like_eager_ones(
    script, fsdp, t5_directory, pairs, gpt2_directory, texts, llama_directory, chats, tmp_path
):
    """FSDP with recomputation. T5 takes minutes because its batches have several lengths."""
    data = {
        "gpt2_fsdp": ["--model-name", gpt2_directory, "--dataset", texts[0],
                      "--val-dataset", texts[1], "--block-size", "32"],
        "llama_fsdp": ["--model-name", llama_directory, "--dataset", chats,
                       "--max-seq-length", "64", "--no-packing"],
        "T5_training": ["--model-name", t5_directory, "--dataset", pairs,
                        "--rouge-samples", "0", "--source-length", "40", "--target-length", "8"],
    }  # fmt: skip
    for flag in ("--no-compile", "--compile"):
        command = [*data[script], "--max-steps", "4", "--log-every", "1", "--batch-size", "2"]
        command += [flag, "--fsdp", fsdp, "--activation-checkpointing", "--export-dtype", "fp32"]
        launch(2, f"{script}.py", *command, "--output-dir", tmp_path / flag, timeout=3600)
    eager, compiled = tmp_path / "--no-compile", tmp_path / "--compile"
    for event in ("train", "val"):
        expected = losses(eager, event)
        assert losses(compiled, event) == pytest.approx(expected, abs=1e-5)
    expected = weights(eager / "final")
    exported = weights(compiled / "final")
    assert exported.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(exported[name], tensor, rtol=0, atol=1e-4)


def parse_error(flags: list[str], capsys: pytest.CaptureFixture) -> str:
    """Parse flags that a script refuses, and return its one-line error message."""
    with pytest.raises(SystemExit) as end:
        parse_flags(gpt2_fsdp, ["--model-name", "tiny", "--dataset", "docstrings", *flags])
    assert end.value.code == 1
    (message,) = capsys.readouterr().err.strip().splitlines()
    return message


def test_compile_refuses_unsupported_accumulation(capsys, monkeypatch):
    flags = ["--compile", "--gradient-accumulation-steps", "2"]
    for more in ([], ["--accumulate-no-sync"], ["--strategy", "no_shard"]):
        assert "--accumulate-no-sync on two" in parse_error([*flags, *more], capsys)
    command = ["--model-name", "tiny", "--dataset", "docstrings", *flags]
    parse_flags(gpt2_fsdp, [*command, "--strategy", "ddp"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    parse_flags(gpt2_fsdp, [*command, "--accumulate-no-sync"])
