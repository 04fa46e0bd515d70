"""Checkpoints: save, check, load, prune.

A checkpoint is a directory `step-00000200`, complete or absent: shards written by
`torch.distributed.checkpoint`, or one file, and train_state.json with the counters, and size and
checksum of every file. Beside the checkpoints `best-00000150` holds the weights of the best step.

All ranks call a function together unless its docstring says "rank 0 alone".
"""

import contextlib
import json
import math
import os
import random
import re
import shutil
import warnings
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint import CheckpointException, Metadata
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)

from . import identities, ranks, weights
from .checkpoint_reader import SafeReader
from .ranks import accelerator, cpu_group, on_every_rank, on_rank_zero, set_seed
from .state import TrainState

FULL = "full.pt"  # --checkpoint-type full
STEP, BEST, DAMAGED = r"step-\d{8,}", r"best-\d{8,}", r"damaged-step-\d{8,}"  # names of ours
FORMAT = 1  # of a checkpoint; another one is refused
COUNTERS = (
    "step", "epoch", "consumed", "tokens", "best_loss", "best_step", "validation_due", "identity",
)  # fmt: skip

# torch.save would sum every tensor, a tenth of a save's time; `file_sum` sums the files themselves.
torch.serialization.set_crc32_options(False)


class SaveError(OSError):
    """Two saves in a row failed, or the last one, or the export."""


@contextlib.contextmanager
def told(path: Path) -> Iterator[None]:
    """Tell an error in writing `path` as one of a save."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise SaveError(
            f"{path} could not be written: is the disk full, or failing? ({error})"
        ) from None


class Saver:
    """Saves `state` below `directory`, at once or in the background, and counts what fails.

    A save that fails is told, and the next one tries again. The second failure in a row raises
    SaveError. `group`, a gloo group of its own, makes saves go on in the background: a save then
    returns when the state is copied to host memory, and waits before that for the save before.
    `saved_step` is the step of the checkpoint that `state` came from.
    """

    def __init__(
        self, directory: Path, state: TrainState, keep: int, full: bool,
        group: dist.ProcessGroup | None = None,
        saved_step: int = 0,
    ):  # fmt: skip
        self.directory = directory / "checkpoints"
        self.state = state
        self.keep = keep
        self.full = full
        self.group = group
        self.saved_step = saved_step
        self.failures = 0  # in a row
        self.under_way: Future | None = None
        self.copies = _HostCopies(state)

    def save(self) -> bool:
        """Save all of the state as step-N. Returns whether there was anything to save, and it went
        well; in the background, whether it was begun."""
        self.wait()
        state = self.state
        if self.saved_step == state.step:
            return False
        self.saved_step = state.step
        model, optimizer = dcp_state.get_state_dict(
            state.model, state.optimizer, options=_options(state.model)
        )
        model = _saved_part(state.model, model)
        # DCP would pickle them. A resume keeps the settings of its own optimizer.
        del optimizer["param_groups"]
        _check_tensors(optimizer)
        # Under one key for all ranks only rank 0's would be kept.
        rng = {str(dist.get_rank()): _random_states()}
        tensors = {"model": model, "optimizer": optimizer, "rng": rng}
        tensors |= _other_tensors(state)
        path = self.directory / f"step-{state.step:08d}"
        best = best_path(self.directory.parent, state)

        def prune() -> None:
            _prune(self.directory, self.keep, best)

        if self.group is None:
            self._attempt(_write, path, tensors, _describe(state), self.full, None, prune)
            return self.failures == 0
        copies = self.copies.make(tensors)
        thread = ThreadPoolExecutor(max_workers=1)
        if state.device.type != "cpu":  # or every rank's thread would open a context on GPU 0
            thread.submit(torch.accelerator.set_device_index, state.device.index)
        self.under_way = thread.submit(
            _write, path, copies, _describe(state), self.full, self.group, prune
        )
        thread.shutdown(wait=False)
        return True

    def save_best(self, loss: float) -> None:
        """Save the weights alone, of the step that is now the best, with a validation loss `loss`.

        If it fails, the best before it stays.
        """
        self.wait()  # when that save ends, it deletes other best weights than it knew
        state = self.state
        before = state.best_loss, state.best_step
        failures_before = self.failures
        state.best_loss = loss
        state.best_step = state.step
        model = dcp_state.get_model_state_dict(state.model, options=_options(state.model))
        tensors = {"model": _saved_part(state.model, model)}
        self._attempt(_write, best_path(self.directory.parent, state), tensors, _describe(state))
        if self.failures:
            state.best_loss, state.best_step = before
        self.failures = max(self.failures, failures_before)  # a checkpoint has yet to succeed

    def wait(self) -> None:
        """Wait for the save under way, if there is one; its error is raised, or told, here."""
        if self.under_way is not None:
            under_way = self.under_way
            self.under_way = None
            self._attempt(under_way.result)

    def finish(self) -> None:
        """Wait for the save under way; raises SaveError if the last save failed."""
        self.wait()
        if self.failures:
            raise SaveError("the last save failed")

    def _attempt(self, function: Callable[..., None], *args: Any) -> None:
        try:
            function(*args)
            self.failures = 0
        except OSError as error:
            self.failures += 1
            self.saved_step = -1
            if self.failures > 1:
                raise SaveError(f"{error}, the second time in a row") from None
            ranks.say(f"{error}: the next save tries again")


class _HostCopies:
    """Copies of `state` in host memory, which training does not change.

    What is on a device goes into pinned memory, which takes it at the full speed of the bus. It is
    kept for the next save, which may begin once the last one has ended. What is on the host, on a
    CPU or with --cpu-offload, is copied anew each time. FSDP1's state dicts are on the host already
    (`_options`): FSDP moves each shard there as it makes it, into memory of its own that is not
    pinned. Another copy would double what a save takes of the host's memory and time.
    """

    def __init__(self, state: TrainState):
        self.state = state
        self.stager: BlockingAsyncStager | None = None  # holds the copies
        self.names: set[str] = set()  # of what is copied

    def make(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Return `tensors` with a copy of each that training would change."""
        state = self.state
        moments = [x for values in state.optimizer.state.values() for x in values.values()]
        others, _ = tree_flatten(_other_tensors(state))
        lasting = (*state.model.parameters(), *state.model.buffers(), *moments, *others)
        live = {_storage(x) for x in lasting}

        def changes(value: Any) -> bool:
            is_tensor = isinstance(value, torch.Tensor)
            return is_tensor and (value.device.type != "cpu" or _storage(value) in live)

        leaves, structure = tree_flatten_with_path(tensors)
        named = [(keystr(path), value) for path, value in leaves]
        changing = {name: value for name, value in named if changes(value)}
        if changing.keys() != self.names:  # the first save; or a parameter has moments since then
            place = state.optimizer.param_groups[0]["params"][0].device
            self.stager = BlockingAsyncStager(cache_staged_state_dict=place.type != "cpu")
            self.names = set(changing)
        copies = self.stager.stage(changing) if changing else {}
        return tree_unflatten([copies.get(name, value) for name, value in named], structure)


