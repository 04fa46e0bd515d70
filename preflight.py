"""Check before a run, in about a minute, that all devices are there and none is slower than the
others.

    torchrun --nnodes 1 --nproc_per_node 8 preflight.py --model-name llama-2-7b
    sbatch --nodes 4 launch.slurm preflight.py --model-name llama-2-70b --output-dir /shared/run

Counts the devices of each node. Times matrix products, copies in memory and to and from the host,
FSDP's three collectives within a node and across, and the disk of --output-dir. Says what a step of
the model is bound by at the speeds that it found. Ends with exit code 1 if something is wrong.

A rank is out of line if it takes longer than the median of the others, by more than 10% and by more
than three times its own spread: the median distance of its samples from their median, relative to
that. Samples are taken in rounds, of all measurements in turn, by all ranks at once. A rank that
looks out of line is measured again, and named if it is so twice. On a CPU, the time in which a
process waits for a core is left out: it shows how many processes there are, not how fast one is.
Copies in a CPU's memory may take 20% longer.

A collective is as slow as its slowest rank, so groups are compared: nodes with each other, and
across nodes the groups of equal local rank. A group is out of line if it is so in all three
collectives of one size, because what slows a host or a link slows them all; a disk, if it is so in
writing and reading. Bandwidth is the bus bandwidth of nccl-tests: the bytes that a rank sends in a
ring, per second. These are (k - 1) / k of the tensor on k ranks, twice that in an all-reduce.

A rank that does not answer within --timeout-seconds is named. All have ten minutes to start, and
to join the process group; after --timeout-seconds a line names the ranks that are awaited. Torchrun
itself waits for a node that does not start at all.
"""

import concurrent.futures
import contextlib
import json
import math
import os
import shutil
import signal
import socket
import statistics
import sys
import time
import warnings
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import memory_estimator
import policies
from runtime import arguments, ranks
from runtime.run import launch

# torch 2.13 renames these collectives; 2.11 does not know the new names.
warnings.filterwarnings("ignore", message=r"`torch.distributed.\w+_tensor` is deprecated")

ROUNDS = 5
TOLERANCE = 0.1  # by which a rank may take longer than the others
CPU_COPY_TOLERANCE = 0.2  # cores share caches and memory: healthy processes differed by 17%
SAMPLE_SECONDS = 0.25  # length of a sample: a shorter call is repeated
LARGE_SECONDS = 0.3  # limit of a large transfer: fewer bytes are sent if it would take longer
SMALL_BYTES = 1 << 16
TRIAL_BYTES = 1 << 24  # sent, or written, to find out how many bytes a sample can have
FILE_BYTES = 1 << 27
BLOCK_BYTES = 1 << 22  # written to or read from a file at once
START_SECONDS = 600.0  # limit of the ranks' start, and of the join: imports can be slow
POLL_SECONDS = 0.5
ANSWER_SECONDS = 5  # limit of an answer to the roll call
ROLL_CALL = "roll call"  # the store's key that asks all ranks to answer
MATMUL = "matrix products"
STRATEGY = "full_shard"
BOUNDS = {"compute": "compute", "intranode": "traffic in node", "internode": "traffic across"}

Members = tuple[int, ...]  # ranks that are timed together: one, or those of a group
Seconds = dict[Members, list[float]]  # seconds of a call in each round


@dataclass
class Place:
    """A rank's host and node, and the devices that it sees there."""

    host: str
    node: int
    local_rank: int
    processes: int  # how many the node has
    devices: int
    device: str  # the first one's name


@dataclass
class Probe:
    """A call that is timed. All ranks have the same probes in the same order."""

    name: str
    unit: str
    work: float  # of a call: work / seconds is in `unit`; 0 if the seconds are shown, as ms
    members: Members  # the ranks that make this call together; none if this rank is not in it
    call: Callable[[], object]
    kind: str = ""  # members are out of line only if they are so in all probes of this kind
    tolerance: float = TOLERANCE

    def value(self, seconds: float) -> float:
        """Return what is shown for a call of so many seconds, in `unit`."""
        if self.work:
            return self.work / seconds
        return 1e3 * seconds


