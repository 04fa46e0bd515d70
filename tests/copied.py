"""Scripts as who takes one for a template begins: with search and replace."""

from types import ModuleType

from conftest import ROOT


def copied(script: str, replacements: dict[str, str]) -> ModuleType:
    """A module like `script`, whose text has each key replaced by its value."""
    source = (ROOT / f"{script}.py").read_text()
    for old, new in replacements.items():
        assert old in source, old
        source = source.replace(old, new)
    module = ModuleType(script)
    module.__file__ = str(ROOT / f"{script}.py")
    exec(compile(source, module.__file__, "exec"), vars(module))
    return module


def llama_as(name: str, replacements: dict[str, str] | None = None, **config: object) -> ModuleType:
    """llama_fsdp.py for the architecture `name`, whose tiny model has `config` besides."""
    names = {"llama": name.lower(), "Llama": name}
    shape = '"hidden_size": 128,'
    more = "".join(f' "{key}": {value!r},' for key, value in config.items())
    return copied("llama_fsdp", names | {shape: shape + more} | (replacements or {}))
