"""Hugging Face models out, a tensor at a time: no rank ever holds a model it need not hold.

Names no model. All ranks call a function together.
"""

import contextlib
import copy
import json
import os
import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from . import models, stored_tensors
from .models import EXPORT_DTYPES, WRAPPERS
from .ranks import cpu_group


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a DTensor, gathered on the device though it is offloaded, or the tensor."""
    if isinstance(tensor, DTensor):
        return tensor.to(tensor.device_mesh.device_type).full_tensor()
    return tensor


def _whole_tensors(
    model: nn.Module, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of each parameter and persistent buffer of a wrapped model.

    FSDP1 gathers the parameters a unit at a time, whole on rank 0 only and as they are trained,
    FSDP2 a tensor at a time, whole on all ranks, and in `dtype` already if it is floating-point:
    that is less to send. Buffers are never sharded.
    """
    if isinstance(model, FSDPModule):
        for name, tensor in [*model.named_parameters(), *_persistent_buffers(model)]:
            tensor = tensor.detach()
            if dtype and tensor.is_floating_point():
                tensor = tensor.to(dtype)
            yield WRAPPERS.sub("", name), gather(tensor)
        return
    gathered = {"recurse": False, "writeback": False, "rank0_only": True}
    units = [(name, unit) for name, unit in model.named_modules() if isinstance(unit, FSDP)]
    for prefix, unit in units or [("", model)]:
        with contextlib.ExitStack() as stack:
            if units:  # not DDP
                stack.enter_context(FSDP.summon_full_params(unit, **gathered))
            tensors = [*unit.module.named_parameters(), *_persistent_buffers(unit.module)]
            for name, tensor in tensors:
                if "_fsdp_wrapped_module." not in name:  # or it is a nested unit's
                    yield WRAPPERS.sub("", f"{prefix}.{name}".removeprefix(".")), tensor


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of each buffer that a state dict holds."""
    for prefix, module in model.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            if key not in module._non_persistent_buffers_set:
                yield f"{prefix}.{key}".removeprefix("."), buffer


def _keys_to_save(model: PreTrainedModel) -> dict[str, str]:
    """The key of each parameter and persistent buffer in an exported file, by its name.

    Renames made when the model was loaded are undone; a new model gets the keys that files of its
    kind have. What stands there as several tensors, such as experts, has no key here. Where
    `save_pretrained` would do more than that, all keep the model's names, which `from_pretrained`
    knows as well.
    """
    names = {WRAPPERS.sub("", name) for name, _ in model.named_parameters()}
    names |= {WRAPPERS.sub("", name) for name, _ in _persistent_buffers(model)}
    if getattr(model, "_weight_conversions", None) is None:  # not loaded from files
        conversions = models.conversions(model, add_legacy=False)
        # Whether files of this kind have that prefix is not known.
        conversions = [step for step in conversions if not isinstance(step, PrefixChange)]
        model._weight_conversions = conversions
    for step in model._weight_conversions:
        if isinstance(step, WeightConverter) and not stored_tensors.stacks_rows(step):
            return {name: name for name in names}
    undo = [step.reverse_transform() for step in reversed(model._weight_conversions)]
    renamings = [step for step in undo if isinstance(step, WeightRenaming)]
    converters = [step for step in undo if isinstance(step, WeightConverter)]
    keys = {}
    for name in sorted(names):
        key, pattern = rename_source_key(name, renamings, converters, reverse=True)
        if pattern is None:
            keys[name] = key
    return keys


def _as_in_files(
    model: PreTrainedModel, keys: dict[str, str], name: str, tensor: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return what a file holds of a tensor, by key: the tensor, or the experts stacked in it."""
    if name in keys:
        return {keys[name]: tensor}
    return revert_weight_conversion(model, {name: tensor})


