"""Import rules that keep a script's dependencies known, and what a script shows."""

import ast
import re
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPTS

from tools.copy_script import imported_names

DATA = ("summarization_dataset", "block_dataset", "chat_dataset")
OURS = {*SCRIPTS, *DATA, "policies", "optional", "tools", "benchmarks", "core"}
CORE = sorted((ROOT / "core").glob("*.py"))
ROOMS = sorted((ROOT / "optional").glob("*.py"))


def imports(path: Path) -> set[str]:
    """Return our modules and folders that a file imports."""
    names = imported_names(path, path.read_text())
    return {name.partition(".")[0] for name in names} & OURS


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.stem)
def test_core_names_nothing_above_it_and_does_nothing_on_import(path):
    """Only definitions, constants and imports are at its top level."""
    assert imports(path) <= {"core"}
    text = path.read_text()
    assert not re.search(rf"\b({'|'.join((*SCRIPTS, *DATA))})\b", text)
    definitions = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
    for node in ast.parse(text).body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        assert is_docstring or is_import or isinstance(node, definitions), ast.unparse(node)


def test_modules_import_only_what_is_below_them():
    for name in DATA:
        assert imports(ROOT / f"{name}.py") <= {"core", "optional"}, name
    for path in (ROOT / "policies.py", *ROOMS):
        assert imports(path) <= {"core", "policies"}, path


def test_only_packed_attention_mentions_cuda():
    """All other code uses torch.accelerator, so that any accelerator works."""
    files = [*ROOT.glob("*.py"), *CORE, *ROOMS]
    mentions = {path.name for path in files if re.search(r'torch\.cuda|"cuda"', path.read_text())}
    assert mentions == {"packed_attention.py"}


PARTS = """DataLoader( AdamW( fully_shard( DDP( FSDP( summed_loss( .backward() clip_gradients(
isfinite() scaler.step(optimizer) optimizer.zero_grad() host_sums( checkpoint.prune save("""


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_contains_the_whole_training_in_short_functions(script):
    text = (ROOT / f"{script}.py").read_text()
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    assert "train" in [function.name for function in functions]
    for function in functions:
        assert function.name == "train" or function.end_lineno - function.lineno < 60, function.name
    for part in (*PARTS.split(), 'group["lr"] = lr'):
        assert part in text, part


def test_scripts_share_the_step_and_the_loss():
    texts = [(ROOT / f"{script}.py").read_text() for script in SCRIPTS]
    for start, end in ("        # 3. Count", "        # 6. "), ("def token_loss", "\n\n\n"):
        parts = {text.partition(start)[2].partition(end)[0] for text in texts}
        assert len(parts) == 1 and len(parts.pop()) > 100, start
