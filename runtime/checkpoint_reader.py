"""Read checkpoints without running code that their files may contain.

PyTorch's `FileSystemReader` unpickles the file `.metadata`, and `torch.load` unpickles entries that
are not tensors. A pickle can call any function.
"""

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten_with_path

from .ranks import cpu_group

FULL = "full.pt"  # the one file of --checkpoint-type full
DCP = "torch.distributed.checkpoint"
ALLOWED = {  # names by module
    "pathlib": {"PosixPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    f"{DCP}.filesystem": {"_StorageInfo"},
    f"{DCP}.metadata": {
        "BytesStorageMetadata",  # rejected later, with the entry's name
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
}  # fmt: skip


class SafeReader(dcp.FileSystemReader):
    """A DCP reader that accepts only tensors, and keeps the metadata for further loads."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata; raise ValueError if it could run code or has non-tensors."""
        if self._metadata is not None:
            return self._metadata
        try:
            metadata = _MetadataUnpickler((self.path / ".metadata").open("rb")).load()
            entries = metadata.state_dict_metadata.items()
        except (pickle.UnpicklingError, AttributeError, EOFError, IndexError, TypeError) as error:
            raise ValueError(f"{self.path}/.metadata is not a checkpoint's: {error}.") from None
        for name, entry in entries:
            if not isinstance(entry, TensorStorageMetadata):
                raise ValueError(f"{self.path} contains {name}, which is not a tensor.")
        self._metadata = metadata
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that allows only the classes of DCP's checkpoint metadata, and dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class if it is in ALLOWED; otherwise raise UnpicklingError."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not (is_dtype or name in ALLOWED.get(module, ())):
            raise pickle.UnpicklingError(f"it uses {module}.{name}, which could run code")
        return super().find_class(module, name)


def open_checkpoint(path: Path) -> Callable[[dict[str, Any]], None]:
    """Return a function that fills nested dicts of tensors in place; all ranks call it.

    Raise ValueError on all ranks if the checkpoint contains anything but tensors.
    """
    if (path / FULL).is_file():
        try:
            stored = torch.load(path / FULL, weights_only=True, mmap=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{path / FULL} is not a file of tensors: {reason}") from None
        return partial(_copy_shards, stored)
    reader = SafeReader(path)
    reader.read_metadata()  # dcp.load would wrap its ValueError in another error
    return partial(dcp.load, storage_reader=reader, process_group=cpu_group())


def _copy_shards(stored: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Copy this rank's parts of the whole tensors in `stored` into `tensors`."""
    for keys, tensor in tree_flatten_with_path(tensors)[0]:
        source = stored
        for key in keys:
            source = source[key.key]
        if isinstance(tensor, DTensor):
            (chunk,) = tensor.__create_chunk_list__()  # DCP's own protocol
            for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                source = source.narrow(dim, start, size)
            tensor = tensor.to_local()
        tensor.copy_(source)
