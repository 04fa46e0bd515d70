"""What a user does to OUTPUT_DIR between two starts: nothing is lost, or mistaken for another."""

import json
import os
import shutil
from pathlib import Path

import pytest
from conftest import check_equal_weights, errors_said, losses, metrics, status

import gpt2_fsdp
from runtime import checkpoints, hf_export, lock
from runtime.metrics import read_events


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
    """They were deleted to save space. More steps, and another run, are refused."""
    shutil.rmtree(finished / "checkpoints")
    before = everything(finished)
    assert start(finished, flags) == 0
    said = capfd.readouterr().out
    assert "is finished, and its checkpoints are gone: another --output-dir begins anew" in said
    assert start(finished, flags, "--max-steps", "6") == 1
    said = capfd.readouterr().err
    assert "its checkpoints are gone: it cannot go on from step 4 to 6; another --output" in said
    assert start(finished, flags, "--seed", "1") == 1
    assert "differs in seed (0 there, 1 here)" in capfd.readouterr().err
    assert everything(finished) == before and status(finished) == "finished"


def test_a_checkpoint_under_another_name(
    finished: Path, flags: list[str], capfd: pytest.CaptureFixture
) -> None:
    """It is neither resumed, exported nor pruned, and stands in nobody's way."""
    place = finished / "checkpoints"
    (place / "step-00000002").rename(place / "step-00000006")
    assert start(finished, flags, "--max-steps", "8", "--keep-checkpoints", "1") == 0
    said = capfd.readouterr().out
    assert f"step-00000006 holds step 2: `mv {place}/step-00000006 {place}/step-00000002`" in said
    assert [line["step"] for line in metrics(finished, "start")] == [0, 4]
    assert list(losses(finished)) == list(range(1, 9))
    names = {path.name for path in place.glob("step-*")}
    assert names == {"step-00000008", "step-00000006-holds-2"}


def test_no_checkpoint_but_one_under_another_name(
    finished: Path, flags: list[str], capfd: pytest.CaptureFixture
) -> None:
    """Every way of using it is refused, with what mends it."""
    place = finished / "checkpoints"
    shutil.rmtree(place / "step-00000002")
    wrong = (place / "step-00000004").rename(place / "step-00000030")
    before = everything(finished)
    elsewhere = finished.parent / "elsewhere"
    for path, more in (
        (finished, []),
        (finished, ["--export-only"]),
        (finished, ["--evaluate-only"]),
        (elsewhere, ["--resume", str(wrong)]),
    ):
        assert start(path, flags, *more) == 1
        said = capfd.readouterr().err
        assert f"{wrong} holds step 4: `mv {wrong} {place}/step-00000004` gives it its" in said
    assert everything(finished) == before
    wrong.rename(place / "step-00000004")
    assert start(finished, flags) == 0


@pytest.mark.parametrize("number", [2, None])
def test_a_checkpoint_of_another_format(
    number: int | None, finished: Path, flags: list[str], capfd: pytest.CaptureFixture
) -> None:
    """It is of a version after or before this one: refused, however it is given, and left alone."""
    path = finished / "checkpoints/step-00000004"
    saved = json.loads((path / "train_state.json").read_text())
    del saved["crc"], saved["format"]
    if number:
        saved["format"] = number
        saved["crc"] = checkpoints.json_sum(saved)
    (path / "train_state.json").write_text(json.dumps(saved))
    before = everything(finished)
    for output_dir, more in (
        (finished, ["--max-steps", "6"]),
        (finished, ["--evaluate-only"]),
        (finished.parent / "elsewhere", ["--resume", str(path)]),
    ):
        assert start(output_dir, flags, *more) == 1
        (error,) = errors_said(capfd.readouterr().err)
        assert f"{path} has format {number}, and this version reads 1: " in error
    assert everything(finished) == before


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


def test_what_is_left_where_no_checkpoint_is_whole(
    finished: Path, flags: list[str], capfd: pytest.CaptureFixture
) -> None:
    """Best weights, which nothing goes on from, and an export, with which a run may begin."""
    for path in finished.glob("checkpoints/step-*/train_state.json"):
        path.write_text("{")
    assert start(finished, flags, "--max-steps", "9") == 1
    (error,) = errors_said(capfd.readouterr().err)
    assert "has weights alone, from which no run goes on" in error
    assert f"--model-name {finished / 'best'} begins with what it has exported" in error


def test_copies_of_the_user_stay(finished: Path, flags: list[str]) -> None:
    """Whatever their names, and whatever is in them."""
    place = finished / "checkpoints"
    shutil.copytree(place / "step-00000002", place / "step-00000002-keep")
    mine = ["step-00000004.bak", "step-5", "step-latest", "best-of-all", "tmp-notes", "damaged-old"]
    for name in mine:
        (place / name).mkdir()
    (place / "tmp-step-00000099").mkdir()  # left by a kill
    assert start(finished, flags, "--max-steps", "6", "--keep-checkpoints", "1") == 0
    kept = {path.name for path in place.iterdir() if not path.name.startswith("best-0")}
    assert kept == {*mine, "step-00000002-keep", "step-00000006"}


