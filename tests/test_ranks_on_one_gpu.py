"""Train with two and four ranks on one GPU, or without one on CPU tensors, through the backend of
tests/gpu/staged.py: losses, a kill, a resume with another number of ranks, and the export."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import SCRIPTS, launch, losses, metrics, weights
from filelock import FileLock

if not shutil.which("g++"):
    pytest.skip("no g++, which builds the backend", allow_module_level=True)

VARIANTS = {  # number of ranks and flags
    "fsdp1": (2, []),
    "fsdp2": (2, ["--fsdp", "2"]),
    "fsdp1 hybrid": (4, ["--strategy", "hybrid_shard", "--shard-group-size", "2"]),
    "fsdp2 hybrid": (4, ["--strategy", "hybrid_shard", "--shard-group-size", "2", "--fsdp", "2"]),
    "ddp": (2, ["--strategy", "ddp"]),
    "fsdp1 offload": (2, ["--cpu-offload"]),
    "fsdp2 offload": (4, ["--cpu-offload", "--fsdp", "2"]),
}
STEPS = 6
# On a CPU two launches take half a minute.
QUICK = [("gpt2_fsdp", "fsdp1 hybrid"), ("llama_fsdp", "fsdp2")]
CASES = [  # by variant, so that a run that is cut off has tried each script
    pytest.param(
        script,
        name,
        marks=[] if (script, name) in QUICK else pytest.mark.slow,
        id=f"{name}-{script}-{ranks}ranks",
    )
    for name, (ranks, _) in VARIANTS.items()
    for script in SCRIPTS
]
no_gpu = not torch.cuda.is_available()


@pytest.fixture
def flags(t5_directory, pairs, gpt2_directory, texts, llama_directory, chats) -> dict[str, list]:
    """Return the flags of each script, in fp32 and without dropout, for one global batch."""
    data = {
        "T5_training": [t5_directory, "--dataset", pairs, "--rouge-samples", "0",
                        "--source-length", "64", "--target-length", "16"],
        "gpt2_fsdp": [gpt2_directory, "--dataset", texts[0], "--val-dataset", texts[1],
                      "--block-size", "32"],
        "llama_fsdp": [llama_directory, "--dataset", chats, "--max-seq-length", "128"],
    }  # fmt: skip
    common = ["--global-batch-size", "8", "--batch-size", "8", "--lr", "3e-3", "--log-every", "1",
              "--save-every", "2", "--max-steps", str(STEPS), "--precision", "fp32"]  # fmt: skip
    return {name: ["--model-name", *words, *common] for name, words in data.items()}


@pytest.fixture
def train_on_cpu(flags, tmp_path_factory) -> Callable[[str], Path]:
    """Return a function that returns a script's run of one process on the CPU, made once for all
    workers of pytest-xdist."""
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent

    def train(script: str) -> Path:
        output = directory / f"cpu-{script}"
        with FileLock(f"{output}.lock"):
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
            if not (output / "final").exists():
                launch(0, f"{script}.py", *flags[script], "--output-dir", output, env=environment)
        return output

    return train


def train_on_gpu(
    ranks: int, command: list, output: Path, flags: list, check: bool = True
) -> subprocess.CompletedProcess:
    """Run a command on several ranks of one device."""
    flags = [*command, *flags, "--output-dir", output]
    return launch(ranks, "tests/gpu/staged.py", *flags, check=check)


@pytest.mark.parametrize("script, name", CASES)
def test_losses_equal_those_of_one_process_on_a_cpu(script, name, flags, train_on_cpu, tmp_path):
    ranks, more = VARIANTS[name]
    if no_gpu and "--cpu-offload" in more:
        pytest.skip("offloaded shards are pinned, which needs a GPU")
    reference = train_on_cpu(script)
    expected = losses(reference)
    train_on_gpu(ranks, [f"{script}.py"], tmp_path / "gpu", [*flags[script], *more])
    assert list(expected) == list(range(1, STEPS + 1))
    assert losses(tmp_path / "gpu") == pytest.approx(expected, rel=1e-4)
    assert metrics(tmp_path / "gpu", "start")[0]["world_size"] == ranks
    check_equal_exports(reference, tmp_path / "gpu")


def check_equal_exports(reference: Path, output: Path) -> None:
    """Check that two runs exported the same weights, up to rounding."""
    expected = weights(reference / "final")
    exported = weights(output / "final")
    assert exported.keys() == expected.keys()
    for name, tensor in exported.items():
        error = (tensor.float() - expected[name].float()).norm()
        assert error <= 1e-2 * expected[name].float().norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", ["1", "2"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_bf16_is_near_fp32(script, fsdp, flags, train_on_cpu, tmp_path):
    expected = losses(train_on_cpu(script))
    flags = [*flags[script], "--precision", "bf16", "--fsdp", fsdp]
    train_on_gpu(2, [f"{script}.py"], tmp_path / "gpu", flags)
    assert losses(tmp_path / "gpu") == pytest.approx(expected, abs=0.1)
    assert losses(tmp_path / "gpu") != expected


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", ["1", "2"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_killed_run_resumes_with_another_number_of_ranks(
    script, fsdp, flags, train_on_cpu, tmp_path
):
    reference = train_on_cpu(script)
    command = [*flags[script], "--fsdp", fsdp]
    killed = ["tests/workers/killed.py", script, 1, 4]  # rank 1, before step 4
    assert train_on_gpu(2, killed, tmp_path / "gpu", command, check=False).returncode
    train_on_gpu(4, [f"{script}.py"], tmp_path / "gpu", command)
    assert [start["step"] for start in metrics(tmp_path / "gpu", "start")] == [0, 2]
    assert losses(tmp_path / "gpu") == pytest.approx(losses(reference), rel=1e-4)
    check_equal_exports(reference, tmp_path / "gpu")


@pytest.mark.gpu
@pytest.mark.skipif(no_gpu, reason="no CUDA device")
def test_ranks_share_the_gpu(flags, tmp_path):
    """Otherwise the tests above would show nothing about CUDA."""
    train_on_gpu(2, ["gpt2_fsdp.py"], tmp_path, flags["gpt2_fsdp"])
    assert metrics(tmp_path, "start")[0]["device"] == "cuda"
