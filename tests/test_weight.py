"""Limits on the size of a copy: a script and all modules that it imports."""

import ast
from pathlib import Path

import pytest
from conftest import ROOT

from tools.copy_script import needed_files

LIMITS = {  # lines, syntax nodes
    "T5_training.py": (5058, 37509),
    "gpt2_fsdp.py": (4843, 35845),
    "llama_fsdp.py": (6057, 45907),
    "runtime/": (4955, 36944),
}


def count_nodes(path: Path) -> int:
    """Return the number of syntax nodes in a file, except its docstrings. Formatting and comments
    do not change it."""
    tree = ast.parse(path.read_text())
    documentable = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, documentable) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return sum(1 for _ in ast.walk(tree))


@pytest.mark.parametrize("name", LIMITS)
def test_copy_stays_within_size_limits(name):
    path = ROOT / name
    files = set(path.rglob("*.py")) if path.is_dir() else needed_files(path)
    lines = sum(len(path.read_text().splitlines()) for path in files)
    nodes = sum(map(count_nodes, files))
    max_lines, max_nodes = LIMITS[name]
    assert lines <= max_lines, f"{lines:,} lines in {len(files)} files"
    assert nodes <= max_nodes, f"{nodes:,} syntax nodes"
