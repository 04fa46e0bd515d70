"""--track: trackers log the values of metrics.jsonl, resume with a run and never end one."""

import sys
from pathlib import Path
from unittest import mock

import pytest
from conftest import losses, metrics, status
from in_process import start

import gpt2_fsdp
from core.args import Run
from optional import trackers
from optional.trackers import Track


@pytest.fixture
def flags(block_flags: list[str], tmp_path: Path) -> list:
    """Return flags for a short run on one process."""
    return [*block_flags, "--save-every", "1", "--output-dir", tmp_path / "run"]


def run_twice(flags: list[str]) -> None:
    """Train three steps, then resume for two more."""
    for steps in ("3", "5"):
        assert start(gpt2_fsdp, *flags, "--max-steps", steps) == 0


def numbers(output: Path) -> dict[tuple[str, int], float]:
    """Return the values in metrics.jsonl by event/name and step."""
    values = {}
    for event in ("train", "val", "save", "done"):
        for line in metrics(output, event):
            for name in set(line) - {"event", "step", "time", "losses"}:
                values[f"{event}/{name}", line["step"]] = line[name]
            for name, loss in line.get("losses", {}).items():
                values[f"{event}/losses/{Path(name).name}", line["step"]] = loss
    assert len(values) > 35
    return values


def test_tensorboard_logs_the_values_of_metrics_jsonl(flags, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_twice([*flags, "--track", "tensorboard"])
    events = EventAccumulator(str(tmp_path / "run/track/tensorboard"))
    events.Reload()
    values = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            assert (name, event.step) not in values
            values[name, event.step] = event.value
    expected = numbers(tmp_path / "run")
    first_end = {key for key in values if key[0].startswith("done/") and key[1] == 3}
    assert values.keys() == expected.keys() | first_end  # metrics.jsonl has one end
    for key, value in expected.items():
        assert values[key] == pytest.approx(value, rel=1e-6), key


def test_trackio_logs_the_losses_of_metrics_jsonl(flags, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read on import
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    run_twice([*flags, "--track", "trackio"])
    (run,) = SQLiteStorage.get_runs("gpt2_fsdp")
    logs = SQLiteStorage.get_logs("gpt2_fsdp", run)
    values = {line["step"]: line["train/loss"] for line in logs if "train/loss" in line}
    assert values == losses(tmp_path / "run")


def test_wandb_resumes_the_same_run(flags, tmp_path, monkeypatch):
    """Both starts are stored under one run id, and under the user's names."""
    pytest.importorskip("wandb")
    for key, value in {"MODE": "offline", "SILENT": "true", "PROJECT": "mine", "NAME": "first",
                       "RUN_GROUP": "sweep"}.items():  # fmt: skip
        monkeypatch.setenv(f"WANDB_{key}", value)
    run_twice([*flags, "--track", "wandb"])
    stores = sorted((tmp_path / "run/track/wandb").glob("offline-run-*/*.wandb"))
    assert len(stores) == 2 and len({path.name for path in stores}) == 1
    assert all(word in stores[0].read_bytes() for word in (b"mine", b"first", b"sweep"))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_tracker_gets_run_and_numbers(name, process_group, tmp_path, monkeypatch):
    tracker = mock.Mock()
    tracker.init.return_value = tracker
    monkeypatch.setitem(sys.modules, name, tracker)
    variable = f"{name.upper()}_PROJECT"
    monkeypatch.delenv(variable, raising=False)
    args = gpt2_fsdp.Args(run=Run(output_dir=tmp_path), track=Track(track=(name,)))
    log = mock.Mock(write=lambda event, step, **values: {"step": step, "time": 1.5} | values)
    trackers.follow(log, args, "my_script", 0)
    options = tracker.init.call_args.kwargs
    assert options.pop("config")["optim"]["lr"] == args.optim.lr
    run = (tmp_path / "track/id").read_text()
    run = {"id": run, "dir": tmp_path / "track"} if name == "wandb" else {"name": run}
    assert options == {"project": "my_script", "resume": "allow"} | run
    log.write("start", 0, samples=5)
    log.write("val", 2, loss=1.5, losses={"a/x": 2.5, "b/x": 3.5, "a/y.csv": 4.5}, text="text")
    trackers.finish()
    numbers = {"val/loss": 1.5, "val/losses/x": 2.5, "val/losses/b/x": 3.5, "val/losses/y.csv": 4.5}
    assert tracker.mock_calls[1:] == [mock.call.log(numbers, step=2), mock.call.finish()]
    monkeypatch.setenv(variable, "mine")
    trackers.follow(log, args, "my_script", 5)
    trackers.finish()
    options = tracker.init.call_args.kwargs
    assert options.items() >= {"project": "mine"}.items() | run.items()


def test_failing_tracker_does_not_end_the_run(flags, tmp_path, monkeypatch, capfd):
    tracker = mock.Mock()
    tracker.init.side_effect = ConnectionError("no route to host")
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    assert start(gpt2_fsdp, *flags, "--track", "wandb", "--max-steps", "2") == 0
    output = capfd.readouterr().out
    assert output.count("--track wandb failed") == 1 and "no route to host" in output
    assert status(tmp_path / "run") == "finished"
