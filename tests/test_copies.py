"""Copies made by tools/copy_script.py work without the repository, and without optional modules."""

import re
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPTS, SHORT, TINY, check_equal_runs, launch, losses, metrics, status

from tools import copy_script

FLAGS = [*TINY, "--num-train-samples", "32", "--num-val-samples", "4", "--batch-size", "1",
         "--save-every", "2", "--max-steps", "6"]  # fmt: skip
PREPARE = [*ROOT.glob("prepare/*.py")]
EACH_SCRIPT = pytest.mark.parametrize("script", SCRIPTS)


def rooms_of(script: str) -> list[str]:
    """Return the optional parts of a script and of its modules."""
    return copy_script.rooms_of(copy_script.needed_files(ROOT / f"{script}.py"))


def lint(folder: Path) -> None:
    """Check that ruff finds nothing in the copies in a folder, each with its own settings, such as
    an unused import or blank lines where others were."""
    launch(0, "-m", "ruff", "check", ".", cwd=folder)
    launch(0, "-m", "ruff", "format", "--check", ".", cwd=folder)


def check_rooms(script: str, copy: Path, *without: str) -> None:
    """Check that a copy has no trace of the modules that were left out, but of the others."""
    text = "".join(path.read_text() for path in copy.rglob("*.py"))
    marks = set(re.findall(r"  # optional: (\w+)$", text, re.MULTILINE))
    inner = set(rooms_of(script)) - marks - {*without}
    assert not inner or "prepare" in without and inner <= {path.stem for path in PREPARE}
    for name in without:
        assert not [*copy.glob(f"*/{name}.py")] and not (copy / name).exists()


def make_copy(script: str, copy: Path, *without: str) -> str:
    """Copy a script with the command, check the copy and return what the command prints."""
    flags = ["--without", *without] if without else []
    output = launch(0, "tools/copy_script.py", f"{script}.py", copy, *flags).stdout
    lint(copy)
    check_rooms(script, copy, *without)
    return output


def check_copy(script: str, models: dict[str, Path], tmp_path: Path, *without: str) -> None:
    """Check that a copy trains, is killed and resumes bitwise, and has no trace of the modules that
    were left out."""
    copy = tmp_path / "copy"
    make_copy(script, copy, *without)
    flags = [*FLAGS, *SHORT[script]]
    if script in models:  # they have dropout
        flags += ["--model-name", models[script]]
    if "prepare" in without:
        prepared = tmp_path / "data"
        launch(0, "tools/prepare.py", f"{script}.py", *flags, "--output-dir", prepared)
        flags[flags.index("--dataset") + 1] = prepared / "prepared"
    launch(2, copy / f"{script}.py", *flags, "--output-dir", tmp_path / "whole", cwd=copy)
    assert status(tmp_path / "whole") == "finished"
    assert list(losses(tmp_path / "whole")) == list(range(1, 7))
    # A copy of the worker runs the script beside it.
    worker = (ROOT / "tests/workers/killed.py").read_text().replace("parents[2]", "parent")
    (copy / "killed.py").write_text(worker)
    killed = tmp_path / "killed"
    words = [script, 1, 6, *flags, "--output-dir", killed]
    launch(2, copy / "killed.py", *words, cwd=copy, check=False)
    assert status(killed) != "finished" and losses(killed)
    launch(2, copy / f"{script}.py", *flags, "--output-dir", killed, cwd=copy)
    assert [line["step"] for line in metrics(killed, "start")] == [0, 4]
    check_equal_runs(killed, tmp_path / "whole")


def test_copy_is_a_project(tmp_path):
    """It has a license, requirements, a README and a test, and all files that the script needs."""
    copy = tmp_path / "copy"
    for script in SCRIPTS:
        output, start = make_copy(script, copy), f"python {script}.py --model-name tiny"
        assert f"    cd {copy}; python tools/docstrings.py" in output and start in output
        assert re.search(r"^Copied [4567],\d{3} lines of modules to ", output)
        for name in ("LICENSE", "README.md", "requirements.txt", "launch.slurm"):
            assert (copy / name).is_file()
        readme = (copy / "README.md").read_text()
        assert start in readme and "made without" not in readme
        (fixes,) = re.findall(rf"git log -p {copy_script.commit()}.. -- (.*)", readme)
        modules = {path.relative_to(copy).parts[0] for path in copy.rglob("*.py")}
        assert modules <= {"test_copy.py", "tools", *fixes.split()}
        assert re.fullmatch("HEAD|[0-9a-f]{40}", copy_script.commit())
        again = launch(0, "tools/copy_script.py", f"{script}.py", copy, check=False)
        assert again.returncode == 1 and "is not empty" in again.stderr
        shutil.rmtree(copy)


