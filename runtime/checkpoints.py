"""Save, verify, find, load and prune checkpoints.

A checkpoint is a directory such as step-00000200: shards that PyTorch's distributed checkpoint
(DCP) writes, or one file with --checkpoint-type full. train_state.json is written last, by rename.
It contains the counters, and the size and CRC-32 of each file. A directory that lacks it, or whose
files differ from it, is skipped. All ranks call each function together, except "rank 0 only" ones.
"""

import contextlib
import io
import json
import logging
import re
import shutil
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from transformers import set_seed

from . import identity, ranks
from .checkpoint_reader import FULL, open_checkpoint
from .state import COUNTERS, State
from .weights import ADAPTER, plain_name, unwrapped

STATE = "train_state.json"
SAVED = (torch.Tensor, int, float)  # types that a checkpoint contains

# torch.save would checksum every tensor, a tenth of a save's time. `file_sum` sums whole files.
torch.serialization.set_crc32_options(False)
# A resume under FSDP1 would warn of the second name of each tied weight, which is saved once.
logging.getLogger("torch.distributed.fsdp._state_dict_utils").setLevel(logging.ERROR)


class Saver:
    """Save `state` in `directory`/checkpoints, and count failed saves.

    A failed save prints a line, and the next save tries again. The second failure in a row raises
    OSError. With --async-save, a save waits for the previous one, copies the state to host memory
    and returns. `saved_step` is the step that was saved last.
    """

    def __init__(self, args: Namespace, directory: Path, state: State, saved_step: int = 0) -> None:
        self.args = args
        self.directory = directory / "checkpoints"
        self.state = state
        self.saved_step = saved_step
        self.failures = 0  # in a row
        self.group: dist.ProcessGroup | None = None  # for saves in the background only
        if args.async_save:
            limit = timedelta(minutes=args.timeout_minutes)
            self.group = dist.new_group(backend="gloo", timeout=limit)
        self.under_way: Future | None = None  # a save in the background
        self._path = self.directory  # of the last save
        is_on_gpu = state.optimizer.param_groups[0]["params"][0].device.type != "cpu"
        # Copies of tensors on a GPU are pinned, and the next save overwrites them.
        self._stager = DefaultStager(StagingOptions(is_on_gpu, False, False, is_on_gpu))

    def save(self) -> bool:
        """Save the state as step-N, or start to. Return False if it was saved before or failed."""
        self.wait()
        state = self.state
        if self.saved_step == state.step:
            return False
        self.saved_step = state.step
        self._path = self.directory / f"step-{state.step:08d}"
        writer = _Writer(self._path, state, self.args.checkpoint_type == "full", self._stager)
        tensors = _all_tensors(state)
        if self.group is None:
            save = partial(dcp.save, storage_writer=writer, process_group=ranks.cpu_group())
            self._attempt(save, tensors)
            return self.failures == 0
        self.under_way = dcp.async_save(tensors, storage_writer=writer, process_group=self.group)
        return True

    def wait(self) -> None:
        """Wait for a save in the background, and report its error."""
        if self.under_way is not None:
            under_way, self.under_way = self.under_way, None
            self._attempt(under_way.result)

    def finish(self) -> None:
        """Wait for a save in the background; raise OSError if the last save failed."""
        self.wait()
        if self.failures:
            raise OSError("The last save failed. Free disk space, then run the same command.")

    def _attempt(self, function: Callable[..., Any], *args: Any) -> None:
        is_first = dist.get_rank() == 0
        try:
            function(*args)
        except (OSError, CheckpointException) as error:
            self.failures += 1
            self.saved_step = -1
            if is_first:
                shutil.rmtree(self._path, ignore_errors=True)  # frees space on a full disk
            if isinstance(error, CheckpointException):
                error, _ = next(iter(error.failures.values()))
            reason = str(error.__cause__ or error).splitlines()[0]
            text = f"{self._path} could not be saved ({reason}). Is the disk full?"
            if self.failures > 1:
                raise OSError(f"{text} This is the second failure in a row.") from None
            ranks.say(f"{text} The next save tries again.")
            return
        self.failures = 0
        if is_first:
            prune(self.directory, self.args.keep_checkpoints, step_of(self._path))


