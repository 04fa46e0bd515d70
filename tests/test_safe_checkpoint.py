"""No code in a checkpoint, a model or a data file is ever run."""

import json
import os
import pathlib
import pickle
import shutil
import sys
from pathlib import Path
from typing import IO

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import error_lines, metrics
from in_process import start
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from transformers import LlamaForCausalLM

import gpt2_fsdp
from core import checkpoint, ranks, weights
from optional import safe_checkpoint
from prepare import read


class Hostile:
    """Creates the directory `marker` when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Return the path of the directory that hostile code would create."""
    return tmp_path / "was-here"


def add_code(metadata: Metadata, marker: Path) -> None:
    """Add an object that runs code when the metadata are read."""
    metadata.planner_data["more"] = Hostile(marker)


def add_bytes(metadata: Metadata, _: Path) -> None:
    """Make an entry of a tensor one that DCP would unpickle."""
    name = next(name for name in metadata.state_dict_metadata if name.startswith("model."))
    metadata.state_dict_metadata[name] = BytesStorageMetadata()


@pytest.mark.parametrize("attack, name", [(add_code, "mkdir"), (add_bytes, "BytesStorageMetadata")])
def test_hostile_checkpoint_runs_no_code(attack, name, texts, marker, tmp_path, capfd):
    """Its sizes and values match, and it has no checksums of files."""
    flags = ["--dataset", texts[0], "--val-dataset", texts[1], "--block-size", "32",
             "--model-name", "tiny", "--output-dir", tmp_path]  # fmt: skip
    assert start(gpt2_fsdp, *flags, "--max-steps", "2") == 0
    path = tmp_path / "checkpoints/step-00000002"
    metadata = dcp.FileSystemReader(path).read_metadata()
    attack(metadata, marker)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    state = json.loads((path / "train_state.json").read_text())
    state["sums"] = [{} for _ in state["sums"]]
    del state["crc"]
    state["files"][".metadata"] = (path / ".metadata").stat().st_size
    state["crc"] = checkpoint.crc_of(state)
    (path / "train_state.json").write_text(json.dumps(state))
    for more in (["--max-steps", "4"], ["--export-only"]):
        assert start(gpt2_fsdp, *flags, *more) == 1
        (error,) = error_lines(capfd.readouterr().err)
        assert f"{name}, which could run code" in error, more
        assert not marker.exists(), more


def test_resume_reads_the_metadata_once_and_saves_log_their_seconds(texts, tmp_path, monkeypatch):
    flags = ["--dataset", texts[0], "--val-dataset", texts[1], "--block-size", "32",
             "--model-name", "tiny", "--output-dir", tmp_path]  # fmt: skip
    assert start(gpt2_fsdp, *flags, "--max-steps", "2") == 0
    names = []

    def counted(path: Path, mode: str = "r", **options: object) -> IO:
        names.append((path.name, mode))
        return opened(path, mode, **options)

    opened = Path.open
    monkeypatch.setattr(Path, "open", counted)
    assert start(gpt2_fsdp, *flags, "--max-steps", "4") == 0
    assert names.count((".metadata", "rb")) == 1
    assert all(line["seconds"] > 0 for line in metrics(tmp_path, "save"))


def test_classes_of_python_3_13_are_allowed(process_group, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(pathlib.PosixPath, "__module__", "pathlib._local")
        patch.setitem(sys.modules, "pathlib._local", pathlib)
        dcp.save({"x": torch.zeros(1)}, checkpoint_id=tmp_path)
    assert b"pathlib._local" in (tmp_path / ".metadata").read_bytes()
    safe_checkpoint.check(tmp_path)


def test_pickle_is_refused_as_data(marker, tmp_path):
    torch.save(Hostile(marker), tmp_path / "data.pkl")
    with pytest.raises(ranks.Problem, match="data.pkl cannot be read"):
        read.read(str(tmp_path / "data.pkl"))
    assert not marker.exists()


THEIRS = {  # settings that name code, by file
    "config.json": {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}},
    "tokenizer_config.json": {
        "tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": ["theirs.Theirs", None]}},
}  # fmt: skip


@pytest.mark.parametrize("name", [*THEIRS, "pytorch_model.bin"])
def test_code_of_a_model_is_never_run(name, process_group, llama_directory, marker, tmp_path):
    directory = Path(shutil.copytree(llama_directory, tmp_path / "model"))
    (directory / "theirs.py").write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    if name in THEIRS:
        (directory / name).write_text(json.dumps(THEIRS[name]))
    else:
        for file in directory.glob("model*"):
            file.unlink()
        torch.save({"lm_head.weight": Hostile(marker)}, directory / name)
    message = "custom code" if name in THEIRS else "model.safetensors"
    with pytest.raises((OSError, ValueError), match=message):
        _, config, *_ = weights.open_model(str(directory), LlamaForCausalLM)
        weights.new_model(LlamaForCausalLM, config, directory)
    assert not marker.exists()
