"""Check in a minute that every device is present and none is slower than the others.

    torchrun --nnodes 1 --nproc_per_node 8 tools/preflight.py --model-name llama-2-7b
    sbatch --nodes 4 launch.slurm tools/preflight.py --output-dir /shared/run

Times matrix products, copies to the device, all-reduces of three sizes within a node and across
nodes, and writes to and reads from --output-dir. Prints what limits a step of the model at these
speeds. Exits with 1 if a device is missing or a rank is slow or silent.

A rank is slow if its time, the better of two medians, is more than 1.1 times that of the others (on
a CPU 2 times). The bandwidth of an all-reduce is that of nccl-tests: the bytes that a rank sends in
a ring, per second.
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
from tools import memory_estimator

# torch 2.13 renames these collectives; 2.11 does not have the new names.
warnings.filterwarnings("ignore", message=r"`torch.distributed.\w+_tensor` is deprecated")

# Limits and sizes of the measurements.
JOIN_MINUTES = 10.0  # imports can be slow
ROUNDS = 5
TOLERANCE = 1.1  # ratio to the time of the others above which a rank is slow
CPU_TOLERANCE = 2.0  # processes share cores and memory
SAMPLE_SECONDS = 0.25  # shorter calls are repeated within a sample
FILE_BYTES = 1 << 26
PRODUCTS = "matrix products"
ALL_REDUCE = "all-reduce"


@dataclass
class Args:
    """The flags."""

    model_name: str = "llama-2-7b"  # as for memory_estimator.py
    output_dir: Path = Path("output")  # its disk is measured
    gpus_per_node: int = 0  # expected number of GPUs; 0: that of Slurm, or of the processes
    timeout_seconds: float = 30.0  # limit for one measurement


class Probe(NamedTuple):
    """A function call whose speed is measured. All ranks have the same probes in the same order."""

    name: str
    unit: str
    work: float  # of a call: work / seconds is in `unit`
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
    """Check devices, disk and speed, and print a report; return a message for each fault. Raise
    Problem if a device is missing, the model is unknown or the disk cannot be used, and
    RuntimeError with the ranks that stop responding. Call on all ranks."""
    count_devices(args)  # first, as the process group needs them
    device = ranks.setup(JOIN_MINUTES)
    hosts = ranks.on_every_rank(host_name)
    flags = memory_estimator.Args(model_name=args.model_name)
    model = ranks.on_rank_zero(memory_estimator.read_model, flags)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    faults = check_disk(args, scratch, hosts)
    probes = [*local_probes(device, dtype), *disk_probes(scratch)]
    unit = dtype.itemsize * model.parameters // len(model.units)
    largest = unit if device.type != "cpu" else 1 << 24
    for where, group in new_groups(device).items():
        for size in (1 << 16, 1 << 22, largest):
            probes.append(all_reduce_probe(where, group, size, device))
    ranks.print0(f"{'':36}{'unit':>8}{'median':>9}{'slowest':>9}  slowest rank")
    speeds = {}
    for probe in probes:
        seconds = measure_again(probe, timedelta(seconds=args.timeout_seconds))
        speeds[probe.name] = probe.work / max(seconds)
        faults += describe_slow(probe.name, seconds, hosts)
        print_row(probe, seconds, hosts)
    parts = step_seconds(speeds, model, dtype.itemsize)
    texts = [f"{name} {value:.3g} s" for name, value in parts.items()]
    ranks.print0(f"\nA step of {args.model_name} is bound by {max(parts, key=parts.get)}.")
    ranks.print0(f"It takes at least: {', '.join(texts)}.")
    ranks.print0("\n".join(faults or ["All ranks are fine."]))
    dist.barrier(group=ranks.cpu_group)
    return faults


def host_name() -> str:
    """Return the name of this machine without its domain."""
    return socket.gethostname().partition(".")[0]


def count_devices(args: Args) -> None:
    """Raise Problem if this node has fewer devices than expected."""
    count = torch.accelerator.device_count()
    expected = args.gpus_per_node or int(os.environ.get("SLURM_GPUS_ON_NODE", 0))
    if count:
        expected = max(expected, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if count < expected:
        raise ranks.Problem(f"{socket.gethostname()} has {count} devices instead of {expected}.")


def new_groups(device: torch.device) -> dict[str, dist.ProcessGroup]:
    """Return this rank's new process groups by name: `in node`, `across` nodes; none for 1 rank."""
    in_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    shape = (dist.get_world_size() // in_node, in_node)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("across", "in node"))
    groups = {}
    for where in ("in node", "across"):
        if mesh[where].size() > 1:
            groups[where] = mesh.get_group(where)
    return groups


def local_probes(device: torch.device, dtype: torch.dtype) -> list[Probe]:
    """Return Probes of matrix products and of copies to the device."""
    on_gpu = device.type != "cpu"
    width, size = (8192, 1 << 28) if on_gpu else (1024, 1 << 26)
    matrix = torch.randn(width, width, device=device, dtype=dtype)
    product = partial(torch.mm, matrix, matrix)
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu)
    copy = partial(torch.empty_like(host, device=device).copy_, host)
    return [
        Probe(PRODUCTS, "TFLOP/s", 2e-12 * width**3, product),
        Probe("copies to the device", "GB/s", 1e-9 * size, copy),
    ]


