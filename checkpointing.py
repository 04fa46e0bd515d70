"""Save, load, prune and export what is trained; stream pretrained weights into an FSDP model.

Copy this file along with a script; it imports nothing else of this repository and names no model.
All ranks call a function together unless its docstring says "rank 0 alone".
"""

import contextlib
import copy
import json
import math
import pickle
import random
import re
import shutil
import zlib
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, set_seed

RANDOM = [  # how the random states of a rank are read, and how they are restored
    (random.getstate, random.setstate),
    (numpy.random.get_state, numpy.random.set_state),
    (torch.get_rng_state, torch.set_rng_state),
    *([(torch.cuda.get_rng_state, torch.cuda.set_rng_state)] if torch.cuda.is_available() else []),
]
COUNTERS = ("step", "epoch", "consumed", "tokens", "best_loss", "best_step", "identity")


@dataclass
class TrainState:
    """What is trained, saved and loaded: one object, the same in every script."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    scaler: torch.amp.GradScaler
    device: torch.device
    identity: dict[str, Any]  # what must not differ between a run and its continuation
    total_steps: int
    step: int = 0  # optimizer steps done
    epoch: int = 0
    consumed: int = 0  # samples of this epoch, of all ranks
    tokens: int = 0  # of all steps and ranks, without padding
    best_loss: float = float("inf")
    best_step: int = 0


def on_rank_zero(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function` on rank 0 alone; all ranks return its result, or raise its error."""
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = function(*args)
        except (OSError, ValueError) as error:
            outcome[0] = error
    dist.broadcast_object_list(outcome)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def open_output(directory: Path, resume: str, script: str) -> tuple[Path | None, str]:
    """Make the output directory, or clear what an interrupted save left there.

    Returns the checkpoint that --resume means (auto: the newest, by step) and the last status.
    Raises ValueError where going on would mix two runs, OSError where nothing can be written.
    """

    def on_this_rank() -> tuple[Path | None, str]:
        status, metrics = directory / "status", directory / "metrics.jsonl"
        if not status.exists() and (
            (directory / "final").exists() or (directory / "best").exists()
        ):
            raise ValueError(f"--output-dir {directory} holds a final/ or best/ of something else")
        (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
        status.open("a").close()
        with metrics.open("a+") as file:
            file.seek(0)
            owner = json.loads(file.readline() or "{}").get("script", script)
        if owner != script:
            raise ValueError(f"--output-dir {directory} holds a run of {owner}, not of {script}")
        rubbish = [directory / "tmp-final", directory / "tmp-best"]
        for path in (*rubbish, *directory.glob("checkpoints/tmp-*")):
            shutil.rmtree(path, ignore_errors=True)
        newest = max(directory.glob("checkpoints/step-*"), default=None)
        if resume == "none" and newest:
            raise ValueError(f"--resume none would start over {newest}: give another --output-dir")
        if resume in ("auto", "none"):
            return newest, status.read_text().strip()
        path = Path(resume).resolve()
        if not (path.name.startswith("step-") and path.is_dir()):
            raise ValueError(f"--resume {resume} is not a checkpoint, a directory step-N")
        if newest and path.parent == newest.parent.resolve() and path.name < newest.name:
            raise ValueError(f"--resume {resume} would go back behind {newest}: delete that first")
        if newest and path.parent != newest.parent.resolve():
            print(f"{directory} has begun with --resume {resume} and goes on at {newest.name}")
            path = newest
        return path, status.read_text().strip()

    return on_rank_zero(on_this_rank)


@contextlib.contextmanager
def status(directory: Path) -> Iterator[None]:
    """Leave in `directory`/status how it goes: running, then finished or failed."""

    def write(word: str) -> None:
        if dist.get_rank() == 0:
            (directory / "status").write_text(word + "\n")

    write("running")
    try:
        yield
    except BaseException:
        write("failed")
        raise
    write("finished")


def truncate_metrics(path: Path, step: int) -> None:
    """Drop the lines after `step` (0: all lines), and a torn last one; rank 0 alone."""
    lines = path.read_text().splitlines(keepends=True) if step and path.exists() else []
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    temporary = path.with_name("metrics.tmp")
    temporary.write_text("".join(kept))
    temporary.replace(path)


def _write(path: Path, tensors: dict[str, Any], state: TrainState) -> None:
    """Write under a temporary name, which becomes `path` once all ranks are done."""
    temporary = path.with_name(f"tmp-{path.name}")
    dcp.save(tensors, checkpoint_id=temporary)
    if dist.get_rank() == 0:
        saved = {name: getattr(state, name) for name in COUNTERS}
        saved |= {"schedule": state.scheduler.last_epoch, "scaler": state.scaler.state_dict()}
        saved["world_size"] = dist.get_world_size()
        (temporary / "train_state.json").write_text(json.dumps(saved, indent=1))
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)
    dist.barrier()


