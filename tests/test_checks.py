"""Edits that would train a model incorrectly are refused at startup, each with its own message."""

import argparse
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from conftest import launch, metrics
from copied import edited_script, llama_changes
from torch import nn

import llama_fsdp
from benchmarks.driven import parse_flags
from runtime.attention import set_attention
from runtime.checks import check_length, fit_config

NOT_A_SUM = "summed_loss is not a sum over target tokens"
OTHER_LOGITS = "The logits behind the loss differ from the model's own by"
OTHER_INPUTS = (
    "The decoder's logits differ by .* from those that the model computes from the labels"
)
NOT_CAUSAL = "The model is not causal: its logits change by"
LEAK = "Documents in a sequence attend to each other.*Pass --no-packing"
PADDING = "Padding changes the model's logits by"
SUM = ', reduction="sum"'
NO_MASK = {'("labels", "targets"': '("attention_mask", "labels", "targets"'}
NO_DECODER_MASK = {'("labels", "targets"': '("decoder_attention_mask", "labels", "targets"'}
NO_SHIFT = {
    "decoder_input_ids[:, 1:] = labels[:, :-1].masked_fill(labels[:, :-1] == -100, pad_token_id)": (
        "decoder_input_ids = labels.masked_fill(labels == -100, pad_token_id)"
    )
}
START = "torch.full_like(labels, decoder_start_token_id)"
T5GEMMA = {
    "T5Block,": "T5GemmaEncoderLayer, T5GemmaDecoderLayer",
    "import T5Block": "import T5GemmaDecoderLayer, T5GemmaEncoderLayer",
    "models.t5.modeling_t5": "models.t5gemma.modeling_t5gemma",
    "transformers.T5For": "transformers.T5GemmaFor",
    '"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 4': (
        "name: dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, head_dim=32, "
        "num_attention_heads=4, num_key_value_heads=2, vocab_size=384) "
        "for name in ('encoder', 'decoder')"
    ),
}
BART = {
    "t5.modeling_t5 import T5Block": "bart.modeling_bart import BartDecoderLayer, BartEncoderLayer",
    "transformers.T5For": "transformers.BartFor",
    '"d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 4': (
        '"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128'
    ),
}
PLAIN_LOSS = {  # computes the loss from the model's own logits
    '    return model(**model_inputs(batch), targets=batch["labels"])\n': (
        "    logits = model(**model_inputs(batch), use_cache=False).logits\n"
        '    return token_loss(logits.flatten(0, 1).float(), batch["labels"].flatten())\n'
    )
}
TRAINED_PADDING = {"-100, least=8": "0, least=8"}
CONV = ["conv", "conv", "full_attention", "conv"]
LEAKS = {  # folder in Transformers, additions to TINY
    "GptOss": ("gpt_oss", {"num_local_experts": 4, "head_dim": 32}),
    "Lfm2": ("lfm2", {"layer_types": CONV}),
    "Qwen3_5": ("qwen3_5", {
        "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    }),
    "GraniteMoeHybrid": ("granitemoehybrid", {
        "layer_types": ["mamba", "mamba", "attention", "mamba"], "num_local_experts": 2,
        "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 16,
    }),
}  # fmt: skip


@dataclass
class Edit:
    """Changes to a script's text and to its data module's, and the message that refuses them."""

    script: str
    message: str | None = None  # None: the script is accepted
    changes: dict[str, str] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


def llama(message: str | None, *flags: str, name: str = "Llama", folder: str = "", **config: Any):
    """Return an `Edit` that turns llama_fsdp.py into another model, or adds to its config."""
    return Edit("llama_fsdp", message, llama_changes(name, folder, **config), flags=flags)


T5, GPT2, LLAMA = "T5_training", "gpt2_fsdp", "llama_fsdp"
UNPACKED = ("--no-packing",)
EDITS = {
    "T5": Edit(T5),
    "T5: mean": Edit(T5, NOT_A_SUM, {SUM: ""}),
    "T5: source without a mask": Edit(T5, PADDING, NO_MASK),
    "T5: trained padding": Edit(T5, PADDING, data={"pad(targets, -100": "pad(targets, 0"}),
    "T5: another start": Edit(T5, OTHER_INPUTS, data={START: "torch.full_like(labels, 5)"}),
    "T5: inputs not shifted": Edit(T5, OTHER_INPUTS, data=NO_SHIFT),
    "T5: not causal": Edit(
        T5,
        NOT_CAUSAL,
        {
            "    policies.fuse(": "    model.decoder.is_decoder = False\n"
            "    model.decoder.config.is_decoder = False\n    policies.fuse("
        },
    ),
    "T5: missing block": Edit(T5, "it lacks T5Block", {"= (T5Block,)": "= (torch.nn.Embedding,)"}),
    "BART": Edit(T5, None, BART | {"(T5Block,)": "(BartEncoderLayer, BartDecoderLayer)"}),
    "BART: missing block": Edit(
        T5, "it lacks BartEncoderLayer", BART | {"(T5Block,)": "(BartDecoderLayer,)"}
    ),
    "T5Gemma": Edit(T5, None, T5GEMMA),
    "T5Gemma: starts with padding": Edit(
        T5, OTHER_INPUTS, T5GEMMA, data={START: "torch.zeros_like(labels)"}
    ),
    "T5Gemma: starts with padding, no mask": Edit(
        T5,
        f"{NOT_CAUSAL}|{OTHER_INPUTS}",  # by version of Transformers
        T5GEMMA | NO_DECODER_MASK,
        data={START: "torch.zeros_like(labels)"},
    ),
    "GPT-2": Edit(GPT2),
    "GPT-2: mean": Edit(GPT2, NOT_A_SUM, {SUM: ""}),
    "GPT-2: mean over rows": Edit(
        GPT2, NOT_A_SUM, {"targets=batch[": 'targets=batch["labels"]) / len(batch['}
    ),
    "GPT-2: trained padding": Edit(GPT2, NOT_A_SUM, data=TRAINED_PADDING),
    "GPT-2: scaled hidden states": Edit(
        GPT2, OTHER_LOGITS, {"(hidden.flatten(0, 1)": "(1.1 * hidden.flatten(0, 1)"}
    ),
    "GPT-2: not causal": Edit(
        GPT2,
        NOT_CAUSAL,
        {"    policies.fuse(": "    model.config.is_causal = False\n    policies.fuse("},
    ),
    "Llama": Edit(LLAMA),
    "Llama: unpacked": Edit(LLAMA, flags=UNPACKED),
    "Llama: own logits": Edit(LLAMA, None, PLAIN_LOSS),
    "Llama: own logits, unpacked": Edit(LLAMA, None, PLAIN_LOSS, flags=UNPACKED),
    "Llama: mean": Edit(LLAMA, NOT_A_SUM, {SUM: ""}),
    "Llama: mean, unpacked": Edit(LLAMA, NOT_A_SUM, {SUM: ""}, flags=UNPACKED),
    "Llama: mean of own logits": Edit(LLAMA, NOT_A_SUM, PLAIN_LOSS | {SUM: ""}),
    "Llama: trained padding": Edit(LLAMA, NOT_A_SUM, data=TRAINED_PADDING, flags=UNPACKED),
    "Llama: another position's logits": Edit(
        LLAMA, OTHER_LOGITS, {"hidden[target_positions]": "hidden[target_positions - 1]"}
    ),
    "Llama: scaled hidden states": Edit(
        LLAMA, OTHER_LOGITS, {"()(hidden, targets)": "()(1.1 * hidden, targets)"}
    ),
    "Llama: loss without positions": Edit(
        LLAMA, OTHER_LOGITS, {"(input_ids, use_cache=False, **options)": "(input_ids)"}
    ),
    "Llama: wrong blocks": Edit(
        LLAMA,
        "it lacks LlamaDecoderLayer",
        {"BLOCKS = (LlamaDecoderLayer,)": "BLOCKS = (nn.Linear,)"},
    ),
    "Llama: no positions": Edit(LLAMA, LEAK, {'"position_ids", "cu_seq_lens", "l': '"l'}),
    "Llama: scaled logits": llama(OTHER_LOGITS, logit_scale=0.5),  # Llama ignores both
    "Llama: capped logits": llama(OTHER_LOGITS, final_logit_softcapping=0.1),
    "Llama: not causal": llama(NOT_CAUSAL, *UNPACKED, is_causal=False),
    "Granite": llama(None, name="Granite", logits_scaling=8.0),
    "Gemma2": llama(None, name="Gemma2", initializer_range=1.0),  # caps logits of 50 at 30
    "Mistral": llama(None, name="Mistral", sliding_window=8),  # shorter than the documents
}
for name, (folder, config) in LEAKS.items():
    EDITS[f"{name}: packed"] = llama(LEAK, name=name, folder=folder, **config)
    EDITS[f"{name}: unpacked"] = llama(None, *UNPACKED, name=name, folder=folder, **config)


@pytest.fixture
def device() -> Iterator[torch.device]:
    """Yield the device of a process group of one."""
    yield llama_fsdp.setup(parse_flags(llama_fsdp, ["--model-name", "tiny"]))
    llama_fsdp.cleanup()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", EDITS)
def test_edit_is_refused_with_its_message(name, precision, device):
    edit = EDITS[name]
    script = edited_script(edit.script, edit.changes, edit.data)
    flags = ["--model-name", "tiny", "--precision", precision, *edit.flags]
    flags += ["--max-seq-length", "64", "--attention", "eager"] if edit.script == LLAMA else []
    args = parse_flags(script, flags)
    model, _, init = script.load_model(args, device)

    def check() -> None:
        script.check_loss(args, device, script.wrap_model(args, device, model, init))

    if edit.message is None:
        check()
    else:
        with pytest.raises(ValueError, match=edit.message):
            check()


def test_refused_run_exits_with_one_message(texts, tmp_path, capfd):
    script = edited_script(GPT2, {SUM: ""})
    files = ["--dataset", str(texts[0]), "--val-dataset", str(texts[1]), "--block-size", "32"]
    with pytest.raises(SystemExit) as end:
        flags = ["--model-name", "tiny", *files, "--output-dir", str(tmp_path)]
        script.fsdp_main(parse_flags(script, flags))
    error = capfd.readouterr().err.strip().splitlines()[-1]
    assert end.value.code == 1 and error.startswith(f"error: {NOT_A_SUM}")
    assert not list(tmp_path.rglob("metrics.jsonl"))


def fit(config: transformers.PretrainedConfig, model_class: type, model_name: str = "path") -> None:
    """Call `fit_config` without a sequence length to check."""
    args = argparse.Namespace(model_name=model_name, export_only=False)
    fit_config(args, model_class, config)


def test_length_is_limited_by_positions_if_the_config_has_some():
    for config in (transformers.XLNetConfig(), transformers.T5Config()):  # -1, and none
        check_length("--block-size", 64, config)
    with pytest.raises(ValueError, match="--block-size 64 is above the model's 32 positions"):
        check_length("--block-size", 64, transformers.GPT2Config(n_positions=32))


def test_layerdrop_is_switched_off(device, capfd):
    config = transformers.M2M100Config(encoder_layers=1, decoder_layers=1, d_model=16)
    assert config.encoder_layerdrop == 0.05
    fit(config, transformers.M2M100ForConditionalGeneration)
    assert config.encoder_layerdrop == config.decoder_layerdrop == 0
    lines = capfd.readouterr().out.splitlines()
    expected = "encoder_layerdrop is set to 0 (the model has 0.05)"
    assert len(lines) == 2 and lines[0].startswith(expected)
    config = transformers.RwkvConfig(num_hidden_layers=1, hidden_size=16)
    fit(config, transformers.RwkvForCausalLM)
    assert config.rescale_every == 0 and "rescale_every is set to 0" in capfd.readouterr().out
    fit(transformers.BartConfig(), transformers.BartForConditionalGeneration)
    fit(transformers.LlamaConfig(), llama_fsdp.LossModel)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("name", ["Gemma2", "T5Gemma"])
def test_capped_attention_is_eager_in_versions_that_drop_the_cap_in_sdpa(name, monkeypatch):
    """Transformers 5.10 says that these models support sdpa; 5.23 does not."""
    config = getattr(transformers, f"{name}Config")()
    fit(config, nn.Module)
    assert config._attn_implementation == "eager"
    if name == "Gemma2":
        kind = transformers.Gemma2ForCausalLM
        monkeypatch.setattr(kind, "_supports_sdpa", True)
        args = argparse.Namespace(prepare_only=False, max_seq_length=8192, precision="fp32")
        args.attention = "auto"
        assert set_attention(args, config, kind) == "eager"
        args.attention = "sdpa"
        with pytest.raises(ValueError, match="Pass eager"):
            set_attention(args, config, kind)


@pytest.mark.parametrize("name, padding", [("T5", 1), ("GPT2", None), ("Llama", None)])
@pytest.mark.parametrize("base", [384, -1])
def test_padding_token_without_a_row_is_replaced(name, padding, base, device):
    """T5 gets its EOS token. In the others an embedding would not train the token's row."""
    config = getattr(transformers, f"{name}Config")(vocab_size=384, pad_token_id=base)
    fit(config, nn.Module)
    assert config.pad_token_id == padding
    config.pad_token_id = 383
    fit(config, nn.Module)
    assert config.pad_token_id == 383


FIELDS = {  # the embedding has rows 0 to 383
    "gradient_checkpointing": True,
    "pad_token_id": 384,
    "torchscript": True,
    "use_cache": True,
}


def test_trains_with_fields_that_do_not_fit_and_keeps_them(t5_directory, tmp_path):
    """So do a config without `use_cache`, and beams of several lengths that end with padding."""
    for name, fields in {"plain": {}, "changed": FIELDS}.items():
        base = tmp_path / name
        shutil.copytree(t5_directory, base)
        for file in ("config.json", "generation_config.json"):
            config = json.loads((base / file).read_text())
            config.pop("use_cache", None)
            (base / file).write_text(json.dumps(config | fields))
        launch(0, "T5_training.py", "--model-name", base, "--dataset", "docstrings",
               "--num-train-samples", "16", "--num-val-samples", "8", "--max-steps", "2",
               "--log-every", "1", "--output-dir", base / "output")  # fmt: skip
        for file in ("config.json", "generation_config.json"):
            paths = base / file, base / "output/final" / file
            expected, final = (json.loads(path.read_text()) for path in paths)
            assert all(final.get(key) == expected.get(key) for key in FIELDS)
    plain, changed = (metrics(tmp_path / name / "output", "train") for name in ("plain", "changed"))
    assert [line["loss"] for line in plain] == [line["loss"] for line in changed]
    plain, changed = (metrics(tmp_path / name / "output", "done") for name in ("plain", "changed"))
    assert plain[0]["rougeL"] == changed[0]["rougeL"]
