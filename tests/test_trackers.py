"""--track: trackers are sent what metrics.jsonl has, go on with a run, and never end one."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from conftest import losses, metrics, status

import gpt2_fsdp


@pytest.fixture
def flags(gpt2_directory: Path, texts: tuple, tmp_path: Path) -> list[str]:
    """Return a short run on one process."""
    return ["--model-name", str(gpt2_directory), "--dataset", str(texts[0]), "--val-dataset",
            str(texts[1]), "--block-size", "32", "--num-train-samples", "35", "--log-every", "1",
            "--save-every", "1", "--output-dir", str(tmp_path / "run")]  # fmt: skip


def run_twice(flags: list[str]) -> None:
    """Train three steps, and two more by the same command."""
    for steps in ("3", "5"):
        gpt2_fsdp.fsdp_main(gpt2_fsdp.parse_args([*flags, "--max-steps", steps]))


def numbers(output: Path) -> dict[tuple[str, int], float]:
    """Return the numbers of metrics.jsonl by event/name and step."""
    found = {}
    for event in ("train", "val", "save", "done"):
        for line in metrics(output, event):
            for name in set(line) - {"event", "step", "epoch", "losses"}:
                found[f"{event}/{name}", line["step"]] = line[name]
            for name, loss in line.get("losses", {}).items():
                found[f"{event}/losses/{name}", line["step"]] = loss
    assert len(found) > 40
    return found


def test_tensorboard_has_the_same_numbers(flags, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_twice([*flags, "--track", "tensorboard"])
    place = tmp_path / "run/track/tensorboard"
    stored = EventAccumulator(str(place))
    stored.Reload()
    found = {}
    for name in stored.Tags()["scalars"]:
        for event in stored.Scalars(name):
            assert (name, event.step) not in found
            found[name, event.step] = event.value
    expected = numbers(tmp_path / "run")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-6), key


def test_trackio_has_the_same_losses(flags, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    run_twice([*flags, "--track", "trackio"])
    (run,) = SQLiteStorage.get_runs("gpt2_fsdp")
    logged = SQLiteStorage.get_logs("gpt2_fsdp", run)
    found = {line["step"]: line["train/loss"] for line in logged if "train/loss" in line}
    assert found == losses(tmp_path / "run")


def test_wandb_continues_one_run(flags, tmp_path, monkeypatch):
    """Two starts are stored under one run id."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run_twice([*flags, "--track", "wandb"])
    stores = sorted((tmp_path / "run/track/wandb").glob("offline-run-*/*.wandb"))
    assert len(stores) == 2 and len({path.name for path in stores}) == 1


class Broken(ModuleType):
    """A tracker without a network."""

    def init(self, **_: object) -> None:
        """Fail as without a network."""
        raise ConnectionError("no route to host")


def test_failing_tracker_does_not_end_the_run(flags, tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "wandb", Broken("wandb"))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name == "wandb" or find_spec(name)
    )
    gpt2_fsdp.fsdp_main(gpt2_fsdp.parse_args([*flags, "--track", "wandb", "--max-steps", "2"]))
    said = capfd.readouterr()
    assert (said.out + said.err).count("--track wandb failed") == 1
    assert "no route to host" in said.out + said.err
    assert status(tmp_path / "run") == "finished"