def best_path(output: Path, state: TrainState) -> Path:
    """Where `save_best` put the weights of the best step."""
    return output / "checkpoints" / f"best-{state.best_step:08d}"


def save_best(output: Path, state: TrainState) -> None:
    """Save the weights alone, of the step that is now the best."""
    _write(best_path(output, state), {"model": dcp_state.get_model_state_dict(state.model)}, state)


def save_checkpoint(output: Path, state: TrainState, keep: int) -> None:
    """Save all of the state as `output`/checkpoints/step-N; then only the newest `keep` stay.

    Of the best weights those stay that this checkpoint counts as the best: a run continued from
    here finds them, whatever was trained and lost after it.
    """
    model, optimizer = dcp_state.get_state_dict(state.model, state.optimizer)
    states = pickle.dumps([read() for read, _ in RANDOM])
    rng = {str(dist.get_rank()): states}  # under one key for all, only rank 0's would be kept
    path = output / "checkpoints" / f"step-{state.step:08d}"
    _write(path, {"model": model, "optimizer": optimizer, "rng": rng}, state)
    if dist.get_rank() == 0:
        old = sorted(path.parent.glob("step-*"))[:-keep]
        old += set(path.parent.glob("best-*")) - {best_path(output, state)}
        for directory in old:
            shutil.rmtree(directory)


def load_weights(path: Path, model: nn.Module) -> None:
    """Load a checkpoint's weights, whatever world size and strategy wrote them."""
    tensors = {"model": dcp_state.get_model_state_dict(model)}
    dcp.load(tensors, checkpoint_id=path)
    dcp_state.set_model_state_dict(model, tensors["model"])


def load_checkpoint(path: Path, state: TrainState, seed: int) -> None:
    """Restore `state`, random states included; at another world size those are seeded anew.

    Raises ValueError on all ranks, naming what differs, if it is the state of another run.
    """
    saved = json.loads((path / "train_state.json").read_text())
    rank, world_size = str(dist.get_rank()), dist.get_world_size()
    check_identity(path, state.identity)
    model, optimizer = dcp_state.get_state_dict(state.model, state.optimizer)
    same_world = saved["world_size"] == world_size
    settings = [group | {"params": []} for group in state.optimizer.param_groups]
    tensors = {"model": model, "optimizer": optimizer, "rng": {rank: b""} if same_world else {}}
    dcp.load(tensors, checkpoint_id=path)
    dcp_state.set_state_dict(
        state.model, state.optimizer, model_state_dict=model, optim_state_dict=optimizer
    )
    for group, flags in zip(state.optimizer.param_groups, settings, strict=True):
        group |= flags | {"params": group["params"]}  # not the flags of the run that saved
    state.scheduler.last_epoch = saved["schedule"] - 1
    state.scheduler.step()
    if saved["scaler"] and state.scaler.is_enabled():
        state.scaler.load_state_dict(saved["scaler"])
    for name in COUNTERS:
        setattr(state, name, saved[name])
    if not best_path(path.parent.parent, state).is_dir():
        state.best_loss, state.best_step = float("inf"), 0
    if same_world:  # last: what stands above may draw random numbers
        for (_, restore), value in zip(RANDOM, pickle.loads(tensors["rng"][rank]), strict=False):
            restore(value)
        return
    set_seed(seed + state.step * world_size + int(rank))
    if rank == "0":
        print(f"{saved['world_size']} processes saved this, {world_size} go on: dropout reseeded")


