"""Pretrained weights load and export as in Transformers, and broken files are reported."""

import json
import re
import time
from pathlib import Path

import datasets

try:
    import httpx2
except ImportError:  # of an older huggingface_hub
    import httpx as httpx2
import huggingface_hub
import pytest
import torch
import transformers
from conftest import error_lines, launch, weights
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedModel,
    T5ForConditionalGeneration,
)

from runtime import ranks
from runtime import weights as hf_weights

# Small shapes, with the names that the configs of these families use.
DECODER = {"vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
           "intermediate_size": 64, "max_position_embeddings": 64}  # fmt: skip
GROUPED = DECODER | {"num_key_value_heads": 2, "head_dim": 8}
BART = {"vocab_size": 384, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64, "max_position_embeddings": 64, "dropout": 0.0}  # fmt: skip
T5 = {"vocab_size": 384, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
GPT2 = {"vocab_size": 384, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
          "intermediate_size": 32, "image_size": 28, "patch_size": 14}  # fmt: skip
MODELS = {  # class, shape; the key order of twelve experts differs from their numeric order
    "t5": ("T5ForConditionalGeneration", T5),
    "t5 untied": ("T5ForConditionalGeneration", T5),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "llama": ("LlamaForCausalLM", GROUPED),
    "llama config": ("LlamaForCausalLM", GROUPED),
    "llama mixed": ("LlamaForCausalLM", GROUPED),
    "mixtral": ("MixtralForCausalLM", GROUPED | {"num_local_experts": 12}),
    "qwen3 moe": ("Qwen3MoeForCausalLM", GROUPED | EXPERTS | {"num_experts": 12}),
    "qwen3 stacked": ("Qwen3MoeForCausalLM", GROUPED | EXPERTS | {"num_experts": 12}),
    "diffllama": ("DiffLlamaForCausalLM", GROUPED),
    "gemma3": ("Gemma3ForCausalLM", GROUPED),
    "gemma3 text part": ("Gemma3ForCausalLM", GROUPED),
    "pegasus": ("PegasusForConditionalGeneration", BART),
    "neox": ("GPTNeoXForCausalLM", DECODER),
}
IN_BF16 = {"gpt2", "gemma3", "pegasus"}


def new_model(name: str) -> PreTrainedModel:
    """Return a random model without constant weights."""
    kind, shape = MODELS[name]
    if name == "gemma3 text part":
        kind = "Gemma3ForConditionalGeneration"
        shape = {"text_config": shape, "vision_config": VISION, "mm_tokens_per_image": 4}
    torch.manual_seed(0)
    model_class = getattr(transformers, kind)
    model = model_class(model_class.config_class(**shape))
    if name == "t5 untied":
        model.lm_head.weight = nn.Parameter(torch.randn(384, 32))
    for tensor in model.state_dict().values():
        tensor.add_(torch.randn_like(tensor), alpha=0.1)
    return model


def save(name: str, directory: Path) -> None:
    """Save a model of MODELS in a format that occurs on the hub."""
    model = new_model(name)
    if name in IN_BF16:
        model = model.to(torch.bfloat16)
    model.save_pretrained(
        directory, max_shard_size="60KB", save_original_format=name != "qwen3 stacked"
    )
    if name == "llama mixed":  # the first file in fp16, one of the others in bf16
        for path, dtype in zip(
            sorted(directory.glob("*.safetensors")), (torch.float16, torch.bfloat16), strict=False
        ):
            tensors = {key: tensor.to(dtype) for key, tensor in load_file(path).items()}
            save_file(tensors, path, {"format": "pt"})
    if name == "llama config":
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "bfloat16"}))
    (directory / "class.json").write_text(json.dumps(MODELS[name][0]))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a directory for each of MODELS."""
    folder = tmp_path_factory.mktemp("models")
    for name in MODELS:
        save(name, folder / name)
    return folder


@pytest.fixture(scope="module")
def differences(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Return the results of files_worker.py by number of ranks."""
    folder = tmp_path_factory.mktemp("results")
    results = {}
    for count in (1, 2):
        launch(count, "tests/workers/files_worker.py", models, folder / f"{count}.json")
        results[count] = json.loads((folder / f"{count}.json").read_text())
    return results


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("way", ["fsdp1", "fsdp2", "ddp"])
@pytest.mark.parametrize("name", MODELS)
def test_loads_and_exports_equal_transformers(name, way, ranks, differences):
    """Logits, buffers and exported keys, dtypes and values are equal bit for bit."""
    assert differences[ranks][f"{name} {way}"] == []


