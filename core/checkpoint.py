"""Checkpoints: directories such as step-00000200, which training of any world size can resume.

PyTorch's distributed checkpoint (DCP) writes a file per rank; `full` adds one of the whole state.
train_state.json is written last, with the script's state, the size of each file and a CRC of its
values: a directory where one differs is skipped.

All ranks call functions that get a model, tensors or a state together; rank 0 calls `find_newest`
and `prune`.
"""

import contextlib
import json
import logging
import math
import re
import shutil
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.utils._pytree as pytree  # private: torch has no public functions for nested dicts
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from . import ranks
from .args import Run
from .ranks import Problem, on_every_rank, on_rank_zero, print0
from .steps import StepSampler
from .weights import Shapes, unwrapped

STATE = "train_state.json"
NAMES = "step-" + 8 * "[0-9]"  # a pattern of checkpoints' names
# Settings in which two configs of one model may differ.
NOT_COMPARED = ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache")
# Values of param_groups that `train` sets: they are not saved. Add those that yours schedules.
SET_BY_TRAIN = {"params", "lr"}
# Values in train_state.json of each start, or of the files.
NOT_LOADED = ("identity", "flags", "hyperparameters", "files", "sums", "crc")


@dataclass
class State:
    """What a step depends on, besides the model, its optimizers and random numbers, in values for
    JSON. Attributes that a copy adds are saved too."""

    identity: dict  # must stay the same in a resume
    hyperparameters: dict  # of the optimizers, at the start
    step: int = 0  # optimizer steps done
    tokens: int = 0  # trained on by all ranks, without padding
    needs_validation: bool = True  # after `step`: due, but not done
    best_loss: float = math.inf
    best_step: int = 0
    logged_step: int = 0  # the last train event's in metrics.jsonl
    loss_sums: list = field(default_factory=list)  # each rank's, since that event
    scaler: dict = field(default_factory=dict)
    flags: dict = field(default_factory=dict)  # as text; a resume prints those that differ

    def own_loss_sum(self) -> float:
        """Return this rank's loss sum, or its share if another number of ranks saved them."""
        world_size = dist.get_world_size()
        if len(self.loss_sums) == world_size:
            return self.loss_sums[dist.get_rank()]
        return sum(self.loss_sums) / world_size


def new_state(
    script: str, model: nn.Module, shapes: Shapes, sets: Sequence[Any],
    optimizers: list[Optimizer], sampler: StepSampler, more: dict,
) -> State:  # fmt: skip
    """Return the state of a run at step 0. `more` is compared in a resume too. Raise Problem if the
    identity differs between ranks."""
    identity = {  # a message names the first difference
        "script": Path(script).stem,
        **more,
        "model": model_identity(model, shapes),
        "--seed": sampler.seed,
        "data": [fingerprint(samples) for samples in sets],
        "optimizer": ", ".join(type(optimizer).__name__ for optimizer in optimizers),
        "--batch-size x accumulation steps x processes": sampler.global_batch,
    }
    return State(ranks.compare_ranks(identity), hyperparameters(optimizers))


def fingerprint(samples: Any) -> str:
    """Return the length of a data set and a CRC of at most 256 of its samples."""
    step = len(samples) // 256 + 1
    some = [samples[i] for i in range(0, len(samples), step)]
    return f"{len(samples):,} samples, crc {crc_of(some):08x}"


def as_json(value: Any) -> Any:
    """Return an array as a list (as text, it would lack its middle), another value as text."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def hyperparameters(optimizers: list[Optimizer]) -> dict[str, str]:
    """Return the values in the param_groups of optimizers but SET_BY_TRAIN, as text, because ==
    compares tensors by element."""
    values = {}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for i, group in enumerate(groups):
        for key in group.keys() - SET_BY_TRAIN:
            values[f"{key} of param_group {i}"] = repr(group[key])
    return values


def model_identity(model: nn.Module, shapes: Shapes) -> str:
    """Return a digest of a model's config and parameter shapes."""
    config = unwrapped(model).config
    fields = config.to_diff_dict() | dict.fromkeys(NOT_COMPARED)
    return f"{config.model_type}, {crc_of([shapes, fields]):08x}"


def changes(values: dict, old: dict) -> list[str]:
    """Return a text for each of `values` that differs from the `old` one of its name."""
    texts = []
    for name, value in values.items():
        was = old.get(name)
        if value != was:
            texts.append(f"{name} is {value}, was {was}.")
    return texts


