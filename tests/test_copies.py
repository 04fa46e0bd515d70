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
    "llama_fsdp.py": ["--max-seq-length", "256", "--no-packing"],
}  # fmt: skip
FLAGS = ["--model-name", "tiny", "--dataset", DOCSTRINGS, "--num-train-samples", "32",
         "--num-val-samples", "4", "--batch-size", "1", "--log-every", "1", "--save-every", "2",
         "--max-steps", "10"]  # fmt: skip
DATA = {"gpt2_fsdp.py": "block", "T5_training.py": "summarization", "llama_fsdp.py": "chat"}
SCRIPTS = pytest.mark.parametrize("script", SHORT)


def rooms_of(script: str) -> list[str]:
    """Return the optional modules that a script or its data module uses."""
    texts = [(ROOT / x).read_text() for x in (script, f"{DATA[script]}_dataset.py")]
    return sorted(set(re.findall(r"  # optional: (\w+)$", "".join(texts), re.MULTILINE)))


def run(*words: object, **options: object) -> subprocess.CompletedProcess:
    """Run a Python program and return its output as text."""
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True,
                          **options)  # fmt: skip


def make_copy(script: str, copy: Path, *without: str) -> str:
    """Copy a script, check that ruff finds nothing in it, such as an unused import, and return what
    the tool prints."""
    flags = ["--without", *without] if without else []
    result = run(ROOT / "tools/copy_script.py", script, copy, *flags)
    assert result.returncode == 0, result.stderr
    ruff = run("-m", "ruff", "check", "--config", ROOT / "pyproject.toml", ".", cwd=copy)
    assert ruff.returncode == 0, ruff.stdout
    return result.stdout


def check_copy(script: str, tmp_path: Path, *without: str) -> None:
    """Check that a copy trains, is killed and resumes bitwise, and has no trace of the modules that
    were left out."""
    copy = tmp_path / "copy"
    make_copy(script, copy, *without)
    for name in without:
        assert not (copy / f"optional/{name}.py").exists()
    assert (copy / "optional").exists() == (set(without) < set(rooms_of(script)))
    flags = [*FLAGS, *SHORT[script]]
    launch(2, copy / script, *flags, "--output-dir", tmp_path / "whole", cwd=copy)
    assert status(tmp_path / "whole") == "finished"
    assert list(losses(tmp_path / "whole")) == list(range(1, 11))
    # A copy of the worker runs the script beside it.
    worker = (ROOT / "tests/workers/killed.py").read_text().replace("parents[2]", "parent")
    (copy / "killed.py").write_text(worker)
    killed = tmp_path / "killed"
    words = [script.removesuffix(".py"), 1, 8, *flags, "--output-dir", killed]
    launch(2, copy / "killed.py", *words, cwd=copy, check=False)
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
        assert sorted(path.stem for path in (copy / "optional").glob("*.py")) == rooms_of(script)
        again = run(ROOT / "tools/copy_script.py", script, copy)
        assert again.returncode == 1 and "is not empty" in again.stderr
        shutil.rmtree(copy)


@pytest.mark.parametrize("name", [*SHORT, *(f"{data}_dataset.py" for data in DATA.values())])
def test_each_mention_of_a_room_is_a_marked_statement(name):
    """Lines of a room are whole statements: the rest compiles, whichever rooms are left out."""
    lines = (ROOT / name).read_text().splitlines()
    rooms = {x[1] for x in (re.search(r"# optional: (\w+)$", line) for line in lines) if x}
    assert all((ROOT / f"optional/{room}.py").is_file() for room in rooms)
    for room in (*rooms, r"\w+"):
        kept = [line for line in lines if not re.search(rf"  # optional: {room}$", line)]
        compile("\n".join(kept), name, "exec")
        assert not [line for line in kept if re.search(rf"optional\.{room}\b", line)]


@SCRIPTS
def test_copy_without_each_optional_module_is_linted(script, tmp_path):
    for room in rooms_of(script):
        make_copy(script, tmp_path / room, room)


@SCRIPTS
def test_copy_without_all_optional_modules_trains_and_resumes(script, tmp_path):
    check_copy(script, tmp_path, *rooms_of(script))


FEW = {("gpt2_fsdp.py", "checksums"), ("gpt2_fsdp.py", "startup_checks")}  # in make test-ci


@pytest.mark.parametrize("script, room", [
    pytest.param(script, room, marks=[] if (script, room) in FEW else pytest.mark.slow)
    for script in SHORT
    for room in rooms_of(script)
])  # fmt: skip
def test_copy_without_one_optional_module_trains_and_resumes(script, room, tmp_path):
    check_copy(script, tmp_path, room)


@pytest.mark.slow
@SCRIPTS
def test_the_test_of_a_copy_passes(script, tmp_path):
    make_copy(script, tmp_path / "copy")
    result = run("-m", "pytest", "-q", "test_copy.py", cwd=tmp_path / "copy")
    assert result.returncode == 0, result.stdout
