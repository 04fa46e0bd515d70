"""Helpers for the processes of a run: work on all or some of them, and exits that say why.

Imports nothing else of this repository. All ranks call a function together unless it says
otherwise.
"""

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import numpy
import torch
import torch.distributed as dist
from tqdm import tqdm

GRACE_SECONDS = 20  # in which another rank can say what went wrong
JOIN_SECONDS = 300.0  # limit in which ranks must reach each other, once all have come
APART = (
    "all ranks have come, but after {:.0f} s they have not reached each other: set "
    "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the network interface between the nodes (ip -br "
    "address lists them), as a host name may stand for 127.0.1.1"
)
LOST = (  # parts of the errors of gloo, the store and NCCL if a peer is gone
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection was likely closed",
    "Broken pipe",
    "Timed out waiting",
    "ncclRemoteError",
)

_cpu_group: dist.ProcessGroup | None = None
_join_store: dist.Store | None = None  # of several processes; a connection of its own
_failure_store: dist.Store | None = None  # another connection, which no waiting call blocks
_joins = 0  # how often all have come to `joining`
_has_failed = False  # this rank has failed, and has told the others


def accelerator() -> str | None:
    """Return the type of the accelerator that this machine's processes use, such as cuda; None on a
    CPU.

    One without a process-group backend of its own, such as mps, is not used.
    """
    if not torch.accelerator.is_available():
        return None
    kind = torch.accelerator.current_accelerator().type
    if dist.get_default_backend_for_device(kind) == "gloo":
        return None
    return kind


def device_count() -> int:
    """Return the number of accelerators that this process sees; 0 on a CPU."""
    if accelerator() is None:
        return 0
    return torch.accelerator.device_count()


def local_device() -> torch.device:
    """Return this process's accelerator, which becomes the current one, or the CPU."""
    kind = accelerator()
    if kind is None:
        return torch.device("cpu")
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)))
    torch.accelerator.set_device_index(device.index)
    return device


def device_name(device: torch.device) -> str:
    """Return a device's name, such as NVIDIA H100 80GB HBM3, or cpu."""
    if device.type == "cpu":
        return "cpu"
    return torch.get_device_module(device).get_device_name()


def has_bf16() -> bool:
    """Tell whether there is an accelerator that computes bf16 natively."""
    kind = accelerator()
    if kind is None:
        return False
    return torch.get_device_module(kind).is_bf16_supported(including_emulation=False)


def set_seed(seed: int) -> None:
    """Seed Python's, NumPy's and PyTorch's random numbers. Transformers' function does so too, but
    importing it takes as long as all the rest of Transformers."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)  # of every device


def use_all_cores() -> None:
    """Divide the cores among a node's processes; torchrun gives each of them one thread."""
    if os.environ.get("OMP_NUM_THREADS") == "1":
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def join_cpu_group(timeout: timedelta) -> None:
    """Make the group for objects and tensors in CPU memory, after `init_process_group`.

    The default group has the backend of the device alone. With a mixed one (cpu:gloo,cuda:nccl)
    FSDP1 takes the optimizer's shards for CPU tensors (`_get_pg_default_device` answers cpu) and
    leaves them on the GPU when a state dict should go to the host: 8 bytes per parameter.
    """
    global _cpu_group
    _cpu_group = None  # gloo is the default group on a CPU
    if dist.get_backend() != "gloo":
        _cpu_group = dist.new_group(backend="gloo", timeout=timeout)


def cpu_group() -> dist.ProcessGroup | None:
    """Return the group that `join_cpu_group` made; None is the default group."""
    return _cpu_group


def on_every_rank(
    function: Callable[..., Any], *args: Any, group: dist.ProcessGroup | None = None
) -> list[Any]:
    """Run `function` on each rank; all ranks return all results.

    The lowest failing rank's OSError or ValueError is raised on all ranks. `group` is one for CPU
    tensors (default: that of `cpu_group`).
    """
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, _outcome(function, *args), group=group or cpu_group())
    for _, error in outcomes:
        if error is not None:
            raise error
    return [result for result, _ in outcomes]


def on_rank_zero(
    function: Callable[..., Any], *args: Any, group: dist.ProcessGroup | None = None
) -> Any:
    """Run `function` on rank 0 alone; all ranks return its result, or raise its error.

    Rank 0 does not wait until all have the result, which is passed on in log2 N turns.
    """
    outcomes: list[Any] = [None]
    if dist.get_rank() == 0:
        outcomes = [_outcome(function, *args)]
    dist.broadcast_object_list(outcomes, src=0, group=group or cpu_group())
    result, error = outcomes[0]
    if error is not None:
        raise error
    return result


def _outcome(function: Callable[..., Any], *args: Any) -> tuple[Any, Exception | None]:
    try:
        return function(*args), None
    except (OSError, ValueError) as error:
        return None, error.with_traceback(None)  # its frames would keep their variables alive


