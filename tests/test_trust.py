"""What comes from strangers is never run: weights, data, code of the hub, and checkpoints."""

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from transformers import LlamaConfig, LlamaForCausalLM

import gpt2_fsdp
from runtime import checkpoints, readers, weights


class Hostile:
    """Whoever unpickles it creates a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """Return the directory that hostile code would make."""
    return tmp_path / "was-here"


@pytest.fixture
def code(mark: Path) -> str:
    """Return hostile Python."""
    return f"import os\nos.mkdir({str(mark)!r})\n"


def test_pickled_weights_are_refused(alone, llama_directory, mark, tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    shutil.copy(llama_directory / "config.json", directory)
    torch.save({"lm_head.weight": Hostile(mark)}, directory / "pytorch_model.bin")
    config = LlamaConfig.from_pretrained(directory)
    with pytest.raises(OSError, match="model.safetensors cannot be read"):
        weights.new_model(LlamaForCausalLM, config, directory)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["data.pt", "data.pkl", "data"])
def test_pickles_and_scripts_as_data_are_refused(name, mark, code, tmp_path):
    place = tmp_path / name
    if place.suffix:
        torch.save(Hostile(mark), place)
    else:
        place.mkdir()
        (place / "data.py").write_text(code)
        torch.save(Hostile(mark), place / "train.pkl")
    with pytest.raises(ValueError, match="cannot be read"):
        readers.read(str(place), None)
    assert not mark.exists()


def test_code_of_a_model_is_refused(alone, llama_directory, mark, code, tmp_path):
    directory = Path(shutil.copytree(llama_directory, tmp_path / "model"))
    (directory / "theirs.py").write_text(code)
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="custom code"):
        weights.open_model(str(directory), LlamaForCausalLM)
    assert not mark.exists()


def test_code_of_a_tokenizer_is_refused(llama_directory, mark, code, tmp_path):
    directory = Path(shutil.copytree(llama_directory, tmp_path / "model"))
    (directory / "theirs.py").write_text(code)
    settings = {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": ["theirs.Theirs", None]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="custom code"):
        weights.load_tokenizer(directory, 1000)
    assert not mark.exists()


@pytest.fixture
def flags(texts: tuple[Path, Path]) -> list[str]:
    """Return a `tiny` of dropout, saved at every second step."""
    return ["--dataset", str(texts[0]), "--val-dataset", str(texts[1]), "--block-size", "32",
            "--num-train-samples", "0", "--num-val-samples", "0", "--log-every", "1",
            "--save-every", "2", "--model-name", "tiny", "--batch-size", "4"]  # fmt: skip


def run(flags: list[str], output: Path, *more: str) -> None:
    """Run the script in this process."""
    gpt2_fsdp.fsdp_main(gpt2_fsdp.parse_args([*flags, "--output-dir", str(output), *more]))


def put(path: Path, name: str, write: Callable[[Path], None]) -> None:
    """Change a file of a checkpoint, and make its checksums right again."""
    write(path / name)
    saved = json.loads((path / "train_state.json").read_text())
    saved["files"][name] = checkpoints.file_sum(path / name)
    del saved["crc"]
    text = json.dumps(saved | {"crc": checkpoints.json_sum(saved)})
    (path / "train_state.json").write_text(text)


def hostile_metadata(path: Path, mark: Path) -> None:
    """Replace the metadata by a pickle that runs code."""
    put(path, ".metadata", lambda file: file.write_bytes(pickle.dumps(Hostile(mark))))


def hostile_class(path: Path, mark: Path) -> None:
    """Hide the code in metadata that are otherwise valid."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    metadata.planner_data["more"] = Hostile(mark)
    put(path, ".metadata", lambda file: file.write_bytes(pickle.dumps(metadata)))


def hostile_entry(path: Path, mark: Path) -> None:
    """Replace a weight by an entry that is not a tensor, which DCP would unpickle."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    name = next(name for name in metadata.state_dict_metadata if name.startswith("model."))
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    index, place = next((k, v) for k, v in metadata.storage_data.items() if k.fqn == name)
    file = path / place.relative_path
    code = io.BytesIO()
    torch.save(Hostile(mark), code)
    place = replace(place, offset=file.stat().st_size, length=len(code.getvalue()))
    del metadata.storage_data[index]
    metadata.storage_data[MetadataIndex(name)] = place
    put(path, file.name, lambda file: file.write_bytes(file.read_bytes() + code.getvalue()))
    put(path, ".metadata", lambda file: file.write_bytes(pickle.dumps(metadata)))


def hostile_full(path: Path, mark: Path) -> None:
    """Replace the single file by a pickle that runs code."""
    put(path, "full.pt", lambda file: torch.save({"model": Hostile(mark)}, file))


@pytest.mark.parametrize("attack, message", [
    (hostile_metadata, "mkdir, which could run code"),
    (hostile_class, "mkdir, which could run code"),
    (hostile_entry, "which is not a tensor"),
    (hostile_full, "is not a file of tensors"),
])  # fmt: skip
def test_hostile_checkpoint_runs_no_code(attack, message, flags, mark, tmp_path, capfd):
    """Although its checksums match."""
    output = tmp_path / "run"
    kind = "full" if "full" in attack.__name__ else "sharded"
    run(flags, output, "--max-steps", "2", "--checkpoint-type", kind)
    attack(output / "checkpoints/step-00000002", mark)
    for more in (["--max-steps", "4"], ["--export-only"]):
        with pytest.raises(SystemExit):
            run(flags, output, *more)
        assert message in capfd.readouterr().err, more
        assert not mark.exists(), more
