"""Hugging Face files out: all ranks gather one tensor at a time, and rank 0 writes it.

Names no model. All ranks call a function together unless it says otherwise.
"""

import contextlib
import copy
import json
import os
import shutil
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
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

from .ranks import on_rank_zero
from .weights import IN_LAYER, library_class, plain_name, unwrapped

EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FILE_BYTES = 5e9  # of a file at most; rank 0 holds two


def export_model(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, path: Path, args: Namespace
) -> None:
    """Write a wrapped model as a Hugging Face directory that `from_pretrained` loads.

    The directory replaces the one before when it is complete. Floating-point tensors are written as
    --export-dtype, under the keys that `save_pretrained` would give them.
    """
    tensors = whole_tensors(model, EXPORT_DTYPES[args.export_dtype])
    with new_directory(path) as temporary:
        write_model(unwrapped(model), tensors, tokenizer, temporary, args)


def whole_tensors(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of each parameter and persistent buffer of a model, tied ones once.
    Floating-point values are cast to `dtype`, by FSDP2 before they are gathered."""
    inner = unwrapped(model)
    firsts = {name for name, _ in inner.named_parameters()}
    prefixes = {module: name for name, module in inner.named_modules()}
    units = [model]
    if isinstance(model, FSDP):
        units = FSDP.fsdp_modules(model)  # the root first, or an inner one would become a root
    for unit in units:
        nested: set[nn.Module] = set()
        whole = contextlib.nullcontext()
        if isinstance(unit, FSDP):
            nested = {m for other in FSDP.fsdp_modules(unit)[1:] for m in other.modules()}
            whole = FSDP.summon_full_params(unit, recurse=False, writeback=False)
        with whole:
            for module in unit.modules():
                if module in prefixes and module not in nested:
                    for name, tensor in _own_tensors(module, prefixes[module]):
                        if name in firsts or not isinstance(tensor, nn.Parameter):
                            yield plain_name(name), gather(tensor.detach(), dtype)


def _own_tensors(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own parameters and persistent buffers."""
    yield from module.named_parameters(prefix, recurse=False)
    for name, buffer in module.named_buffers(prefix, recurse=False):
        if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
            yield name, buffer


def gather(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor, or all of a DTensor, gathered on the device though it is offloaded."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to(tensor.device_mesh.device_type)
    if tensor.is_floating_point():
        tensor = tensor.to(dtype)
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor


def write_model(
    model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]],
    tokenizer: PreTrainedTokenizerBase, directory: Path, args: Namespace,
) -> None:  # fmt: skip
    """Write the tensors that rank 0 gets from `tensors`, by name, with configuration and tokenizer.

    A thread writes each file while the tensors of the next one arrive. A layer is not divided among
    files, as a conversion may need all of it.
    """
    thread = ThreadPoolExecutor(1)
    files: list[Future] = []
    held: dict[str, Tensor] = {}  # of the next file
    size, layer = 0, ""

    # Transformers looks its conversions up by class, and knows its own alone.
    with torch.device("meta"):
        like = library_class(type(model))(model.config)
    like._weight_conversions = getattr(model, "_weight_conversions", None)

    def write() -> None:
        wait(files)
        files.append(thread.submit(_save, like, held, directory / f"{len(files):05d}"))

    for name, tensor in tensors:
        if dist.get_rank() != 0:
            continue
        match = IN_LAYER.search(name)
        is_new_layer = match is None or name[: match.end()] != layer
        layer = name[: match.end()] if match else ""
        if is_new_layer and held and size + tensor.nbytes > FILE_BYTES:
            write()
            held, size = {}, 0
        held[name] = tensor.to("cpu", copy=True)
        size += tensor.nbytes
    if dist.get_rank() == 0:
        write()
    on_rank_zero(_finish, files, directory)

    def write_settings() -> None:
        config = copy.deepcopy(model.config)
        config.architectures = [library_class(type(model)).__name__]
        config.dtype = EXPORT_DTYPES[args.export_dtype]
        config.save_pretrained(directory)
        generation = model.generation_config.to_json_string()  # save_pretrained may refuse it
        (directory / "generation_config.json").write_text(generation)
        tokenizer.save_pretrained(directory)

    on_rank_zero(write_settings)


def _save(model: PreTrainedModel, tensors: dict[str, Tensor], path: Path) -> dict[str, int]:
    """Write tensors by name as `save_pretrained` does; return their sizes by key."""
    stored = revert_weight_conversion(model, tensors)
    stored = {key: tensor.contiguous() for key, tensor in stored.items()}
    try:
        save_file(stored, path, {"format": "pt"})
    except SafetensorError as error:  # such as of a full disk
        raise OSError(f"{path} cannot be written ({error}). Free some space.") from None
    return {key: tensor.nbytes for key, tensor in stored.items()}


def _finish(files: list[Future], directory: Path) -> None:
    """Name the files that `_save` wrote and write their index; raise OSError if one failed."""
    size, weight_map = 0, {}
    for number, file in enumerate(files):
        name = "model.safetensors"
        if len(files) > 1:
            name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        sizes = file.result()
        (directory / f"{number:05d}").rename(directory / name)
        weight_map |= dict.fromkeys(sizes, name)
        size += sum(sizes.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


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


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a directory of rank 0's that replaces `path` on leaving, or goes after an error."""
    # No name is used twice: a node with NFS may for a minute take the new one for the old one.
    temporary = path.with_name(f"tmp-{path.name}-{time.time_ns()}")
    on_rank_zero(lambda: temporary.mkdir(parents=True))
    try:
        yield temporary
    except BaseException:
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise

    def replace() -> None:
        mask = os.umask(0)
        os.umask(mask)
        for file in temporary.glob("*.safetensors"):  # safetensors makes them for one user
            file.chmod(0o666 & ~mask)
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)

    on_rank_zero(replace)  # the others wait for it