def compare_runs(path: Path, identity: dict, flags: dict) -> dict:
    """Return the state in a checkpoint. Raise Problem if a different run saved it: a value of
    `identity` differs. The message has the `flags` that differ, too."""
    saved = read_state(path)
    if differences := changes(identity, saved["identity"]):
        text = " ".join([differences[0], *changes(flags, saved["flags"])])
        raise Problem(f"{path} was saved by a different run: {text} Pass its model, data, flags "
                      "and samples per step, or another --output-dir.")  # fmt: skip
    return saved


def snapshot(model: nn.Module, names: set[str], optimizers: list[Optimizer], state: State) -> dict:
    """Return nested dicts of the tensors to save (under FSDP1, copies in host memory): those of a
    model in `names`, moments, and random states. Raise Problem if a resume would change a value of
    `state` or of a param_group."""
    state_values(state)
    compare_hyperparameters(optimizers, state)
    moments = dcp_state.get_optimizer_state_dict(model, optimizers, options=_options(model))
    del moments["param_groups"]  # settings: a resume takes them from its flags
    if not all(isinstance(value, Tensor) for value in pytree.tree_leaves(moments)):
        raise Problem("Of an optimizer's `state`, only tensors are saved.")
    tensors = {"model": model_weights(model, names), "optimizer": moments}
    return tensors | extra_state("random", _random_states())


def compare_hyperparameters(optimizers: list[Optimizer], state: State) -> None:
    """Raise Problem if a value in the param_groups of optimizers is not that of the start."""
    if differences := changes(hyperparameters(optimizers), state.hyperparameters):
        raise Problem(f"{differences[0]} It is not saved. If train sets it at each step, add its "
                      "name to SET_BY_TRAIN in core/checkpoint.py.")  # fmt: skip


