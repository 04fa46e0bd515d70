"""The benchmark programs run on two CPU processes and print their tables."""

import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from conftest import ROOT

from tools import memory_estimator


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


@pytest.fixture
def run_all(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, which stands in no package."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("run_all")


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("processes", [1, 8])
@pytest.mark.parametrize("preset", ["cpu", "gpu"])
def test_flags_of_the_presets_exist(
    preset: str, processes: int, large: bool, run_all: ModuleType
) -> None:
    """Of the program, or of the script whose flags it passes on; and so do models and shapes."""
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


def test_what_a_gpu_is_asked_first(run_all: ModuleType) -> None:
    """Speed of a large model, then peaks, then the peers, then saves."""
    for large, sizes in ((True, ["7B"]), (False, ["1.1B", "7B with LoRA"])):
        titles = list(run_all.programs("gpu", 1, None, large))
        first = [f"One GPU, {sizes[0]}", f"One GPU, {sizes[0]}, compiled"]
        first += [f"One GPU, {size}" for size in sizes[1:]]
        estimate = "Estimate and measurement"
        first += [estimate, f"{estimate}, LoRA", f"{estimate}, QLoRA"]
        first += ["Side by side with TRL", "Side by side with the Trainer"]
        first += ["Load, save, resume and export"]
        assert titles[: len(first)] == first and len(titles) > len(first)


HANGS = """
import subprocess, sys
print("| first |")
child = "import time; time.sleep(100)"
process = subprocess.Popen([sys.executable, "-c", child, "left over"], start_new_session=True)
process.wait()
"""


@pytest.fixture
def plan(
    run_all: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[float], tuple[list[str], str]]:
    """`run_all.py --preset cpu --minutes MINUTES` of four programs, which are soon done, fail, or
    hang in a process of another session. Returns the titles of those that ran, and what is
    written."""
    for name, code in (
        ("good.py", "import sys; print(sys.argv[1])"),
        ("bad.py", "print('| some |'); raise SystemExit(3)"),
        ("hangs.py", HANGS),
    ):
        (tmp_path / name).write_text(code)
    results = tmp_path / "RESULTS.md"
    results.write_text("# Measured\n\n## On a CPU\n\n### Hangs\n\n2020-01-01; old\n`x`\n\nwhole\n")
    commands = {"Hangs": "hangs.py", "A": "good.py a", "Fails": "bad.py", "B": "good.py b"}
    monkeypatch.setattr(run_all, "FOLDER", tmp_path)
    monkeypatch.setattr(run_all, "RESULTS", results)
    monkeypatch.setattr(run_all, "LEAST_SECONDS", 1)
    monkeypatch.setattr(run_all, "programs", lambda *_: commands)
    ran: list[str] = []
    measure = run_all.measure
    monkeypatch.setattr(
        run_all, "measure", lambda title, *rest: ran.append(title) or measure(title, *rest)
    )

    def go(minutes: float) -> tuple[list[str], str]:
        ran.clear()
        words = ["run_all.py", "--preset", "cpu", "--minutes", str(minutes)]
        monkeypatch.setattr(sys, "argv", words)
        monkeypatch.setattr(run_all, "START", time.monotonic())
        run_all.main()
        return list(ran), results.read_text()

    return go


def test_a_plan_that_is_cut_short_goes_on(
    plan: Callable[[float], tuple[list[str], str]], run_all: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With what was not tried yet, then what failed or was ended, which leaves its lines below what
    was measured whole before; not with what was measured, unless another commit did."""
    start = time.monotonic()
    ran, text = plan(0.05)
    assert ran == ["Hangs"] and time.monotonic() - start < 5
    assert re.search(r"whole\n\n\d.*\n`python benchmarks/hangs.py`\n\n\| first \|\n\nIt was", text)
    assert "left over" not in subprocess.check_output(["ps", "-eo", "args"], text=True)
    ran, text = plan(0.1)
    assert ran == ["A", "Fails", "B", "Hangs"]
    assert "| some |\n\nIt ended with exit code 3.\n" in text
    assert text.count("It was ended after") == text.count("whole") == 1
    ran, text = plan(0.02)
    assert ran[0] == "Hangs" and not {"A", "B"} & set(ran)
    assert text.count("\na\n") == text.count("\nb\n") == 1
    monkeypatch.setattr(run_all, "commit", lambda: "another")
    ran, text = plan(0.02)
    assert ran[0] == "Hangs" and text.count("It was ended after") == 1


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf"])
def test_minutes_out_of_range(
    minutes: str, run_all: ModuleType, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    """Are refused, and named."""
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--preset", "cpu", "--minutes", minutes])
    with pytest.raises(SystemExit) as end:
        run_all.main()
    assert end.value.code == 2 and f"--minutes {minutes} must be more" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("processes, loops", [(1, 3), (2, 5)])
def test_step_time(processes: int, loops: int) -> None:
    """A row for each loop, ours and, on two processes, the peers'; all train alike."""
    pytest.importorskip("accelerate", reason="needs benchmarks/requirements.txt")
    flags = f"step_time.py --model tiny --length 64 --steps 2 --processes {processes}"
    found = json.loads(run(flags).splitlines()[-1])
    assert len(found) == loops
    losses = [row["loss"] for row in found.values()]
    assert losses == pytest.approx([losses[0]] * loops, rel=1e-6)


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
def test_saving() -> None:
    """A row for each way; a save in the background stalls least."""
    pytest.importorskip("accelerate", reason="needs benchmarks/requirements.txt")
    found = json.loads(run("saving.py --model tiny --turns 1").splitlines()[-1])
    assert len(found) == 7
    for name in ("ours-fsdp1", "ours-fsdp2"):
        assert found[f"{name}-async"]["save"][0] < found[name]["save"][0]


@pytest.mark.slow
def test_memory_of_loads_and_exports() -> None:
    """1.1B parameters from 16 bits: a load holds the shard and little more, an export the file that
    rank 0 collects, here the whole model in fp32."""
    pytest.importorskip("accelerate", reason="needs benchmarks/requirements.txt")
    flags = "saving.py --model 1.1B --turns 1 --stages load export --ways ours-fsdp1 ours-fsdp2"
    found = json.loads(run(flags).splitlines()[-1])
    shard, tensor, unit, file = 2200, 262, 176, 4400  # MB
    assert found["ours-fsdp1"]["load MB"][0] < shard + 2 * tensor + 250
    assert found["ours-fsdp2"]["load MB"][0] < 1.02 * shard + tensor
    for row in found.values():
        assert row["export MB"][0] < file + unit + 250


@pytest.mark.slow
def test_estimate() -> None:
    """What is held is what was estimated, to the last digit shown."""
    pairs = re.findall(r"([0-9.]+) / ([0-9.]+)", run("estimate.py --models tiny-t5 tiny"))
    assert len(pairs) == 18 and all(estimated == found for estimated, found in pairs)


@pytest.mark.slow
def test_estimate_of_adapters() -> None:
    """The same of LoRA and QLoRA."""
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    for flags in ("", " --load-in-4bit"):
        table = run(f"estimate.py --models tiny --strategies full_shard --lora-rank 4{flags}")
        pairs = re.findall(r"([0-9.]+) / ([0-9.]+)", table)
        assert len(pairs) == 3 and all(estimated == found for estimated, found in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", " --lora-rank 4"])
def test_one_gpu_runs_on_a_cpu(flags: str) -> None:
    """A tiny model, both loops; with adapters, too."""
    if flags:
        pytest.importorskip("peft")
    table = run(f"one_gpu.py --model tiny --length 64 --steps 1 --turns 1{flags}")
    assert "| ours | " in table and "| trainer | sdpa |" in table


@pytest.mark.slow
def test_pictures(tmp_path: Path) -> None:
    """Of a run, and of an estimate."""
    pytest.importorskip("matplotlib", reason="needs benchmarks/requirements.txt")
    lines = [{"event": "train", "step": i, "loss": 3 / i, "lr": 0.1} for i in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    estimate = [
        sys.executable,
        ROOT / "tools/memory_estimator.py",
        "--model-name",
        "tiny",
        "--json",
    ]
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
