"""Checkpoints, and the identity of a run: the values that all its ranks and starts must share.

A checkpoint is a directory such as step-00000200: shards that PyTorch's distributed checkpoint
(DCP) writes, or one file with --checkpoint-type full. train_state.json is written last, by rename.
It contains the counters, the identity, and the size and CRC-32 of each file. A directory that lacks
it, or whose files differ from it, is skipped. No code in a checkpoint is run: PyTorch's reader
would unpickle the file `.metadata`, and a pickle can call any function. All ranks call each
function together, except "rank 0 only" ones.
"""

import contextlib
import io
import json
import logging
import os
import pickle
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
import torch.utils._pytree as pytree  # private: torch has no public functions for nested dicts
import transformers
from datasets import Dataset
from torch import nn
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import PretrainedConfig

from . import ranks, readers
from .options import as_flag
from .state import COUNTERS, Facts, State
from .weights import ADAPTER, plain_name, unwrapped

STATE = "train_state.json"
SAVED = (torch.Tensor, int, float)  # types that a checkpoint contains
FULL = "full.pt"  # the one file of --checkpoint-type full
DCP = "torch.distributed.checkpoint"
# What `.metadata` may use. BytesStorageMetadata is missing, because DCP would unpickle its entry.
ALLOWED = {
    "pathlib.PosixPath", "torch.Size", "torch.serialization._get_layout",
    f"{DCP}.filesystem._StorageInfo", f"{DCP}.metadata.ChunkStorageMetadata",
    f"{DCP}.metadata.Metadata", f"{DCP}.metadata.MetadataIndex", f"{DCP}.metadata.StorageMeta",
    f"{DCP}.metadata.TensorProperties", f"{DCP}.metadata.TensorStorageMetadata",
    f"{DCP}.metadata._MEM_FORMAT_ENCODING",
}  # fmt: skip
# Keys of a config that describe its files.
OF_FILES = {"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"}
PLACES = {"output_dir", "model_name", "dataset", "val_dataset", "data_dir"}  # may differ by node
VERSION = "Transformers"  # the key of the library's version
SAMPLES = 256  # most samples that are read of a data set that is not a `datasets.Dataset`

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

    def __init__(
        self, args: Namespace, directory: Path, state: State, identity: dict[str, Any],
        saved_step: int = 0,
    ) -> None:  # fmt: skip
        self.args = args
        self.identity = identity
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
        is_full = self.args.checkpoint_type == "full"
        writer = _Writer(self._path, state, self.identity, is_full, self._stager)
        tensors = _all_tensors(state)
        # Later saves reuse the plan of the first, which takes rank 0 seconds. Before 2.13 a failed
        # save may leave a plan that other ranks lack.
        planner = DefaultSavePlanner(enable_plan_caching=torch.__version__ >= (2, 13))
        options = {"storage_writer": writer, "planner": planner}
        if self.group is None:
            self._attempt(partial(dcp.save, process_group=ranks.cpu_group(), **options), tensors)
            return self.failures == 0
        self.under_way = dcp.async_save(tensors, process_group=self.group, **options)
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
            prune(self.directory, self.args.keep_checkpoints, self.saved_step)


