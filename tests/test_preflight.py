"""preflight.py: who is named and who is not, what it measures, and what it leaves."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from chaos import workers
from conftest import ROOT, errors_said, launch
from slurm_cluster import free_ports, wait_until

import memory_estimator
import preflight
from preflight import Place

HOST = socket.gethostname().split(".")[0]
TINY = ("--model-name", "tiny", "--output-dir")
PLACES = [Place(f"host{rank // 2}", rank // 2, rank % 2, 2, 2, "H100") for rank in range(4)]


def begin(
    processes: int,
    *flags: object,
    torchrun: tuple = ("--standalone",),
    script: str = "preflight.py",
) -> subprocess.Popen:
    """A launch that goes on in the background."""
    start = [sys.executable, "-m", "torch.distributed.run", *torchrun]
    start += ["--nproc-per-node", str(processes), str(ROOT / script)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*start, *map(str, flags)], cwd=ROOT, **pipes)


def worker(process: subprocess.Popen, processes: int, rank: int) -> int:
    """Process id of a rank, as soon as all ranks are there."""
    wait_until(lambda: len(workers(process.pid)) == processes, 60, str)
    return workers(process.pid)[rank]


def begun(output: Path) -> None:
    """Wait until it has begun to measure."""
    wait_until((output / "tmp-preflight").is_dir, 100, str)


def slow_down(process: subprocess.Popen, pid: int) -> None:
    """Let a worker run for a third of the time, in short turns, until the launch ends."""
    with contextlib.suppress(ProcessLookupError):
        while process.poll() is None:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.02)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.01)


def check_slow_rank_is_named(processes: int, rank: int, output: Path) -> None:
    """It and no other, in what is printed and in the error; exit code 1, and no file is left."""
    process = begin(processes, *TINY, output, "--json")
    pid = worker(process, processes, rank)
    begun(output)
    threading.Thread(target=slow_down, args=(process, pid), daemon=True).start()
    printed, error = process.communicate(timeout=300)
    assert process.returncode == 1
    (sentence,) = json.loads(printed)["wrong"]
    assert sentence.startswith(f"rank {rank} on {HOST} is out of line: ")
    assert "matrix products" in sentence and "memory copy" in sentence
    assert errors_said(error) == [f"error: {sentence}"]
    assert not list(output.iterdir())


@pytest.mark.slow
def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    """Of two, it runs for a third of the time."""
    check_slow_rank_is_named(2, 1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("processes,rank", [(2, 0), (4, 0), (4, 1), (4, 2), (4, 3)])
def test_any_slow_rank_is_named(processes: int, rank: int, tmp_path: Path) -> None:
    """Rank 0 too, and where processes share cores."""
    check_slow_rank_is_named(processes, rank, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_nobody_is_named_in_health(processes: int, tmp_path: Path) -> None:
    """Twenty times in all, with two processes for each core in half of them."""
    for _ in range(10):
        result = launch(processes, "preflight.py", *TINY, tmp_path, "--json")
        report = json.loads(result.stdout)
        assert report["wrong"] == [] and report["seconds"] < 60
        assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("comes", [False, True])
def test_a_stopped_rank_is_named(rank: int, comes: bool, tmp_path: Path) -> None:
    """One that never comes, and one that stops in the middle; in one sentence, within the time-out
    and that of the roll call. Rank 1 speaks for rank 0, after the grace for that one."""
    flags = (15, -1, 0, *TINY, tmp_path, "--timeout-seconds", 5)
    process = begin(2, *flags, script="tests/late.py")
    pid = worker(process, 2, rank)
    if comes:
        begun(tmp_path)
    os.kill(pid, signal.SIGSTOP)
    others = set(workers(process.pid)) - {pid}
    start = time.monotonic()
    wait_until(lambda: others - set(workers(process.pid)), 60, str)
    assert time.monotonic() - start < 35 + preflight.ranks.GRACE_SECONDS * (rank == 0)
    os.kill(pid, signal.SIGKILL)  # or torchrun waits for it
    printed, error = process.communicate(timeout=60)
    assert process.returncode == 1 and not printed
    (sentence,) = errors_said(error)
    assert sentence.startswith(f"error: no answer from rank {rank} on {HOST}, ")
    assert not list(tmp_path.glob("*"))


@pytest.mark.slow
def test_a_late_rank_is_waited_for(tmp_path: Path) -> None:
    """It starts later than --timeout-seconds after the other, which says so and goes on."""
    command = (100, 1, 25, *TINY, tmp_path, "--json", "--timeout-seconds", 15)
    result = launch(2, "tests/late.py", *command)
    assert json.loads(result.stdout)["wrong"] == []
    said = [line for line in result.stderr.splitlines() if line.startswith("waiting for")]
    assert said == [f"waiting for rank 1 on {HOST} in: start"]


@pytest.mark.parametrize("comes", [True, False])
def test_the_start_has_a_limit_of_its_own(
    comes: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """A rank that starts later than a step may last is awaited, and named in a line; one that does
    not come is named as silent."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(preflight, "ANSWER_SECONDS", 0.1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    store = dist.HashStore()

    def start(rank: int) -> tuple[preflight.Watch, Future]:
        watch = preflight.Watch(store, rank, 2, limit=0.6, start_limit=3.0)

        def work() -> list[str]:
            preflight.introduce(store, rank, 2)
            watch.begin("what follows")
            time.sleep(0.3)
            return []

        return watch, ThreadPoolExecutor(1).submit(work)

    watch, work = start(0)
    timer = threading.Timer(1.5, start, [1])
    if comes:
        timer.start()
    speaker, sentence = watch.follow(work)
    assert speaker == 0
    said = capfd.readouterr().err  # on a loaded machine it may wait once more
    assert said.startswith(f"waiting for rank 1 on {HOST} in: start\n")
    if comes:
        assert not sentence
    else:
        assert sentence == f"no answer from rank 1 on {HOST}, for which others wait in: start"
        start(1)  # or its thread would be waited for


