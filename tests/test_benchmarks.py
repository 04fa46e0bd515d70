"""The benchmark programs run on two CPU processes and print their tables."""

import importlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT


def run(command: str) -> str:
    """What a program prints."""
    name, *flags = command.split()
    return subprocess.check_output([sys.executable, ROOT / "benchmarks" / name, *flags], text=True)


def test_a_section_of_the_results_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the other sections, the other preset's and the words before them stay."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    add = importlib.import_module("run_all").with_section
    text = add("# Measured\n\nWords.\n\n## On a CPU\n\nIts words.\n", "gpu", "Saving", "s1")
    for preset, title, body in (("cpu", "Saving", "s2"), ("cpu", "Loading", "s3"),
                                ("cpu", "Saving", "s4")):  # fmt: skip
        text = add(text, preset, title, body)
    assert text == (
        "# Measured\n\nWords.\n\n## On a CPU\n\nIts words.\n### Saving\n\ns4\n\n"
        "### Loading\n\ns3\n\n## On GPUs\n\n### Saving\n\ns1\n"
    )


@pytest.mark.parametrize("processes", [1, 8])
@pytest.mark.parametrize("preset", ["cpu", "gpu"])
def test_flags_of_the_presets_exist(
    preset: str, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the program, or of the script whose flags it passes on."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    commands = importlib.import_module("run_all").programs(preset, processes, Path("data"))
    assert commands
    for command in commands.values():
        name, *flags = command.split()
        text = (ROOT / "benchmarks" / name).read_text()
        if name == "useful_tokens.py":
            text += (ROOT / "summarization_dataset.py").read_text()
        missing = [x for x in flags if x.startswith("--") and f'"{x}"' not in text]
        assert not missing, command


@pytest.mark.slow
def test_step_time() -> None:
    """A row for each loop; on a CPU the peers are wrapped in DistributedDataParallel."""
    pytest.importorskip("accelerate", reason="needs benchmarks/requirements.txt")
    table = run("step_time.py --model tiny --steps 2 --batch-size 2")
    assert table.count("wrapped it in DistributedDataParallel") == 2
    for name, count in (("ours, full_shard", 2), ("bare, ddp", 2), ("accelerate", 1)):
        assert len(re.findall(rf"^\| {name} \|", table, re.M)) == count


@pytest.mark.slow
@pytest.mark.parametrize("peer, share", [("trl", 1.0), ("seq2seq", 2.0), ("trainer", 255 / 256)])
def test_side_by_side(peer: str, share: float) -> None:
    """Rows of all loops; the loss that a trainer reports is that of the model alone, but for the
    factors that RESULTS.md names."""
    pytest.importorskip("trl" if peer == "trl" else "accelerate", reason=f"{peer} needs it")
    table = run(f"side_by_side.py --peers {peer} --rows 40 --epochs 1")
    for name in ("ours, ddp", "ours, full_shard", peer):
        assert len(re.findall(rf"^\| {name} \|", table, re.M)) == 1
    reported, alone = re.search(r"of (\S+) for its first step; .* has (\S+)", table).groups()
    assert float(alone) * share == pytest.approx(float(reported), rel=2e-3)


@pytest.mark.slow
def test_useful_tokens() -> None:
    """Ours has the same samples in less time than the tutorial's way: the bar is 1.5."""
    assert float(run("useful_tokens.py").split()[-1]) >= 1.5


@pytest.mark.slow
def test_saving() -> None:
    """Three kinds; the one in the background stalls least."""
    rows = re.findall(r"^\| tiny \| (\w+) \| ([0-9.]+) ", run("saving.py --shapes tiny"), re.M)
    assert [name for name, _ in rows] == ["sharded", "full", "async"]
    assert float(rows[2][1]) < float(rows[0][1])


@pytest.mark.slow
def test_growth() -> None:
    """A batch of a validation costs one number, and a save no index of all shards."""
    table = run("growth.py --processes 2 4")
    assert "| validation batch | ours | all_reduce | 1 | 8 | 12 |" in table
    assert re.search(r"^\| save \| DCP \| broadcast_object_list \| 1 \| (\d+) ", table, re.M)


@pytest.mark.slow
def test_estimate() -> None:
    """What is held is what was estimated, to the last digit shown."""
    pairs = re.findall(r"([0-9.]+) / ([0-9.]+)", run("estimate.py --models tiny-t5 tiny"))
    assert len(pairs) == 18 and all(estimated == found for estimated, found in pairs)


@pytest.mark.slow
def test_one_gpu_runs_on_a_cpu() -> None:
    """A tiny model, both loops."""
    table = run("one_gpu.py --model tiny --length 64 --steps 1 --turns 1")
    assert "| ours | sdpa |" in table and "| trainer | sdpa |" in table


@pytest.mark.slow
def test_pictures(tmp_path: Path) -> None:
    """Of a run, and of an estimate."""
    pytest.importorskip("matplotlib", reason="needs benchmarks/requirements.txt")
    lines = [{"event": "train", "step": i, "loss": 3 / i, "lr": 0.1} for i in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    estimate = [sys.executable, ROOT / "memory_estimator.py", "--model-name", "tiny", "--json"]
    (tmp_path / "tiny.json").write_bytes(subprocess.check_output(estimate))
    for flags in (str(tmp_path), f"--estimate {tmp_path}/tiny.json"):
        run(f"plot_runs.py {flags} --picture {tmp_path}/x.png")
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "x.png").unlink()


@pytest.mark.parametrize("installed", [False, True])
def test_plot_runs_says_what_is_missing(installed: bool, tmp_path: Path) -> None:
    """In one sentence, with exit code 1: matplotlib, or the metrics of a run."""
    expected = f"{tmp_path}/metrics.jsonl is missing: give the --output-dir of a run\n"
    environment = dict(os.environ)
    if installed:
        pytest.importorskip("matplotlib", reason="needs benchmarks/requirements.txt")
    else:
        (tmp_path / "matplotlib.py").write_text("raise ImportError")
        environment["PYTHONPATH"] = str(tmp_path)
        expected = "plot_runs.py draws with matplotlib: `pip install matplotlib` first\n"
    command = [sys.executable, ROOT / "benchmarks/plot_runs.py", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (result.returncode, result.stdout, result.stderr) == (1, "", expected)


@pytest.mark.slow
def test_compare_strategies() -> None:
    """Within three minutes; FULL_SHARD holds half of what DDP does, and DDP is 1.00 of DDP."""
    start = time.monotonic()
    command = [sys.executable, ROOT / "benchmarks/compare_strategies.py", "--steps", "3"]
    table = subprocess.check_output(command, text=True)
    assert time.monotonic() - start < 180
    rows = {
        name: [float(cell.replace(",", "")) for cell in cells.strip("| ").split("|")]
        for name, cells in re.findall(r"^\| (ddp|shard_grad_op|full_shard) \|(.*)\|$", table, re.M)
    }
    assert rows.keys() == {"ddp", "shard_grad_op", "full_shard"}
    assert rows["ddp"][-1] == 1.0
    for column in (1, 2, 3):  # parameters, gradients, optimizer
        assert rows["full_shard"][column] == pytest.approx(rows["ddp"][column] / 2, abs=0.1)


@pytest.mark.slow
def test_chunked_loss() -> None:
    """On small sizes every variant gives the same loss."""
    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip("torch 2.13 or newer")
    sizes = ["--tokens", "64", "--width", "16", "--vocabulary", "100"]
    table = subprocess.check_output(
        [sys.executable, ROOT / "benchmarks/chunked_loss.py", *sizes], text=True
    )
    losses = [float(line.split("|")[-2]) for line in table.splitlines() if "0." in line]
    assert len(losses) == 6 and max(losses) - min(losses) < 1e-5


@pytest.mark.slow
def test_load_memory() -> None:
    """1.1B parameters: the bounds hold, from files of fp32 and of 16 bits; in the latter case the
    whole model on rank 0 does not meet them."""
    output = run("load_memory.py"), run("load_memory.py --stored-dtype bfloat16")
    for found in (json.loads(x.strip().splitlines()[-1]) for x in output):
        assert found["missed"] == [] and found["variants"]["streamed"][0]["equal_tensors"] == 201
    first, second = found["variants"]["whole"]
    assert first["peak_mb"] > 2 * second["peak_mb"]


@pytest.mark.slow
def test_large_data() -> None:
    """Memory is bounded, and the cache is used; five million rows take more than half an hour."""
    table = run("large_data.py --rows 200000")
    rows = re.findall(
        r"^\| (\w+) \| (\w+) \| ([\d,]+) \| (\d+) \| \S+ \| (\S+) - (\S+) \|", table, re.M
    )
    assert [row[:2] for row in rows] == [
        (script, cache) for script in ("T5", "gpt2", "llama") for cache in ("empty", "full")
    ]
    for _, cache, _, seconds, peak, before in rows:
        assert float(peak.replace(",", "")) - float(before.replace(",", "")) < 500
        assert cache == "empty" or int(seconds) < 30