def extra_state(name: str, tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return tensors to save, or to `read`, besides a snapshot. Those that are not DTensors belong
    to one rank, which their keys name: a resume needs as many."""
    rank = f" of rank {dist.get_rank()} of {dist.get_world_size()}"
    return {
        name: {
            key if isinstance(tensor, DTensor) else key + rank: tensor
            for key, tensor in tensors.items()
        }
    }


class Planner(dcp.DefaultSavePlanner):
    """Copies one tensor at a time from a GPU, to write it. DCP's writer would keep the copies of
    all: https://github.com/pytorch/pytorch/issues/195982"""

    copied = torch.empty(0)  # the last one

    def resolve_data(self, write_item: Any) -> Any:
        """Return a tensor in host memory, or the bytes of another value."""
        self.copied.untyped_storage().resize_(0)  # is written: free it, though DCP refers to it
        data = super().resolve_data(write_item)
        if isinstance(data, Tensor) and not data.is_cpu:
            data = self.copied = data.detach().cpu()
        return data


UNPICKLED: dict[Path, Any] = {}  # .metadata by checkpoint, until the end of `load`


class Reader(dcp.FileSystemReader):
    """Reads .metadata only if it is not in UNPICKLED: it has 45 MB for 70B on 512 ranks."""

    def read_metadata(self, *_: Any, **__: Any) -> Any:
        """Return the metadata of the checkpoint."""
        return UNPICKLED.get(self.path) or super().read_metadata()


class Writer(dcp.FileSystemWriter):
    """Raises the OSError of a write, such as a full disk's, not PyTorch's RuntimeError after it."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's file."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def save(
    run: Run, tensors: dict, state: State, log: Any, must_succeed: bool = True,
    file_sums: Callable = lambda _: {},
) -> bool:  # fmt: skip
    """Write a checkpoint of a snapshot, `tensors`, and of `state`; delete old ones, write the
    status, and a save event to `log`. `file_sums` returns checksums of this rank's files by name.
    If this fails, raise OSError on all ranks or, unless it `must_succeed`, print the reason and
    return False."""
    path = run.output_dir / "checkpoints" / f"step-{state.step:08d}"
    start = time.perf_counter()
    try:
        on_rank_zero(clear, path)
        _write_shards(path, tensors)
        if run.checkpoint_type == "full":
            on_rank_zero(_write_full, path)
        sums = on_every_rank(file_sums, path)
        on_rank_zero(_finish, run, path, state, sums)
    except (dcp.CheckpointException, OSError) as error:  # on all ranks
        with contextlib.suppress(OSError):  # that of the save is the reason
            on_rank_zero(clear, path)  # frees space on a full disk
        lines = (str(error).strip() or repr(error)).splitlines()  # the first ones are a traceback
        problem = f"{path} could not be saved: {lines[-1]}."
        if must_succeed:
            raise OSError(problem) from None
        print0(f"{problem} The next save tries again.")
        return False
    log.write("save", step=state.step, seconds=time.perf_counter() - start)
    return True


def clear(path: Path) -> None:
    """Delete the file or directory that an interrupted save or export may have left."""
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)  # a file


def _write_shards(path: Path, tensors: dict) -> None:
    torch.serialization.set_crc32_options(False)  # a tenth of a save's time
    planner = Planner(enable_plan_caching=True)  # 24 s per save of 70B on 64 ranks
    writer = Writer(path, per_thread_copy_ahead=0)  # see Planner
    group = getattr(ranks.this_thread, "group", ranks.cpu_group)
    dcp.save(tensors, storage_writer=writer, planner=planner, process_group=group)


def _write_full(path: Path) -> None:
    try:
        dcp_to_torch_save(path, path / "full.pt")
    except RuntimeError as error:  # torch.save's on a full disk
        raise OSError(str(error)) from None


def _finish(run: Run, path: Path, state: State, sums: list[dict]) -> None:
    """Complete a checkpoint, delete old ones and write the status."""
    values = state_values(state)
    values["files"] = {file.name: file.stat().st_size for file in path.iterdir()}
    values["sums"] = sums
    values["crc"] = crc_of(values)
    temporary = path / f"{STATE}.tmp"
    temporary.write_text(json.dumps(values, indent=1))
    temporary.rename(path / STATE)
    prune(path.parent, run.keep_checkpoints, path)
    write_status(run.output_dir, "running")


def state_values(state: State) -> dict:
    """Return the values of a state as a resume reads them. Raise Problem if one would not be the
    same."""
    values = json.loads(json.dumps(vars(state), default=str, skipkeys=True))
    for name, value in vars(state).items():
        if repr(value) != repr(values[name]):
            raise Problem(f"state.{name} is {value!r}, and would be {values[name]!r} after a "
                          "resume. Use numbers, texts, lists, and dicts with texts as keys."
                          )  # fmt: skip
    return values


def crc_of(values: Any) -> int:
    """Return a CRC of nested dicts and lists, as JSON."""
    return zlib.crc32(json.dumps(values, sort_keys=True, default=as_json).encode())


def read_state(path: Path) -> dict:
    """Return the values in a checkpoint's train_state.json."""
    return json.loads((path / STATE).read_text())


def write_status(directory: Path, word: str) -> None:
    """Write the status of a run: running (also after an error), stopped or finished; and the saved
    step."""
    if dist.get_rank() == 0:
        saved = sorted(directory.glob(f"checkpoints/{NAMES}/{STATE}"))
        step = int(saved[-1].parent.name[5:]) if saved else 0
        with contextlib.suppress(OSError):  # do not hide the reason for the end
            (directory / "status").write_text(f"{word}\nsaved step {step}\n")


def is_complete(path: Path) -> bool:
    """Return whether a checkpoint has all its files and values."""
    try:
        values = read_state(path)
        is_intact = values.pop("crc") == crc_of(values)
        sizes = {name: (path / name).stat().st_size for name in values["files"]}
        return is_intact and sizes == values["files"]
    except Exception:  # text that is not such JSON raises many types
        return False


def complete_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return [path for path in sorted(directory.glob(NAMES)) if is_complete(path)]


def find_newest(output: Path) -> Path | None:
    """Return the newest complete checkpoint of a run, or None. Raise Problem if all are damaged:
    the run must not start over."""
    directory = output / "checkpoints"
    complete = complete_checkpoints(directory)
    for path in {*directory.glob(NAMES)}.difference(complete):
        print0(f"{path} is damaged, or its save was interrupted: it is skipped.")
    if complete:
        return complete[-1]
    status = (output / "status").read_text(errors="replace")
    if re.search("saved step [1-9]", status) or any(directory.glob(f"{NAMES}/{STATE}")):
        raise Problem(f"No checkpoint in {directory} is intact. Pass another --output-dir.")
    return None


def prune(directory: Path, keep: int, newest: Path) -> None:
    """Delete all but the newest `keep` complete checkpoints up to `newest`: the run would have
    resumed from later ones, if they were intact."""
    kept = [path for path in complete_checkpoints(directory) if path <= newest][-keep:]
    for path in {*directory.glob(NAMES)}.difference(kept, [newest]):
        shutil.rmtree(path, ignore_errors=True)


def load(
    path: Path, model: nn.Module, names: set[str], optimizers: list[Optimizer], state: State
) -> None:  # fmt: skip
    """Load a snapshot and, except NOT_LOADED, the values of its `state`. Raise Problem if it is of
    a different run."""
    saved = compare_runs(path, state.identity, state.flags)
    print0("\n".join([*changes(state.flags, saved["flags"]), f"Resuming from {path}"]))
    UNPICKLED[path] = Reader(path).read_metadata()
    load_weights(path, model, names)  # first, so that a state dict of both is never in memory
    load_moments(path, model, optimizers)
    load_random_states(path, saved)  # last, because the above draws numbers
    UNPICKLED.clear()
    for name, value in saved.items():
        if name not in NOT_LOADED:
            setattr(state, name, value)


def load_weights(path: Path, model: nn.Module, names: set[str]) -> None:
    """Load the tensors `names` of a model."""
    weights = model_weights(model, names)
    read(path, {"model": weights})
    # FSDP1 warns that the second name of each tied weight is missing.
    logging.getLogger("torch.distributed.fsdp._state_dict_utils").setLevel(logging.ERROR)
    dcp_state.set_model_state_dict(model, weights, options=_options(model))


def load_moments(path: Path, model: nn.Module, optimizers: list[Optimizer]) -> None:
    """Load the states of a model's optimizers, but not their settings."""
    moments = _new_moments(model, optimizers)
    # Only parameters that had a gradient have moments there.
    keys = Reader(path).read_metadata().state_dict_metadata
    saved = {key.removeprefix("optimizer.state.").rpartition(".")[0] for key in keys}
    moments["state"] = {name: x for name, x in moments["state"].items() if name in saved}
    read(path, {"optimizer": {"state": moments["state"]}})
    dcp_state.set_optimizer_state_dict(model, optimizers, moments, options=_options(model))


def _new_moments(model: nn.Module, optimizers: list[Optimizer]) -> dict:
    """Return moments to load into: those of the optimizers or, under FSDP1, copies."""
    # PyTorch creates them by a step, unless there are gradients: offloaded parameters have some.
    model.zero_grad()
    moments = dcp_state.get_optimizer_state_dict(model, optimizers, options=_options(model))
    if isinstance(model, FSDP):  # free the originals, but one: else the load would create all again
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.AdamW):
                for parameter in list(optimizer.state)[1:]:
                    del optimizer.state[parameter]
    return moments


