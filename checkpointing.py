"""Save, load, prune and export what is trained; stream pretrained weights into an FSDP model.

Copy this file along with a script; it imports nothing else of this repository and names no model.
All ranks call a function together unless its docstring says "rank 0 alone".
"""

import contextlib
import copy
import json
import math
import os
import pickle
import random
import re
import shutil
import socket
import threading
import time
import zlib
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from tqdm import tqdm
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

RANDOM = [  # how the random states of a rank are read, and how they are restored
    (random.getstate, random.setstate),
    (numpy.random.get_state, numpy.random.set_state),
    (torch.get_rng_state, torch.set_rng_state),
    *([(torch.cuda.get_rng_state, torch.cuda.set_rng_state)] if torch.cuda.is_available() else []),
]
FULL = "full.pt"  # --checkpoint-type full
LOCK_SECONDS = 60  # without a heartbeat until a lock counts as left behind
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
    stop: Any  # policies.StopRequest: whether this rank was asked to stop
    step: int = 0  # optimizer steps done
    epoch: int = 0
    consumed: int = 0  # samples of this epoch, of all ranks
    tokens: int = 0  # of all steps and ranks, without padding
    best_loss: float = float("inf")
    best_step: int = 0
    save_group: dist.ProcessGroup | None = None  # gloo, for saves in the background
    saving: Future | None = None  # the one that is under way
    saved_step: int = 0
    failed_saves: int = 0  # in a row
    flops_per_token: float | None = None  # of a forward and a backward pass


class SaveError(OSError):
    """Two saves in a row failed, or the last one."""


def on_every_rank(
    function: Callable[..., Any], *args: Any, group: dist.ProcessGroup | None = None
) -> list[Any]:
    """Run `function` on each rank; all return all results, or raise the first rank's error."""
    outcomes: list[Any] = [None] * dist.get_world_size()
    try:
        outcome = function(*args), None
    except (OSError, ValueError) as error:
        outcome = None, error
    dist.all_gather_object(outcomes, outcome, group=group)
    for _, error in outcomes:
        if error is not None:
            raise error
    return [result for result, _ in outcomes]


