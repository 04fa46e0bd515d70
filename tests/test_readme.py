"""The commands that the README and the Makefile give, run as they stand but shorter."""

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, launch, metrics

import memory_estimator

README = (ROOT / "README.md").read_text()
SCRIPTS = ("T5_training", "gpt2_fsdp", "llama_fsdp")
BENCHMARKS = ("run_all", "compare_strategies")


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


@pytest.mark.parametrize("script", [f"{name}.py" for name in SCRIPTS])
def test_readme_cpu_command_from_another_directory(script: str, tmp_path: Path) -> None:
    """The by-hand command, cut to one step, started elsewhere and without torchrun."""
    line = next(line for line in README.splitlines() if line.startswith(f"python {script}"))
    short = ["--max-steps", 1, "--num-train-samples", 40, "--num-val-samples", 4]
    flags = [*shlex.split(line)[2:], *short, "--output-dir", "here"]
    launch(0, script, *flags, cwd=tmp_path)
    assert (tmp_path / "here/final/config.json").is_file()


def test_flags_in_the_readme_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Every --flag named in the README is one of a program's, or of what it compares with."""
    known = {"--nnodes", "--nproc", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--nodes",
             "--no-build-isolation", "--signals-to-handle", "--shutdown-timeout",
             "--max-restarts"}  # fmt: skip
    folder = ROOT / "benchmarks"
    known |= set(re.findall(r'"(--[a-z-]+)"', (folder / "plot_runs.py").read_text()))
    monkeypatch.syspath_prepend(folder)
    programs = [ROOT / f"{name}.py" for name in (*SCRIPTS, "memory_estimator", "tests/chaos")]
    for program in (*programs, *(folder / f"{name}.py" for name in BENCHMARKS)):
        monkeypatch.setattr(sys, "argv", [str(program), "--help"])
        with pytest.raises(SystemExit):
            runpy.run_path(str(program), run_name="__main__")
        known |= set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    ours, compared = README.split("## Coming from")[0], README.split("**Why FSDP1?**")[1]
    named = set(re.findall(r"--[a-z][a-z-]+", ours + compared))
    assert named and named <= known
    table = README.split("## Coming from")[1].split("**Why FSDP1?**")[0]
    here = "".join(row.split("|")[4] for row in table.splitlines() if row.startswith("|"))
    named = set(re.findall(r"--[a-z][a-z-]+", here))
    assert named and named <= known


def test_every_command_is_marked_or_run_by_a_test() -> None:
    """Those that need GPUs or a hub say so; each other kind has its test."""
    blocks = "".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL))
    lines = list(filter(None, blocks.replace("\\\n", " ").splitlines()))
    assert lines
    run = (
        "make demo",  # test_demo_command, and as test_readme_cpu_command with torchrun
        "python3 -m venv", "pip install -r",  # make test
        "python T5_training.py --model-name tiny", "python gpt2_fsdp.py --model-name tiny",
        "python llama_fsdp.py --model-name tiny",  # test_readme_cpu_command
        "OMP_NUM_THREADS=1 torchrun --nnodes 1 --nproc_per_node 2 T5_training.py",  # the demo's
        "python memory_estimator.py",  # test_estimates_in_the_readme
        "python benchmarks/run_all.py --preset cpu",  # its programs, in test_benchmarks
        "python benchmarks/compare_strategies.py", "python benchmarks/plot_runs.py",
    )  # fmt: skip
    for line in lines:
        assert re.search(r"# (GPUs|hub)", line) or line.startswith(run), line


def test_estimates_in_the_readme() -> None:
    """The table of GB is what memory_estimator.py says."""
    rows = re.findall(r"^\| `(llama-2-\d+b)` \|(.*)\|$", README, re.MULTILINE)
    assert len(rows) == 3
    for name, cells in rows:
        args = memory_estimator.parse_args(["--model-name", name])
        model = memory_estimator.read_model(args)
        found = {(s, o): memory_estimator.estimate(model, args, s, o, True, "adamw")
                 for s, o in memory_estimator.MODES}  # fmt: skip
        kinds = (
            ("ddp", False),
            ("shard_grad_op", False),
            ("full_shard", False),
            ("full_shard", True),
        )
        expected = [f"{found[kind]['peak_bytes'] / 1e9:,.1f}" for kind in kinds]
        expected.append(str(found["full_shard", False]["smallest_nodes"]))
        assert [cell.strip() for cell in cells.split("|")] == expected