def check_identity(path: Path, here: dict[str, Any]) -> None:
    """Raise ValueError with all that differs between the run that wrote `path` and this one."""
    saved = json.loads((path / "train_state.json").read_text())["identity"]
    differing = [name for name in here if here[name] != saved.get(name)]
    if not differing:
        return
    what = ", ".join(f"{name} ({saved.get(name)} there, {here[name]} here)" for name in differing)
    remedy = "give what it had, or another --output-dir"
    if differing == ["global batch"]:
        per_rank, rest = divmod(saved["global batch"], dist.get_world_size())
        batch = math.gcd(per_rank, 8)
        remedy = f"--batch-size {batch} --gradient-accumulation-steps {per_rank // batch} keeps it"
        if rest:
            remedy = f"use a number of processes that divides {saved['global batch']}"
    raise ValueError(f"{path} was saved by a run that differs in {what}: {remedy}")


def checksum(items: list[Any]) -> str:
    """Their number and the CRC-32 of what they print as: tells data, or shapes, from others."""
    return f"{len(items)} items, crc {zlib.crc32(repr(items).encode()):08x}"


def model_directory(name: str) -> Path:
    """The directory `name`, or that of the hub's model of this name, downloaded if need be.

    Call it under `local_rank_zero_first`. Raises ValueError if the hub does not give it.
    """
    if Path(name).is_dir():
        return Path(name)
    try:
        patterns = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--model-name {name} is no directory here and the hub does not give it "
            f"({type(error).__name__}): accept its licence at https://huggingface.co/{name} and "
            "set HF_TOKEN, or give a local directory with its files"
        ) from None


def _headers(directory: Path) -> Iterator[tuple[str, Path, list[int], str]]:
    """Key, file, shape and dtype of every tensor in a directory's safetensors files."""
    names, index = {"model.safetensors"}, directory / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
    elif not (directory / "model.safetensors").is_file() and any(directory.glob("*.bin")):
        raise ValueError(
            f"{directory} has only .bin weights, which are not read here: convert them once with "
            "from_pretrained and save_pretrained"
        )
    for path in (directory / name for name in sorted(names)):
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (it is no dict)
                    header = file.get_slice(key)
                    yield key, path, header.get_shape(), header.get_dtype()
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None


def _read(path: Path, key: str) -> torch.Tensor:
    """One tensor; the file is opened each time, or its mapped pages would count as memory held."""
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(key)


def _find_weights(model: PreTrainedModel, directory: Path) -> dict[str, tuple[Path, str]]:
    """File and key of each parameter, by its first name; raises ValueError with all that is wrong.

    Keys may lack the base model's prefix; tied parameters may stand under any of their names.
    """
    first_name = {parameter: name for name, parameter in model.named_parameters()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    ignored = re.compile("|".join(model._keys_to_ignore_on_load_unexpected or ["(?!)"]))
    found, problems, dtypes = {}, [], set()
    for key, path, shape, dtype in _headers(directory):
        parameter = parameters.get(key, parameters.get(f"{model.base_model_prefix}.{key}"))
        if parameter is not None:
            found[first_name[parameter]] = (path, key)
            dtypes.add(dtype)
            if shape != list(parameter.shape):
                problems.append(f"{key} has shape {shape}, not {list(parameter.shape)}")
        elif not ignored.search(key):
            problems.append(f"{key} is not the model's")
    problems += [f"{name} is missing" for name in first_name.values() if name not in found]
    if problems:
        raise ValueError(f"{directory} does not hold this model: {'; '.join(problems)}")
    if dtypes != {"F32"}:
        print(f"{directory}: stored as {', '.join(sorted(dtypes))}, trained as fp32", flush=True)
    return found


def untie_as_stored(model: PreTrainedModel, directory: Path) -> None:
    """Untie what the files hold apart: newer T5s have a head of their own, whatever their config.

    `model` is on meta. Raises ValueError, on all ranks, if a file cannot be read.
    """

    def apart() -> list[str]:
        first = {parameter: name for name, parameter in model.named_parameters()}
        names = {n: first[p] for n, p in model.named_parameters(remove_duplicate=False)}
        paths = {key: path for key, path, _, _ in _headers(directory)}
        both = [(a, b) for a, b in names.items() if a != b and {a, b} <= paths.keys()]
        return [a for a, b in both if not torch.equal(_read(paths[a], a), _read(paths[b], b))]

    for name in on_rank_zero(apart):
        module, _, key = name.rpartition(".")
        setattr(model.get_submodule(module), key, nn.Parameter(model.get_parameter(name).clone()))


def load_tokenizer(directory: Path, vocab_size: int) -> PreTrainedTokenizerBase:
    """A directory's tokenizer; raises ValueError if there is none, or it knows too many tokens."""
    if not any(list(directory.glob(name)) for name in ("tokenizer*", "vocab.*", "spiece.model")):
        raise ValueError(f"{directory} has no tokenizer, such as tokenizer.json")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"the tokenizer in {directory} has {len(tokenizer)} tokens, the model only {vocab_size}"
        )
    return tokenizer