def _check_tensors(optimizer: dict[str, Any]) -> None:
    """Raise ValueError if the state dict of an optimizer holds anything but tensors."""
    for path, value in tree_flatten_with_path(optimizer)[0]:
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"The optimizer's state{keystr(path[1:])} is {value!r}. "
                "Checkpoints hold tensors only: keep it as a tensor."
            )


def _storage(value: Any) -> int:
    """Return the address of a tensor's memory, of a DTensor this rank's; 0 of other values."""
    if isinstance(value, DTensor):
        value = value.to_local()
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else 0


def best_path(output: Path, state: TrainState) -> Path:
    """Return the path at which `Saver.save_best` put the weights of the best step."""
    return output / "checkpoints" / f"best-{state.best_step:08d}"


def named(directory: Path, pattern: str) -> list[Path]:
    """Return the directories whose whole name fits `pattern`, by their steps; rank 0 alone.

    What has another name is the user's: nobody looks at it, or deletes it.
    """
    found = [x for x in directory.glob("*-*") if re.fullmatch(pattern, x.name) and x.is_dir()]
    return sorted(found, key=step_of)


def find(directory: Path) -> tuple[list[Path], list[Path]]:
    """Return the checkpoints in `directory`, the oldest first, and those that hold another step
    than their name says; rank 0 alone."""
    checkpoints, misnamed = [], []
    for path in named(directory, STEP):
        (checkpoints if held_step(path) in (None, step_of(path)) else misnamed).append(path)
    return checkpoints, misnamed


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint, or of best weights."""
    return int(path.name.rpartition("-")[2])


def held_step(path: Path) -> int | None:
    """Return the step that a checkpoint holds; None if it is damaged there."""
    try:
        return _read_description(path)["step"]
    except (OSError, ValueError):
        return None


def check_format(path: Path) -> None:
    """Raise ValueError if a checkpoint is whole, but of another format; rank 0 alone."""
    try:
        saved = json.loads((path / "train_state.json").read_text())
    except (OSError, ValueError):  # damaged
        return
    if isinstance(saved, dict) and saved.get("format") != FORMAT:
        crc = saved.pop("crc", None)
        if crc in (None, json_sum(saved)):
            raise ValueError(
                f"{path} has format {saved.get('format')}, and this version reads {FORMAT}: go on "
                "with the version that wrote it, or give another --output-dir"
            )


def _read_description(path: Path) -> dict[str, Any]:
    """Return what train_state.json of a checkpoint holds; ValueError if it is not as it was saved,
    OSError if it is not there."""
    saved = json.loads((path / "train_state.json").read_text())
    if not isinstance(saved, dict) or saved.pop("crc", None) != json_sum(saved):
        raise ValueError("its checksum differs")
    return saved


def right_name(path: Path, step: int) -> str:
    """Return a sentence's end, on a checkpoint or best weights that hold `step`, not the one in
    their name."""
    right = path.with_name(f"{path.name.rpartition('-')[0]}-{step:08d}")
    if right.exists():
        return f"holds step {step}, as {right.name} does"
    return f"holds step {step}: `mv {path} {right}` gives it its name"


def _prune(directory: Path, keep: int, best: Path) -> None:
    """Delete all but the newest `keep` checkpoints, and one that is damaged; rank 0 alone.

    Pruning keeps `best`, and each best-N that a kept checkpoint names: a run continued from that
    checkpoint finds the weights, whatever was trained and lost after it. It keeps what the user has
    given another name.
    """
    checkpoints, misnamed = find(directory)
    wanted = {best}
    for path in checkpoints[-keep:] + misnamed:
        with contextlib.suppress(OSError, ValueError):  # damaged
            wanted.add(directory / f"best-{_read_description(path)['best_step']:08d}")
    unwanted = set(named(directory, BEST)) - wanted
    damaged = named(directory, DAMAGED)[:-1]
    for path in (*checkpoints[:-keep], *unwanted, *damaged):
        shutil.rmtree(path, ignore_errors=True)  # in use on NFS: then the next time


class _Writer(dcp.FileSystemWriter):
    """Keeps the checkpoint's index on rank 0, once it is written: DCP would send it to all ranks,
    which have no use for it, and it has some 200 bytes for each shard of each tensor."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write it, on rank 0 alone."""
        super().finish(metadata, results)
        metadata.state_dict_metadata = {}
        metadata.planner_data = metadata.storage_data = None


