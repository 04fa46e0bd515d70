"""Copy a script, the modules that it imports, and what makes them a project of their own.

python tools/copy_script.py gpt2_fsdp.py ../my_project --without trackers watchdog
python tools/copy_script.py gpt2_fsdp.py ../my_project --without all

The copy has the license, the requirements, launch.slurm, two tools, settings of ruff, a README and
a test. --without NAME leaves out all lines that end in `# optional: NAME`, and with them the file
of that name in optional/ or prepare/, or the folder prepare/.
"""

import argparse
import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("T5_training.py", "gpt2_fsdp.py", "llama_fsdp.py")
# Files of the repository, and their places in a copy.
OTHERS = {x: x for x in ("LICENSE", "launch.slurm", "requirements-extras.txt")}
OTHERS |= {x: x for x in ("tools/generate.py", "tools/docstrings.py")}
OTHERS |= {"tools/copy/README.md": "README.md", "tools/copy/test_copy.py": "test_copy.py"}
MARK = re.compile(r"  # optional: (\w+)$", re.MULTILINE)
PACKAGES = {"rouge-score": "rouge_score"}  # packages whose modules have other names


def read(path: Path, without: Sequence[str]) -> str:
    """Return the text of a file without the lines that are marked with an optional module."""
    lines = path.read_text().splitlines(keepends=True)
    marks = [MARK.search(line.rstrip()) for line in lines]
    pairs = zip(lines, marks, strict=True)
    return "".join(line for line, mark in pairs if not (mark and mark[1] in without))


def imported_names(path: Path, text: str) -> Iterator[str]:
    """Yield the absolute names of all modules that a file imports, including inside functions."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def needed_files(path: Path, without: Sequence[str] = ()) -> dict[Path, str]:
    """Return the text of `path` and of all files of this repository that it imports, directly or
    indirectly, when the optional modules `without` are left out."""
    files: dict[Path, str] = {}
    waiting = [path]
    while waiting:
        path = waiting.pop()
        files[path] = read(path, without)
        for name in filter(None, imported_names(path, files[path])):
            module = ROOT / name.replace(".", "/")
            found = (module.with_suffix(".py"), module / "__init__.py")
            waiting += [x for x in found if x.is_file() and x not in files]
    return files


def rooms_of(files: dict[Path, str]) -> list[str]:
    """Return the names in the marks of a script's files: what can be left out."""
    return sorted({name for text in files.values() for name in MARK.findall(text)})


def requirements(files: dict[Path, str]) -> str:
    """Return the lines of requirements.txt whose packages the files import or tokenizers need."""
    needed = {x.partition(".")[0] for file in files.items() for x in imported_names(*file)}
    needed.add("sentencepiece")
    lines = (ROOT / "requirements.txt").read_text().splitlines(keepends=True)
    names = {line: line.partition(">")[0] for line in lines}
    return "".join(line for line, name in names.items() if PACKAGES.get(name, name) in needed)


def main() -> None:
    """Copy a script and its modules; print the number of lines and the path of each file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("script", type=lambda path: Path(path).name, choices=SCRIPTS)
    parser.add_argument("directory", type=Path, help="created if it does not exist")
    help_text = "leave out these optional parts, or all"
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help=help_text)
    args = parser.parse_args()
    if args.directory.is_dir() and any(args.directory.iterdir()):
        parser.exit(1, f"error: {args.directory} is not empty. Pass a new directory.\n")
    rooms = rooms_of(needed_files(ROOT / args.script))
    without = rooms if "all" in args.without else args.without
    if unknown := set(without) - set(rooms):
        text = f"{args.script} has no optional {', '.join(sorted(unknown))}. It has: "
        parser.exit(1, f"error: {text}{', '.join(rooms)}.\n")
    files = needed_files(ROOT / args.script, without)
    texts = {str(file.relative_to(ROOT)): text for file, text in files.items()}
    texts |= {place: (ROOT / file).read_text() for file, place in OTHERS.items()}
    texts["requirements.txt"] = requirements(files)
    settings, _, _ = (ROOT / "pyproject.toml").read_text().partition("\n[tool.pytest")
    texts["pyproject.toml"] = settings
    name = Path(args.script).stem
    readme = {"SCRIPT": args.script, "output/NAME": f"output/{name}"}
    words = {"README.md": readme, "test_copy.py": {'"gpt2_fsdp"': f'"{name}"'}}
    words["launch.slurm"] = {"script=T5_training.py": f"script={args.script}"}
    total = 0
    for place, text in sorted(texts.items()):
        for old, new in words.get(place, {}).items():
            text = text.replace(old, new)
        target = args.directory / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        if ROOT / place in files:
            total += (lines := len(text.splitlines()))
            print(f"{lines:6,}  {target}")
    others = ", ".join(sorted(texts.keys() - {str(file.relative_to(ROOT)) for file in files}))
    print(f"{total:6,}  lines in all, and {others}")
    place = f"cd {args.directory}; "
    start = f"python {args.script} --model-name tiny --dataset"
    if "prepare" in without:
        flags = f"--model-name tiny --dataset docstrings.jsonl --output-dir {args.directory}/data"
        print("Next: python tools/docstrings.py docstrings.jsonl")
        print(f"      python tools/prepare.py {args.script} {flags}")
        print(f"      {place}{start} data/prepared")
        return
    print(f"Next: {place}python tools/docstrings.py docstrings.jsonl")
    print(f"      {start} docstrings.jsonl")


if __name__ == "__main__":
    main()