@pytest.mark.slow
def test_two_nodes(tmp_path: Path) -> None:
    """Two launches: groups within and across are measured, and both end alike. Where --output-dir
    is not shared, that is said."""
    (port,) = free_ports(1)
    rendezvous = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "1")
    rendezvous += ("--rdzv-endpoint", f"localhost:{port}")
    for outputs in (("shared", "shared"), ("one", "other")):
        nodes = [
            begin(2, *TINY, tmp_path / output, "--json", torchrun=rendezvous) for output in outputs
        ]
        ends = [node.communicate(timeout=300) for node in nodes]
        printed, _ = max(ends)
        report = json.loads(printed)
        names = {row["name"]: len(row["all"]) for row in report["measurements"]}
        assert names["all-gather in node, unit"] == names["reduce-scatter across, 64 kB"] == 2
        assert names["matrix products"] == 4
        assert report["bound"]["intranode_seconds"] > 0 < report["bound"]["internode_seconds"]
        wrong = []
        if outputs[0] != outputs[1]:
            (sentence,) = report["wrong"]
            assert sentence.endswith(f"on {HOST} is not that of the first node")
            wrong = [sentence]
        assert report["wrong"] == wrong
        assert {node.returncode for node in nodes} == {len(wrong)}
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.slow
def test_a_large_model_in_a_minute(tmp_path: Path) -> None:
    """Of 7B parameters, on two processes; the table has no line that a terminal breaks."""
    start = time.monotonic()
    result = launch(2, "preflight.py", "--output-dir", tmp_path)
    assert time.monotonic() - start < 60
    assert "unit: an FSDP unit of llama-2-7b, 809.5 MB in fp32" in result.stdout
    table = [line for line in result.stdout.splitlines() if "%" in line]
    assert len(table) == 10 and max(map(len, table)) <= 80
    assert result.stdout.splitlines()[-1] == "nothing is out of line"


