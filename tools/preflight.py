"""Check in a minute that every device is present and none is slower than the others.

    torchrun --nnodes 1 --nproc_per_node 8 tools/preflight.py --model-name llama-2-7b
    sbatch --nodes 4 launch.slurm tools/preflight.py --output-dir /shared/run

Times matrix products, copies in device memory and to and from the host, FSDP's three collectives
within a node and across nodes, and the disk of --output-dir. Prints what limits a step of the model
at these speeds. Exits with 1 if a device is missing or a rank is slow or silent.

A rank is slow if it takes longer than the median of the others, by more than 10% (20% on a CPU) and
by more than three times its own spread, the median distance of its samples from their median. A
group of ranks is slow if all three collectives of one size are. Slow ranks are measured twice. On a
CPU, time spent waiting for a core is not counted. Bandwidth is the bus bandwidth of nccl-tests: the
bytes that a rank sends in a ring, per second, (k - 1) / k of the tensor on k ranks, and twice that
in an all-reduce.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import sys
import time
import warnings
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any directory

import torch
import torch.distributed as dist
from torch import Tensor

import policies
from core import ranks
from tools import memory_estimator

# torch 2.13 renames these collectives; 2.11 does not have the new names.
warnings.filterwarnings("ignore", message=r"`torch.distributed.\w+_tensor` is deprecated")

JOIN_MINUTES = 10.0  # imports can be slow
ROUNDS = 5
TOLERANCE = 0.1  # relative time above the others that counts as slow
CPU_TOLERANCE = 0.2  # cores share caches and memory: healthy processes differed by 17%
SAMPLE_SECONDS = 0.25  # shorter calls are repeated within a sample
FILE_BYTES = 1 << 26
MATMUL = "matrix products"
STRATEGY = "full_shard"
BOUNDS = {"compute": "compute", "intranode": "traffic in node", "internode": "traffic across"}

Members = tuple[int, ...]  # the ranks that one measurement belongs to
Seconds = dict[Members, list[float]]  # seconds per call, one for each round


@dataclass
class Place:
    """A rank's host, its node, and the number of devices that it sees."""

    host: str
    node: int
    local_rank: int
    processes: int  # per node
    devices: int


@dataclass
class Probe:
    """A function call whose speed is measured. All ranks list the same probes in the same order."""

    name: str
    unit: str
    work: float  # per call: work / seconds is in `unit`; 0 if the time itself is shown, in ms
    members: Members  # ranks that make this call together; empty if this rank takes no part
    call: Callable[[], object]
    kind: str = ""  # members are slow only if they are slow in all probes of this kind

    def value(self, seconds: float) -> float:
        """Return the figure to show, in `unit`, for a call that takes `seconds`."""
        if self.work:
            return self.work / seconds
        return 1e3 * seconds


