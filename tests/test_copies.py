"""Copies made by tools/copy_script.py work without the repository, and without optional modules."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DOCSTRINGS, ROOT, check_equal_weights, launch, losses, metrics, status

SHORT = {  # flags for short texts
    "gpt2_fsdp.py": ["--block-size", "32"],
    "T5_training.py": ["--source-length", "32", "--target-length", "8"],
    "llama_fsdp.py": ["--max-seq-length", "64", "--no-packing"],
}  # fmt: skip
FLAGS = ["--model-name", "tiny", "--dataset", DOCSTRINGS, "--num-train-samples", "32",
         "--num-val-samples", "4", "--batch-size", "1", "--log-every", "1", "--save-every", "2",
         "--max-steps", "10"]  # fmt: skip
DATA = {"gpt2_fsdp.py": "block", "T5_training.py": "summarization", "llama_fsdp.py": "chat"}
KILLED = """
import os, sys
sys.path.insert(0, os.getcwd())
import {script} as script
from core import ranks

progress = script.progress

def die_at_step_8(items, text, total, done=0):
    for step, item in enumerate(progress(items, text, total, done), done + 1):
        if text == "step" and step == 8 and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), 9)
        yield item

script.progress = die_at_step_8
ranks.run(script.fsdp_main, script.parse_args())
"""


def rooms_of(script: str) -> list[str]:
    """Return the optional modules that a script or its data module uses."""
    texts = [(ROOT / x).read_text() for x in (script, f"{DATA[script]}_dataset.py")]
    return sorted(set(re.findall(r"  # optional: (\w+)$", "".join(texts), re.MULTILINE)))


def make_copy(script: str, copy: Path, *without: str) -> str:
    """Copy a script with the tool; return what the tool prints."""
    command = [sys.executable, ROOT / "tools/copy_script.py", script, copy]
    command += ["--without", *without] if without else []
    result = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def lint(copy: Path) -> None:
    """Check that ruff finds nothing in a copy, such as an unused import."""
    ruff = [sys.executable, "-m", "ruff", "check", "--config", ROOT / "pyproject.toml", "."]
    result = subprocess.run([*map(str, ruff)], cwd=copy, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def check_copy(script: str, tmp_path: Path, *without: str) -> None:
    """Check that a copy is linted, trains, is killed and resumes bitwise, and has no trace of the
    modules that were left out."""
    copy = tmp_path / "copy"
    make_copy(script, copy, *without)
    lint(copy)
    for name in without:
        assert not (copy / f"optional/{name}.py").exists()
    assert (copy / "optional").exists() == (set(without) < set(rooms_of(script)))
    flags = [*FLAGS, *SHORT[script]]
    launch(2, copy / script, *flags, "--output-dir", tmp_path / "whole", cwd=copy)
    assert status(tmp_path / "whole") == "finished"
    assert list(losses(tmp_path / "whole")) == list(range(1, 11))
    (copy / "killed.py").write_text(KILLED.format(script=script.removesuffix(".py")))
    killed = tmp_path / "killed"
    launch(2, copy / "killed.py", *flags, "--output-dir", killed, cwd=copy, check=False)
    assert status(killed) != "finished" and losses(killed)
    launch(2, copy / script, *flags, "--output-dir", killed, cwd=copy)
    assert [line["step"] for line in metrics(killed, "start")] == [0, 6]
    for event in ("train", "val"):
        assert losses(killed, event) == losses(tmp_path / "whole", event)
    check_equal_weights(killed / "final", tmp_path / "whole/final")


def test_copy_is_a_project(tmp_path):
    """It has a license, requirements, a README and a test, and all files that the script needs."""
    copy = tmp_path / "copy"
    for script in SHORT:
        output = make_copy(script, copy)
        assert f"Next: cd {copy}; " in output and f"python {script} --model-name tiny" in output
        for name in ("LICENSE", "README.md", "requirements.txt", "launch.slurm"):
            assert (copy / name).is_file()
        assert ("rouge-score" in (copy / "requirements.txt").read_text()) == (script[0] == "T")
        assert f"python {script} --model-name tiny" in (copy / "README.md").read_text()
        rooms = {path.stem for path in (copy / "optional").glob("*.py")}
        assert rooms == set(rooms_of(script))
        again = subprocess.run(
            [sys.executable, ROOT / "tools/copy_script.py", script, copy],
            capture_output=True, text=True,
        )  # fmt: skip
        assert again.returncode == 1 and "is not empty" in again.stderr
        shutil.rmtree(copy)


def test_each_mention_of_a_room_is_a_marked_statement():
    """Lines of a room are whole statements: the rest compiles, whichever rooms are left out."""
    for name in (*SHORT, *(f"{data}_dataset.py" for data in DATA.values())):
        lines = (ROOT / name).read_text().splitlines()
        rooms = {x[1] for x in (re.search(r"# optional: (\w+)$", line) for line in lines) if x}
        assert all((ROOT / f"optional/{room}.py").is_file() for room in rooms), name
        for room in [*rooms, "all"]:
            end = r"\w+" if room == "all" else room
            kept = [line for line in lines if not re.search(rf"  # optional: {end}$", line)]
            compile("\n".join(kept), name, "exec")
            pattern = r"optional\.\w+" if room == "all" else rf"optional\.{room}\b"
            assert not [line for line in kept if re.search(pattern, line)], name


@pytest.mark.parametrize("script", SHORT)
def test_copy_without_each_optional_module_is_linted(script, tmp_path):
    for room in rooms_of(script):
        make_copy(script, tmp_path / room, room)
        lint(tmp_path / room)


FEW = {("g", "checksums"), ("g", "startup_checks")}  # one launch each in make test-ci
SINGLE = [
    pytest.param(script, room, marks=[] if (script[0], room) in FEW else pytest.mark.slow)
    for script in SHORT
    for room in rooms_of(script)
]


@pytest.mark.parametrize("script", SHORT)
def test_copy_without_all_optional_modules_trains_and_resumes(script, tmp_path):
    check_copy(script, tmp_path, *rooms_of(script))


@pytest.mark.parametrize("script, room", SINGLE)
def test_copy_without_one_optional_module_trains_and_resumes(script, room, tmp_path):
    check_copy(script, tmp_path, room)


@pytest.mark.slow
@pytest.mark.parametrize("script", SHORT)
def test_the_test_of_a_copy_passes(script, tmp_path):
    make_copy(script, tmp_path / "copy")
    test = [sys.executable, "-m", "pytest", "-q", "test_copy.py"]
    result = subprocess.run(test, cwd=tmp_path / "copy", capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
