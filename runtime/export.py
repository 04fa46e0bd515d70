"""Write Hugging Face files: all ranks gather one tensor at a time, and rank 0 writes it.

Works with any model. All ranks call each function together unless its docstring says otherwise.
"""

import contextlib
import copy
import itertools
import json
import re
import shutil
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.core_model_loading import revert_weight_conversion

from .checks import FOR_TRAINING, SWITCHED_OFF
from .ranks import on_rank_zero, say
from .screen import touch
from .weights import IN_LAYER, first_names, library_class, plain_name, unwrapped

EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FILE_BYTES = 5e9  # a file ends with the layer that exceeds this; rank 0 holds two files
VOCABULARY = ("*.model", "*.spm", "vocab.*", "merges.txt")  # files that other programs read
ROPE_KEYS = {  # of older programs: the layers and the key of `rope_parameters`
    "rope_theta": ("full_attention", "rope_theta"),
    "global_rope_theta": ("full_attention", "rope_theta"),
    "rotary_emb_base": ("full_attention", "rope_theta"),
    "rope_local_base_freq": ("sliding_attention", "rope_theta"),
    "local_rope_theta": ("sliding_attention", "rope_theta"),
    "partial_rotary_factor": ("full_attention", "partial_rotary_factor"),
    "rotary_pct": ("full_attention", "partial_rotary_factor"),
}


def export_model(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, path: Path, dtype: torch.dtype,
    before_each: Callable[[], None] = touch,
) -> None:  # fmt: skip
    """Write a wrapped model as a Hugging Face directory that `from_pretrained` loads.

    When complete, it replaces an existing one. Floating-point tensors are in `stored_dtype`, with
    `save_pretrained`'s keys. `before_each` is called before each tensor and may raise to stop.
    """
    tensors = whole_tensors(model, dtype, before_each)
    with new_directory(path) as temporary:
        write_model(unwrapped(model), tensors, tokenizer, temporary, dtype)


def whole_tensors(
    model: nn.Module, dtype: torch.dtype, before_each: Callable[[], None]
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of each parameter and persistent buffer of a model, tied ones once.

    FSDP1 gathers one unit at a time, on rank 0 only; FSDP2 casts each tensor before gathering it.
    """
    inner = unwrapped(model)
    units = defaultdict(list, {"": []})  # the root first, or FSDP would make another unit the root
    for name, first in first_names(inner).items():
        module, _, key = name.rpartition(".")
        if name == first and key not in inner.get_submodule(module)._non_persistent_buffers_set:
            units[name.rpartition("._fsdp_wrapped_module.")[0]].append(name)
    for unit, names in units.items():
        options = {"recurse": False, "writeback": False, "rank0_only": True}
        with FSDP.summon_full_params(model.get_submodule(unit), **options):  # no-op without FSDP1
            for name in names:
                before_each()
                plain = plain_name(name)
                kept = stored_dtype(inner, plain, dtype)
                yield plain, gather(attrgetter(name)(inner).detach(), kept)


def stored_dtype(model: PreTrainedModel, name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a float tensor in an export: `dtype`, or fp32 if Transformers loads it so
    in any case, such as the biases that route tokens to experts."""
    patterns = model._get_dtype_plan(dtype)  # private, but nothing public tells it
    keeps = any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns)
    return torch.float32 if keeps else dtype


def gather(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the whole tensor, floats cast to `dtype`; a DTensor is gathered on the device."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to(tensor.device_mesh.device_type)
    if tensor.is_floating_point():
        tensor = tensor.to(dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def write_model(
    model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]],
    tokenizer: PreTrainedTokenizerBase, directory: Path, dtype: torch.dtype,
) -> None:  # fmt: skip
    """Write `tensors`, pairs of name and value that rank 0 receives, with config and tokenizer.

    A thread writes each file while the tensors of the next one arrive.
    """
    # Transformers looks up its conversions by class, and knows only its own classes.
    with torch.device("meta"):
        hf_model = library_class(type(model))(copy.deepcopy(model.config))
    hf_model._weight_conversions = getattr(model, "_weight_conversions", None)
    files: list[Future] = []
    with ThreadPoolExecutor(1) as thread:
        for content in _contents(tensors):
            wait(files)
            path = directory / f"part-{len(files)}"
            files.append(thread.submit(_save, hf_model, content, path))

    def finish() -> None:
        keys = name_files([file.result() for file in files], directory)
        config, base = hf_model.config, Path(model.config.name_or_path)
        config.architectures = [type(hf_model).__name__]
        config.dtype = dtype
        settings = _read_json(base / "config.json")
        if settings.get("model_type") != config.model_type:  # a multimodal model
            settings = settings.get("text_config", {})
        settings.pop("tie_word_embeddings", None)
        if not hf_model.all_tied_weights_keys.keys().isdisjoint(keys):
            settings["tie_word_embeddings"] = False  # T5's config always says true
        write_config(config, directory / "config.json", settings)
        path = directory / "generation_config.json"
        write_config(model.generation_config, path, _read_json(base / path.name))
        write_tokenizer(tokenizer, directory)

    on_rank_zero(finish)


