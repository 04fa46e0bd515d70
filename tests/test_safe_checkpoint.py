"""No code in a checkpoint or data file is ever run."""

import io
import json
import os
import pathlib
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import error_lines
from in_process import start
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

import gpt2_fsdp
from core import reading
from optional import safe_checkpoint


class Hostile:
    """Creates a directory when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Return the path of the directory that hostile code would create."""
    return tmp_path / "was-here"


@pytest.fixture
def flags(texts: tuple[Path, Path], tmp_path: Path) -> list[str]:
    """Return flags for a run of `tiny`, which has dropout, that saves every second step."""
    return ["--dataset", texts[0], "--val-dataset", texts[1], "--block-size", "32",
            "--num-train-samples", "0", "--num-val-samples", "0", "--log-every", "1",
            "--save-every", "2", "--model-name", "tiny", "--batch-size", "4",
            "--output-dir", tmp_path / "run"]  # fmt: skip


def hostile_metadata(path: Path, marker: Path) -> None:
    """Replace the metadata with a pickle that runs code."""
    (path / ".metadata").write_bytes(pickle.dumps(Hostile(marker)))


def hostile_class(path: Path, marker: Path) -> None:
    """Add an object that runs code to valid metadata."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    metadata.planner_data["more"] = Hostile(marker)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def hostile_tensor(path: Path, marker: Path) -> None:
    """Replace a weight with an entry that is not a tensor, so that DCP would unpickle it."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    name = next(name for name in metadata.state_dict_metadata if name.startswith("model."))
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    index, location = next((k, v) for k, v in metadata.storage_data.items() if k.fqn == name)
    file = path / location.relative_path
    code = io.BytesIO()
    torch.save(Hostile(marker), code)
    location = replace(location, offset=file.stat().st_size, length=len(code.getvalue()))
    del metadata.storage_data[index]
    metadata.storage_data[MetadataIndex(name)] = location
    file.write_bytes(file.read_bytes() + code.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("attack, message", [
    (hostile_metadata, "mkdir, which could run code"),
    (hostile_class, "mkdir, which could run code"),
    (hostile_tensor, "BytesStorageMetadata, which could run code"),
])  # fmt: skip
def test_hostile_checkpoint_runs_no_code(attack, message, flags, marker, tmp_path, capfd):
    """Its sizes and checksums match."""
    assert start(gpt2_fsdp, *flags, "--max-steps", "2") == 0
    path = tmp_path / "run/checkpoints/step-00000002"
    attack(path, marker)
    (path / "crc-0.json").unlink()
    state = json.loads((path / "train_state.json").read_text())
    state["files"] = {name: (path / name).stat().st_size for name in state["files"]}
    (path / "train_state.json").write_text(json.dumps(state))
    for more in (["--max-steps", "4"], ["--export-only"]):
        assert start(gpt2_fsdp, *flags, *more) == 1
        assert message in error_lines(capfd.readouterr().err)[0], more
        assert not marker.exists(), more


def test_classes_of_python_3_13_are_allowed(process_group, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(pathlib.PosixPath, "__module__", "pathlib._local")
        patch.setitem(sys.modules, "pathlib._local", pathlib)
        dcp.save({"x": torch.zeros(1)}, checkpoint_id=tmp_path)
    assert b"pathlib._local" in (tmp_path / ".metadata").read_bytes()
    safe_checkpoint.check(tmp_path)


@pytest.mark.parametrize("name", ["data.pt", "data.pkl", "data"])
def test_pickles_and_scripts_are_refused_as_data(name, process_group, marker, tmp_path):
    path = tmp_path / name
    if path.suffix:
        torch.save(Hostile(marker), path)
    else:
        path.mkdir()
        (path / "data.py").write_text(f"import os\nos.mkdir({str(marker)!r})\n")
        torch.save(Hostile(marker), path / "train.pkl")
    with pytest.raises((OSError, ValueError)):
        reading.read(str(path))
    assert not marker.exists()
