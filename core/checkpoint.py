"""Checkpoints: directories such as step-00000200, which training of any world size can resume.

PyTorch's distributed checkpoint (DCP) writes a file per rank; `full` adds one file of the whole
state. train_state.json is written last, by rename, with the caller's state and the size of each
file: a directory without it, or with other sizes, is skipped. All ranks call each function together
unless its docstring differs.
"""

import contextlib
import json
import logging
import math
import os
import re
import shutil
import zlib
from collections.abc import Sequence
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
from .ranks import Problem, on_rank_zero, print0
from .reading import fingerprint
from .steps import StepSampler, settings
from .weights import first_names, plain_name, unwrapped

STATE = "train_state.json"
NAMES = "step-" + 8 * "[0-9]"  # of checkpoints
# What two configs of one model may differ in.
OF_FILES = ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache")


def new_state(
    script: str, model: nn.Module, shapes: dict[str, torch.Size], sets: Sequence[Any],
    optimizer: Optimizer, sampler: StepSampler, args: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return the state of a run at step 0, besides the model and the optimizer. `shapes` are those
    of the parameters before wrapping. Raise Problem if the identity differs between ranks."""
    identity = {  # must stay the same
        "script": Path(script).stem,
        "model": model_identity(model, shapes),
        "data": [fingerprint(samples) for samples in sets],
        "optimizer": type(optimizer).__name__,
        "global batch": sampler.global_batch,
        "--seed": sampler.seed,
    }
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
        "flags": vars(args.model) | vars(args.optim) | vars(getattr(args, "adapters", args.model)),
        "identity": ranks.compare_ranks(identity),
    }


def model_identity(model: nn.Module, shapes: dict[str, torch.Size]) -> str:
    """Return a digest of a model's config and parameter shapes, and its attribute `identity`."""
    model = unwrapped(model)
    config = model.config.to_diff_dict() | dict.fromkeys(OF_FILES)
    text = json.dumps([shapes, config], sort_keys=True, default=str)
    more = getattr(model, "identity", "")
    return f"{model.config.model_type}, {zlib.crc32(text.encode()):08x}{more}"


def compare_runs(path: Path | None, identity: dict[str, Any]) -> dict[str, Any]:
    """Return the state in a checkpoint. Raise Problem if there is none, or if a value of its
    identity is not as in `identity`: a different run saved it."""
    if path is None:
        raise Problem("There is no checkpoint in --output-dir. Pass that of a run.")
    saved = json.loads((path / STATE).read_text())
    was = saved["identity"]
    if differ := [f"{k} is {x}, was {was.get(k)}" for k, x in identity.items() if x != was.get(k)]:
        raise Problem(f"{path} was saved by a different run: {'; '.join(differ)}. Pass its model "
                      f"({saved['flags'].get('model_name')}), data, flags and --global-batch-size "
                      f"{was['global batch']}, or another --output-dir.")  # fmt: skip
    return saved


def check_evaluated(output: Path, model_name: str) -> None:
    """Raise Problem if `output` has a run, whose weights are not those of the model. Any rank."""
    parent = Path(model_name).absolute().parent  # best/ and final/ may be links
    if (output / "checkpoints").is_dir() and parent.resolve() != output.resolve():
        raise Problem(f"--model-name {model_name} is not the run in {output}. Pass --model-name "
                      f"{output}/final (by --export-only), or adapters' flags.")  # fmt: skip


def snapshot(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return nested dicts of the tensors to save, some of which are those that are trained. Raise
    Problem if the optimizer has values that a checkpoint would not contain."""
    moments = dcp_state.get_optimizer_state_dict(model, optimizer, options=_options(model))
    del moments["param_groups"]  # settings, which a resume takes from its flags
    are_tensors = all(isinstance(x, Tensor) for x in pytree.tree_leaves(moments))
    if settings(optimizer) != state["settings"] or not are_tensors:
        raise Problem("Only tensors in `state` are saved, not changed param_groups or others.")
    return {"model": model_weights(model), "optimizer": moments} | _random_states()


def extra_state(name: str, tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return tensors to save, or to `read`, besides a snapshot. DTensors are sharded; others belong
    to one rank, so their keys name it, and a resume needs as many."""
    rank = f" of rank {dist.get_rank()} of {dist.get_world_size()}"
    keys = [key if isinstance(x, DTensor) else key + rank for key, x in tensors.items()]
    return {name: dict(zip(keys, tensors.values(), strict=True))}


def save(path: Path, tensors: dict[str, Any], state: dict[str, Any], full: bool = False) -> None:
    """Write a checkpoint of a snapshot, `tensors`, and of `state`, which JSON can hold, to `path`.
    Raise OSError on all ranks if it fails."""
    torch.serialization.set_crc32_options(False)  # a tenth of a save's time
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)  # 24 s per save of 70B on 64 ranks
    try:
        on_rank_zero(shutil.rmtree, path, True)  # of an interrupted save
        dcp.save(tensors, checkpoint_id=path, planner=planner, process_group=ranks.cpu_group)
        on_rank_zero(_finish, path, state, full)
    except (dcp.CheckpointException, OSError) as error:  # on all ranks
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)  # frees space on a full disk
        reason = str(error).strip().splitlines()[-1]
        raise OSError(f"{path} could not be saved ({reason}). Is the disk full?") from None


def _finish(path: Path, state: dict[str, Any], full: bool) -> None:
    if full:
        try:
            dcp_to_torch_save(path, path / "full.pt")
        except RuntimeError as error:  # of torch.save on a full disk
            raise OSError(str(error)) from None
        with (path / "full.pt").open() as file:
            os.fsync(file)
    files = {file.name: file.stat().st_size for file in path.iterdir()}
    state = state | {"files": files, "processes": dist.get_world_size()}
    temporary = path / f"{STATE}.tmp"
    temporary.write_text(json.dumps(state, indent=1, default=str))
    temporary.rename(path / STATE)


