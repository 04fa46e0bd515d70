"""--async-save: checkpoints are written in the background, from a copy in host memory. Without this
file, training waits for each save."""

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree  # private: torch has no public functions for nested dicts
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor

from core.args import Switch
from core.ranks import on_every_rank, print0


@dataclass
class Saves:
    """How checkpoints are saved."""

    async_save: Switch = False
    """save in the background; each process holds a copy of its state in host memory"""


class Saver:
    """A function like `save`, which with --async-save returns when the tensors are copied.

    After a save that failed, training waits for each save until one succeeds. All ranks call its
    methods together.
    """

    def __init__(
        self, save: Callable[..., None], saves: Saves, model: nn.Module, timeout_minutes: float
    ) -> None:
        self._save = save
        self._is_async = self._is_background = saves.async_save
        self._running: Future | None = None
        # FSDP1's shards are copies already: others would double a save's memory and time.
        self._copied = DTensor if isinstance(model, FSDP) else ()
        if self._is_async:
            # A save's collectives must not mix with those of the steps.
            timeout = timedelta(minutes=timeout_minutes)
            self._group = dist.new_group(backend="gloo", timeout=timeout)
            self._thread = ThreadPoolExecutor(1)
            has_gpu = torch.accelerator.is_available()
            self._device = torch.accelerator.current_device_index() if has_gpu else None
            # Copies of tensors on a GPU are pinned, and the next save overwrites them.
            self._stager = DefaultStager(StagingOptions(has_gpu, False, False, has_gpu))

    def settle(self) -> None:
        """Wait for the save before, so that there are no copies of two. If it failed, say so."""
        try:
            self.wait()
        except OSError as error:
            self._is_background = False
            print0(f"{error} Training waits for the next save.")

    def __call__(self, path: Path, tensors: Any, state: dict[str, Any], full: bool) -> None:
        """Save a checkpoint as `checkpoint.save`, or start to, after `settle`."""
        if self._is_background:
            job = path, self._copy(tensors), copy.deepcopy(state), full
            self._running = self._thread.submit(self._write, *job)
            return
        self._save(path, tensors, state, full)
        self._is_background = self._is_async

    def wait(self, is_due: bool = True) -> None:
        """If it is due, wait until the last checkpoint is complete. Raise OSError on all ranks if
        it failed."""
        if is_due and self._running is not None:
            running, self._running = self._running, None
            on_every_rank(running.result)

    def _copy(self, tensors: Any) -> Any:
        """Return nested dicts of tensors in host memory, which training does not change."""
        leaves, structure = pytree.tree_flatten(tensors)
        changing = [i for i, leaf in enumerate(leaves) if not isinstance(leaf, self._copied)]
        staged = self._stager.stage([leaves[i] for i in changing])  # waits for the device once
        for i, leaf in zip(changing, staged, strict=True):
            leaves[i] = leaf
        return pytree.tree_unflatten(leaves, structure)

    def _write(self, *job: Any) -> None:
        if self._device is not None:  # otherwise the thread of every rank would use GPU 0
            torch.accelerator.set_device_index(self._device)
        self._save(*job, group=self._group)