def load_random_states(path: Path, saved: dict) -> None:
    """Restore the random generators of this rank; reseed them if the checkpoint lacks them. `saved`
    is its state."""
    states = _random_states()
    tensors = extra_state("random", states)
    keys = {f"random.{key}" for key in tensors["random"]}
    if not keys <= Reader(path).read_metadata().state_dict_metadata.keys():
        torch.manual_seed(
            saved["identity"]["--seed"] + saved["step"] * dist.get_world_size() + dist.get_rank()
        )
        print0("Saved by another number of processes, or without a GPU: dropout is reseeded.")
        return
    read(path, tensors)
    torch.set_rng_state(states["cpu"])
    if "device" in states:
        torch.get_device_module().set_rng_state(states["device"])


def model_weights(model: nn.Module, names: set[str]) -> dict[str, Tensor]:
    """Return a model's parameters and buffers in `names`: shards or whole tensors, or FSDP1's
    copies."""
    weights = dcp_state.get_model_state_dict(model, options=_options(model))
    return {name: tensor for name, tensor in weights.items() if name in names}


def _options(model: nn.Module) -> dcp_state.StateDictOptions:
    """Return options for state dicts. FSDP1 copies their tensors, which would not fit on a GPU."""
    return dcp_state.StateDictOptions(cpu_offload=isinstance(model, FSDP), strict=False)


def _random_states() -> dict[str, Tensor]:
    """Return the states of this rank's random generators."""
    states = {"cpu": torch.get_rng_state()}
    if torch.accelerator.is_available():
        states["device"] = torch.get_device_module().get_rng_state()
    return states


def read(path: Path, tensors: dict) -> None:
    """Fill nested dicts of tensors in place with this rank's parts of a checkpoint."""
    # Otherwise rank 0 gathers a plan of each rank, for minutes at 512, and returns it unchanged.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    dcp.load(tensors, storage_reader=Reader(path), no_dist=True)
