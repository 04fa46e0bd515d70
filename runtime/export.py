"""Write Hugging Face files: all ranks gather one tensor at a time, and rank 0 writes it.

Works with any model. All ranks call each function together unless its docstring says otherwise.
"""

import contextlib
import copy
import itertools
import json
import os
import shutil
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from operator import attrgetter
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from .ranks import on_rank_zero, say
from .watchdog import touch
from .weights import IN_LAYER, first_names, library_class, plain_name, unwrapped

EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FILE_BYTES = 5e9  # a file ends with the layer that exceeds this; rank 0 holds two files


def export_model(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, path: Path, args: Namespace,
    before_each: Callable[[], None] = touch,
) -> None:  # fmt: skip
    """Write a wrapped model as a Hugging Face directory that `from_pretrained` loads.

    When complete, it replaces an existing one. Floating-point tensors are in --export-dtype, with
    `save_pretrained`'s keys. `before_each` is called before each tensor and may raise to stop.
    """
    tensors = whole_tensors(model, EXPORT_DTYPES[args.export_dtype], before_each)
    with new_directory(path) as temporary:
        write_model(unwrapped(model), tensors, tokenizer, temporary, args)


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
                yield plain_name(name), gather(attrgetter(name)(inner).detach(), dtype)


def gather(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the whole tensor, floats cast to `dtype`; a DTensor is gathered on the device."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to(tensor.device_mesh.device_type)
    if tensor.is_floating_point():
        tensor = tensor.to(dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def write_model(
    model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]],
    tokenizer: PreTrainedTokenizerBase, directory: Path, args: Namespace,
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
            path = directory / f"model-{len(files) + 1:05d}.safetensors"
            files.append(thread.submit(_save, hf_model, content, path))

    def finish() -> None:
        weight_map = {key: name for file in files for key, name in file.result().items()}
        if len(files) == 1:
            (directory / "model-00001.safetensors").rename(directory / "model.safetensors")
        else:
            index = json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1)
            (directory / "model.safetensors.index.json").write_text(index)
        hf_model.config.architectures = [type(hf_model).__name__]
        hf_model.config.dtype = EXPORT_DTYPES[args.export_dtype]
        hf_model.config.save_pretrained(directory)
        generation = model.generation_config.to_json_string()  # save_pretrained may reject it
        (directory / "generation_config.json").write_text(generation)
        tokenizer.save_pretrained(directory)

    on_rank_zero(finish)


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


def _save(model: PreTrainedModel, tensors: dict[str, Tensor], path: Path) -> dict[str, str]:
    """Write tensors by name as `save_pretrained` does; return the file's name for each key."""
    stored = revert_weight_conversion(model, tensors)
    stored = {key: tensor.contiguous() for key, tensor in stored.items()}
    try:
        save_file(stored, path, {"format": "pt"})
    except SafetensorError as error:  # for example on a full disk
        raise OSError(str(error)) from None
    return dict.fromkeys(stored, path.name)


def copy_export(source: Path, path: Path) -> None:
    """Make `path` a copy of an exported directory, with hard links to its weights if possible."""
    with new_directory(path) as temporary:
        if dist.get_rank() == 0:
            shutil.copytree(source, temporary, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, path: str) -> None:
    if source.endswith(".safetensors"):
        with contextlib.suppress(OSError):
            os.link(source, path)
            return
    shutil.copy2(source, path)


def check_target(path: Path) -> Path:
    """Return the directory that an export to `path` replaces: the target if `path` is a link. Raise
    ValueError if it cannot be replaced, or if it contains other files than an export's."""
    target = Path(os.path.realpath(path))
    is_ours = not path.is_symlink() or (target / "tokenizer_config.json").is_file()
    is_free = target.is_dir() and (is_ours or not any(target.iterdir())) and not target.is_mount()
    parent_is_writable = os.access(target.parent, os.W_OK)
    if not parent_is_writable or (os.path.lexists(target) and not is_free):
        raise ValueError(
            f"{path} is {target}, which an export cannot replace. Link it to an empty directory, "
            "not a mount point, in a directory that you may write to."
        )
    return target


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory that replaces `path`, or the target of this link, at the end;
    delete it after an error."""
    target = Path(os.path.realpath(path))
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