class Watch:
    """A watch over this rank's work in another thread, which may be in a collective that waits for
    an absent rank. All ranks begin the same steps in the same order.

    `limit` is that of a step in seconds, `start_limit` that of the start and of the join.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, limit: float, start_limit: float
    ) -> None:
        self.store = store.clone()  # a call that waits keeps other threads off its store
        self.rank = rank
        self.world_size = world_size
        self.usual_limit = limit
        self.start_limit = start_limit
        self.count = 0
        self.begin("start", start_limit)

    def begin(self, step: str, limit: float | None = None) -> None:
        """Begin a step of the work, which may last `limit` seconds (None: as long as most)."""
        self.count += 1
        self.step = step
        self.limit = limit or self.usual_limit
        self.has_named = False
        self.since = time.monotonic()
        self.store.set(f"begun {self.count}/{self.rank}", json.dumps(step))

    def follow(self, work: Future) -> tuple[int, str]:
        """Wait for the work, which returns what is wrong with the machines.

        Returns the rank that must say it, and the sentence; empty if nothing is wrong.
        """
        while not work.done():
            concurrent.futures.wait([work], timeout=POLL_SECONDS)
            lasted = time.monotonic() - self.since
            if not work.done() and (lasted > self.limit or self.store.check([ROLL_CALL])):
                return self.call_roll(work)
            if lasted > self.usual_limit and not self.has_named:
                self.name_awaited()
        if work.exception() is not None:
            return self.call_roll(work)
        return 0, "; ".join(work.result())

    def name_awaited(self) -> None:
        """Print who has not begun this step, on the lowest rank of those who have."""
        self.has_named = True
        begun = self.read(f"begun {self.count}")
        if self.rank != min(begun, default=None):
            return
        absent = [rank for rank in range(self.world_size) if rank not in begun]
        places = {rank: Place(**found) for rank, found in self.read("place").items()}
        who = name_ranks(absent, places) or "all ranks"
        print(f"waiting for {who} in: {self.step}", file=sys.stderr, flush=True)

    def call_roll(self, work: Future) -> tuple[int, str]:
        """Have all ranks say where they are: whoever sees ROLL_CALL in the store comes here too.

        A rank that is stopped, dead or cut off does not. The lowest that answers speaks. Returns
        as `follow` does.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it when a rank has died
        self.store.set(ROLL_CALL, "")
        concurrent.futures.wait([work], timeout=POLL_SECONDS)  # it may be about to fail here too
        answer = {"count": self.count, "step": self.step, "error": ""}
        if work.done():
            answer["error"] = describe_error(work.exception())
        keys = [f"answer/{rank}" for rank in range(self.world_size)]
        self.store.set(keys[self.rank], json.dumps(answer))
        with contextlib.suppress(dist.DistStoreError):
            self.store.wait(keys, timedelta(seconds=ANSWER_SECONDS))
        speaker = next(rank for rank, key in enumerate(keys) if self.store.check([key]))
        if speaker != self.rank:
            return speaker, "said by another rank"
        places = {rank: Place(**found) for rank, found in self.read("place").items()}
        return speaker, blame(self.read("answer"), places, self.world_size)

    def read(self, name: str) -> dict[int, Any]:
        """Return, by rank, what the ranks have put into the store under this name."""
        keys = {rank: f"{name}/{rank}" for rank in range(self.world_size)}
        there = {rank: key for rank, key in keys.items() if self.store.check([key])}
        return {rank: json.loads(self.store.get(key)) for rank, key in there.items()}


