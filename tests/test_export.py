"""An export has its base's settings and tokenizer files, and replaces a directory when complete."""

import copy
import filecmp
import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers
from conftest import weights as stored
from plain import save
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from test_weights import BART, GPT2, T5, VISION
from torch import nn

from core import export, weights
from core.ranks import Stopped
from optional import base_files
from prepare import chats

SHAPE = {"vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 64, "eos_token_id": 1,
         "bos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 256}  # fmt: skip
FLAN_T5 = T5 | {"feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0,
                "tie_word_embeddings": False}  # fmt: skip
LLAMA3 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
          "original_max_position_embeddings": 64, "rope_type": "llama3"}  # fmt: skip
EXPERTS = {  # a bias decides between them
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
KEPT = {"use_cache": True, "return_dict": False, "output_attentions": True, "torchscript": True,
        "output_hidden_states": True, "gradient_checkpointing": True, "encoder_layerdrop": 0.1,
        "pad_token_id": 10**6}  # what training changes  # fmt: skip
OLDER = {  # class, keys of config.json as Transformers 4 writes them
    "llama": ("LlamaForCausalLM", {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "gemma3": ("Gemma3ForCausalLM", {
        "head_dim": 16, "rope_theta": 2e6, "rope_local_base_freq": 3e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "flan-t5": ("T5ForConditionalGeneration", FLAN_T5),
}  # fmt: skip
CHANGED = {"dtype", "torch_dtype"}  # keys of an export's config.json
EXPORT = base_files.keep(export.export_model)
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


def read(path: Path) -> dict:
    """Return the content of a JSON file."""
    return json.loads(path.read_text())


def change(path: Path, **settings: object) -> dict:
    """Change settings in a JSON file; return all."""
    path.write_text(json.dumps(read(path) | settings))
    return read(path)


def load(model_class: type, config: object, directory: Path | None) -> nn.Module:
    """Return a model of a directory, or random, loaded as the scripts do on one process."""
    model, initial = weights.new_model(model_class, config, directory)
    return model.apply(weights.Initializer(model, initial, torch.device("cpu")).fill)


def export_base(base: Path, final: Path, kind: str, dtype: str = "fp32") -> dict:
    """Load a base as the scripts do, and export it; return the export's config.json."""
    own = getattr(transformers, kind)
    directory, config, kind, tokenizer = weights.open_model(str(base), own)
    model = load(kind, config, directory)
    tokenizer(["a text", "b"], truncation=True, max_length=3, padding="max_length")
    EXPORT(model, tokenizer, final, dtype)
    return read(final / "config.json")


@pytest.mark.parametrize("form", ["of Transformers 5", "of Transformers 4"])
@pytest.mark.parametrize("name", OLDER)
def test_settings_go_out_as_they_came_in(name, form, process_group, tmp_path):
    base, final = tmp_path / "base", tmp_path / "final"
    keys = save_base(name, base)
    config = read(base / "config.json")
    if form == "of Transformers 4":
        config.pop("rope_parameters", None)
        config |= keys | {"torch_dtype": "bfloat16", "an_unknown_key": "kept"}
    config |= KEPT if name == "flan-t5" else {}
    (base / "config.json").write_text(json.dumps(config))
    generation = change(base / "generation_config.json", num_beams=3, pad_token_id=10**6)
    exported = export_base(base, final, OLDER[name][0], "bf16")
    assert exported["torch_dtype"] == exported.get("dtype", "bfloat16") == "bfloat16"
    keys = exported.keys() | config.keys()
    differs = {key for key in keys if exported.get(key) != config.get(key)}
    assert differs <= CHANGED | ({"tie_word_embeddings"} if name == "flan-t5" else set())
    assert name != "flan-t5" or exported["tie_word_embeddings"] is False
    assert read(final / "generation_config.json") == generation


@pytest.mark.parametrize("form", ["of Transformers 5", "of Transformers 4"])
@pytest.mark.parametrize("name", OLDER)
def test_exports_without_the_base_s_files_reload_with_equal_logits(
    name, form, process_group, tmp_path
):
    """Generation may use the cache, and the tokenizer neither pads nor truncates."""
    base, final = tmp_path / "base", tmp_path / "final"
    keys = save_base(name, base)
    config = read(base / "config.json")
    if form == "of Transformers 4":
        config.pop("rope_parameters", None)
        (base / "config.json").write_text(json.dumps(config | keys | {"torch_dtype": "bfloat16"}))
    own = getattr(transformers, OLDER[name][0])
    directory, config, kind, tokenizer = weights.open_model(str(base), own)
    model = load(kind, config, directory).eval()
    tokenizer(["a text"], truncation=True, max_length=3, padding="max_length")
    export.export_model(model, tokenizer, final, "fp32")
    loaded = own.from_pretrained(final)
    assert loaded.dtype == torch.float32 and loaded.config.use_cache
    ids = torch.arange(3, 20)[None]
    inputs = {"input_ids": ids, "labels": ids}
    assert torch.allclose(loaded(**inputs).logits, model(**inputs).logits, rtol=0, atol=1e-5)
    saved = transformers.AutoTokenizer.from_pretrained(final)
    assert saved("a longer text").input_ids == tokenizer("a longer text").input_ids
    assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id


@pytest.fixture
def llama(process_group: None, tmp_path: Path) -> Path:
    """Return the directory of a Llama with a tokenizer."""
    save_base("llama", tmp_path / "base")
    return tmp_path / "base"


def test_settings_that_a_script_changes_are_written(llama, tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
            "original_max_position_embeddings": 256}  # fmt: skip

    own = transformers.LlamaForCausalLM
    directory, config, kind, tokenizer = weights.open_model(str(llama), own)
    config.rope_parameters = yarn
    config.max_position_embeddings = 1024
    model = load(kind, config, directory)
    EXPORT(model, tokenizer, tmp_path / "final", "fp32")
    exported = read(tmp_path / "final/config.json")
    assert exported["max_position_embeddings"] == 1024
    assert exported["rope_parameters"].items() >= yarn.items()


def test_generation_uses_the_cache_if_the_base_has_no_settings_for_it(llama, tmp_path):
    (llama / "generation_config.json").unlink()
    export_base(llama, tmp_path / "final", "LlamaForCausalLM")
    assert read(tmp_path / "final/generation_config.json")["use_cache"] is True


def test_text_part_of_a_multimodal_model_has_the_settings_of_that_part(process_group, tmp_path):
    text = SHAPE | {"head_dim": 16, "sliding_window": 7}
    model_class = transformers.Gemma3ForConditionalGeneration
    config = model_class.config_class(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
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
    tensors = load_file(base / "model.safetensors")
    newer = {
        k.replace("language_model.model.", "model.language_model."): tensors[k] for k in tensors
    }
    assert newer.keys() != tensors.keys()  # Gemma 4 has these
    save_file(newer, base / "model.safetensors", {"format": "pt"})
    before = load_file(final / "model.safetensors")
    export_base(base, final, "Gemma3ForCausalLM")
    after = load_file(final / "model.safetensors")
    assert all(x.equal(before[k]) for k, x in after.items()) and after.keys() == before.keys()


@pytest.mark.parametrize("has_prefix", [False, True])
@pytest.mark.parametrize("needs_weights", [False, True])
def test_tensors_have_the_names_of_the_base_s_file(
    needs_weights, has_prefix, process_group, tmp_path
):
    """GPT-2's file on the hub lacks the prefix "transformer.". It is the same after a resume."""
    base, final = tmp_path / "base", tmp_path / "final"
    own = transformers.GPT2LMHeadModel
    save(own(transformers.GPT2Config(**GPT2 | {"tie_word_embeddings": False})), base)
    if not has_prefix:
        tensors = load_file(base / "model.safetensors")
        tensors = {name.removeprefix("transformer."): x for name, x in tensors.items()}
        save_file(tensors, base / "model.safetensors", {"format": "pt"})
    directory, config, kind, tokenizer = weights.open_model(str(base), own)
    model, initial = weights.new_model(kind, config, directory, needs_weights)
    model.apply(weights.Initializer(model, initial, torch.device("cpu")).fill)
    export.export_model(model, tokenizer, final, "fp32")
    before, after = (load_file(path / "model.safetensors") for path in (base, final))
    assert before.keys() == after.keys()
    assert not needs_weights or all(torch.equal(x, after[name]) for name, x in before.items())


def random_llama() -> nn.Module:
    """Return a random model without a base."""
    config = transformers.LlamaConfig(**SHAPE, attention_bias=True)
    return load(transformers.LlamaForCausalLM, config, None)


def test_model_without_a_base_is_written_as_save_pretrained_does(
    process_group, tmp_path, monkeypatch
):
    """A later save into the directory leaves no stale file."""
    monkeypatch.setattr(export, "FILE_BYTES", 50_000)
    final, model = tmp_path / "final", random_llama()
    export.export_model(model, transformers.ByT5Tokenizer(), final, "fp32")
    files = sorted(path.name for path in final.glob("*.safetensors"))
    count = len(files)
    assert count > 1
    assert files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    index, tensors = read(final / "model.safetensors.index.json"), stored(final)
    assert index["weight_map"].keys() == tensors.keys()
    modes = {path.stat().st_mode for path in final.iterdir()}
    assert len(modes) == 1  # safetensors itself makes files private
    loaded = transformers.AutoModelForCausalLM.from_pretrained(final)
    assert loaded.config.attention_bias and type(loaded) is transformers.LlamaForCausalLM
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
    loaded.save_pretrained(final)
    assert [path.name for path in final.glob("*.safetensors")] == ["model.safetensors"]


@pytest.mark.parametrize("template", ["{{ messages }}", NAMED])
def test_tokenizer_files_are_the_base_s_unless_it_is_changed(template, llama, tmp_path):
    """Files with which Transformers 5 does not save a tokenizer are copied too."""
    change(llama / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast",
           chat_template=template)  # fmt: skip
    for name in ("tokenizer.model", "merges.txt", "vocab.json", "spiece.model"):
        (llama / name).write_text(name)
    (llama / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    export_base(llama, tmp_path / "final", "LlamaForCausalLM")
    names = {path.name for path in llama.iterdir()} - {"config.json", "generation_config.json"}
    _, *different = filecmp.cmpfiles(llama, tmp_path / "final", names, shallow=False)
    assert different == [[], []]
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    tokenizer.chat_template = "{{ messages[0] }}"
    for name in ("template", "tokens"):
        export.write_tokenizer(tokenizer, tmp_path / name)
        base_files.rewrite(tmp_path / name, tokenizer)
        saved = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert saved.chat_template == tokenizer.chat_template and len(saved) == len(tokenizer)
        assert (tmp_path / name / "tokenizer.model").exists() == (name == "template")
        tokenizer.add_tokens(["<new>"])


CALLS = ("{% for call in m.tool_calls %}{{ call.function.arguments.of }}<next>{% endfor %}"
         "{{ '<call>' if m.tool_calls else '<end>' }}")  # fmt: skip
NO_END = CALLS.replace("<call>", "")  # after calls, only what separates them


@pytest.mark.parametrize(("after", "stops"), [
    ("</s>", [2, 1]),
    ("<end>\n</s>", [2, 1, 258]),
    (" and on", [2, 1]),
    ("{{ raise_exception('no such turn') }}", [2, 1]),
    (CALLS, [2, 1, 258, 260]),
    (NO_END, [2, 1, 258]),
])  # fmt: skip
def test_generation_stops_where_answers_end(after, stops, llama, tmp_path, capsys):
    """The base stops at 2 only. The tokenizer's EOS is 1, 258 ends a turn, and 260 a call."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    tokenizer.add_tokens(["<end>", "<next>", "<call>", "\n"])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}" + after + "{% endfor %}"
    config = transformers.GenerationConfig(eos_token_id=2)
    for _ in range(2):
        export.add_stops(config, chats.answer_ends(tokenizer), tokenizer)
    assert config.eos_token_id == stops
    assert capsys.readouterr().out.count("Generation also stops at </s>") == 1
    for own, stops in ((0, [0, 1]), (-1, [-1, 1]), (None, [1]), ([2, 3], [2, 3, 1])):
        config.eos_token_id = own
        export.add_stops(config, [1], tokenizer)
        assert config.eos_token_id == stops
    change(llama / "generation_config.json", eos_token_id=2)
    export_base(llama, tmp_path / "final", "LlamaForCausalLM")
    assert read(tmp_path / "final/generation_config.json")["eos_token_id"] == [2, 1]


@pytest.mark.parametrize(("kind", "settings", "dtype"), [
    ("T5ForConditionalGeneration", FLAN_T5, "fp16"),
    ("DeepseekV3ForCausalLM", EXPERTS, "bf16"),
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
    cast = export.EXPORT_DTYPES[dtype]
    model_class.from_pretrained(base, dtype=cast).save_pretrained(plain)
    tensors, expected = (load_file(x / "model.safetensors") for x in (final, plain))
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name])
    assert {tensor.dtype for tensor in tensors.values()} == {cast, torch.float32}


def test_buffers_of_the_files_are_exported(process_group, tmp_path):
    base, final = tmp_path / "base", tmp_path / "final"
    model_class = transformers.PegasusForConditionalGeneration
    model = model_class(model_class.config_class(**BART))
    model.final_logits_bias.normal_()
    save(model, base)
    export_base(base, final, "PegasusForConditionalGeneration")
    name = "final_logits_bias"
    assert load_file(final / "model.safetensors")[name].equal(model.get_buffer(name))


def test_files_named_like_temporary_directories_are_no_obstacle(process_group, tmp_path):
    for name in ("tmp-final", "tmp-old-final"):
        (tmp_path / name).touch()
    with export.new_directory(tmp_path / "final") as temporary:
        (temporary / "tokenizer_config.json").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_complete_export_replaces_the_target_of_a_link(process_group, tmp_path, monkeypatch):
    """One that fails on a full disk or is stopped changes nothing."""
    disk, link = tmp_path / "disk", tmp_path / "final"
    disk.mkdir()
    link.symlink_to(disk / "final")
    for name in ("final", "tmp-final", "tmp-old-final"):  # two are left by a killed process
        (disk / name).mkdir()
        (disk / name / "config.json").touch()
    for text in ("old", "new"):
        with export.new_directory(link) as temporary:
            (temporary / "tokenizer_config.json").write_text(text)
    arguments = random_llama(), transformers.ByT5Tokenizer(), link, "fp32"
    with pytest.raises(Stopped):
        export.export_model(*arguments, check_stop=Mock(side_effect=Stopped))
    no_space = Mock(side_effect=SafetensorError("No space left"))
    monkeypatch.setattr(transformers.modeling_utils, "safe_save_file", no_space)
    with pytest.raises(OSError, match="No space left"):
        export.export_model(*arguments)
    assert link.is_symlink() and (disk / "final/tokenizer_config.json").read_text() == "new"
    assert {path.name for path in disk.iterdir()} == {"final"}
