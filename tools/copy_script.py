"""Copy a script, all modules that it imports, and what makes them a project of their own.

python tools/copy_script.py gpt2_fsdp.py ../my_project --without trackers watchdog
python tools/copy_script.py gpt2_fsdp.py ../my_project --without all

The copy has the license, the requirements, launch.slurm, two tools, settings of ruff, a README and
a test. --without NAME leaves out all lines that end in `# optional: NAME`, and with them the file
of that name in optional/ or prepare/, or the folder prepare/.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import resolve_name
from pathlib import Path
from typing import Literal

import tyro
from tyro.conf import Positional

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("T5_training.py", "gpt2_fsdp.py", "llama_fsdp.py")
OTHERS = {  # files of the repository by their place in a copy
    "LICENSE": "LICENSE",
    "launch.slurm": "launch.slurm",
    "requirements-extras.txt": "requirements-extras.txt",
    "tools/generate.py": "tools/generate.py",
    "tools/docstrings.py": "tools/docstrings.py",
    "README.md": "tools/copy/README.md",
    "test_copy.py": "tools/copy/test_copy.py",
}
MARK = re.compile(r"  # optional: (\w+)$", re.MULTILINE)


def read(path: Path, without: Sequence[str]) -> str:
    """Return the text of a file without the lines that are marked with an optional module."""
    names = "|".join(without)
    return re.sub(rf".*  # optional: ({names})\n", "", path.read_text())


def imported_names(path: Path, text: str) -> set[str]:
    """Return the absolute names of all modules that a file imports, including inside functions."""
    package = ".".join(path.relative_to(ROOT).parent.parts)
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return names


def needed_files(path: Path, without: Sequence[str] = ()) -> dict[Path, str]:
    """Return the text of `path` and of all files of this repository that it imports, directly or
    indirectly, when the optional modules `without` are left out."""
    files: dict[Path, str] = {}
    waiting = [path]
    while waiting:
        path = waiting.pop()
        files[path] = read(path, without)
        for name in imported_names(path, files[path]):
            module = ROOT / name.replace(".", "/")
            for file in (module.with_suffix(".py"), module / "__init__.py"):
                if file.is_file() and file not in files:
                    waiting.append(file)
    return files


def rooms_of(files: dict[Path, str]) -> list[str]:
    """Return the names in the marks of a script's files: what can be left out."""
    return sorted({name for text in files.values() for name in MARK.findall(text)})


def requirements(files: dict[Path, str]) -> str:
    """Return the lines of requirements.txt whose packages the files import or tokenizers need."""
    needed = {"sentencepiece"}
    for file in files.items():
        needed |= {name.partition(".")[0] for name in imported_names(*file)}
    lines = (ROOT / "requirements.txt").read_text().splitlines(keepends=True)
    kept = []
    for line in lines:
        package, *_ = re.split("[>=]", line)
        if package.replace("-", "_") in needed:
            kept.append(line)
    return "".join(kept)


def commit() -> str:
    """Return the commit of this repository, or HEAD if git is not there or this is no clone."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return "HEAD"


def other_files(script: str, files: dict[Path, str], without: Sequence[str]) -> dict[str, str]:
    """Return the texts of the files that make a copy a project, by their place in it."""
    texts = {place: read(ROOT / file, without) for place, file in OTHERS.items()}
    texts["pyproject.toml"] = (ROOT / "pyproject.toml").read_text().partition("\n[tool.pytest")[0]
    texts["requirements.txt"] = requirements(files)
    name = Path(script).stem
    replacements = [
        ("README.md", "SCRIPT", script),
        ("README.md", "COMMIT", commit()),
        ("README.md", "output/NAME", f"output/{name}"),
        ("test_copy.py", '"gpt2_fsdp"', f'"{name}"'),
        ("launch.slurm", "script=T5_training.py", f"script={script}"),
    ]
    for place, old, new in replacements:
        texts[place] = texts[place].replace(old, new)
    return texts


def with_prepared_data(text: str) -> str:
    """Return a text of a copy that trains on data/prepared, and not on rows."""
    lines = [line for line in text.splitlines(keepends=True) if "docstrings.py" not in line]
    return "".join(lines).replace("docstrings.jsonl", "data/prepared")


def main(
    script: Positional[Literal[SCRIPTS]],
    directory: Positional[Path],
    without: tuple[str, ...] = (),
) -> None:
    """Copy a script and its modules, and print what to do next.

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
    files = needed_files(ROOT / script, without)
    texts = other_files(script, files, without)
    texts |= {str(file.relative_to(ROOT)): text for file, text in files.items()}
    data = "python tools/docstrings.py docstrings.jsonl"
    start = f"{script} --model-name tiny --dataset docstrings.jsonl"
    steps = [f"cd {directory}", data, f"python {start}"]
    if "prepare" in without:
        del texts["tools/docstrings.py"]
        texts = {place: with_prepared_data(text) for place, text in texts.items()}
        prepare = f"python tools/prepare.py {start} --output-dir {directory}/data"
        steps = [data, prepare, f"cd {directory}", f"python {with_prepared_data(start)}"]
    for place, text in texts.items():
        target = directory / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    print(f"Copied {len(texts)} files. Next: {'; '.join(steps)}")


if __name__ == "__main__":
    tyro.cli(main)
