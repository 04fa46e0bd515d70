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
            has_gpu = torch.accelerator.is_available()
            # Otherwise the thread of every rank would use GPU 0. A negative index changes nothing.
            device = torch.accelerator.current_device_index() if has_gpu else -1
            set_device = torch.accelerator.set_device_index
            self._thread = ThreadPoolExecutor(1, "save", set_device, (device,))
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
            job = self._save, path, self._copy(tensors), copy.deepcopy(state), full
            self._running = self._thread.submit(*job, group=self._group)
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
        copied = self._copied
        changing = [x for x in pytree.tree_leaves(tensors) if not isinstance(x, copied)]
        copies = iter(self._stager.stage(changing))  # waits for the device once
        return pytree.tree_map(lambda x: x if isinstance(x, copied) else next(copies), tensors)