class _Writer(dcp.FileSystemWriter):
    """A DCP writer of shards and, at the end, of train_state.json with their checksums."""

    def __init__(
        self, path: Path, state: State, identity: dict, full: bool, stager: DefaultStager
    ) -> None:
        super().__init__(path, overwrite=True)
        self.fs = _SummedFiles()
        self.description = {name: getattr(state, name) for name in COUNTERS} | {
            "identity": identity,
            "schedule": state.scheduler.last_epoch,
            "lr": state.scheduler.get_last_lr()[0],
            "scaler": state.scaler.state_dict(),
            "numbers": state.changed_numbers(),
            "ranks": [dist.get_world_size(), state.device.type],
        }
        self.full = full
        self.stager = stager
        # FSDP1's shards are copies: a second one would double a save's memory and time.
        self.copied = DTensor if isinstance(state.model, FSDP) else ()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return host copies of tensors that training changes; DCP calls this in async saves."""
        # The copies are on the CPU. Otherwise DCP would synchronize the training stream for each.
        self.per_thread_copy_ahead = 0
        leaves, structure = pytree.tree_flatten(state_dict)
        # In one call, after which the device is synchronized.
        staged = iter(self.stager.stage([x for x in leaves if not isinstance(x, self.copied)]))
        leaves = [x if isinstance(x, self.copied) else next(staged) for x in leaves]
        return pytree.tree_unflatten(leaves, structure)

    def prepare_local_plan(self, plan: Any) -> Any:
        """Create the directory; on rank 0 empty it, as it may have shards of a larger world size.
        No rank writes yet. A failure here leaves no plan that only some ranks have cached."""
        plan = super().prepare_local_plan(plan)
        if dist.get_rank() == 0:
            for file in self.path.iterdir():
                file.unlink()
        return plan

    def write_data(self, plan: Any, planner: Any) -> Future:
        """Write this rank's shards; add their checksums to the results that rank 0 receives."""
        ranks.local_device()  # makes it current, or the thread of every rank would use GPU 0
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
        description["crc"] = checksum(json.dumps(description))
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


def list_checkpoints(directory: Path) -> dict[int, Path]:
    """Return by step the directories named like checkpoints, oldest first, complete or not; rank 0
    only. Nothing reads or deletes directories with other names."""
    matches = [re.fullmatch(r"step-(\d{8,})", path.name) for path in directory.glob("step-*")]
    return dict(sorted((int(x[1]), directory / x[0]) for x in matches if x))


def prune(directory: Path, keep: int, step: int) -> None:
    """Delete all but the newest `keep` complete checkpoints up to `step`; rank 0 only.

    Later ones are damaged. Otherwise the run would have resumed from them.
    """
    paths = list_checkpoints(directory)
    complete = [x for saved, x in paths.items() if saved <= step and (x / STATE).is_file()]
    for path in {*paths.values()}.difference(complete[-keep:]):
        shutil.rmtree(path, ignore_errors=True)  # the next save deletes files in use on NFS


def find_newest(output: Path) -> Path | None:
    """Return the newest intact checkpoint of the run in `output`, or None if none was completed.

    Print a line for each one that is skipped. Raise ValueError if all are damaged.
    """
    paths = ranks.on_rank_zero(list_checkpoints, output / "checkpoints")
    for step, path in reversed(paths.items()):
        try:
            ranks.on_every_rank(_verify, step, path)
            return path
        except ValueError as error:
            ranks.say(f"{error} {path.name} is skipped.")
    if ranks.on_rank_zero(lambda: any((path / STATE).is_file() for path in paths.values())):
        raise ValueError(f"No checkpoint in {output} is intact. Pass another --output-dir.")
    return None


def _verify(step: int, path: Path) -> None:
    """Raise ValueError if a file in this rank's share of a step's checkpoint is damaged."""
    if not (path / STATE).is_file():
        raise ValueError(f"{path} has no {STATE}: its save was interrupted.")
    try:
        saved = json.loads((path / STATE).read_text())
        sums_differ = saved.pop("crc") != checksum(json.dumps(saved))
        if sums_differ or saved["step"] != step:
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
    values = state.outer_values()
    model, optimizer = dcp_state.get_state_dict(state.model, state.optimizer, options=options)
    state.set_numbers(values)  # PyTorch calls `step` of an optimizer without state
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
    states = {name: other.state_dict() for name, other in state.others.items()}
    for (name, *path), value in pytree.tree_flatten_with_path(states)[0]:
        key = name.key + pytree.keystr(path)
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            key += f" of rank {dist.get_rank()}"
        if isinstance(value, SAVED):
            tensors[key] = torch.as_tensor(value)
    return tensors


