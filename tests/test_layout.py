"""Import rules that keep a script's dependencies known, marks of optional lines, and what a script
shows."""

import ast
import re
from pathlib import Path

import pytest
from conftest import ROOT

SCRIPTS = {"T5_training", "gpt2_fsdp", "llama_fsdp"}
DATA = {"summarization_dataset", "block_dataset", "chat_dataset"}
OURS = SCRIPTS | DATA | {"policies", "optional", "tools", "benchmarks", "core"}
CORE = sorted((ROOT / "core").glob("*.py"))
ROOMS = sorted(path.stem for path in (ROOT / "optional").glob("*.py"))


def imports(path: Path) -> set[str]:
    """Return the top-level names of all modules that a file imports; relative ones are empty."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("" if node.level else node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.stem)
def test_core_imports_and_names_nothing_above_it(path):
    assert not imports(path) & OURS
    text = path.read_text()
    for name in SCRIPTS | DATA:
        assert not re.search(rf"\b{name}\b", text), name
    if path.name == "ranks.py":
        assert "" not in imports(path)


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.stem)
def test_core_does_nothing_on_import(path):
    """Only definitions, constants and imports are at its top level."""
    for node in ast.parse(path.read_text()).body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        kinds = (ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef | ast.Assign
                 | ast.AnnAssign)  # fmt: skip
        assert is_docstring or isinstance(node, kinds), ast.unparse(node)


@pytest.mark.parametrize("name", sorted(DATA | {"policies"}))
def test_data_modules_and_policies_import_only_core(name):
    allowed = {"core", "optional"} if name in DATA else {"core"}
    assert imports(ROOT / f"{name}.py") & OURS <= allowed


def test_optional_modules_import_no_script_and_no_other_room():
    assert len(ROOMS) > 8
    for name in ROOMS:
        assert imports(ROOT / f"optional/{name}.py") & OURS <= {"core", "policies"}, name


def test_lines_that_mention_an_optional_module_are_marked():
    """Besides scripts and data modules, only benchmarks and tools import optional modules."""
    for name in SCRIPTS | DATA:
        for line in (ROOT / f"{name}.py").read_text().splitlines():
            mark = re.search(r"  # optional: (\w+)$", line)
            assert not mark or mark[1] in ROOMS, line
            is_import = re.match(r"(from|import) optional", line)
            uses = re.findall(rf"\b({'|'.join(ROOMS)})\.\w", line.partition("  # ")[0])
            assert bool(mark) or not (is_import or uses), f"{name}: {line}"


def test_only_packed_attention_mentions_cuda():
    """All other code uses torch.accelerator, so that any accelerator works."""
    files = [*ROOT.glob("*.py"), *CORE, *(ROOT / "optional").glob("*.py")]
    mentions = {path.name for path in files if re.search(r'torch\.cuda|"cuda"', path.read_text())}
    assert mentions == {"packed_attention.py"}


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_script_contains_the_whole_training_in_short_functions(script):
    text = (ROOT / f"{script}.py").read_text()
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    assert "train" in [function.name for function in functions]
    for function in functions:
        assert function.name == "train" or function.end_lineno - function.lineno < 60, function.name
    for part in (
        "DataLoader(",
        "AdamW(",
        "fully_shard(",
        "DDP(",
        "FSDP(",
        "summed_loss(",
        ".backward()",
        "clip_gradients(",
        "isfinite()",
        "scaler.step(optimizer)",
        "optimizer.zero_grad()",
        'group["lr"] = lr',
        "host_sums(",
        "save(path, checkpoint.snapshot(model, optimizer, state), state",
        "checkpoint.prune,",
    ):
        assert part in text, part
