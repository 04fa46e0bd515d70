"""Read checkpoints without running code that their files may contain.

PyTorch's `FileSystemReader` unpickles the file `.metadata`, and `torch.load` unpickles entries that
are not tensors. A pickle can call any function.
"""

import pickle
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

DCP = "torch.distributed.checkpoint"
ALLOWED = {
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (f"{DCP}.filesystem", "_StorageInfo"),
    (f"{DCP}.metadata", "BytesStorageMetadata"),  # refused by name, with the entry
    (f"{DCP}.metadata", "ChunkStorageMetadata"),
    (f"{DCP}.metadata", "Metadata"),
    (f"{DCP}.metadata", "MetadataIndex"),
    (f"{DCP}.metadata", "StorageMeta"),
    (f"{DCP}.metadata", "TensorProperties"),
    (f"{DCP}.metadata", "TensorStorageMetadata"),
    (f"{DCP}.metadata", "_MEM_FORMAT_ENCODING"),
}


class SafeReader(dcp.FileSystemReader):
    """Reads checkpoints whose entries are tensors, and keeps their metadata for further loads."""

    def __init__(self, path: Any) -> None:
        super().__init__(path)
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata; raise ValueError if it could run code, or has other entries."""
        if self._metadata is None:
            self._metadata = self._read_metadata()
        return self._metadata

    def _read_metadata(self) -> Metadata:
        path = self._get_metadata_path()
        try:
            with self.fs.create_stream(path, "rb") as file:
                metadata = _MetadataUnpickler(file).load()
            entries = metadata.state_dict_metadata.items()
        except (pickle.UnpicklingError, AttributeError, EOFError, IndexError, TypeError) as error:
            raise ValueError(f"{path} is not the metadata of a checkpoint: {error}") from None
        for name, entry in entries:
            if not isinstance(entry, TensorStorageMetadata):
                raise ValueError(f"{self.path} holds {name}, which is not a tensor: not loaded")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Loads only the classes of PyTorch's checkpoint metadata, and dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that is allowed; raise UnpicklingError for any other."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not (is_dtype or (module, name) in ALLOWED):
            raise pickle.UnpicklingError(f"it uses {module}.{name}, which could run code")
        return super().find_class(module, name)
