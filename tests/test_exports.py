"""An export has its base's files, whatever the run did before, and keys for older programs."""

import copy
import filecmp
import json
import os
from pathlib import Path

import pytest
import torch
import transformers
from conftest import launch, weights
from safetensors.torch import load_file
from test_architectures import save
from torch import nn

from runtime import export
from runtime import weights as hf_weights

SHAPE = {"vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 64, "eos_token_id": 1,
         "bos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 256}  # fmt: skip
T5 = {"vocab_size": 384, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
      "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0,
      "tie_word_embeddings": False}  # fmt: skip
LLAMA3 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
          "original_max_position_embeddings": 64, "rope_type": "llama3"}  # fmt: skip
LONGROPE = {"type": "longrope", "short_factor": [1.1] * 4, "long_factor": [2.0] * 4}
OLDER = {  # class, keys of config.json as Transformers 4 writes them
    "llama": ("LlamaForCausalLM", {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "mistral": ("MistralForCausalLM", {"rope_theta": 1e6}),
    "gemma3": ("Gemma3ForCausalLM", {
        "head_dim": 16, "rope_theta": 2e6, "rope_local_base_freq": 3e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "phi3": ("Phi3ForCausalLM", {
        "rope_theta": 3e4, "rope_scaling": LONGROPE, "original_max_position_embeddings": 32}),
    "neox": ("GPTNeoXForCausalLM", {"rotary_emb_base": 5e4, "rotary_pct": 0.5}),
    "glm4": ("Glm4ForCausalLM", {
        "head_dim": 16, "rope_theta": 5e4, "partial_rotary_factor": 0.25}),
    "modernbert": ("ModernBertDecoderForCausalLM", {
        "global_rope_theta": 5e4, "local_rope_theta": 2e4}),
    "flan-t5": ("T5ForConditionalGeneration", T5),
}  # fmt: skip
NAMED = [{"name": name, "template": "{{ messages }}" + name} for name in ("default", "tool_use")]


def save_base(name: str, path: Path) -> dict:
    """Save a model of OLDER with Transformers 5; return the older keys of its config."""
    kind, keys = OLDER[name]
    model_class = getattr(transformers, kind)
    torch.manual_seed(0)
    config = model_class.config_class(**copy.deepcopy(SHAPE | keys))  # it changes its arguments
    model = model_class(config)
    if name == "flan-t5":
        model.lm_head.weight = nn.Parameter(torch.randn(384, 32))
    save(model, path)
    return keys


def export_base(base: Path, final: Path, kind: str, dtype: torch.dtype = torch.float32) -> dict:
    """Load a base as the scripts do, and export it; return the export's config.json."""
    model_class = getattr(transformers, kind)
    directory, config, tokenizer = hf_weights.open_model(str(base), model_class)
    model, source = hf_weights.new_model(model_class, config, directory)
    fill = hf_weights.Loader(model, source, torch.device("cpu"), False).fill
    model.apply(fill)
    tokenizer(["a text", "b"], truncation=True, max_length=3, padding="max_length")
    export.export_model(model, tokenizer, final, dtype)
    return json.loads((final / "config.json").read_text())


@pytest.mark.parametrize("form", ["of Transformers 5", "of Transformers 4"])
@pytest.mark.parametrize("name", OLDER)
def test_config_has_the_keys_that_older_programs_read(name, form, process_group, tmp_path):
    """The keys are the same whether the base has them or only `rope_parameters`."""
    base = tmp_path / "base"
    keys = save_base(name, base)
    path = base / "config.json"
    config = json.loads(path.read_text())
    if form == "of Transformers 4":
        config.pop("rope_parameters", None)
        config |= keys | {"torch_dtype": "bfloat16", "an_unknown_key": "kept"}
        path.write_text(json.dumps(config))
    final = export_base(base, tmp_path / "final", OLDER[name][0])
    for key, value in keys.items():
        assert final[key] == value, key
    assert final["torch_dtype"] == final["dtype"] == "float32"
    assert final.get("an_unknown_key") == config.get("an_unknown_key")
    expected = transformers.AutoConfig.from_pretrained(base).to_dict()
    read = transformers.AutoConfig.from_pretrained(tmp_path / "final").to_dict()
    rope = expected.get("rope_parameters") or {}
    assert (read.get("rope_parameters") or {}).items() >= rope.items()


@pytest.mark.parametrize("template", ["{{ messages }}", NAMED])
def test_files_of_the_tokenizer_are_the_base_s(template, process_group, tmp_path):
    """Files with which Transformers 5 does not save a tokenizer are copied, and those of older
    versions are kept. A new chat template is in all files that have one."""
    base = tmp_path / "base"
    save_base("llama", base)
    settings = json.loads((base / "tokenizer_config.json").read_text())
    older = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (base / "tokenizer_config.json").write_text(json.dumps(settings | older))
    for name in ("tokenizer.model", "merges.txt", "vocab.json", "spiece.model"):
        (base / name).write_text(name)
    (base / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    export_base(base, tmp_path / "final", "LlamaForCausalLM")
    names = {path.name for path in base.iterdir()} - {"config.json", "generation_config.json"}
    _, *different = filecmp.cmpfiles(base, tmp_path / "final", names, shallow=False)
    assert different == [[], []]
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "{{ messages[0] }}"
    tokenizer.add_tokens(["<new>"])
    export.write_tokenizer(tokenizer, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings.get("chat_template", tokenizer.chat_template) == tokenizer.chat_template
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert saved.chat_template == tokenizer.chat_template
    assert len(saved) == len(tokenizer)


EXPERTS = {  # a bias decides between them
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize(("kind", "settings", "dtype"), [
    ("T5ForConditionalGeneration", T5, torch.float16),
    ("DeepseekV3ForCausalLM", EXPERTS, torch.float16),
    ("DeepseekV3ForCausalLM", EXPERTS, torch.bfloat16),
])  # fmt: skip
def test_tensors_that_transformers_keeps_in_fp32_stay_so(
    kind, settings, dtype, process_group, tmp_path
):
    base, final, plain = (tmp_path / name for name in ("base", "final", "plain"))
    model_class = getattr(transformers, kind)
    model = model_class(model_class.config_class(**(SHAPE | settings)))
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data += 0.01 * torch.rand_like(tensor)
    save(model, base)
    export_base(base, final, kind, dtype)
    model_class.from_pretrained(base, dtype=dtype).save_pretrained(plain)
    tensors, expected = (load_file(x / "model.safetensors") for x in (final, plain))
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name])
    assert {tensor.dtype for tensor in tensors.values()} == {dtype, torch.float32}


def test_weight_files_are_named_as_save_pretrained_names_them(process_group, tmp_path, monkeypatch):
    """A later save into the directory leaves no stale file, and total_size is right."""
    save_base("llama", tmp_path / "base")
    monkeypatch.setattr(export, "FILE_BYTES", 50e3)
    final = tmp_path / "final"
    export_base(tmp_path / "base", final, "LlamaForCausalLM")
    files = sorted(path.name for path in final.glob("*.safetensors"))
    count = len(files)
    assert count > 1
    assert files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    index = json.loads((final / "model.safetensors.index.json").read_text())
    tensors = weights(final)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    model = transformers.AutoModelForCausalLM.from_pretrained(final)
    model.save_pretrained(final)
    assert [path.name for path in final.glob("*.safetensors")] == ["model.safetensors"]


def test_cold_and_warm_runs_and_export_only_export_the_same_bytes(pairs, tmp_path):
    """The tokenizer's last call truncates to --target-length in a cold run, and no call is made
    in a warm run."""
    base = tmp_path / "base"
    save_base("flan-t5", base)
    environment = os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    flags = ["--model-name", base, "--dataset", pairs, "--target-length", "12", "--max-steps", "2",
             "--source-length", "64", "--num-val-samples", "4", "--rouge-samples", "0"]  # fmt: skip
    for name in ("cold", "warm"):
        output = ["--output-dir", tmp_path / name]
        launch(2, "T5_training.py", *flags, *output, env=environment)
    cold, warm = (tmp_path / name / "final" for name in ("cold", "warm"))
    again = tmp_path / "again"
    (tmp_path / "warm/final").rename(again)
    launch(1, "T5_training.py", *flags, *output, "--export-only", env=environment)
    names = sorted(path.name for path in cold.iterdir())
    assert json.loads((cold / "tokenizer.json").read_text())["truncation"] is None
    for other in (warm, again):
        assert sorted(path.name for path in other.iterdir()) == names
        _, *different = filecmp.cmpfiles(cold, other, names, shallow=False)
        assert different == [[], []]
