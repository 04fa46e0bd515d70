"""The ranks of a run: their device, functions that run on all or one of them, and error exits.

All ranks call each function together unless its docstring says otherwise.
"""

import contextlib
import io
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import datasets
import huggingface_hub
import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

GRACE_SECONDS = 20  # for rank 0 to report the error first

_cpu_group: dist.ProcessGroup | None = None
_store: dist.Store | None = None  # a separate connection: those of process groups may block


def accelerator() -> str | None:
    """Return the type of this machine's accelerator, such as cuda; None on a CPU."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type


def local_device() -> torch.device:
    """Return this process's device; make it the current one if it is an accelerator."""
    if accelerator() is None:
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", 0))
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator(), index)


def device_name(device: torch.device) -> str:
    """Return a device's name, such as NVIDIA H100 80GB HBM3, or cpu."""
    return "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name()


def has_bf16() -> bool:
    """Return whether there is an accelerator that supports bf16 natively."""
    if accelerator() is None:
        return False
    return torch.get_device_module().is_bf16_supported(including_emulation=False)


def set_seed(seed: int) -> None:
    """Seed all random generators of this process. Transformers' function would import peft."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # of all devices


def use_all_cores() -> None:
    """Set PyTorch's threads to this process's share of the node's cores; torchrun sets one."""
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


@contextlib.contextmanager
def rendezvous(timeout: timedelta) -> Iterator[dict[str, Any]]:
    """Yield the store, rank and world size for `init_process_group`, which must be called inside
    the `with`. On exit, create a gloo group for CPU tensors."""
    global _store, _cpu_group
    store, rank, world_size = dist.HashStore(), 0, 1
    if "RANK" in os.environ:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
        # After a restart by torchrun, the store still holds the addresses of the old workers.
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        _store = store.clone()
    with join_deadline():
        yield {"store": store, "rank": rank, "world_size": world_size}
        # The default group has only the device's backend. With cpu:gloo,cuda:nccl FSDP1 would keep
        # the optimizer's shards on the GPU when a state dict should be offloaded.
        is_cpu = dist.get_backend() == "gloo"
        _cpu_group = None if is_cpu else dist.new_group(backend="gloo", timeout=timeout)


@contextlib.contextmanager
def join_deadline(limit: float = 600.0) -> Iterator[None]:
    """End the process if the process groups created inside take longer than `limit` seconds: gloo
    and NCCL wait silently for a rank that they cannot reach."""
    timer = threading.Timer(limit, _exit_unjoined, [limit])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _exit_unjoined(limit: float) -> NoReturn:
    try:
        exit_with(
            f"The ranks did not connect within {limit:.0f} s. Set GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME to the network interface between the nodes (see ip -br address)."
        )
    finally:
        os._exit(1)  # the main thread waits in C++


def cpu_group() -> dist.ProcessGroup | None:
    """Return the group for objects and tensors in CPU memory; None is the default group."""
    return _cpu_group


def on_every_rank(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function` on each rank, and return the results of all ranks. If it raises an OSError or
    ValueError, raise the lowest rank's error on all ranks."""
    try:
        outcome = function(*args), None
    except (OSError, ValueError) as error:
        outcome = None, error.with_traceback(None)  # the frames would keep their variables alive
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome, group=cpu_group())
    for _, error in outcomes:
        if error is not None:
            raise error
    return [result for result, _ in outcomes]


def on_rank_zero(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function` on rank 0 only; return its result, or raise its error, on all ranks."""
    return on_every_rank(lambda: function(*args) if dist.get_rank() == 0 else None)[0]


def first_on_node(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function` on one process per node, then on the others, which use cached files: the
    hub limits requests per address. Raise errors on all ranks, like `on_every_rank`."""
    results = []
    is_first = int(os.environ.get("LOCAL_RANK", 0)) == 0
    on_every_rank(lambda: results.append(function(*args)) if is_first else None)
    if not is_first:
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        datasets.config.HF_HUB_OFFLINE = True  # a copy of the hub's constant
    on_every_rank(lambda: None if is_first else results.append(function(*args)))
    return results[0]


def true_on_any(condition: bool) -> bool:
    """Return whether `condition` is true on any rank."""
    flag = torch.tensor(int(condition))
    dist.all_reduce(flag, group=cpu_group())
    return flag.item() > 0


def say(text: str) -> None:
    """Print a line on rank 0, above a progress bar if there is one."""
    if text and int(os.environ.get("RANK", 0)) == 0:
        with contextlib.suppress(OSError):  # a full disk or closed pipe should not end a run
            tqdm.write(text)


@contextlib.contextmanager
def explain_errors(problem: str, advice: str = "Correct it.") -> Iterator[None]:
    """Raise an error of any type as a ValueError: `problem`, the reason in one line, `advice`."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{problem} ({type(error).__name__}: {reason}). {advice}") from error


def clear_bars() -> None:
    """Remove all progress bars from the screen, those of other libraries too."""
    for bar in list(tqdm._instances):  # tqdm has no public list of them
        bar.leave = False
        bar.close()


def exit_with(error: object) -> NoReturn:
    """Exit with code 1 and a message, which rank 0 prints. Any rank may call this."""
    report_failure()
    if int(os.environ.get("RANK", 0)) != 0:
        time.sleep(GRACE_SECONDS)  # if rank 0 fails too, its exit ends this rank
    text = f"error: {error}"
    clear_bars()
    print(text, file=sys.stderr, flush=True)
    _add_to_report(text)
    raise SystemExit(1)


def report_end(text: str) -> None:
    """Print how the run ended, and add it to torchrun's report, which is printed last."""
    _add_to_report(text)
    say(text)


def _add_to_report(text: str) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        Path(path).write_text(json.dumps({"message": text, "timestamp": int(time.time())}))


def report_failure() -> None:
    """Report that this rank has failed, so that torchrun's SIGTERM is not a request to stop."""
    if _store is not None:
        with contextlib.suppress(RuntimeError):  # torchrun has ended
            _store.set("failure", "")


def has_failed() -> bool:
    """Return whether any rank has reported a failure. Any thread of any rank may call this."""
    with contextlib.suppress(RuntimeError):
        return _store is not None and _store.check(["failure"])
    return False


def _check_environment() -> None:
    """Exit with a message if some of torchrun's variables are set, and others are not valid, or if
    another launcher started several processes, each of which would train alone."""
    of_ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    launchers = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
    present = [x for x in launchers if os.environ.get(x, "1") != "1"]
    present += [x for x in of_ranks if x in os.environ]
    wrong = [x for x in (*of_ranks, "MASTER_PORT") if not os.environ.get(x, "").isdecimal()]
    wrong += [] if os.environ.get("MASTER_ADDR") else ["MASTER_ADDR"]
    if not wrong and int(os.environ["RANK"]) >= int(os.environ["WORLD_SIZE"]):
        wrong = ["WORLD_SIZE"]
    if present and wrong:
        raise SystemExit(
            f"error: The environment has {', '.join(present)}, but no valid {', '.join(wrong)}. "
            f"Start the script with torchrun, or for one process: unset {' '.join(present)}"
        )


# On import, because the defaults of flags depend on the number of processes.
_check_environment()
if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="backslashreplace")  # samples may not be ASCII, as a log may be