def first_on_node(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function` on one process per node, then on the others, which find its files cached.

    Returns its result. An OSError or ValueError on any rank is raised on all of them.
    """
    is_first = int(os.environ.get("LOCAL_RANK", 0)) == 0
    result = None

    def run() -> None:
        nonlocal result
        result = function(*args)

    for turn_of_first in (True, False):
        on_every_rank(run if turn_of_first == is_first else lambda: None)
    return result


def gather_in_turn(mine: list[Any], count: int | None) -> list[Any]:
    """Return the first `count` items of all ranks (None: all), in the order in which they were
    dealt out: one to each rank in turn."""
    world_size = dist.get_world_size()
    wanted = mine
    if count is not None:
        wanted = mine[: len(range(dist.get_rank(), count, world_size))]
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, wanted, group=cpu_group())
    rounds = max(len(items) for items in everyone)
    return [items[turn] for turn in range(rounds) for items in everyone if turn < len(items)]


def say(text: str) -> None:
    """Print a line on rank 0, above a progress bar."""
    if text and int(os.environ.get("RANK", 0)) == 0:
        tqdm.write(text)


def connect(timeout: timedelta) -> dict[str, Any]:
    """Return store, rank and world size for `init_process_group`: torchrun's, or of one process."""
    global _join_store, _failure_store
    store, rank, world_size = dist.HashStore(), 0, 1
    if "RANK" in os.environ:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
        # When torchrun restarts its workers, the addresses of the old ones are still in the store.
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        _join_store = store.clone()
        _failure_store = store.clone()
        _failure_store.set_timeout(timedelta(seconds=5))
    return {"store": store, "rank": rank, "world_size": world_size}


@contextlib.contextmanager
def rendezvous(timeout: timedelta) -> Iterator[dict[str, Any]]:
    """Yield store, rank and world size to the `init_process_group` that is called inside.

    Afterwards joins the group of `cpu_group`. Both have the limit of `joining`.
    """
    place = connect(timeout)
    with joining(timeout):
        yield place
        join_cpu_group(timeout)


@contextlib.contextmanager
def joining(timeout: timedelta, limit: float = JOIN_SECONDS) -> Iterator[None]:
    """End the process if the process groups made inside are not joined in `limit` seconds.

    Both gloo and NCCL wait in silence for a rank that they cannot reach, gloo for the group's
    time-out. A thread ends that wait with a sentence. `limit` counts from when all ranks have come,
    which takes `timeout` at most: some may import slowly.
    """
    global _joins
    if _join_store is not None:
        _joins += 1
        count, all_there = f"join/{_joins}", f"join/{_joins}/all"
        if _join_store.add(count, 1) == int(os.environ["WORLD_SIZE"]):
            _join_store.set(all_there, "")
        _join_store.wait([all_there], timeout)
    timer = threading.Timer(limit, _end_apart, [limit])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end_apart(limit: float) -> NoReturn:
    tell_failure()
    if int(os.environ.get("RANK", 0)) != 0:
        time.sleep(GRACE_SECONDS)  # rank 0's end ends this one too
    say_error(APART.format(limit))
    os._exit(1)


def tell_failure() -> None:
    """Tell the other ranks that this one ends with an error, after which torchrun stops them."""
    global _has_failed
    _has_failed = True
    if _failure_store is not None:
        with contextlib.suppress(RuntimeError):  # torchrun is gone
            _failure_store.set("failure", "")


def failure_told() -> bool:
    """Tell whether a rank has told its failure. Any thread may call it."""
    if _failure_store is not None:
        with contextlib.suppress(RuntimeError):
            return _failure_store.check(["failure"])
    return False


def another_failed() -> bool:
    """Tell whether another rank has told its failure, and not this one. Any thread may call it."""
    return not _has_failed and failure_told()


def true_on_any(condition: bool) -> bool:
    """Tell whether `condition` is true on any rank."""
    count = torch.tensor(int(condition))
    dist.all_reduce(count, group=cpu_group())
    return count.item() > 0


def ranks_where(condition: bool) -> list[int]:
    """Return the ranks on which `condition` is true, by a sum of one number for each rank."""
    flags = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    flags[dist.get_rank()] = condition
    dist.all_reduce(flags, group=cpu_group())
    return flags.nonzero().flatten().tolist()


def exit_with(error: object) -> NoReturn:
    """End this rank with exit code 1 and one sentence, which rank 0 says. Any number of ranks may
    call it."""
    if int(os.environ.get("RANK", 0)) != 0:
        # Rank 0's end ends this rank too. If this rank alone is in trouble, it speaks in the end.
        with contextlib.suppress(ValueError):  # which another than the main thread gets
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(GRACE_SECONDS)
    say_error(error)
    raise SystemExit(1)


def say_error(error: object) -> None:
    """Print one sentence, which torchrun's report repeats. Any rank and any thread may call it."""
    text = f"error: {error}"
    print(text, file=sys.stderr, flush=True)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        print("(torchrun's report follows, and repeats it)", file=sys.stderr, flush=True)
    leave_to_torchrun(text)


def leave_to_torchrun(text: str) -> None:
    """Have torchrun's report of how this process ended, the last on the screen, repeat a sentence.

    Any rank and any thread may call it.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        details = {"py_callstack": text, "timestamp": str(int(time.time()))}
        report = {"message": {"message": text, "extraInfo": details}}
        Path(path).write_text(json.dumps(report))


def peer_is_lost(error: BaseException) -> bool:
    """Tell whether a collective failed because another rank is gone, or silent.

    NCCL's other errors, such as of a full /dev/shm, have the same class, but are this rank's own.
    """
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in LOST)
