"""Check in a minute that every device is present and none is slower than the others.

    torchrun --nnodes 1 --nproc_per_node 8 tools/preflight.py --model-name llama-2-7b
    sbatch --nodes 4 launch.slurm tools/preflight.py --output-dir /shared/run

Times matrix products, copies to the device, all-reduces of three sizes within a node and across
nodes, and writes to --output-dir. Prints what limits a step of the model
at these speeds. Exits with 1 if a device is missing or a rank is slow or silent.

A rank is slow if, in two measurements, its median time is above that of the others by more than 10%
(on a CPU, by more than its double). The bandwidth of an all-reduce is that of nccl-tests: the bytes
that a rank sends in a ring, per second.
"""

import os
import shutil
import socket
import statistics
import sys
import time
import warnings
from collections import defaultdict
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

Medians = dict[str, dict[int, float]]  # seconds per call, by probe and rank


@dataclass
class Args:
    """The flags."""

    model_name: str = "llama-2-7b"  # as for memory_estimator.py
    output_dir: Path = Path("output")  # its disk is measured
    gpus_per_node: int = 0  # expected number of GPUs; 0: that of Slurm, or of the processes
    timeout_seconds: float = 30.0  # limit for one measurement


class Place(NamedTuple):
    """A rank's host and its node."""

    host: str
    node: int
    local_rank: int


class Probe(NamedTuple):
    """A function call whose speed is measured. All ranks list the same probes in the same order."""

    name: str
    unit: str
    work: float  # of a call: work / seconds is in `unit`
    call: Callable[[], object]


def parse_args(argv: list[str] | None = None) -> Args:
    """Return the flags of `argv` (default: sys.argv), or exit with a message."""
    return tyro.cli(Args, args=argv, description="\n\n".join(__doc__.split("\n\n")[:2]))


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
    places = ranks.on_every_rank(own_place)
    flags = memory_estimator.Args(model_name=args.model_name)
    model = ranks.on_rank_zero(memory_estimator.read_model, flags)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    faults = check_disk(args, scratch, places)
    probes = [*local_probes(device, dtype), disk_probe(scratch)]
    unit = dtype.itemsize * model.parameters // len(model.units)
    for where, group in new_groups(places).items():
        for size in (1 << 16, 1 << 22, unit if device.type != "cpu" else 1 << 24):
            probes.append(all_reduce_probe(where, group, size, device))
    timeout = timedelta(seconds=args.timeout_seconds)
    medians = measure(probes, timeout)
    suspects = find_slow(medians)
    again = measure([probe for probe in probes if suspects[probe.name]], timeout)
    faults += describe_slow(suspects, find_slow(again), places)
    if dist.get_rank() == 0:
        speeds = print_table(probes, medians | again, places)
        seconds = step_seconds(speeds, model, dtype.itemsize)
        parts = [f"{name} {value:.3g} s" for name, value in seconds.items()]
        print(f"\nA step of {args.model_name} is bound by {max(seconds, key=seconds.get)}.")
        print(f"It takes at least: {', '.join(parts)}.")
        print(*(faults or ["All ranks are fine."]), sep="\n", flush=True)
    dist.barrier(group=ranks.cpu_group)
    return faults


