"""Test the commands, flags, links and estimates in README.md and docs/*.md.

CPU commands run with less data, here or in the test named beside them. Commands for GPUs and the
hub are only parsed.
"""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SCRIPTS, SHORT, TINY, launch, losses, metrics

import gpt2_fsdp
import llama_fsdp
import policies
import T5_training
from benchmarks import demo
from tools import copy_script, memory_estimator, preflight

PAGES = {path: path.read_text() for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"))}
TEXT = "\n".join(PAGES.values())
PROGRAMS = {
    f"{module.__name__.replace('.', '/')}.py": module
    for module in (T5_training, gpt2_fsdp, llama_fsdp, memory_estimator, preflight)
}
FOLDERS = ("core", "optional", "benchmarks", "tools")  # the docs omit these folders in file names


def commands() -> list[str]:
    """Return the commands in all bash blocks, with their comments."""
    blocks = re.findall(r"^```bash\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    return list(filter(None, "".join(blocks).replace("\\\n", " ").splitlines()))


def run_demo(directory: Path, *flags: object) -> str:
    """Run `make demo` with extra flags in `directory`/output/demo and return its output."""
    command = ["make", "--no-print-directory", "-n", "-B", "demo"]
    recipe = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()[-1]
    words = shlex.split(recipe.replace("output/demo", f"{directory}/output/demo"))
    words = [*words[1:], *map(str, flags)]
    return launch(0, *words, quiet_seconds=240).stdout


def ask_demo_model(directory: Path) -> str:
    """Run the first generate.py command on the demo's model and return the model's answer."""
    start = "python tools/generate.py output/demo/final "
    line = next(line for line in commands() if line.startswith(start))
    command = shlex.split(line.replace("output/", f"{directory}/output/"), comments=True)
    return subprocess.check_output([sys.executable, *command[1:]], cwd=ROOT, text=True)


def mask_numbers(line: str) -> str:
    """Return the line with each number replaced by N, and without padding."""
    return re.sub(r"\d[\d.,:]*(e-\d+)?", "N", re.sub(" +", " ", line))


def test_demo_trains_evaluates_and_plots(tmp_path):
    """Its output has the same lines as the README."""
    pytest.importorskip("matplotlib")
    short_output = run_demo(tmp_path, "--rows", 256, "--epochs", 1)
    full_output = run_demo(tmp_path)
    readme = PAGES[ROOT / "README.md"]
    lines = list(map(mask_numbers, short_output.splitlines()))
    (readme_lines,) = re.findall(r"```text\n(T5ForCond.*?)```", readme, re.DOTALL)
    readme_lines = [x for x in readme_lines.splitlines() if not re.match(r"\.|  \w+:", x)]
    assert len(readme_lines) >= 7
    positions = [lines.index(mask_numbers(line)) for line in readme_lines]
    assert positions[:3] == sorted(positions[:3]) and positions[-1] == max(positions)
    assert "T5_training.py" not in full_output
    output = tmp_path / "output/demo"
    assert all(full_output.count(word) == 3 for word in ("given:", "before:", "after:"))
    assert full_output.endswith("losses.png\n") and (output / "losses.png").is_file()
    for directory in (output / "before", output):
        assert len((directory / "predictions.jsonl").read_text().splitlines()) == demo.HELD_OUT
    rows, held_out = demo.make_rows(12_000)
    assert not {row["date"] for row in rows} & {row["date"] for row in held_out}
    val = [line["loss"] for line in metrics(output, "val")]
    assert val[-1] <= 0.9 * val[0]
    ask_demo_model(tmp_path)


@pytest.mark.parametrize("reached", [True, False])
def test_cpu_index_is_asked_once_and_may_be_out_of_reach(reached, tmp_path):
    """pip would ask an extra index for each package, with retries: for hours."""
    code = 0 if reached else 1
    stub = f'echo "pip $*" >> {tmp_path}/calls\n[[ "$*" != *index-url* ]] || exit {code}\n'
    (tmp_path / "python").write_text(
        f"#!/bin/bash\nmkdir -p $3/bin\nprintf '%s' '#!/bin/bash\n{stub}' > $3/bin/pip\n"
        "chmod +x $3/bin/pip\n"
    )
    (tmp_path / "python").chmod(0o755)
    words = [
        "CPU=1",
        f"VENV={tmp_path}/venv",
        f"PYTHON={tmp_path}/python",
        f"{tmp_path}/venv/ready",
    ]
    output = subprocess.check_output(["make", *words], cwd=ROOT, text=True)
    first, second = (tmp_path / "calls").read_text().splitlines()
    assert "--no-deps --retries 0 --index-url https://download.pytorch.org/whl/cpu torch" in first
    assert "-r requirements.txt" in second and "index-url" not in second
    assert ("\nNot found: installing PyTorch with CUDA." in output) != reached


@pytest.mark.slow
def test_demo_learns_unseen_dates(tmp_path):
    pytest.importorskip("matplotlib")
    pattern = r"dates: (\d+)% correct before training, (\d+)% after"
    before, after = re.search(pattern, run_demo(tmp_path)).groups()
    assert int(before) == 0 and int(after) >= 80
    assert ask_demo_model(tmp_path) == "1987-03-03\n"


@pytest.mark.parametrize("script", SCRIPTS)
def test_cpu_command_runs_from_another_directory(script, tmp_path):
    write, train, *_ = (line for line in commands() if "docstrings.jsonl" in line)
    launch(0, *shlex.split(write)[1:], cwd=tmp_path)
    limits = ["--max-steps", 1, "--num-train-samples", 40, "--num-val-samples", 4]
    flags = [*shlex.split(train)[2:], *limits, "--output-dir", "here"]
    launch(0, f"{script}.py", *flags, cwd=tmp_path)
    assert (tmp_path / "here/final/config.json").is_file()


@pytest.mark.parametrize("script", SCRIPTS)
def test_tiny_has_equal_losses_on_one_process_and_on_two(script, tmp_path):
    """At the same global batch, as troubleshooting.md says."""
    flags = [*TINY, *SHORT[script], "--max-steps", 5, "--lr", 1e-2, "--eval-every", 0,
             "--num-train-samples", 40, "--num-val-samples", 8, "--batch-size", 2,
             "--global-batch-size", 8]  # fmt: skip
    for processes in (0, 2):
        launch(processes, f"{script}.py", *flags, "--output-dir", tmp_path / str(processes))
    one, two = tmp_path / "0", tmp_path / "2"
    assert metrics(two, "start")[0]["world_size"] == 2
    for event, count in {"train": 5, "val": 2}.items():
        expected = losses(one, event)
        assert len(expected) == count
        assert losses(two, event) == pytest.approx(expected, rel=1e-5), event


def test_every_command_is_marked_or_run_by_a_test():
    tested = (
        "make demo",  # test_demo_trains_evaluates_and_plots
        "make test",
        "python tools/generate.py output/demo/final",  # test_demo_trains_evaluates_and_plots
        ". .venv/bin/activate", "pip install -r",  # make test
        "OMP_NUM_THREADS=1 torchrun --nnodes 1 --nproc_per_node 2 T5_training.py",  # the demo's
        "OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 docs/lesson.py",  # test_lesson
        "python tools/docstrings.py", "python gpt2_fsdp.py --model-name tiny",  # test_cpu_command
        "python tools/memory_estimator.py",  # test_memory_table_matches_estimator
        "python tools/copy_script.py",  # test_copies
        # test_kill_it_three_times
        "cd ../to_break", "torchrun --nproc_per_node 2 gpt2_fsdp.py --model-name tiny",
        "kill ", "cat output/killed/status", "torchrun --nnodes 2 --nproc_per_node 1 ", "diff <(",
    )  # fmt: skip
    assert commands()
    for line in commands():
        assert re.search(r"# (GPUs|hub)", line) or line.startswith(tested), line


def program_and_flags(line: str) -> tuple[str, list[str], int, int]:
    """Return a command's program, its flags, the number of nodes and the processes per node. Raise
    SystemExit if torchrun would reject the command."""
    from torch.distributed.run import get_args_parser

    words = shlex.split(line, comments=True)
    while words and "=" in words[0]:
        words.pop(0)
    if words[0] == "torchrun":
        args = get_args_parser().parse_args(words[1:])
        program, flags = args.training_script, args.training_script_args
        return program, flags, int(args.nnodes.split(":")[-1]), int(args.nproc_per_node)
    if words[0] == "sbatch":
        index = words.index("launch.slurm")
        nodes = int(words[words.index("--nodes") + 1]) if "--nodes" in words[:index] else 1
        program, *flags = words[index + 1 :] or ["T5_training.py"]
        return program, flags, nodes, 8
    assert words[0] == "python", line
    return words[1], words[2:], 1, 1


def launch_commands() -> list[str]:
    """Return the distinct commands, in blocks and inline, that start a program in PROGRAMS."""
    pattern = "|".join(map(re.escape, (*PROGRAMS, "launch.slurm")))
    lines = {line for line in commands() if re.search(rf"(^| )({pattern})( |$)", line)}
    lines = {line for line in lines if "copy_script" not in line}
    inline = [" ".join(code.split()) for code in re.findall(r"`(python [\w/]+\.py [^`]+)`", TEXT)]
    return sorted(lines | {line for line in inline if line.split()[1] in PROGRAMS})


@pytest.mark.parametrize("line", launch_commands())
def test_commands_parse(line, monkeypatch, tmp_path, capsys):
    """Pretend that the GPUs, packages and files that the command needs exist."""
    program, flags, nodes, processes = program_and_flags(line)
    if program == "tools/prepare.py":
        program, *flags = flags
    monkeypatch.chdir(tmp_path)
    for word in (*flags, "data/wikihowAll.csv"):
        path = Path(word) / ("dataset_info.json" if word.endswith("/prepared") else "")
        if path.suffix in (".csv", ".json", ".jsonl", ".parquet", ".txt"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(nodes * processes))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    if "# GPUs" in line:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(policies, "compute_precision", lambda _: "bf16")
    monkeypatch.setattr(sys, "argv", [program, *flags])
    monkeypatch.setattr(os, "_exit", sys.exit)
    try:
        PROGRAMS[program].parse_args()
    except SystemExit:
        pytest.fail(f"{line}: {capsys.readouterr().err}")


def without_blocks(text: str) -> str:
    """Return the text of a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub generates for the headings of a page, all different."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(text), re.MULTILINE)
    words = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", x).strip().lower() for x in headings]
    names = [re.sub(r"[^\w\- ]", "", x).replace(" ", "-") for x in words]
    assert len(set(names)) == len(names)
    return set(names)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_resolve(page):
    plain = re.sub(r"`[^`]*`", "", without_blocks(PAGES[page]))
    targets = re.findall(r"\]\(([^)\s]+)\)", plain)
    assert len(targets) == plain.count("](") > 0
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists() and ROOT in (path, *path.parents), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(path.read_text()), f"{page.name}: {target}"


def test_files_named_in_docs_exist():
    pattern = r"(?:(?:core|optional|benchmarks|tests|tools|docs)/)?[\w/]+\.(?:py|slurm)"
    placeholders = {"my_script.py", "convert_hf_to_gguf.py"}
    names = set(re.findall(rf"`({pattern})`", TEXT)) - placeholders
    assert {f"{script}.py" for script in SCRIPTS} < names and "launch.slurm" in names
    for name in names:
        paths = [ROOT / name, *(ROOT / folder / name for folder in FOLDERS)]
        assert any(path.is_file() for path in paths), name


def estimate(words: str, strategy: str, offload: bool) -> tuple[str, dict]:
    """Return the peak memory in GB with recomputation, as the tables show it, and the estimate."""
    args = memory_estimator.parse_args(words.split())
    model = memory_estimator.Model(args)
    choice = {"strategy": strategy, "cpu_offload": offload, "activation_checkpointing": "blocks"}
    result = memory_estimator.estimate(model, replace(args, **choice))
    return f"{result['peak_bytes'] / 1e9:,.1f}", result


COLUMNS = (("ddp", False), ("shard_grad_op", False), ("full_shard", False), ("full_shard", True))


def test_memory_table_matches_estimator():
    pattern = r"^\| `(llama-2-\d+b)` \|((?: [\d,.]+ \|){4} \d) \| estimate \|$"
    rows = set(re.findall(pattern, TEXT, re.MULTILINE))
    assert {name for name, _ in rows} == {"llama-2-7b", "llama-2-13b", "llama-2-70b"}
    for name, cells in rows:
        estimates = [estimate(f"--model-name {name}", *column) for column in COLUMNS]
        expected = [figure for figure, _ in estimates]
        expected.append(str(estimates[2][1]["smallest_nodes"]))
        assert [cell.strip() for cell in cells.split("|")] == expected


def test_gpu_table_matches_estimator():
    """Rows that were measured on a GPU say so."""
    pattern = r"^\| `([\w.-]+)` \| (\d+) x (\d+) GB \| ([\d,.]+) \| (?:`(.*)` )?\| (.*) \|$"
    rows = set(re.findall(pattern, TEXT, re.MULTILINE))
    assert len(rows) >= 3
    for name, gpus, memory, figure, flags, source in rows:
        if source != "estimate":
            assert source.startswith("[measured](")
            continue
        nodes = max(1, int(gpus) // 8)
        words = f"--model-name {name} --nodes {nodes} --gpus-per-node {int(gpus) // nodes} "
        words += f"--gpu-memory-gb {memory} {flags}"
        expected, result = estimate(words, "full_shard", False)
        assert result["fits"] and figure == expected, (name, gpus)


def test_adapter_table_matches_estimator():
    pattern = r"^\| (Q?)LoRA, (\d+)B \| (\d) x .* \| ([\d.]+)(?:: .*)? \| ([\d.]+) \| ([\d.]+) \|$"
    rows = re.findall(pattern, TEXT, re.MULTILINE)
    assert len(rows) >= 4
    for is_packed, size, gpus, *figures in rows:
        words = f"--model-name llama-2-{size}b --gpus-per-node {gpus} --lora-rank 16"
        words += " --load-in-4bit" if is_packed else ""
        expected, _ = estimate(words, "full_shard", False)
        offloaded, result = estimate(words, "full_shard", True)
        cpu = f"{result['cpu_peak_bytes_per_node'] / 1e9:,.1f}"
        assert figures == [expected, offloaded, cpu], (size, gpus)


RESULTS = (ROOT / "benchmarks/RESULTS.md").read_text()
FIGURE = r"(?<![\w.,])(\d[\d,]*\d(?:\.\d+)?|\d\.\d+)(?![\w,.]*\w)"


def test_measured_figures_are_in_the_results():
    """Some are rounded, or in GB in place of MB."""
    measured = {float(x.replace(",", "")) for x in re.findall(FIGURE, RESULTS)}
    measured |= {value / 1000 for value in measured}
    paragraphs = re.split(r"\n\n|\n(?=[-|])", TEXT)
    paragraphs = [x for x in paragraphs if "RESULTS.md" in x or "architectures, " in x]
    assert len(paragraphs) >= 6
    for paragraph in paragraphs:
        plain = re.sub(r"`[^`]*`|\]\([^)]*\)", "", paragraph)
        for figure in re.findall(FIGURE, plain):
            digits = len(figure.partition(".")[2])
            value = float(figure.replace(",", ""))
            assert value in {round(x, digits) for x in measured}, (figure, paragraph)


NICKNAMES = {"T5_training": "T5", "gpt2_fsdp": "GPT-2", "llama_fsdp": "Llama"}


def test_readme_lists_the_optional_parts_of_each_script():
    listed = re.findall(
        r"^- `(\w+)`(?: \(([\w, -]+)\))?: ", PAGES[ROOT / "README.md"], re.MULTILINE
    )
    for script, nickname in NICKNAMES.items():
        own = {name for name, scripts in listed if nickname in (scripts or nickname)}
        assert own == set(copy_script.rooms_of(copy_script.needed_files(ROOT / f"{script}.py")))


def test_pages_are_short():
    words = {path.name: len(text.split()) for path, text in PAGES.items()}
    assert words["README.md"] <= 1600 and sum(words.values()) <= 9600
    assert len(RESULTS.split()) <= 1800