@pytest.mark.parametrize("torn", ["5\n", "\xff\xfe\n", "{}\n", '["event"]\n', '{"event": "tr'])
def test_lines_of_metrics_that_are_no_events(
    torn: str, finished: Path, flags: list[str], capfd: pytest.CaptureFixture
) -> None:
    """At the beginning and at the end: left out, and counted."""
    path = finished / "metrics.jsonl"
    before = path.read_bytes()
    strange = torn.encode("latin-1")
    path.write_bytes(strange.rstrip(b"\n") + b"\n" + before + strange)
    assert start(finished, flags, "--max-steps", "5") == 0
    assert "metrics.jsonl: 2 lines that are no events are left out" in capfd.readouterr().out
    assert list(losses(finished)) == [1, 2, 3, 4, 5]


def test_a_status_or_a_lock_that_is_not_ours(
    finished: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """A lock without a heartbeat is taken over, a status is written anew; a directory is named."""
    monkeypatch.setattr(lock, "LOCK_SECONDS", 0.5)
    for content in b"5", b"\xff\xfe\x00", b"[]":
        (finished / "lock").write_bytes(content)
        (finished / "status").write_bytes(content)
        assert start(finished, flags) == 0
        assert not (finished / "lock").exists()
    assert status(finished) == "finished" and list(losses(finished)) == [1, 2, 3, 4]
    (finished / "lock").mkdir()
    assert start(finished, flags) == 1
    assert f"{finished}/lock is a directory" in capfd.readouterr().err


def test_without_its_status(finished: Path, flags: list[str]) -> None:
    """The checkpoints say whose they are."""
    (finished / "status").unlink()
    assert start(finished, flags, "--max-steps", "5") == 0
    assert list(losses(finished)) == [1, 2, 3, 4, 5] and status(finished) == "finished"


@pytest.mark.parametrize("name", ["final", "best"])
def test_an_export_that_would_go_elsewhere(
    name: str, finished: Path, flags: list[str], capfd: pytest.CaptureFixture
) -> None:
    """A link, or a file, is seen before training; what it leads to stays."""
    target = (finished / name).rename(finished.parent / "target")
    (finished / name).symlink_to(target)
    before = everything(target)
    for _ in range(2):
        assert start(finished, flags, "--max-steps", "5") == 1
        assert f"{finished}/{name} is a link or a file" in capfd.readouterr().err
        (finished / name).unlink()
        (finished / name).write_text("mine")
    assert everything(target) == before
    assert len(metrics(finished, "start")) == 1


def test_nothing_is_left_of_an_export_that_failed(
    finished: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """The one before stays."""
    monkeypatch.setattr(hf_export.Place, "write", lambda *_: 1 / 0)
    before = everything(finished / "final")
    with pytest.raises(ZeroDivisionError):
        start(finished, flags, "--export-only")
    assert not list(finished.glob("tmp-*")) and everything(finished / "final") == before


def test_no_checkpoint_before_the_last_damaged_one(
    finished: Path, flags: list[str], capfd: pytest.CaptureFixture
) -> None:
    """None is promised."""
    for path in finished.glob("checkpoints/step-*"):
        (path / "train_state.json").write_text("5")
    assert start(finished, flags) == 1
    lines = capfd.readouterr().out.splitlines()
    aside = [line for line in lines if "set aside" in line]
    assert aside[0].endswith(", and the one before is used")
    assert aside[1].endswith("as damaged-step-00000002")


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
    monkeypatch.setattr("runtime.identities.PROBES", 2)  # of 35 samples
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
        words = (
            f"that differs in data (the samples of {mine}, or those to validate on, are others, by"
        )
        assert code == (changed != text) and (words in said) == bool(code)
        assert "items" not in said and "crc" not in said
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4, 5]


def test_what_somebody_else_has_left(
    flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """Numbers that are not a run's, and a directory that no run has prepared, stay."""
    mine = tmp_path / "prepared/book.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    assert start(tmp_path, flags, "--prepare-only") == 1
    assert "would replace" in capfd.readouterr().err and mine.read_text() == "mine"
    (tmp_path / "metrics.jsonl").write_text("1.5\n2.5\n")
    assert start(tmp_path, flags) == 1
    assert "metrics.jsonl is of something else: move it" in capfd.readouterr().err
    assert (tmp_path / "metrics.jsonl").read_text() == "1.5\n2.5\n"


def test_a_finished_run_of_which_little_is_left(finished: Path, flags: list[str]) -> None:
    """Its metrics and best/ are not written over where final/ was moved away, too."""
    shutil.rmtree(finished / "checkpoints")
    shutil.rmtree(finished / "final")
    before = everything(finished)
    assert start(finished, flags) == 0
    assert everything(finished) == before


def test_held_step(finished: Path) -> None:
    """A description that is damaged holds none: the checkpoint is judged by its name."""
    path = finished / "checkpoints/step-00000004"
    assert checkpoints.held_step(path) == 4
    saved = json.loads((path / "train_state.json").read_text())
    (path / "train_state.json").write_text(json.dumps(saved | {"step": 2}))
    assert checkpoints.held_step(path) is None
    assert checkpoints.find(path.parent)[0][-1] == path
    assert read_events(finished.parent) == ([], 0)
    check_equal_weights(finished / "final", finished / "best")
