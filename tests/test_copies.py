"""Copies made by tools/copy_script.py work without the repository."""

import subprocess
import sys

import pytest
from conftest import ROOT, launch, losses, metrics, status, weights

SHORT = {  # flags for short texts
    "gpt2_fsdp.py": ["--dataset", "docstrings", "--block-size", "32"],
    "T5_training.py": ["--dataset", "docstrings", "--source-length", "32", "--target-length", "8",
                       "--rouge-samples", "0"],
    "llama_fsdp.py": ["--max-seq-length", "64", "--no-packing"],
}  # fmt: skip


@pytest.mark.parametrize("script", SHORT)
def test_copied_script_trains_resumes_and_exports(script, tmp_path):
    """The copy is in an empty directory, and its adapter modules are deleted."""
    copy = tmp_path / "copy"
    command = [sys.executable, ROOT / "tools/copy_script.py", script, copy]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].endswith("lines in all")
    again = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert again.returncode == 1 and "is not empty" in again.stderr

    for path in (*copy.glob("runtime/adapters.py"), *copy.glob("runtime/nf4.py")):
        path.unlink()
    output = tmp_path / "output"
    flags = ["--model-name", "tiny", "--num-train-samples", "16", "--num-val-samples", "4",
             "--log-every", "1", "--output-dir", output, *SHORT[script]]  # fmt: skip
    for steps in (2, 3):
        launch(0, copy / script, *flags, "--max-steps", steps, cwd=copy)
        assert status(output) == "finished"
    assert [line["step"] for line in metrics(output, "start")] == [0, 2]
    assert list(losses(output)) == [1, 2, 3]
    assert len(weights(output / "final")) > 20
