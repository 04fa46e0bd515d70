"""A check of checkpoints. Without this file, PyTorch unpickles them: they can run any code."""

import pickle
from pathlib import Path
from typing import Any

import torch

from core.checkpoint import UNPICKLED
from core.ranks import Problem

# What `.metadata` may use. BytesStorageMetadata is missing, because DCP would unpickle its entry.
ALLOWED = {
    "pathlib.PosixPath",
    "torch.Size",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
    "torch.distributed.checkpoint.metadata.Metadata",
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.metadata.StorageMeta",
    "torch.distributed.checkpoint.metadata.TensorProperties",
    "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.serialization._get_layout",
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a class that `.metadata` may use. Raise UnpicklingError for others."""
        module = module.removesuffix("._local")  # pathlib's classes, if Python 3.13 saved them
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or f"{module}.{name}" in ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it uses {module}.{name}, which could run code")


def check(path: Path | None) -> None:
    """Raise Problem if the checkpoint `path` has anything but tensors. Call on all ranks."""
    try:
        if path is not None:
            UNPICKLED[path] = _Unpickler((path / ".metadata").open("rb")).load()
    except Exception as error:  # pickle raises many types
        raise Problem(f"{path}/.metadata is not a checkpoint's: {error}. Delete it.") from error
