"""Tensors in safetensors files: listed without reading them, then read whole or by rows.

A model's tensor may be stacked of several in the files, such as a layer's experts.
"""

import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter


class StoredTensor(NamedTuple):
    """The place of a tensor in a directory's files, and its header."""

    path: Path
    key: str
    shape: list[int]
    dtype: str  # as safetensors calls it, such as F32

    def rows(self) -> int:
        """Return the tensor's size in the first dimension; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    def under(self, directory: Path) -> "StoredTensor":
        """Return the same tensor in the `directory` of another rank."""
        return self._replace(path=directory / self.path.name)

    def parts(self) -> list["StoredTensor"]:
        """Return the tensors in the files that this one is made of: itself."""
        return [self]

    def read(self) -> torch.Tensor:
        """Read the whole tensor, which may be a view of the mapped file."""
        return read(self.path, self.key)

    def read_rows(self, start: int, end: int) -> torch.Tensor:
        """Read some rows of the tensor and no others; a scalar is one row."""
        with safe_open(self.path, framework="pt") as file:
            if not self.shape:
                return file.get_tensor(self.key)[None]
            return file.get_slice(self.key)[start:end]


class StackedTensor(NamedTuple):
    """A tensor each of whose rows is made of tensors in the files, such as a layer's experts."""

    converter: WeightConverter  # Transformers', whose operations stack the tensors
    sources: dict[str, list[StoredTensor]]  # by the converter's pattern, in the order of the rows
    shape: list[int]

    @property
    def key(self) -> str:
        """The first of the tensor's keys in the files."""
        return self.parts()[0].key

    @property
    def dtype(self) -> str:
        """The dtype as safetensors calls it, such as F32."""
        return self.parts()[0].dtype

    def rows(self) -> int:
        """Return the tensor's size in the first dimension."""
        return self.shape[0]

    def under(self, directory: Path) -> "StackedTensor":
        """Return the same tensor in the `directory` of another rank."""
        there = {}
        for pattern, parts in self.sources.items():
            there[pattern] = [part.under(directory) for part in parts]
        return self._replace(sources=there)

    def parts(self) -> list[StoredTensor]:
        """Return the tensors in the files that this one is made of."""
        return [part for parts in self.sources.values() for part in parts]

    def read(self) -> torch.Tensor:
        """Read the whole tensor, holding beside it no more than a row at a time."""
        return self.read_rows(0, self.rows())

    def read_rows(self, start: int, end: int) -> torch.Tensor:
        """Read some rows of the tensor, at least one; the files' tensors of others are not read."""
        for number in range(start, end):
            tensors = {pattern: [parts[number].read()] for pattern, parts in self.sources.items()}
            row = _stack(self.converter, tensors)  # [1, ...]
            if number == start:
                rows = row.new_empty(end - start, *row.shape[1:])
            rows[number - start] = row[0]
        return rows


Stored = StoredTensor | StackedTensor


def _stack(converter: WeightConverter, tensors: dict[str, list[torch.Tensor]]) -> torch.Tensor:
    """Return the tensor that Transformers makes of `tensors`, listed by source pattern."""
    for operation in converter.operations:
        tensors = operation.convert(
            tensors,
            source_patterns=converter.source_patterns,
            target_patterns=converter.target_patterns,
        )
    (stacked,) = tensors.values()
    return stacked


def stacks_rows(converter: WeightConverter) -> bool:
    """Tell whether row i needs the i-th tensor of each pattern alone, so that it can be made alone.

    Transformers stacks experts that are stored one by one in this way, but for a few models.
    """
    first, *others = converter.operations
    if not isinstance(first, MergeModulelist) or first.dim != 0:
        return False
    return all(isinstance(other, Concatenate) and other.dim == 1 for other in others)


def stacked_tensor(
    converter: WeightConverter,
    sources: dict[str, list[StoredTensor]],
    directory: Path,
    name: str,
) -> StackedTensor:
    """Return the stacked tensor `name`, computing only its shape; ValueError if it has none."""
    metas = {}
    for pattern, parts in sources.items():
        metas[pattern] = [torch.empty(part.shape, device="meta") for part in parts]
    try:
        return StackedTensor(converter, sources, list(_stack(converter, metas).shape))
    except RuntimeError:
        found = ", ".join(f"{len(parts)} of {pattern}" for pattern, parts in sources.items())
        raise ValueError(
            f"{directory} does not hold this model: {name} cannot be made of {found}, which differ "
            "in number or shape"
        ) from None


def headers(directory: Path) -> Iterator[StoredTensor]:
    """Yield every tensor in a directory's safetensors files, unread; ValueError for a bad file."""
    names = {"model.safetensors"}
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError) as error:
            raise ValueError(f"{index} cannot be read: {error}") from None
    elif not (directory / "model.safetensors").is_file() and any(directory.glob("*.bin")):
        raise ValueError(
            f"{directory} has only .bin weights, which are not read here: convert them once with "
            "from_pretrained and save_pretrained"
        )
    for path in (directory / name for name in sorted(names)):
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (it is no dict)
                    header = file.get_slice(key)
                    yield StoredTensor(path, key, header.get_shape(), header.get_dtype())
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None


def read(path: Path, key: str) -> torch.Tensor:
    """Read one tensor; the file is opened each time, or its mapped pages would count as memory
    held."""
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(key)


def sum_of_files(files: dict[str, Stored]) -> str:
    """Return a checksum of stored tensors: of names, shapes and dtypes, and of a row of each."""
    described = [(name, files[name].shape, files[name].dtype) for name in sorted(files)]
    rows = sum_of_rows(files[name] for name in sorted(files))
    return f"{zlib.crc32(repr(described).encode()):08x} {rows:08x}"


def sum_of_rows(tensors: Iterable[Stored]) -> int:
    """Return the CRC-32 of the middle row of each tensor."""
    checksum = 0
    for stored in tensors:
        middle = stored.rows() // 2
        rows = stored.read_rows(middle, middle + 1)
        checksum = zlib.crc32(rows.contiguous().view(torch.uint8).numpy(), checksum)
    return checksum
