"""Copy a script, all modules that it imports, and what makes them a project of their own.

python tools/copy_script.py gpt2_fsdp.py ../my_project --without trackers watchdog
python tools/copy_script.py gpt2_fsdp.py ../my_project --without all

The copy has the license, the requirements, launch.slurm, two tools, settings of ruff, a README and
a test. README.md says what --without leaves out.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import tyro
from tyro.conf import Positional

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("T5_training.py", "gpt2_fsdp.py", "llama_fsdp.py")
OTHERS = {  # files of the repository by their place in a copy
    "LICENSE": "LICENSE",
    "launch.slurm": "launch.slurm",
    "pyproject.toml": "pyproject.toml",
    "requirements.txt": "requirements.txt",
    "requirements-extras.txt": "requirements-extras.txt",
    "tools/generate.py": "tools/generate.py",
    "tools/docstrings.py": "tools/docstrings.py",
    "README.md": "tools/copy/README.md",
    "test_copy.py": "tools/copy/test_copy.py",
}
MARK = re.compile(r"  # optional: (\w+)$", re.MULTILINE)
IMPORT = re.compile(r"^ *(?:from|import) ([\w.]+)(?: import ([\w, ]+))?", re.MULTILINE)
DATASET = re.compile(r"""((?:--dataset |"dataset": "|dataset: Names = \("))[\w/.]+""")

HELP = '"""Tokens that tools/prepare.py of the repository wrote."""'  # of --dataset

WITH_PREPARE = """    cd {directory}; python tools/docstrings.py docstrings.jsonl
    python {script} --model-name tiny --dataset docstrings.jsonl"""
WITHOUT_PREPARE = """    python tools/prepare.py {script} --model-name tiny --dataset ROWS \\
        --output-dir {directory}/data
    cd {directory}; python {script} --model-name tiny --dataset data/prepared"""


def read(path: Path, without: Sequence[str]) -> str:
    """Return the text of a file without the lines that are marked with an optional module."""
    names = "|".join(without)
    return re.sub(rf".*  # optional: ({names})\n", "", path.read_text())


def imported_files(path: Path, text: str) -> list[Path]:
    """Return the files of this repository that a file imports, including inside functions."""
    files = []
    for base, names in IMPORT.findall(text):
        folder = path.parent if base.startswith(".") else ROOT
        module = folder / base.strip(".").replace(".", "/")
        for place in (module, *(module / name.strip() for name in names.split(","))):
            files += [place.with_suffix(".py"), place / "__init__.py"]
    return [file for file in files if file.is_file()]


def needed_files(path: Path, without: Sequence[str] = ()) -> dict[Path, str]:
    """Return the text of `path` and of all files of this repository that it imports, directly or
    indirectly, when the optional modules `without` are left out."""
    files: dict[Path, str] = {}
    waiting = [path]
    while waiting:
        path = waiting.pop()
        files[path] = read(path, without)
        waiting += [file for file in imported_files(path, files[path]) if file not in files]
    return files


def rooms_of(files: dict[Path, str]) -> list[str]:
    """Return the names in the marks of a script's files: what can be left out."""
    return sorted({name for text in files.values() for name in MARK.findall(text)})


def commit() -> str:
    """Return the commit of this repository, or HEAD if git is not there or this is no clone."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return "HEAD"


def other_files(script: str, kept: Sequence[str], without: Sequence[str]) -> dict[str, str]:
    """Return the texts of the files that make a copy a project, by their place in it. Lines that
    are marked with `no_NAME` are for copies without the optional module NAME."""
    present = {*kept, *(f"no_{room}" for room in without)}
    present |= {"any" if kept else "none", "no_any" if without else "none"}
    if "prepare" in without:  # it has these
        present -= {"no_files", "no_chat_formats", "no_template_checks"}
    texts = {}
    for place, file in OTHERS.items():
        absent = {*MARK.findall((ROOT / file).read_text())} - present
        text = MARK.sub("", read(ROOT / file, sorted(absent)))
        texts[place] = re.sub("T5_training|gpt2_fsdp|llama_fsdp", Path(script).stem, text)
    texts["pyproject.toml"] = texts["pyproject.toml"].partition("\n[tool.pytest")[0]
    if "prepare" in without:
        del texts["tools/docstrings.py"]
    if "requirements-extras" not in texts["README.md"]:
        del texts["requirements-extras.txt"]
    return texts


def of_a_copy(text: str, kept: Sequence[str]) -> str:
    """Return a text without what a copy with the optional modules `kept` lacks: rows are data of
    prepare, without which it trains on data/prepared."""
    lines = ["To copy this script, and for", r"docs/memory\.md"]
    if "prepare" not in kept:
        lines.append(r"python tools/docstrings\.py")
        text = DATASET.sub(r"\1data/prepared", text)
        text = re.sub(r'(?s)"""NAME is .*?"""', HELP, text)
    return re.sub(f".*({'|'.join(lines)}).*\n", "", text)


def main(
    script: Positional[Literal[SCRIPTS]],
    directory: Positional[Path],
    without: tuple[str, ...] = (),
) -> None:
    """Copy a script and its modules; print what to do next, and what the modules weigh.

    Args:
        script: the script to copy
        directory: created if it does not exist
        without: optional parts, or all
    """
    if directory.is_dir() and any(directory.iterdir()):
        sys.exit(f"error: {directory} is not empty. Pass a new directory.")
    rooms = rooms_of(needed_files(ROOT / script))
    without = rooms if "all" in without else without
    unknown = ", ".join(sorted(set(without) - set(rooms)))
    if unknown:
        sys.exit(f"error: {script} has no optional {unknown}. It has: {', '.join(rooms)}.")
    kept = [room for room in rooms if room not in without]
    files = needed_files(ROOT / script, without)
    texts = {str(file.relative_to(ROOT)): text for file, text in files.items()}
    modules = " ".join(sorted({place.partition("/")[0] for place in texts}))
    texts |= other_files(script, kept, without)
    texts["README.md"] += f"\n    git log -p {commit()}.. -- {modules} tools/generate.py\n"
    for place, text in texts.items():
        target = directory / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(of_a_copy(text, kept))
    lines = len("".join(files.values()).splitlines())
    print(f"Copied {lines:,} lines of modules to {directory}. Next:")
    commands = WITH_PREPARE if "prepare" in kept else WITHOUT_PREPARE
    print(commands.format(directory=directory, script=script))


if __name__ == "__main__":
    tyro.cli(main)
