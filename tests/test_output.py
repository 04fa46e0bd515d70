"""What a user does to OUTPUT_DIR between two starts: nothing is lost, or mistaken for another."""

import os
import shutil
from pathlib import Path

import pytest
from conftest import losses, status

import gpt2_fsdp
from runtime import export


@pytest.fixture(scope="module")
def flags(texts: tuple[Path, Path]) -> list[str]:
    """Four steps of a `tiny`, saved at every second."""
    return ["--dataset", str(texts[0]), "--val-dataset", str(texts[1]), "--block-size", "32",
            "--num-train-samples", "0", "--num-val-samples", "0", "--log-every", "1",
            "--save-every", "2", "--model-name", "tiny", "--batch-size", "4",
            "--max-steps", "4"]  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, flags: list[str]) -> Path:
    """A finished run."""
    path = tmp_path_factory.mktemp("original") / "run"
    start(path, flags)
    return path


@pytest.fixture
def finished(original: Path, tmp_path: Path) -> Path:
    """A copy of it."""
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


def test_a_finished_run_without_checkpoints_stays_finished(
    finished: Path, flags: list[str], capfd: pytest.CaptureFixture
) -> None:
    """They were deleted to save space. It does not start over for more steps either."""
    shutil.rmtree(finished / "checkpoints")
    before = everything(finished)
    assert start(finished, flags) == 0
    said = capfd.readouterr().out
    assert "is finished at 4 steps. Raise --max-steps or --epochs to resume" in said
    assert start(finished, flags, "--max-steps", "6") == 0
    assert "for which its checkpoints are needed" in capfd.readouterr().out
    assert everything(finished) == before and status(finished) == "finished"


def test_files_have_the_modes_that_the_umask_asks_for(
    original: Path, flags: list[str], tmp_path: Path
) -> None:
    """Safetensors makes its own for one user alone. Weights that stand twice are one file."""
    before = os.umask(0o027)
    try:
        assert start(tmp_path / "run", flags) == 0
    finally:
        os.umask(before)
    files = [x for x in tmp_path.glob("run/*/*") if x.is_file()]
    assert len(files) > 8
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {"0o640"}


def test_copies_of_the_user_stay(finished: Path, flags: list[str]) -> None:
    """Whatever their names, and whatever is in them."""
    place = finished / "checkpoints"
    shutil.copytree(place / "step-00000002", place / "step-00000002-keep")
    mine = ["step-00000004.bak", "step-5", "step-latest", "best-of-all", "tmp-notes"]
    for name in mine:
        (place / name).mkdir()
    (place / "step-00000099").mkdir()  # left by a kill
    assert start(finished, flags, "--max-steps", "6", "--keep-checkpoints", "1") == 0
    kept = {path.name for path in place.iterdir()}
    assert kept == {*mine, "step-00000002-keep", "step-00000006"}


@pytest.mark.parametrize("torn", ["5\n", "\xff\xfe\n", "{}\n", '["event"]\n', '{"event": "tr'])
def test_lines_of_metrics_that_are_no_events(torn: str, finished: Path, flags: list[str]) -> None:
    """At the beginning and at the end: left out."""
    path = finished / "metrics.jsonl"
    before = path.read_bytes()
    strange = torn.encode("latin-1")
    path.write_bytes(strange.rstrip(b"\n") + b"\n" + before + strange)
    assert start(finished, flags, "--max-steps", "5") == 0
    assert list(losses(finished)) == [1, 2, 3, 4, 5]


def test_a_status_or_a_lock_that_is_not_ours(
    finished: Path, flags: list[str], capfd: pytest.CaptureFixture
) -> None:
    """Both are replaced; a directory in place of the lock is an error."""
    for content in b"5", b"\xff\xfe\x00":
        (finished / "lock").write_bytes(content)
        (finished / "status").write_bytes(content)
        assert start(finished, flags) == 0
        assert not (finished / "lock").exists()
    assert status(finished) == "finished" and list(losses(finished)) == [1, 2, 3, 4]
    (finished / "lock").mkdir()
    assert start(finished, flags) == 1
    assert f"Is a directory: '{finished / 'lock'}'" in capfd.readouterr().err


def test_without_its_status(finished: Path, flags: list[str]) -> None:
    """The checkpoints say whose they are."""
    (finished / "status").unlink()
    assert start(finished, flags, "--max-steps", "5") == 0
    assert list(losses(finished)) == [1, 2, 3, 4, 5] and status(finished) == "finished"


def test_nothing_is_left_of_an_export_that_failed(
    finished: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """The one before stays."""
    monkeypatch.setattr(export, "save_file", lambda *_: 1 / 0)
    before = everything(finished / "final")
    with pytest.raises(ZeroDivisionError):
        start(finished, flags, "--export-only")
    assert not list(finished.glob("tmp-*")) and everything(finished / "final") == before


def test_prepared_tokens_leave_no_status(flags: list[str], tmp_path: Path) -> None:
    """Nothing was trained. A training in the same directory begins as in any."""
    assert start(tmp_path, flags, "--prepare-only") == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"prepared", "checkpoints"}
    assert start(tmp_path, flags) == 0
    assert status(tmp_path) == "finished"


def test_a_change_between_the_probes_is_seen(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """The whole data are summed, order included, wherever they lie in files."""
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


def test_what_somebody_else_has_left(
    flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """A directory that no run has prepared stays."""
    mine = tmp_path / "prepared/book.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    assert start(tmp_path, flags, "--prepare-only") == 1
    assert "prepared exists" in capfd.readouterr().err and mine.read_text() == "mine"


def test_a_finished_run_of_which_little_is_left(finished: Path, flags: list[str]) -> None:
    """Its metrics and best/ are not written over where final/ was moved away, too."""
    shutil.rmtree(finished / "checkpoints")
    shutil.rmtree(finished / "final")
    before = everything(finished)
    assert start(finished, flags) == 0
    assert everything(finished) == before
