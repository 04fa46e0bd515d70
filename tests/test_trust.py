"""Check that code in weights, data, hub repositories and checkpoints is never executed."""

import io
import json
import os
import pathlib
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from transformers import LlamaConfig, LlamaForCausalLM

import gpt2_fsdp
from benchmarks.driven import parse_flags
from runtime import checkpoints, readers, weights


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
def code(marker: Path) -> str:
    """Return Python code that creates `marker`."""
    return f"import os\nos.mkdir({str(marker)!r})\n"


def test_pickled_weights_are_refused(process_group, llama_directory, marker, tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    shutil.copy(llama_directory / "config.json", directory)
    torch.save({"lm_head.weight": Hostile(marker)}, directory / "pytorch_model.bin")
    config = LlamaConfig.from_pretrained(directory)
    with pytest.raises(OSError, match="model.safetensors cannot be read"):
        weights.new_model(LlamaForCausalLM, config, directory)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["data.pt", "data.pkl", "data"])
def test_pickles_and_scripts_are_refused_as_data(name, marker, code, tmp_path):
    path = tmp_path / name
    if path.suffix:
        torch.save(Hostile(marker), path)
    else:
        path.mkdir()
        (path / "data.py").write_text(code)
        torch.save(Hostile(marker), path / "train.pkl")
    with pytest.raises(ValueError, match="cannot be read"):
        readers.read(str(path), None)
    assert not marker.exists()


def test_custom_model_code_is_refused(process_group, llama_directory, marker, code, tmp_path):
    directory = Path(shutil.copytree(llama_directory, tmp_path / "model"))
    (directory / "theirs.py").write_text(code)
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="custom code"):
        weights.open_model(str(directory), LlamaForCausalLM)
    assert not marker.exists()


def test_custom_tokenizer_code_is_refused(llama_directory, marker, code, tmp_path):
    directory = Path(shutil.copytree(llama_directory, tmp_path / "model"))
    (directory / "theirs.py").write_text(code)
    settings = {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": ["theirs.Theirs", None]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="custom code"):
        weights.load_tokenizer(directory)
    assert not marker.exists()


@pytest.fixture
def flags(texts: tuple[Path, Path]) -> list[str]:
    """Return flags for a run of `tiny`, which has dropout, that saves every second step."""
    return ["--dataset", str(texts[0]), "--val-dataset", str(texts[1]), "--block-size", "32",
            "--num-train-samples", "0", "--num-val-samples", "0", "--log-every", "1",
            "--save-every", "2", "--model-name", "tiny", "--batch-size", "4"]  # fmt: skip


def run(flags: list[str], output: Path, *more: str) -> None:
    """Run the script in this process."""
    gpt2_fsdp.fsdp_main(parse_flags(gpt2_fsdp, [*flags, "--output-dir", str(output), *more]))


def rewrite(path: Path, name: str, write: Callable[[Path], None]) -> None:
    """Let `write` change a file of a checkpoint, then update the checksums to match."""
    write(path / name)
    saved = json.loads((path / "train_state.json").read_text())
    saved["files"][name] = checkpoints.file_sum(path / name)
    del saved["crc"]
    saved["crc"] = checkpoints.checksum(json.dumps(saved))
    (path / "train_state.json").write_text(json.dumps(saved))


def hostile_metadata(path: Path, marker: Path) -> None:
    """Replace the metadata with a pickle that runs code."""
    rewrite(path, ".metadata", lambda file: file.write_bytes(pickle.dumps(Hostile(marker))))


def hostile_class(path: Path, marker: Path) -> None:
    """Add an object that runs code to valid metadata."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    metadata.planner_data["more"] = Hostile(marker)
    rewrite(path, ".metadata", lambda file: file.write_bytes(pickle.dumps(metadata)))


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
    rewrite(path, file.name, lambda file: file.write_bytes(file.read_bytes() + code.getvalue()))
    rewrite(path, ".metadata", lambda file: file.write_bytes(pickle.dumps(metadata)))


def hostile_full_file(path: Path, marker: Path) -> None:
    """Replace the file of a full checkpoint with a pickle that runs code."""
    rewrite(path, "full.pt", lambda file: torch.save({"model": Hostile(marker)}, file))


def test_checkpoint_that_python_3_13_saved_resumes(flags, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(pathlib.PosixPath, "__module__", "pathlib._local")
        patch.setitem(sys.modules, "pathlib._local", pathlib)
        run(flags, tmp_path, "--max-steps", "2")
    assert b"pathlib._local" in (tmp_path / "checkpoints/step-00000002/.metadata").read_bytes()
    run(flags, tmp_path, "--max-steps", "4")
    assert (tmp_path / "checkpoints/step-00000004").is_dir()


@pytest.mark.parametrize("attack, message", [
    (hostile_metadata, "mkdir, which could run code"),
    (hostile_class, "mkdir, which could run code"),
    (hostile_tensor, "BytesStorageMetadata, which could run code"),
    (hostile_full_file, "is not a file of tensors"),
])  # fmt: skip
def test_hostile_checkpoint_runs_no_code(attack, message, flags, marker, tmp_path, capfd):
    """The checksums match, so they do not protect the run."""
    output = tmp_path / "run"
    kind = "full" if "full" in attack.__name__ else "sharded"
    run(flags, output, "--max-steps", "2", "--checkpoint-type", kind)
    attack(output / "checkpoints/step-00000002", marker)
    for more in (["--max-steps", "4"], ["--export-only"]):
        with pytest.raises(SystemExit):
            run(flags, output, *more)
        assert message in capfd.readouterr().err, more
        assert not marker.exists(), more
