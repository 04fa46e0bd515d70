"""Whole, unmodified scripts on a simulated accelerator that separates device and host memory.

It shows placement and bytes, not speed.
"""

import importlib.util
import json
import shutil

import pytest
from chaos import LENGTHS
from conftest import ROOT, TINY, launch, losses, weights

HAS_TOOLS = shutil.which("g++") and importlib.util.find_spec("ninja")
pytestmark = pytest.mark.skipif(not HAS_TOOLS, reason="needs g++ and ninja")
RUN = "tests/simdev/run.py"
BUILD_SECONDS = 180  # of the simulated device and a launch, on a quiet machine
# Each entry resumes from the checkpoint of the previous one.
CHAIN = [
    ["--precision", "bf16"],
    ["--precision", "bf16", "--cpu-offload"],
    ["--precision", "bf16", "--strategy", "ddp", "--checkpoint-type", "full"],
    ["--precision", "fp16"],
    ["--precision", "fp16", "--strategy", "shard_grad_op", "--checkpoint-type", "full"],
    ["--precision", "fp16", "--cpu-offload"],
    ["--precision", "fp16", "--strategy", "ddp"],
    ["--precision", "fp32", "--strategy", "ddp"],
    ["--fsdp", "2", "--precision", "bf16", "--cpu-offload"],
    ["--fsdp", "2", "--precision", "fp16", "--strategy", "shard_grad_op"],
]  # fmt: skip


CASES = [("gpt2_fsdp.py", CHAIN[::4])]
CASES += [pytest.param(script, CHAIN, marks=pytest.mark.slow) for script in LENGTHS]


@pytest.mark.parametrize("script, chain", CASES)
def test_scripts_resume_across_strategies_and_after_out_of_memory(
    script, chain, tmp_path, monkeypatch
):
    output = tmp_path / "run"
    flags = [*TINY, "--num-train-samples", "64", "--num-val-samples", "8", "--output-dir", output]

    def run(*more: str, memory: float = 0, check: bool = True) -> str:
        monkeypatch.setenv("SIM_BYTES", str(memory))
        command = [RUN, ROOT / script, *flags, *LENGTHS[script], *more]
        result = launch(2, *command, check=check, quiet_seconds=BUILD_SECONDS)
        assert (result.returncode == 0) == check
        return result.stderr

    for number, more in enumerate(chain, start=1):
        run(*more, "--max-steps", str(3 * number))
    history = losses(output)
    steps = 3 * len(chain)
    assert list(history) == list(range(1, steps + 1))
    assert history[steps] < history[1]
    assert all(tensor.isfinite().all() for tensor in weights(output / "final").values())

    more = [*CHAIN[0], "--max-steps", str(steps + 3)]
    assert "error: sim: out of memory" in run(*more, memory=4e6, check=False)
    assert losses(output) == history
    run(*more)
    assert list(losses(output)) == list(range(1, steps + 4))
    run("--export-only", "--cpu-offload")


@pytest.mark.slow
@pytest.mark.parametrize("base", ["16 bits", "4 bits"])
def test_adapters_resume_with_offload(base, tmp_path):
    pytest.importorskip("peft")
    flags = []
    if base == "4 bits":
        pytest.importorskip("bitsandbytes")
        flags = ["--fsdp", "2", "--load-in-4bit"]
    command = [RUN, ROOT / "llama_fsdp.py", *TINY, "--lora-rank", "4",
               "--max-seq-length", "128", "--num-train-samples", "64", "--num-val-samples", "8",
               "--output-dir", tmp_path, *flags]  # fmt: skip
    for number, more in enumerate((["--precision", "bf16"], ["--cpu-offload"]), start=1):
        launch(2, *command, *more, "--max-steps", str(3 * number))
    assert list(losses(tmp_path)) == list(range(1, 7))
    assert (tmp_path / "final/adapter_model.safetensors").is_file()


def test_save_holds_one_tensor_and_pins_nothing_except_under_fsdp1(tmp_path):
    """In bytes per parameter of a rank's shard. A checkpoint has 12."""
    output = tmp_path / "bytes.json"
    worker = "tests/workers/saved_bytes.py"
    launch(2, worker, output, tmp_path, quiet_seconds=BUILD_SECONDS)
    results = json.loads(output.read_text())
    assert 12 <= results["fsdp1"]["host"] < 12.5  # the whole shard
    for kind in ("fsdp2", "ddp"):
        assert 4 / 16 <= results[kind]["host"] < 0.3  # one of 16 tensors
    for result in results.values():
        assert result["pinned"] == result["kept"] == 0
        assert result["equal"]