def streamed_init(
    model: PreTrainedModel, directory: Path | None, device: torch.device
) -> Callable[[nn.Module], None]:
    """A `param_init_fn` that gives a module on meta its storage on `device`, and its weights.

    FSDP calls it for the modules of a unit and then shards the unit, so no rank ever holds more
    than its shard and one unit: rank 0 reads a tensor from the safetensors files in `directory`
    and broadcasts it. Without a directory it only allocates, for a checkpoint loaded next. Under
    DDP call it for every module before wrapping. Tied parameters stay one tensor.

    Raises ValueError on all ranks, before any weight is read, if the files do not fit the model.
    """
    found = on_rank_zero(_find_weights, model, directory) if directory else {}
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    tied: dict[nn.Parameter, nn.Parameter] = {}
    bar = tqdm(total=len(found), desc="load", disable=dist.get_rank() != 0 or None)

    def init(module: nn.Module) -> None:
        for key, meta in list(module.named_parameters(recurse=False)):
            if meta.is_meta and meta not in tied:
                parameter = nn.Parameter(torch.empty_like(meta, device=device))
                if found:
                    if dist.get_rank() == 0:
                        parameter.data.copy_(_read(*found[names[meta][0]]))
                    dist.broadcast(parameter.data, src=0)
                    bar.update()
                setattr(module, key, parameter)
                if len(names[meta]) > 1:
                    tied[meta] = parameter
            elif meta.is_meta:
                setattr(module, key, tied[meta])

    return init


def _whole_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Name and value of each parameter; FSDP gathers a unit at a time, whole on rank 0 only."""
    wrappers = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")
    whole = {"recurse": False, "writeback": False, "rank0_only": True}
    units = [(name, unit) for name, unit in model.named_modules() if isinstance(unit, FSDP)]
    for prefix, unit in units or [("", model)]:
        with contextlib.ExitStack() as stack:
            if units:  # not DDP
                stack.enter_context(FSDP.summon_full_params(unit, **whole))
            for name, parameter in unit.module.named_parameters():
                if "_fsdp_wrapped_module." not in name:  # or it is a nested unit's
                    yield wrappers.sub("", f"{prefix}.{name}".removeprefix(".")), parameter


def export_model(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, path: Path, args: Namespace
) -> None:
    """Write a wrapped model as a Hugging Face directory that `from_pretrained` loads.

    Rank 0 holds one file of --max-shard-size GB and one unit above its own shard. The directory
    replaces the one before when it is complete. The weights are written as --export-dtype.
    """
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    dtype, limit = dtypes[args.export_dtype], args.max_shard_size * 1e9
    temporary, inner, pending, files = path.with_name(f"tmp-{path.name}"), model.module, {}, []

    def write_file() -> None:
        save_file(pending, temporary / str(len(files)), metadata={"format": "pt"})
        files.append({name: tensor.nbytes for name, tensor in pending.items()})
        pending.clear()

    if dist.get_rank() == 0:
        temporary.mkdir(parents=True)
    for name, parameter in _whole_tensors(model):
        if dist.get_rank() == 0:
            tensor = parameter.detach().to("cpu", dtype, copy=True)
            if pending and sum(x.nbytes for x in (*pending.values(), tensor)) > limit:
                write_file()
            pending[name] = tensor
    if dist.get_rank() == 0:
        write_file()
        index = {"metadata": {"total_size": 0}, "weight_map": {}}
        for number, sizes in enumerate(files, start=1):
            suffix = f"-{number:05d}-of-{len(files):05d}" if len(files) > 1 else ""
            (temporary / str(number - 1)).rename(temporary / f"model{suffix}.safetensors")
            index["weight_map"].update(dict.fromkeys(sizes, f"model{suffix}.safetensors"))
            index["metadata"]["total_size"] += sum(sizes.values())
        if len(files) > 1:
            (temporary / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        config = copy.deepcopy(inner.config)
        config.architectures, config.dtype = [type(inner).__name__], dtype
        for part in (config, inner.generation_config, tokenizer):
            part.save_pretrained(temporary)
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)
    dist.barrier()
