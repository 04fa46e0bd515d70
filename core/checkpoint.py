"""Checkpoints: directories such as step-00000200, which training of any world size can resume.

PyTorch's distributed checkpoint (DCP) writes a file per rank, or `full` one file. train_state.json
is written last, by rename, with the caller's state and the size of each file: a directory without
it, or with other sizes, is skipped. All ranks call each function together.
"""

import json
import logging
import math
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.utils._pytree as pytree  # private: torch has no public functions for nested dicts
from torch import nn
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from . import ranks
from .ranks import Problem, on_rank_zero, print0
from .reading import fingerprint
from .steps import StepSampler, settings
from .weights import plain_name, unwrapped

STATE = "train_state.json"
FULL = "full.pt"  # the one file of a full checkpoint
# Keys of a config that describe its files.
OF_FILES = {"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"}
OF_RANK = " of rank "  # in the keys of plain tensors

Tensors = dict[str, Any]  # nested dicts of tensors
Reader = Callable[[Path], dcp.StorageReader]


def new_state(
    script: str, model: nn.Module, shapes: dict[str, torch.Size], sets: Sequence[Any],
    optimizer: Optimizer, sampler: StepSampler, flags: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Return the state of a run at step 0, besides the model and the optimizer.

    `script` is its file, `shapes` are those of the model's parameters before wrapping, `sets` the
    data sets. Of changed `flags` a resume prints a line, but the "identity" must stay the same in a
    run. Raise Problem if it differs between ranks.
    """
    identity = {
        "script": Path(script).stem,
        "model": model_identity(model, shapes),
        "data": [fingerprint(samples) for samples in sets],
        "optimizer": type(optimizer).__name__,
        "global batch": sampler.global_batch,
        "--seed": sampler.seed,
    }
    ranks.compare_ranks(identity)
    return {
        "step": 0,  # optimizer steps done
        "tokens": 0,  # of all steps and ranks, without padding
        "eval_due": True,  # the first validation, or one that was interrupted
        "best_loss": math.inf,
        "best_step": 0,
        "logged_step": 0,  # of the last line in metrics.jsonl
        "loss_sums": [0.0],  # of each rank, since that line
        "scaler": {},
        "settings": settings(optimizer),
        "flags": flags,
        "identity": identity,
    }


def save(
    path: Path, model: nn.Module, optimizer: Optimizer, state: dict[str, Any], full: bool = False,
    seal: Callable[[Path], None] | None = None, extra_state: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write a checkpoint in the directory `path`, with `state`, which JSON can hold.

    `seal` is called on each rank with `path` when the checkpoint is complete.
    `extra_state` are further objects with `state_dict` and `load_state_dict`, such as {"ema": ema}:
    dicts of tensors. DTensors are sharded, plain tensors belong to each rank. Frozen parameters are
    left out if the model has an attribute `only_trained`. Raise OSError on all ranks if it fails.
    """
    write(path, begin(path, model, optimizer, state, extra_state), state, full, seal)


def begin(
    path: Path, model: nn.Module, optimizer: Optimizer, state: dict[str, Any],
    extra_state: dict[str, Any] | None,
) -> Tensors:  # fmt: skip
    """Make an empty directory, and return the tensors to save.

    Raise Problem if the optimizer has values that a checkpoint would not contain.
    """
    on_rank_zero(_make_empty, path)
    options = _options(model)
    weights, moments = dcp_state.get_state_dict(model, optimizer, options=options)
    del moments["param_groups"]  # settings, which a resume takes from its flags
    are_tensors = all(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(moments))
    if settings(optimizer) != state["settings"] or not are_tensors:
        raise Problem("Checkpoints contain only tensors of the optimizer's `state`. It changes "
                      "others, or values in its param_groups. Keep them as tensors.")  # fmt: skip
    parts = {"model": _saved_part(model, weights), "optimizer": moments}
    return parts | {"extra": _extra_tensors(extra_state), "random": _random_states()}


def write(
    path: Path, tensors: Tensors, state: dict[str, Any], full: bool,
    seal: Callable[[Path], None] | None, group: dist.ProcessGroup | None = None,
) -> None:  # fmt: skip
    """Write a checkpoint of `tensors`, in a thread with collectives of `group` if one is given."""
    copy_ahead = 0 if group else 10_000_000  # bytes; 0, or a thread would wait for the training
    group = group or ranks.cpu_group()
    torch.serialization.set_crc32_options(False)  # a tenth of a save's time
    # 24 s per save of 70B on 64 ranks. Before 2.13 a save that fails breaks the next.
    planner = DefaultSavePlanner(enable_plan_caching=torch.__version__ >= (2, 13))
    writer = dcp.FileSystemWriter(path, per_thread_copy_ahead=copy_ahead)
    try:
        dcp.save(tensors, storage_writer=writer, planner=planner, process_group=group)
        if full:
            on_rank_zero(_merge, path, group=group)
        on_rank_zero(_finish, path, state, group=group)
        if seal:  # last, so that it sees train_state.json
            ranks.on_every_rank(seal, path, group=group)
    except (CheckpointException, OSError) as error:  # on all ranks
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)  # frees space on a full disk
        if isinstance(error, CheckpointException):
            error, _ = next(iter(error.failures.values()))
        reason = str(error.__cause__ or error).splitlines()[0]
        raise OSError(f"{path} could not be saved ({reason}). Is the disk full?") from None


