"""An export has its base's settings and tokenizer files, and replaces a directory when complete."""

import copy
import filecmp
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from conftest import weights as stored
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn

from core import export, weights

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
    "gemma3": ("Gemma3ForCausalLM", {
        "head_dim": 16, "rope_theta": 2e6, "rope_local_base_freq": 3e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "phi3": ("Phi3ForCausalLM", {
        "rope_theta": 3e4, "rope_scaling": LONGROPE, "original_max_position_embeddings": 32}),
    "neox": ("GPTNeoXForCausalLM", {"rotary_emb_base": 5e4, "rotary_pct": 0.5}),
    "flan-t5": ("T5ForConditionalGeneration", T5),
}  # fmt: skip
CHANGED = {"dtype", "torch_dtype", "transformers_version"}  # keys of an export's config.json
NAMED = [{"name": name, "template": "{{ messages }}" + name} for name in ("default", "tool_use")]


def save(model: transformers.PreTrainedModel, path: Path) -> None:
    """Save a model with a byte tokenizer."""
    model.save_pretrained(path)
    tokens = ["<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>"
    ).save_pretrained(path)


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


def read(path: Path) -> dict:
    """Return the content of a JSON file."""
    return json.loads(path.read_text())


def change(path: Path, **settings: object) -> dict:
    """Change settings in a JSON file; return all."""
    path.write_text(json.dumps(read(path) | settings))
    return read(path)


def export_base(
    base: Path, final: Path, kind: str, dtype: torch.dtype = torch.float32,
    edit: Callable = lambda config: None,
) -> dict:  # fmt: skip
    """Load a base as the scripts do, and export it; return the export's config.json."""
    model_class = getattr(transformers, kind)
    directory, config, _, tokenizer = weights.open_model(str(base), model_class, "")
    edit(config)
    model, source = weights.new_model(model_class, config, directory)
    model.apply(weights.Loader(model, source, torch.device("cpu")).fill)
    tokenizer(["a text", "b"], truncation=True, max_length=3, padding="max_length")
    export.export_model(model, tokenizer, final, dtype)
    return read(final / "config.json")


@pytest.mark.parametrize("form", ["of Transformers 5", "of Transformers 4"])
@pytest.mark.parametrize("name", OLDER)
def test_settings_go_out_as_they_came_in(name, form, process_group, tmp_path):
    base, final = tmp_path / "base", tmp_path / "final"
    keys = save_base(name, base)
    path = base / "config.json"
    config = read(path)
    if form == "of Transformers 4":
        config.pop("rope_parameters", None)
        config |= keys | {"torch_dtype": "bfloat16", "an_unknown_key": "kept"}
        path.write_text(json.dumps(config))
    change(base / "generation_config.json", num_beams=3, an_unknown_key="kept")
    exported = export_base(base, final, OLDER[name][0], torch.bfloat16)
    assert exported["torch_dtype"] == exported["dtype"] == "bfloat16"
    changed = CHANGED | ({"tie_word_embeddings"} if name == "flan-t5" else set())
    differs = {
        key for key in exported.keys() | config.keys() if exported.get(key) != config.get(key)
    }
    assert differs <= changed
    assert name != "flan-t5" or exported["tie_word_embeddings"] is False
    name = "generation_config.json"
    version = {"transformers_version": transformers.__version__}
    assert read(final / name) == read(base / name) | version


FIELDS = {"use_cache": True, "return_dict": False, "output_attentions": True, "torchscript": True,
          "output_hidden_states": True, "gradient_checkpointing": True, "encoder_layerdrop": 0.1,
          "pad_token_id": 10**6}  # fmt: skip


def test_settings_that_training_changes_are_kept(process_group, t5_directory, tmp_path):
    base, final = tmp_path / "base", tmp_path / "final"
    base.mkdir()
    for file in t5_directory.iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    change(base / "config.json", **FIELDS)
    change(base / "generation_config.json", pad_token_id=10**6)
    exported = export_base(base, final, "T5ForConditionalGeneration")
    assert exported.items() >= FIELDS.items()
    assert read(final / "generation_config.json")["pad_token_id"] == 10**6


def test_settings_that_a_script_changes_are_written(process_group, tmp_path):
    base = tmp_path / "base"
    save_base("llama", base)
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
            "original_max_position_embeddings": 256}  # fmt: skip

    def edit(config: transformers.LlamaConfig) -> None:
        config.rope_parameters = yarn
        config.max_position_embeddings = 1024

    exported = export_base(base, tmp_path / "final", "LlamaForCausalLM", edit=edit)
    assert exported["max_position_embeddings"] == 1024
    assert exported["rope_parameters"].items() >= yarn.items()
    _, report = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "final", output_loading_info=True
    )
    assert not any(report.values())


def test_text_part_of_a_multimodal_model_has_the_settings_of_that_part(process_group, tmp_path):
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "intermediate_size": 32, "image_size": 28, "patch_size": 14}  # fmt: skip
    text = SHAPE | {"head_dim": 16, "sliding_window": 7, "an_unknown_key": "kept"}
    model_class = transformers.Gemma3ForConditionalGeneration
    config = model_class.config_class(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    base, final = tmp_path / "base", tmp_path / "final"
    save(model_class(config), base)
    settings = read(base / "config.json")
    del settings["text_config"]["model_type"]  # as in older files
    change(base / "config.json", **settings)
    exported = export_base(base, final, "Gemma3ForCausalLM")
    assert exported["architectures"] == ["Gemma3ForCausalLM"]
    assert exported.items() >= (text | {"model_type": "gemma3_text"}).items()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(final)
    expected = config.text_config.to_dict()
    for name in ("rope_parameters", "layer_types", "sliding_window", "tie_word_embeddings"):
        assert loaded.config.to_dict()[name] == expected[name]


def test_model_without_a_base_has_all_settings(process_group, tmp_path):
    config = transformers.LlamaConfig(**SHAPE, attention_bias=True)
    model, source = weights.new_model(transformers.LlamaForCausalLM, config, None)
    model.apply(weights.Loader(model, source, torch.device("cpu")).fill)
    export.export_model(model, transformers.ByT5Tokenizer(), tmp_path / "final", torch.float32)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert loaded.config.attention_bias and type(loaded) is transformers.LlamaForCausalLM
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])