class _Writer(dcp.FileSystemWriter):
    """A DCP writer of shards and, at the end, of train_state.json with their checksums."""

    def __init__(self, path: Path, state: State, full: bool, stager: DefaultStager) -> None:
        super().__init__(path, overwrite=True)
        self.fs = _SummedFiles()
        self.description = {name: getattr(state, name) for name in COUNTERS} | {
            "identity": state.identity,
            "schedule": state.scheduler.last_epoch,
            "scaler": state.scaler.state_dict(),
            "numbers": state.changed_numbers(),
            "ranks": [dist.get_world_size(), state.device.type],
        }
        self.device = state.device
        self.full = full
        self.stager = stager
        # FSDP1's shards are copies: a second one would double a save's memory and time.
        self.copied = DTensor if isinstance(state.model, FSDP) else ()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return host copies of tensors that training changes; DCP calls this in async saves."""
        # The copies are on the CPU. Otherwise DCP would synchronize the training stream for each.
        self.per_thread_copy_ahead = 0
        leaves, structure = pytree.tree_flatten(state_dict)
        leaves = [x if isinstance(x, self.copied) else self.stager.stage([x])[0] for x in leaves]
        return pytree.tree_unflatten(leaves, structure)

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Empty the directory, which may contain shards of a larger world size; rank 0 only."""
        for file in self.path.iterdir():
            file.unlink()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: Any, planner: Any) -> Future:
        """Write this rank's shards; add their checksums to the results that rank 0 receives."""
        if self.device.type != "cpu":  # or the thread of every rank would use GPU 0
            torch.accelerator.set_device_index(self.device.index)
        results = super().write_data(plan, planner)
        return results.then(lambda done: [*done.value(), dict(self.fs.sums)])

    def finish(self, metadata: Any, results: Any) -> None:
        """Write train_state.json after all ranks have written their shards; rank 0 only."""
        files = {}
        for result in results:
            files |= result.pop()
        super().finish(metadata, results)
        if self.full:
            with self.fs.create_stream(self.path / FULL, "wb") as file:
                dcp_to_torch_save(self.path, file)
            for name in [*files, ".metadata"]:
                (self.path / name).unlink()
            files = {FULL: self.fs.sums[FULL]}
        else:
            files[".metadata"] = self.fs.sums[".metadata.tmp"]
        description = self.description | {"files": files}
        description["crc"] = identity.checksum(json.dumps(description))
        temporary = self.path / f"{STATE}.tmp"
        temporary.write_text(json.dumps(description, indent=1))
        temporary.rename(self.path / STATE)


class _SummedFiles(FileSystem):
    """The files that a writer writes. `sums` has the size and CRC-32 of each, by name."""

    def __init__(self) -> None:
        self.sums: dict[str, list[int]] = {}

    @contextlib.contextmanager
    def create_stream(self, path: Path, mode: str) -> Iterator[io.IOBase]:
        """Open a file, and sum what is written. To read it again would take time."""
        total = self.sums[path.name] = [0, 0]
        with super().create_stream(path, mode) as file:
            write = file.write

            def write_and_sum(data: bytes) -> int:
                size = write(data)
                total[0] += size
                total[1] = zlib.crc32(data, total[1])
                return size

            file.write = write_and_sum
            yield file