def _make_empty(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def _merge(path: Path) -> None:
    try:
        dcp_to_torch_save(path, path / FULL)
    except RuntimeError as error:  # of torch.save on a full disk
        raise OSError(str(error)) from None
    for file in path.iterdir():
        if file.name != FULL:
            file.unlink()


def _finish(path: Path, state: dict[str, Any]) -> None:
    files = {file.name: file.stat().st_size for file in path.iterdir()}
    temporary = path / f"{STATE}.tmp"
    temporary.write_text(json.dumps(state | {"files": files, "processes": _processes()}, indent=1))
    temporary.rename(path / STATE)


def complete_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints in `directory`, oldest first. Rank 0 only."""
    return [path for path in sorted(directory.glob("step-" + 8 * "[0-9]")) if _is_complete(path)]


def _is_complete(path: Path) -> bool:
    try:
        files = json.loads((path / STATE).read_text())["files"].items()
        return all((path / name).stat().st_size == size for name, size in files)
    except (FileNotFoundError, ValueError, KeyError):
        return False


def find_newest(directory: Path, is_finished: bool = False) -> Path | None:
    """Return the newest complete checkpoint in `directory`, or None if none was completed.

    Print a line if there are others. Raise Problem if all are damaged, or if there is none of a run
    that is finished: it must not start over.
    """

    def find() -> Path | None:
        newest = next(reversed(complete_checkpoints(directory)), None)
        for path in directory.glob("step-" + 8 * "[0-9]"):
            if newest is None and (path / STATE).exists():
                raise Problem(f"No checkpoint in {directory} is intact. Pass another --output-dir.")
            if not _is_complete(path):
                print0(f"{path} is damaged, or its save was interrupted: it is skipped.")
        if newest is None and is_finished:
            raise Problem(f"The run is finished, but {directory} lacks its checkpoints. To train "
                          "longer, restore them; else pass another --output-dir.")  # fmt: skip
        return newest

    return on_rank_zero(find)


def prune(directory: Path, keep: int, newest: Path) -> None:
    """Delete all but the newest `keep` complete checkpoints up to `newest`. Later ones are damaged:
    otherwise the run would have resumed from them."""

    def delete() -> None:
        kept = [path for path in complete_checkpoints(directory) if path <= newest][-keep:]
        for path in {*directory.glob("step-" + 8 * "[0-9]")}.difference(kept, [newest]):
            shutil.rmtree(path, ignore_errors=True)

    on_rank_zero(delete)


def model_identity(model: nn.Module, shapes: dict[str, torch.Size]) -> str:
    """Return a digest of a model's config and of the shapes of its parameters by name, and its
    attribute `identity`, if it has one."""
    config, more = unwrapped(model).config, getattr(unwrapped(model), "identity", "")
    values = {key: x for key, x in config.to_diff_dict().items() if key not in OF_FILES}
    text = json.dumps([shapes, values], sort_keys=True, default=str)
    return f"{config.model_type}, {zlib.crc32(text.encode()):08x}{more}"


def compare_runs(path: Path, identity: dict[str, Any]) -> None:
    """Raise Problem if a value in `identity` differs from that of the run that saved `path`."""
    saved = json.loads((path / STATE).read_text())["identity"]
    differ = [name for name in identity if identity[name] != saved.get(name)]
    text = "; ".join(f"{name} is {identity[name]}, was {saved.get(name)}" for name in differ)
    remedy = "Pass the flags, model, data and optimizer of that run, or another --output-dir."
    if "global batch" in differ:
        remedy += f" --global-batch-size {saved['global batch']} keeps its batch."
    if differ:
        raise Problem(f"{path} was saved by a different run: {text}. {remedy}")


def load(
    path: Path, model: nn.Module, optimizer: Optimizer, state: dict[str, Any],
    extra_state: dict[str, Any] | None = None, reader: Reader = dcp.FileSystemReader,
) -> dict[str, Any]:  # fmt: skip
    """Load weights, optimizer, `extra_state` and random states; return the state that was saved,
    except "identity", "flags" and "settings".

    Weights are loaded before the optimizer, so that a state dict of both is never in memory. Raise
    Problem if the saved "identity" differs from that in `state`: it is a different run. If another
    number of processes saved it, dropout is reseeded. `reader` makes the reader of sharded files.
    """
    compare_runs(path, state["identity"])
    saved = json.loads((path / STATE).read_text())
    del saved["identity"], saved["settings"]
    for name, was in saved.pop("flags").items():
        if (value := state["flags"].get(name)) != was:
            print0(f"--{name.replace('_', '-')} is {value}, was {was}.")
    print0(f"Resuming from {path}")
    load_weights(path, model, reader)
    _load_optimizer(path, model, optimizer, reader)
    _load_extra(path, extra_state, saved["processes"][0], reader)
    if saved["processes"] == _processes():  # last, because the above draws numbers
        states = _random_states()
        _read(path, {"random": states}, reader)
        for generator, value in zip(_generators(), states.values(), strict=True):
            generator.set_rng_state(value)
    else:
        seed, size = state["identity"]["--seed"], dist.get_world_size()
        ranks.set_seed(seed + saved["step"] * size + dist.get_rank())
        was = saved["processes"][0]
        print0(f"Saved by {was} processes, resuming with {size}: dropout is reseeded.")
    return saved


def load_weights(path: Path, model: nn.Module, reader: Reader = dcp.FileSystemReader) -> None:
    """Load into `model` the weights of a checkpoint of any world size and strategy."""
    options = _options(model)
    weights = dcp_state.get_model_state_dict(model, options=options)
    weights = _saved_part(model, weights)
    _read(path, {"model": weights}, reader)
    dcp_state.set_model_state_dict(model, weights, options=options)


def _options(model: nn.Module) -> dcp_state.StateDictOptions:
    """Return options for state dicts. FSDP1 copies their tensors, one by one into host memory: on
    the GPU they would double that of the model and its optimizer."""
    return dcp_state.StateDictOptions(cpu_offload=isinstance(model, FSDP), strict=False)


def _saved_part(model: nn.Module, weights: Tensors) -> Tensors:
    """Return the entries of a model's state dict to save, tied tensors once."""
    inner = unwrapped(model)
    first = {plain_name(name): x.requires_grad for name, x in inner.named_parameters()}
    every = {plain_name(name) for name, _ in inner.named_parameters(remove_duplicate=False)}
    if getattr(inner, "only_trained", False):
        return {key: x for key, x in weights.items() if first.get(plain_name(key))}
    return {key: x for key, x in weights.items() if plain_name(key) not in every - first.keys()}


def _generators() -> list[Any]:
    is_cpu = torch.accelerator.current_accelerator(check_available=True) is None
    return [torch] if is_cpu else [torch, torch.get_device_module()]


def _processes() -> list[Any]:
    """Return the number of processes, and which random generators each has."""
    return [dist.get_world_size(), *(x.__name__ for x in _generators())]


def _random_states() -> Tensors:
    """Return the states of this rank's random generators, which dropout draws from."""
    return {f"{dist.get_rank()}, {x.__name__}": x.get_rng_state() for x in _generators()}


def _extra_tensors(extra_state: dict[str, Any] | None) -> Tensors:
    """Return the state dicts of objects by name. Keys of plain tensors get the rank."""
    tensors: Tensors = {}
    for name, other in (extra_state or {}).items():
        tensors[name] = {}
        for key, value in other.state_dict().items():
            suffix = "" if isinstance(value, DTensor) else f"{OF_RANK}{dist.get_rank()}"
            tensors[name][key + suffix] = value
    return tensors


def _load_extra(
    path: Path, extra_state: dict[str, Any] | None, processes: int, reader: Reader
) -> None:
    for name, tensors in _extra_tensors(extra_state).items():
        if processes != dist.get_world_size() and any(OF_RANK in key for key in tensors):
            raise Problem(f"{name}: {processes} processes saved tensors of their own. Start as "
                          "many, or make them DTensors.")  # fmt: skip
        _read(path, {"extra": {name: tensors}}, reader)
        extra_state[name].load_state_dict({k.partition(OF_RANK)[0]: x for k, x in tensors.items()})


def _load_optimizer(path: Path, model: nn.Module, optimizer: Optimizer, reader: Reader) -> None:
    """Load the optimizer's moments, but keep its settings."""
    options = _options(model)
    # With a gradient, as a forward pass leaves on offloaded parameters, DCP would create no moments
    # to load into.
    optimizer.zero_grad()
    moments = dcp_state.get_optimizer_state_dict(model, optimizer, options=options)
    if isinstance(model, FSDP) and isinstance(optimizer, torch.optim.AdamW):
        # FSDP1 has just created zero moments, and `moments` holds copies. Free all but one
        # parameter's: with none left, PyTorch would create them again.
        for parameter in list(optimizer.state)[1:]:
            del optimizer.state[parameter]
    groups = moments.pop("param_groups")
    _read(path, {"optimizer": moments}, reader)
    moments["param_groups"] = groups
    dcp_state.set_optimizer_state_dict(model, optimizer, moments, options=options)


def _read(path: Path, tensors: Tensors, reader: Reader) -> None:
    """Fill nested dicts of tensors in place with this rank's parts of a checkpoint."""
    # The second name of each tied weight, which is saved once, is missing. FSDP1 warns of it.
    logging.getLogger("torch.distributed.fsdp._state_dict_utils").setLevel(logging.ERROR)
    if not (path / FULL).is_file():
        dcp.load(tensors, storage_reader=reader(path), process_group=ranks.cpu_group())
        return
    stored = torch.load(path / FULL, weights_only=True, mmap=True)
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
