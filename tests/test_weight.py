"""Limits on the size of a copy: a script and all modules that it imports."""

import ast
from pathlib import Path

import pytest
from conftest import ROOT

from tools.copy_script import ROOMS, needed_files

LIMITS = {  # by figure: what a copy without and with optional/ may have, and what folders may
    "T5_training.py": {"lines": 440, "core lines": 2650, "core files": 15, "full lines": 3300,
                       "full files": 21, "density": 7.3},
    "gpt2_fsdp.py": {"lines": 440, "core lines": 2350, "core files": 15, "full lines": 3000,
                     "full files": 20, "density": 7.3},
    "llama_fsdp.py": {"lines": 440, "core lines": 2800, "core files": 15, "full lines": 4200,
                      "full files": 25, "density": 7.3},
    "core": {"lines": 1500, "files": 12},
    "optional": {"lines": 1700, "files": 14},
    "tests": {"lines": 10_000},
}  # fmt: skip
# Figures above their limits. They may not grow, and one that is within its limit must leave here.
ABOVE = {
    "T5_training.py": {"core lines": 2710, "density": 7.87},
    "gpt2_fsdp.py": {"core lines": 2682, "full lines": 3096, "density": 7.83},
    "llama_fsdp.py": {"core lines": 3024, "density": 7.99},
    "core": {"lines": 1803},
}


def lines_of(files: set[Path]) -> int:
    """Return the number of lines in files."""
    return sum(len(path.read_text().splitlines()) for path in files)


def count_nodes(path: Path) -> int:
    """Return the number of syntax nodes in a file, except its docstrings. Formatting and comments
    do not change it."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        documentable = ast.Module | ast.ClassDef | ast.FunctionDef
        if isinstance(node, documentable) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return sum(1 for _ in ast.walk(tree))


def measure(name: str) -> dict[str, float]:
    """Return the figures of a script or folder."""
    if not name.endswith(".py"):
        files = set((ROOT / name).rglob("*.py"))
        return {"lines": lines_of(files), "files": len(files)}
    core, full = (set(needed_files(ROOT / name, without)) for without in (ROOMS, []))
    density = sum(map(count_nodes, full)) / lines_of(full)
    return {"lines": lines_of({ROOT / name}), "core lines": lines_of(core), "core files": len(core),
            "full lines": lines_of(full), "full files": len(full),
            "density": round(density, 2)}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_size_is_within_its_limits(name):
    figures = measure(name)
    above = {key: figures[key] for key, limit in LIMITS[name].items() if figures[key] > limit}
    known = ABOVE.get(name, {})
    assert above.keys() == known.keys(), above
    assert all(above[key] <= known[key] for key in known), above
    if above:
        pytest.xfail(f"above the limits: {above}")