def file_sum(path: Path) -> list[int]:
    """Return a file's size in bytes and CRC-32, because `dcp.load` does not notice damage."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return [path.stat().st_size, crc]


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint directory."""
    return int(path.name.removeprefix("step-"))


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the directories named like checkpoints, oldest first, complete or not; rank 0 only.

    Nothing reads or deletes directories with other names.
    """
    paths = [x for x in directory.glob("step-*") if re.fullmatch(r"step-\d{8,}", x.name)]
    return sorted(paths, key=step_of)


def prune(directory: Path, keep: int, step: int) -> None:
    """Delete all but the newest `keep` complete checkpoints up to `step`; rank 0 only.

    Later ones are damaged. Otherwise the run would have resumed from them.
    """
    paths = list_checkpoints(directory)
    complete = [x for x in paths if (x / STATE).is_file() and step_of(x) <= step]
    for path in set(paths) - set(complete[-keep:]):
        shutil.rmtree(path, ignore_errors=True)  # the next save deletes files in use on NFS


def find_newest(output: Path) -> Path | None:
    """Return the newest intact checkpoint of the run in `output`, or None if none was completed.

    Print a line for each one that is skipped. Raise ValueError if all are damaged.
    """
    paths = ranks.on_rank_zero(list_checkpoints, output / "checkpoints")
    for path in reversed(paths):
        try:
            ranks.on_every_rank(_verify, path)
            return path
        except ValueError as error:
            ranks.say(f"{error} {path.name} is skipped.")
    if ranks.on_rank_zero(lambda: any((path / STATE).is_file() for path in paths)):
        raise ValueError(f"No checkpoint in {output} is intact. Pass another --output-dir.")
    return None


def _verify(path: Path) -> None:
    """Raise ValueError if a file in this rank's share of the checkpoint is missing or damaged."""
    if not (path / STATE).is_file():
        raise ValueError(f"{path} has no {STATE}: its save was interrupted.")
    try:
        saved = json.loads((path / STATE).read_text())
        sums_differ = saved.pop("crc") != identity.checksum(json.dumps(saved))
        if sums_differ or saved["step"] != step_of(path):
            raise ValueError
    except (ValueError, AttributeError, KeyError, TypeError):
        raise ValueError(f"{path / STATE} is damaged.") from None
    for name in sorted(saved["files"])[dist.get_rank() :: dist.get_world_size()]:
        if not (path / name).is_file() or file_sum(path / name) != saved["files"][name]:
            raise ValueError(f"{path / name} is damaged.")


def _options(model: nn.Module) -> dcp_state.StateDictOptions:
    """Return the options of the state dicts that are saved and loaded.

    FSDP1 copies the tensors of a state dict. The copies are offloaded one by one: on the GPU they
    would double the memory of the model and its optimizer. FSDP2 and DDP copy nothing.
    """
    return dcp_state.StateDictOptions(cpu_offload=isinstance(model, FSDP), strict=False)


def _all_tensors(state: State) -> dict[str, Any]:
    """Return nested dicts of the tensors to save: model, optimizer, others and random states."""
    options = _options(state.model)
    numbers = state.numbers()
    model, optimizer = dcp_state.get_state_dict(state.model, state.optimizer, options=options)
    for group, values in zip(state.optimizer.param_groups, numbers, strict=True):
        group |= values  # PyTorch calls `step` of an optimizer without state
    # DCP would pickle the settings. A resume uses those of the new optimizer.
    del optimizer["param_groups"]
    for path, value in pytree.tree_flatten_with_path(optimizer)[0]:
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"The optimizer's state{pytree.keystr(path[1:])} is {value!r}. "
                "Checkpoints contain only tensors. Keep it as a tensor."
            )
    parts = {"model": _saved_part(state.model, model), "optimizer": optimizer}
    return parts | {"others": _other_tensors(state), "random": _random_states()}


