"""Check in a minute that every device is present and none is slower than the others.

    torchrun --nnodes 1 --nproc_per_node 8 tools/preflight.py --output-dir output
    sbatch --nodes 4 launch.slurm tools/preflight.py --output-dir /shared/run

Times matrix products, copies to the device, writes to --output-dir, and all-reduces of three sizes
within a node and across nodes. Exits with 1 if a device is missing or a rank is slow or silent.

A rank is slow if its median time is more than 1.1 times that of the others (on a CPU 2 times). The
bandwidth of an all-reduce is that of nccl-tests: the bytes that a rank sends in a ring, per second.
"""

import os
import shutil
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any directory

import torch
import torch.distributed as dist
import tyro
from torch.distributed.device_mesh import init_device_mesh

from core import ranks
from core.log import open_directory

# torch 2.13 renames these collectives; 2.11 does not have the new names.
warnings.filterwarnings("ignore", message=r"`torch.distributed.\w+_tensor` is deprecated")

JOIN_MINUTES = 10.0  # imports can be slow
ROUNDS = 9
TOLERANCE = 1.1  # ratio to the time of the others above which a rank is slow
CPU_TOLERANCE = 2.0  # processes share cores and memory
SAMPLE_SECONDS = 0.25  # shorter calls are repeated within a sample
FILE_BYTES = 1 << 26


@dataclass
class Args:
    """The flags."""

    output_dir: Path = Path("output")  # its disk is measured
    gpus_per_node: int = 0  # expected number of GPUs; 0: that of Slurm, or of the processes
    timeout_seconds: float = 30.0  # limit for one measurement


class Probe(NamedTuple):
    """A function call whose speed is measured. All ranks have the same probes in the same order."""

    name: str  # and the unit of work / seconds
    work: float  # of a call
    call: Callable[[], object]


def parse_args(argv: list[str] | None = None) -> Args:
    """Return the flags of `argv` (default: sys.argv), or exit with a message."""
    return tyro.cli(Args, args=argv, description=__doc__)


def preflight(args: Args) -> None:
    """Check the machines and print a report; exit with code 1 after a fault. Call on all ranks."""
    scratch = args.output_dir / "tmp-preflight"
    try:
        faults = check_machines(args, scratch)
    except RuntimeError as error:  # names the ranks that do not respond
        faults = [str(error)]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if faults:
        raise ranks.Problem(" ".join(faults))


def check_machines(args: Args, scratch: Path) -> list[str]:
    """Check devices, disk and speed, and print a report; return a message for each slow rank. Raise
    Problem if a device is missing or the nodes do not share the disk, and RuntimeError with the
    ranks that stop responding. Call on all ranks."""
    count_devices(args)  # first, as the process group needs them
    device = ranks.setup(JOIN_MINUTES)
    hosts = ranks.on_every_rank(socket.gethostname)
    open_directory(scratch)
    faults = []
    ranks.print0(f"{'':44}{'median':>9}{'slowest':>9}  slowest rank")
    for probe in [*local_probes(device, scratch), *all_reduce_probes(device)]:
        seconds = measure(probe, timedelta(seconds=args.timeout_seconds))
        median = probe.work / statistics.median(seconds)
        slowest = probe.work / max(seconds)
        rank = seconds.index(max(seconds))
        ranks.print0(f"{probe.name:44}{median:>9.4g}{slowest:>9.4g}  {rank} on {hosts[rank]}")
        for rank, ratio in find_slow(seconds).items():
            fault = f"is slow: {probe.name}, {ratio:.2f} times the others' time."
            faults.append(f"rank {rank} on {hosts[rank]} {fault}")
    ranks.print0("\n".join(faults or ["All ranks are fine."]))
    dist.barrier(group=ranks.cpu_group)
    return faults


def count_devices(args: Args) -> None:
    """Raise Problem if this node has fewer devices than expected."""
    count = torch.accelerator.device_count()
    expected = args.gpus_per_node or int(os.environ.get("SLURM_GPUS_ON_NODE", 0))
    if count < expected:
        raise ranks.Problem(f"{socket.gethostname()} has {count} devices instead of {expected}.")


def local_probes(device: torch.device, scratch: Path) -> list[Probe]:
    """Return Probes of matrix products, of copies to the device, and of writing a file on each
    rank, as in a save."""
    on_gpu = device.type != "cpu"
    width, size = (8192, 1 << 28) if on_gpu else (1024, 1 << 26)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    matrix = torch.randn(width, width, device=device, dtype=dtype)
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu)
    data = os.urandom(FILE_BYTES)  # random, because a file system may compress data

    def write() -> None:
        with (scratch / f"rank-{dist.get_rank()}").open("wb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())

    copy = partial(torch.empty_like(host, device=device).copy_, host)
    return [
        Probe("matrix products, TFLOP/s", 2e-12 * width**3, partial(torch.mm, matrix, matrix)),
        Probe("copies to the device, GB/s", 1e-9 * size, copy),
        Probe("write to --output-dir, GB/s", 1e-9 * FILE_BYTES, write),
    ]


def all_reduce_probes(device: torch.device) -> list[Probe]:
    """Return Probes of all-reduces of fp32 in this rank's node and across nodes. FSDP's all-gather
    and reduce-scatter of a unit together send as much as one."""
    in_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    shape = (dist.get_world_size() // in_node, in_node)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("across", "in node"))
    largest = 1 << (24 if device.type == "cpu" else 28)
    probes = []
    for where in ("in node", "across"):
        count = mesh[where].size()
        if count == 1:
            continue
        for size in (1 << 16, 1 << 22, largest):
            tensor = torch.zeros(size // 4, device=device)
            call = partial(dist.all_reduce, tensor, group=mesh.get_group(where))
            name = f"all-reduce {where}, {size / 1e6:.3g} MB, GB/s"
            probes.append(Probe(name, 2e-9 * size * (count - 1) / count, call))
    return probes


def sample(call: Callable[[], object], count: int, timeout: timedelta) -> float:
    """Return the mean seconds of `count` calls, which all ranks start together. Raise RuntimeError
    with the ranks that do not arrive within `timeout`."""
    dist.monitored_barrier(ranks.cpu_group, timeout, wait_all_ranks=True)
    dist.barrier(group=ranks.cpu_group)  # starts all ranks at the same time
    start = time.perf_counter()
    for _ in range(count):
        call()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return (time.perf_counter() - start) / count


def measure(probe: Probe, timeout: timedelta) -> list[float]:
    """Return the median seconds of a call on each rank."""
    sample(probe.call, 1, timeout)  # the first call may take longer
    longest = max(ranks.on_every_rank(sample, probe.call, 1, timeout))
    count = max(1, int(SAMPLE_SECONDS / longest))
    own = statistics.median(sample(probe.call, count, timeout) for _ in range(ROUNDS))
    return ranks.on_every_rank(float, own)


def find_slow(seconds: list[float]) -> dict[int, float]:
    """Return the slow ranks, with their time divided by the median of the others', so that the
    slower of two is found."""
    tolerance = TOLERANCE if torch.accelerator.is_available() else CPU_TOLERANCE
    slow = {}
    for rank, own in enumerate(seconds):
        others = seconds[:rank] + seconds[rank + 1 :]
        ratio = own / statistics.median(others or [own])
        if ratio > tolerance:
            slow[rank] = ratio
    return slow


if __name__ == "__main__":
    ranks.run(preflight, parse_args())