def export_model(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, path: Path, args: Namespace
) -> None:
    """Write a wrapped model as a Hugging Face directory that `from_pretrained` loads.

    Rank 0 holds one file of --max-shard-size GB and one unit above its own shard, and of stacked
    experts one tensor twice. The directory replaces the one before when it is complete.
    Floating-point tensors are written as --export-dtype, under the keys that `save_pretrained`
    would give them.
    """
    inner = models.unwrapped(model)
    not_saved = inner._keys_to_ignore_on_save or []  # what the model computes, such as positions
    keys: dict[str, str] = {}
    if dist.get_rank() == 0:
        keys = _keys_to_save(inner)  # rank 0 alone has looked at the files
    with new_directory(path) as temporary:
        files = WeightFiles(temporary, args)
        for name, tensor in _whole_tensors(model, files.dtype):  # all ranks gather it
            if dist.get_rank() == 0 and name not in not_saved:
                for key, part in _as_in_files(inner, keys, name, tensor.detach()).items():
                    files.add(key, part)
        if dist.get_rank() == 0:
            files.finish()
            save_settings(inner, temporary, args)
            tokenizer.save_pretrained(temporary)


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
    """A directory for rank 0 to write to, which takes the place of `path` on leaving; all ranks.
    After an error nothing of it is left."""
    temporary = path.with_name(f"tmp-{path.name}")
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


def save_settings(model: PreTrainedModel, directory: Path, args: Namespace) -> None:
    """Write the configurations of an exported model, and of its generation; rank 0 alone."""
    config = copy.deepcopy(model.config)
    config.architectures = [_class_name(model)]
    config.dtype = EXPORT_DTYPES[args.export_dtype]
    config.save_pretrained(directory)
    generation = model.generation_config.to_json_string()  # save_pretrained may refuse it
    (directory / "generation_config.json").write_text(generation)


def _class_name(model: nn.Module) -> str:
    """The name of a model's class, without that which FSDP2 puts before it."""
    if isinstance(model, FSDPModule):
        return type(model).__mro__[2].__name__
    return type(model).__name__


class WeightFiles:
    """The safetensors files of a model, of at most --max-shard-size each, and their index.

    Floating-point tensors are written as --export-dtype.
    """

    def __init__(self, directory: Path, args: Namespace) -> None:
        self.directory = directory
        self.limit = args.max_shard_size * 1e9
        self.dtype = EXPORT_DTYPES[args.export_dtype]
        self.pending: dict[str, torch.Tensor] = {}
        self.written: list[dict[str, int]] = []  # bytes of each tensor, by file

    def add(self, key: str, tensor: torch.Tensor) -> None:
        """Take a copy of a tensor; write a file first if it would become too large."""
        dtype = tensor.dtype
        if dtype.is_floating_point:
            dtype = self.dtype
        size = tensor.numel() * dtype.itemsize
        if self.pending and sum(x.nbytes for x in self.pending.values()) + size > self.limit:
            self._write()
        cast = tensor.to(dtype)  # on its device
        self.pending[key] = cast.to("cpu", copy=cast is tensor)

    def _write(self) -> None:
        path = self.directory / str(len(self.written))
        save_file(self.pending, path, metadata={"format": "pt"})
        self.written.append({key: tensor.nbytes for key, tensor in self.pending.items()})
        self.pending.clear()

    def finish(self) -> None:
        """Write the last file, and give all of them the names that Hugging Face's have."""
        self._write()
        count = len(self.written)
        index: dict[str, dict] = {"metadata": {"total_size": 0}, "weight_map": {}}
        for number, sizes in enumerate(self.written, start=1):
            name = "model.safetensors"
            if count > 1:
                name = f"model-{number:05d}-of-{count:05d}.safetensors"
            (self.directory / str(number - 1)).rename(self.directory / name)
            index["weight_map"].update(dict.fromkeys(sizes, name))
            index["metadata"]["total_size"] += sum(sizes.values())
        if count > 1:
            text = json.dumps(index, indent=1)
            (self.directory / "model.safetensors.index.json").write_text(text)