def _saved_part(model: nn.Module, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a state dict to save: only adapters if there are any, ties once."""
    inner = unwrapped(model)
    names = {plain_name(name) for name, _ in inner.named_parameters(remove_duplicate=False)}
    tied = names - {plain_name(name) for name, _ in inner.named_parameters()}
    if any(ADAPTER in name for name in names):
        return {name: tensor for name, tensor in state_dict.items() if ADAPTER in name}
    return {name: tensor for name, tensor in state_dict.items() if name not in tied}


def _random_states() -> dict[str, torch.Tensor]:
    """Return the states of this rank's random generators, which dropout draws from."""
    return {f"{dist.get_rank()}, {x.__name__}": x.get_rng_state() for x in _generators()}


def _generators() -> list[Any]:
    kind = ranks.accelerator()
    return [torch] if kind is None else [torch, torch.get_device_module(kind)]


def _other_tensors(state: State) -> dict[str, torch.Tensor]:
    """Return tensors and numbers in `state.others` by name, plain tensors also by rank."""
    tensors = {}
    for name, other in state.others.items():
        for path, value in pytree.tree_flatten_with_path(other.state_dict())[0]:
            key = name + pytree.keystr(path)
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                key += f" of rank {dist.get_rank()}"
            if isinstance(value, SAVED):
                tensors[key] = torch.as_tensor(value)
    return tensors


def _read_others(fill: Callable, state: State) -> None:
    """Load tensors and numbers of `state.others` with `fill`."""
    tensors = _other_tensors(state)
    fill({"others": tensors})
    loaded = iter(tensors.values())
    for other in state.others.values():
        values, structure = pytree.tree_flatten(other.state_dict())
        for i, value in enumerate(values):
            if isinstance(value, SAVED):
                tensor = next(loaded)
                values[i] = tensor if torch.is_tensor(value) else type(value)(tensor.item())
        other.load_state_dict(pytree.tree_unflatten(values, structure))


def load_weights(path: Path, model: nn.Module) -> None:
    """Load into `model` the weights of a checkpoint of any world size and strategy. All ranks."""
    options = _options(model)
    weights = _saved_part(model, dcp_state.get_model_state_dict(model, options=options))
    open_checkpoint(path)({"model": weights})
    dcp_state.set_model_state_dict(model, weights, options=options)


def _read_optimizer(fill: Callable, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the optimizer's moments with `fill` (see `open_checkpoint`), but keep its settings."""
    options = _options(model)
    # A forward pass leaves gradients on offloaded parameters. With one, `get_optimizer_state_dict`
    # would return an optimizer without state, and nothing would be loaded.
    optimizer.zero_grad()
    # Likewise with empty states, which the `train()` of a schedule-free optimizer leaves.
    for parameter in [x for x, values in optimizer.state.items() if not values]:
        del optimizer.state[parameter]
    if isinstance(model, FSDPModule):
        _make_moments(optimizer)
    state_dict = dcp_state.get_optimizer_state_dict(model, optimizer, options=options)
    if isinstance(model, FSDP) and isinstance(optimizer, torch.optim.AdamW):
        # The line above created moments of zeros and copied them. Drop them, to free memory for the
        # loaded ones. Keep those of one parameter, because an optimizer without any gets moments
        # of zeros again.
        for parameter in list(optimizer.state)[1:]:
            del optimizer.state[parameter]
    groups = state_dict.pop("param_groups")
    fill({"optimizer": state_dict})
    state_dict["param_groups"] = groups
    dcp_state.set_optimizer_state_dict(model, optimizer, state_dict, options=options)


def _make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Create the state of each trained parameter by a step at rate 0 on a gradient of zeros.

    `get_optimizer_state_dict` would do so for all at once, with a gradient of every parameter.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            parameter.grad = None
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def load_checkpoint(path: Path, state: State, args: Namespace) -> None:
    """Restore `state`, random states included; at another world size those are reseeded.

    Weights are loaded before the optimizer, so that a state dict of both is never in memory. Raise
    ValueError on all ranks, with the differences, if a different run saved the checkpoint.
    """
    saved = json.loads((path / STATE).read_text())
    identity.compare(path, saved["identity"], state.identity)
    load_weights(path, state.model)
    fill = open_checkpoint(path)
    _read_optimizer(fill, state.model, state.optimizer)
    if state.others:
        _read_others(fill, state)
    while state.scheduler.last_epoch < saved["schedule"]:  # any schedule, with this run's flags
        state.scheduler.step()
    groups = state.optimizer.param_groups
    for group, first, numbers in zip(groups, state.initial_numbers, saved["numbers"], strict=True):
        group |= first | numbers  # reading the optimizer calls its `step`
    if saved["scaler"] and state.scaler.is_enabled():
        state.scaler.load_state_dict(saved["scaler"])
    for name in COUNTERS:
        setattr(state, name, saved[name])
    # Last: the code above may draw random numbers.
    here = [dist.get_world_size(), state.device.type]
    if here == saved["ranks"]:
        states = _random_states()
        fill({"random": states})
        for generator, value in zip(_generators(), states.values(), strict=True):
            generator.set_rng_state(value)
        return
    set_seed(args.seed + state.step * here[0] + dist.get_rank())
    ranks.say(f"Saved by {saved['ranks'][0]} processes, resuming with {here[0]}: dropout reseeded.")