def preflight(args: Namespace, start_limit: float = START_SECONDS) -> int:
    """Measure and print on all ranks; return the exit code.

    `start_limit` is that of the start, and of the join of the process group, in seconds.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(1))  # `finally` below cleans --output-dir
    speaker = rank = int(os.environ.get("RANK", 0))
    try:
        meeting = ranks.connect(timedelta(seconds=args.timeout_seconds))
        watch = Watch(**meeting, limit=args.timeout_seconds, start_limit=start_limit)
        work = ThreadPoolExecutor(1).submit(check_machines, args, meeting, watch)
        speaker, sentence = watch.follow(work)
    except dist.DistError as error:
        sentence = f"this rank and the first node's torchrun do not reach each other: {error}"
    finally:
        shutil.rmtree(scratch(args), ignore_errors=True)
    if not sentence:
        return 0
    if rank == speaker:
        ranks.exit_with(sentence)
    time.sleep(ranks.GRACE_SECONDS if speaker else 2)  # torchrun ends all ranks after the first
    return 1


def parse_args(argv: list[str] | None = None) -> Namespace:
    """Read the command line; what is wrong is said at once."""
    parser = arguments.Parser(__doc__)
    add = parser.add_argument
    add("--model-name", default="llama-2-7b", help="built-in size, hub id, directory or "
        "config.json, as for memory_estimator.py")  # fmt: skip
    add("--output-dir", default="output", help="whose disk is measured; nothing is left there")
    add("--gpus-per-node", type=int, default=0, help="that there should be (0: as Slurm gave, or "
        "one for each process)")  # fmt: skip
    add("--timeout-seconds", type=float, default=30.0, help="limit of a step on each rank, once "
        "all have joined")  # fmt: skip
    add("--json", **arguments.OFF, help="print a JSON object, with the samples of all ranks")
    args = parser.parse_args(argv)
    limits = {"gpus_per_node": (0, arguments.ANY), "timeout_seconds": (1, arguments.ANY)}
    problems = arguments.out_of_range(args, limits)
    if problems:
        parser.error("; ".join(problems))
    return args


def describe_error(error: BaseException | None) -> str:
    """Return an error's sentence, with its type before it unless it is a user's mistake."""
    if isinstance(error, (OSError, ValueError)):
        return str(error)
    return f"{type(error).__name__}: {error}"


def blame(answers: dict[int, dict[str, Any]], places: dict[int, Place], world_size: int) -> str:
    """Return a sentence: which ranks do not answer, or failed, or are behind; or which step hangs.

    An answer has the number of steps that the rank has begun, the last one, and its error.
    """
    step = answers[min(answers)]["step"]
    silent = [rank for rank in range(world_size) if rank not in answers]
    if silent:
        return f"no answer from {name_ranks(silent, places)}, for which others wait in: {step}"
    errors = {rank: answer["error"] for rank, answer in answers.items() if answer["error"]}
    if len(errors) == world_size and len(set(errors.values())) == 1:
        return errors[0]
    if errors:
        named = [f"{name_ranks([rank], places)}: {error}" for rank, error in errors.items()]
        return "; ".join(named)
    least = min(answer["count"] for answer in answers.values())
    behind = [rank for rank, answer in answers.items() if answer["count"] == least]
    if len(behind) < world_size:
        return f"{name_ranks(behind, places)} did not get beyond: {answers[behind[0]]['step']}"
    return f"all ranks answer, but none got beyond: {step}"


def name_ranks(some: list[int], places: dict[int, Place]) -> str:
    """Return the names of some ranks, with their hosts. A rank that never came gets the host of
    another rank on its node, as torchrun numbers a node's ranks in a row."""
    names = []
    for rank in some:
        hosts = [
            p.host for other, p in places.items() if other // p.processes == rank // p.processes
        ]
        names.append(f"rank {rank} on {hosts[0] if hosts else 'an unknown host'}")
    return ", ".join(names)


