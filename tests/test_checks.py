"""Edits that would train a model incorrectly are refused at startup, each with its own message."""

import argparse
import importlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from conftest import error_lines, launch, metrics
from copied import edited_script, llama_changes
from torch import nn

import llama_fsdp
from benchmarks.driven import parse_flags
from runtime.checks import FOR_TRAINING, fit_config

NOT_A_SUM = "summed_loss is not a sum over target tokens"
OTHER_LOGITS = "The logits behind the loss differ from the model's own by"
OTHER_INPUTS = "The decoder's logits differ by .* from those that the model computes from labels"
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
PLAIN_LOSS = {  # computes the loss from the model's own logits
    '    return model(**model_inputs(batch), targets=batch["labels"])\n': (
        "    logits = model(**model_inputs(batch), use_cache=False).logits\n"
        '    return token_loss(logits.flatten(0, 1).float(), batch["labels"].flatten())\n'
    )
}
TRAINED_PADDING = {"np.full(shape, -100)": "np.zeros(shape, dtype=np.int64)"}
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
    "T5: trained padding": Edit(T5, PADDING, data={"pad(targets, -100)": "pad(targets, 0)"}),
    "T5: another start": Edit(T5, OTHER_INPUTS, data={START: "torch.full_like(labels, 5)"}),
    "T5: inputs not shifted": Edit(T5, OTHER_INPUTS, data=NO_SHIFT),
    "T5: not causal": Edit(
        T5, NOT_CAUSAL, {"    policy = ": "    model.decoder.config.is_decoder = False\n    policy = "}
    ),
    "T5: missing block": Edit(T5, "it lacks T5Block", {"= (T5Block,)": "= (torch.nn.Embedding,)"}),
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
        GPT2, NOT_CAUSAL, {"    policy = ": "    model.config.is_causal = False\n    policy = "}
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


@pytest.fixture(scope="module")
def device() -> Iterator[torch.device]:
    """Yield the device of a process group of one."""
    yield llama_fsdp.setup(parse_flags(llama_fsdp, ["--model-name", "tiny"]))
    llama_fsdp.cleanup()


def apply(edit: Edit) -> ModuleType:
    """Return the edited script with its edited data module."""
    script = edited_script(edit.script, edit.changes)
    script.data = edited_script(script.data.__name__, edit.data)
    return script


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", EDITS)
def test_edit_is_refused_with_its_message(name, precision, device):
    edit = EDITS[name]
    script = apply(edit)
    lengths = ("--max-seq-length", "64") if edit.script == LLAMA else ()
    attention = ("--attention", "eager") if edit.script == LLAMA else ()
    flags = ["--model-name", "tiny", "--precision", precision, *lengths, *attention, *edit.flags]
    args = parse_flags(script, flags)
    model, _, init = script.load_model(args, device)

    def check() -> None:
        script.check_loss(args, device, script.wrap_model(args, device, model, init))

    if edit.message is None:
        check()
    else:
        with pytest.raises(ValueError, match=edit.message):
            check()
