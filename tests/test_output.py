"""Changes that a user makes to OUTPUT_DIR or the data between two starts."""

import shutil
from pathlib import Path

import pytest
from conftest import losses, status

import gpt2_fsdp
from benchmarks.driven import parse_flags
from runtime import run


@pytest.fixture(scope="module")
def flags(texts: tuple[Path, Path]) -> list[str]:
    """Return flags for four steps of `tiny`, with a save at every second step."""
    return ["--dataset", str(texts[0]), "--val-dataset", str(texts[1]), "--block-size", "32",
            "--num-train-samples", "0", "--num-val-samples", "0", "--log-every", "1",
            "--save-every", "2", "--model-name", "tiny", "--batch-size", "4",
            "--max-steps", "4"]  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, flags: list[str]) -> Path:
    """Return the output directory of a finished run."""
    path = tmp_path_factory.mktemp("original") / "run"
    start(path, flags)
    return path


@pytest.fixture
def finished(original: Path, tmp_path: Path) -> Path:
    """Return a copy of the finished run."""
    return Path(shutil.copytree(original, tmp_path / "run"))


def start(path: Path, flags: list[str], *more: str) -> int:
    """Run the script in this process and return its exit code."""
    try:
        return gpt2_fsdp.fsdp_main(
            parse_flags(gpt2_fsdp, [*flags, "--output-dir", str(path), *more])
        )
    except SystemExit as end:
        return end.code


def test_unusable_output_directory_is_named(flags, tmp_path, capfd):
    (tmp_path / "file").touch()
    assert start(tmp_path / "file/run", flags) == 1
    assert f"error: --output-dir {tmp_path}/file/run cannot be used (" in capfd.readouterr().err


def test_directory_that_a_node_does_not_see_is_refused(flags, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(run.Lock, "__enter__", lambda _: None)  # rank 0 has made it elsewhere
    assert start(tmp_path, flags) == 1
    assert "is not on a file system that all nodes share" in capfd.readouterr().err


def modification_times(path: Path) -> dict[str, float]:
    """Return the modification time of each file of a run."""
    return {str(file): file.stat().st_mtime for file in path.rglob("*") if file.is_file()}


def test_finished_run_without_checkpoints_stays_finished(finished, flags, capfd):
    shutil.rmtree(finished / "checkpoints")
    before = modification_times(finished)
    assert start(finished, flags) == 0
    output = capfd.readouterr().out
    assert "is finished at 4 steps. To train longer, raise --max-steps" in output
    assert start(finished, flags, "--max-steps", "6") == 0
    assert "needs its checkpoints" in capfd.readouterr().out
    assert modification_times(finished) == before and status(finished) == "finished"


def test_user_files_beside_checkpoints_are_kept(finished, flags):
    checkpoints = finished / "checkpoints"
    shutil.copytree(checkpoints / "step-00000002", checkpoints / "step-00000002-keep")
    user_files = ["step-00000004.bak", "step-5", "step-latest", "best-of-all", "tmp-notes"]
    for name in user_files:
        (checkpoints / name).mkdir()
    (checkpoints / "step-00000099").mkdir()  # as a killed save leaves it
    assert start(finished, flags, "--max-steps", "6", "--keep-checkpoints", "1") == 0
    names = {path.name for path in checkpoints.iterdir()}
    assert names == {*user_files, "step-00000002-keep", "step-00000006"}


def test_resume_rejects_change_in_any_sample(flags, tmp_path, monkeypatch, capfd):
    """The fingerprint covers all samples and their order."""
    monkeypatch.setattr("runtime.checkpoints.SAMPLES", 2)  # of 35 samples
    file = tmp_path / "train.txt"
    text = Path(flags[1]).read_text()
    file.write_text(text)
    flags = [flags[0], str(file), *flags[2:]]
    assert start(tmp_path / "run", flags) == 0
    words = text.split("root")
    for changed in ("soot".join(["root".join(words[:3]), "root".join(words[3:])]), text):
        file.write_text(changed)
        capfd.readouterr()
        code = start(tmp_path / "run", flags, "--max-steps", "5")
        error = capfd.readouterr().err
        message = "was saved by a different run: training data is "
        assert code == (changed != text) and (message in error) == bool(code)
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4, 5]
