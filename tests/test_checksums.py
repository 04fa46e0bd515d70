"""Damage each file of a run in every way: no run uses a damaged file, and messages name it."""

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
from conftest import check_equal_weights, launch, losses, status
from in_process import start

import gpt2_fsdp
from core import checkpoint
from core.ranks import Problem
from optional import checksums


def flip(path: Path, other: Path) -> None:
    """Flip a bit in the middle of the file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def flip_early(path: Path, other: Path) -> None:
    """Flip a bit near the start of the file, where headers are."""
    data = bytearray(path.read_bytes())
    data[len(data) // 50] ^= 1
    path.write_bytes(data)


def zero(path: Path, other: Path) -> None:
    """Overwrite the whole file with zeros."""
    path.write_bytes(bytes(path.stat().st_size))


def exchange(path: Path, other: Path) -> None:
    """Replace the file with that of another rank or step."""
    shutil.copy(other, path)


def cut(path: Path, other: Path) -> None:
    """Cut the file in half."""
    os.truncate(path, path.stat().st_size // 2)


SAME_SIZE = (flip, flip_early, zero, exchange)


@pytest.fixture
def saved(process_group: None, tmp_path: Path) -> Path:
    """Return a directory with two complete checkpoints that have checksums."""
    for step in (2, 4):
        path = tmp_path / f"step-{step:08d}"
        path.mkdir()
        files = {name: bytes([step, *range(200)]) for name in ("__0_0.distcp", ".metadata")}
        for name, content in files.items():
            (path / name).write_bytes(content)
        state = {"step": step, "files": {name: len(x) for name, x in files.items()}}
        (path / checkpoint.STATE).write_text(json.dumps(state))
        checksums.write(path)
    return tmp_path


@pytest.mark.parametrize("damage", SAME_SIZE)
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "train_state.json", "crc-0.json"])
def test_damaged_checkpoint_is_skipped(name, damage, saved, capsys):
    newest, older = saved / "step-00000004", saved / "step-00000002"
    assert checksums.find_intact(saved) == newest
    damage(newest / name, older / name)
    assert checksums.find_intact(saved) == older
    is_complete = newest in checkpoint.complete_checkpoints(saved)  # otherwise its JSON is invalid
    assert (f"{newest} is damaged, so it is skipped" in capsys.readouterr().out) == is_complete
    damage(older / name, newest / name)
    if damage is not exchange:
        with pytest.raises(Problem, match="No checkpoint in .* is intact"):
            checksums.find_intact(saved)


def test_checkpoint_without_checksums_counts_as_intact(saved):
    """A kill may come between the save and the checksums."""
    newest = saved / "step-00000004"
    (newest / "crc-0.json").rename(newest / "crc-0.tmp")
    assert checksums.find_intact(saved) == newest


@pytest.fixture(scope="module")
def flags(texts: tuple[Path, Path]) -> list[str]:
    """Return flags for eight steps of `tiny` that save every second step."""
    return ["--dataset", str(texts[0]), "--val-dataset", str(texts[1]), "--block-size", "32",
            "--num-train-samples", "0", "--num-val-samples", "0", "--log-every", "1",
            "--save-every", "2", "--model-name", "tiny", "--batch-size", "2",
            "--global-batch-size", "4", "--keep-checkpoints", "3", "--max-steps", "8"]  # fmt: skip


@pytest.fixture(scope="module")
def source_run(tmp_path_factory: pytest.TempPathFactory, flags: list[str]) -> Path:
    """Return the directory of a finished run of two ranks, with both ranks' shards."""
    path = tmp_path_factory.mktemp("original") / "run"
    launch(2, "gpt2_fsdp.py", *flags, "--output-dir", path)
    return path


def resume(run: Path, flags: list[str]) -> int:
    """Train the run for ten steps in all; return the exit code."""
    return start(gpt2_fsdp, *flags, "--output-dir", run, "--max-steps", "10")


@pytest.mark.slow
def test_run_survives_damaged_status_and_metrics(source_run, flags, tmp_path):
    """Only the damaged lines of metrics.jsonl are lost."""
    expected_run = Path(shutil.copytree(source_run, tmp_path / "clean"))
    assert resume(expected_run, flags) == 0
    for name, damage in itertools.product(("status", "metrics.jsonl"), (flip, zero, cut)):
        run = Path(shutil.copytree(source_run, tmp_path / "run"))
        damage(run / name, run)
        case = f"{name}, {damage.__name__}"
        assert resume(run, flags) == 0, case
        loss_by_step, expected = losses(run), losses(expected_run)
        if name == "metrics.jsonl":
            expected = {step: expected[step] for step in loss_by_step}
            assert {9, 10} <= set(loss_by_step), case
        assert loss_by_step == expected and status(run) == "finished", case
        check_equal_weights(run / "final", expected_run / "final")
        shutil.rmtree(run)
