"""Modules made from the scripts by search and replace, as a user would modify a copy."""

import importlib
import re
from types import ModuleType

from conftest import ROOT

PAGE = (ROOT / "docs/change-a-script.md").read_text()
EXAMPLES = {path.stem: path.read_text() for path in (ROOT / "docs/examples").glob("*.py")}
DOCSTRINGS = {name: text.split('"""')[1] for name, text in EXAMPLES.items()}
EMA_SECTION = DOCSTRINGS["ema"]


def diffs(text: str) -> dict[str, str]:
    """Return the replacements that the diffs in a page describe."""
    replacements = {}
    for diff in re.findall(r"```diff\n(.*?)```", text, re.DOTALL):
        lines = diff.splitlines()
        old, new = ([x[1:] for x in lines if x[:1] != sign] for sign in "+-")
        replacements["\n".join(old) + "\n"] = "\n".join(new) + "\n"
    return replacements


def edited_text(script: str, replacements: dict[str, str]) -> str:
    """Return the text of a script with each key replaced by its value. Fail if one is missing."""
    source = (ROOT / f"{script}.py").read_text()
    for old, new in replacements.items():
        assert old in source, old
        source = source.replace(old, new)
    return source


def edited_script(
    script: str, replacements: dict[str, str], in_data: dict[str, str] | None = None
) -> ModuleType:
    """Return a module made from the `edited_text` of a script, and with `in_data` replaced in the
    data module that it imports."""
    source = edited_text(script, replacements)
    module = ModuleType(script)
    module.__file__ = importlib.import_module(script).__file__  # where tyro reads the help
    exec(compile(source, module.__file__, "exec"), vars(module))
    if in_data:
        (name,) = (name for name in vars(module) if name.endswith("_dataset"))
        setattr(module, name, edited_script(name, in_data))
    return module


def llama_changes(name: str, folder: str = "", **config: object) -> dict[str, str]:
    """Return the changes that turn llama_fsdp.py into a script for the architecture `name`, with
    `config` added to TINY_CONFIG. `folder` is its folder in Transformers; the default is the name
    in lower case."""
    folder = folder or name.lower()
    last_entry = '"num_key_value_heads": 2,'
    entries = "".join(f' "{key}": {value!r},' for key, value in config.items())
    return {
        "models.llama import modeling_llama": f"models.{folder} import modeling_{folder}",
        "modeling_llama.": f"modeling_{folder}.",
        "Llama": name,
        last_entry: last_entry + entries,
    }


def llama_as(name: str, folder: str = "", **config: object) -> ModuleType:
    """Return llama_fsdp.py changed for another architecture (see `llama_changes`)."""
    return edited_script("llama_fsdp", llama_changes(name, folder, **config))