@pytest.mark.slow
def test_a_killed_run_leaves_little(tmp_path: Path) -> None:
    """SIGTERM: nothing. SIGKILL: one directory, which the next run removes."""
    for number, left in ((signal.SIGTERM, []), (signal.SIGKILL, ["tmp-preflight"])):
        command = [sys.executable, ROOT / "preflight.py", *TINY, tmp_path]
        process = subprocess.Popen(list(map(str, command)))
        begun(tmp_path)
        process.send_signal(number)
        assert process.wait(timeout=60) != 0
        assert [path.name for path in tmp_path.iterdir()] == left
    launch(0, "preflight.py", *TINY, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 2])
def test_errors_are_sentences(processes: int, tmp_path: Path) -> None:
    """Of the machine, the model and the directory; said once."""
    (tmp_path / "file").touch()
    for flags, sentence in (
        ([*TINY, tmp_path, "--gpus-per-node", "99"], "devices, and 99 were asked for"),
        (["--model-name", tmp_path], "no config of it can be read"),
        ([*TINY, tmp_path / "file"], f"--output-dir {tmp_path}/file on {HOST}: Not a directory"),
    ):
        result = launch(processes, "preflight.py", *flags, check=False)
        assert result.returncode == 1 and not result.stdout
        (said,) = errors_said(result.stderr)
        assert sentence in said


def test_flags_out_of_range(capsys: pytest.CaptureFixture) -> None:
    """All of them, in one sentence."""
    with pytest.raises(SystemExit) as end:
        preflight.parse_args(["--timeout-seconds", "0", "--gpus-per-node", "-1"])
    assert end.value.code == 1
    (said,) = errors_said(capsys.readouterr().err)
    assert "--timeout-seconds 0.0" in said and "--gpus-per-node -1" in said


def test_a_directory_that_cannot_be_written(alone: None, tmp_path: Path) -> None:
    """The flag and the host are named; files are as large as there is time and room for."""
    disk = preflight.Disk(Namespace(output_dir=tmp_path), PLACES[:1])
    assert disk.open() == [] and disk.free > 0
    write, read = disk.probes()
    write.call()
    read.call()
    size = disk.file.stat().st_size
    assert size == pytest.approx(1e9 * write.work) and 0 < size <= 1.1 * preflight.FILE_BYTES
    (tmp_path / "file").touch()
    disk = preflight.Disk(Namespace(output_dir=tmp_path / "file"), PLACES[:1])
    with pytest.raises(ValueError, match=f"--output-dir {tmp_path}/file on host0: Not a directory"):
        disk.open()


def samples(*medians: float, spread: float = 0.0) -> preflight.Seconds:
    """Seven for each rank, with this median and spread."""
    steps = (-3, -2, -1, 0, 1, 2, 3)
    return {(r,): [m * (1 + spread / 2 * s) for s in steps] for r, m in enumerate(medians)}


def test_who_is_out_of_line() -> None:
    """Above 10% and three times its own spread, against the median of the others."""
    assert preflight.spread(samples(5.0, spread=0.1)[0,]) == pytest.approx(0.1)
    assert preflight.out_of_line(samples(1.0)) == {}
    assert preflight.out_of_line(samples(1.0, 1.09, 1.0, 0.5)) == {}
    assert preflight.out_of_line(samples(1.0, 1.19), tolerance=0.2) == {}
    assert preflight.out_of_line(samples(2.0, 1.0)) == {(0,): 2.0}
    assert preflight.out_of_line(samples(1.0, 2.0)) == {(1,): 2.0}
    assert preflight.out_of_line(samples(1.0, 3.0, 3.0, 1.0)) == {(1,): 3.0, (2,): 3.0}
    assert preflight.out_of_line(samples(1.0, 1.0, 1.5, spread=0.16)) == {(2,): 1.5}
    assert preflight.out_of_line(samples(1.0, 1.0, 1.5, spread=0.17)) == {}


