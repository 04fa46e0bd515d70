"""Pretrained weights as they come: several files, other names, other dtypes, and broken ones."""

import json
import os
import re
import time
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers
from conftest import errors_said, launch, weights
from files_worker import CountingPegasus
from safetensors.torch import load_file, save_file
from test_templates import byte_tokenizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import (
    AutoConfig,
    ByT5Tokenizer,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    GPT2LMHeadModel,
    GPTNeoXForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    T5ForConditionalGeneration,
)

from runtime import hf_export, hf_load

CPU = torch.device("cpu")
EXPORT = Namespace(export_dtype="fp32", max_shard_size=1)

# Small shapes, as the configs of these families call them.
DECODER = {"vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
           "intermediate_size": 64, "max_position_embeddings": 64}  # fmt: skip
GROUPED = DECODER | {"num_key_value_heads": 2, "head_dim": 8}
BART = {"vocab_size": 384, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64, "max_position_embeddings": 64, "dropout": 0.0}  # fmt: skip
T5 = {"vocab_size": 384, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
GPT2 = {"vocab_size": 384, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
OPT = {"vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
       "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64}  # fmt: skip
FAMILIES = {
    "T5ForConditionalGeneration": T5,
    "MT5ForConditionalGeneration": T5,
    "GPT2LMHeadModel": GPT2,
    "LlamaForCausalLM": GROUPED,
    "MistralForCausalLM": GROUPED,
    "Qwen2ForCausalLM": GROUPED,
    "Qwen3ForCausalLM": GROUPED,
    "Qwen3_5ForCausalLM": GROUPED | {"layer_types": ["full_attention"] * 2},
    "OPTForCausalLM": OPT,
    "GPTNeoXForCausalLM": DECODER,
    "BartForConditionalGeneration": BART,
    "PegasusForConditionalGeneration": BART,
    "MarianMTModel": BART | {"decoder_vocab_size": 384, "pad_token_id": 0},
}


def new_model(model_class: type[PreTrainedModel], **shape: object) -> PreTrainedModel:
    """A random model, its persistent buffers too."""
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**shape))
    for _, buffer in hf_export._persistent_buffers(model):
        if buffer.is_floating_point():
            buffer.normal_()
    return model


def counting_model() -> CountingPegasus:
    """One that has counted."""
    model = new_model(CountingPegasus, **BART)
    model.counter.seen.fill_(7)
    model.counter.known[::3] = True
    return model


def streamed(
    model_class: type[PreTrainedModel], directory: Path, config: PretrainedConfig | None = None
) -> DDP:
    """The model in `directory` as the scripts load it; needs a process group."""
    config = config or model_class.config_class.from_pretrained(directory)
    model = hf_load.meta_model(model_class, config, directory)
    args = Namespace(fsdp=1, cpu_offload=False, strategy="ddp", prepare_only=False)
    hf_load.materialize(model, hf_load.WeightLoader(args, model, directory, CPU).fill)
    return DDP(model)


def check_equal(
    ones: dict[str, torch.Tensor], others: dict[str, torch.Tensor], least: int = 1
) -> None:
    """The same names and dtypes, at least so many, and the same values to the last bit."""
    assert ones.keys() == others.keys() and len(ones) >= least
    for name, one in ones.items():
        assert one.dtype == others[name].dtype, name
        assert torch.equal(one, others[name]), name


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
    found = hf_load._find_weights(meta_model, tmp_path)
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
        hf_load._find_weights(meta_model, tmp_path)
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
        hf_load._find_weights(meta_model, tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match="save_pretrained"):
        hf_load._find_weights(meta_model, tmp_path)
    whole = (t5_directory / "model.safetensors").read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="model.safetensors cannot be read"):
        hf_load._find_weights(meta_model, tmp_path)
    index = {"weight_map": {"shared.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="model-00001-of-00002.safetensors cannot be read"):
        hf_load._find_weights(meta_model, tmp_path)


def test_half_precision_files_train_in_fp32(
    meta_model: T5ForConditionalGeneration,
    tensors: dict[str, torch.Tensor],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    """A line says so; the meta model's parameters, which the values are copied to, are fp32."""
    halves = {name: tensor.half() for name, tensor in tensors.items()}
    save_file(halves, tmp_path / "model.safetensors")
    hf_load._find_weights(meta_model, tmp_path)
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
    assert len(errors_said(result.stderr)) == 1
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
    found = hf_load._find_weights(model, tmp_path)
    assert found.keys() == {name for name, _ in model.named_parameters()}
    assert found["transformer.wte.weight"][1] == "wte.weight"


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_loaded_and_exported_as_by_transformers(
    name: str, alone: None, tmp_path: Path
) -> None:
    """Every tensor of `from_pretrained`, and every key and value of `save_pretrained`."""
    model_class = getattr(transformers, name)
    made = new_model(model_class, **FAMILIES[name])
    made.save_pretrained(tmp_path / "made", max_shard_size="60KB")
    plain = model_class.from_pretrained(tmp_path / "made", dtype=torch.float32)
    plain.save_pretrained(tmp_path / "plain")
    loaded = streamed(model_class, tmp_path / "made")
    check_equal(loaded.module.state_dict(), plain.state_dict(), least=20)
    computed = dict(plain.named_buffers())
    check_equal(dict(loaded.module.named_buffers()), computed, least=len(computed))
    frozen = {key for key, parameter in made.named_parameters() if not parameter.requires_grad}
    still = loaded.module.named_parameters()
    assert {key for key, parameter in still if not parameter.requires_grad} == frozen
    hf_export.export_model(loaded, ByT5Tokenizer(), tmp_path / "exported", EXPORT)
    check_equal(weights(tmp_path / "exported"), weights(tmp_path / "plain"), least=20)
    # A model that was in no file, such as `tiny`.
    hf_export.export_model(DDP(made), ByT5Tokenizer(), tmp_path / "new", EXPORT)
    check_equal(weights(tmp_path / "new"), weights(tmp_path / "made"), least=20)


def test_buffers_in_the_files_are_there() -> None:
    """What the test above is about: without them it would show less."""
    model = new_model(transformers.BartForConditionalGeneration, **BART)
    (buffer,) = hf_export._persistent_buffers(model)
    assert buffer[0] == "final_logits_bias" and buffer[1].any()


def test_a_buffer_that_the_model_can_do_without(
    alone: None, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """BART's files may lack final_logits_bias, which is zero then; another buffer may not."""
    model = new_model(transformers.BartForConditionalGeneration, **BART)
    model.save_pretrained(tmp_path)
    tensors = weights(tmp_path)
    del tensors["final_logits_bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = streamed(type(model), tmp_path).module
    assert "does not hold final_logits_bias" in capsys.readouterr().out
    assert loaded.final_logits_bias.shape == (1, 384) and not loaded.final_logits_bias.any()
    counting_model().save_pretrained(tmp_path)
    tensors = weights(tmp_path)
    del tensors["counter.seen"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="counter.seen is missing"):
        streamed(CountingPegasus, tmp_path)


def test_keys_of_older_files_are_renamed(alone: None, tmp_path: Path) -> None:
    """Pythia's embed_out is the head, also without the base model's prefix, and stays its key."""
    made = new_model(GPTNeoXForCausalLM, **DECODER)
    made.save_pretrained(tmp_path)
    tensors = weights(tmp_path)
    assert "embed_out.weight" in tensors and "lm_head.weight" not in tensors
    bare = {key.removeprefix("gpt_neox."): tensor for key, tensor in tensors.items()}
    assert "embed_in.weight" in bare
    save_file(bare, tmp_path / "model.safetensors")
    loaded = streamed(GPTNeoXForCausalLM, tmp_path)
    check_equal(loaded.module.state_dict(), made.state_dict())
    hf_export.export_model(loaded, ByT5Tokenizer(), tmp_path / "exported", EXPORT)
    check_equal(weights(tmp_path / "exported"), tensors)
    # Files that have the model's own names keep them.
    made.save_pretrained(tmp_path / "own", save_original_format=False)
    loaded = streamed(GPTNeoXForCausalLM, tmp_path / "own")
    hf_export.export_model(loaded, ByT5Tokenizer(), tmp_path / "again", EXPORT)
    assert "lm_head.weight" in weights(tmp_path / "again")
    check_equal(weights(tmp_path / "again"), weights(tmp_path / "own"))


def test_a_renamed_head_that_stands_apart_is_untied(alone: None, tmp_path: Path) -> None:
    """Though the config ties it; one with the same values stays tied."""
    made = new_model(GPTNeoXForCausalLM, **DECODER)
    made.config.tie_word_embeddings = True
    made.save_pretrained(tmp_path)
    loaded = streamed(GPTNeoXForCausalLM, tmp_path).module
    check_equal(loaded.state_dict(), made.state_dict())
    made.lm_head.weight = nn.Parameter(made.gpt_neox.embed_in.weight.detach().clone())
    made.save_pretrained(tmp_path)
    assert "embed_out.weight" in weights(tmp_path)
    loaded = streamed(GPTNeoXForCausalLM, tmp_path).module
    assert loaded.lm_head.weight is loaded.gpt_neox.embed_in.weight


def test_the_text_part_of_a_multimodal_model(
    alone: None, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """It computes what the whole does of a text; what is left out is named and counted."""
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "intermediate_size": 32, "image_size": 28, "patch_size": 14}  # fmt: skip
    sizes = {"text_config": GROUPED, "vision_config": vision, "mm_tokens_per_image": 4}
    whole = new_model(Gemma3ForConditionalGeneration, **sizes).eval()
    whole.save_pretrained(tmp_path)
    stored = weights(tmp_path)
    config = hf_load.load_config(tmp_path, Gemma3ForCausalLM, "theirs")
    loaded = streamed(Gemma3ForCausalLM, tmp_path, config)
    parts = Counter(key.split(".")[0] for key in stored)
    said = f"left out are {parts['multi_modal_projector']} tensors of multi_modal_projector, "
    assert f"{said}{parts['vision_tower']} tensors of vision_tower" in capsys.readouterr().out
    ids = torch.arange(2, 42)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, whole(ids).logits)
    hf_export.export_model(loaded, ByT5Tokenizer(), tmp_path / "exported", EXPORT)
    again, report = Gemma3ForCausalLM.from_pretrained(
        tmp_path / "exported", output_loading_info=True
    )
    assert not any(report.values()), report
    check_equal(again.state_dict(), loaded.module.state_dict(), least=20)
    # Of the text part nothing may be left out.
    stored["language_model.model.layers.2.mlp.up_proj.weight"] = torch.zeros(64, 32)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="layers.2.mlp.up_proj.weight is not the model's$"):
        streamed(Gemma3ForCausalLM, tmp_path, config)


def test_a_model_of_several() -> None:
    """Its class is no text model's, and another is named."""
    config = Gemma3ForConditionalGeneration.config_class()
    with pytest.raises(ValueError, match="made of several models: .* such as Gemma3ForCausalLM"):
        hf_load.check_type(config, Gemma3ForConditionalGeneration, "gemma")


@pytest.mark.slow
def test_adapters_on_a_text_part(chats: Path, tmp_path: Path) -> None:
    """Merged, they make a model of text alone, which Transformers loads."""
    pytest.importorskip("peft")
    vision = {"model_type": "clip_vision_model", "hidden_size": 32, "num_hidden_layers": 1,
              "num_attention_heads": 2, "intermediate_size": 32, "image_size": 28,
              "patch_size": 14}  # fmt: skip
    ids = {"bos_token_id": None, "eos_token_id": 1}
    text = GROUPED | ids | {"model_type": "llama"}
    sizes = {"text_config": text, "vision_config": vision, "image_token_index": 300}
    whole = new_model(transformers.LlavaForConditionalGeneration, **sizes)
    whole.save_pretrained(tmp_path / "model")
    byte_tokenizer("qwen3").save_pretrained(tmp_path / "model")
    flags = ["--model-name", tmp_path / "model", "--dataset", chats, "--max-seq-length", 64]
    flags += ["--max-steps", 2, "--lora-rank", 2, "--lora-targets", "q_proj", "--merge"]
    output = tmp_path / "output"
    launch(0, "llama_fsdp.py", *flags, "--export-dtype", "fp32", "--output-dir", output)
    final, report = transformers.AutoModelForCausalLM.from_pretrained(
        output / "final", output_loading_info=True
    )
    assert type(final) is transformers.LlamaForCausalLM and not any(report.values()), report
    merged = final.model.state_dict()
    base = whole.model.language_model.state_dict()
    changed = {key for key in base if not torch.equal(base[key], merged[key])}
    assert changed == {f"layers.{i}.self_attn.q_proj.weight" for i in range(2)}


@pytest.mark.parametrize(
    "tokenizer", ["PreTrainedTokenizerFast", "LlamaTokenizer", "T5Tokenizer", "GemmaTokenizer"]
)
def test_a_tokenizer_without_its_vocabulary(tokenizer: str, tmp_path: Path) -> None:
    """One sentence, whatever Transformers makes of it: some classes take every text for unknown."""
    transformers.LlamaConfig().save_pretrained(tmp_path)
    settings = {"tokenizer_class": tokenizer}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError) as error:
        hf_load.load_tokenizer(tmp_path, 1000)
    said = f"the tokenizer in {tmp_path} makes no tokens of a text"
    if tokenizer == "PreTrainedTokenizerFast":
        said = f"{tmp_path} has no tokenizer.json"
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_buffers_of_other_dtypes(alone: None, tmp_path: Path) -> None:
    """Integers and truth values are not cast; floating-point buffers are, as parameters."""
    made = counting_model()
    made.save_pretrained(tmp_path)
    loaded = streamed(CountingPegasus, tmp_path)
    check_equal(dict(loaded.module.named_buffers()), dict(made.named_buffers()), least=4)
    args = Namespace(export_dtype="bf16", max_shard_size=1)
    hf_export.export_model(loaded, ByT5Tokenizer(), tmp_path / "exported", args)
    exported = weights(tmp_path / "exported")
    assert exported["counter.seen"].dtype == torch.int64 and exported["counter.seen"] == 7
    assert torch.equal(exported["counter.known"], made.counter.known)
    assert exported["final_logits_bias"].dtype == torch.bfloat16


def test_what_the_file_system_lost_is_seen(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a bucket is mounted: the directory before stays, and nothing else."""
    (tmp_path / "final").mkdir()
    (tmp_path / "final/before").touch()
    write = hf_export.Place.write

    def lost(place: hf_export.Place, first: int, values: torch.Tensor) -> hf_export.Tail:
        tail = write(place, first, values)
        size = place.path.stat().st_size
        os.truncate(place.path, place.offset)
        os.truncate(place.path, size)
        return tail

    monkeypatch.setattr(hf_export.Place, "write", lost)
    model = DDP(new_model(transformers.BartForConditionalGeneration, **BART))
    with pytest.raises(OSError, match="model.safetensors lacks what rank 0 wrote to it: give an"):
        hf_export.export_model(model, ByT5Tokenizer(), tmp_path / "final", EXPORT)
    assert [path.name for path in tmp_path.rglob("*")] == ["final", "before"]


def test_buffers_on_two_ranks(tmp_path: Path) -> None:
    """Loaded, saved and resumed, under FSDP and DDP, and from one to the other; a frozen parameter
    stays what it is."""
    counting_model().save_pretrained(tmp_path / "made")
    made = weights(tmp_path / "made")
    launch(2, "tests/files_worker.py", tmp_path / "made", tmp_path)
    for strategy in ("full_shard", "fsdp2", "ddp"):
        states = {path.name: weights(path) for path in (tmp_path / strategy).glob("*ed")}
        assert len(states) == 5
        check_equal(states["loaded"], made, least=90)
        check_equal(states["resumed"], states["saved"])
        assert states["saved"]["counter.seen"] == 8 and states["continued"]["counter.seen"] == 9
        for name, tensor in states["continued"].items():
            torch.testing.assert_close(tensor, states["trained"][name])
            fixed = re.search(r"embed_positions|final_logits_bias|counter.known", name) is not None
            assert torch.equal(tensor, made[name]) == fixed, name