def complete_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints in `directory`, oldest first. Rank 0 only."""
    complete = []
    for path in sorted(directory.glob(NAMES)):
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
            files = json.loads((path / STATE).read_text())["files"].items()
            if all((path / name).stat().st_size == size for name, size in files):
                complete.append(path)
    return complete


def find_newest(output: Path) -> Path | None:
    """Return the newest complete checkpoint of the run in `output`, or None if none was completed.
    Rank 0 only. Raise Problem if there was one, also by `status`: the run must not start over."""
    directory = output / "checkpoints"
    complete = complete_checkpoints(directory)
    for path in {*directory.glob(NAMES)}.difference(complete):
        print0(f"{path} is damaged, or its save was interrupted: it is skipped.")
    if complete:
        return complete[-1]
    status = (output / "status").read_text()
    if re.search("saved step [1-9]", status) or any(directory.glob(f"{NAMES}/{STATE}")):
        raise Problem(f"No checkpoint in {directory} is intact. Pass another --output-dir.")
    return None


def prune(directory: Path, keep: int, newest: Path) -> None:
    """Delete all but the newest `keep` complete checkpoints up to `newest`. Rank 0 only. Later ones
    are damaged: otherwise the run would have resumed from them."""
    kept = [path for path in complete_checkpoints(directory) if path <= newest][-keep:]
    for path in {*directory.glob(NAMES)}.difference(kept, [newest]):
        shutil.rmtree(path, ignore_errors=True)


def load(
    path: Path, model: nn.Module, optimizer: Optimizer, state: dict[str, Any]
) -> dict[str, Any]:
    """Load weights, optimizer without its settings, and random states (reseeded if another number
    of processes saved them). Return the state that was saved, with the "identity", "flags" and
    "settings" of `state`. Raise Problem if the "identity" was another: it is a different run."""
    saved = compare_runs(path, state["identity"])
    for name, was in saved["flags"].items():
        if json.dumps(value := state["flags"].get(name)) != json.dumps(was):  # JSON has no tuples
            print0(f"--{name.replace('_', '-')} is {value}, was {was}.")
    print0(f"Resuming from {path}")
    load_weights(path, model)  # first, so that a state dict of both is never in memory
    # With a gradient, as a forward pass leaves on offloaded parameters, DCP would create no moments
    # to load into.
    optimizer.zero_grad()
    options = _options(model)
    moments = dcp_state.get_optimizer_state_dict(model, optimizer, options=options)
    if isinstance(model, FSDP) and isinstance(optimizer, torch.optim.AdamW):
        # FSDP1 has just created zero moments, and `moments` holds copies. Free all but one
        # parameter's: with none left, PyTorch would create them again.
        for parameter in list(optimizer.state)[1:]:
            del optimizer.state[parameter]
    keys = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    names = {key.removeprefix("optimizer.state.").rpartition(".")[0] for key in keys}
    # Those that have had a gradient, and so have moments in the checkpoint.
    moments["state"] = {name: x for name, x in moments["state"].items() if name in names}
    read(path, {"optimizer": {"state": moments["state"]}})
    dcp_state.set_optimizer_state_dict(model, optimizer, moments, options=options)
    size = dist.get_world_size()
    if saved["processes"] == size:  # last, because the above draws numbers
        read(path, states := _random_states())
        cpu, *device = states["random"].values()
        torch.set_rng_state(cpu)
        if device:
            torch.get_device_module().set_rng_state(*device)
    else:
        torch.manual_seed(state["identity"]["--seed"] + saved["step"] * size + dist.get_rank())
        print0(f"Saved by {saved['processes']} processes, not {size}: dropout is reseeded.")
    return saved | {name: state[name] for name in ("identity", "flags", "settings")}


def load_weights(path: Path, model: nn.Module) -> None:
    """Load into `model` the weights of a checkpoint of any world size and strategy."""
    weights = model_weights(model)
    read(path, {"model": weights})
    # FSDP1 warns that the second name of each tied weight is missing.
    logging.getLogger("torch.distributed.fsdp._state_dict_utils").setLevel(logging.ERROR)
    dcp_state.set_model_state_dict(model, weights, options=_options(model))


def _options(model: nn.Module) -> dcp_state.StateDictOptions:
    """Return options for state dicts. FSDP1 copies their tensors, one by one into host memory: on
    the GPU they would double that of the model and its optimizer."""
    is_copied, leaves_out = isinstance(model, FSDP), hasattr(unwrapped(model), "only_trained")
    return dcp_state.StateDictOptions(False, is_copied, leaves_out, strict=False)


def model_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters, tied ones once, and persistent buffers: shards or whole tensors,
    under FSDP1 copies. Frozen parameters are left out if it has an attribute `only_trained`."""
    weights = dcp_state.get_model_state_dict(model, options=_options(model))
    firsts = {plain_name(name) for name in first_names(unwrapped(model)).values()}
    return {name: tensor for name, tensor in weights.items() if plain_name(name) in firsts}


def _random_states() -> dict[str, dict[str, Tensor]]:
    """Return the states of this rank's random generators, which dropout draws from."""
    states = {"cpu": torch.get_rng_state()}
    if torch.accelerator.is_available():
        states["device"] = torch.get_device_module().get_rng_state()
    return extra_state("random", states)


def read(path: Path, tensors: dict[str, Any]) -> None:
    """Fill nested dicts of tensors in place with this rank's parts of a checkpoint."""
    dcp.load(tensors, checkpoint_id=path, process_group=ranks.cpu_group)
