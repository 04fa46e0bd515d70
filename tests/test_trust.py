"""What comes from strangers is never run: weights, data, code of the hub, and checkpoints."""

import json
import os
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import LlamaConfig, LlamaForCausalLM

import gpt2_fsdp
from runtime import checkpoints, hf_load
from runtime.rows import readers


class Hostile:
    """Whoever unpickles it creates a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """What hostile code would leave."""
    return tmp_path / "was-here"


@pytest.fixture
def code(mark: Path) -> str:
    """Hostile Python."""
    return f"import os\nos.mkdir({str(mark)!r})\n"


def test_the_code_is_hostile(mark: Path, tmp_path: Path) -> None:
    """Or what follows would show nothing."""
    torch.save(Hostile(mark), tmp_path / "file.pt")
    torch.load(tmp_path / "file.pt", weights_only=False)
    assert mark.exists()


def test_weights_in_a_bin(alone: None, llama_directory: Path, mark: Path, tmp_path: Path) -> None:
    """They are pickled: refused."""
    directory = tmp_path / "model"
    directory.mkdir()
    shutil.copy(llama_directory / "config.json", directory)
    torch.save({"lm_head.weight": Hostile(mark)}, directory / "pytorch_model.bin")
    config = LlamaConfig.from_pretrained(directory)
    with pytest.raises(ValueError, match="has only .bin weights"):
        hf_load.meta_model(LlamaForCausalLM, config, directory)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["data.pt", "data.pkl", "data"])
def test_data(name: str, mark: Path, code: str, tmp_path: Path) -> None:
    """Pickled files, and a data set that is a script: refused."""
    place = tmp_path / name
    if place.suffix:
        torch.save(Hostile(mark), place)
    else:
        place.mkdir()
        (place / "data.py").write_text(code)
        torch.save(Hostile(mark), place / "train.pkl")
    args = Namespace(dataset_config=None, train_split="train", val_split="validation")
    with pytest.raises(ValueError, match="did not load"):
        readers.read_hub(str(place), args)
    assert not mark.exists()


def test_code_of_a_model(llama_directory: Path, mark: Path, code: str, tmp_path: Path) -> None:
    """A type that Transformers does not know brings its own: refused, without a question."""
    directory = Path(shutil.copytree(llama_directory, tmp_path / "model"))
    (directory / "theirs.py").write_text(code)
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="its own code, which is never run"):
        hf_load.load_config(directory, LlamaForCausalLM, "theirs")
    assert not mark.exists()


def test_code_of_a_tokenizer(llama_directory: Path, mark: Path, code: str, tmp_path: Path) -> None:
    """The same."""
    directory = Path(shutil.copytree(llama_directory, tmp_path / "model"))
    (directory / "theirs.py").write_text(code)
    settings = {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": ["theirs.Theirs", None]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="its own code, which is never run"):
        hf_load.load_tokenizer(directory, 1000)
    assert not mark.exists()


@pytest.fixture
def flags(texts: tuple[Path, Path]) -> list[str]:
    """A `tiny` of dropout, saved at every second step."""
    return ["--train-file", str(texts[0]), "--val-file", str(texts[1]), "--block-size", "32",
            "--num-train-samples", "0", "--num-val-samples", "0", "--log-every", "1",
            "--save-every", "2", "--model-name", "tiny", "--batch-size", "4"]  # fmt: skip


def run(flags: list[str], output: Path, *more: str) -> None:
    """In this process."""
    gpt2_fsdp.fsdp_main(gpt2_fsdp.parse_args([*flags, "--output-dir", str(output), *more]))


def test_random_states_are_tensors(flags: list[str], tmp_path: Path) -> None:
    """Those of Python, NumPy and PyTorch."""
    run(flags, tmp_path, "--max-steps", "2")
    path = tmp_path / "checkpoints/step-00000002"
    names = set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
    states = {name for name in names if name.startswith("rng.")}
    assert states == {f"rng.0.{kind}" for kind in ("python", "numpy", "gauss", "torch")}


def test_a_full_checkpoint_is_not_unpickled(
    flags: list[str], mark: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """One sentence, though its checksum is right."""
    output = tmp_path / "run"
    run(flags, output, "--max-steps", "2", "--checkpoint-type", "full")
    path = output / "checkpoints/step-00000002"
    torch.save({"model": Hostile(mark)}, path / "full.pt")
    saved = json.loads((path / "train_state.json").read_text())
    saved["files"] = {"full.pt": checkpoints.file_sum(path / "full.pt")}
    del saved["crc"]
    text = json.dumps(saved | {"crc": checkpoints.json_sum(saved)})
    (path / "train_state.json").write_text(text)
    with pytest.raises(SystemExit):
        run(flags, output, "--max-steps", "4")
    assert "is no file of tensors" in capfd.readouterr().err
    assert not mark.exists()
