"""What only a GPU can show; on one GPU as one process, on more as two."""

from pathlib import Path

import pytest
import torch
from conftest import launch, losses, metrics, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
RANKS = min(2, torch.cuda.device_count())


def run(script: str, directory: Path, output: Path, data: list, *flags: str) -> None:
    """Forty steps of a small model, with a resume after the first twenty."""
    common = ["--model-name", directory, *data, "--output-dir", output, "--lr", "3e-3",
              "--log-every", "1", "--save-every", "20", "--track-memory"]  # fmt: skip
    for steps in ("20", "40"):
        launch(RANKS, script, *common, *flags, "--max-steps", steps)
    found = losses(output)
    assert list(found) == list(range(1, 41))
    assert found[40] < 0.9 * found[1]
    assert all(tensor.isfinite().all() for tensor in weights(output / "final").values())
    assert metrics(output, "train")[-1]["peak_memory_mb"] > 0


FLAGS = [
    ["--precision", "auto"],
    ["--precision", "bf16-fp32-reduce", "--activation-checkpointing"],
    ["--precision", "fp16"],
    ["--precision", "bf16", "--strategy", "shard_grad_op"],
    ["--precision", "bf16", "--strategy", "ddp"],
    ["--precision", "fp16", "--strategy", "ddp"],
    ["--precision", "bf16", "--cpu-offload"],
]


@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
def test_t5(flags: list[str], t5_directory: Path, pairs: Path, tmp_path: Path) -> None:
    """Mixed precision, scaler, offload, generation and export on CUDA."""
    data = ["--dataset", pairs, "--num-train-samples", "0", "--rouge-samples", "3"]
    run("T5_training.py", t5_directory, tmp_path, [*data, "--target-length", "16"], *flags)


@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
def test_gpt2(flags: list[str], gpt2_directory: Path, texts: tuple, tmp_path: Path) -> None:
    """The same, with model FLOP/s; and MFU on a GPU whose peak is known."""
    data = ["--train-file", texts[0], "--val-file", texts[1], "--block-size", "32"]
    run("gpt2_fsdp.py", gpt2_directory, tmp_path, data, *flags)
    line = metrics(tmp_path, "train")[-1]
    assert line["tflops_per_gpu"] > 0
    if "H200" in torch.cuda.get_device_name():
        assert 0 < line["mfu"] < 1


def test_auto_is_bf16_where_the_gpu_has_it(
    gpt2_directory: Path, texts: tuple, tmp_path: Path
) -> None:
    """And the run says so."""
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU has no bf16")
    data = ["--train-file", texts[0], "--val-file", texts[1], "--block-size", "32"]
    command = ["--model-name", gpt2_directory, *data, "--output-dir", tmp_path, "--max-steps", "1"]
    launch(RANKS, "gpt2_fsdp.py", *command)
    assert metrics(tmp_path, "start")[0]["arguments"]["precision"] == "bf16"