def check_machines(args: Namespace, meeting: dict[str, Any], watch: Watch) -> list[str]:
    """Count, measure, and print on rank 0; return what is wrong, a sentence each. All ranks.

    Raises ValueError if nothing can be measured: too few devices, no such model, no disk.
    """
    start = time.monotonic()
    places = introduce(**meeting)
    wrong, notes = count_devices(args, places)
    if wrong:
        raise ValueError("; ".join(wrong))
    watch.begin("joining the process group", watch.start_limit)
    device = setup(meeting)
    precision = "bf16" if ranks.has_bf16() else "fp32"
    watch.begin("the model's config")
    model, machine, unit = ranks.on_rank_zero(read_model, args, places, precision)
    notes.append(f"unit: an FSDP unit of {args.model_name}, {unit / 1e6:,.1f} MB in {precision}")
    watch.begin("joining the groups in node and across")
    probes = local_probes(device, policies.PRECISIONS[precision].param_dtype)
    for where, group in new_groups(places).items():
        watch.begin(f"first collectives {where}")
        wrong += wrong_results(where, group, device, places)
        size = sendable_bytes(unit, group, device)
        if size < unit:
            notes.append(f"unit {where}: {size / 1e6:,.1f} MB of it, for the sake of time")
        probes += collective_probes(where, group, size, device)
    watch.begin("first files in --output-dir")
    disk = Disk(args, places)
    wrong += disk.open()
    notes.append(f"{disk.flag} has room for {disk.free / 1e9:,.1f} GB")
    probes += disk.probes()
    results, slow = measure_twice(probes, device, watch)
    wrong += describe_slow(slow, places)
    watch.begin("the report")
    if dist.get_rank() == 0:
        rows = [describe_row(probe, results[probe.name], places) for probe in probes]
        report = {
            "places": [asdict(place) for place in places],
            "measurements": rows,
            "notes": notes,
            "bound": bound(model, machine, {row["name"]: row["slowest"] for row in rows}),
            "wrong": wrong,
            "seconds": time.monotonic() - start,
        }
        print_report(args, report)
    dist.barrier(group=ranks.cpu_group())
    return wrong


def introduce(store: dist.Store, rank: int, world_size: int) -> list[Place]:
    """Return each rank's place. Needs no process group, which would need the devices."""
    place = Place(
        host=socket.gethostname().split(".")[0],
        node=int(os.environ.get("GROUP_RANK", 0)),
        local_rank=int(os.environ.get("LOCAL_RANK", 0)),
        processes=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        devices=ranks.device_count(),
        device=ranks.device_name(torch.device(ranks.accelerator() or "cpu")),
    )
    store.set(f"place/{rank}", json.dumps(asdict(place)))
    keys = [f"place/{other}" for other in range(world_size)]
    store.wait(keys, timedelta(days=1))  # the watch limits the time
    return [Place(**json.loads(found)) for found in store.multi_get(keys)]


def count_devices(args: Namespace, places: list[Place]) -> tuple[list[str], list[str]]:
    """Return what is wrong with the number of nodes and devices, and what is worth a note."""
    nodes = {place.node: place for place in places}
    wrong, notes = [], []
    in_job = int(os.environ.get("SLURM_NNODES", len(nodes)))
    if len(nodes) != in_job:
        wrong.append(f"{len(nodes)} nodes take part, of {in_job} in the Slurm job")
    asked = args.gpus_per_node or int(os.environ.get("SLURM_GPUS_ON_NODE", 0))
    for number, place in nodes.items():
        name = f"node {number} ({place.host})"
        needed = asked
        if any(other.devices for other in places):
            needed = max(asked, place.processes)
        if place.devices < needed:
            wrong.append(f"{name} has {place.devices} devices, and {needed} were asked for")
        if place.devices > place.processes:
            notes.append(f"{name} has {place.devices} devices for {place.processes} processes")
        if place.device != places[0].device:
            notes.append(f"{name} has {place.device}, the first node {places[0].device}")
    return wrong, notes


def setup(meeting: dict[str, Any]) -> torch.device:
    """Join the process group, of nccl on GPUs and gloo on CPUs; return the device."""
    device = ranks.local_device()
    limit = timedelta(hours=1)  # the watch has a lower one
    with ranks.joining(limit):
        dist.init_process_group(
            dist.get_default_backend_for_device(device),
            device_id=None if device.type == "cpu" else device,
            **meeting,
        )
        ranks.join_cpu_group(limit)
    return device


