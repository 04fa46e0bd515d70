"""Write a Hugging Face directory: all ranks gather one tensor at a time, rank 0 writes it.

All ranks call each function together unless its docstring differs.
"""

import contextlib
import copy
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from . import weights
from .checkpoint import model_weights
from .ranks import on_rank_zero, print0
from .weights import unwrapped

EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FILE_BYTES = 5_000_000_000  # of a file, at most, unless one tensor is larger
TOKENIZER_FILES = ("*token*.json", "*.model", "*.spm", "vocab.*", "merges.txt")
# Suffixes of settings that differ in training only.
OF_TRAINING = (*weights.SWITCHED_OFF, *weights.ACTIVATIONS, "use_cache", "pad_token_id",
               "name_or_path")  # fmt: skip


def export_model(
    model: nn.Module, tokenizer: Tokenizer, path: Path, dtype: str,
    check_stop: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Write a wrapped model as a directory that `from_pretrained` loads, floats in `stored_dtype`;
    when complete, it replaces `path`. `dtype` is a name in EXPORT_DTYPES. Rank 0 holds the whole
    model in host memory. `check_stop`, called before each tensor, may raise to stop."""
    plain = unwrapped(model)
    tensors = {}
    for name, tensor in model_weights(model).items():
        check_stop()
        tensor = gather(tensor, stored_dtype(plain, name, EXPORT_DTYPES[dtype]))
        if dist.get_rank() == 0:
            tensors[name] = tensor.cpu()
    with new_directory(path) as temporary:
        on_rank_zero(_write, plain, tensors, tokenizer, temporary, dtype)


def stored_dtype(model: PreTrainedModel, name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a float tensor in an export: `dtype`, or fp32 if Transformers loads it so
    in any case, such as biases that route tokens to experts. Any rank."""
    patterns = model._get_dtype_plan(dtype)  # private, but nothing public tells it
    keeps = any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns)
    return torch.float32 if keeps else dtype


def gather(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the whole tensor, floats cast to `dtype`; a DTensor is gathered on the device."""
    if tensor.is_floating_point():
        tensor = tensor.to(dtype)
    if isinstance(tensor, DTensor):
        tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()
    return tensor


def _write(
    model: PreTrainedModel, tensors: dict[str, Tensor], tokenizer: Tokenizer, directory: Path,
    dtype: str,
) -> None:  # fmt: skip
    """Write tensors by name, with the model's settings and the tokenizer."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"  # the only one that may have output_attentions
    with torch.device("meta"):  # Transformers finds its conversions by its own classes
        hf_model = weights.library_class(type(model))(config)
    hf_model._weight_conversions = getattr(model, "_weight_conversions", None)
    is_untied = not hf_model.all_tied_weights_keys.keys().isdisjoint(tensors)
    try:
        hf_model.save_pretrained(directory, state_dict=tensors, max_shard_size=FILE_BYTES)
    except SafetensorError as error:  # for example on a full disk
        raise OSError(str(error)) from None
    base = Path(model.config.name_or_path or "no base")
    settings = _settings(model.config, base / "config.json")
    settings["model_type"] = model.config.model_type
    settings["architectures"] = [type(hf_model).__name__]
    settings["dtype"] = settings["torch_dtype"] = str(EXPORT_DTYPES[dtype]).removeprefix("torch.")
    if is_untied:
        settings["tie_word_embeddings"] = False  # T5's config always says true
    _write_json(settings, directory / "config.json")
    add_stops(model.generation_config, [tokenizer.eos_token_id], tokenizer)
    name = "generation_config.json"
    _write_json(_settings(model.generation_config, base / name), directory / name)
    write_tokenizer(tokenizer, directory)


def _settings(config: PretrainedConfig | GenerationConfig, path: Path) -> dict[str, Any]:
    """Return the settings in a base's file, if it exists, with those that the script changed."""
    version = {"transformers_version": transformers.__version__}
    if not path.is_file():
        return json.loads(config.to_json_string()) | version
    settings = json.loads(path.read_text())
    settings = settings.get("text_config", settings)  # of a multimodal model
    before = type(config).from_dict(copy.deepcopy(settings)).to_dict()
    for name, value in config.to_dict().items():
        if value != before.get(name) and not name.endswith(OF_TRAINING):
            settings[name] = value
    return settings | version


def add_stops(config: GenerationConfig, ends: Sequence[int], tokenizer: Tokenizer) -> None:
    """Add `ends` to the tokens that end a generation, and print them. Any rank."""
    own = config.eos_token_id  # may be no token, such as -1
    own = own if isinstance(own, list) else [own] * (own is not None)
    if new := [x for x in dict.fromkeys(ends) if x not in own]:
        config.eos_token_id = [*own, *new]
        print0(f"Generation also stops at {' '.join(tokenizer.convert_ids_to_tokens(new))}")


def write_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write a tokenizer; copy the files of its base unless it has changed. Rank 0 only."""
    if tokenizer.is_fast:  # it would save the padding and truncation of its last call
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    tokenizer.save_pretrained(directory)
    base = Path(tokenizer.name_or_path or "no base")
    if not base.is_dir():
        return
    original = transformers.AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    if repr(tokenizer) == repr(original):  # of all settings but the template
        for file in itertools.chain(*map(base.glob, TOKENIZER_FILES)):
            shutil.copyfile(file, directory / file.name)
        path = directory / "tokenizer_config.json"
        settings = json.loads(path.read_text())
        has_changed = tokenizer.chat_template != original.chat_template
        if has_changed and "chat_template" in settings:
            _write_json(settings | {"chat_template": tokenizer.chat_template}, path)


def _write_json(value: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory that replaces `path`, or the target of this link, at the end."""
    target = path.resolve()
    temporary = target.with_name(f"tmp-{target.name}")
    on_rank_zero(shutil.rmtree, temporary, True)  # of a process that was killed
    on_rank_zero(temporary.mkdir, 0o777, True)
    try:
        yield temporary
        on_rank_zero(_replace, target, temporary)  # the other ranks wait
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
    print0(f"The model is in {path}")


def _replace(target: Path, temporary: Path) -> None:
    for file in temporary.glob("*.safetensors"):  # safetensors makes them private to the user
        shutil.copymode(temporary / "tokenizer_config.json", file)
    old = target.with_name(f"tmp-old-{target.name}")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)  # on NFS, a directory whose files are in use cannot be deleted
    temporary.rename(target)
    shutil.rmtree(old, ignore_errors=True)
