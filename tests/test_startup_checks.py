"""Edits that would train a model incorrectly are refused at startup, each with its own message."""

import contextlib
import copy
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from conftest import launch
from copied import edited_script, llama_as, llama_changes
from in_process import start
from torch import nn
from torch._dynamo.testing import CompileCounter

from core import ranks
from core.ranks import Problem
from optional import startup_checks

NOT_A_SUM = "summed_loss is not a sum over target tokens"
OTHER_LOGITS = "The logits behind the loss differ by .* from the model's own"
NOT_CAUSAL = "The model is not causal: its logits change by"
LEAK = "Documents in a sequence attend to each other.*Pass --no-packing"
PADDING = "Padding changes the model's logits by"
SUM = ', reduction="sum"'
Z_LOSS = " + 1e-4 * (logits.logsumexp(-1) ** 2)"
NO_MASK = {'("labels", "targets"': '("attention_mask", "labels", "targets"'}
NO_SHIFT = {".roll(1, dims=1)": ""}
START = "decoder_input_ids[:, 0] = "
WRAP = "    init = weights.Loader("  # in wrap_model
NOT_CAUSAL_T5 = "    model.decoder.is_decoder = model.decoder.config.is_decoder = False\n"
ABSOLUTE_POSITIONS = (
    "    shift = lambda _, ids, x: x + torch.linspace(0, 1, x.size(1)).to(x)[:, None]\n"
    "    model.get_input_embeddings().register_forward_hook(shift)\n"
)
NOT_CAUSAL_GPT2 = "    for x in model.transformer.h:\n        x.attn.is_causal = False\n"
PLAIN_LOSS = {  # computes the loss from the model's own logits
    '    return model(**inputs, targets=batch["labels"])\n': (
        "    logits = model(**inputs, use_cache=False).logits\n"
        '    return token_loss(logits.flatten(0, 1).float(), batch["labels"].flatten())\n'
    )
}
CONV = ["conv", "conv", "full_attention", "conv"]
LEAKS = {  # folder in Transformers, additions to TINY_CONFIG
    "GptOss": ("gpt_oss", {"num_local_experts": 4, "head_dim": 32}),
    "Lfm2": ("lfm2", {"layer_types": CONV}),
    "Qwen3_5": ("qwen3_5", {
        "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    }),
}  # fmt: skip


@dataclass
class Edit:
    """Changes to a script's text and to its data module's, and the message that refuses them."""

    script: str
    message: str | None = None  # None: the script is accepted
    changes: dict[str, str] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    packing: bool = True


def llama(
    message: str | None, packing: bool = True, name: str = "Llama", folder: str = "", **config: Any
) -> Edit:
    """Return an `Edit` that turns llama_fsdp.py into another model, or adds to its config."""
    return Edit("llama_fsdp", message, llama_changes(name, folder, **config), {}, packing)


T5, GPT2, LLAMA = "T5_training", "gpt2_fsdp", "llama_fsdp"
EDITS = {
    "T5": Edit(T5),
    "T5: mean": Edit(T5, NOT_A_SUM, {SUM: ""}),
    "T5: mean of a second term": Edit(T5, NOT_A_SUM, {
        "return token_loss(logits": "return logits.pow(2).mean() + token_loss(logits"}),
    "T5: source without a mask": Edit(T5, PADDING, NO_MASK),
    "T5: trained padding": Edit(T5, PADDING, data={"examples], -100": "examples], 0"}),
    "T5: another start": Edit(T5, OTHER_LOGITS, data={START: f"{START}5 + "}),
    "T5: inputs not shifted": Edit(T5, OTHER_LOGITS, data=NO_SHIFT),
    "T5: not causal": Edit(T5, NOT_CAUSAL, {WRAP: NOT_CAUSAL_T5 + WRAP}),
    "GPT-2": Edit(GPT2),
    "GPT-2: mean": Edit(GPT2, NOT_A_SUM, {SUM: ""}),
    "GPT-2: mean of a second term": Edit(GPT2, NOT_A_SUM, {f"{SUM})": f"{SUM}){Z_LOSS}.mean()"}),
    "GPT-2: second term of padding": Edit(GPT2, NOT_A_SUM, {f"{SUM})": f"{SUM}){Z_LOSS}.sum()"}),
    "GPT-2: second term": Edit(GPT2, None, {f"{SUM})": f"{SUM}){Z_LOSS}[targets != -100].sum()"}),
    "GPT-2: mean over rows": Edit(
        GPT2, NOT_A_SUM, {"targets=batch[": 'targets=batch["labels"]) / len(batch['}),
    "GPT-2: loss that depends on the number of rows": Edit(
        GPT2, NOT_A_SUM, {"targets=batch[": 'targets=batch["labels"]) * 0.93 ** len(batch['}),
    "GPT-2: trained padding": Edit(GPT2, NOT_A_SUM, data={"width + 1), -100": "width + 1), 0"}),
    "GPT-2: scaled hidden states": Edit(
        GPT2, OTHER_LOGITS, {"(hidden.flatten(0, 1)": "(1.1 * hidden.flatten(0, 1)"}),
    "GPT-2: not causal": Edit(GPT2, NOT_CAUSAL, {WRAP: NOT_CAUSAL_GPT2 + WRAP}),
    "Llama": Edit(LLAMA),
    "Llama: unpacked": Edit(LLAMA, packing=False),
    "Llama: own logits": Edit(LLAMA, None, PLAIN_LOSS),
    "Llama: mean": Edit(LLAMA, NOT_A_SUM, {SUM: ""}),
    "Llama: mean of own logits": Edit(LLAMA, NOT_A_SUM, PLAIN_LOSS | {SUM: ""}),
    "Llama: trained padding": Edit(LLAMA, NOT_A_SUM, data={"zeros - 100": "zeros"}, packing=False),
    "Llama: another position's logits": Edit(
        LLAMA, OTHER_LOGITS, {"hidden[target_positions]": "hidden[target_positions - 1]"}),
    "Llama: scaled hidden states": Edit(
        LLAMA, OTHER_LOGITS, {"()(hidden, targets)": "()(1.1 * hidden, targets)"}),
    "Llama: loss without positions": Edit(
        LLAMA, OTHER_LOGITS, {"(input_ids, use_cache=False, **options)": "(input_ids)"}),
    "Llama: no positions": Edit(
        LLAMA, LEAK, {"  if targets is None:": "  options = {}\n        if targets is None:"}),
    "Llama: absolute positions": Edit(LLAMA, LEAK, {WRAP: ABSOLUTE_POSITIONS + WRAP}),
    "Llama: scaled logits": llama(OTHER_LOGITS, logit_scale=0.5),  # Llama ignores both
    "Llama: capped logits": llama(OTHER_LOGITS, final_logit_softcapping=0.1),
    "Llama: not causal": llama(NOT_CAUSAL, False, is_causal=False),
    "Granite": llama(None, name="Granite", logits_scaling=8.0),
    "Gemma2": llama(None, name="Gemma2", initializer_range=1.0),  # caps logits of 50 at 30
    "Mistral": llama(None, name="Mistral", sliding_window=8),  # shorter than the documents
}  # fmt: skip
for name, (folder, config) in LEAKS.items():
    EDITS[f"{name}: packed"] = llama(LEAK, name=name, folder=folder, **config)
    EDITS[f"{name}: unpacked"] = llama(None, False, name=name, folder=folder, **config)


@pytest.fixture
def device() -> Iterator[torch.device]:
    """Yield the device of a process group of one."""
    yield ranks.setup(1.0)
    torch.distributed.destroy_process_group()


def arguments(script: ModuleType, **values: object) -> Any:
    """Return the arguments of a tiny model, in fp32, with `values` in whatever section has them."""
    args = copy.deepcopy(script.TINY)
    values = {"model_name": "tiny", "precision": "fp32"} | values
    for section in vars(args).values():
        for name in vars(section).keys() & values.keys():
            setattr(section, name, values[name])
    return args


def check(script: ModuleType, args: Any, device: torch.device) -> nn.Module:
    """Build a script's model, check it as the script does, and return it."""
    model, blocks, _, source = script.load_model(args, True)
    model = script.wrap_model(args, device, model, blocks, source)
    if "T5" in script.__name__:
        probe = startup_checks.pairs(), script.summarization_dataset.collator(model)
    elif "gpt2" in script.__name__:
        probe = startup_checks.blocks(), script.block_dataset.collate
    else:
        probe = startup_checks.chats(args.data), script.chat_dataset.collate
    startup_checks.check_model(args, device, model, script.summed_loss, *probe)
    return model


def check_edit(edit: Edit, device: torch.device, **values: object) -> None:
    """Check the model of an edited script; `values` are arguments."""
    script = edited_script(edit.script, edit.changes, edit.data)
    args = arguments(script, packing=edit.packing, max_seq_length=64, **values)
    if edit.script == LLAMA:
        args.kernel.attention = "eager"
    check(script, args, device)


def problem(message: str | None) -> contextlib.AbstractContextManager:
    """Return a context that expects a Problem with this message, or none."""
    return pytest.raises(Problem, match=message) if message else contextlib.nullcontext()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", EDITS)
def test_edit_is_refused_with_its_message(name, precision, device):
    with problem(EDITS[name].message):
        check_edit(EDITS[name], device, precision=precision)


VARIANTS = {
    "full_shard": {},
    "fsdp2 bf16": {"fsdp": 2, "precision": "bf16"},
    "ddp bf16": {"strategy": "ddp", "precision": "bf16"},
}
ON_TWO_RANKS = ["T5", "T5: source without a mask", "T5: another start", "GPT-2", "GPT-2: mean",
                "Llama", "Llama: scaled logits", "Mistral", "Granite", "Gemma2", "GptOss: packed",
                ]  # fmt: skip


def test_edits_are_refused_on_all_ranks(tmp_path):
    launch(2, "tests/workers/model_checks_worker.py", tmp_path / "messages.json")
    messages = json.loads((tmp_path / "messages.json").read_text())
    assert len(messages) == len(VARIANTS) * len(ON_TWO_RANKS)
    for case, errors in messages.items():
        name = next(name for name in reversed(EDITS) if case.startswith(f"{name} "))
        for error in errors:
            assert re.match(EDITS[name].message or "$", error), case


def test_refused_run_exits_with_one_message(texts, tmp_path, monkeypatch, capfd):
    script = edited_script(GPT2, {SUM: ""})
    monkeypatch.setitem(sys.modules, GPT2, script)  # where tyro looks for the help
    files = ["--dataset", texts[0], "--val-dataset", texts[1], "--block-size", "32"]
    assert start(script, "--model-name", "tiny", *files, "--output-dir", tmp_path) == 1
    error = capfd.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"error: {NOT_A_SUM}")
    assert not list(tmp_path.rglob("metrics.jsonl"))


@pytest.mark.skipif(not hasattr(transformers, "MiniMaxM3VLForCausalLM"), reason="old Transformers")
def test_sparse_attention_is_refused(device):
    """It selects keys by their position in the pack, but only among blocks of 128 keys."""
    config = {
        "dense_intermediate_size": 96, "shared_intermediate_size": 32, "head_dim": 16,
        "rotary_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "index_n_heads": 2,
        "index_head_dim": 16, "mlp_layer_types": ["dense", *["sparse"] * 3],
        "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
    }  # fmt: skip
    script = llama_as("MiniMaxM3VL", "minimax_m3_vl", **config)
    args = arguments(script, max_seq_length=512)
    has_sdpa = transformers.MiniMaxM3VLForCausalLM._supports_sdpa
    args.kernel.attention = "sdpa" if has_sdpa else "eager"
    with pytest.raises(Problem, match=LEAK):
        check(script, args, device)
    args.data.packing = False
    check(script, args, device)


def test_checks_run_in_evaluation_mode_and_restore_mode_and_methods(device):
    """They compile nothing."""
    script = edited_script(LLAMA, {})
    args = arguments(script, max_seq_length=64)
    args.kernel.attention = "sdpa"
    model = check(script, args, device)
    counter, modes = CompileCounter(), []

    def record_mode(module: nn.Module, *_: object) -> None:
        modes.append(module.training)

    model.module.model.embed_tokens.register_forward_hook(record_mode)
    for module in model.modules():
        if isinstance(module, script.BLOCKS):
            module.compile(backend=counter)
    samples = startup_checks.chats(args.data), script.chat_dataset.collate
    for mode in (True, False):
        model.train(mode)
        startup_checks.check_model(args, device, model, script.summed_loss, *samples)
        assert all(module.training is mode for module in model.modules())
    assert set(modes) == {False} and counter.frame_count == 0
    assert model.module.lm_head.token_loss is script.token_loss
    model(input_ids=torch.arange(32).repeat(2, 1))
    assert counter.frame_count
