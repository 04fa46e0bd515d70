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
    """Replace files in `directory` by those of the base where they are the same, and in its configs
    only change what the script has changed. Adapters have no configs. Call on rank 0."""
    copy_tokenizer(tokenizer, directory)
    if config is None:
        return
    base = Path(config.name_or_path or "no base")
    settings = merge_settings(config, base / "config.json")
    settings["model_type"] = config.model_type
    settings["dtype"] = settings["torch_dtype"] = str(config.dtype).removeprefix("torch.")
    _write_json(settings, directory / "config.json")
    name = "generation_config.json"
    _write_json(merge_settings(generation_config, base / name), directory / name)


def merge_settings(config: PretrainedConfig | GenerationConfig, path: Path) -> dict:
    """Return the settings in the file of the base, also unknown ones, with the values that the
    script has changed; without a file, those of `config`."""
    settings = json.loads(path.read_text() if path.is_file() else config.to_json_string())
    is_part = "text_config" in settings and settings["model_type"] != config.model_type
    if is_part:
        settings = settings["text_config"]
    base_config = type(config).from_dict(copy.deepcopy(settings))
    if is_part:  # other programs have other defaults for the part alone
        settings = json.loads(base_config.to_json_string(use_diff=False)) | settings
    apply_changes(settings, base_config.to_dict(), config.to_dict())
    return settings | {"transformers_version": transformers.__version__}


def apply_changes(settings: dict, before: dict, now: dict) -> None:
    """Set in `settings` the values that differ between two configs, and in those of their parts."""
    for name, value in now.items():
        was = before.get(name)
        if value == was or name == "_name_or_path":
            continue
        if name in settings and name.endswith("_config"):
            apply_changes(settings[name], was, value)
        else:
            settings[name] = value


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
