"""Pretrained weights load and export as in Transformers; unsuitable models are refused."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
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
from conftest import launch
from conftest import weights as stored
from huggingface_hub import constants
from huggingface_hub.errors import IncompleteSnapshotError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers import models as token_models
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedModel,
    T5ForConditionalGeneration,
)

from core import ranks, weights

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
    tensors = stored(t5_directory)
    embedding = tensors.pop("shared.weight")
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
        tensors[name] = embedding.clone()
    bias = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    save_file(tensors | {bias: torch.zeros(1)}, tmp_path / "model.safetensors")
    config = T5ForConditionalGeneration.config_class.from_pretrained(t5_directory)
    config.save_pretrained(tmp_path)
    model, source = weights.new_model(T5ForConditionalGeneration, config, tmp_path)
    assert model.encoder.embed_tokens.weight is model.shared.weight is model.lm_head.weight
    assert torch.equal(source["shared.weight"], embedding)
    tensors = {k.removeprefix("transformer."): x for k, x in stored(gpt2_directory).items()}
    save_file(tensors | {"h.0.attn.bias": torch.zeros(1)}, tmp_path / "model.safetensors")
    config = GPT2LMHeadModel.config_class.from_pretrained(gpt2_directory)
    _, source = weights.new_model(GPT2LMHeadModel, config, tmp_path)
    assert torch.equal(source["transformer.wte.weight"], tensors["wte.weight"])


def test_tensors_that_transformers_leaves_out_are_named(
    process_group, llama_directory, tmp_path, capfd, monkeypatch
):
    """As of Qwen 3.5, whose layer that predicts one token more is no part of the model."""
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"^mtp.*"])
    tensors = stored(llama_directory)
    save_file(tensors | {"mtp.norm.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    config = LlamaForCausalLM.config_class.from_pretrained(llama_directory)
    weights.new_model(LlamaForCausalLM, config, llama_directory)
    assert "not trained" not in capfd.readouterr().out
    weights.new_model(LlamaForCausalLM, config, tmp_path)
    assert "1 tensors of" in (out := capfd.readouterr().out) and "as mtp.norm.weight, are no" in out


@pytest.mark.parametrize("name", [
    "model.decoder.version", "model.encoder.embed_positions.weights",
    "transformer.h.0.attn.causal_mask", "transformer.h.0.attn.attention.masked_bias",
    "gpt_neox.layers.0.attention.bias", "model.layers.0.self_attn.rotary_emb.inv_freq",
])  # fmt: skip
def test_buffers_of_older_versions_are_known(name):
    assert weights.OLD_BUFFERS.search(name)


def test_all_problems_of_weights_are_one_error(process_group, t5_directory, tmp_path):
    tensors = stored(t5_directory)
    tensors["extra.weight"] = torch.zeros(1)
    tensors["shared.weight"] = tensors["shared.weight"][:-1].clone()
    del tensors["decoder.final_layer_norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    config = T5ForConditionalGeneration.config_class.from_pretrained(t5_directory)
    with pytest.raises(ranks.Problem) as error:
        weights.new_model(T5ForConditionalGeneration, config, tmp_path)
    assert "missing_keys: ['decoder.final_layer_norm.weight']" in str(error.value)
    assert "unexpected_keys: ['extra.weight']" in str(error.value)
    assert "mismatched_keys: [('shared.weight', torch.Size([383, 32]), torch" in str(error.value)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors"])
def test_missing_and_cut_files_are_refused(name, process_group, t5_directory, tmp_path):
    config = T5ForConditionalGeneration.config_class.from_pretrained(t5_directory)
    if "00001" in name:
        index = json.dumps({"weight_map": {"shared.weight": name}})
        (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(OSError, match=name):
        weights.new_model(T5ForConditionalGeneration, config, tmp_path)
    content = (t5_directory / "model.safetensors").read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(SafetensorError):
        weights.new_model(T5ForConditionalGeneration, config, tmp_path)


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


def with_tokenizer_without_end(directory: Path) -> None:
    """Save a tokenizer that has no EOS token."""
    for path in directory.glob("*token*"):
        path.unlink()
    backend = Tokenizer(token_models.WordLevel({"<pad>": 0, "a": 1}, "<pad>"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(directory)


@pytest.mark.parametrize(("damage", "message"), [
    (lambda directory: change(directory, model_type="t5"), "which this script cannot train"),
    (lambda directory: change(directory, quantization_config={"quant_method": "fp8"}),
     "is quantized. Pass its weights in 16 or 32 bits"),
    (lambda directory: change(directory, output_router_logits=True),
     "has output_router_logits, but no auxiliary loss is added here"),
    (with_empty_tokenizer, "has no tokenizer: its vocabulary is missing"),
    (with_tokenizer_without_end, "has a tokenizer without an EOS token"),
])  # fmt: skip
def test_unsuitable_directory_is_refused(damage, message, process_group, llama_directory, tmp_path):
    for path in llama_directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights.open_model(str(tmp_path), LlamaForCausalLM, "Pass a llama.")
    damage(tmp_path)
    with pytest.raises(ranks.Problem, match=re.escape(message)):
        _, config, *_ = weights.open_model(str(tmp_path), LlamaForCausalLM, "Pass a llama.")
        weights.new_model(LlamaForCausalLM, config, tmp_path)


def test_text_part_of_multimodal_model_is_complete(process_group, models, tmp_path):
    tensors = stored(models / "gemma3 text part")
    model_class = Gemma3ForCausalLM
    config = transformers.AutoConfig.from_pretrained(models / "gemma3 text part").text_config
    weights.new_model(model_class, config, models / "gemma3 text part")
    tensors["language_model.model.layers.2.mlp.up_proj.weight"] = torch.zeros(64, 32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected_keys: .*layers.2.mlp.up_proj.weight"):
        weights.new_model(model_class, config, tmp_path)


ANSWERS = {  # HTTP status and X-Error-Code of the hub, part of the library's message
    "meta/gated": (403, "GatedRepo", "Cannot access gated repo"),
    "me/private": (401, "RepoNotFound", "make sure you are authenticated"),
    "gtp2": (404, "RepoNotFound", "Repository Not Found"),
    "a/b/c": (200, "", "Repo id must be in the form"),
    "busy": (500, "", "cannot find the appropriate snapshot folder"),
    "offline": (None, "", "Please check your internet connection"),
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """Yield a function that makes `answer` the hub; its cache is `tmp_path`."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    hooks = {"request": [huggingface_hub.utils._http.hf_request_event_hook]}  # the default

    def set_hub(answer: Callable[[httpx2.Request], httpx2.Response]) -> None:
        transport = httpx2.MockTransport(answer)
        huggingface_hub.set_client_factory(
            lambda: httpx2.Client(transport=transport, event_hooks=hooks)
        )

    yield set_hub
    huggingface_hub.set_client_factory(huggingface_hub.utils._http.default_client_factory)


