"""What a copy of a script for another architecture could train incorrectly is refused."""

import argparse
import importlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import launch
from copied import copied, llama_as, llama_changes
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bart.modeling_bart import BartDecoderLayer, BartEncoderLayer

import gpt2_fsdp
import llama_fsdp
import policies
import T5_training
from runtime import chunked_loss
from runtime.attention import per_document, register, set_attention
from runtime.metrics import flops_per_token, product_weights
from runtime.model_checks import fit_config
from runtime.optimization import parameter_groups
from tools import memory_estimator

FEW = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
CONV = ["conv", "conv", "full_attention", "conv"]
LLAMAS = {  # the architecture, its folder in Transformers, and what TINY has besides
    "Llama": ("Llama", "", {}),
    "Mistral": ("Mistral", "", {"sliding_window": 8}),  # shorter than the documents
    "Granite": ("Granite", "", {"logits_scaling": 8.0}),
    "Gemma2": ("Gemma2", "", {"initializer_range": 1.0}),  # logits of 50, which it caps at 30
    "GptOss": ("GptOss", "gpt_oss", {"num_local_experts": 4, "head_dim": 32}),
    "scaled": ("Llama", "", {"logit_scale": 0.5}),  # to which Llama pays no heed
}
DIFFER = "The logits behind the loss differ from the model's own by"
SEEN = "Documents in a sequence see each other"
REFUSED = {"GptOss": SEEN, "scaled": DIFFER}
ATTENTIONS = {  # on one rank
    "sdpa": ["--strategy", "ddp"],
    "eager": ["--precision", "bf16"],
    "varlen": ["--precision", "bf16", "--strategy", "ddp"],  # with a kernel that runs on a CPU
}
TWO_RANKS = {
    "full_shard": ["--attention", "eager"],
    "fsdp2 bf16": ["--attention", "eager", "--fsdp", "2", "--precision", "bf16"],
    "ddp bf16": ["--attention", "eager", "--strategy", "ddp", "--precision", "bf16"],
}
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
LEFT_OUT = '("labels", "targets", "tokens"'
NO_MASK = {LEFT_OUT: LEFT_OUT + ', "decoder_attention_mask"'}
PADDING_FIRST = {
    "        check_decoder(": "        for one in (batch, alone[2]):\n"
    "            one['decoder_input_ids'][:, 0] = 0\n"
    "        check_decoder("
}
SEQ2SEQ = {  # what T5_training.py is changed by, and how it is refused
    "T5": ({}, ""),
    "T5 without the source's mask": (
        {LEFT_OUT: LEFT_OUT + ', "attention_mask"'},
        "Padding changes the model's logits by",
    ),
    "T5Gemma": (T5GEMMA, ""),
    "T5Gemma that starts with padding": (T5GEMMA | PADDING_FIRST, "The decoder's logits differ"),
    "T5Gemma without a mask, too": (  # by version
        T5GEMMA | PADDING_FIRST | NO_MASK,
        "The model is not causal|The decoder's logits differ",
    ),
}
FLAGS = ["--model-name", "tiny", "--max-seq-length", "64"]
LLAMA_DATA = ["--max-seq-length", "64", "--dataset"]


@pytest.fixture
def device() -> Iterator[torch.device]:
    """Yield the device of a process group of one."""
    yield llama_fsdp.setup(llama_fsdp.parse_args(["--model-name", "tiny"]))
    llama_fsdp.cleanup()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, chats: Path, pairs: Path) -> dict:
    """Return the messages of two ranks, by model and variant."""
    folder = tmp_path_factory.mktemp("results")
    cases = {}
    for variant, flags in TWO_RANKS.items():
        for name, (architecture, place, config) in LLAMAS.items():
            changes = llama_changes(architecture, place, **config)
            cases[f"{name} {variant}"] = ["llama_fsdp", changes, [*LLAMA_DATA, str(chats), *flags]]
        for name, (changes, _) in SEQ2SEQ.items():
            flags = [flag for flag in flags if flag not in ("--attention", "eager")]
            cases[f"{name} {variant}"] = ["T5_training", changes, ["--dataset", str(pairs), *flags]]
    (folder / "cases.json").write_text(json.dumps(cases))
    launch(2, "tests/workers/model_checks_worker.py", folder / "cases.json", folder / "said.json")
    return json.loads((folder / "said.json").read_text())