def test_older_and_extra_keys_are_accepted(process_group, t5_directory, gpt2_directory, tmp_path):
    """t5-base has an extra bias and two copies of the embedding. GPT-2's keys lack the prefix."""
    tensors = weights(t5_directory)
    embedding = tensors.pop("shared.weight")
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
        tensors[name] = embedding.clone()
    bias = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    save_file(tensors | {bias: torch.zeros(1)}, tmp_path / "model.safetensors")
    config = T5ForConditionalGeneration.config_class.from_pretrained(t5_directory)
    config.save_pretrained(tmp_path)
    model, source = hf_weights.new_model(T5ForConditionalGeneration, config, tmp_path)
    assert model.encoder.embed_tokens.weight is model.shared.weight is model.lm_head.weight
    assert torch.equal(source["shared.weight"], embedding)
    tensors = {k.removeprefix("transformer."): x for k, x in weights(gpt2_directory).items()}
    save_file(tensors | {"h.0.attn.bias": torch.zeros(1)}, tmp_path / "model.safetensors")
    config = GPT2LMHeadModel.config_class.from_pretrained(gpt2_directory)
    _, source = hf_weights.new_model(GPT2LMHeadModel, config, tmp_path)
    assert torch.equal(source["transformer.wte.weight"], tensors["wte.weight"])


def test_weights_with_less_than_16_bits_are_refused(process_group, llama_directory, tmp_path):
    """Casting them to floats would train with the integers, which lack their scales."""
    config = LlamaForCausalLM.config_class.from_pretrained(llama_directory)
    name = "model.layers.1.mlp.up_proj.weight"
    for dtype in (torch.int8, torch.int32, torch.float8_e4m3fn):
        tensors = weights(llama_directory)
        tensors[name] = tensors[name].to(dtype)
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=rf"quantized_keys: \['{name}'\]"):
            hf_weights.new_model(LlamaForCausalLM, config, tmp_path)


@pytest.mark.parametrize("index", ["[]", "{}", "3"])
def test_index_of_another_form_is_named(index, process_group, llama_directory, tmp_path):
    config = LlamaForCausalLM.config_class.from_pretrained(llama_directory)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(OSError, match="model.safetensors.index.json cannot be read"):
        hf_weights.new_model(LlamaForCausalLM, config, tmp_path)


@pytest.mark.parametrize("name", [
    "model.decoder.version", "model.encoder.embed_positions.weights",
    "transformer.h.0.attn.causal_mask", "transformer.h.0.attn.attention.masked_bias",
    "gpt_neox.layers.0.attention.bias", "model.layers.0.self_attn.rotary_emb.inv_freq",
])  # fmt: skip
def test_buffers_of_older_versions_are_known(name):
    assert hf_weights.OLD_BUFFERS.search(name)


