"""Pretrained weights load and export as in Transformers; unsuitable models are refused."""

import json
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import datasets
import pytest
import torch
import transformers
from conftest import launch
from conftest import weights as stored
from huggingface_hub import constants, errors
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import GPT2LMHeadModel, LlamaForCausalLM, T5ForConditionalGeneration

from block_dataset import Data
from core import ranks, weights
from optional import startup_checks

# Small shapes, with the names that the configs of these families use.
LLAMA = {"vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 64, "max_position_embeddings": 64, "num_key_value_heads": 2,
         "head_dim": 8}  # fmt: skip
BART = {"vocab_size": 384, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64, "max_position_embeddings": 64, "dropout": 0.0}  # fmt: skip
T5 = {"vocab_size": 384, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
GPT2 = {"vocab_size": 384, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
          "intermediate_size": 32, "image_size": 28, "patch_size": 14}  # fmt: skip
MODELS = {  # class, shape; the key order of twelve experts differs from their numeric order
    "t5": ("T5ForConditionalGeneration", T5),
    "t5 untied": ("T5ForConditionalGeneration", T5),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "llama config": ("LlamaForCausalLM", LLAMA),
    "llama mixed": ("LlamaForCausalLM", LLAMA),
    "mixtral": ("MixtralForCausalLM", LLAMA | {"num_local_experts": 12}),
    "mixtral stacked": ("MixtralForCausalLM", LLAMA | {"num_local_experts": 12}),
    "diffllama": ("DiffLlamaForCausalLM", LLAMA),
    "gemma3 text part": (
        "Gemma3ForConditionalGeneration",
        {"text_config": LLAMA, "vision_config": VISION, "mm_tokens_per_image": 4},
    ),
    "pegasus": ("PegasusForConditionalGeneration", BART),
}


def change(directory: Path, **settings: object) -> None:
    """Change settings in a directory's config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def save(name: str, directory: Path) -> None:
    """Save a random model of MODELS, without constant weights, in a format of the hub."""
    torch.manual_seed(0)
    model_class = getattr(transformers, MODELS[name][0])
    model = model_class(model_class.config_class(**MODELS[name][1]))
    if name == "t5 untied":
        model.lm_head.weight = nn.Parameter(torch.randn(384, 32))
    for tensor in model.state_dict().values():
        tensor.add_(torch.randn_like(tensor), alpha=0.1)
    if name in ("gpt2", "gemma3 text part", "pegasus"):
        model = model.to(torch.bfloat16)
    is_original = name != "mixtral stacked"
    model.save_pretrained(directory, max_shard_size="60KB", save_original_format=is_original)
    if name == "llama config":
        change(directory, dtype="bfloat16")
    if name == "llama mixed":  # the first file in fp16, one of the others in bf16
        paths = sorted(directory.glob("*.safetensors"))
        for path, dtype in zip(paths, (torch.float16, torch.bfloat16), strict=False):
            tensors = {key: tensor.to(dtype) for key, tensor in load_file(path).items()}
            save_file(tensors, path, {"format": "pt"})


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Return the results of files_worker.py for MODELS by number of ranks."""
    folder = tmp_path_factory.mktemp("results")
    for name in MODELS:
        save(name, folder / "models" / name)
    for count in (1, 2):
        words = [folder / "models", folder / f"{count}.json"]
        launch(count, "tests/workers/files_worker.py", *words)
    return {count: json.loads((folder / f"{count}.json").read_text()) for count in (1, 2)}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("way", ["full_shard", "fsdp2", "ddp"])
@pytest.mark.parametrize("name", MODELS)
def test_loads_and_exports_equal_transformers(name, way, ranks, differences):
    """Logits, buffers and exported keys, dtypes and values are equal bit for bit."""
    assert differences[ranks][f"{name} {way}"] == []


def new_model(kind: type, base: Path, directory: Path) -> tuple[nn.Module, dict]:
    """Load the weights in `directory` into a model with the config of `base`."""
    return weights.new_model(kind, kind.config_class.from_pretrained(base), directory)


OLD_KEYS = [  # buffers that older versions of Transformers saved
    "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
    "model.decoder.version", "model.encoder.embed_positions.weights",
    "transformer.h.0.attn.causal_mask", "transformer.h.0.attn.attention.masked_bias",
    "gpt_neox.layers.0.attention.bias", "model.layers.0.self_attn.rotary_emb.inv_freq",
]  # fmt: skip


def test_older_and_extra_keys_are_accepted(process_group, t5_directory, gpt2_directory, tmp_path):
    """t5-base has two copies of the embedding. GPT-2's keys lack the prefix."""
    tensors = stored(t5_directory)
    embedding = tensors.pop("shared.weight")
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
        tensors[name] = embedding.clone()
    tensors |= {name: torch.zeros(1) for name in OLD_KEYS}
    save_file(tensors, tmp_path / "model.safetensors")
    model, source = new_model(T5ForConditionalGeneration, t5_directory, tmp_path)
    assert model.encoder.embed_tokens.weight is model.shared.weight is model.lm_head.weight
    assert torch.equal(source["shared.weight"], embedding)
    tensors = {k.removeprefix("transformer."): x for k, x in stored(gpt2_directory).items()}
    save_file(tensors | {"h.0.attn.bias": torch.zeros(1)}, tmp_path / "model.safetensors")
    _, source = new_model(GPT2LMHeadModel, gpt2_directory, tmp_path)
    assert torch.equal(source["transformer.wte.weight"], tensors["wte.weight"])


def test_all_problems_of_weights_are_one_error(process_group, t5_directory, tmp_path):
    tensors = stored(t5_directory)
    tensors["extra.weight"] = torch.zeros(1)
    tensors["shared.weight"] = tensors["shared.weight"][:-1].clone()
    del tensors["decoder.final_layer_norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ranks.Problem) as error:
        new_model(T5ForConditionalGeneration, t5_directory, tmp_path)
    assert "missing_keys: ['decoder.final_layer_norm.weight']" in str(error.value)
    assert "unexpected_keys: ['extra.weight']" in str(error.value)
    assert "mismatched_keys: [('shared.weight', torch.Size([383, 32]), torch" in str(error.value)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors"])
def test_missing_and_cut_files_are_refused(name, process_group, t5_directory, tmp_path):
    if "00001" in name:
        index = json.dumps({"weight_map": {"shared.weight": name}})
        (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ranks.Problem, match=f"has no {name}. Save the model by save_pretrained"):
        new_model(T5ForConditionalGeneration, t5_directory, tmp_path)
    content = (t5_directory / "model.safetensors").read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(SafetensorError):
        new_model(T5ForConditionalGeneration, t5_directory, tmp_path)


def replace_tokenizer(directory: Path, kind: str) -> None:
    """Save the settings of a tokenizer, and for a fast one a vocabulary without an EOS token."""
    for path in directory.glob("*token*"):
        path.unlink()
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    if kind == "PreTrainedTokenizerFast":
        Tokenizer(WordLevel({"a": 0})).save(str(directory / "tokenizer.json"))


@pytest.mark.parametrize(("damage", "message"), [
    (lambda directory: change(directory, model_type="t5"), "which this script cannot train"),
    (lambda directory: change(directory, quantization_config={"quant_method": "fp8"}),
     "is quantized. Pass its weights in 16 or 32 bits"),
    (lambda directory: (directory / "adapter_config.json").write_text("{}"),
     "has adapters, which are not read. Pass a merged model"),
    (lambda directory: change(directory, output_router_logits=True),
     "has output_router_logits, but no auxiliary loss is added here"),
    (lambda directory: replace_tokenizer(directory, "LlamaTokenizer"),
     "has no tokenizer: its vocabulary is missing"),
    (lambda directory: replace_tokenizer(directory, "PreTrainedTokenizerFast"),
     "has a tokenizer without an EOS token"),
])  # fmt: skip
def test_unsuitable_directory_is_refused(
    damage, message, process_group, llama_directory, tmp_path, capfd
):
    shutil.copytree(llama_directory, tmp_path, dirs_exist_ok=True)
    weights.open_model(str(tmp_path), LlamaForCausalLM, "Pass a llama.")
    assert "embedding" not in capfd.readouterr().out
    damage(tmp_path)
    with pytest.raises(ranks.Problem, match=re.escape(message)):
        _, config, *_ = weights.open_model(str(tmp_path), LlamaForCausalLM, "Pass a llama.")
        weights.new_model(LlamaForCausalLM, config, tmp_path)


def test_tokens_without_a_row_in_the_embedding_are_named(
    process_group, llama_directory, tmp_path, capfd
):
    shutil.copytree(llama_directory, tmp_path, dirs_exist_ok=True)
    change(tmp_path, vocab_size=300)
    weights.open_model(str(tmp_path), LlamaForCausalLM, "Pass a llama.")
    assert "Tokens from 300 of 384 would fail" in capfd.readouterr().out


def test_text_part_of_multimodal_model_is_complete(process_group, tmp_path):
    save("gemma3 text part", tmp_path)
    tensors = stored(tmp_path)
    tensors["language_model.model.layers.2.mlp.up_proj.weight"] = torch.zeros(64, 32)
    save_file(tensors, tmp_path / "model.safetensors")
    config = transformers.AutoConfig.from_pretrained(tmp_path).text_config
    with pytest.raises(ValueError, match=r"unexpected_keys: .*layers.2.mlp.up_proj.weight"):
        weights.new_model(transformers.Gemma3ForCausalLM, config, tmp_path)


@pytest.mark.parametrize("error", [
    errors.GatedRepoError("It is gated", response=Mock()),
    errors.HFValidationError("Invalid id"),
    errors.LocalEntryNotFoundError("Check your connection"),
], ids=str)  # fmt: skip
def test_unavailable_model_is_one_message(error, monkeypatch):
    monkeypatch.setattr(weights, "snapshot_download", Mock(side_effect=error))
    with pytest.raises(ranks.Problem, match=f"a/b is not a directory, and not available: {error}"):
        weights.find_directory("a/b", weights.SETTINGS)


def test_cached_files_are_used_if_the_list_of_files_is_incomplete(tmp_path, monkeypatch):
    """The cache may lack files that nobody needs."""
    error = errors.IncompleteSnapshotError("LICENSE.txt is missing", snapshot_path=str(tmp_path))
    monkeypatch.setattr(weights, "snapshot_download", Mock(side_effect=error))
    assert weights.find_directory("org/model", ["*.json"]) == tmp_path


@pytest.mark.parametrize("local_rank", [0, 1])
def test_only_one_process_per_node_asks_the_hub(local_rank, process_group, monkeypatch):
    for module in (constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    are_offline = ranks.local_main_process_first(
        lambda: {constants.is_offline_mode(), datasets.config.HF_HUB_OFFLINE}
    )
    assert are_offline == {local_rank == 1}


def longrope(by_layer: bool) -> transformers.LlamaConfig:
    """Return the config of a model that had 32 positions before they were extended to 256."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 8.0}
    config = transformers.LlamaConfig(max_position_embeddings=256, head_dim=16)
    config.rope_parameters = {"full_attention": rope} if by_layer else rope
    return config


def longrope_of_a_file(directory: Path) -> transformers.LlamaConfig:
    """Return such a config as read from a file that has the 32 positions outside of the rope."""
    settings = longrope(False).to_dict() | {"original_max_position_embeddings": 32}
    settings["rope_scaling"] = settings.pop("rope_parameters")
    del settings["rope_scaling"]["original_max_position_embeddings"]
    (directory / "config.json").write_text(json.dumps(settings))
    return transformers.AutoConfig.from_pretrained(directory)


def test_length_is_limited_by_the_positions_before_they_were_extended(tmp_path):
    """Sequences longer than LongRoPE's would change the loss of others in their batch."""
    for config in (transformers.XLNetConfig(), transformers.T5Config()):  # -1, and none
        startup_checks.check_length(Data(block_size=64), "block_size", config)
    ropes = longrope(False), longrope(True), longrope_of_a_file(tmp_path)
    for config in (transformers.GPT2Config(n_positions=32), *ropes):
        startup_checks.check_length(Data(block_size=32), "block_size", config)
        with pytest.raises(ranks.Problem, match="--block-size 64 is above the model's 32 posit"):
            startup_checks.check_length(Data(block_size=64), "block_size", config)


def test_layerdrop_and_rescaling_are_switched_off(capfd):
    config = transformers.M2M100Config()
    weights.prepare_config(config)
    assert config.encoder_layerdrop == config.decoder_layerdrop == 0
    line, _ = capfd.readouterr().out.splitlines()
    assert line.startswith("encoder_layerdrop is set to 0 (the model has 0.05)")
    config = transformers.RwkvConfig()
    weights.prepare_config(config)
    assert config.rescale_every == 0 and "rescale_every is set to 0" in capfd.readouterr().out
    weights.prepare_config(transformers.BartConfig())
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("name", ["Gemma2", "T5Gemma"])
def test_capped_attention_is_eager_in_versions_that_drop_the_cap_in_sdpa(name):
    for attention, expected in ((None, "eager"), ("sdpa", "eager"), ("packed", "packed")):
        config = getattr(transformers, f"{name}Config")()
        config._attn_implementation = attention
        weights.prepare_config(config)
        assert config._attn_implementation == expected


@pytest.mark.parametrize("name, padding", [("T5", 1), ("GPT2", None), ("Llama", None)])
@pytest.mark.parametrize("base", [384, -1])
def test_padding_token_without_a_row_is_replaced(name, padding, base):
    """T5 gets its EOS token. In the others an embedding would not train the token's row."""
    config = getattr(transformers, f"{name}Config")(vocab_size=384, pad_token_id=base)
    weights.prepare_config(config)
    assert config.pad_token_id == padding
    config.pad_token_id = 383
    weights.prepare_config(config)
    assert config.pad_token_id == 383
