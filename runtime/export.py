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
from collections.abc import Callable, Iterator
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

from .ranks import cpu_group, on_rank_zero
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
    inner = unwrapped(model)
    with new_directory(path) as temporary, FileWriter(inner, temporary) as writer:
        for name, tensor in whole_tensors(model, EXPORT_DTYPES[args.export_dtype]):
            if dist.get_rank() == 0:
                writer.add(name, tensor)
        on_rank_zero(writer.finish)
        if dist.get_rank() == 0:
            save_settings(inner, tokenizer, temporary, args)


def whole_tensors(
    model: nn.Module, dtype: torch.dtype | None, is_wanted: Callable[[str], bool] = lambda _: True
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of each wanted parameter and persistent buffer of a model, tied ones
    once. Floating-point values are cast to `dtype`, by FSDP2 before they are gathered."""
    inner = unwrapped(model)
    firsts = {plain_name(name) for name, _ in inner.named_parameters()}
    names = {module: name for name, module in inner.named_modules()}
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
                if module not in names or module in nested:
                    continue
                for key, tensor in _saved_tensors(module):
                    name = plain_name(f"{names[module]}.{key}".removeprefix("."))
                    is_first = name in firsts or key in module._buffers
                    if is_first and is_wanted(name):
                        yield name, _gather(tensor.detach(), dtype)


def _saved_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own parameters and persistent buffers."""
    yield from module.named_parameters(recurse=False)
    for key, buffer in module.named_buffers(recurse=False):
        if key not in module._non_persistent_buffers_set:
            yield key, buffer


def _gather(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a tensor, or all of a DTensor, gathered on the device though it is offloaded."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to(tensor.device_mesh.device_type)
    tensor = cast(tensor, dtype)
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a tensor in `dtype`, or as it is if it is not of floating-point numbers."""
    if dtype is not None and tensor.is_floating_point():
        return tensor.to(dtype)
    return tensor


class FileWriter:
    """Writes a model's tensors to safetensors files of FILE_BYTES, each in a thread while the
    tensors of the next one arrive. Rank 0 alone adds any.

    A layer is not divided among files, as a conversion may need all of it.
    """

    def __init__(self, model: PreTrainedModel, directory: Path) -> None:
        self.directory = directory
        # Transformers looks its conversions up by class, and knows its own alone.
        with torch.device("meta"):
            self.model = library_class(type(model))(model.config)
        self.model._weight_conversions = getattr(model, "_weight_conversions", None)
        self.tensors: dict[str, Tensor] = {}  # of the next file
        self.size = 0
        self.layer = ""
        self.files: list[Future] = []

    def __enter__(self) -> "FileWriter":
        self.thread = ThreadPoolExecutor(1)
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.shutdown()

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a whole tensor; the caller may change its values afterwards."""
        layer = name[: match.end()] if (match := IN_LAYER.search(name)) else name
        if self.tensors and self.size + tensor.nbytes > FILE_BYTES and layer != self.layer:
            self._write()
        self.layer = layer
        self.tensors[name] = tensor.to("cpu", copy=True)
        self.size += tensor.nbytes

    def _write(self) -> None:
        wait(self.files)
        path = self.directory / f"{len(self.files):05d}"
        self.files.append(self.thread.submit(self._save, self.tensors, path))
        self.tensors, self.size = {}, 0

    def _save(self, tensors: dict[str, Tensor], path: Path) -> dict[str, int]:
        """Write a file; return the sizes of its tensors by key."""
        stored = revert_weight_conversion(self.model, tensors)
        stored = {key: tensor.contiguous() for key, tensor in stored.items()}
        try:
            save_file(stored, path, {"format": "pt"})
        except SafetensorError as error:  # such as of a full disk
            raise OSError(f"{path} cannot be written ({error})") from None
        return {key: tensor.nbytes for key, tensor in stored.items()}

    def finish(self) -> None:
        """Write what is left and the index. Raises OSError if a file could not be written."""
        self._write()
        sizes, weight_map = 0, {}
        for number, file in enumerate(self.files):
            name = "model.safetensors"
            if len(self.files) > 1:
                name = f"model-{number + 1:05d}-of-{len(self.files):05d}.safetensors"
            stored = file.result()
            (self.directory / f"{number:05d}").rename(self.directory / name)
            weight_map |= dict.fromkeys(stored, name)
            sizes += sum(stored.values())
        if len(self.files) > 1:
            index = {"metadata": {"total_size": sizes}, "weight_map": weight_map}
            path = self.directory / "model.safetensors.index.json"
            path.write_text(json.dumps(index, indent=1))


def save_settings(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path, args: Namespace
) -> None:
    """Write an exported model's configurations and its tokenizer; rank 0 alone."""
    config = copy.deepcopy(model.config)
    config.architectures = [library_class(type(model)).__name__]
    config.dtype = EXPORT_DTYPES[args.export_dtype]
    config.save_pretrained(directory)
    generation = model.generation_config.to_json_string()  # save_pretrained may refuse it
    (directory / "generation_config.json").write_text(generation)
    tokenizer.save_pretrained(directory)


def copy_export(source: Path, path: Path) -> None:
    """Make `path` of an exported directory. Its weights are the same files, under a second name,
    where the file system has hard links; all ranks."""
    with new_directory(path) as temporary:
        if dist.get_rank() == 0:
            shutil.copytree(source, temporary, copy_function=_link_weights, dirs_exist_ok=True)


def _link_weights(source: str, path: str) -> None:
    if source.endswith(".safetensors"):
        with contextlib.suppress(OSError):
            os.link(source, path)
            return
    shutil.copy2(source, path)


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a directory that replaces `path` on leaving; after an error nothing of it is left.
    Rank 0 makes it; all ranks."""
    # No name is used twice: a node with NFS may for a minute take the new one for the old one.
    temporary = path.with_name(f"tmp-{path.name}-{time.time_ns()}")
    if dist.get_rank() == 0:
        temporary.mkdir(parents=True)
    try:
        yield temporary
    except BaseException:
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if dist.get_rank() == 0:
        _give_usual_modes(temporary)
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)
    dist.barrier(group=cpu_group())


def _give_usual_modes(directory: Path) -> None:
    """Give all files the mode that the umask asks for: safetensors makes its own for one user."""
    mask = os.umask(0)
    os.umask(mask)
    for path in directory.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~mask)