def test_all_problems_of_weights_are_one_error(t5_directory, pairs, tmp_path):
    for path in t5_directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = weights(t5_directory)
    tensors["extra.weight"] = torch.zeros(1)
    tensors["shared.weight"] = tensors["shared.weight"][:-1].clone()
    del tensors["decoder.final_layer_norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    start, output = time.monotonic(), tmp_path / "output"
    flags = ["--model-name", tmp_path, "--dataset", pairs, "--output-dir", output]
    result = launch(2, "T5_training.py", *flags, check=False)
    assert result.returncode != 0
    (error,) = error_lines(result.stderr)
    assert "missing_keys: ['decoder.final_layer_norm.weight']" in error
    assert "unexpected_keys: ['extra.weight']" in error
    assert "mismatched_keys: [('shared.weight', torch.Size([383, 32]), torch.Size([384" in error
    assert time.monotonic() - start < 60
    assert not (output / "checkpoints").exists()


def test_broken_files_are_named(process_group, t5_directory, tmp_path):
    config = T5ForConditionalGeneration.config_class.from_pretrained(t5_directory)
    file = tmp_path / "model.safetensors"

    def check_error(pattern: str) -> None:
        with pytest.raises(OSError, match=pattern):
            hf_weights.new_model(T5ForConditionalGeneration, config, tmp_path)

    check_error("model.safetensors cannot be read .*save_pretrained")
    content = (t5_directory / "model.safetensors").read_bytes()
    file.write_bytes(content[: len(content) // 2])
    check_error("model.safetensors cannot be read")
    file.unlink()
    index = {"weight_map": {"shared.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check_error("model-00001-of-00002.safetensors cannot be read")


def change(directory: Path, **settings: object) -> None:
    """Change settings in a directory's config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def with_empty_tokenizer(directory: Path) -> None:
    """Save the settings of a tokenizer without its vocabulary."""
    for path in directory.glob("*token*"):
        path.unlink()
    settings = {"tokenizer_class": "LlamaTokenizer"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def with_adapters(directory: Path) -> None:
    """Replace the model with adapters."""
    (directory / "config.json").unlink()
    (directory / "adapter_config.json").touch()


@pytest.mark.parametrize(("damage", "message"), [
    (lambda directory: change(directory, model_type="mistral"), "is a mistral, not a llama"),
    (lambda directory: change(directory, quantization_config={"quant_method": "fp8"}),
     "is quantized. Pass its weights in 16 or 32 bits"),
    (lambda directory: change(directory, output_router_logits=True),
     "has output_router_logits, but no auxiliary loss is added here"),
    (lambda directory: change(directory, use_return_dict=False),
     "has an invalid config.json (AttributeError: property 'use_return_dict'"),
    (lambda directory: change(directory, hidden_size="32"),
     "field 'hidden_size': TypeError: Field 'hidden_size' expected int, got str (value: '32')). C"),
    (lambda directory: (directory / "tokenizer_config.json").write_text("[]"),
     "has no valid tokenizer (AttributeError: 'list' object has no attribute 'get'). Save one."),
    (with_adapters, "has no config.json. Pass a model; for adapters"),
    (with_empty_tokenizer, "has no tokenizer: its vocabulary is missing"),
])  # fmt: skip
def test_unsuitable_directory_is_refused(damage, message, process_group, llama_directory, tmp_path):
    for path in llama_directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    hf_weights.open_model(str(tmp_path), LlamaForCausalLM)
    damage(tmp_path)
    with pytest.raises(ValueError, match=re.escape(message)):
        hf_weights.open_model(str(tmp_path), LlamaForCausalLM)


def test_text_part_of_multimodal_model_is_complete(process_group, models, tmp_path):
    tensors = weights(models / "gemma3 text part")
    model_class = Gemma3ForCausalLM
    config = transformers.AutoConfig.from_pretrained(models / "gemma3 text part").text_config
    hf_weights.new_model(model_class, config, models / "gemma3 text part")
    tensors["language_model.model.layers.2.mlp.up_proj.weight"] = torch.zeros(64, 32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected_keys: .*layers.2.mlp.up_proj.weight"):
        hf_weights.new_model(model_class, config, tmp_path)


ANSWERS = {  # HTTP status and X-Error-Code of the hub, expected message
    "meta/gated": (403, "GatedRepo", "is gated. Accept its license at https://huggingface.co/"),
    "me/private": (401, "RepoNotFound", "is neither a directory nor a model on the hub"),
    "gtp2": (404, "RepoNotFound", "is neither a directory nor a model on the hub"),
    "a/b/c": (200, "", "is neither a directory nor a model on the hub"),
    "busy": (500, "", "is not cached, and the hub cannot be reached (HfHubHTTPError"),
    "offline": (None, "", "is not cached, and the hub cannot be reached (ConnectError"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_unavailable_model_is_one_message(name, tmp_path, monkeypatch):
    status, code, message = ANSWERS[name]

    def answer(_: httpx2.Request) -> httpx2.Response:
        if status is None:
            raise httpx2.ConnectError("no network")
        return httpx2.Response(status, headers={"X-Error-Code": code})

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    transport = httpx2.MockTransport(answer)
    huggingface_hub.set_client_factory(lambda: httpx2.Client(transport=transport))
    try:
        with pytest.raises(ValueError) as error:
            hf_weights.find_directory(name, hf_weights.SETTINGS)
    finally:
        huggingface_hub.set_client_factory(huggingface_hub.utils._http.default_client_factory)
    assert str(error.value).startswith(f"--model-name {name} ") and message in str(error.value)
    assert "or pass a directory" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("local_rank", [0, 1])
def test_only_one_process_per_node_asks_the_hub(local_rank, process_group, tmp_path, monkeypatch):
    cached = tmp_path / "models--me--small"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("c0ffee")
    (cached / "snapshots/c0ffee").mkdir(parents=True)
    (cached / "snapshots/c0ffee/config.json").write_text("{}")
    requests = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        requests.append(request.url)
        raise httpx2.ConnectError("no network")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    hooks = {"request": [huggingface_hub.utils._http.hf_request_event_hook]}  # the default
    transport = httpx2.MockTransport(answer)
    huggingface_hub.set_client_factory(
        lambda: httpx2.Client(transport=transport, event_hooks=hooks)
    )
    try:
        path = ranks.first_on_node(hf_weights.find_directory, "me/small", ["*.json"])
    finally:
        huggingface_hub.set_client_factory(huggingface_hub.utils._http.default_client_factory)
    assert path == cached / "snapshots/c0ffee"
    assert bool(requests) == (local_rank == 0)
