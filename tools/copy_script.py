"""Copy a script, the modules that it imports, and what makes them a project of their own.

python tools/copy_script.py gpt2_fsdp.py ../my_project

The copy has the license, the requirements, launch.slurm, tools/generate.py, a README and a test.
"""

import argparse
import ast
import shutil
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {"T5_training.py": "--dataset docstrings", "gpt2_fsdp.py": "--dataset docstrings",
           "llama_fsdp.py": ""}  # fmt: skip
# Files of the repository, and their places in a copy.
OTHERS = {x: x for x in ("LICENSE", "launch.slurm", "requirements-extras.txt", "tools/generate.py")}
OTHERS |= {"tools/copy/README.md": "README.md", "tools/copy/test_copy.py": "test_copy.py"}
PACKAGES = {"rouge-score": "rouge_score"}  # whose modules have another name


def imported_names(path: Path) -> Iterator[str]:
    """Yield the absolute names of all modules that a file imports, including inside functions."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def needed_files(path: Path, known: set[Path] | None = None) -> set[Path]:
    """Return `path` and all files of this repository that it imports, directly or indirectly."""
    files = known if known is not None else set()
    files.add(path)
    for name in imported_names(path):
        module = ROOT / name.replace(".", "/")
        for file in (module.with_suffix(".py"), module / "__init__.py"):
            if name and file.is_file() and file not in files:
                needed_files(file, files)
    return files


def requirements(files: set[Path]) -> str:
    """Return the lines of requirements.txt whose packages the files import or tokenizers need."""
    modules = {name.partition(".")[0] for file in files for name in imported_names(file)}
    lines = []
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        package = line.partition(">")[0].partition("=")[0]
        is_needed = PACKAGES.get(package, package) in {*modules, "sentencepiece"}
        if is_needed and not line.startswith("#"):
            lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Copy a script and its modules; print the number of lines and the path of each file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("script", type=lambda path: Path(path).name, choices=list(SCRIPTS))
    parser.add_argument("directory", type=Path, help="created if it does not exist")
    args = parser.parse_args()
    if args.directory.is_dir() and any(args.directory.iterdir()):
        parser.exit(1, f"error: {args.directory} is not empty. Pass a new directory.\n")
    files = needed_files(ROOT / args.script)
    places = {file: file.relative_to(ROOT) for file in files}
    places |= {ROOT / file: Path(place) for file, place in OTHERS.items()}
    total = 0
    for file, place in sorted(places.items()):
        target = args.directory / place
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
        if file in files:
            lines = len(target.read_text().splitlines())
            print(f"{lines:6,}  {target}")
            total += lines
    (args.directory / "requirements.txt").write_text(requirements(files))
    name, flags = Path(args.script).stem, f" {SCRIPTS[args.script]}".rstrip()
    readme = {"SCRIPT": args.script, "NAME": name, " FLAGS": flags}
    words = {"README.md": readme, "test_copy.py": {'"gpt2_fsdp"': f'"{name}"'}}
    for file, replacements in words.items():
        text = (args.directory / file).read_text()
        for old, new in replacements.items():
            text = text.replace(old, new)
        (args.directory / file).write_text(text)
    print(f"{total:6,}  lines in all, and {', '.join(sorted(OTHERS.values()))}, requirements.txt")
    print(f"Next: cd {args.directory}; python {args.script} --model-name tiny "
          f"{SCRIPTS[args.script]}".rstrip())  # fmt: skip


if __name__ == "__main__":
    main()