def wrapped(script: ModuleType, args: argparse.Namespace, device: torch.device) -> nn.Module:
    """Return the script's model, as it trains."""
    model, _, init = script.load_model(args, device)
    return script.wrap_model(args, device, model, init)


def check(script: ModuleType, chats: Path, device: torch.device, *flags: str) -> nn.Module:
    """Return the tiny model, its loss checked as at a run's start, without its data."""
    args = script.parse_args([*FLAGS, "--dataset", str(chats), *flags])
    model = wrapped(script, args, device)
    script.check_loss(args, device, model)
    return model


@pytest.mark.parametrize("variant", TWO_RANKS)
def test_different_loss_and_leaky_packing_are_refused_on_all_ranks(variant, two_ranks):
    for name in LLAMAS:
        for said in two_ranks[f"{name} {variant}"]:
            assert said.startswith(REFUSED[name]) if name in REFUSED else said == "", name


@pytest.mark.parametrize("variant", TWO_RANKS)
def test_different_decoder_inputs_are_refused_on_all_ranks(variant, two_ranks):
    for name, (_, expected) in SEQ2SEQ.items():
        for said in two_ranks[f"{name} {variant}"]:
            assert re.match(expected, said) and bool(said) == bool(expected), name


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", LLAMAS)
def test_checks_hold_for_each_attention(name, attention, chats, device):
    architecture, place, config = LLAMAS[name]
    script = llama_as(architecture, place, **config)
    flags = ["--attention", attention, *ATTENTIONS[attention]]
    expected = REFUSED.get(name)
    if attention == "varlen":
        lacks = {"Gemma2": "softcap", "GptOss": "s_aux", "Mistral": "sliding_window"}
        expected = f"do not support {lacks[name]}.*attention eager" if name in lacks else expected
    has_sdpa = getattr(transformers, f"{architecture}ForCausalLM")._supports_sdpa
    if attention == "sdpa" and not has_sdpa:
        expected = f"--attention sdpa: {architecture}ForCausalLM has none. Pass eager."
    if expected is None:
        check(script, chats, device, *flags)
        return
    with pytest.raises(ValueError, match=expected):
        check(script, chats, device, *flags)


PLAIN_LOSS = {  # a copy that takes the loss from the model's own logits
    '    return model(**model_inputs(batch), targets=batch["labels"])\n': (
        "    logits = model(**model_inputs(batch), use_cache=False).logits\n"
        '    return token_loss(logits.flatten(0, 1).float(), batch["labels"].flatten())\n'
    )
}


def test_loss_of_a_copy_without_loss_logits_is_not_checked(chats, device, capfd):
    """Causality, documents and the sum are still checked."""
    check(llama_fsdp, chats, device, "--attention", "sdpa")
    assert "not checked" not in capfd.readouterr().out
    check(copied("llama_fsdp", PLAIN_LOSS), chats, device, "--attention", "sdpa")
    assert capfd.readouterr().out.count("The loss is not checked against the model's own") == 1
    mean = copied("llama_fsdp", PLAIN_LOSS | {', reduction="sum"': ""})
    with pytest.raises(ValueError, match="summed_loss is not a sum over target tokens"):
        check(mean, chats, device, "--attention", "sdpa")