@pytest.mark.parametrize("name", ANSWERS)
def test_unavailable_model_is_one_message(name, hub):
    status, code, message = ANSWERS[name]

    def answer(_: httpx2.Request) -> httpx2.Response:
        if status is None:
            raise httpx2.ConnectError("no network")
        return httpx2.Response(status, headers={"X-Error-Code": code})

    hub(answer)
    with pytest.raises(ValueError) as error:
        weights.find_directory(name, weights.SETTINGS)
    assert str(error.value).startswith(f"{name} is not a directory")
    assert message in str(error.value)


@pytest.mark.parametrize("local_rank", [0, 1])
def test_only_one_process_per_node_asks_the_hub(
    local_rank, process_group, hub, tmp_path, monkeypatch
):
    cached = tmp_path / "models--me--small"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("c0ffee")
    (cached / "snapshots/c0ffee").mkdir(parents=True)
    (cached / "snapshots/c0ffee/config.json").write_text("{}")
    requests = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        requests.append(request.url)
        raise httpx2.ConnectError("no network")

    hub(answer)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    path = ranks.local_main_process_first(weights.find_directory, "me/small", ["*.json"])
    assert path == cached / "snapshots/c0ffee"
    assert bool(requests) == (local_rank == 0)


def test_cached_files_are_used_if_the_list_of_files_is_incomplete(tmp_path, monkeypatch):
    """The cache may lack files that nobody needs."""

    def snapshot_download(name: str, **_: object) -> str:
        raise IncompleteSnapshotError("LICENSE.txt is missing", snapshot_path=str(tmp_path))

    monkeypatch.setattr(weights, "snapshot_download", snapshot_download)
    assert weights.find_directory("org/model", ["*.json"]) == tmp_path


def test_length_is_limited_by_positions_if_the_config_has_some():
    for config in (transformers.XLNetConfig(), transformers.T5Config()):  # -1, and none
        weights.check_length("--block-size", 64, config)
    with pytest.raises(ranks.Problem, match="--block-size 64 is above the model's 32 positions"):
        weights.check_length("--block-size", 64, transformers.GPT2Config(n_positions=32))


@pytest.mark.parametrize("by_layer", [False, True])
def test_length_is_limited_by_the_original_positions_of_longrope(by_layer):
    """A longer sequence would change the loss of others in its batch."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 8.0}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    config = transformers.LlamaConfig(max_position_embeddings=256, head_dim=16)
    config.rope_parameters = {"full_attention": rope | factors} if by_layer else rope | factors
    weights.check_length("--max-seq-length", 32, config)
    with pytest.raises(ranks.Problem, match="--max-seq-length 64 is above the model's 32 pos"):
        weights.check_length("--max-seq-length", 64, config)


def test_layerdrop_is_switched_off(process_group, capfd):
    config = transformers.M2M100Config(encoder_layers=1, decoder_layers=1, d_model=16)
    assert config.encoder_layerdrop == 0.05
    weights.new_model(transformers.M2M100ForConditionalGeneration, config, None)
    assert config.encoder_layerdrop == config.decoder_layerdrop == 0
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("encoder_layerdrop is set to 0 (the model has 0.05)")
    config = transformers.RwkvConfig(num_hidden_layers=1, hidden_size=16)
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


class Hostile:
    """An object that creates the directory `marker` when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("kind", ["weights", "config", "tokenizer"])
def test_model_s_code_is_never_run(kind, process_group, llama_directory, tmp_path):
    marker = tmp_path / "was-here"
    directory = Path(shutil.copytree(llama_directory, tmp_path / "model"))
    (directory / "theirs.py").write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    message = "custom code"
    if kind == "config":
        change(directory, model_type="theirs", auto_map={"AutoConfig": "theirs.Config"})
    elif kind == "tokenizer":
        settings = {"tokenizer_class": "Theirs"}
        settings["auto_map"] = {"AutoTokenizer": ["theirs.Theirs", None]}
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    else:
        for file in directory.glob("model*"):
            file.unlink()
        torch.save({"lm_head.weight": Hostile(marker)}, directory / "pytorch_model.bin")
        message = "model.safetensors"
    with pytest.raises((OSError, ValueError), match=message):
        _, config, *_ = weights.open_model(str(directory), LlamaForCausalLM, "")
        weights.new_model(LlamaForCausalLM, config, directory)
    assert not marker.exists()
