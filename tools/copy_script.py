"""Copy a script and the modules of this repository that it imports.

python tools/copy_script.py gpt2_fsdp.py ../my_project
"""

import argparse
import ast
import shutil
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


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


def main() -> None:
    """Copy a script and its modules; print the number of lines and the path of each file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    scripts = ["T5_training.py", "gpt2_fsdp.py", "llama_fsdp.py"]
    parser.add_argument("script", type=lambda path: Path(path).name, choices=scripts)
    parser.add_argument("directory", type=Path, help="created if it does not exist")
    args = parser.parse_args()
    if args.directory.is_dir() and any(args.directory.iterdir()):
        parser.exit(1, f"error: {args.directory} is not empty. Pass a new directory.\n")
    total = 0
    for file in sorted(needed_files(ROOT / args.script)):
        target = args.directory / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
        lines = len(target.read_text().splitlines())
        print(f"{lines:6,}  {target}")
        total += lines
    print(f"{total:6,}  lines in all")


if __name__ == "__main__":
    main()