def name_files(sizes: list[dict[str, int]], directory: Path) -> set[str]:
    """Name the weight files as `save_pretrained` does, and return the keys of their tensors.

    `sizes` contains for each file the bytes of its tensors by key.
    """
    weight_map = {}
    count = len(sizes)
    for i, keys in enumerate(sizes):
        name = f"model-{i + 1:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
        (directory / f"part-{i}").rename(directory / name)
        weight_map |= dict.fromkeys(keys, name)
    if count > 1:
        metadata = {"total_size": sum(sum(keys.values()) for keys in sizes)}
        index = {"metadata": metadata, "weight_map": weight_map}
        _write_json(index, directory / "model.safetensors.index.json")
    return set(weight_map)


def _read_json(path: Path) -> dict[str, Any]:
    """Return the content of a base model's file; {} if it has no such file."""
    return json.loads(path.read_text()) if path.is_file() else {}


def _write_json(value: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def write_config(
    config: PretrainedConfig | GenerationConfig, path: Path, base: dict[str, Any]
) -> None:
    """Write a config with the values of the `base` model's file and the keys of older programs.

    Each is written only if Transformers still reads the same config.
    """

    def read(settings: dict[str, Any]) -> dict[str, Any]:
        values = type(config).from_dict(copy.deepcopy(settings)).to_dict()
        (values.get("rope_parameters") or {}).pop("type", None)  # an older name of rope_type
        return values

    written = json.loads(config.to_json_string())
    expected = read(written)
    # The base's keys last, because its rope_scaling is read correctly only beside rope_theta.
    for key, value in [*older_rope(written), *base.items()]:
        # A config may reject values with any exception.
        with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
            if read(written | {key: value}) == expected:
                written[key] = value
    for_training = (*FOR_TRAINING, *SWITCHED_OFF)
    written = {key: value for key, value in written.items() if not key.endswith(for_training)}
    for_training = (*for_training, "pad_token_id")
    written |= {key: value for key, value in base.items() if key.endswith(for_training)}
    written["transformers_version"] = transformers.__version__
    if "dtype" in written:
        written["torch_dtype"] = written["dtype"]
    _write_json(written, path)


def older_rope(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys and values in which older programs may read a config's `rope_parameters`."""
    rope = settings.get("rope_parameters") or {}
    for name, (layers, key) in ROPE_KEYS.items():
        values = rope.get(layers) or rope
        if key in values:
            yield name, values[key]
    scaling = {**(rope.get("full_attention") or rope)}
    scaling.pop("rope_theta", None)
    scaling.pop("partial_rotary_factor", None)
    if scaling.get("rope_type", "default") == "default":
        return
    if "original_max_position_embeddings" in settings:  # Phi-3 accepts no other form
        scaling.pop("original_max_position_embeddings", None)
        scaling["type"] = scaling.pop("rope_type")
    yield "rope_scaling", scaling


def write_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write a tokenizer, with the files of its base that it did not change. Rank 0 only."""
    if tokenizer.is_fast:  # it would save the padding and truncation of its last call
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    tokenizer.save_pretrained(directory)
    base = Path(tokenizer.name_or_path)
    if not tokenizer.name_or_path or not base.is_dir():  # --model-name tiny
        return
    original = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    patterns = VOCABULARY
    if repr(tokenizer) == repr(original):  # it contains all settings but the chat template
        patterns = (*VOCABULARY, "*token*.json")
    for pattern in patterns:
        for file in base.glob(pattern):
            shutil.copyfile(file, directory / file.name)
    settings = _read_json(directory / "tokenizer_config.json")
    if "chat_template" in settings and tokenizer.chat_template != original.chat_template:
        settings["chat_template"] = tokenizer.chat_template
        _write_json(settings, directory / "tokenizer_config.json")


def _contents(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each file, in host memory; only rank 0 yields any.

    A layer is not split across files, because a conversion may need all of it.
    """
    pending: dict[str, Tensor] = {}
    for _, layer in itertools.groupby(tensors, lambda item: IN_LAYER.sub(r"\1", item[0])):
        for name, tensor in layer:  # gathered by all ranks
            if dist.get_rank() == 0:
                pending[name] = tensor.to("cpu", copy=True)
        if sum(tensor.nbytes for tensor in pending.values()) > FILE_BYTES:
            yield pending
            pending = {}
    if pending:
        yield pending


def _save(model: PreTrainedModel, tensors: dict[str, Tensor], path: Path) -> dict[str, int]:
    """Write tensors by name as `save_pretrained` does; return the bytes of each one by key."""
    stored = revert_weight_conversion(model, tensors)
    stored = {key: tensor.contiguous() for key, tensor in stored.items()}
    try:
        save_file(stored, path, {"format": "pt"})
    except SafetensorError as error:  # for example on a full disk
        raise OSError(str(error)) from None
    return {key: tensor.nbytes for key, tensor in stored.items()}


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory that replaces `path`, or the target of this link, at the end;
    delete it after an error."""
    target = path.resolve()
    # Never reuse a name: on NFS, a node may see the old directory for up to a minute.
    temporary = target.with_name(f"tmp-{target.name}-{time.time_ns()}")

    def replace() -> None:
        for file in temporary.glob("*.safetensors"):  # safetensors makes them private to the user
            shutil.copymode(temporary / "tokenizer_config.json", file)
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)

    on_rank_zero(lambda: temporary.mkdir(parents=True))
    try:
        yield temporary
        on_rank_zero(replace)  # the other ranks wait
    except BaseException:
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    say(f"The model is in {path}")
