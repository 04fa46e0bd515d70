"""The processes of a run, and requests to stop it. All ranks call each function together unless its
docstring differs."""

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import datasets
import huggingface_hub
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm
from transformers import BatchEncoding, logging

GRACE_SECONDS = 20.0  # for rank 0 to print the error first
STOPPED = 75  # the exit code of a run that was saved: the same command resumes it
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

Batch = dict[str, Tensor | int]  # of a `collate` function

cpu_group: dist.ProcessGroup | None = None  # for objects and CPU memory; None: the default group


class Problem(ValueError):
    """What a user can solve, such as a wrong path: the message is enough, without a traceback."""


def setup(timeout_minutes: float) -> torch.device:
    """Join the process group (nccl on GPUs, gloo on CPUs), or without torchrun one of this process
    alone; return this process's device."""
    global cpu_group
    if len(os.fsencode(tempfile.gettempdir())) > 60:
        tempfile.tempdir = "/tmp"  # workers put sockets there, whose paths have 107 bytes at most
    timeout = timedelta(minutes=timeout_minutes)
    device, device_id = torch.device("cpu"), None
    if accelerator := torch.accelerator.current_accelerator(check_available=True):
        device = device_id = torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", 0)))
        torch.accelerator.set_device_index(device.index)
    store, rank, world_size = dist.HashStore(), 0, 1
    if "RANK" in os.environ:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
        # After a restart by torchrun, the store still holds the addresses of the old workers.
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        # If torchrun is killed, Linux asks its workers to stop: 1 is PR_SET_PDEATHSIG.
        ctypes.CDLL(None).prctl(1, signal.SIGUSR1)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(
        backend, timeout=timeout, store=store, rank=rank, world_size=world_size, device_id=device_id
    )
    # A group of its own: with cpu:gloo,cuda:nccl FSDP1 would not offload optimizer state dicts.
    cpu_group = None if backend == "gloo" else dist.new_group(backend="gloo", timeout=timeout)
    logging.disable_progress_bar()
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return device


def environment_size() -> int:
    """Return the number of processes that torchrun has started, before the process group exists."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1


def host_sums(numbers: Sequence[int]) -> list[int]:
    """Return the sum of each number over all ranks. Hosts wait for hosts, and for no device."""
    sums = torch.tensor(numbers, dtype=torch.int64)
    dist.all_reduce(sums, group=cpu_group)
    return sums.tolist()


def on_every_rank(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function` on each rank; return the results of all ranks. If it raises an OSError or
    ValueError, raise the lowest rank's error on all ranks."""
    try:
        outcome = function(*args), None
    except (OSError, ValueError) as error:
        outcome = None, error.with_traceback(None)  # frames would keep their variables alive
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome, group=cpu_group)
    for _, error in outcomes:
        if error is not None:
            raise error
    return [result for result, _ in outcomes]


def on_rank_zero(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function` on rank 0 only; return its result, or raise its error, on all ranks."""
    run = function if dist.get_rank() == 0 else lambda *_: None
    return on_every_rank(run, *args)[0]


def local_main_process_first(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function` on one process per node, then on the others, which find its cached files.
    Raise errors on all ranks, as `on_every_rank` does."""
    results = []
    is_first = int(os.environ.get("LOCAL_RANK", 0)) == 0
    on_every_rank(lambda: results.append(function(*args)) if is_first else None)
    if not is_first:  # the hub limits requests per address
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    on_every_rank(lambda: None if is_first else results.append(function(*args)))
    return results[0]


def compare_ranks(values: dict[str, Any]) -> dict[str, Any]:
    """Return `values`. Raise Problem on all ranks if a value differs between ranks."""
    everyone = on_every_rank(lambda: values)
    for name, value in values.items():
        others = [each[name] for each in everyone if each[name] != value]
        if others:
            raise Problem(f"{name} is {value} on one rank, {others[0]} on another. Use one value.")
    return values


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return a batch with its tensors on `device`, copied asynchronously. Any rank."""
    return BatchEncoding(batch).to(device, non_blocking=True).data


def print0(text: str) -> None:
    """Print a line on rank 0, above a progress bar if there is one. Any rank may call this."""
    if int(os.environ.get("RANK", 0)) == 0:
        with contextlib.suppress(OSError, UnicodeError):  # stdout may be full, or ASCII
            tqdm.write(text)
            sys.stdout.flush()


def run(main: Callable[[Any], None], args: Any) -> NoReturn:
    """Run a script's main function on this rank, and end the process: with code 1 after an error.
    Of a Problem or OSError only the message is printed. Any other error has a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback
    try:
        main(args)
    except (OSError, Problem) as error:
        exit_with(error)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # torch's names the rank
        # torchrun names the rank that ends first as the cause: ranks that lost it must end later.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(1)
        end(1)
    end(0)


def exit_with(error: object) -> NoReturn:
    """Exit with code 1 and a message, which rank 0 prints first. Any rank may call this."""
    if int(os.environ.get("RANK", 0)) != 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(GRACE_SECONDS)  # if rank 0 fails too, torchrun ends this rank
    tqdm.write(f"error: {error}", file=sys.stderr)  # on a line without a progress bar
    end(1)


def leave(code: int) -> NoReturn:
    """End the process when all ranks are here: a launcher may end all when one ends."""
    dist.barrier(group=cpu_group)
    end(code)


def end(code: int) -> NoReturn:
    """End this process, without freeing anything. Python's own exit can abort in threads of NCCL
    and gloo, and the end of a gloo group can wait forever for a thread that waits for the GIL."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


class Stopped(Exception):
    """A rank was asked to stop. All ranks raise this together, in a validation or an export."""


class StopRequest:
    """Whether this process was asked to stop. From `listen` to `forget` signals are remembered;
    before and after, they end the process, as there is nothing to lose."""

    def __init__(self) -> None:
        self.is_set = False

    def listen(self) -> None:
        """From now on, remember signals."""
        for number in SIGNALS:
            signal.signal(number, self._remember)

    def forget(self) -> None:
        """From now on, let signals end the process."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    def check(self) -> None:
        """Raise Stopped on all ranks if one was asked to stop. Call this on all ranks."""
        if host_sums([self.is_set]) != [0]:
            raise Stopped

    def _remember(self, *_: object) -> None:
        if not self.is_set and int(os.environ.get("RANK", 0)) == 0:
            with contextlib.suppress(OSError):  # stdout may be full or closed
                os.write(1, b"Stopping after this step or the next.\n")  # unlike print, safe
        self.is_set = True


def block_stops(_: int) -> None:
    """Block, in a worker process of a DataLoader, the requests to stop that its rank handles."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
