"""The benchmark programs run on two CPU processes and print their tables."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, launch

from tools import memory_estimator


def run(command: str) -> str:
    """Run a benchmark program and return its output."""
    return launch(0, *f"benchmarks/{command}".split(), timeout=None).stdout


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("processes", [1, 8])
@pytest.mark.parametrize("preset", ["cpu", "gpu"])
def test_presets_use_existing_flags_and_models(preset, processes, large, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # it is not a package
    run_all = importlib.import_module("run_all")
    commands = run_all.programs(preset, processes, Path("data"), large)
    assert commands
    for command in commands.values():
        name, *flags = command.split()
        text = (ROOT / "benchmarks" / name).read_text()
        missing = [x for x in flags if x.startswith("--") and f'"{x}"' not in text]
        assert not missing, command
        if name in ("one_gpu.py", "estimate.py"):
            models = [x for x in flags if "llama" in x or x.startswith(("gpt2", "t5"))]
            assert set(models) <= memory_estimator.BUILT_IN.keys(), command


@pytest.mark.parametrize("command, row", [
    ("one_gpu.py --model tiny --length 64 --turns 1 --steps 2 --loops ours", "ours"),
    ("estimate.py --models tiny-gpt2 --strategies full_shard --processes 1", "tiny-gpt2"),
    ("compare_strategies.py --steps 1 --processes 1", "full_shard"),
    ("saving.py --model tiny --saves 1 --turns 1 --stages save --ways ours-fsdp2", "ours-.*"),
    ("step_time.py --model tiny --length 64 --steps 1 --loops ours-ddp ours-fsdp2", "ours-.*"),
])  # fmt: skip
def test_gpu_benchmarks_start_on_a_cpu(command, row):
    assert re.search(rf"^\| {row} \|", run(command), re.M)


@pytest.mark.parametrize("flags", [
    "--model tiny",
    "--model tiny --fsdp 2 --lora-rank 4",
    "--model tiny-gpt2 --strategy ddp",
])  # fmt: skip
def test_bytes_of_one_rank_of_many_equal_the_estimate(flags):
    table = run(f"one_rank_of_many.py --ranks 8 --length 64 --steps 2 {flags}")
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", table, re.M)
    assert [name for name, *_ in rows] == ["parameter", "gradient", "optimizer"]
    for _, measured, _, ratio in rows:
        assert float(measured) > 0
        assert float(ratio) == pytest.approx(1, abs=0.01)


def test_largest_batch_of_one_rank_of_many_is_searched():
    flags = "--ranks 2 --model tiny-gpt2 --length 64 --largest-batch --max-batch-size 3"
    assert "the largest batch that fits: 3\n" in run(f"one_rank_of_many.py {flags}")


@pytest.mark.slow
@pytest.mark.parametrize("peer, factor", [("trl", 1.0), ("seq2seq", 2.0), ("trainer", 255 / 256)])
def test_peer_trainers_report_the_same_loss(peer, factor):
    """The losses agree up to the factors listed in RESULTS.md."""
    pytest.importorskip("trl" if peer == "trl" else "accelerate", reason=f"{peer} needs it")
    table = run(f"side_by_side.py --peers {peer} --rows 40 --epochs 1")
    for name in ("ours, ddp", "ours, full_shard", peer):
        assert len(re.findall(rf"^\| {name} \|", table, re.M)) == 1
    reported, single = re.search(r"of (\S+) for its first step; .* has (\S+)", table).groups()
    assert float(single) * factor == pytest.approx(float(reported), rel=2e-3)


@pytest.mark.slow
def test_all_loops_of_step_time_end_with_the_same_loss():
    pytest.importorskip("accelerate")
    results = json.loads(run("step_time.py --model 41M --steps 1 --length 64").splitlines()[-1])
    assert len(results) == 5
    for row in results.values():
        assert row["loss"] == pytest.approx(results["ours-ddp"]["loss"], abs=1e-5)


@pytest.mark.slow
def test_load_needs_one_shard_and_export_one_file():
    """The model has 1.1B parameters, stored in 16 bits."""
    pytest.importorskip("accelerate")
    flags = "saving.py --model 1.1B --turns 1 --stages load export --ways ours-fsdp1 ours-fsdp2"
    results = json.loads(run(flags).splitlines()[-1])
    shard, tensor, unit, file = 2200, 262, 176, 4400  # MB
    assert results["ours-fsdp1"]["load MB"][0] < shard + 2 * tensor + 250
    assert results["ours-fsdp2"]["load MB"][0] < 1.02 * shard + tensor
    for row in results.values():
        assert row["export MB"][0] < file + unit + 250


def plan(output: Path, phase: str, folder: Path = Path(sys.executable).parent, **more: str) -> None:
    """Run a phase of one_gpu.sh with the `python` in a folder."""
    environment = os.environ | more | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", ROOT / "benchmarks/one_gpu.sh", output, phase]
    subprocess.run(command, check=True, env=environment)


PHASES = [pytest.param(x, marks=() if x in "bf" else pytest.mark.slow) for x in "abcdef"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("phase", PHASES)
def test_each_command_for_one_borrowed_gpu_starts_on_a_cpu(phase, tmp_path):
    """Tests of phase f are skipped without a GPU."""
    plan(tmp_path, phase, TINY="1", LIMIT="3600")
    summary = (tmp_path / "summary.txt").read_text()
    codes = re.findall(r"^(\S+): exit code (\d+)", summary, re.M)
    assert codes
    assert {code for _, code in codes} == {"0"}, summary
    assert {name for name, _ in codes} == {path.stem for path in tmp_path.glob("*-*.txt")}


def test_command_for_one_borrowed_gpu_ends_at_its_limit_and_keeps_its_output(tmp_path):
    """The commands without time are named."""
    (tmp_path / "python").write_text("#!/bin/sh\necho '| kept |'\nexec sleep 60\n")
    (tmp_path / "python").chmod(0o755)
    plan(tmp_path, "b", folder=tmp_path, LIMIT="5")
    lines = (tmp_path / "summary.txt").read_text().splitlines()
    assert lines[0].startswith("b-7b-fsdp1: exit code 124 after 5")
    rest = [f"{name}: no time left" for name in ("b-7b-fsdp2", "b-70b-fsdp1", "b-70b-fsdp2")]
    assert lines[1:] == ["| kept |", *rest]


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
