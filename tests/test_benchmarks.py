"""The benchmark programs run on CPU processes and print their tables."""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from chaos import is_over
from conftest import ROOT, launch, wait_until


def run(command: str) -> str:
    """Run a benchmark program and return its output."""
    return launch(0, *f"benchmarks/{command}".split(), quiet_seconds=600).stdout


SLOW_TABLES = [
    "--ranks 8 --models tiny --strategies full_shard",
    "--ranks 8 --models tiny --strategies full_shard --lora-rank 8",
    "--ranks 8 --models tiny-gpt2 --strategies ddp",
]


@pytest.mark.parametrize("flags", [
    *(pytest.param(flags, marks=pytest.mark.slow) for flags in SLOW_TABLES),
    "--ranks 2 --models tiny --strategies full_shard --lora-rank 8",
    "--processes 1 --models tiny-t5 --strategies full_shard",
])  # fmt: skip
def test_measured_bytes_equal_the_estimate(flags):
    table = run(f"memory.py --length 64 --steps 1 {flags}")
    (cells,) = re.findall(r"^\| tiny.*, \w+ \| 1 \| (.*)\| .* / - \|", table, re.M)
    pairs = [cell.split(" / ") for cell in cells.strip(" |").split(" | ")]
    assert len(pairs) == 3
    for estimated, measured in pairs:
        assert float(measured) > 0
        assert float(estimated) == pytest.approx(float(measured), rel=0.01)


@pytest.mark.slow
def test_largest_batch_is_searched():
    flags = "--ranks 2 --models tiny-gpt2 --length 64 --largest-batch --max-batch-size 3 --steps 1"
    table = run(f"memory.py {flags} --strategies full_shard")
    assert re.search(r"^\| tiny-gpt2, full_shard \| 3 \|", table, re.M)


@pytest.mark.slow
@pytest.mark.parametrize("peer, factor", [("trl", 1.0), ("seq2seq", 2.0), ("trainer", 255 / 256)])
def test_peer_trainers_report_the_same_loss(peer, factor):
    """The losses agree up to the factors listed in RESULTS.md."""
    pytest.importorskip("trl" if peer == "trl" else "accelerate", reason=f"{peer} needs it")
    table = run(f"speed.py --against {peer} --rows 40 --steps 1")
    for name in ("ours, ddp", "ours, FSDP1", peer):
        assert len(re.findall(rf"^\| {name} \|", table, re.M)) == 1
    reported, single = re.search(
        r"of (\S+) for its first step; .* has (\S+)\.$", table, re.M
    ).groups()
    assert float(single) * factor == pytest.approx(float(reported), rel=2e-3)


@pytest.mark.slow
def test_bare_loop_has_the_same_losses():
    losses = re.findall(r"\| ([\d.]+) \|$", run("speed.py --against bare --steps 1"), re.M)
    assert len(losses) == 3
    for loss in losses:
        assert float(loss) == pytest.approx(float(losses[0]), abs=1e-5)


@pytest.mark.slow
def test_load_needs_one_shard_and_export_one_file():
    """The model has 1.1B parameters, stored in 16 bits."""
    flags = "--model 1.1B --saves 1 --ways ours-fsdp1 ours-fsdp2"
    table = run(f"saving.py {flags}")
    rows = re.findall(r"^\| ours-fsdp(\d) \| (.*) \|$", table, re.M)
    shard, tensor, unit, file = 2200, 262, 176, 4400  # MB
    limits = {"1": shard + 2 * tensor + 250, "2": 1.02 * shard + tensor}
    assert len(rows) == 2
    for fsdp, cells in rows:
        _, load_mb, *_, export_mb = [float(cell.replace(",", "")) for cell in cells.split(" | ")]
        assert load_mb < limits[fsdp]
        assert export_mb < file + unit + 250


def test_save_and_resume_are_timed():
    table = run("saving.py --model tiny --saves 1 --processes 1 --ways ours-fsdp2")
    assert "| load | load MB | step | save | resume | export | export MB |" in table
    assert re.search(r"^\| ours-fsdp2 \|( [\d.]+ \|){7}$", table, re.M)


def plan(output: Path, *phases: str, python: Path = Path(sys.executable), **more: str) -> str:
    """Run phases of one_gpu.sh, or all, and return the summary."""
    command = ["bash", ROOT / "benchmarks/one_gpu.sh", output, *phases]
    subprocess.run(command, check=True, env=os.environ | more | {"PYTHON": str(python)})
    assert {path.name for path in output.iterdir()} == {"summary.txt", "logs.tgz"}
    return (output / "summary.txt").read_text()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_plan_for_one_borrowed_gpu_starts_on_a_cpu(tmp_path):
    """Tests of tests/test_gpu.py are skipped without a GPU."""
    summary = plan(tmp_path, TINY="1", LIMIT="3600")
    codes = re.findall(r"^(\S+): exit code (\d+)", summary, re.M)
    assert {name[0] for name, _ in codes} == set("abcdefg")
    assert {code for _, code in codes} == {"0"}, summary
    with tarfile.open(tmp_path / "logs.tgz") as logs:
        assert {f"./{name}.txt" for name, _ in codes} <= set(logs.getnames())


def test_command_for_one_borrowed_gpu_ends_at_its_limit_and_keeps_its_output(tmp_path):
    """The commands without time are named."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho '| kept |'\nexec sleep 6000\n")
    python.chmod(0o755)
    lines = plan(tmp_path / "out", "c", python=python, LIMIT="5").splitlines()
    assert lines[0].startswith("c-7b: exit code 124 after ")
    assert lines[1:] == ["| kept |", "c-70b: no time left"]


def test_benchmark_that_is_killed_ends_torchrun_and_its_ranks(tmp_path):
    rank = tmp_path / "rank.py"
    file = tmp_path / "pids"
    rank.write_text(f"""
import os, time
with open({str(file)!r}, "w") as file:
    print(os.getppid(), os.getpid(), file=file)
time.sleep(1000)
""")
    code = f"import common; common.launch(1, {str(rank)!r})"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT / "benchmarks")
    wait_until(lambda: file.exists() and file.read_text().endswith("\n"))
    process.kill()
    process.wait()
    for pid in map(int, file.read_text().split()):
        wait_until(lambda pid=pid: is_over(pid))


def test_titles_of_the_sharding_picture_do_not_touch():
    pytest.importorskip("matplotlib")
    import draw_sharding
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    for title, note, *_ in draw_sharding.STAGES:
        for text, size, weight in ((title, 13, "bold"), (note, 11, "normal")):
            font = FontProperties(family="DejaVu Sans", weight=weight)
            width = TextPath((0, 0), text, size=size, prop=font).get_extents().width
            assert width <= draw_sharding.STAGE_WIDTH - 15, text