def parse_args(argv: list[str] | None = None) -> Namespace:
    """Return the flags of `argv` (default: sys.argv), or exit with a message."""
    parser = memory_estimator.Parser(
        description="\n\n".join(__doc__.split("\n\n")[:2]), allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--model-name", default="llama-2-7b", help="as for memory_estimator.py")
    add("--output-dir", type=Path, default=Path("output"), help="its disk is measured")
    add("--gpus-per-node", type=int, default=0,
        help="expected number of GPUs (default: from Slurm, or one per process)")  # fmt: skip
    add("--timeout-seconds", type=float, default=30.0, help="limit for one measurement")
    return parser.parse_args(argv)


def preflight(args: Namespace) -> None:
    """Check the machines and print a report; exit with code 1 after a fault. Call on all ranks."""
    try:
        faults = check_machines(args)
    except RuntimeError as error:
        faults = [str(error)]
    finally:
        shutil.rmtree(scratch_directory(args), ignore_errors=True)
    if faults:
        ranks.exit_with(" ".join(faults))


def check_machines(args: Namespace) -> list[str]:
    """Check devices, disk and speed, and print a report; return a message for each fault.

    Call on all ranks. Raise Problem if a device is missing, the model is unknown or the disk cannot
    be used, and RuntimeError with the ranks that stop responding.
    """
    places = exchange_info()  # first, as the process group needs the devices
    faults, notes = count_devices(args, places)
    if faults:
        raise ranks.Problem(" ".join(faults))
    device = ranks.setup(JOIN_MINUTES)
    precision = policies.compute_precision("auto")
    model, machine, unit = ranks.on_rank_zero(read_model, args, places, precision)
    notes.append(f"unit: an FSDP unit of {args.model_name}, {unit / 1e6:,.1f} MB in {precision}")
    probes = local_probes(device, policies.PRECISIONS[precision].param_dtype)
    if device.type == "cpu":
        unit = min(unit, 1 << 24)  # gloo is slow: enough to measure a bandwidth
    for where, group in new_groups(places).items():
        probes += collective_probes(where, group, unit, device)
    faults = check_disk(args, places)
    probes += disk_probes(args, places)
    results, slow = measure_twice(probes, timedelta(seconds=args.timeout_seconds))
    faults += describe_slow(slow, places)
    if dist.get_rank() == 0:
        print_table(probes, results, places)
        step = bound(model, machine, slowest_speeds(probes, results))
        parts = [f"{name} {step[f'{key}_seconds']:.3g} s" for key, name in BOUNDS.items()]
        print(f"a step of {args.model_name} ({step['tokens']:,} tokens per process, {STRATEGY})")
        print(f"is bound by {BOUNDS[step['bound_by']]}: at least {', '.join(parts)}")
        print(*notes, *(faults or ["All ranks are fine."]), sep="\n", flush=True)
    dist.barrier(group=ranks.cpu_group)
    return faults


def exchange_info() -> list[Place]:
    """Return the Places of all ranks, in order of rank. Call it before `ranks.setup`."""
    place = Place(
        host=socket.gethostname().split(".")[0],
        node=int(os.environ.get("GROUP_RANK", 0)),
        local_rank=int(os.environ.get("LOCAL_RANK", 0)),
        processes=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        devices=torch.accelerator.device_count(),
    )
    if ranks.environment_size() == 1:
        return [place]
    timeout = timedelta(minutes=JOIN_MINUTES)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    store = dist.PrefixStore(f"preflight-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    store.set(f"place/{rank}", json.dumps(asdict(place)))
    keys = [f"place/{other}" for other in range(world_size)]
    return [Place(**json.loads(text)) for text in store.multi_get(keys)]


def count_devices(args: Namespace, places: list[Place]) -> tuple[list[str], list[str]]:
    """Return two lists of messages: missing nodes or devices (faults), unused devices (notes)."""
    nodes = {place.node: place for place in places}
    faults, notes = [], []
    in_job = int(os.environ.get("SLURM_NNODES", len(nodes)))
    if len(nodes) != in_job:
        faults.append(f"only {len(nodes)} of the Slurm job's {in_job} nodes joined.")
    expected = args.gpus_per_node or int(os.environ.get("SLURM_GPUS_ON_NODE", 0))
    for number, place in nodes.items():
        name = f"node {number} ({place.host})"
        needed = expected
        if any(other.devices for other in places):
            needed = max(expected, place.processes)
        if place.devices < needed:
            faults.append(f"{name} has {place.devices} devices instead of {needed}.")
        if place.devices > place.processes:
            notes.append(f"{name} has {place.devices} devices for {place.processes} processes.")
    return faults, notes


def read_model(
    args: Namespace, places: list[Place], precision: str
) -> tuple[memory_estimator.Model, Namespace, int]:
    """Return memory_estimator's Model and flags for this job, and its median FSDP unit's bytes."""
    processes = places[0].processes
    flags = ["--model-name", args.model_name, "--precision", precision]
    flags += ["--nodes", str(len(places) // processes), "--gpus-per-node", str(processes)]
    machine = memory_estimator.parse_args(flags)
    model = memory_estimator.read_model(machine)
    _, _, (_, *units) = memory_estimator.layout(model, machine, STRATEGY)
    return model, machine, statistics.median_high(unit.gathered for unit in units)


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


def sample(call: Callable[[], object], count: int, timeout: timedelta) -> float:
    """Return the mean seconds of `count` calls, which all ranks start together.

    Raise RuntimeError with the ranks that do not arrive within `timeout`.
    """
    dist.monitored_barrier(ranks.cpu_group, timeout, wait_all_ranks=True)
    dist.barrier(group=ranks.cpu_group)  # starts all ranks at the same time
    start = time.perf_counter() - seconds_without_core()
    for _ in range(count):
        call()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return (time.perf_counter() - seconds_without_core() - start) / count


def seconds_without_core() -> float:
    """Return the seconds that this thread has waited for a core; 0 with an accelerator."""
    file = Path("/proc/thread-self/schedstat")
    if torch.accelerator.is_available() or not file.exists():
        return 0.0
    return 1e-9 * int(file.read_text().split()[1])


def local_probes(device: torch.device, dtype: torch.dtype) -> list[Probe]:
    """Return Probes of matrix products and of copies in device memory and to and from the host."""
    on_gpu = device.type != "cpu"
    width, size = (8192, 1 << 28) if on_gpu else (1024, 1 << 26)
    matrix = torch.randn(width, width, device=device, dtype=dtype)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    multiply = partial(torch.mm, matrix, matrix, out=torch.empty_like(matrix))
    this_rank = (dist.get_rank(),)
    probes = [
        Probe(MATMUL, "TFLOP/s", 2e-12 * width**3, this_rank, multiply),
        Probe("memory copy", "GB/s", 2e-9 * size, this_rank, partial(target.copy_, source)),
    ]
    if not on_gpu:
        return probes
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    to_device, to_host = partial(target.copy_, host), partial(host.copy_, source)
    probes.append(Probe("host to device", "GB/s", 1e-9 * size, this_rank, to_device))
    probes.append(Probe("device to host", "GB/s", 1e-9 * size, this_rank, to_host))
    return probes


def collectives(
    size: int, group: dist.ProcessGroup, device: torch.device
) -> dict[str, Callable[[], object]]:
    """Return, by name, functions that run FSDP's three collectives on `size` bytes of fp32."""
    count = dist.get_world_size(group)
    shard = torch.zeros(size // 4 // count, device=device)
    whole: Tensor = shard.new_zeros(count * shard.numel())
    return {
        "all-reduce": partial(dist.all_reduce, whole, group=group),
        "all-gather": partial(dist.all_gather_into_tensor, whole, shard, group=group),
        "reduce-scatter": partial(dist.reduce_scatter_tensor, shard, whole, group=group),
    }


def collective_probes(
    where: str, group: dist.ProcessGroup, unit: int, device: torch.device
) -> list[Probe]:
    """Return two Probes per collective: latency with 64 kB and bandwidth with `unit` bytes."""
    count = dist.get_world_size(group)
    members = tuple(dist.get_process_group_ranks(group))
    probes = []
    for name, call in collectives(1 << 16, group, device).items():
        kind = f"{where}, 64 kB"
        probes.append(Probe(f"{name} {kind}", "ms", 0, members, call, kind))
    for name, call in collectives(unit, group, device).items():
        sent = unit * (count - 1) / count
        if name == "all-reduce":
            sent *= 2
        kind = f"{where}, unit"
        probes.append(Probe(f"{name} {kind}", "GB/s", 1e-9 * sent, members, call, kind))
    return probes


def scratch_directory(args: Namespace) -> Path:
    """Return the directory of the test files. If a run is killed, the next run deletes it."""
    return args.output_dir / "tmp-preflight"


def check_disk(args: Namespace, places: list[Place]) -> list[str]:
    """Write a file on the first node; return a message for each node that does not see it.

    Raise Problem on all ranks if a node cannot write to --output-dir.
    """
    directory, place = scratch_directory(args), places[dist.get_rank()]
    flag = f"--output-dir {args.output_dir} on"

    def write() -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if place.local_rank == 0:
                (directory / f"node-{place.node}").touch()
        except OSError as error:
            problem = f"{flag} {place.host} cannot be written: {error.strerror}."
            raise ranks.Problem(problem) from None

    ranks.on_every_rank(write)
    sees_first = ranks.on_every_rank((directory / "node-0").exists)
    unshared = {p.host for p, sees in zip(places, sees_first, strict=True) if not sees}
    return [f"{flag} {host} differs from the first node's directory." for host in sorted(unshared)]


def disk_probes(args: Namespace, places: list[Place]) -> list[Probe]:
    """Return Probes of the disk: the first rank of each node writes a file and reads it back."""
    place = places[dist.get_rank()]
    path = scratch_directory(args) / f"node-{place.node}"
    data = bytearray(os.urandom(FILE_BYTES))  # random, because a file system may compress data

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())

    def read() -> None:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # not from the cache
            file.readinto(data)

    members = (dist.get_rank(),) if place.local_rank == 0 else ()
    calls = {"write to --output-dir": write, "read from --output-dir": read}
    return [
        Probe(name, "GB/s", 1e-9 * FILE_BYTES, members, call, "disk")
        for name, call in calls.items()
    ]


def measure(probes: list[Probe], timeout: timedelta) -> dict[str, Seconds]:
    """Run the probes; return by probe and ranks each round's seconds per call of the slowest."""
    calls = [probe.call if probe.members else lambda: None for probe in probes]
    counts = []
    for call in calls:
        sample(call, 1, timeout)  # the first call may take longer
        slowest = torch.tensor(sample(call, 1, timeout))
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=ranks.cpu_group)
        counts.append(max(1, int(SAMPLE_SECONDS / slowest.item())))
    timings: list[list[float]] = [[] for _ in probes]
    for _ in range(ROUNDS):
        for call, count, samples in zip(calls, counts, timings, strict=True):
            samples.append(sample(call, count, timeout))
    results: dict[str, Seconds] = {probe.name: {} for probe in probes}
    members = [probe.members for probe in probes]
    for samples_of_rank in ranks.on_every_rank(lambda: list(zip(members, timings, strict=True))):
        for probe, (group, samples) in zip(probes, samples_of_rank, strict=True):
            if group:
                slowest = results[probe.name].get(group, samples)
                results[probe.name][group] = list(map(max, slowest, samples))
    return results


def spread(samples: list[float]) -> float:
    """Return the median absolute deviation of the samples, divided by their median."""
    median = statistics.median(samples)
    return statistics.median(abs(sample - median) for sample in samples) / median


def find_outliers(seconds: Seconds) -> dict[Members, float]:
    """Return the groups of ranks slower than the others, with their time divided by the others'.

    Each group's median is compared with the others' median, so the slower of two is detected.
    """
    tolerance = TOLERANCE if torch.accelerator.is_available() else CPU_TOLERANCE
    medians = {members: statistics.median(samples) for members, samples in seconds.items()}
    outliers = {}
    for members, median in medians.items():
        others = [medians[other] for other in medians if other != members]
        if not others:
            continue
        ratio = median / statistics.median(others)
        if ratio > 1 + max(tolerance, 3 * spread(seconds[members])):
            outliers[members] = ratio
    return outliers


def find_slow(probes: list[Probe], results: dict[str, Seconds]) -> dict[str, dict[Members, float]]:
    """Return by probe the ranks that are slow in all probes of its kind, with their ratios."""
    outliers = {p.name: find_outliers(results[p.name]) for p in probes}
    slow = {}
    for probe in probes:
        same_kind = [other.name for other in probes if probe.kind and other.kind == probe.kind]
        slow[probe.name] = {
            members: ratio
            for members, ratio in outliers[probe.name].items()
            if all(members in outliers[name] for name in same_kind)
        }
    return slow


def measure_twice(
    probes: list[Probe], timeout: timedelta
) -> tuple[dict[str, Seconds], dict[str, dict[Members, float]]]:
    """Return the seconds by probe, and by probe the ranks that are slow in two measurements, with
    their time divided by the others'. The second repeats only probes with slow ranks."""
    results = measure(probes, timeout)
    suspects = find_slow(probes, results)
    suspect_probes = [probe for probe in probes if suspects[probe.name]]
    again = measure(suspect_probes, timeout)
    slow = {}
    for name, ratios in find_slow(suspect_probes, again).items():
        slow[name] = {members: ratios[members] for members in suspects[name] if members in ratios}
    return results | again, slow


def name_members(members: Members, places: list[Place]) -> str:
    """Return a name for a tuple of ranks: a rank or node and its host, or a rank of each node."""
    place = places[members[0]]
    if len(members) == 1:
        return f"rank {members[0]} on {place.host}"
    if place.node == places[members[1]].node:
        return f"node {place.node} on {place.host}"
    return f"rank {place.local_rank} of each node"


def describe_slow(slow: dict[str, dict[Members, float]], places: list[Place]) -> list[str]:
    """Return a message for each slow rank or group."""
    times = defaultdict(list)
    for name, ratios in slow.items():
        for members, ratio in ratios.items():
            times[members].append(f"{name} {ratio:.2f} times")
    return [
        f"{name_members(members, places)} is slow: {', '.join(ratios)} the others' time."
        for members, ratios in sorted(times.items())
    ]


def slowest_speeds(probes: list[Probe], results: dict[str, Seconds]) -> dict[str, float]:
    """Return by probe the value of its slowest rank or group, in the probe's unit."""
    slowest = {name: max(map(statistics.median, times.values())) for name, times in results.items()}
    return {probe.name: probe.value(slowest[probe.name]) for probe in probes}


def bound(
    model: memory_estimator.Model, machine: Namespace, speeds: dict[str, float]
) -> dict[str, Any]:
    """Return a dict: memory_estimator's bytes and minimum seconds of a step at `speeds` (by probe),
    its tokens per process, and the measured flags: peak_tflops, and *_gbps if there are links.

    full_shard all-gathers twice per reduce-scatter. All ranks of a node send to others at once."""
    measured = {"peak_tflops": speeds[MATMUL]}
    for field, where, senders in (
        ("intranode_gbps", "in node", 1),
        ("internode_gbps", "across", machine.gpus_per_node),
    ):
        gather = speeds.get(f"all-gather {where}, unit")
        if gather is not None:
            scatter = speeds[f"reduce-scatter {where}, unit"]
            measured[field] = 8 * senders * 3 / (2 / gather + 1 / scatter)
    machine = memory_estimator.changed(machine, **measured)
    step = memory_estimator.traffic(model, machine, STRATEGY, model.checkpointing)
    return measured | step | {"tokens": machine.batch_size * machine.seq_length}


def print_table(probes: list[Probe], results: dict[str, Seconds], places: list[Place]) -> None:
    """Print a table: median, slowest value, spread and slowest rank or group of each probe."""
    print(f"{'':30}{'unit':>8}{'median':>8}{'slowest':>8}{'spread':>7}  slowest is")
    for probe in probes:
        seconds = results[probe.name]
        medians = {members: statistics.median(samples) for members, samples in seconds.items()}
        slowest = max(medians, key=medians.get)
        median = probe.value(statistics.median(medians.values()))
        worst = probe.value(medians[slowest])
        numbers = f"{median:>8.4g}{worst:>8.4g}{spread(seconds[slowest]):>7.0%}"
        print(f"{probe.name:30}{probe.unit:>8}{numbers}  {name_members(slowest, places)}")


if __name__ == "__main__":
    ranks.run(preflight, parse_args())