def read_model(
    args: Namespace, places: list[Place], precision: str
) -> tuple[memory_estimator.Model, Namespace, int]:
    """Return the model and the machines as the estimator sees them, and the bytes of the median
    FSDP unit, which is a block. Rank 0 alone."""
    processes = places[0].processes
    flags = ["--model-name", args.model_name, "--precision", precision]
    flags += ["--nodes", str(len(places) // processes), "--gpus-per-node", str(processes)]
    machine = memory_estimator.parse_args(flags)
    model = memory_estimator.read_model(machine)
    _, _, (_, *units) = memory_estimator.layout(model, machine, STRATEGY)
    return model, machine, statistics.median_high(unit.gathered for unit in units)


def new_groups(places: list[Place]) -> dict[str, dist.ProcessGroup]:
    """Make this rank's group in its node, and that of the same local rank in all nodes, if there
    is more than one rank in it."""
    groups = {}
    for where, key in (("in node", "node"), ("across", "local_rank")):
        members = defaultdict(list)
        for rank, place in enumerate(places):
            members[getattr(place, key)].append(rank)
        if len(members) < len(places):
            groups[where], _ = dist.new_subgroups_by_enumeration(list(members.values()))
    return groups


def of_all_ranks(seconds: float, choose: dist.ReduceOp) -> float:
    """Return the largest or the smallest of all ranks' values, as the reduction says."""
    chosen = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(chosen, choose, group=ranks.cpu_group())
    return chosen.item()


def affordable_bytes(wanted: int, trial_seconds: float) -> int:
    """Return how many bytes take LARGE_SECONDS, if TRIAL_BYTES took `trial_seconds`, at most those
    that are wanted; the same on all ranks."""
    slowest = of_all_ranks(trial_seconds, dist.ReduceOp.MAX)
    return int(min(wanted, TRIAL_BYTES * LARGE_SECONDS / slowest))


def local_probes(device: torch.device, dtype: torch.dtype) -> list[Probe]:
    """Return probes of matrix products, of copies in the device's memory, and from and to the
    host's."""
    on_gpu = device.type != "cpu"
    width, size = (8192, 1 << 28) if on_gpu else (1024, 1 << 26)
    matrix = torch.randn(width, width, device=device, dtype=dtype)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    multiply = partial(torch.mm, matrix, matrix, out=torch.empty_like(matrix))
    me = (dist.get_rank(),)
    copy = Probe("memory copy", "GB/s", 2e-9 * size, me, partial(target.copy_, source))
    probes = [Probe(MATMUL, "TFLOP/s", 2e-12 * width**3, me, multiply), copy]
    if not on_gpu:
        copy.tolerance = CPU_COPY_TOLERANCE
    else:
        host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        for name, call in (
            ("host to device", partial(target.copy_, host)),
            ("device to host", partial(host.copy_, source)),
        ):
            probes.append(Probe(name, "GB/s", 1e-9 * size, me, call))
    return probes


def new_buffers(size: int, group: dist.ProcessGroup, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a tensor of `size` bytes and a rank's shard of it, in fp32: the sums are exact."""
    count = dist.get_world_size(group)
    shard = torch.zeros(size // 4 // count, device=device)
    return shard.new_zeros(count * shard.numel()), shard


def collectives(
    whole: Tensor, shard: Tensor, group: dist.ProcessGroup
) -> dict[str, Callable[[], object]]:
    """Return calls of FSDP's three collectives, by name."""
    return {
        "all-reduce": partial(dist.all_reduce, whole, group=group),
        "all-gather": partial(dist.all_gather_into_tensor, whole, shard, group=group),
        "reduce-scatter": partial(dist.reduce_scatter_tensor, shard, whole, group=group),
    }


def wrong_results(
    where: str, group: dist.ProcessGroup, device: torch.device, places: list[Place]
) -> list[str]:
    """Return a sentence for each collective whose result is not what it should be."""
    whole, shard = new_buffers(TRIAL_BYTES, group, device)
    count, mine = dist.get_world_size(group), dist.get_rank(group)
    chunks = whole.view(count, -1)  # one for each rank
    numbers = torch.arange(count, device=device, dtype=torch.float32)[:, None]
    sums = count * numbers + count * (count + 1) / 2
    expected = {
        "all-reduce": (chunks, sums),
        "all-gather": (chunks, -numbers - 1),
        "reduce-scatter": (shard, sums[mine]),
    }
    wrong = []
    for name, call in collectives(whole, shard, group).items():
        chunks.copy_(numbers + mine + 1)
        shard.fill_(-mine - 1)
        call()
        result, right = expected[name]
        broken = ranks.ranks_where(not torch.equal(result, right.expand_as(result)))
        if broken:
            named = name_ranks(broken, dict(enumerate(places)))
            wrong.append(f"{name} {where} gives wrong numbers on {named}")
    return wrong


def sendable_bytes(wanted: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """Return how many bytes an all-gather moves in LARGE_SECONDS, at most those wanted."""
    whole, shard = new_buffers(TRIAL_BYTES, group, device)
    gather = partial(dist.all_gather_into_tensor, whole, shard, group=group)
    return affordable_bytes(wanted, sample(gather, 1, device))


def collective_probes(
    where: str, group: dist.ProcessGroup, unit: int, device: torch.device
) -> list[Probe]:
    """Return probes of each collective: latency of 64 kB, and bandwidth of `unit` bytes."""
    count = dist.get_world_size(group)
    members = tuple(dist.get_process_group_ranks(group))
    probes = []
    for name, call in collectives(*new_buffers(SMALL_BYTES, group, device), group).items():
        kind = f"{where}, 64 kB"
        probes.append(Probe(f"{name} {kind}", "ms", 0, members, call, kind))
    for name, call in collectives(*new_buffers(unit, group, device), group).items():
        sent = unit * (count - 1) / count
        if name == "all-reduce":
            sent *= 2
        kind = f"{where}, unit"
        probes.append(Probe(f"{name} {kind}", "GB/s", 1e-9 * sent, members, call, kind))
    return probes


def scratch(args: Namespace) -> Path:
    """Return the directory of the files. A run that was killed leaves it to the next."""
    return Path(args.output_dir) / "tmp-preflight"


class Disk:
    """The disk of --output-dir, where each node's first rank writes a file and reads the next's."""

    def __init__(self, args: Namespace, places: list[Place]) -> None:
        self.nodes = len({place.node for place in places})
        self.flag = f"--output-dir {args.output_dir}"
        self.place = places[dist.get_rank()]
        self.directory = scratch(args)
        self.file = self.directory / f"node-{self.place.node}"
        self.next_file = self.directory / f"node-{(self.place.node + 1) % self.nodes}"
        self.block = os.urandom(BLOCK_BYTES)  # random: no file system compresses it
        self.blocks = TRIAL_BYTES // BLOCK_BYTES

    def on_first_ranks(self, function: Callable[[], Any]) -> list[Any]:
        """Run `function` on each node's first rank, return all results; raises ValueError on all
        ranks."""

        def run() -> Any:
            if self.place.local_rank != 0:
                return None
            try:
                return function()
            except OSError as error:
                raise ValueError(f"{self.flag} on {self.place.host}: {error.strerror}") from None

        return [result for result in ranks.on_every_rank(run) if result is not None]

    def open(self) -> list[str]:
        """Choose the size of the files; return what is wrong, a sentence each."""
        self.on_first_ranks(partial(shutil.rmtree, self.directory, ignore_errors=True))
        self.on_first_ranks(partial(self.directory.mkdir, parents=True, exist_ok=True))
        self.free = min(self.on_first_ranks(lambda: shutil.disk_usage(self.directory).free))
        start = time.monotonic()
        self.on_first_ranks(self.write)
        wanted = min(FILE_BYTES, self.free // 4 // self.nodes)
        self.blocks = 1 + affordable_bytes(wanted, time.monotonic() - start) // BLOCK_BYTES
        seen = (self.directory / "node-0").exists
        wrong = []
        for host, is_seen in self.on_first_ranks(lambda: (self.place.host, seen())):
            if not is_seen:
                wrong.append(f"{self.flag} on {host} is not that of the first node")
        if not self.next_file.exists():
            self.next_file = self.file
        return wrong

    def write(self) -> None:
        """Write this node's file, down to the disk."""
        with self.file.open("wb", buffering=0) as file:
            for _ in range(self.blocks):
                file.write(self.block)
            os.fsync(file.fileno())

    def read(self) -> None:
        """Read the next node's file from the disk: its pages in this machine's memory are dropped
        first."""
        block = bytearray(BLOCK_BYTES)
        with self.next_file.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while file.readinto(block):
                pass

    def probes(self) -> list[Probe]:
        """Return probes of a write and a read."""
        me: Members = ()
        if self.place.local_rank == 0:
            me = (dist.get_rank(),)
        work = 1e-9 * self.blocks * BLOCK_BYTES
        calls = {"write to --output-dir": self.write, "read from --output-dir": self.read}
        return [Probe(name, "GB/s", work, me, call, "disk") for name, call in calls.items()]


def sample(call: Callable[[], object], count: int, device: torch.device) -> float:
    """Return the seconds of a call, the mean of `count`. All ranks begin at once."""
    dist.barrier(group=ranks.cpu_group())
    start = time.perf_counter() - seconds_without_core(device)
    for _ in range(count):
        call()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return (time.perf_counter() - seconds_without_core(device) - start) / count


def seconds_without_core(device: torch.device) -> float:
    """Return for how long this thread was ready and waited for a core; 0 on an accelerator, as the
    thread does not compute itself."""
    file = Path("/proc/thread-self/schedstat")
    if device.type != "cpu" or not file.exists():
        return 0.0
    return 1e-9 * int(file.read_text().split()[1])


def count_calls(probe: Probe, seconds: float) -> int:
    """Return how many calls make a sample, if one takes this rank so long; the same on all ranks.

    A sample lasts SAMPLE_SECONDS on the fastest rank, or on the slowest if all ranks of a group
    make the call together.
    """
    if len(probe.members) > 1:
        seconds = of_all_ranks(seconds, dist.ReduceOp.MAX)
    else:
        seconds = of_all_ranks(seconds if probe.members else math.inf, dist.ReduceOp.MIN)
    return max(1, int(SAMPLE_SECONDS / seconds))


def measure(probes: list[Probe], device: torch.device, watch: Watch) -> dict[str, Seconds]:
    """Return the seconds of a call, by name of the probe; for a group, those of its slowest rank in
    each round."""
    calls = [probe.call if probe.members else lambda: None for probe in probes]
    counts = []
    for probe, call in zip(probes, calls, strict=True):
        watch.begin(probe.name)
        sample(call, 1, device)  # the first call may take longer
        counts.append(count_calls(probe, sample(call, 1, device)))
    mine: list[list[float]] = [[] for _ in probes]
    for _ in range(ROUNDS):
        for probe, call, count, samples in zip(probes, calls, counts, mine, strict=True):
            watch.begin(probe.name)
            samples.append(sample(call, count, device))
    results: dict[str, Seconds] = {probe.name: {} for probe in probes}
    members = [probe.members for probe in probes]
    for samples_of_rank in ranks.on_every_rank(lambda: list(zip(members, mine, strict=True))):
        for probe, (who, samples) in zip(probes, samples_of_rank, strict=True):
            if who:
                known = results[probe.name].get(who, samples)
                results[probe.name][who] = list(map(max, known, samples))
    return results


def spread(samples: list[float]) -> float:
    """Return the median distance of samples from their median, relative to it."""
    median = statistics.median(samples)
    return statistics.median(abs(sample - median) for sample in samples) / median


def out_of_line(seconds: Seconds, tolerance: float = TOLERANCE) -> dict[Members, float]:
    """Return those who take longer than the others, and how many times the others' median.

    The median is of the others alone, so that of two the slow one is named.
    """
    medians = {members: statistics.median(samples) for members, samples in seconds.items()}
    found = {}
    for members, median in medians.items():
        others = [medians[other] for other in medians if other != members]
        if not others:
            continue
        ratio = median / statistics.median(others)
        if ratio > 1 + max(tolerance, 3 * spread(seconds[members])):
            found[members] = ratio
    return found


def find_slow(probes: list[Probe], results: dict[str, Seconds]) -> dict[str, dict[Members, float]]:
    """Return who is out of line, by name of the probe, if all probes of its kind say so."""
    found = {}
    for probe in probes:
        found[probe.name] = out_of_line(results[probe.name], probe.tolerance)
    slow = {}
    for probe in probes:
        alike = [other.name for other in probes if probe.kind and other.kind == probe.kind]
        slow[probe.name] = {
            members: ratio
            for members, ratio in found[probe.name].items()
            if all(members in found[name] for name in alike)
        }
    return slow


def measure_twice(
    probes: list[Probe], device: torch.device, watch: Watch
) -> tuple[dict[str, Seconds], dict[str, dict[Members, float]]]:
    """Return the seconds by name of the probe, and who is out of line in both measurements. The
    second one repeats only the probes in which somebody was."""
    results = measure(probes, device, watch)
    suspects = find_slow(probes, results)
    doubtful = [probe for probe in probes if suspects[probe.name]]
    again = measure(doubtful, device, watch)
    slow = {}
    for name, still in find_slow(doubtful, again).items():
        slow[name] = {members: still[members] for members in suspects[name] if members in still}
    return results | again, slow


def name_members(members: Members, places: list[Place]) -> str:
    """Return the name of a rank or a node with its host, or of the same local rank in all nodes."""
    place = places[members[0]]
    if len(members) == 1:
        return f"rank {members[0]} on {place.host}"
    if place.node == places[members[1]].node:
        return f"node {place.node} on {place.host}"
    return f"rank {place.local_rank} of each node"


def describe_slow(slow: dict[str, dict[Members, float]], places: list[Place]) -> list[str]:
    """Return a sentence for each rank or group that is out of line."""
    found = defaultdict(list)
    for name, ratios in slow.items():
        for members, ratio in ratios.items():
            found[members].append(f"{name} {ratio:.2f} times")
    return [
        f"{name_members(members, places)} is out of line: {', '.join(times)} the others' time"
        for members, times in sorted(found.items())
    ]


def describe_row(probe: Probe, seconds: Seconds, places: list[Place]) -> dict[str, Any]:
    """Return the row of a probe in the table and in --json, in its unit."""
    medians = {members: statistics.median(samples) for members, samples in seconds.items()}
    last = max(medians, key=medians.get)
    everyone = []
    for members, samples in sorted(seconds.items()):
        found = {"ranks": members, "value": probe.value(medians[members])}
        everyone.append(found | {"spread": spread(samples), "seconds": samples})
    return {
        "name": probe.name,
        "unit": probe.unit,
        "median": probe.value(statistics.median(medians.values())),
        "slowest": probe.value(medians[last]),
        "spread": spread(seconds[last]),
        "where": name_members(last, places),
        "all": everyone,
    }


def bound(
    model: memory_estimator.Model, machine: Namespace, speeds: dict[str, float]
) -> dict[str, Any]:
    """Return the estimator's traffic and least seconds of a step at the slowest ranks' speeds.

    full_shard gathers twice for each reduce-scatter. All ranks of a node send across at once.
    """
    measured = {"peak_tflops": speeds[MATMUL]}
    for flag, where, senders in (
        ("intranode_gbps", "in node", 1),
        ("internode_gbps", "across", machine.gpus_per_node),
    ):
        gather = speeds.get(f"all-gather {where}, unit")
        if gather is not None:
            scatter = speeds[f"reduce-scatter {where}, unit"]
            measured[flag] = 8 * senders * 3 / (2 / gather + 1 / scatter)
    machine = Namespace(**vars(machine) | measured)
    step = memory_estimator.traffic(model, machine, STRATEGY, model.checkpointing)
    return measured | step | {"tokens": machine.batch_size * machine.seq_length}


def figure(value: float) -> str:
    """Return a number with three digits or more, as text."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def print_report(args: Namespace, report: dict[str, Any]) -> None:
    """Print the table and what is wrong, or all as JSON. Rank 0 alone."""
    if args.json:
        print(json.dumps(report), flush=True)
        return
    print(f"{'':30}{'unit':>8}{'median':>8}{'slowest':>8}{'spread':>7}  slowest is")
    for row in report["measurements"]:
        numbers = f"{figure(row['median']):>8}{figure(row['slowest']):>8}{row['spread']:>7.0%}"
        print(f"{row['name']:30}{row['unit']:>8}{numbers}  {row['where']}")
    step = report["bound"]
    parts = [f"{name} {figure(step[f'{key}_seconds'])} s" for key, name in BOUNDS.items()]
    print(
        *report["notes"],
        f"a step of {args.model_name}, {step['tokens']:,} tokens for each process under "
        f"{STRATEGY}, is bound by {BOUNDS[step['bound_by']]}:",
        f"at least {', '.join(parts)}",
        *(report["wrong"] or ["nothing is out of line"]),
        sep="\n",
        flush=True,
    )


if __name__ == "__main__":
    launch(preflight, parse_args())