def test_without_takes_all_and_refuses_a_module_that_the_script_lacks(tmp_path):
    launch(0, "tools/copy_script.py", "gpt2_fsdp.py", tmp_path / "copy", "--without", "all")
    page = (tmp_path / "copy/gpt2_fsdp.py").read_text()  # the one to print
    assert len(page.splitlines()) <= 430
    assert not (tmp_path / "copy/optional").exists()
    assert not (tmp_path / "copy/prepare").exists()
    for path in (tmp_path / "copy").rglob("*"):
        assert path.is_dir() or "docstrings" not in path.read_text(), path
    help_text = launch(0, tmp_path / "copy/gpt2_fsdp.py", "--help").stdout
    assert "--block-size" in help_text and "--text-column" not in help_text  # a flag of rows
    flags = ["--model-name", "tiny", "--output-dir", tmp_path / "output"]
    result = launch(0, tmp_path / "copy/gpt2_fsdp.py", *flags, check=False)
    assert "pass one --dataset, a directory of tools/prepare.py" in result.stderr
    words = ["gpt2_fsdp.py", tmp_path / "other", "--without", "lock", "rouge", "lokc"]
    result = launch(0, "tools/copy_script.py", *words, check=False)
    message = "error: gpt2_fsdp.py has no optional lokc, rouge. It has: async_save, base_files, "
    assert result.returncode == 1 and result.stderr.startswith(message)
    assert not (tmp_path / "other").exists()


@EACH_SCRIPT
def test_bare_copy_speaks_only_of_what_it_has(script, tmp_path):
    """Nothing in it is left over from optional modules, and its README says what it lacks."""
    output = make_copy(script, tmp_path, *rooms_of(script))
    assert re.search(r"^Copied [23],\d{3} lines of modules to ", output)
    assert "tools/docstrings.py" not in output and "--dataset data/prepared" in output
    paths = sorted(tmp_path.rglob("*.py"))
    words = (r"best/|--export-only|--evaluate-only|copy_script|optional (module|line)|# optional|"
             r"docs/|prepare/\w|Parquet|wikihow \(")  # fmt: skip
    everything = "".join(path.read_text() for path in paths)
    for path in paths:
        text = path.read_text()
        assert not re.search(words, text), (path, re.search(words, text))
        for name in re.findall(r"^(?:def|class) (\w+)", text, re.MULTILINE):
            is_used = len(re.findall(rf"\b{name}\b", everything)) > 1
            assert is_used or name.startswith("test_"), (path, name)
    docstring = (tmp_path / f"{script}.py").read_text().split('"""')[1]
    for command in re.findall(rf".*{script}.py.*", docstring):
        assert "--dataset data/prepared" in command
    readme = (tmp_path / "README.md").read_text()
    assert "rows, which" not in readme and "requirements-extras" not in readme
    lacking = set(re.findall(r"- no `(\w+)`: ", readme))
    assert lacking == {*rooms_of(script)} - {path.stem for path in PREPARE}


def test_tools_run_in_the_repository_without_its_optional_modules(tmp_path):
    files = [*ROOT.glob("*.py"), *ROOT.glob("core/*.py"), *ROOT.glob("tools/*.py")]
    rooms = [room for script in SCRIPTS for room in rooms_of(script)]
    for path in files:
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(exist_ok=True)
        target.write_text(copy_script.read(path, rooms))
    output = launch(0, tmp_path / "tools/memory_estimator.py", "--model-name", "tiny-t5").stdout
    assert "full_shard" in output
    launch(0, tmp_path / "tools/preflight.py", "--help")
    launch(0, "-c", "import tools.prepare", cwd=tmp_path)


@EACH_SCRIPT
def test_copy_without_each_optional_module_is_linted(script, tmp_path):
    for room in rooms_of(script):
        copy_script.main(f"{script}.py", tmp_path / room, (room,))
        check_rooms(script, tmp_path / room, room)
    lint(tmp_path)


@EACH_SCRIPT
def test_copy_without_all_optional_modules_trains_and_resumes(script, dropout, tmp_path):
    check_copy(script, dropout, tmp_path, *rooms_of(script))


FEW = {("gpt2_fsdp", "checksums"), ("gpt2_fsdp", "startup_checks")}  # in make test-ci


@pytest.mark.parametrize("script, room", [
    pytest.param(script, room, marks=[] if (script, room) in FEW else pytest.mark.slow)
    for script in SCRIPTS
    for room in rooms_of(script)
])  # fmt: skip
def test_copy_without_one_optional_module_trains_and_resumes(script, room, dropout, tmp_path):
    check_copy(script, dropout, tmp_path, room)


@pytest.mark.slow
@EACH_SCRIPT
def test_the_test_of_a_copy_passes(script, tmp_path):
    make_copy(script, tmp_path / "copy")
    launch(0, "-m", "pytest", "-q", "test_copy.py", cwd=tmp_path / "copy")