def on_rank_zero(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function` on rank 0 alone; all ranks return its result, or raise its error."""
    return on_every_rank(function if dist.get_rank() == 0 else lambda *_: None, *args)[0]


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold OUTPUT_DIR/lock, so that no other run writes there; made if need be.

    The lock of a run that is gone is taken over: of a dead process of this host, of the same job
    (a restart), or one without a heartbeat while this start waited, for at most LOCK_SECONDS.
    Raises ValueError if another run holds it, OSError if nothing can be written.
    """
    path, beaten, left = directory / "lock", directory / "lock-beat", threading.Event()
    job = os.environ.get("SLURM_JOB_ID")  # not torchrun's run id, which is often the same
    mine = {"host": socket.gethostname(), "pid": os.getpid(), "job": job}

    def text() -> str:
        return json.dumps(mine | {"heartbeat": time.time()})

    def gone(holder: dict[str, Any]) -> bool:
        if holder.get("host") != mine["host"]:
            return job is not None and holder.get("job") == job
        return holder["pid"] == mine["pid"] or not Path(f"/proc/{holder['pid']}").exists()

    def held() -> tuple[dict[str, Any], tuple[str, int]]:
        content, holder = path.read_text(), {}
        with contextlib.suppress(ValueError):  # torn
            holder = json.loads(content)
        return holder, (content, path.stat().st_mtime_ns)

    def acquire() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        first, deadline = None, time.monotonic() + LOCK_SECONDS
        while True:
            with contextlib.suppress(FileExistsError):
                with path.open("x") as file:
                    try:
                        file.write(text())
                        file.flush()
                    except OSError:
                        path.unlink()
                        raise
                return
            with contextlib.suppress(FileNotFoundError):
                (holder, now), over = held(), time.monotonic() > deadline
                who = f"process {holder.get('pid')} on {holder.get('host')}"
                if gone(holder) or (over and now == first):
                    path.unlink()
                elif over:
                    raise ValueError(f"--output-dir {directory} is in use by {who}")
                elif first is None:
                    print(f"waiting for {who}, which uses {directory}", flush=True)
                    first = now
            time.sleep(0.2)

    def still_mine() -> bool:
        with contextlib.suppress(OSError):
            return held()[0].items() >= mine.items()
        return False

    def beat() -> None:
        while not left.wait(LOCK_SECONDS / 6):
            if still_mine():
                try:
                    beaten.write_text(text())
                    beaten.replace(path)
                except OSError:  # a full disk
                    with contextlib.suppress(OSError):
                        os.utime(path)

    on_rank_zero(acquire)
    heart = threading.Thread(target=beat if dist.get_rank() == 0 else left.wait, daemon=True)
    heart.start()
    try:
        yield
    finally:
        left.set()
        heart.join()
        if dist.get_rank() == 0 and still_mine():
            path.unlink()
            beaten.unlink(missing_ok=True)


def open_output(directory: Path, resume: str, script: str) -> tuple[Path | None, str]:
    """Clear what an interrupted save left in the output directory.

    Returns the checkpoint that --resume means (auto: the newest whole one) and the last status.
    Damaged ones are set aside. Raises ValueError, on all ranks, where going on would mix two runs
    or lose one, OSError where nothing can be written.
    """

    def look() -> tuple[list[Path], str]:
        status, metrics = directory / "status", directory / "metrics.jsonl"
        if not status.exists() and (
            (directory / "final").exists() or (directory / "best").exists()
        ):
            raise ValueError(f"--output-dir {directory} holds a final/ or best/ of something else")
        (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
        status.open("a").close()
        with metrics.open("a+") as file:
            file.seek(0)
            owner = script
            with contextlib.suppress(ValueError):  # torn, or not yet there
                owner = json.loads(file.readline()).get("script", script)
        if owner != script:
            raise ValueError(f"--output-dir {directory} holds a run of {owner}, not of {script}")
        rubbish = [directory / "tmp-final", directory / "tmp-best"]
        for path in (*rubbish, *directory.glob("checkpoints/tmp-*")):
            shutil.rmtree(path, ignore_errors=True)
        found = sorted(directory.glob("checkpoints/step-*"), reverse=True)
        newest = found[0] if found else None
        if resume == "none" and newest:
            raise ValueError(f"--resume none would start over {newest}: give another --output-dir")
        if resume in ("auto", "none"):
            return found, status.read_text().strip()
        path = Path(resume).resolve()
        if newest and path.parent != newest.parent.resolve():
            print(f"{directory} has begun with --resume {resume} and goes on at {newest.name}")
            return found, status.read_text().strip()
        if not (path.name.startswith("step-") and path.is_dir()):
            raise ValueError(f"--resume {resume} is not a checkpoint, a directory step-N")
        if newest and path.name < newest.name:
            raise ValueError(f"--resume {resume} would go back behind {newest}: delete that first")
        return [path], status.read_text().strip()

    def seen(path: Path) -> None:
        if not path.is_dir():
            raise OSError(f"rank {dist.get_rank()} does not see {path}: do all nodes share it?")

    found, word = on_rank_zero(look)
    for path in found:
        try:
            on_every_rank(seen, path)
            on_every_rank(check_files, path)
            return path, word
        except ValueError as error:
            if path == Path(resume).resolve():
                raise
            if dist.get_rank() == 0:
                aside = path.with_name(f"damaged-{path.name}")
                print(f"{error}: it is set aside as {aside.name}, and the one before is used")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
    if on_rank_zero(lambda: found or any(directory.glob("checkpoints/damaged-*"))):
        raise ValueError(f"no checkpoint in {directory} is whole: give another --output-dir")
    return None, word


def check_files(path: Path) -> None:
    """Compare this rank's share of a checkpoint's files with the sizes and sums noted at the save.

    Raises ValueError that names the first one that is not as it was.
    """
    try:
        saved = json.loads((path / "train_state.json").read_text())
        if saved.pop("crc") != json_sum(saved):
            raise ValueError("its checksum differs")
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise ValueError(f"{path / 'train_state.json'} is damaged ({error})") from None
    for name in sorted(saved["files"])[dist.get_rank() :: dist.get_world_size()]:
        try:
            there = file_sum(path / name)
        except FileNotFoundError as error:
            raise ValueError(f"{path / name} is damaged ({error.strerror})") from None
        if there != saved["files"][name]:
            raise ValueError(f"{path / name} is damaged (size or checksum differ)")


def json_sum(saved: dict[str, Any]) -> int:
    """CRC-32 of what train_state.json holds besides it."""
    return zlib.crc32(json.dumps(saved, sort_keys=True).encode())


def file_sum(path: Path) -> list[int]:
    """Size in bytes and CRC-32 of a file: `dcp.load` accepts altered bytes silently."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            crc = zlib.crc32(block, crc)
    return [path.stat().st_size, crc]


@contextlib.contextmanager
def status(directory: Path, state: TrainState) -> Iterator[None]:
    """Leave in `directory`/status how it goes: running, then finished, stopped or failed.

    `stopped` is for a run that leaves by KeyboardInterrupt, its way of stopping on request. A save
    in flight is waited for; raises SaveError if the last save failed.
    """

    def write(word: str) -> None:
        if dist.get_rank() == 0:
            try:  # not cut before it is written: the disk may be full
                with (directory / "status").open("r+") as file:
                    file.write(word + "\n")
                    file.truncate()
            except OSError as error:
                print(f"status could not become {word} ({error.strerror})", flush=True)

    def settle() -> None:
        wait_for_save(state)
        if state.failed_saves:
            raise SaveError("the last save failed")

    write("running")
    try:
        try:
            yield
            settle()
        except KeyboardInterrupt:
            settle()
            write("stopped")
            dist.barrier()  # the launcher may end all as soon as one has left
            raise
        except SystemExit:  # of all ranks: what was under way before is still good
            with contextlib.suppress(OSError):
                wait_for_save(state)
            raise
    except KeyboardInterrupt:
        raise
    except BaseException:
        write("failed")
        raise
    write("finished")


def truncate_metrics(path: Path, step: int) -> None:
    """Drop the lines after `step` (0: all lines), and torn ones; rank 0 alone."""
    kept = []
    for line in path.read_text().splitlines(keepends=True) if step and path.exists() else []:
        with contextlib.suppress(ValueError):
            kept += [line] if line.endswith("\n") and json.loads(line)["step"] <= step else []
    temporary = path.with_name("metrics.tmp")
    temporary.write_text("".join(kept))
    temporary.replace(path)


def _write(
    path: Path,
    tensors: dict[str, Any],
    saved: dict[str, Any],
    full: bool = False,
    group: dist.ProcessGroup | None = None,
    then: Callable[[], None] = lambda: None,
) -> None:
    """Write under a temporary name, which becomes `path` once all ranks are done; `then` on rank 0.

    `full` makes the shards one file afterwards, for which rank 0 alone holds the whole state. Sizes
    and checksums of the files go into train_state.json, with `saved`. Raises OSError on all ranks,
    with nothing left of `path`.
    """
    temporary, rank = path.with_name(f"tmp-{path.name}"), dist.get_rank()

    def finish() -> None:
        if full:
            shards = [*temporary.glob("*.distcp"), temporary / ".metadata"]
            try:
                dcp_to_torch_save(temporary, temporary / FULL)
            except RuntimeError as error:  # what torch.save makes of a full disk
                raise OSError(str(error)) from None
            for file in shards:
                file.unlink()
            saved["files"] = {FULL: file_sum(temporary / FULL)}
        else:
            saved["files"][".metadata"] = file_sum(temporary / ".metadata")
        with (temporary / "train_state.json").open("w") as file:
            json.dump(saved | {"crc": json_sum(saved)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)
        then()

    try:
        dcp.save(tensors, checkpoint_id=temporary, process_group=group)
        mine = temporary.glob(f"__{rank}_*.distcp")
        sums = on_every_rank(lambda: {file.name: file_sum(file) for file in mine}, group=group)
        saved["files"] = {name: item for part in sums for name, item in part.items()}
        on_every_rank(finish if rank == 0 else lambda: None, group=group)
    except (OSError, CheckpointException) as error:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, CheckpointException):
            error = next(iter(error.failures.values()))[0]
        reason = str(error.__cause__ or error).splitlines()[0]
        raise OSError(f"{path} could not be saved, is the disk full? ({reason})") from None


def _place(model: nn.Module) -> dcp_state.StateDictOptions:
    """State dicts on the CPU where the parameters are: offloaded ones would go to the GPU, all of
    them and their moments at once."""
    return dcp_state.StateDictOptions(cpu_offload=next(model.parameters()).device.type == "cpu")


def _describe(state: TrainState) -> dict[str, Any]:
    """What train_state.json holds besides the files' sums."""
    saved = {name: getattr(state, name) for name in COUNTERS}
    saved |= {"schedule": state.scheduler.last_epoch, "scaler": state.scaler.state_dict()}
    return saved | {"world_size": dist.get_world_size()}


def best_path(output: Path, state: TrainState) -> Path:
    """Where `save_best` put the weights of the best step."""
    return output / "checkpoints" / f"best-{state.best_step:08d}"


def save_best(output: Path, state: TrainState, loss: float) -> None:
    """Save the weights alone, of the step that is now the best, with a validation loss of `loss`.

    If it fails, the best before it stays.
    """
    wait_for_save(state)  # which, when it ends, deletes other best weights than it knew
    before, failed = (state.best_loss, state.best_step), state.failed_saves
    state.best_loss, state.best_step = loss, state.step
    tensors = {"model": dcp_state.get_model_state_dict(state.model, options=_place(state.model))}
    _attempt(state, _write, best_path(output, state), tensors, _describe(state))
    if state.failed_saves:
        state.best_loss, state.best_step = before
    state.failed_saves = max(state.failed_saves, failed)  # a checkpoint has yet to succeed


def _attempt(state: TrainState, function: Callable[..., None], *args: Any) -> None:
    """A save that may fail once: the next one tries again. Raises SaveError the second time."""
    try:
        function(*args)
        state.failed_saves = 0
    except OSError as error:
        state.failed_saves, state.saved_step = state.failed_saves + 1, -1
        if state.failed_saves > 1:
            raise SaveError(f"{error}, the second time in a row") from None
        if dist.get_rank() == 0:
            tqdm.write(f"{error}: the next save tries again")


def wait_for_save(state: TrainState) -> None:
    """Wait for the save in flight, if there is one; its error is raised, or told, here."""
    if state.saving is not None:
        saving, state.saving = state.saving, None
        _attempt(state, saving.result)


def save_checkpoint(output: Path, state: TrainState, keep: int, full: bool) -> bool:
    """Save all of the state as `output`/checkpoints/step-N, sharded or as one `full` file; then
    only the newest `keep` stay. Returns whether there was anything to save, and it went well.

    Of the best weights those stay that one of them counts as the best: a run continued from there
    finds them, whatever was trained and lost after it. With a `save_group` it returns when the
    state is copied to host memory, and before that waits for the save before. A save that fails is
    told, and the second in a row raises SaveError.
    """
    wait_for_save(state)
    if state.saved_step == state.step:
        return False
    state.saved_step = state.step
    model, optimizer = dcp_state.get_state_dict(
        state.model, state.optimizer, options=_place(state.model)
    )
    states = pickle.dumps([read() for read, _ in RANDOM])
    rng = {str(dist.get_rank()): states}  # under one key for all, only rank 0's would be kept
    tensors = {"model": model, "optimizer": optimizer, "rng": rng}
    path, best = output / "checkpoints" / f"step-{state.step:08d}", best_path(output, state)

    def prune() -> None:
        checkpoints, wanted = sorted(path.parent.glob("step-*")), {best}
        for one in checkpoints[-keep:]:
            with contextlib.suppress(OSError, ValueError, KeyError):  # damaged
                number = json.loads((one / "train_state.json").read_text())["best_step"]
                wanted.add(path.with_name(f"best-{number:08d}"))
        for directory in (*checkpoints[:-keep], *set(path.parent.glob("best-*")) - wanted):
            shutil.rmtree(directory, ignore_errors=True)  # in use on NFS: the next time, then

    if state.save_group is None:
        _attempt(state, _write, path, tensors, _describe(state), full, None, prune)
        return state.failed_saves == 0
    copy, group = BlockingAsyncStager().stage(tensors), state.save_group
    thread = ThreadPoolExecutor(max_workers=1)
    if state.device.type == "cuda":  # or every rank's thread would open a context on GPU 0
        thread.submit(torch.cuda.set_device, state.device)
    state.saving = thread.submit(_write, path, copy, _describe(state), full, group, prune)
    thread.shutdown(wait=False)
    return True


def _load(path: Path, tensors: dict[str, Any]) -> None:
    """Fill `tensors` in place from a checkpoint, whose one file rank 0 makes shards again."""
    shards = path
    if (path / FULL).is_file():
        shards = path.with_name(f"tmp-shards-{path.name}")
        on_rank_zero(torch_save_to_dcp, path / FULL, shards)
    dcp.load(tensors, checkpoint_id=shards)
    if shards != path:
        dist.barrier()
        on_rank_zero(shutil.rmtree, shards)


def load_weights(path: Path, model: nn.Module) -> None:
    """Load a checkpoint's weights, whatever world size and strategy wrote them."""
    tensors = {"model": dcp_state.get_model_state_dict(model, options=_place(model))}
    _load(path, tensors)
    dcp_state.set_model_state_dict(model, tensors["model"])


def load_checkpoint(path: Path, state: TrainState, seed: int, output: Path) -> None:
    """Restore `state`, random states included; at another world size those are seeded anew.

    The best weights so far are those in `output`; of another run's checkpoint they stay behind.

    Raises ValueError on all ranks, naming what differs, if it is the state of another run.
    """
    saved = json.loads((path / "train_state.json").read_text())
    rank, world_size = str(dist.get_rank()), dist.get_world_size()
    check_identity(path, state.identity)
    model, optimizer = dcp_state.get_state_dict(
        state.model, state.optimizer, options=_place(state.model)
    )
    same_world = saved["world_size"] == world_size
    settings = [group | {"params": []} for group in state.optimizer.param_groups]
    tensors = {"model": model, "optimizer": optimizer, "rng": {rank: b""} if same_world else {}}
    _load(path, tensors)
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
    state.saved_step = state.step
    try:
        on_every_rank(check_files, best_path(output, state))
    except ValueError as error:
        if state.best_step and rank == "0":
            print(f"{error}: the best weights so far are lost")
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

    Call it under `first_on_node`. Raises ValueError if the hub does not give it.
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
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError) as error:
            raise ValueError(f"{index} cannot be read: {error}") from None
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
    # Files of Llama 2 hold its rotary frequencies, once a layer, which are computed now.
    known = [r"rotary_emb\.inv_freq$", *(model._keys_to_ignore_on_load_unexpected or [])]
    ignored = re.compile("|".join(known))
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


def meta_model(
    model_class: type[PreTrainedModel], config: PretrainedConfig, directory: Path
) -> PreTrainedModel:
    """The model in `directory` on meta, without weights, with its settings for generation.

    What the files hold apart is untied: newer T5s have a head of their own, whatever their config.
    Raises ValueError, on all ranks, if a file cannot be read.
    """
    with torch.device("meta"):
        model = model_class(config)
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)

    def apart() -> list[str]:
        first = {parameter: name for name, parameter in model.named_parameters()}
        names = {n: first[p] for n, p in model.named_parameters(remove_duplicate=False)}
        paths = {key: path for key, path, _, _ in _headers(directory)}
        both = [(a, b) for a, b in names.items() if a != b and {a, b} <= paths.keys()]
        return [a for a, b in both if not torch.equal(_read(paths[a], a), _read(paths[b], b))]

    for name in on_rank_zero(apart):
        module, _, key = name.rpartition(".")
        setattr(model.get_submodule(module), key, nn.Parameter(model.get_parameter(name).clone()))
    return model


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
    DDP call it for every module before wrapping. Tied parameters stay one tensor. Buffers that are
    in no file, such as rotary frequencies, are computed anew, in fp32.

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
        buffers = [key for key, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        for key in buffers:
            setattr(module, key, torch.empty_like(getattr(module, key), device=device))
        if buffers:
            model._init_weights(module)

    return init


@contextlib.contextmanager
def report_memory(device: torch.device) -> Iterator[None]:
    """Print what memory the block took, in 10^6 bytes: at its begin, at its end, and the process's
    peak, of rank 0 and of the other rank that held most."""

    def now() -> list[float]:
        lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        held = [int(lines[key].split()[0]) * 1.024e-3 for key in ("VmRSS", "VmHWM")]
        if device.type == "cuda":
            held += [torch.cuda.memory_allocated() / 1e6, torch.cuda.max_memory_allocated() / 1e6]
        return held

    start, begin, gathered = time.perf_counter(), now(), [None] * dist.get_world_size()
    yield
    dist.all_gather_object(gathered, (begin, now()))
    if dist.get_rank() == 0:
        print(f"loaded in {time.perf_counter() - start:.1f} s; memory in MB at begin, end, peak")
        for place, name in enumerate(("CPU", "GPU")[: len(begin) // 2]):
            ranks = [(b[2 * place], *e[2 * place : 2 * place + 2]) for b, e in gathered]
            others = sorted(ranks[1:], key=lambda rank: rank[2])[-1:]
            for who, held in zip(("rank 0", "largest other"), ranks[:1] + others, strict=False):
                print(f"{name}, {who}: " + ", ".join(f"{x:,.0f}" for x in held), flush=True)


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
            size = parameter.numel() * dtype.itemsize
            if pending and sum(x.nbytes for x in pending.values()) + size > limit:
                write_file()
            pending[name] = parameter.detach().to("cpu", dtype, copy=True)
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
        for part in (config, tokenizer):
            part.save_pretrained(temporary)
        generation = inner.generation_config.to_json_string()  # save_pretrained may refuse it
        (temporary / "generation_config.json").write_text(generation)
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)
    dist.barrier()
