"""Limits on the size of a copy: a script and all modules that it imports."""

import ast
from pathlib import Path

import pytest
from conftest import ROOT

from tools.copy_script import ROOMS, needed_files

COPIES = {  # limits of the core copy and of the full copy: lines, files
    "T5_training.py": ((2650, 15), (3300, 21)),
    "gpt2_fsdp.py": ((2350, 15), (3000, 20)),
    "llama_fsdp.py": ((2800, 15), (4200, 25)),
}
DENSITY = 7.3  # syntax nodes per line of a full copy: no limit is met by packing
FOLDERS = {"core": (1500, 12), "optional": (1700, 14), "tests": (10_000, 100)}


def measure(files: set[Path]) -> tuple[int, int]:
    """Return the number of lines and of files."""
    return sum(len(path.read_text().splitlines()) for path in files), len(files)


def count_nodes(path: Path) -> int:
    """Return the number of syntax nodes in a file, except its docstrings. Formatting and comments
    do not change it."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        documentable = ast.Module | ast.ClassDef | ast.FunctionDef
        if isinstance(node, documentable) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return sum(1 for _ in ast.walk(tree))


@pytest.mark.parametrize("script", COPIES)
def test_copy_is_within_its_limits(script):
    for (lines, count), without in zip(COPIES[script], (ROOMS, []), strict=True):
        files = set(needed_files(ROOT / script, without))
        size = measure(files)
        assert size[0] <= lines and size[1] <= count, size
    assert sum(map(count_nodes, files)) / size[0] <= DENSITY
    assert measure({ROOT / script})[0] <= 440


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_is_within_its_limits(folder):
    lines, files = measure(set((ROOT / folder).rglob("*.py")))
    assert lines <= FOLDERS[folder][0] and files <= FOLDERS[folder][1], (lines, files)
