"""The commands that the README and the Makefile give, run as they stand but shorter."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, launch, metrics

README = (ROOT / "README.md").read_text()


def test_demo_command(tmp_path: Path) -> None:
    """`make demo` for twelve steps: the loss falls, ROUGE and three examples are printed."""
    printed = subprocess.check_output(
        ["make", "--no-print-directory", "-n", "-B", "demo"], cwd=ROOT, text=True
    )
    command = shlex.split(printed[printed.index("T5_training.py") :].replace("\\\n", " "))
    short = ["--max-steps", "12", "--output-dir", tmp_path, "--target-length", "16"]
    result = launch(2, *command, *short)
    assert all(result.stdout.count(word) == 3 for word in ("source:", "reference:", "generated:"))
    (done,) = metrics(tmp_path, "done")
    assert {"rouge1", "rouge2", "rougeL"} <= done.keys()
    val = [line["loss"] for line in metrics(tmp_path, "val")]
    assert val[-1] <= 0.75 * val[0]  # 120 steps reach 0.4
    assert str(tmp_path / "final") in result.stdout


def test_readme_snippet_uses_final(t5_directory: Path, tmp_path: Path) -> None:
    """The Python block, on a model that lies where it says."""
    (tmp_path / "output").mkdir()
    (tmp_path / "output/final").symlink_to(t5_directory)
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


@pytest.mark.parametrize("script", ["T5_training.py", "gpt2_fsdp.py"])
def test_readme_cpu_command_from_another_directory(script: str, tmp_path: Path) -> None:
    """The by-hand command, cut to one step, started elsewhere and without torchrun."""
    line = next(line for line in README.splitlines() if line.startswith(f"python {script}"))
    short = ["--max-steps", 1, "--num-train-samples", 40, "--num-val-samples", 4]
    flags = [*shlex.split(line)[2:], *short, "--output-dir", "here"]
    launch(0, script, *flags, cwd=tmp_path)
    assert (tmp_path / "here/final/config.json").is_file()


def test_flags_in_the_readme_exist() -> None:
    """Every --flag named in the README is one of a program's, torchrun's or pip's."""
    known = {"--nnodes", "--nproc", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id",
             "--no-build-isolation"}  # fmt: skip
    for program in ("T5_training.py", "gpt2_fsdp.py", "benchmarks/compare_strategies.py"):
        text = subprocess.check_output([sys.executable, ROOT / program, "--help"], text=True)
        known |= set(re.findall(r"--[a-z][a-z-]+", text))
    assert set(re.findall(r"--[a-z][a-z-]+", README)) <= known


@pytest.mark.parametrize("name", ["policies.py", "checkpointing.py", "summarization_dataset.py"])
def test_shared_modules_import_nothing_of_ours(name: str) -> None:
    """So that they can be copied along with one script."""
    ours = {path.stem for path in ROOT.glob("*.py")}
    imported = re.findall(r"^(?:from|import) (\w+)", (ROOT / name).read_text(), re.MULTILINE)
    assert not ours & set(imported)