def _write(
    path: Path,
    tensors: dict[str, Any],
    saved: dict[str, Any],
    full: bool = False,
    group: dist.ProcessGroup | None = None,
    when_done: Callable[[], None] = lambda: None,
) -> None:
    """Write under a temporary name, which becomes `path` once all ranks are done.

    `full` makes the shards one file afterwards, for which rank 0 alone holds the whole state. Sizes
    and checksums of the files go into train_state.json, with `saved`. Rank 0 calls `when_done` at
    the end. Raises OSError on all ranks, with nothing left of `path`.
    """
    temporary = path.with_name(f"tmp-{path.name}")
    rank = dist.get_rank()
    group = group or cpu_group()

    def sums_of_own_shards() -> dict[str, list[int]]:
        return {file.name: file_sum(file) for file in temporary.glob(f"__{rank}_*.distcp")}

    def complete() -> None:
        if full:
            saved["files"] = _make_full(temporary)
        else:
            saved["files"][".metadata"] = file_sum(temporary / ".metadata")
        with (temporary / "train_state.json").open("w") as file:
            json.dump(saved | {"crc": json_sum(saved)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        held = held_step(path)
        if held not in (None, saved["step"]):  # somebody's, under the name that this one has
            path.rename(path.with_name(f"{path.name}-holds-{held}"))
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)
        when_done()

    try:
        writer = _Writer(temporary, overwrite=True)
        dcp.save(tensors, storage_writer=writer, process_group=group)
        saved["files"] = {}
        for sums in on_every_rank(sums_of_own_shards, group=group):
            saved["files"] |= sums
        on_rank_zero(complete, group=group)
    except (OSError, CheckpointException) as error:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, CheckpointException):
            error = next(iter(error.failures.values()))[0]
        reason = str(error.__cause__ or error).splitlines()[0]
        raise OSError(
            f"{path} could not be saved: is the disk full, or failing? ({reason})"
        ) from None