RIGHT = {  # the folder, and what TINY has besides; test_architectures.py has all others
    "DeepseekV3": ("deepseek_v3", {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 64, "q_lora_rank": 64, "kv_lora_rank": 32,
        "first_k_dense_replace": 1, "num_key_value_heads": 4,
    }),
    "Gemma3": ("gemma3", {"head_dim": 32, "sliding_window": 8}),
    "Qwen3Moe": ("qwen3_moe", FEW | {"head_dim": 32}),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_correct_models_pass(name, chats, device):
    folder, config = RIGHT[name]
    script = llama_as(name, folder, **config)
    for flags in (
        [],
        ["--attention", "eager", "--precision", "bf16"],
        ["--attention", "sdpa", "--precision", "bf16", "--no-packing"],
        ["--no-packing", "--fsdp", "2"],
        ["--max-seq-length", "90"],
        ["--max-seq-length", "47", "--attention", "eager"],
    ):
        check(script, chats, device, *flags)


LEAKS = {  # the folder, and what TINY has besides
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


@pytest.mark.parametrize("name", LEAKS)
def test_leaks_between_documents_are_refused(name, chats, device):
    """In bf16 LFM2's leak is smaller than a rounding error."""
    folder, config = LEAKS[name]
    script = llama_as(name, folder, **config)
    for precision in "fp32", "bf16":
        flags = ["--precision", precision]
        with pytest.raises(ValueError, match=f"{SEEN}.*Pass --no-packing"):
            check(script, chats, device, *flags)
        check(script, chats, device, *flags, "--no-packing")


SPARSE = {  # the folder, and what TINY has besides
    "DeepseekV4": ("deepseek_v4", {
        "moe_intermediate_size": 32, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 32,
        "num_experts_per_tok": 2, "n_routed_experts": 4, "partial_rotary_factor": 0.5,
        "o_groups": 2, "o_lora_rank": 16, "index_n_heads": 2, "index_head_dim": 16, "hc_mult": 2,
    }),
    "MiniMaxM3VL": ("minimax_m3_vl", {
        "dense_intermediate_size": 96, "shared_intermediate_size": 32, "head_dim": 16,
        "rotary_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "index_n_heads": 2,
        "index_head_dim": 16, "mlp_layer_types": ["dense", *["sparse"] * 3],
        "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_attention_is_refused(name, chats, device):
    """It selects keys by their position in the pack, which only shows beyond a block of 128
    keys."""
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip(f"this Transformers has no {name}")
    folder, config = SPARSE[name]
    script = llama_as(name, folder, **config)
    attention = "sdpa" if getattr(transformers, f"{name}ForCausalLM")._supports_sdpa else "eager"
    flags = ["--attention", attention, "--max-seq-length", "512"]
    with pytest.raises(ValueError, match=f"{SEEN}.*Pass --no-packing"):
        check(script, chats, device, *flags)
    check(script, chats, device, *flags, "--no-packing")


def test_changed_hidden_states_are_refused(chats, device):
    for old, new in (
        ("self.get_output_embeddings()(hidden", "self.get_output_embeddings()(1.01 * hidden"),
        ("self.model(input_ids, use_cache=False, **options)", "self.model(input_ids)"),
    ):
        with pytest.raises(ValueError, match=DIFFER):
            check(copied("llama_fsdp", {old: new}), chats, device, "--attention", "sdpa")


def test_checks_leave_no_trace(chats, device):
    """They run in evaluation mode without compiling, and restore mode, method and random states."""
    model = check(llama_fsdp, chats, device, "--attention", "sdpa")
    compiled, modes = [], []

    def compile_nothing(graph: torch.fx.GraphModule, _: list) -> Callable:
        compiled.append(graph)
        return graph.forward

    def draw(module: nn.Module, *_: object) -> None:
        modes.append(module.training)
        torch.rand(1)

    model.module.model.embed_tokens.register_forward_hook(draw)
    for module in model.modules():
        if isinstance(module, llama_fsdp.BLOCKS):
            module.compile(backend=compile_nothing)
    args = llama_fsdp.parse_args([*FLAGS, "--dataset", str(chats)])
    ids = torch.arange(32).repeat(2, 1)
    for mode in (True, False):
        model.train(mode)
        before = torch.get_rng_state()
        with policies.evaluation(model):
            llama_fsdp.check_loss(args, device, model)
        assert torch.equal(torch.get_rng_state(), before)
        assert all(module.training is mode for module in model.modules())
    assert set(modes) == {False} and not compiled
    assert "loss_logits" not in vars(model.module.lm_head)
    model(input_ids=ids)
    assert compiled


def command(texts: tuple, output: Path, steps: int) -> list[str]:
    """Return flags for a short run of GPT-2."""
    files = ["--dataset", str(texts[0]), "--val-dataset", str(texts[1])]
    length = ["--block-size", "32", "--max-steps", str(steps)]
    return ["--model-name", "tiny", *files, *length, "--output-dir", str(output)]


def test_mean_in_place_of_summed_loss_is_refused(texts, pairs, tmp_path, capfd):
    columns = ["--source-column", "text", "--target-column", "headline"]
    summaries = ["--dataset", str(pairs), *columns, "--output-dir", str(tmp_path / "t5")]
    blocks = command(texts, tmp_path / "gpt2", 1)
    for script, change, flags in (
        ("T5_training", {', reduction="sum"': ""}, ["--model-name", "tiny", *summaries]),
        ("gpt2_fsdp", {"targets=batch[": 'targets=batch["labels"]) / len(batch['}, blocks),
    ):
        changed = copied(script, change)
        with pytest.raises(SystemExit) as end:
            changed.fsdp_main(changed.parse_args(flags))
        error = capfd.readouterr().err.strip().splitlines()[-1]
        assert end.value.code == 1 and error.startswith("error: summed_loss is not a sum over")
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_blocks_that_miss_a_layer_are_refused():
    with torch.device("meta"):
        mistral = transformers.MistralForCausalLM(transformers.MistralConfig(num_hidden_layers=2))
        bart = transformers.BartForConditionalGeneration(transformers.BartConfig())
        llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=2))
    with pytest.raises(ValueError, match="it lacks MistralDecoderLayer"):
        policies.check_blocks(mistral, llama_fsdp.BLOCKS)
    with pytest.raises(ValueError, match="it lacks BartEncoderLayer"):
        policies.check_blocks(bart, (BartDecoderLayer,))
    policies.check_blocks(bart, (BartDecoderLayer, BartEncoderLayer))
    policies.check_blocks(llama, llama_fsdp.BLOCKS)


def attend(**options: object) -> torch.Tensor:
    """Call packed attention for two documents of 8 tokens in a row, with further `options`."""
    query = torch.randn(1, 2, 16, 8)
    ends = torch.tensor([0, 8, 16], dtype=torch.int32)
    module = SimpleNamespace()
    inputs = {
        "attention_mask": None,
        "scaling": 1.0,
        "cu_seq_lens": ends,
        "longest_document": 8,
    } | options
    module.is_causal = inputs.pop("module_is_causal", True)
    return ALL_ATTENTION_FUNCTIONS["packed"](module, query, query, query, **inputs)[0]


@pytest.mark.parametrize("name, value", [
    ("sliding_window", 15),
    ("softcap", 50.0),
    ("s_aux", torch.zeros(2)),
    ("position_bias", torch.zeros(1, 2, 16, 16)),
    ("dropout", 0.1),
    ("attention_mask", torch.zeros(1, 1, 16, 16)),
    ("is_causal", False),
    ("module_is_causal", False),
    ("block_indices", torch.zeros(1)),
])  # fmt: skip
def test_packed_attention_refuses_features_that_it_lacks(name, value):
    register(per_document)
    said = {"module_is_causal": "is_causal"}.get(name, name)
    with pytest.raises(ValueError, match=f"do not support {said}.*needs. Pass --attention eager"):
        attend(**{name: value})


def test_packed_attention_accepts_features_that_are_off():
    register(per_document)
    off = {"dropout": 0.0, "softcap": None, "s_aux": None, "use_cache": False, "is_causal": None}
    assert attend(**off, sliding_window=16, position_ids=torch.arange(16)).shape == (1, 16, 2, 8)
    register(per_document, longest=32)
    attend(sliding_window=32)
    with pytest.raises(ValueError, match="do not support sliding_window"):
        attend(sliding_window=16)


def formula(config: transformers.PretrainedConfig, length: float) -> float:
    """Return the FLOP of a token, from the fields of a GPT-2's or a Llama's config."""
    if config.model_type == "gpt2":
        width, layers, heads = config.n_embd, config.n_layer, config.n_embd
        weights = 12 * layers * width**2
    else:
        width, layers = config.hidden_size, config.num_hidden_layers
        heads = config.head_dim * config.num_attention_heads
        attention = 2 * width * (heads + config.head_dim * config.num_key_value_heads)
        weights = layers * (attention + 3 * width * config.intermediate_size)
    return 6 * (weights + config.vocab_size * width) + 12 * layers * heads * length


@pytest.mark.parametrize("name", ["tiny", "llama-2-7b", "llama-2-70b", "tiny-gpt2", "gpt2"])
def test_flops_equal_the_formula(name):
    """6 N + 12 L d T, with the tied head of GPT-2 and the grouped queries of 70B."""
    config = memory_estimator.load_config(name)
    scripts = {"gpt2": gpt2_fsdp.LossModel, "llama": llama_fsdp.LossModel}
    with torch.device("meta"):
        model = scripts[config.model_type](config)
    model.product_weights = product_weights(model)
    assert flops_per_token(model, 377.3) == pytest.approx(formula(config, 377.3), rel=1e-9)


def test_model_that_sees_later_tokens_is_refused(chats, texts, device, monkeypatch):
    for script, flags in (
        (llama_fsdp, [*FLAGS, "--dataset", str(chats), "--attention", "sdpa", "--no-packing"]),
        (gpt2_fsdp, command(texts, Path("unused"), 1)),
    ):
        args = script.parse_args(flags)
        model = wrapped(script, args, device)
        script.check_loss(args, device, model)
        for module in model.modules():
            if hasattr(module, "is_causal"):
                module.is_causal = False
        for kind in ("llama", "gpt2"):
            module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
            monkeypatch.setattr(module, "create_causal_mask", lambda **_: None)
        with pytest.raises(ValueError, match="The model is not causal: its logits change by"):
            script.check_loss(args, device, model)


def test_decoder_that_sees_later_tokens_is_refused(pairs, device):
    args = T5_training.parse_args(["--model-name", "tiny", "--dataset", str(pairs)])
    model = wrapped(T5_training, args, device)
    T5_training.check_loss(args, device, model)
    model.module.decoder.is_decoder = model.module.decoder.config.is_decoder = False
    with pytest.raises(ValueError, match="The model is not causal"):
        T5_training.check_loss(args, device, model)


def test_decoder_needs_a_start_token(t5_directory, pairs, tmp_path, alone):
    """T5Gemma's BOS is in the decoder's config."""
    shutil.copytree(t5_directory, tmp_path / "t5")
    config = json.loads((t5_directory / "config.json").read_text())
    del config["decoder_start_token_id"]
    (tmp_path / "t5/config.json").write_text(json.dumps(config))
    flags = ["--model-name", str(tmp_path / "t5"), "--dataset", str(pairs)]
    args = T5_training.parse_args(flags)
    model, _, _ = T5_training.load_model(args, torch.device("cpu"))
    with pytest.raises(ValueError, match="Set decoder_start_token_id .* in its config.json"):
        T5_training.data.collator(model)
    script = copied("T5_training", T5GEMMA)
    args = script.parse_args(["--model-name", "tiny", "--dataset", str(pairs)])
    model, tokenizer, _ = script.load_model(args, torch.device("cpu"))
    train_set, _ = script.load_data(args, tokenizer)
    assert model.config.decoder.bos_token_id == 2 != model.config.pad_token_id
    batch = script.data.collator(model)([train_set[i] for i in range(4)])
    assert set(batch["decoder_input_ids"][:, 0].tolist()) == {2}
    is_target = batch["labels"] != -100
    assert torch.equal(batch["decoder_attention_mask"] == 1, is_target)


def fit(config: transformers.PretrainedConfig, model_class: type, model_name: str = "path") -> None:
    """Call `fit_config` without a length to check."""
    args = argparse.Namespace(model_name=model_name)
    fit_config(args, model_class, config)


def test_layerdrop_is_switched_off(alone, capfd):
    config = transformers.M2M100Config(encoder_layers=1, decoder_layers=1, d_model=16)
    assert config.encoder_layerdrop == 0.05
    fit(config, transformers.M2M100ForConditionalGeneration)
    assert config.encoder_layerdrop == config.decoder_layerdrop == 0
    said = capfd.readouterr().out.splitlines()
    expected = "encoder_layerdrop is set to 0 (the model has 0.05)"
    assert len(said) == 2 and said[0].startswith(expected)
    config = transformers.RwkvConfig(num_hidden_layers=1, hidden_size=16)
    fit(config, transformers.RwkvForCausalLM)
    assert config.rescale_every == 0 and "rescale_every is set to 0" in capfd.readouterr().out
    fit(transformers.BartConfig(), transformers.BartForConditionalGeneration)
    fit(transformers.LlamaConfig(), llama_fsdp.LossModel)
    assert capfd.readouterr().out == ""


HEADED = {  # the script, the model, and its shape
    "GPT-J": ("gpt2_fsdp", "GPTJ", {"n_embd": 32, "n_layer": 1, "n_head": 2, "rotary_dim": 8}),
    "Phi": ("llama_fsdp", "Phi", {}),
    "Granite": ("llama_fsdp", "Granite", {"logits_scaling": 3.0}),
    "Cohere": ("llama_fsdp", "Cohere", {"logit_scale": 0.3}),
    "Gemma 2": ("llama_fsdp", "Gemma2", {"head_dim": 16, "final_logit_softcapping": 2.0}),
    "Llama 4": ("llama_fsdp", "Llama4", {
        "intermediate_size_mlp": 32, "num_local_experts": 2, "head_dim": 16,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADED)
def test_chunked_loss_equals_plain_loss(name, monkeypatch):
    """With a scale, cap or bias of the head."""
    script, architecture, config = HEADED[name]
    own_model = {"gpt2_fsdp": "GPT2LMHeadModel", "llama_fsdp": "LlamaForCausalLM"}[script]
    script = copied(
        script, {f"transformers.{own_model}": f"transformers.{architecture}ForCausalLM"}
    )
    monkeypatch.setattr(chunked_loss, "CHUNK", 5)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    if name == "GPT-J":
        shape = {}
    torch.manual_seed(0)
    options = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
    model = script.LossModel(script.MODEL.config_class(**shape, **options, **config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    ids = torch.randint(2, 64, (2, 16))
    targets = torch.randint(2, 64, (2, 16)).masked_fill(torch.rand(2, 16) < 0.3, -100)
    own = F.cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten(), reduction="sum")
    expected = torch.autograd.grad(own, list(model.parameters()), allow_unused=True)
    loss = model(ids, targets=targets)
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    torch.testing.assert_close(loss, own, rtol=1e-6, atol=0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert type(model).__name__ == f"{architecture}ForCausalLM"
    if name in ("GPT-J", "Phi"):
        (bias,) = (p for n, p in model.named_parameters() if n == "lm_head.bias")
        assert torch.autograd.grad(model(ids, targets=targets), bias)[0].norm() > 0.1


def attention_said(name: str, attention: str, *flags: str, **config: object) -> str:
    """Return what `set_attention` refuses a model of Transformers with, or which one it sets."""
    args = llama_fsdp.parse_args([*FLAGS, "--attention", attention, *flags])
    model_class = getattr(transformers, f"{name}ForCausalLM")
    try:
        kernel = set_attention(args, model_class.config_class(**config), model_class)
    except ValueError as error:
        return str(error)
    return kernel.partition(" (")[0]


def test_attention_that_a_model_lacks_is_refused():
    assert attention_said("GptOss", "auto") == attention_said("GptOss", "eager") == "eager"
    assert attention_said("GptOss", "sdpa").endswith("GptOssForCausalLM has none. Pass eager.")
    for name, other in (("Falcon", "sdpa"), ("StableLm", "sdpa"), ("GPTJ", "eager")):
        assert attention_said(name, "auto") == other
        said = attention_said(name, "varlen", "--precision", "bf16")
        assert said.endswith(f"dropout or chunks. Pass --attention {other}.")
    assert attention_said("Lfm2", "auto") == "varlen"  # whose config has no attention_dropout


def test_chunked_attention_needs_a_mask():
    assert attention_said("Llama4", "auto", attention_chunk_size=64) == "varlen"
    assert attention_said("Llama4", "auto", attention_chunk_size=63) == "sdpa"
    said = attention_said("Llama4", "varlen", attention_chunk_size=63)
    assert said.endswith("dropout or chunks. Pass --attention sdpa.")


def test_layers_that_drop_cu_seq_lens_are_refused(chats, device):
    script = llama_as("Nemotron")
    with pytest.raises(ValueError, match="NemotronAttention does not pass on"):
        check(script, chats, device, "--attention", "varlen")
    check(script, chats, device, "--attention", "sdpa")


@pytest.mark.parametrize("name", ["T5_training", "gpt2_fsdp", "llama_fsdp"])
def test_weight_decay_excludes_biases_and_norms(name):
    script = importlib.import_module(name)
    config = script.MODEL.config_class(vocab_size=384, **script.TINY_TOKEN_IDS, **script.TINY)
    model = getattr(script, "LossModel", script.MODEL)(config)
    model.shapes = {name: p.shape for name, p in model.named_parameters()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, others = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0)
    for parameter in decayed["params"]:
        assert not re.search(r"(\.bias|norm\w*\.weight|ln_\w+\.weight)$", names[id(parameter)])
    for parameter in others["params"]:
        assert re.search(r"(\.bias|norm\w*\.weight|ln_\w+\.weight)$", names[id(parameter)])
    assert len(decayed["params"]) + len(others["params"]) == len(names)
    if name == "T5_training":
        bias = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        assert any(parameter is bias for parameter in decayed["params"])


def test_weight_decay_excludes_vectors_after_flattening(device):
    """FSDP1 flattens parameters, so their shapes are recorded before."""
    config = transformers.Qwen3NextConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        head_dim=16, num_key_value_heads=2, vocab_size=64,
        linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=16, linear_value_head_dim=16, num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=16, shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    model = transformers.Qwen3NextForCausalLM(config)
    model.rows = nn.ParameterDict({"gate_up_proj_bias": torch.zeros(4, 8)})  # as gpt-oss's experts
    shapes = {name: parameter.dim() for name, parameter in model.named_parameters()}
    model.shapes = {name: p.shape for name, p in model.named_parameters()}
    wrapped = FSDP(model, device_id=device, use_orig_params=True)
    names = {id(p): n.replace("_fsdp_wrapped_module.", "") for n, p in model.named_parameters()}
    for parameter in wrapped.parameters():
        parameter.data = parameter.data.flatten()  # as on several ranks
    decayed, others = ({names[id(p)] for p in g["params"]} for g in parameter_groups(wrapped, 0.1))
    assert decayed | others == shapes.keys() and not decayed & others
    assert "model.layers.0.linear_attn.A_log" in others
    assert "model.layers.0.linear_attn.dt_bias" in others
    assert "rows.gate_up_proj_bias" in others
    assert {name for name in others if shapes[name] > 1} == {"rows.gate_up_proj_bias"}
    assert "model.embed_tokens.weight" in decayed
