"""Save, load, check and prune what is trained.

Copy this file along with a script and the folder runtime/. It names no model.
All ranks call a function together unless its docstring says "rank 0 alone".
"""

import contextlib
import json
import math
import os
import pickle
import random
import shutil
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from tqdm import tqdm
from transformers import (
    set_seed,
)

from .ranks import cpu_group, on_every_rank, on_rank_zero

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

    def optimizer_step(self) -> None:
        """Step the optimizer and the schedule; neither does where fp16 has overflowed."""
        scale = self.scaler.get_scale()  # 1 unless fp16
        self.scaler.step(self.optimizer)
        self.scaler.update()
        overflowed = self.scaler.get_scale() < scale
        if not overflowed:
            self.scheduler.step()
        self.optimizer.zero_grad()


class SaveError(OSError):
    """Two saves in a row failed, or the last one."""


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
        while block := file.read(1 << 20):
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
            dist.barrier(group=cpu_group())  # the launcher may end all as soon as one has left
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
    group = group or cpu_group()

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
        writer = dcp.FileSystemWriter(temporary, overwrite=True)
        dcp.save(tensors, storage_writer=writer, process_group=group)
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


def _options(model: nn.Module) -> dcp_state.StateDictOptions:
    """FSDP's state dict is made of copies, which go to the host one by one: on the GPU they would
    take as much again as the model and its optimizer. DDP's is made of the tensors themselves."""
    return dcp_state.StateDictOptions(cpu_offload=isinstance(model, FSDP))


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
    tensors = {"model": dcp_state.get_model_state_dict(state.model, options=_options(state.model))}
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
        state.model, state.optimizer, options=_options(state.model)
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


@contextlib.contextmanager
def _shards(path: Path) -> Iterator[Path]:
    """The directory that `dcp.load` reads; rank 0 makes one of a full checkpoint for the while."""
    if not (path / FULL).is_file():
        yield path
        return
    temporary = path.with_name(f"tmp-shards-{path.name}")
    on_rank_zero(torch_save_to_dcp, path / FULL, temporary)
    yield temporary
    dist.barrier(group=cpu_group())
    on_rank_zero(shutil.rmtree, temporary)


def _read_weights(shards: Path, model: nn.Module) -> None:
    options = _options(model)
    tensors = {"model": dcp_state.get_model_state_dict(model, options=options)}
    dcp.load(tensors, checkpoint_id=shards, process_group=cpu_group())
    dcp_state.set_model_state_dict(model, tensors["model"], options=options)


def _read_optimizer(shards: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the moments; learning rate and other settings stay those of this run."""
    options = _options(model)
    settings = [group | {"params": []} for group in optimizer.param_groups]
    tensors = {"optimizer": dcp_state.get_optimizer_state_dict(model, optimizer, options=options)}
    # The line above made moments of zeros. They go, or they would stand beside the loaded ones.
    # Those of one parameter stay: an optimizer without any is given moments of zeros again.
    for parameter in list(optimizer.state)[1:]:
        del optimizer.state[parameter]
    dcp.load(tensors, checkpoint_id=shards, process_group=cpu_group())
    dcp_state.set_optimizer_state_dict(model, optimizer, tensors["optimizer"], options=options)
    for group, kept in zip(optimizer.param_groups, settings, strict=True):
        group |= kept | {"params": group["params"]}


def _read_random_states(shards: Path) -> list[Any]:
    """This rank's random states, in the order of RANDOM."""
    tensors = {"rng": {str(dist.get_rank()): b""}}
    dcp.load(tensors, checkpoint_id=shards, process_group=cpu_group())
    return pickle.loads(tensors["rng"][str(dist.get_rank())])


def load_weights(path: Path, model: nn.Module) -> None:
    """Load a checkpoint's weights, whatever world size and strategy wrote them."""
    with _shards(path) as shards:
        _read_weights(shards, model)


def load_checkpoint(path: Path, state: TrainState, seed: int, output: Path) -> None:
    """Restore `state`, random states included; at another world size those are seeded anew.

    Weights come first, then the optimizer, so that a state dict of both is never held.
    The best weights so far are those in `output`; of another run's checkpoint they stay behind.

    Raises ValueError on all ranks, naming what differs, if it is the state of another run.
    """
    saved = json.loads((path / "train_state.json").read_text())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    check_identity(path, state.identity)
    random_states = None
    with _shards(path) as shards:
        _read_weights(shards, state.model)
        _read_optimizer(shards, state.model, state.optimizer)
        if saved["world_size"] == world_size:
            random_states = _read_random_states(shards)
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
        if state.best_step and rank == 0:
            print(f"{error}: the best weights so far are lost")
        state.best_loss, state.best_step = float("inf"), 0
    if random_states is None:
        set_seed(seed + state.step * world_size + rank)
        if rank == 0:
            there = saved["world_size"]
            print(f"{there} processes saved this, {world_size} go on: dropout reseeded")
        return
    # Last: what stands above may draw random numbers.
    for (_, restore), value in zip(RANDOM, random_states, strict=False):
        restore(value)


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
    dist.all_gather_object(gathered, (begin, now()), group=cpu_group())
    if dist.get_rank() == 0:
        print(f"loaded in {time.perf_counter() - start:.1f} s; memory in MB at begin, end, peak")
        for place, name in enumerate(("CPU", "GPU")[: len(begin) // 2]):
            ranks = [(b[2 * place], *e[2 * place : 2 * place + 2]) for b, e in gathered]
            others = sorted(ranks[1:], key=lambda rank: rank[2])[-1:]
            for who, held in zip(("rank 0", "largest other"), ranks[:1] + others, strict=False):
                print(f"{name}, {who}: " + ", ".join(f"{x:,.0f}" for x in held), flush=True)