def _make_full(directory: Path) -> dict[str, list[int]]:
    """Make one file of the shards in `directory`; rank 0 alone. Returns its name and `file_sum`."""
    shards = [*directory.glob("*.distcp"), directory / ".metadata"]
    reader = SafeReader(directory)
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    try:
        torch.save(tensors, directory / FULL)
    except RuntimeError as error:  # what torch.save makes of a full disk
        raise OSError(str(error)) from None
    for file in shards:
        file.unlink()
    return {FULL: file_sum(directory / FULL)}


def _random_states() -> dict[str, torch.Tensor]:
    """Return the states of this rank's random generators as tensors, which need no pickle."""
    _, words, gauss = random.getstate()
    _, keys, *position, cached = numpy.random.get_state()
    states = {
        "python": torch.tensor(words),
        "numpy": torch.tensor([*keys.tolist(), *position]),
        "gauss": torch.tensor([math.nan if gauss is None else gauss, cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if accelerator() is not None:
        states["device"] = torch.get_device_module(accelerator()).get_rng_state()
    return states


def _restore_random_states(states: dict[str, torch.Tensor]) -> None:
    """Set the generators to what `_random_states` returned; without "device", all but that one."""
    gauss, cached = states["gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), None if math.isnan(gauss) else gauss))
    *keys, position, has_gauss = states["numpy"].tolist()
    numpy.random.set_state(("MT19937", keys, position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    if "device" in states and accelerator() is not None:
        torch.get_device_module(accelerator()).set_rng_state(states["device"])


def _describe(state: TrainState) -> dict[str, Any]:
    """Return what train_state.json holds besides the files' sums."""
    saved = {"format": FORMAT} | {name: getattr(state, name) for name in COUNTERS}
    saved["others"] = sorted(state.others)
    saved["schedule"] = state.scheduler.last_epoch
    saved["lr"] = state.scheduler.get_last_lr()[0]  # of the next step
    saved["scaler"] = state.scaler.state_dict()
    saved["world_size"] = dist.get_world_size()
    return saved


def check_files(path: Path) -> None:
    """Compare this rank's share of a checkpoint's files with the sizes and sums noted at the save.

    Raises ValueError that names the first one that is not as it was.
    """
    try:
        saved = _read_description(path)
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"{path / 'train_state.json'} is damaged ({error})") from None
    if saved["step"] != step_of(path):
        raise ValueError(f"{path} {right_name(path, saved['step'])}")
    for name in sorted(saved["files"])[dist.get_rank() :: dist.get_world_size()]:
        try:
            there = file_sum(path / name)
        except FileNotFoundError as error:
            raise ValueError(f"{path / name} is damaged ({error.strerror})") from None
        if there != saved["files"][name]:
            raise ValueError(f"{path / name} is damaged (size or checksum differ)")


def json_sum(saved: dict[str, Any]) -> int:
    """Return the CRC-32 of what train_state.json holds besides it."""
    return zlib.crc32(json.dumps(saved, sort_keys=True).encode())


def file_sum(path: Path) -> list[int]:
    """Return a file's size in bytes and CRC-32: `dcp.load` accepts altered bytes silently."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return [path.stat().st_size, crc]


def _options(model: nn.Module) -> dcp_state.StateDictOptions:
    """Return the options of the state dicts that are saved.

    FSDP1 copies what it puts into one. The copies go to the host one by one: on the GPU they would
    take as much again as the model and its optimizer. FSDP2 and DDP copy nothing.
    """
    is_whole = not hasattr(weights.unwrapped(model), "adapters")
    return dcp_state.StateDictOptions(cpu_offload=isinstance(model, FSDP), strict=is_whole)


def _saved_part(model: nn.Module, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint holds of a model's state dict; tied weights are there once."""
    tied = _tied_names(model)
    adapters = getattr(weights.unwrapped(model), "adapters", None)
    return {
        name: tensor
        for name, tensor in state_dict.items()
        if name not in tied and (adapters is None or adapters.is_saved(name))
    }


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Return the further names of tied weights, each with the first one."""
    first: dict[nn.Parameter, str] = {}
    further = {}
    for name, parameter in weights.unwrapped(model).named_parameters(remove_duplicate=False):
        name = weights.plain_name(name)
        if parameter in first:
            further[name] = first[parameter]
        else:
            first[parameter] = name
    return further


def _checked_reader(directory: Path) -> SafeReader:
    """Return a reader of shards; raises ValueError, on all ranks, if it refuses their metadata."""
    reader = SafeReader(directory)

    def check() -> None:
        reader.read_metadata()

    on_every_rank(check)
    return reader


@contextlib.contextmanager
def _shards(path: Path) -> Iterator[SafeReader]:
    """Yield what `dcp.load` reads; of a full checkpoint rank 0 makes shards for it.

    Raises ValueError on all ranks if the checkpoint holds anything but tensors.
    """
    if not (path / FULL).is_file():
        yield _checked_reader(path)
        return
    temporary = path.with_name(f"tmp-shards-{path.name}")

    def make_shards() -> None:
        try:
            tensors = torch.load(path / FULL, weights_only=True, mmap=True)
        except (UnpicklingError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{path / FULL} is no file of tensors ({reason})") from None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is alone
            dcp.save(tensors, checkpoint_id=temporary, no_dist=True)

    on_rank_zero(make_shards)
    yield _checked_reader(temporary)
    dist.barrier(group=cpu_group())
    on_rank_zero(shutil.rmtree, temporary)


def _read_weights(shards: SafeReader, model: nn.Module) -> None:
    options = _options(model)
    whole = dcp_state.get_model_state_dict(model, options=options)
    tensors = {"model": _saved_part(model, whole)}
    dcp.load(tensors, storage_reader=shards, process_group=cpu_group())
    loaded = tensors["model"]
    for name, first in _tied_names(model).items():
        if first in loaded:
            loaded[name] = loaded[first]
    dcp_state.set_model_state_dict(model, loaded, options=options)


def _read_optimizer(shards: SafeReader, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the moments; learning rate and other settings stay those of this run."""
    options = _options(model)
    # A forward pass leaves gradients on offloaded parameters. A state dict that finds one takes the
    # optimizer for one without state, and nothing would be loaded.
    optimizer.zero_grad()
    settings = [group | {"params": []} for group in optimizer.param_groups]
    if isinstance(model, FSDPModule):
        _make_moments(optimizer)
    tensors = {"optimizer": dcp_state.get_optimizer_state_dict(model, optimizer, options=options)}
    if isinstance(model, FSDP) and isinstance(optimizer, torch.optim.AdamW):
        # The line above made moments of zeros, and copied them. They go, or they would stand beside
        # the loaded ones. Those of one parameter stay: an optimizer without any is given moments of
        # zeros again.
        for parameter in list(optimizer.state)[1:]:
            del optimizer.state[parameter]
    groups = tensors["optimizer"].pop("param_groups")
    dcp.load(tensors, storage_reader=shards, process_group=cpu_group())
    tensors["optimizer"]["param_groups"] = groups
    dcp_state.set_optimizer_state_dict(model, optimizer, tensors["optimizer"], options=options)
    for group, kept in zip(optimizer.param_groups, settings, strict=True):
        group |= kept | {"params": group["params"]}


def _make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Give each parameter that is trained its state, by a step at rate 0 on a gradient of zeros.

    `get_optimizer_state_dict` would do so for all at once, and hold a gradient of every parameter.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            parameter.grad = None
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _read_random_states(shards: SafeReader) -> dict[str, torch.Tensor]:
    """Return this rank's `_random_states`."""
    rank = str(dist.get_rank())
    there = shards.read_metadata().state_dict_metadata
    states = {key: value for key, value in _random_states().items() if f"rng.{rank}.{key}" in there}
    tensors = {"rng": {rank: states}}
    dcp.load(tensors, storage_reader=shards, process_group=cpu_group())
    return states


def _other_tensors(state: TrainState) -> dict[str, Any]:
    """Return the tensors of what a script trains besides, and its numbers as tensors.

    Numbers and DTensors have one name for all ranks; plain tensors are each rank's own.
    """
    if not state.others:
        return {}
    shared, own = {}, {}
    for name, other in state.others.items():
        for path, value in tree_flatten_with_path(other.state_dict())[0]:
            key = f"{name}{keystr(path)}"
            if isinstance(value, DTensor):
                shared[key] = value
            elif isinstance(value, torch.Tensor):
                own[key] = value
            elif isinstance(value, int | float):
                dtype = torch.float64 if isinstance(value, float) else torch.int64
                shared[key] = torch.tensor(value, dtype=dtype)
    return {"others": shared, "others of ranks": {str(dist.get_rank()): own}}


def _read_others(shards: SafeReader, state: TrainState, saved: dict[str, Any]) -> None:
    """Restore what a script trains besides; what is no tensor or number stays as it is.

    Raises ValueError if the checkpoint has something else, or of another number of ranks.
    """
    if sorted(state.others) != saved["others"]:
        names = ", ".join(saved["others"]) or "nothing"
        raise ValueError(f"run.restore: the checkpoint holds {names} besides the model, not "
                         f"{', '.join(sorted(state.others)) or 'nothing'}")  # fmt: skip
    if not state.others:
        return
    tensors = _other_tensors(state)
    own = tensors["others of ranks"][str(dist.get_rank())]
    if own and saved["world_size"] != dist.get_world_size():
        raise ValueError(
            f"run.restore: {', '.join(sorted(state.others))} is each rank's own, saved by "
            f"{saved['world_size']} processes: go on with as many"
        )
    dcp.load(tensors, storage_reader=shards, process_group=cpu_group())
    loaded = tensors["others"] | tensors["others of ranks"][str(dist.get_rank())]
    for name, other in state.others.items():
        leaves, structure = tree_flatten_with_path(other.state_dict())
        values = []
        for path, value in leaves:
            found = loaded.get(f"{name}{keystr(path)}", value)
            is_number = isinstance(value, int | float) and isinstance(found, torch.Tensor)
            values.append(type(value)(found.item()) if is_number else found)
        other.load_state_dict(tree_unflatten(values, structure))


def load_weights(path: Path, model: nn.Module) -> None:
    """Load a checkpoint's weights, whatever world size and strategy wrote them."""
    with _shards(path) as shards:
        _read_weights(shards, model)


def load_checkpoint(path: Path, state: TrainState, args: Namespace) -> None:
    """Restore `state`, random states included; at another world size those are seeded anew.

    Weights come first, then the optimizer, so that a state dict of both is never held.
    The best weights so far are those in --output-dir; those of another run's checkpoint stay there.

    Raises ValueError on all ranks, naming what differs, if it is the state of another run.
    """
    saved = json.loads((path / "train_state.json").read_text())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    identities.compare_saved(path, state.identity, args)
    random_states = {}
    with _shards(path) as shards:
        _read_weights(shards, state.model)
        _read_optimizer(shards, state.model, state.optimizer)
        _read_others(shards, state, saved)
        if saved["world_size"] == world_size:
            random_states = _read_random_states(shards)
    while state.scheduler.last_epoch < saved["schedule"]:  # any schedule, with this run's flags
        state.scheduler.step()
    lr = state.scheduler.get_last_lr()[0]
    if not math.isclose(lr, saved["lr"]):
        ranks.say(
            f"the learning rate goes on at {lr:.3g}, not at {saved['lr']:.3g} as planned before: "
            "--lr, the schedule or the number of steps have changed"
        )
    if saved["scaler"] and state.scaler.is_enabled():
        state.scaler.load_state_dict(saved["scaler"])
    for name in COUNTERS:
        setattr(state, name, saved[name])
    try:
        on_every_rank(check_files, best_path(Path(args.output_dir), state))
    except ValueError as error:
        if state.best_step:
            ranks.say(f"{error}: the best weights so far are lost")
        state.best_loss, state.best_step = float("inf"), 0
    # Last: what stands above may draw random numbers.
    if random_states:
        _restore_random_states(random_states)
        return
    set_seed(args.seed + state.step * world_size + rank)
    there = saved["world_size"]
    ranks.say(f"{there} processes saved this, {world_size} go on: dropout reseeded")