def count_devices(args: Args) -> None:
    """Raise Problem if this node has fewer devices than expected."""
    count = torch.accelerator.device_count()
    expected = args.gpus_per_node or int(os.environ.get("SLURM_GPUS_ON_NODE", 0))
    if count:
        expected = max(expected, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if count < expected:
        raise ranks.Problem(f"{socket.gethostname()} has {count} devices instead of {expected}.")


def own_place() -> Place:
    """Return the Place of this rank."""
    numbers = [int(os.environ.get(name, 0)) for name in ("GROUP_RANK", "LOCAL_RANK")]
    return Place(socket.gethostname().split(".")[0], *numbers)


def new_groups(places: list[Place]) -> dict[str, dist.ProcessGroup]:
    """Return this rank's new process groups by name: `in node`, `across` nodes; none for 1 rank."""
    groups = {}
    for where, key in (("in node", "node"), ("across", "local_rank")):
        members = defaultdict(list)
        for rank, place in enumerate(places):
            members[getattr(place, key)].append(rank)
        if len(members) < len(places):
            groups[where], _ = dist.new_subgroups_by_enumeration(list(members.values()))
    return groups


def local_probes(device: torch.device, dtype: torch.dtype) -> list[Probe]:
    """Return Probes of matrix products and of copies to the device."""
    on_gpu = device.type != "cpu"
    width, size = (8192, 1 << 28) if on_gpu else (1024, 1 << 26)
    matrix = torch.randn(width, width, device=device, dtype=dtype)
    product = partial(
        torch.mm,
        matrix,
        matrix,
        out=torch.empty_like(matrix),
    )
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


def check_disk(args: Args, scratch: Path, places: list[Place]) -> list[str]:
    """Write a file on the first node; return a message for each node that does not see it. Raise
    Problem on all ranks if a node cannot write to --output-dir."""
    place = places[dist.get_rank()]
    flag = f"--output-dir {args.output_dir} on"

    def write() -> None:
        try:
            scratch.mkdir(parents=True, exist_ok=True)
            (scratch / f"node-{place.node}").touch()
        except OSError as error:
            problem = f"{flag} {place.host} cannot be written: {error.strerror}."
            raise ranks.Problem(problem) from None

    ranks.on_every_rank(write)
    sees_first = ranks.on_every_rank((scratch / "node-0").exists)
    unshared = {p.host for p, sees in zip(places, sees_first, strict=True) if not sees}
    return [f"{flag} {host} differs from the first node's directory." for host in sorted(unshared)]


def disk_probe(scratch: Path) -> Probe:
    """Return the Probe of the disk: each rank writes a file, as in a save."""
    path = scratch / f"rank-{dist.get_rank()}"
    data = os.urandom(FILE_BYTES)  # random, because a file system may compress data

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())

    return Probe("write to --output-dir", "GB/s", 1e-9 * FILE_BYTES, write)


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


def measure(probes: list[Probe], timeout: timedelta) -> Medians:
    """Run the probes; return the median seconds of a call on all ranks."""
    medians: Medians = {}
    for probe in probes:
        sample(probe.call, 1, timeout)  # the first call may take longer
        longest = max(ranks.on_every_rank(sample, probe.call, 1, timeout))
        count = max(1, int(SAMPLE_SECONDS / longest))
        own = statistics.median(sample(probe.call, count, timeout) for _ in range(ROUNDS))
        medians[probe.name] = dict(enumerate(ranks.on_every_rank(float, own)))
    return medians


def find_slow(medians: Medians) -> Medians:
    """Return by probe the slow ranks with their time divided by the median of the others', so that
    the slower of two is found."""
    tolerance = TOLERANCE if torch.accelerator.is_available() else CPU_TOLERANCE
    slow: Medians = {}
    for name, seconds in medians.items():
        slow[name] = {}
        for rank, own in seconds.items():
            others = [value for other, value in seconds.items() if other != rank]
            ratio = own / statistics.median(others or [own])
            if ratio > tolerance:
                slow[name][rank] = ratio
    return slow


def describe_slow(first: Medians, second: Medians, places: list[Place]) -> list[str]:
    """Return a message for each rank that is slow in both measurements."""
    parts = defaultdict(list)
    for name, ratios in second.items():
        for rank, ratio in ratios.items():
            if rank in first[name]:
                parts[rank].append(f"{name} {ratio:.2f} times")
    return [
        f"rank {rank} on {places[rank].host} is slow: {', '.join(texts)} the others' time."
        for rank, texts in sorted(parts.items())
    ]


def print_table(probes: list[Probe], medians: Medians, places: list[Place]) -> dict[str, float]:
    """Print the median and the slowest value of each probe, and the slowest rank. Return the
    slowest values."""
    print(f"{'':36}{'unit':>8}{'median':>9}{'slowest':>9}  slowest rank")
    speeds = {}
    for probe in probes:
        seconds = medians[probe.name]
        slowest = max(seconds, key=seconds.get)
        speeds[probe.name] = probe.work / seconds[slowest]
        median = probe.work / statistics.median(seconds.values())
        line = f"{probe.name:36}{probe.unit:>8}{median:>9.4g}{speeds[probe.name]:>9.4g}"
        print(f"{line}  {slowest} on {places[slowest].host}")
    return speeds


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