def test_only_who_is_slow_twice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second measurement is of the doubtful probes alone, and what it finds counts."""
    probes = [preflight.Probe(name, "ms", 0, (0,), list) for name in "abc"]
    rounds = [
        {"a": samples(1, 1, 1), "b": samples(1, 2, 2.5), "c": samples(3, 1, 1)},
        {"b": samples(1, 1, 4), "c": samples(1, 1, 1)},
    ]
    asked = []

    def measure(probes: list, device: torch.device, watch: None) -> dict:
        asked.append([probe.name for probe in probes])
        return rounds[len(asked) - 1]

    monkeypatch.setattr(preflight, "measure", measure)
    results, slow = preflight.measure_twice(probes, torch.device("cpu"), None)
    assert asked == [["a", "b", "c"], ["b", "c"]]
    assert slow == {"b": {(2,): 4.0}, "c": {}}
    assert results == {"a": rounds[0]["a"], **rounds[1]}
    assert preflight.describe_slow(slow, PLACES) == [
        "rank 2 on host1 is out of line: b 4.00 times the others' time"
    ]


def test_a_group_is_named_if_all_its_collectives_say_so() -> None:
    """Of the same size; each rank's own probes are judged alone."""
    probes = [preflight.Probe(name, "ms", 0, (0,), list, "small") for name in "abc"]
    probes += [preflight.Probe("d", "ms", 0, (0,), list, "large")]
    probes += [preflight.Probe(name, "ms", 0, (0,), list) for name in "ef"]
    slow, healthy = samples(1, 2), samples(1, 1)
    results = {"a": slow, "b": slow, "c": healthy, "d": healthy, "e": slow, "f": healthy}
    nobody: dict = dict.fromkeys("abcdf", {})
    assert preflight.find_slow(probes, results) == nobody | {"e": {(1,): 2.0}}
    found = preflight.find_slow(probes, results | {"c": slow})
    assert [name for name in found if found[name]] == list("abce")


def test_who_holds_the_others_up() -> None:
    """Silence first, then errors, then the rank that is behind, then the step."""
    places = dict(enumerate(PLACES))
    answers = {rank: {"count": 7, "step": "a step", "error": ""} for rank in range(4)}

    def blame(**changes: object) -> str:
        changed = answers | {1: answers[1] | changes}
        return preflight.blame(changed, places, 4)

    assert blame() == "all ranks answer, but none got beyond: a step"
    assert blame(count=6, step="before") == "rank 1 on host0 did not get beyond: before"
    assert blame(error="CUDA error") == "rank 1 on host0: CUDA error"
    everyone = {rank: answer | {"error": "no disk"} for rank, answer in answers.items()}
    assert preflight.blame(everyone, places, 4) == "no disk"
    del places[3], places[1], places[0]
    sentence = preflight.blame({2: answers[2]}, places, 4)
    hosts = "rank 0 on an unknown host, rank 1 on an unknown host, rank 3 on host1"
    assert sentence == f"no answer from {hosts}, for which others wait in: a step"


