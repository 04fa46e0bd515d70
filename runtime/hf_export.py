"""Hugging Face models out: each rank writes its shards into the files, and gathers nothing.

Names no model. All ranks call a function together.
"""

import contextlib
import copy
import json
import os
import shutil
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
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

from . import models, ranks, stored_tensors
from .models import EXPORT_DTYPES, WRAPPERS
from .ranks import cpu_group

FILE_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

Tail = tuple[int, bytes]  # the offset of what follows in a file, and the last bytes before it


class Place(NamedTuple):
    """The place of a tensor's values, in a file that several ranks may write to."""

    path: Path
    offset: int  # of the first value, in bytes
    dtype: torch.dtype  # as which they stand there

    def write(self, first: int, values: torch.Tensor) -> Tail:
        """Write flat values, from element `first` of the tensor on; return how they end."""
        data = values.to(self.dtype).cpu().view(torch.uint8).numpy()  # cast on its device
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o666)  # others' bytes stay
        with open(file, "wb") as stream:
            stream.seek(self.offset + first * self.dtype.itemsize)
            stream.write(data)
            return stream.tell(), data[-64:].tobytes()


def create_files(
    directory: Path, tensors: dict[str, torch.Tensor], args: Namespace
) -> dict[str, Place]:
    """Make a model's safetensors files of at most --max-shard-size GB each, and their index.

    `tensors` are on the meta device, by key. The files have their headers and sizes, and no values:
    those are to be written to the places that are returned, floating-point ones as --export-dtype.
    """
    files: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for key, tensor in tensors.items():
        if tensor.is_floating_point():
            tensor = tensor.to(EXPORT_DTYPES[args.export_dtype])
        if files[-1] and size + tensor.nbytes > args.max_shard_size * 1e9:
            files.append({})
            size = 0
        files[-1][key] = tensor
        size += tensor.nbytes
    places, weight_map = {}, {}
    for number, held in enumerate(files, start=1):
        name = "model.safetensors"
        if len(files) > 1:
            name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        places |= _create_file(directory / name, held)
        weight_map |= dict.fromkeys(held, name)
    if len(files) > 1:
        total = sum(tensor.nbytes for held in files for tensor in held.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return places


def _create_file(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Place]:
    """Make one file of a header and room for the values, as github.com/huggingface/safetensors
    describes it. The largest dtypes stand first, so that all values are aligned."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key, tensor in sorted(tensors.items(), key=lambda item: -item[1].itemsize):
        end = offset + tensor.nbytes
        dtype, shape = FILE_DTYPES[tensor.dtype], list(tensor.shape)
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(start + offset)
    places = {}
    for key, tensor in tensors.items():
        places[key] = Place(path, start + header[key]["data_offsets"][0], tensor.dtype)
    return places


def _local_pieces(model: nn.Module) -> list[tuple[str, int, torch.Tensor]]:
    """Name, first element and flat values of what this rank writes of each tensor; all ranks.

    Put together in the order of the ranks, what they hold of a tensor is the tensor, and then its
    copies: rows under FSDP2, any part under FSDP1, all of it under DDP or of a buffer. So a rank
    writes where those before it do not hold the tensor already.
    """
    pieces = []
    for name, tensor in _saved_tensors(model):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        pieces.append((name, local.detach().reshape(-1)))
    sizes = torch.tensor([piece.numel() for _, piece in pieces])
    of_ranks = [torch.empty_like(sizes) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, sizes, group=cpu_group())
    starts = torch.stack(of_ranks).cumsum(0)[dist.get_rank()] - sizes
    firsts = starts.tolist()
    return [(name, first, piece) for (name, piece), first in zip(pieces, firsts, strict=True)]


def _saved_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of each parameter and persistent buffer of a wrapped model."""
    inner = models.unwrapped(model)
    for name, tensor in [*inner.named_parameters(), *_persistent_buffers(inner)]:
        yield WRAPPERS.sub("", name), tensor


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


def _parts(
    model: PreTrainedModel, keys: dict[str, str], name: str, shape: torch.Size
) -> Iterator[tuple[str, int, torch.Size]]:
    """Key, first element and shape of what files hold of a tensor: itself, or stacked experts."""
    if name in keys:
        yield keys[name], 0, shape
        return
    stacked, inner = shape[:2], shape[2:]
    few = torch.Size([2] * len(inner))  # not 1, which Transformers 5.17 would squeeze away
    numbers = torch.arange(stacked.numel() * few.numel()).reshape(stacked + few)
    for key, part in revert_weight_conversion(model, {name: numbers}).items():
        first = int(part.flatten()[0])
        assert torch.equal(part.flatten(), torch.arange(first, first + part.numel()))
        start = first // few.numel() * inner.numel()
        yield key, start, part.shape[: part.dim() - len(inner)] + inner


class Slot(NamedTuple):
    """A range of the elements of a model's tensor, and where they stand in a file."""

    first: int
    end: int
    place: Place


def _lay_out(model: nn.Module, directory: Path, args: Namespace) -> dict[str, list[Slot]]:
    """Make the files of a wrapped model, still without values; rank 0 alone. Returns what of each
    tensor stands where, by name."""
    inner = models.unwrapped(model)
    not_saved = inner._keys_to_ignore_on_save or []  # what the model computes, such as positions
    whole_shapes = inner.shapes if isinstance(model, FSDP) else {}  # its shards are flat
    keys = _keys_to_save(inner)  # rank 0 alone has looked at the files
    starts: dict[str, list[tuple[str, int]]] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in _saved_tensors(model):
        if name in not_saved:
            continue
        starts[name] = []
        for key, first, shape in _parts(inner, keys, name, whole_shapes.get(name, tensor.shape)):
            starts[name].append((key, first))
            tensors[key] = torch.empty(shape, dtype=tensor.dtype, device="meta")
    places = create_files(directory, tensors, args)
    slots: dict[str, list[Slot]] = {name: [] for name in starts}
    for name, parts in starts.items():
        for key, first in parts:
            slots[name].append(Slot(first, first + tensors[key].numel(), places[key]))
    return slots


def _write_pieces(
    pieces: list[tuple[str, int, torch.Tensor]], slots: dict[str, list[Slot]]
) -> tuple[int, dict[Path, Tail]]:
    """Write this rank's pieces; return the number of elements, and how the last in each file
    ends."""
    written, tails = 0, {}
    for name, start, piece in pieces:
        for slot in slots.get(name, []):
            first, end = max(start, slot.first), min(start + piece.numel(), slot.end)
            if first < end:
                values = piece[first - start : end - start]
                tails[slot.place.path] = slot.place.write(first - slot.first, values)
                written += end - first
    return written, tails


def _check_tails(tails_of_ranks: list[dict[Path, Tail]]) -> None:
    """Raise OSError unless the files hold what all ranks wrote; rank 0 alone.

    A bucket that is mounted as a directory may keep what one node wrote, and lose the others'.
    """
    for rank, tails in enumerate(tails_of_ranks):
        for path, (end, tail) in tails.items():
            with path.open("rb") as file:
                file.seek(end - len(tail))
                is_there = file.read(len(tail)) == tail
            if not is_there:
                raise OSError(
                    f"{path} lacks what rank {rank} wrote to it: give an --output-dir on a file "
                    "system where several nodes can write to one file, such as NFS or Lustre"
                )


def export_model(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, path: Path, args: Namespace
) -> None:
    """Write a wrapped model as a Hugging Face directory that `from_pretrained` loads.

    Each rank writes its shards into the files, a tensor at a time, and gathers nothing. The
    directory replaces the one before when it is complete. Floating-point tensors are written as
    --export-dtype, under the keys that `save_pretrained` would give them.
    """
    with new_directory(path) as temporary:
        slots = ranks.on_rank_zero(_lay_out, model, temporary, args)
        pieces = _local_pieces(model)
        counts, tails = zip(*ranks.on_every_rank(_write_pieces, pieces, slots), strict=True)
        whole = sum(slot.end - slot.first for parts in slots.values() for slot in parts)
        assert sum(counts) == whole, f"{sum(counts)} elements written of {whole}"
        ranks.on_rank_zero(_check_tails, tails)
        ranks.on_rank_zero(save_settings, models.unwrapped(model), temporary, args)
        ranks.on_rank_zero(tokenizer.save_pretrained, temporary)


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
    """A directory that rank 0 makes, and which takes the place of `path` on leaving; all ranks.
    After an error nothing of it is left."""
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
