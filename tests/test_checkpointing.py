"""Pretrained weights as they come: several files, other names, other dtypes, and broken ones."""

import json
import time
from pathlib import Path

import pytest
import torch
from conftest import launch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, GPT2LMHeadModel, T5ForConditionalGeneration

import checkpointing


@pytest.fixture
def meta_model(t5_directory: Path) -> T5ForConditionalGeneration:
    """The model of `t5_directory` without storage."""
    with torch.device("meta"):
        return T5ForConditionalGeneration(AutoConfig.from_pretrained(t5_directory))


@pytest.fixture
def tensors(t5_directory: Path) -> dict[str, torch.Tensor]:
    """Its weights."""
    return load_file(t5_directory / "model.safetensors")


def test_names_that_are_known_to_be_superfluous_or_tied(
    meta_model: T5ForConditionalGeneration, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """t5-base carries one bias too many; other files hold the tied embedding under each name."""
    embedding = tensors.pop("shared.weight")
    bias = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    copies = {name: embedding.clone() for name in names}
    save_file(tensors | copies | {bias: torch.zeros(1)}, tmp_path / "model.safetensors")
    found = checkpointing._find_weights(meta_model, tmp_path)
    assert found.keys() == {name for name, _ in meta_model.named_parameters()}
    assert found["shared.weight"][1] in names


def test_all_that_is_wrong_is_named_at_once(
    meta_model: T5ForConditionalGeneration, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """A missing, an unknown and a wrongly shaped tensor."""
    tensors["extra.weight"] = torch.zeros(1)
    tensors["shared.weight"] = tensors["shared.weight"][:-1].clone()
    del tensors["decoder.final_layer_norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as error:
        checkpointing._find_weights(meta_model, tmp_path)
    said = str(error.value)
    assert "extra.weight is not the model's" in said
    assert "shared.weight has shape [383, 32], not [384, 32]" in said
    assert "decoder.final_layer_norm.weight is missing" in said
    assert said.count(";") == 2


def test_broken_files(
    meta_model: T5ForConditionalGeneration, t5_directory: Path, tmp_path: Path
) -> None:
    """Nothing, .bin alone, half a file, and an index that names a file which is not there."""
    file = tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match="model.safetensors cannot be read"):
        checkpointing._find_weights(meta_model, tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match="save_pretrained"):
        checkpointing._find_weights(meta_model, tmp_path)
    whole = (t5_directory / "model.safetensors").read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="model.safetensors cannot be read"):
        checkpointing._find_weights(meta_model, tmp_path)
    index = {"weight_map": {"shared.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="model-00001-of-00002.safetensors cannot be read"):
        checkpointing._find_weights(meta_model, tmp_path)


def test_half_precision_files_train_in_fp32(
    meta_model: T5ForConditionalGeneration,
    tensors: dict[str, torch.Tensor],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    """A line says so; the meta model's parameters, which the values are copied to, are fp32."""
    halves = {name: tensor.half() for name, tensor in tensors.items()}
    save_file(halves, tmp_path / "model.safetensors")
    checkpointing._find_weights(meta_model, tmp_path)
    assert "stored as F16, trained as fp32" in capsys.readouterr().out
    config = meta_model.config
    config.dtype = torch.float16
    with torch.device("meta"):
        assert T5ForConditionalGeneration(config).dtype == torch.float32


def test_two_ranks_refuse_a_wrong_checkpoint_once_and_quickly(
    t5_directory: Path, tensors: dict[str, torch.Tensor], pairs: Path, tmp_path: Path
) -> None:
    """Rank 0 looks, both ranks end, one sentence is printed, and nothing is left behind."""
    for path in t5_directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    del tensors["shared.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    start, output = time.monotonic(), tmp_path / "output"
    flags = ["--model-name", tmp_path, "--dataset", pairs, "--output-dir", output]
    result = launch(2, "T5_training.py", *flags, check=False)
    assert result.returncode != 0
    assert result.stderr.count("error: ") == 1
    assert "shared.weight is missing" in result.stderr
    assert time.monotonic() - start < 60
    assert not list((output / "checkpoints").iterdir())


def test_names_without_the_base_model_prefix(gpt2_directory: Path, tmp_path: Path) -> None:
    """The published GPT-2 files say wte.weight, and carry the causal masks of old."""
    tensors = load_file(gpt2_directory / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(bare | {"h.0.attn.bias": torch.zeros(1)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = GPT2LMHeadModel(AutoConfig.from_pretrained(gpt2_directory))
    found = checkpointing._find_weights(model, tmp_path)
    assert found.keys() == {name for name, _ in model.named_parameters()}
    assert found["transformer.wte.weight"][1] == "wte.weight"