def _read_others(fill: Callable, state: State, world_size: int) -> None:
    """Load tensors and numbers of `state.others`, saved by `world_size` ranks, with `fill`."""
    tensors = _other_tensors(state)
    if dist.get_world_size() != world_size and any("of rank" in name for name in tensors):
        names = ", ".join(state.others)
        text = f"{names}: {world_size} processes saved tensors of their own."
        raise ValueError(f"{text} Start as many, or make them DTensors.")
    fill({"others": tensors})
    loaded = iter(tensors.values())

    def replace(value: Any) -> Any:
        if not isinstance(value, SAVED):
            return value
        tensor = next(loaded)
        return tensor if torch.is_tensor(value) else type(value)(tensor.item())

    for other in state.others.values():
        other.load_state_dict(pytree.tree_map(replace, other.state_dict()))


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
    state_dict = dcp_state.get_optimizer_state_dict(model, optimizer, options=options)
    if isinstance(model, FSDP) and isinstance(optimizer, torch.optim.AdamW):
        # FSDP1 has just created zero moments, and `state_dict` holds copies. Free all but one
        # parameter's: with none left, PyTorch would create them again.
        for parameter in list(optimizer.state)[1:]:
            del optimizer.state[parameter]
    groups = state_dict.pop("param_groups")
    fill({"optimizer": state_dict})
    state_dict["param_groups"] = groups
    dcp_state.set_optimizer_state_dict(model, optimizer, state_dict, options=options)


def load_checkpoint(path: Path, state: State, identity: dict[str, Any], seed: int) -> None:
    """Restore `state`, random states included; at another world size those are reseeded.

    Weights are loaded before the optimizer, so that a state dict of both is never in memory. Raise
    ValueError on all ranks, with the differences, if a different run saved the checkpoint.
    """
    saved = json.loads((path / STATE).read_text())
    compare_starts(path, saved["identity"], identity)
    load_weights(path, state.model)
    fill = open_checkpoint(path)
    _read_optimizer(fill, state.model, state.optimizer)
    if state.others:
        _read_others(fill, state, saved["ranks"][0])
    while state.scheduler.last_epoch < saved["schedule"]:  # any schedule, with this run's flags
        state.scheduler.step()
    if (lr := state.scheduler.get_last_lr()[0]) != saved["lr"]:
        ranks.say(f"With these flags the learning rate goes from {saved['lr']:.3g} to {lr:.3g}.")
    state.set_numbers(state.initial_values)  # reading the optimizer calls its `step`
    if any(saved["numbers"]):  # otherwise the param_groups may differ
        state.set_numbers(saved["numbers"])
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
    ranks.set_seed(seed + state.step * here[0] + dist.get_rank())
    ranks.say(f"Saved by {saved['ranks'][0]} processes, resuming with {here[0]}: dropout reseeded.")


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that allows only dtypes and the names in ALLOWED."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what `module` calls `name`; raise UnpicklingError if it is not allowed."""
        module = module.removesuffix("._local")  # pathlib's classes, if Python 3.13 saved them
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not (is_dtype or f"{module}.{name}" in ALLOWED):
            raise pickle.UnpicklingError(f"it uses {module}.{name}, which could run code")
        return super().find_class(module, name)


def open_checkpoint(path: Path) -> Callable[[dict[str, Any]], None]:
    """Return a function that fills nested dicts of tensors in place; all ranks call it.

    Raise ValueError on all ranks if the checkpoint contains anything but tensors.
    """
    if (path / FULL).is_file():
        with ranks.explain_errors(f"{path / FULL} is not a file of tensors", "Delete it."):
            stored = torch.load(path / FULL, weights_only=True, mmap=True)
        return partial(_copy_shards, stored)
    with ranks.explain_errors(f"{path}/.metadata is not a checkpoint's", "Delete it."):
        metadata = _MetadataUnpickler((path / ".metadata").open("rb")).load()
    reader = dcp.FileSystemReader(path)
    reader.read_metadata = lambda: metadata  # its own method would run code
    return partial(dcp.load, storage_reader=reader, process_group=ranks.cpu_group())


