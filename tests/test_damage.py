"""Damage each file of a run in every way: no run uses a damaged file, and errors name it."""

import itertools
import os
import shutil
from pathlib import Path

import pytest
from conftest import check_equal_weights, error_lines, launch, losses, status
from test_output import start


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


def cut(path: Path, other: Path) -> None:
    """Cut the file in half."""
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path, other: Path) -> None:
    """Empty the file, as a power failure can."""
    os.truncate(path, 0)


def zero(path: Path, other: Path) -> None:
    """Overwrite the whole file with zeros."""
    path.write_bytes(bytes(path.stat().st_size))


def delete(path: Path, other: Path) -> None:
    """Delete the file."""
    path.unlink()


def exchange(path: Path, other: Path) -> None:
    """Replace the file with that of another rank or step."""
    shutil.copy(other, path)


DAMAGES = (flip, flip_early, cut, empty, zero, delete, exchange)


def files(directory: Path) -> list[str]:
    """Return the names of a directory's files; fail if there are none."""
    names = sorted(path.name for path in directory.iterdir())
    assert names, directory
    return names


@pytest.mark.slow
def test_damaged_checkpoint_file_is_named_and_skipped(source_run, flags, tmp_path, capfd):
    """The run resumes from the previous checkpoint, with the same losses."""
    expected_run = Path(shutil.copytree(source_run, tmp_path / "clean"))
    shutil.rmtree(expected_run / "checkpoints/step-00000008")
    assert start(expected_run, flags, "--max-steps", "10") == 0
    newest = "checkpoints/step-00000008"
    names = files(source_run / newest)
    assert any(name.endswith("_0.distcp") for name in names) and "train_state.json" in names
    count = 0
    for name, damage in itertools.product(names, DAMAGES):
        run = Path(shutil.copytree(source_run, tmp_path / "run"))
        other_rank = name.replace("__0_", "__x_").replace("__1_", "__0_").replace("__x_", "__1_")
        others = [run / newest / other_rank, run / "checkpoints/step-00000006" / name]
        for other in others[: len(others) if damage is exchange else 1]:
            if damage is exchange and other == run / newest / name:
                continue
            damage(run / newest / name, other)
            capfd.readouterr()
            assert start(run, flags, "--max-steps", "10") == 0, (name, damage)
            stdout = capfd.readouterr().out
            case = f"{name}, {damage.__name__}: {stdout}"
            assert "Resuming at step 6 of 10" in stdout, case
            assert f"{newest}/{name}" in stdout or f"no {name}" in stdout, case
            assert "step-00000008 is skipped" in stdout, case
            assert losses(run) == losses(expected_run) and status(run) == "finished", case
            check_equal_weights(run / "final", expected_run / "final")
            count += 1
            shutil.rmtree(run)
            shutil.copytree(source_run, run)
        shutil.rmtree(run)
    assert count >= len(names) * len(DAMAGES)


@pytest.mark.slow
def test_run_survives_damaged_status_and_metrics(source_run, flags, tmp_path):
    """Only the damaged lines of metrics.jsonl are lost."""
    expected_run = Path(shutil.copytree(source_run, tmp_path / "clean"))
    assert start(expected_run, flags, "--max-steps", "10") == 0
    names = ("status", "metrics.jsonl")
    for name, damage in itertools.product(names, DAMAGES[:-1]):
        run = Path(shutil.copytree(source_run, tmp_path / "run"))
        damage(run / name, run)
        case = f"{name}, {damage.__name__}"
        assert start(run, flags, "--max-steps", "10") == 0, case
        loss_by_step, expected = losses(run), losses(expected_run)
        if name == "metrics.jsonl":
            expected = {step: expected[step] for step in loss_by_step}
            assert {9, 10} <= set(loss_by_step), case
        assert loss_by_step == expected and status(run) == "finished", case
        check_equal_weights(run / "final", expected_run / "final")
        shutil.rmtree(run)


@pytest.mark.slow
def test_damaged_export_is_rejected_as_model(source_run, flags, tmp_path, capfd):
    """Flipped bits are not tested, because safetensors has no checksum. The run that wrote the
    export replaces it."""
    outcomes = {}
    for name, damage in itertools.product(files(source_run / "final"), (cut, empty, zero, delete)):
        run = Path(shutil.copytree(source_run, tmp_path / "run"))
        damage(run / "final" / name, run / "best" / name)
        code = start(tmp_path / "new", flags, "--model-name", str(run / "final"))
        errors = error_lines(capfd.readouterr().err)
        assert code == len(errors), (name, damage)
        outcomes[f"{name}, {damage.__name__}"] = errors[0] if errors else "accepted"
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
        if damage is zero:
            assert start(run, flags, "--max-steps", "10") == 0
            assert files(run / "final") == files(source_run / "final")
        shutil.rmtree(run)
        assert code == 0 or str(run / "final") in errors[0], errors
    undetected = {case for case, outcome in outcomes.items() if outcome == "accepted"}
    cases = itertools.product(("added_tokens.json", "validation.json"), DAMAGES)
    optional = {f"{name}, {damage.__name__}" for name, damage in cases}
    assert undetected <= optional | {"generation_config.json, delete"}