@pytest.mark.parametrize(
    "changes,gpus,wrong,notes",
    [
        ({}, 0, "", ""),
        ({"devices": 1}, 0, "node 1 (host1) has 1 devices, and 2 were asked for", ""),
        ({"devices": 0}, 0, "node 1 (host1) has 0 devices, and 2 were asked for", ""),
        ({"devices": 4}, 0, "", "node 1 (host1) has 4 devices for 2 processes"),
        ({"devices": 4}, 4, "node 0 (host0) has 2 devices, and 4 were asked for", "has 4 devices"),
        ({"device": "A100"}, 0, "", "node 1 (host1) has A100, the first node H100"),
    ],
)
def test_devices_are_counted(
    monkeypatch: pytest.MonkeyPatch, changes: dict, gpus: int, wrong: str, notes: str
) -> None:
    """Too few are wrong; more than there are processes, and other ones, are worth a note."""
    for name in ("SLURM_NNODES", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    places = PLACES[:2] + [Place(**vars(place) | changes) for place in PLACES[2:]]
    args = Namespace(gpus_per_node=gpus)
    found = preflight.count_devices(args, places)
    assert wrong in "; ".join(found[0]) and bool(wrong) == bool(found[0])
    assert notes in "; ".join(found[1]) and bool(notes) == bool(found[1])
    monkeypatch.setenv("SLURM_NNODES", "3")
    assert "2 nodes take part, of 3 in the Slurm job" in preflight.count_devices(args, places)[0]


def test_devices_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is missing, unless Slurm gave some."""
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    places = [Place("host", 0, rank, 2, 0, "cpu") for rank in range(2)]
    args = Namespace(gpus_per_node=0)
    assert preflight.count_devices(args, places) == ([], [])
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    (sentence,), _ = preflight.count_devices(args, places)
    assert sentence == "node 0 (host) has 0 devices, and 8 were asked for"


def test_bound_is_the_estimators_at_the_measured_speeds() -> None:
    """Speeds of a DGX A100 in this file's units give the estimator's row for that machine, and
    Llama 2 7B's unit is a block of 202 million parameters in bf16."""
    places = [Place(f"host{n}", n, gpu, 8, 8, "A100") for n in range(2) for gpu in range(8)]
    args = preflight.parse_args([])
    model, machine, unit = preflight.read_model(args, places, "bf16")
    assert unit == pytest.approx(2 * 202.4e6, rel=1e-3)
    speeds = {"matrix products": 312.0}
    for name in ("all-gather", "reduce-scatter"):
        speeds |= {f"{name} in node, unit": 300.0, f"{name} across, unit": 25.0}
    found = preflight.bound(model, machine, speeds)
    assert (found["intranode_gbps"], found["internode_gbps"]) == pytest.approx((2400, 1600))
    there = memory_estimator.traffic(model, machine, "full_shard", model.checkpointing)
    assert {key: found[key] for key in there} == pytest.approx(there)
    slower = speeds | {"reduce-scatter across, unit": 1.0}
    assert preflight.bound(model, machine, slower)["bound_by"] == "internode"


def test_wrong_numbers_are_named(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective that gives one wrong number, or does nothing."""

    def wrong_results() -> list[str]:
        where = ("in node", dist.group.WORLD, torch.device("cpu"))
        return preflight.wrong_results(*where, PLACES[:1])

    assert wrong_results() == []
    reduce = dist.all_reduce

    def off_by_one(tensor: torch.Tensor, *args: object, **options: object) -> None:
        reduce(tensor, *args, **options)
        if tensor.numel() > 1000:
            tensor[-1] += 1

    monkeypatch.setattr(dist, "all_reduce", off_by_one)
    monkeypatch.setattr(dist, "reduce_scatter_tensor", lambda *args, **options: None)
    assert wrong_results() == [
        f"{name} in node gives wrong numbers on rank 0 on host0"
        for name in ("all-reduce", "reduce-scatter")
    ]


def test_rows_have_speeds_and_groups_take_their_slowest_rank(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes of two ranks: seconds become a value in the probe's unit, latency is in ms."""
    shares = [
        [((0, 1), [1.0, 4.0])],
        [((0, 1), [2.0, 3.0])],
        [((2, 3), [8.0, 8.0])],
        [((), [9, 9])],
    ]
    monkeypatch.setattr(preflight.ranks, "on_every_rank", lambda function: shares)
    probe = preflight.Probe("all-gather", "GB/s", 24.0, (0, 1), list)
    watch = preflight.Watch(dist.HashStore(), 0, 1, limit=9, start_limit=9)
    seconds = preflight.measure([probe], torch.device("cpu"), watch)["all-gather"]
    assert seconds == {(0, 1): [2.0, 4.0], (2, 3): [8.0, 8.0]}
    row = preflight.describe_row(probe, seconds, PLACES)
    assert (row["slowest"], row["where"]) == (3.0, "node 1 on host1")
    assert [found["value"] for found in row["all"]] == [8.0, 3.0]
    assert preflight.Probe("latency", "ms", 0, (0,), list).value(0.5) == 500
    assert preflight.name_members((1, 3), PLACES) == "rank 1 of each node"
