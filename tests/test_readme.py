"""The commands that the README and the Makefile give, run as they stand but shorter."""

import importlib
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, launch, metrics

import memory_estimator
from benchmarks import demo
from runtime import ranks

README = (ROOT / "README.md").read_text()
SCRIPTS = ("T5_training", "gpt2_fsdp", "llama_fsdp")
BENCHMARKS = ("run_all", "compare_strategies")


def run_demo(directory: Path, *flags: object) -> str:
    """Return what `make demo` prints, with more flags; it runs in `directory`/output/demo."""
    command = ["make", "--no-print-directory", "-n", "-B", "demo"]
    recipe = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()[-1]
    words = shlex.split(recipe.replace("output/demo", f"{directory}/output/demo"))
    words = [sys.executable, *words[1:], *map(str, flags)]
    return subprocess.check_output(words, cwd=ROOT, text=True, timeout=900)


def ask_the_demo(directory: Path) -> str:
    """Return the answer of the demo's model to the README's question."""
    pattern = r"^python (-m runtime.generate output/demo/final .*)$"
    (line,) = re.findall(pattern, README, re.MULTILINE)
    command = shlex.split(line.replace("output/", f"{directory}/output/"), comments=True)
    return subprocess.check_output([sys.executable, *command], cwd=ROOT, text=True)


def test_demo_command(tmp_path: Path) -> None:
    """`make demo`, of few dates: it evaluates, trains, evaluates, shows examples and a picture; a
    second one shows the result. The README's command talks to the model."""
    pytest.importorskip("matplotlib")
    run_demo(tmp_path, "--rows", 256, "--epochs", 1)
    printed = run_demo(tmp_path)
    assert "T5_training.py" not in printed
    output = tmp_path / "output/demo"
    assert all(printed.count(word) == 3 for word in ("given:", "before:", "after:"))
    assert printed.endswith("losses.png\n") and (output / "losses.png").is_file()
    for directory in (output / "before", output):
        assert len((directory / "predictions.jsonl").read_text().splitlines()) == demo.HELD_OUT
    rows, held_out = demo.make_rows(12_000)
    assert not {row["date"] for row in rows} & {row["date"] for row in held_out}
    val = [line["loss"] for line in metrics(output, "val")]
    assert val[-1] <= 0.9 * val[0]
    ask_the_demo(tmp_path)


@pytest.mark.slow
def test_demo_persuades(tmp_path: Path) -> None:
    """It reads no unseen date before, and four of five after; the README's among them."""
    pytest.importorskip("matplotlib")
    before, after = re.search(r"training: (\d+)%, after it: (\d+)%", run_demo(tmp_path)).groups()
    assert int(before) == 0 and int(after) >= 80
    assert ask_the_demo(tmp_path) == "1987-03-03\n"


@pytest.mark.parametrize("script", [f"{name}.py" for name in SCRIPTS])
def test_readme_cpu_command_from_another_directory(script: str, tmp_path: Path) -> None:
    """The by-hand command, cut to one step, started elsewhere and without torchrun."""
    start = f"OMP_NUM_THREADS=2 python {script}"
    lines = README.replace("\\\n", " ").splitlines()
    line = next(line for line in lines if line.startswith(start))
    short = ["--max-steps", 1, "--num-train-samples", 40, "--num-val-samples", 4]
    flags = [*shlex.split(line)[3:], *short, "--output-dir", "here"]
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
    ours, compared = README.split("## Coming from")[0], README.split("## FSDP1 or 2")[1]
    named = set(re.findall(r"--[a-z][a-z-]+", ours + compared))
    assert named and named <= known
    table = README.split("## Coming from")[1].split("## FSDP1 or 2")[0]
    here = "".join(row.split("|")[4] for row in table.splitlines() if row.startswith("|"))
    named = set(re.findall(r"--[a-z][a-z-]+", here))
    assert named and named <= known


def test_what_to_set_where_ranks_are_apart() -> None:
    """The error names the same variables as the troubleshooting."""
    names = re.findall(r"\w+_SOCKET_IFNAME", ranks.APART)
    assert len(names) == 2 and all(f"`{name}`" in README for name in names)


def test_every_command_is_marked_or_run_by_a_test() -> None:
    """Those that need GPUs or a hub say so; each other kind has its test."""
    blocks = "".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL))
    lines = list(filter(None, blocks.replace("\\\n", " ").splitlines()))
    assert lines
    run = (
        "make demo",  # test_demo_command
        "python -m runtime.generate output/demo/final",  # test_demo_command
        ". .venv/bin/activate", "pip install -r",  # make test
        "OMP_NUM_THREADS=2 python T5_training.py --model-name tiny",
        "OMP_NUM_THREADS=2 python gpt2_fsdp.py --model-name tiny",
        "OMP_NUM_THREADS=2 python llama_fsdp.py --model-name tiny",  # test_readme_cpu_command
        "OMP_NUM_THREADS=1 torchrun --nnodes 1 --nproc_per_node 2 T5_training.py",  # the demo's
        "python memory_estimator.py",  # test_estimates_in_the_readme
        "python benchmarks/run_all.py --preset cpu",  # its programs, in test_benchmarks
        "python benchmarks/side_by_side.py", "python benchmarks/compare_strategies.py",
        "python benchmarks/plot_runs.py",
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


def test_estimates_of_adapters_in_the_readme() -> None:
    """The same of the table of LoRA and QLoRA."""
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    cells = r"\| (Q?)LoRA, (\d+)B \| (\d) of (\d+) GB \| (.*) \| (.*) \| (.*) \|"
    rows = re.findall(cells, README)
    assert len(rows) == 5
    for in_4bit, size, gpus, memory, *figures in rows:
        flags = ["--model-name", f"llama-2-{size}b", "--lora-rank", "16"]
        flags += ["--gpus-per-node", gpus, "--gpu-memory-gb", memory]
        args = memory_estimator.parse_args([*flags, *(["--load-in-4bit"] * bool(in_4bit))])
        model = memory_estimator.read_model(args)
        plain, offloaded = (
            memory_estimator.estimate(model, args, "full_shard", offload, True, "adamw")
            for offload in (False, True)
        )
        sizes = [row["peak_bytes"] for row in (plain, offloaded)]
        sizes.append(offloaded["cpu_bytes_per_node"])
        expected = [f"{size / 1e9:,.1f}" for size in sizes]
        if not plain["fits"]:
            expected[0] += ": too much"
        assert offloaded["fits"] and figures == expected


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_helps(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """At 80 columns no line is wider; the first 40 have commands and what most runs set."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        importlib.import_module(name).parse_args(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    first = "\n".join(lines[:40])
    assert f"torchrun --nnodes 1 --nproc_per_node 8 {name}.py" in first
    for flag in ("--model-name", "--output-dir", "--batch-size", "--strategy", "--fsdp"):
        assert flag in first
    text = " ".join(" ".join(lines).split())
    assert "--lr X peak learning rate (default 5e-05)" in text or name != "llama_fsdp"
