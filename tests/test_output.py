"""What a user does to OUTPUT_DIR between two starts: nothing is lost, or mistaken for another."""

import shutil
from pathlib import Path

import pytest
from conftest import losses, status

import gpt2_fsdp


@pytest.fixture(scope="module")
def flags(texts: tuple[Path, Path]) -> list[str]:
    """Return flags for four steps of `tiny`, saved at every second step."""
    return ["--dataset", str(texts[0]), "--val-dataset", str(texts[1]), "--block-size", "32",
            "--num-train-samples", "0", "--num-val-samples", "0", "--log-every", "1",
            "--save-every", "2", "--model-name", "tiny", "--batch-size", "4",
            "--max-steps", "4"]  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, flags: list[str]) -> Path:
    """Return a finished run."""
    path = tmp_path_factory.mktemp("original") / "run"
    start(path, flags)
    return path


@pytest.fixture
def finished(original: Path, tmp_path: Path) -> Path:
    """Return a copy of it."""
    return Path(shutil.copytree(original, tmp_path / "run"))


def start(path: Path, flags: list[str], *more: str) -> int:
    """Return the exit code of the script, run in this process."""
    try:
        return gpt2_fsdp.fsdp_main(gpt2_fsdp.parse_args([*flags, "--output-dir", str(path), *more]))
    except SystemExit as end:
        return end.code


def everything(path: Path) -> dict[str, float]:
    """Return when each file of a run was written."""
    return {str(file): file.stat().st_mtime for file in path.rglob("*") if file.is_file()}


def test_finished_run_without_checkpoints_stays_finished(finished, flags, capfd):
    shutil.rmtree(finished / "checkpoints")
    before = everything(finished)
    assert start(finished, flags) == 0
    said = capfd.readouterr().out
    assert "is finished at 4 steps. Raise --max-steps or --epochs to resume" in said
    assert start(finished, flags, "--max-steps", "6") == 0
    assert "which needs its checkpoints" in capfd.readouterr().out
    assert everything(finished) == before and status(finished) == "finished"


def test_user_files_beside_checkpoints_stay(finished, flags):
    place = finished / "checkpoints"
    shutil.copytree(place / "step-00000002", place / "step-00000002-keep")
    mine = ["step-00000004.bak", "step-5", "step-latest", "best-of-all", "tmp-notes"]
    for name in mine:
        (place / name).mkdir()
    (place / "step-00000099").mkdir()  # left by a kill
    assert start(finished, flags, "--max-steps", "6", "--keep-checkpoints", "1") == 0
    kept = {path.name for path in place.iterdir()}
    assert kept == {*mine, "step-00000002-keep", "step-00000006"}


def test_resume_rejects_data_changed_anywhere(flags, tmp_path, monkeypatch, capfd):
    """The fingerprint covers all samples and their order."""
    monkeypatch.setattr("runtime.identity.SAMPLES", 2)  # of 35 samples
    mine = tmp_path / "train.txt"
    text = Path(flags[1]).read_text()
    mine.write_text(text)
    flags = [flags[0], str(mine), *flags[2:]]
    assert start(tmp_path / "run", flags) == 0
    words = text.split("root")
    for changed in ("soot".join(["root".join(words[:3]), "root".join(words[3:])]), text):
        mine.write_text(changed)
        capfd.readouterr()
        code = start(tmp_path / "run", flags, "--max-steps", "5")
        said = capfd.readouterr().err
        words = "was saved by a different run: training data is "
        assert code == (changed != text) and (words in said) == bool(code)
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4, 5]