def _copy_shards(stored: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Copy this rank's parts of the whole tensors in `stored` into `tensors`."""
    for keys, tensor in pytree.tree_flatten_with_path(tensors)[0]:
        source = stored
        for key in keys:
            source = source[key.key]
        if isinstance(tensor, DTensor):
            (chunk,) = tensor.__create_chunk_list__()  # DCP's own protocol
            for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                source = source.narrow(dim, start, size)
            tensor = tensor.to_local()
        tensor.copy_(source)


def flags_identity(values: dict[str, Any]) -> dict[str, str]:
    """Return the values of the flags that all ranks must share, given those of all fields."""
    return {as_flag(name): str(x) for name, x in values.items() if name not in PLACES}


def model_identity(script: str, config: PretrainedConfig, facts: Facts) -> dict[str, Any]:
    """Return the identity of a model: names, shapes, config, chat template, adapters."""
    shapes = [(name, list(shape)) for name, shape in facts.shapes.items()]
    settings = sorted(x for x in config.to_diff_dict().items() if x[0] not in OF_FILES)
    template = checksum(getattr(facts.tokenizer, "chat_template", None))
    text = f"{config.model_type}, {checksum([shapes, settings])}"
    identity = {"script": script, "model": text, "--chat-template": template}
    identity[VERSION] = transformers.__version__
    return identity | (facts.adapters.identity() if facts.adapters else {})


def data_identity(args: Namespace, loader: DataLoader, val_loaders: dict) -> dict[str, Any]:
    """Return data digests, batch and seed by name; raise ValueError if ranks differ. All ranks."""
    sets = {"training data": loader.dataset}
    sets |= {f"validation data {i}": x.dataset for i, x in enumerate(val_loaders.values(), 1)}
    digests = {name: data_digest(dataset) for name, dataset in sets.items()}
    identity = compare_ranks({name: digest for name, digest in digests.items() if digest})
    sampler = loader.batch_sampler
    identity["--dataset"] = " ".join([*args.dataset, *args.val_dataset])
    identity |= {"--seed": args.seed, "global batch": sampler.global_batch}
    return identity | {"--group-by-length": sampler.lengths is not None}


def data_digest(dataset: Any) -> str | None:
    """Return the length of a data set and a CRC of its content, as text. Only local rank 0 reads
    the rows of a `Dataset`; the others return None."""
    rows = getattr(dataset, "dataset", dataset)  # from which it makes its samples
    is_table = isinstance(rows, Dataset)
    if is_table and int(os.environ.get("LOCAL_RANK", 0)) != 0:
        return None
    samples = [dataset[i] for i in range(0, len(dataset), len(dataset) // SAMPLES + 1)]
    text = json.dumps(samples, default=lambda x: getattr(x, "tolist", x.__repr__)())  # whole arrays
    crc = zlib.crc32(text.encode())
    crc = readers.content_sum(rows, crc) if is_table else crc
    return f"{len(dataset):,} samples, crc {crc:08x}"


def checksum(value: Any) -> str:
    """Return the CRC-32 of the repr of a value, as text."""
    return f"crc {zlib.crc32(repr(value).encode()):08x}"


def compare_ranks(values: dict[str, Any]) -> dict[str, Any]:
    """Return rank 0's `values`; raise ValueError if a value on another rank differs. All ranks."""
    everyone = ranks.on_every_rank(lambda: values)
    for rank, others in enumerate(everyone):
        for key, there in others.items():
            if there != (here := everyone[0].get(key)):
                text = f"{key} is {here} on rank 0, {there} on rank {rank}."
                raise ValueError(f"{text} Give all nodes the same flags, model and data.")
    return everyone[0]


def compare_starts(path: Path, saved: dict[str, Any], here: dict[str, Any]) -> None:
    """Raise ValueError with all differences between the run that saved `path` and this one."""
    was = {name: saved.get(name) for name in here if here[name] != saved.get(name)}
    if not was.keys() - {VERSION, "--dataset"}:  # may differ, but may explain other differences
        return
    text = "; ".join(f"{name} is {here[name]}, was {was[name]}" for name in was)
    if any("data" in name for name in was) and "--dataset" not in was:
        text += f", in --dataset {here['--dataset']}"
    remedy = "Pass the flags, model, data and optimizer of that run, or another --output-dir."
    if batch := was.get("global batch"):
        remedy += f" --global-batch-size {batch} keeps the batch if the processes divide {batch}."
    raise ValueError(f"{path} was saved by a different run: {text}. {remedy}")
