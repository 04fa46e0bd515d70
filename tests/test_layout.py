"""Import rules that keep a script's dependencies known, and limits on the scripts' size."""

import ast
import re
from pathlib import Path

import pytest
from conftest import ROOT

SCRIPTS = {"T5_training", "gpt2_fsdp", "llama_fsdp", "memory_estimator"}
DATA = {"summarization_dataset", "block_dataset", "chat_dataset"}


def modules_of_runtime() -> list[Path]:
    """Return all Python files below runtime/."""
    return sorted((ROOT / "runtime").rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Return the top-level names of all modules that a file imports. Relative ones start with a
    dot."""
    return set(re.findall(r"^\s*(?:from|import) (\.?\w*)", path.read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", sorted(DATA | {"policies"}))
def test_data_modules_import_only_runtime(name):
    assert not imports(ROOT / f"{name}.py") & (SCRIPTS | DATA | {"policies"})


def test_runtime_imports_no_script_or_data_module():
    modules = modules_of_runtime()
    assert len(modules) > 5
    for path in modules:
        assert not imports(path) & (SCRIPTS | DATA | {"policies", "runtime"}), path
    assert not any(name.startswith(".") for name in imports(ROOT / "runtime/ranks.py"))


def test_only_attention_mentions_cuda():
    """All other code uses torch.accelerator, so that any accelerator works."""
    mentions = set()
    for path in (*ROOT.glob("*.py"), *modules_of_runtime()):
        for line in path.read_text().splitlines():
            if "torch.cuda" in line or '"cuda"' in line:
                mentions.add((path.name, line.strip()))
    assert mentions == {
        (
            "attention.py",
            "if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):",
        ),
        ("attention.py", "if torch.cuda.get_device_capability()[0] == 9:"),
    }


LIMITS = {"T5_training": 340, "gpt2_fsdp": 420, "llama_fsdp": 460}


@pytest.mark.parametrize("script", LIMITS)
def test_script_contains_the_whole_training_in_short_functions(script):
    text = (ROOT / f"{script}.py").read_text()
    assert len(text.splitlines()) <= LIMITS[script]
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    assert "train" in [function.name for function in functions]
    for function in functions:
        assert function.end_lineno - function.lineno < 60, function.name
    for part in (
        "DataLoader(",
        "AdamW(",
        "fully_shard(",
        ".backward()",
        "scaler.step(optimizer)",
        "scheduler.step()",
        "zero_grad()",
    ):
        assert part in text, part
