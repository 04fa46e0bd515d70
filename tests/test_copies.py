"""Copies made by tools/copy_script.py work without the repository."""

import subprocess
import sys

import pytest
from conftest import ROOT, launch, losses, metrics, status, weights
from test_change_a_script import Z_LOSS, apply_diffs

from tools.copy_script import OPTIONS

SHORT = {  # flags for short texts
    "gpt2_fsdp.py": ["--dataset", "docstrings", "--block-size", "32"],
    "T5_training.py": ["--dataset", "docstrings", "--source-length", "32", "--target-length", "8",
                       "--rouge-samples", "0"],
    "llama_fsdp.py": ["--max-seq-length", "64", "--no-packing"],
}  # fmt: skip


@pytest.mark.parametrize("script", SHORT)
def test_copied_script_trains_resumes_and_exports(script, tmp_path):
    """The copy is in an empty directory."""
    copy = tmp_path / "copy"
    command = [sys.executable, ROOT / "tools/copy_script.py", script, copy]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith(f"Next: cd {copy}; python {script}")
    for name in ("LICENSE", "README.md", "requirements.txt", "launch.slurm", "tools/generate.py"):
        assert (copy / name).is_file()
    assert ("rouge-score" in (copy / "requirements.txt").read_text()) == (script[0] == "T")
    assert f"python {script} --model-name tiny" in (copy / "README.md").read_text()
    again = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert again.returncode == 1 and "is not empty" in again.stderr

    output = tmp_path / "output"
    flags = ["--model-name", "tiny", "--num-train-samples", "16", "--num-val-samples", "4",
             "--log-every", "1", "--output-dir", output, *SHORT[script]]  # fmt: skip
    for steps in (2, 3):
        launch(0, copy / script, *flags, "--max-steps", steps, cwd=copy)
        assert status(output) == "finished"
    assert [line["step"] for line in metrics(output, "start")] == [0, 2]
    assert list(losses(output)) == [1, 2, 3]
    assert len(weights(output / "final")) > 20


ALONE = [
    ("llama_fsdp.py", "lora"), ("llama_fsdp.py", "attention"), ("llama_fsdp.py", "paged"),
    ("T5_training.py", "rouge"), ("gpt2_fsdp.py", "trackers"), ("gpt2_fsdp.py", "prepared"),
]  # fmt: skip


@pytest.mark.parametrize(
    "script, without",
    [pytest.param(script, OPTIONS, marks=pytest.mark.ci) for script in SHORT]
    + [pytest.param(script, [option], marks=pytest.mark.slow) for script, option in ALONE],
)
def test_copy_without_optional_parts_trains_and_has_no_trace_of_them(script, without, tmp_path):
    copy = tmp_path / "copy"
    command = [sys.executable, str(ROOT / "tools/copy_script.py"), script, str(copy)]
    subprocess.run([*command, "--without", *without], check=True, capture_output=True)
    ruff = ["ruff", "check", "--config", str(ROOT / "pyproject.toml"), str(copy)]
    subprocess.run([sys.executable, "-m", *ruff], check=True)
    files = {"lora": "adapters", "attention": "attention", "paged": "paged", "rouge": "rouge"}
    for option in without:
        assert not (copy / f"runtime/{files.get(option)}.py").exists()
    flags = ["--model-name", "tiny", "--num-train-samples", 16, "--num-val-samples", 4]
    flags += [
        x for x in SHORT[script] if "rouge" not in without or x not in ("--rouge-samples", "0")
    ]
    launch(0, copy / script, *flags, "--max-steps", 2, "--output-dir", tmp_path / "out", cwd=copy)
    assert status(tmp_path / "out") == "finished" and len(weights(tmp_path / "out/final")) > 20


@pytest.mark.parametrize(
    "script, edit",
    [
        pytest.param("gpt2_fsdp.py", "", marks=pytest.mark.ci),
        pytest.param("T5_training.py", "", marks=pytest.mark.slow),
        pytest.param("llama_fsdp.py", "", marks=pytest.mark.slow),
        pytest.param("llama_fsdp.py", Z_LOSS, marks=pytest.mark.slow),
    ],
)
def test_the_test_of_a_copy_passes_also_after_an_edit(script, edit, tmp_path):
    copy = tmp_path / "copy"
    command = [sys.executable, str(ROOT / "tools/copy_script.py"), script, str(copy)]
    subprocess.run(command, check=True, capture_output=True)
    (copy / script).write_text(apply_diffs(script.removesuffix(".py"), edit))
    test = [sys.executable, "-m", "pytest", "-q", "test_copy.py"]
    result = subprocess.run(test, cwd=copy, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