def all_reduce_probe(
    where: str, group: dist.ProcessGroup, size: int, device: torch.device
) -> Probe:
    """Return the Probe of an all-reduce of `size` bytes of fp32. FSDP's all-gather and
    reduce-scatter together send as much."""
    count = dist.get_world_size(group)
    tensor = torch.zeros(size // 4, device=device)
    call = partial(dist.all_reduce, tensor, group=group)
    name = f"{ALL_REDUCE} {where}, {size / 1e6:.3g} MB"
    return Probe(name, "GB/s", 2e-9 * size * (count - 1) / count, call)


def check_disk(args: Args, scratch: Path, hosts: list[str]) -> list[str]:
    """Write a file on each rank; return a message for each node that does not see rank 0's. Raise
    Problem on all ranks if one cannot write to --output-dir."""
    rank = dist.get_rank()
    flag = f"--output-dir {args.output_dir} on"

    def write() -> None:
        try:
            scratch.mkdir(parents=True, exist_ok=True)
            (scratch / f"rank-{rank}").touch()
        except OSError as error:
            problem = f"{flag} {hosts[rank]} cannot be written: {error.strerror}."
            raise ranks.Problem(problem) from None

    ranks.on_every_rank(write)
    sees_first = ranks.on_every_rank((scratch / "rank-0").exists)
    unshared = {host for host, sees in zip(hosts, sees_first, strict=True) if not sees}
    return [f"{flag} {host} differs from the first node's directory." for host in sorted(unshared)]


def disk_probes(scratch: Path) -> list[Probe]:
    """Return Probes of the disk: each rank writes a file, as in a save, and reads it."""
    path = scratch / f"rank-{dist.get_rank()}"
    data = os.urandom(FILE_BYTES)  # random, because a file system may compress data

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())

    def read() -> None:
        with path.open("rb", buffering=0) as file:
            # Drop the pages that this machine keeps in memory.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.read()

    gigabytes = 1e-9 * FILE_BYTES
    return [
        Probe("write to --output-dir", "GB/s", gigabytes, write),
        Probe("read from --output-dir", "GB/s", gigabytes, read),
    ]


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


def measure_again(probe: Probe, timeout: timedelta) -> list[float]:
    """Return what `measure` does, but if a rank is slow the better of two measurements."""
    seconds = measure(probe, timeout)
    if find_slow(seconds):
        seconds = list(map(min, seconds, measure(probe, timeout)))
    return seconds


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


def describe_slow(name: str, seconds: list[float], hosts: list[str]) -> list[str]:
    """Return a message for each slow rank in a measurement."""
    messages = []
    for rank, ratio in find_slow(seconds).items():
        who = f"rank {rank} on {hosts[rank]}"
        messages.append(f"{who} is slow: {name}, {ratio:.2f} times the others' time.")
    return messages


def print_row(probe: Probe, seconds: list[float], hosts: list[str]) -> None:
    """Print the median and the slowest speed, and the slowest rank."""
    speeds = [probe.work / own for own in seconds]
    slowest = speeds.index(min(speeds))
    line = f"{probe.name:36}{probe.unit:>8}{statistics.median(speeds):>9.4g}{min(speeds):>9.4g}"
    ranks.print0(f"{line}  {slowest} on {hosts[slowest]}")


def step_seconds(
    speeds: dict[str, float], model: memory_estimator.Model, itemsize: int
) -> dict[str, float]:
    """Return the least seconds of the parts of a step of one micro-batch under full_shard with
    recomputation: four forward passes, and the traffic of weights, twice, and of gradients."""
    seconds = {"compute": 4e-12 * model.flops / speeds[PRODUCTS]}
    for name, speed in speeds.items():  # the largest size of a place is its last
        if name.startswith(ALL_REDUCE):
            place, _, _ = name.removeprefix(ALL_REDUCE).partition(",")
            seconds[f"traffic{place}"] = 3e-9 * itemsize * model.parameters / speed
    return seconds


if __name__ == "__main__":
    ranks.run(preflight, parse_args())