@pytest.mark.parametrize("template", ["{{ messages }}", NAMED])
def test_tokenizer_files_are_the_base_s_unless_it_is_changed(template, process_group, tmp_path):
    """Files with which Transformers 5 does not save a tokenizer are copied too."""
    base, final = tmp_path / "base", tmp_path / "final"
    save_base("llama", base)
    change(base / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast",
           chat_template=template)  # fmt: skip
    for name in ("tokenizer.model", "merges.txt", "vocab.json", "spiece.model"):
        (base / name).write_text(name)
    (base / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    export_base(base, final, "LlamaForCausalLM")
    names = {path.name for path in base.iterdir()} - {"config.json", "generation_config.json"}
    _, *different = filecmp.cmpfiles(base, final, names, shallow=False)
    assert different == [[], []]
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "{{ messages[0] }}"
    for name in ("template", "tokens"):
        export.write_tokenizer(tokenizer, tmp_path / name)
        saved = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert saved.chat_template == tokenizer.chat_template and len(saved) == len(tokenizer)
        assert (tmp_path / name / "tokenizer.model").exists() == (name == "template")
        tokenizer.add_tokens(["<new>"])


@pytest.mark.parametrize(("after", "stops"), [
    ("</s>", [2, 1]),
    ("<end>\n</s>", [2, 1, 384]),
    (" and on", [2, 1]),
    ("{{ raise_exception('no such turn') }}", [2, 1]),
])  # fmt: skip
def test_generation_stops_where_answers_end(after, stops, process_group, tmp_path, capsys):
    """The base stops at 2 only. The tokenizer's EOS is 1, and 384 ends a turn."""
    base, final = tmp_path / "base", tmp_path / "final"
    save_base("llama", base)
    change(base / "generation_config.json", eos_token_id=2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["<end>"])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}" + after + "{% endfor %}"
    stops = [tokenizer.convert_tokens_to_ids("<end>") if x == 384 else x for x in stops]
    tokenizer.save_pretrained(base)
    export_base(base, final, "LlamaForCausalLM")
    assert read(final / "generation_config.json")["eos_token_id"] == stops
    assert "Generation stops at" in capsys.readouterr().out
    export_base(final, tmp_path / "again", "LlamaForCausalLM")
    assert "stops at" not in capsys.readouterr().out


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
    """A later save into the directory leaves no stale file."""
    save_base("llama", tmp_path / "base")
    monkeypatch.setattr(export, "FILE_BYTES", 50e3)
    final = tmp_path / "final"
    export_base(tmp_path / "base", final, "LlamaForCausalLM")
    files = sorted(path.name for path in final.glob("*.safetensors"))
    count = len(files)
    assert count > 1
    assert files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    index = read(final / "model.safetensors.index.json")
    tensors = stored(final)
    assert index["weight_map"].keys() == tensors.keys()
    modes = {path.stat().st_mode for path in final.iterdir()}
    assert len(modes) == 1  # safetensors itself makes files private
    transformers.AutoModelForCausalLM.from_pretrained(final).save_pretrained(final)
    assert [path.name for path in final.glob("*.safetensors")] == ["model.safetensors"]


def test_export_lands_in_the_target_of_a_link(process_group, tmp_path):
    disk, link = tmp_path / "disk", tmp_path / "final"
    disk.mkdir()
    link.symlink_to(disk / "final")
    for name in ("tmp-final", "tmp-old-final"):
        (disk / name).mkdir()  # of a process that was killed
    for text in ("old", "new"):
        with export.new_directory(link) as temporary:
            (temporary / "tokenizer_config.json").write_text(text)
    with pytest.raises(OSError, match="full"), export.new_directory(link):
        raise OSError("full")
    assert link.is_symlink() and (disk / "final/tokenizer_config.json").read_text() == "new"
    assert {path.name for path in disk.iterdir()} == {"final"}


@pytest.mark.parametrize("error", [SafetensorError("No space left"), KeyboardInterrupt()])
def test_failed_export_keeps_the_one_before(error, process_group, tmp_path, monkeypatch):
    """The first error is of a full disk; the second of a request to stop."""
    save_base("llama", tmp_path / "base")
    final = tmp_path / "final"
    final.mkdir()
    (final / "config.json").write_text("before")

    def fail(*_: object) -> None:
        raise error

    is_stop = isinstance(error, KeyboardInterrupt)
    model, source = weights.new_model(
        transformers.LlamaForCausalLM, transformers.LlamaConfig(**SHAPE), None
    )
    model.apply(weights.Loader(model, source, torch.device("cpu")).fill)
    if not is_stop:
        monkeypatch.setattr(export, "save_file", fail)
    stop = {"check_stop": fail} if is_stop else {}
    tokenizer = transformers.ByT5Tokenizer()
    with pytest.raises(type(error) if is_stop else OSError, match=None if is_stop else "No space"):
        export.export_model(model, tokenizer, final, torch.float32, **stop)
    assert (final / "config.json").read_text() == "before"
    assert {path.name for path in tmp_path.iterdir()} == {"base", "final"}
