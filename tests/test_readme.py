"""README.md and docs/*.md, taken together: their commands, flags, links and estimates.

Commands for a CPU are run, here or in the test that is named, as they stand but shorter. Those for
GPUs and the hub are parsed.
"""

import importlib.util
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, launch, metrics

import gpt2_fsdp
import llama_fsdp
import T5_training
from benchmarks import demo
from runtime import attention, ranks
from tools import memory_estimator, preflight

PAGES = {path: path.read_text() for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"))}
TEXT = "\n".join(PAGES.values())
SCRIPTS = ("T5_training", "gpt2_fsdp", "llama_fsdp")
PARSERS: dict[str, Callable[[list[str]], Namespace]] = {
    f"{module.__name__.replace('.', '/')}.py": module.parse_args
    for module in (T5_training, gpt2_fsdp, llama_fsdp, memory_estimator, preflight)
}
EXTRAS = ("peft", "bitsandbytes", "tensorboard", "wandb", "trackio", "rouge_score")
FOLDERS = ("runtime", "benchmarks", "tools")  # their files go by name alone


def commands() -> list[str]:
    """Return the lines of all blocks of bash, each with its comment."""
    blocks = re.findall(r"^```bash\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    return list(filter(None, "".join(blocks).replace("\\\n", " ").splitlines()))


def inline_commands() -> list[str]:
    """Return the commands in backquotes that start a program of PARSERS."""
    found = [" ".join(code.split()) for code in re.findall(r"`(python [\w/]+\.py [^`]+)`", TEXT)]
    return [line for line in found if line.split()[1] in PARSERS]


def needs_more(line: str) -> bool:
    """Tell whether a command is marked as one for GPUs or the hub."""
    return bool(re.search(r"# (GPUs|hub)", line))


def run_demo(directory: Path, *flags: object) -> str:
    """Return what `make demo` prints, with more flags; it runs in `directory`/output/demo."""
    command = ["make", "--no-print-directory", "-n", "-B", "demo"]
    recipe = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()[-1]
    words = shlex.split(recipe.replace("output/demo", f"{directory}/output/demo"))
    words = [sys.executable, *words[1:], *map(str, flags)]
    return subprocess.check_output(words, cwd=ROOT, text=True, timeout=900)


def ask_the_demo(directory: Path) -> str:
    """Return the answer of the demo's model to the question that is asked in the text first."""
    start = "python tools/generate.py output/demo/final "
    line = next(line for line in commands() if line.startswith(start))
    command = shlex.split(line.replace("output/", f"{directory}/output/"), comments=True)
    return subprocess.check_output([sys.executable, *command[1:]], cwd=ROOT, text=True)


def without_numbers(line: str) -> str:
    """Return a line of the screen with N for each number."""
    return re.sub(r"\d[\d.,:]*(e-\d+)?", "N", line)


def test_demo_trains_evaluates_and_draws(tmp_path):
    """The lines that it prints are those of the README."""
    pytest.importorskip("matplotlib")
    first = run_demo(tmp_path, "--rows", 256, "--epochs", 1)
    printed = run_demo(tmp_path)
    readme = PAGES[ROOT / "README.md"]
    said = list(map(without_numbers, first.splitlines()))
    (shown,) = re.findall(r"```text\n(2 x cpu.*?)```", readme, re.DOTALL)
    shown = [line for line in shown.splitlines() if line[0] not in " ."]
    assert len(shown) >= 8
    places = [said.index(without_numbers(line)) for line in shown]
    assert places[:3] == sorted(places[:3]) and places[-1] == max(places)
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
def test_demo_learns_unseen_dates(tmp_path):
    pytest.importorskip("matplotlib")
    before, after = re.search(
        r"dates: (\d+)% correct before training, (\d+)% after", run_demo(tmp_path)
    ).groups()
    assert int(before) == 0 and int(after) >= 80
    assert ask_the_demo(tmp_path) == "1987-03-03\n"


@pytest.mark.parametrize("script", ["T5_training.py", "gpt2_fsdp.py", "llama_fsdp.py"])
def test_cpu_command_runs_from_another_directory(script, tmp_path):
    start = f"python {script} --model-name tiny"
    line = next(line for line in inline_commands() if line.startswith(start))
    short = ["--max-steps", 1, "--num-train-samples", 40, "--num-val-samples", 4]
    flags = [*shlex.split(line)[2:], *short, "--output-dir", "here"]
    launch(0, script, *flags, cwd=tmp_path)
    assert (tmp_path / "here/final/config.json").is_file()


def test_every_command_is_marked_or_run_by_a_test():
    run = (
        "make demo",  # test_demo_trains_evaluates_and_draws
        "make test",
        "python tools/generate.py output/demo/final",  # test_demo_trains_evaluates_and_draws
        ". .venv/bin/activate", "pip install -r",  # make test
        "OMP_NUM_THREADS=1 torchrun --nnodes 1 --nproc_per_node 2 T5_training.py",  # the demo's
        "python tools/memory_estimator.py",  # test_memory_table_equals_the_estimator
        "python tools/copy_script.py",  # test_copies
        "python benchmarks/run_all.py --preset cpu",  # its programs, in test_benchmarks
        "python benchmarks/side_by_side.py", "python benchmarks/compare_strategies.py",
        "python benchmarks/plot_runs.py",
    )  # fmt: skip
    assert commands()
    for line in commands():
        assert needs_more(line) or line.startswith(run), line


def program_and_flags(line: str) -> tuple[str, list[str], int, int]:
    """Return which program a command starts, its flags, and the number of nodes and of processes
    on each. Raises SystemExit if torchrun would refuse it."""
    from torch.distributed.run import get_args_parser

    words = shlex.split(line, comments=True)
    while words and "=" in words[0]:
        words.pop(0)
    if words[0] == "torchrun":
        args = get_args_parser().parse_args(words[1:])
        program, flags = args.training_script, args.training_script_args
        return program, flags, int(args.nnodes.split(":")[-1]), int(args.nproc_per_node)
    if words[0] == "sbatch":
        at = words.index("launch.slurm")
        nodes = int(words[words.index("--nodes") + 1]) if "--nodes" in words[:at] else 1
        program, *flags = words[at + 1 :] or ["T5_training.py"]
        return program, flags, nodes, 8
    assert words[0] == "python", line
    return words[1], words[2:], 1, 1


def make_what_is_named(flags: list[str]) -> None:
    """Make the files and prepared data that flags name, in the working directory."""
    for word in (*flags, "data/wikihowAll.csv"):
        path = Path(word)
        if path.name == "prepared":
            path = path / "dataset_info.json"
        if path.suffix in (".csv", ".json", ".jsonl", ".parquet", ".txt"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()


def started() -> list[str]:
    """Return the commands that start a program of PARSERS, each once."""
    pattern = "|".join(map(re.escape, (*PARSERS, "launch.slurm")))
    found = {line for line in commands() if re.search(rf"(^| )({pattern})( |$)", line)}
    found = {line for line in found if "copy_script" not in line}
    return sorted(found | set(inline_commands()))


@pytest.mark.parametrize("line", started())
def test_commands_parse(line, monkeypatch, tmp_path, capsys):
    """As on a machine with the GPUs, packages and files that they need."""
    program, flags, nodes, processes = program_and_flags(line)
    monkeypatch.chdir(tmp_path)
    make_what_is_named(flags)
    monkeypatch.setenv("WORLD_SIZE", str(nodes * processes))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    if "# GPUs" in line:
        monkeypatch.setattr(ranks, "device_count", lambda: processes)
        monkeypatch.setattr(ranks, "accelerator", lambda: "cuda")
        monkeypatch.setattr(ranks, "has_bf16", lambda: True)
        monkeypatch.setattr(attention, "check_arguments", lambda args: [])
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda *x: x[0] in EXTRAS or found(*x))
    try:
        PARSERS[program](flags)
    except SystemExit:
        pytest.fail(f"{line}: {capsys.readouterr().err}")


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    found: dict[str, int] = {}
    plain = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#+ (.*)$", plain, re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = found.get(anchor, 0)
        found[anchor] = number + 1
        if number:
            found[f"{anchor}-{number}"] = 1
    return set(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_resolve(page):
    plain = re.sub(r"^```.*?^```", "", PAGES[page], flags=re.DOTALL | re.MULTILINE)
    plain = re.sub(r"`[^`]*`", "", plain)
    for target in re.findall(r"\]\(([^)\s]+)\)", plain):
        if re.match(r"[a-z]+:", target):
            continue
        place, _, anchor = target.partition("#")
        path = (page.parent / place).resolve() if place else page
        assert path.exists(), f"{page.name}: {target}"
        assert ROOT in (path, *path.parents), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(path.read_text()), f"{page.name}: {target}"


def test_files_in_the_pages_exist():
    pattern = r"(?:(?:runtime|rows|benchmarks|tests|tools|docs)/)?[\w/]+\.(?:py|slurm)"
    own = {"my_script.py"}  # the reader's
    for name in set(re.findall(rf"`({pattern})`", TEXT)) - own:
        places = [ROOT / name, *(ROOT / folder / name for folder in FOLDERS)]
        assert any(place.is_file() for place in places), name


def test_memory_table_equals_the_estimator():
    rows = set(
        re.findall(r"^\| `(llama-2-\d+b)` \|((?: [\d,.]+ \|){4} \d) \|$", TEXT, re.MULTILINE)
    )
    assert {name for name, _ in rows} == {"llama-2-7b", "llama-2-13b", "llama-2-70b"}
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


def test_gpu_table_equals_the_estimator():
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    pattern = r"^\| `([\w.-]+)` \| (\d+) x (\d+) GB \| ([\d,.]+) \| (?:`(.*)` )?\|$"
    for name, gpus, memory, figure, flags in set(re.findall(pattern, TEXT, re.MULTILINE)):
        nodes = max(1, int(gpus) // 8)
        args = memory_estimator.parse_args([
            "--model-name", name, "--nodes", str(nodes), "--gpus-per-node", str(int(gpus) // nodes),
            "--gpu-memory-gb", memory, *flags.split(),
        ])  # fmt: skip
        model = memory_estimator.read_model(args)
        found = memory_estimator.estimate(model, args, "full_shard", False, True, "adamw")
        assert found["fits"] and f"{found['peak_bytes'] / 1e9:,.1f}" == figure, (name, gpus)


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_fits_140_lines_of_80_columns(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        importlib.import_module(name).parse_args(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 140 and all(len(line) <= 80 for line in lines)
    assert any(f"torchrun --nnodes 1 --nproc_per_node 8 {name}.py" in line for line in lines[:10])
    text = " ".join(" ".join(lines).split())
    assert "--lr X peak learning rate (default: 5e-05)" in text or name != "llama_fsdp"
