"""Modules made from the scripts by search and replace, as a user would modify a copy."""

import importlib
from types import ModuleType

from conftest import ROOT


def edited_script(
    script: str, replacements: dict[str, str], in_data: dict[str, str] | None = None
) -> ModuleType:
    """Return a module made from the text of `script`, with each key replaced by its value, and
    `in_data` replaced in the data module that it imports."""
    source = (ROOT / f"{script}.py").read_text()
    for old, new in replacements.items():
        assert old in source, old
        source = source.replace(old, new)
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
    norms = {} if name == "Llama" else {"(modeling_llama.LlamaRMSNorm,)": "()"}
    return norms | {
        "models.llama import modeling_llama": f"models.{folder} import modeling_{folder}",
        "modeling_llama.": f"modeling_{folder}.",
        "Llama": name,
        last_entry: last_entry + entries,
    }


def llama_as(name: str, folder: str = "", **config: object) -> ModuleType:
    """Return llama_fsdp.py changed for another architecture (see `llama_changes`)."""
    return edited_script("llama_fsdp", llama_changes(name, folder, **config))
