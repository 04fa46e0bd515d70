"""The base's own tokenizer files and config in exports. Without this file, they are as Transformers
saves them; some other programs then find no tokenizer, or use wrong defaults."""

import copy
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import transformers
from transformers import GenerationConfig, PretrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

TOKENIZER_FILES = ("*token*.json", "*.model", "*.spm", "vocab.*", "merges.txt")


def keep(export: Callable) -> Callable:
    """Return `core.export.export_model`, or a function that calls it, that keeps the files."""
    return partial(export, rewrite=rewrite)


def rewrite(
    directory: Path, tokenizer: Tokenizer, config: PretrainedConfig | None = None,
    generation_config: GenerationConfig | None = None,
) -> None:  # fmt: skip
    """Replace files in `directory` by those of the base, with what the script has changed. Adapters
    have no configs. Call on rank 0."""
    copy_tokenizer(tokenizer, directory)
    if config is None:
        return
    base = Path(config.name_or_path or "no base")
    for part, name in ((config, "config.json"), (generation_config, "generation_config.json")):
        write_settings(part, base / name, directory / name)


def write_settings(config: PretrainedConfig | GenerationConfig, base: Path, path: Path) -> None:
    """Write the settings in the file `base`, also unknown ones, with the values that the script has
    changed; those in the file `path` if there is no base, or `config` is a part of the base's."""
    settings = json.loads(path.read_text())
    if base.is_file():
        of_base = json.loads(base.read_text())
        if of_base.get("model_type") == settings.get("model_type"):
            settings = of_base
    before = type(config).from_dict(copy.deepcopy(settings)).to_dict()
    for name, value in config.to_dict().items():
        if value != before.get(name) and name != "_name_or_path":
            settings[name] = value
    if "dtype" in settings:
        settings["torch_dtype"] = settings["dtype"]  # its name in Transformers 4
    _write_json(settings, path)


def copy_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Copy the files of a tokenizer's base unless it has changed, but with its template."""
    base = Path(tokenizer.name_or_path or "no base")
    if not base.is_dir():
        return
    original = transformers.AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    if repr(tokenizer) != repr(original):  # all settings but the template
        return
    for pattern in TOKENIZER_FILES:
        for file in base.glob(pattern):
            shutil.copyfile(file, directory / file.name)
    template = tokenizer.chat_template
    if template != original.chat_template:
        path = directory / "tokenizer_config.json"
        _write_json(json.loads(path.read_text()) | {"chat_template": template}, path)


def _write_json(value: dict, path: Path) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
