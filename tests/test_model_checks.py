"""Script copies that would train another architecture incorrectly are refused at startup."""

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
from copied import edited_script, llama_as, llama_changes
from test_checks import EDITS, LEAK, OTHER_LOGITS, PLAIN_LOSS, T5GEMMA
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import gpt2_fsdp
import llama_fsdp
import policies
import T5_training
from benchmarks.driven import parse_flags
from runtime import checks, chunked_loss
from runtime.attention import per_document, register, set_attention
from runtime.batches import parameter_groups
from runtime.metrics import flops_per_token
from runtime.state import Facts
from tools import memory_estimator

FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LLAMAS = {  # architecture, its folder in Transformers, additions to TINY
    "Llama": ("Llama", "", {}),
    "Mistral": ("Mistral", "", {"sliding_window": 8}),  # shorter than the documents
    "Granite": ("Granite", "", {"logits_scaling": 8.0}),
    "Gemma2": ("Gemma2", "", {"initializer_range": 1.0}),  # caps logits of 50 at 30
    "GptOss": ("GptOss", "gpt_oss", {"num_local_experts": 4, "head_dim": 32}),
    "scaled": ("Llama", "", {"logit_scale": 0.5}),  # Llama ignores it
}
ERRORS = {"GptOss": LEAK, "scaled": OTHER_LOGITS}
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
SEQ2SEQ = ["T5", "T5: source without a mask", "T5Gemma", "T5Gemma: starts with padding"]  # of EDITS
FLAGS = ["--model-name", "tiny", "--max-seq-length", "64"]
LLAMA_DATA = ["--max-seq-length", "64", "--dataset"]


@pytest.fixture
def device() -> Iterator[torch.device]:
    """Yield the device of a process group of one."""
    yield llama_fsdp.setup(parse_flags(llama_fsdp, ["--model-name", "tiny"]))
    llama_fsdp.cleanup()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, chats: Path, pairs: Path) -> dict:
    """Return the error of each of two ranks (empty if none) by model and variant."""
    directory = tmp_path_factory.mktemp("results")
    cases = {}
    for variant, flags in TWO_RANKS.items():
        for name, (architecture, folder, config) in LLAMAS.items():
            changes = llama_changes(architecture, folder, **config)
            cases[f"{name} {variant}"] = ["llama_fsdp", changes, [*LLAMA_DATA, str(chats), *flags]]
        for name in SEQ2SEQ:
            flags = [flag for flag in flags if flag not in ("--attention", "eager")]
            edit = [EDITS[name].changes, ["--dataset", str(pairs), *flags], EDITS[name].data]
            cases[f"{name} {variant}"] = ["T5_training", *edit]
    (directory / "cases.json").write_text(json.dumps(cases))
    output = directory / "messages.json"
    launch(2, "tests/workers/model_checks_worker.py", directory / "cases.json", output)
    return json.loads(output.read_text())


def training_model(script: ModuleType, args: argparse.Namespace, device: torch.device) -> nn.Module:
    """Return the script's model, wrapped as for training."""
    model, _, init = script.load_model(args, device)
    return script.wrap_model(args, device, model, init)


def check(script: ModuleType, chats: Path, device: torch.device, *flags: str) -> nn.Module:
    """Build the tiny model, run the startup check of its loss and return the model."""
    args = parse_flags(script, [*FLAGS, "--dataset", str(chats), *flags])
    model = training_model(script, args, device)
    script.check_loss(args, device, model)
    return model


@pytest.mark.parametrize("variant", TWO_RANKS)
def test_different_loss_and_leaky_packing_are_refused_on_all_ranks(variant, two_ranks):
    for name in LLAMAS:
        for error in two_ranks[f"{name} {variant}"]:
            assert re.match(ERRORS.get(name, "$"), error), name


@pytest.mark.parametrize("variant", TWO_RANKS)
def test_different_decoder_inputs_are_refused_on_all_ranks(variant, two_ranks):
    for name in SEQ2SEQ:
        for error in two_ranks[f"{name} {variant}"]:
            assert re.match(EDITS[name].message or "$", error), name


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", LLAMAS)
def test_checks_work_with_each_attention(name, attention, chats, device):
    architecture, folder, config = LLAMAS[name]
    script = llama_as(architecture, folder, **config)
    flags = ["--attention", attention, *ATTENTIONS[attention]]
    expected = ERRORS.get(name)
    if attention == "varlen":
        unsupported = {"Gemma2": "softcap", "GptOss": "s_aux"}
        if name in unsupported:
            expected = f"do not support {unsupported[name]}.*attention eager"
        if name == "Mistral":
            expected = "MistralForCausalLM needs a mask, .*attention sdpa"
    has_sdpa = getattr(transformers, f"{architecture}ForCausalLM")._supports_sdpa
    if attention == "sdpa" and (name == "Gemma2" or not has_sdpa):
        expected = f"--attention sdpa: {architecture}ForCausalLM lacks it. Pass eager."
    if expected is None:
        check(script, chats, device, *flags)
        return
    with pytest.raises(ValueError, match=expected):
        check(script, chats, device, *flags)


def test_loss_of_a_copy_without_loss_logits_is_not_checked(chats, device, capfd):
    """Causality, document boundaries and the sum are still checked."""
    check(llama_fsdp, chats, device, "--attention", "sdpa")
    assert "not checked" not in capfd.readouterr().out
    check(edited_script("llama_fsdp", PLAIN_LOSS), chats, device, "--attention", "sdpa")
    assert capfd.readouterr().out.count("The loss is not checked against the model's own") == 1


CORRECT = {  # folder, additions to TINY; test_architectures.py covers the others
    "DeepseekV3": ("deepseek_v3", {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 64, "q_lora_rank": 64, "kv_lora_rank": 32,
        "first_k_dense_replace": 1, "num_key_value_heads": 4,
    }),
    "Gemma3": ("gemma3", {"head_dim": 32, "sliding_window": 8}),
    "Qwen3Moe": ("qwen3_moe", FEW_EXPERTS | {"head_dim": 32}),
}  # fmt: skip


@pytest.mark.parametrize("name", CORRECT)
def test_correct_models_are_accepted(name, chats, device):
    folder, config = CORRECT[name]
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


SPARSE = {  # folder, additions to TINY
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
    """Sparse attention selects keys by their position in the pack. The effect appears only with
    more than one block of 128 keys."""
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip(f"this Transformers has no {name}")
    folder, config = SPARSE[name]
    script = llama_as(name, folder, **config)
    attention = "sdpa" if getattr(transformers, f"{name}ForCausalLM")._supports_sdpa else "eager"
    flags = ["--attention", attention, "--max-seq-length", "512"]
    with pytest.raises(ValueError, match=LEAK):
        check(script, chats, device, *flags)
    check(script, chats, device, *flags, "--no-packing")


def test_checks_restore_mode_and_random_state(chats, device):
    """The checks run in eval mode, compile nothing and restore mode, methods and RNG state."""
    model = check(llama_fsdp, chats, device, "--attention", "sdpa")
    graphs, modes = [], []

    def record_graph(graph: torch.fx.GraphModule, _: list) -> Callable:
        graphs.append(graph)
        return graph.forward

    def record_mode(module: nn.Module, *_: object) -> None:
        modes.append(module.training)
        torch.rand(1)

    model.module.model.embed_tokens.register_forward_hook(record_mode)
    for module in model.modules():
        if isinstance(module, llama_fsdp.BLOCKS):
            module.compile(backend=record_graph)
    args = parse_flags(llama_fsdp, [*FLAGS, "--dataset", str(chats)])
    ids = torch.arange(32).repeat(2, 1)
    for mode in (True, False):
        model.train(mode)
        before = torch.get_rng_state()
        with policies.evaluation(model):
            llama_fsdp.check_loss(args, device, model)
        assert torch.equal(torch.get_rng_state(), before)
        assert all(module.training is mode for module in model.modules())
    assert set(modes) == {False} and not graphs
    assert "loss_logits" not in vars(model.module.lm_head)
    model(input_ids=ids)
    assert graphs


def attend(**options: object) -> torch.Tensor:
    """Call packed attention on a row with two documents of 8 tokens, with extra `options`."""
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
def test_packed_attention_refuses_unsupported_features(name, value):
    register(per_document)
    option = {"module_is_causal": "is_causal"}.get(name, name)
    with pytest.raises(ValueError, match=f"do not support {option}.*needs. Pass --attention eager"):
        attend(**{name: value})


def test_packed_attention_accepts_disabled_features():
    register(per_document)
    unset = {"dropout": 0.0, "softcap": None, "s_aux": None, "use_cache": False, "is_causal": None}
    assert attend(**unset, sliding_window=16, position_ids=torch.arange(16)).shape == (1, 16, 2, 8)
    register(per_document, longest=32)
    attend(sliding_window=32)
    with pytest.raises(ValueError, match="do not support sliding_window"):
        attend(sliding_window=16)


def expected_flops(config: transformers.PretrainedConfig, length: float) -> float:
    """Return the FLOPs per token, computed from the config of a GPT-2 or a Llama."""
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
    """The formula is 6 N + 12 L d T. GPT-2 has a tied head, and 70B has grouped queries."""
    config = memory_estimator.load_config(name)
    scripts = {"gpt2": gpt2_fsdp.LossModel, "llama": llama_fsdp.LossModel}
    with torch.device("meta"):
        model = scripts[config.model_type](config)
    facts = Facts.of(model, None)
    assert flops_per_token(model.config, facts, 377.3) == pytest.approx(
        expected_flops(config, 377.3), rel=1e-9
    )


@pytest.mark.parametrize("end", [1, [1, 2]])
def test_padding_token_without_a_row_becomes_the_end_of_text(end, pairs):
    args = parse_flags(T5_training, ["--model-name", "t5", "--dataset", str(pairs)])
    config = T5_training.MODEL.config_class(vocab_size=9, pad_token_id=9, eos_token_id=end)
    checks.fit_config(args, T5_training.MODEL, config)
    assert config.pad_token_id == 1


def test_decoder_needs_a_start_token(t5_directory, pairs, tmp_path, process_group):
    """T5Gemma stores its BOS token in the decoder's config."""
    shutil.copytree(t5_directory, tmp_path / "t5")
    config = json.loads((t5_directory / "config.json").read_text())
    flags = ["--model-name", str(tmp_path / "t5"), "--dataset", str(pairs)]
    args = parse_flags(T5_training, flags)
    for start in (None, -1, config["vocab_size"], [0]):
        config["decoder_start_token_id"] = start
        (tmp_path / "t5/config.json").write_text(json.dumps(config))
        model, _, _ = T5_training.load_model(args, torch.device("cpu"))
        with pytest.raises(ValueError, match=r"token is .* Set decoder_start_token_id .* in its"):
            T5_training.data.collator(model)
    script = edited_script("T5_training", T5GEMMA)
    args = parse_flags(script, ["--model-name", "tiny", "--dataset", str(pairs)])
    model, facts, _ = script.load_model(args, torch.device("cpu"))
    train_set, _ = script.load_data(args, facts.tokenizer)
    assert model.config.decoder.bos_token_id == 2 != model.config.pad_token_id
    batch = script.data.collator(model)([train_set[i] for i in range(4)])
    assert set(batch["decoder_input_ids"][:, 0].tolist()) == {2}
    is_target = batch["labels"] != -100
    assert torch.equal(batch["decoder_attention_mask"] == 1, is_target)


HEADS = {  # script, architecture, config
    "GPT-J": ("gpt2_fsdp", "GPTJ", {"n_embd": 32, "n_layer": 1, "n_head": 2, "rotary_dim": 8}),
    "Phi": ("llama_fsdp", "Phi", {}),
    "Granite": ("llama_fsdp", "Granite", {"logits_scaling": 3.0}),
    "Cohere": ("llama_fsdp", "Cohere", {"logit_scale": 0.3}),
    "Gemma 2": ("llama_fsdp", "Gemma2", {"head_dim": 16, "final_logit_softcapping": 2.0}),
    "Llama 4": ("llama_fsdp", "Llama4", {
        "intermediate_size_mlp": 32, "num_local_experts": 2, "head_dim": 16,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_chunked_loss_equals_plain_loss(name, monkeypatch):
    """The heads have a scale, a cap or a bias."""
    script, architecture, config = HEADS[name]
    base_model = {"gpt2_fsdp": "GPT2LMHeadModel", "llama_fsdp": "LlamaForCausalLM"}[script]
    script = edited_script(
        script, {f"transformers.{base_model}": f"transformers.{architecture}ForCausalLM"}
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
    plain = F.cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten(), reduction="sum")
    expected = torch.autograd.grad(plain, list(model.parameters()), allow_unused=True)
    loss = model(ids, targets=targets)
    gradient = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)
    assert type(model).__name__ == f"{architecture}ForCausalLM"
    if name in ("GPT-J", "Phi"):
        (bias,) = (p for n, p in model.named_parameters() if n == "lm_head.bias")
        assert torch.autograd.grad(model(ids, targets=targets), bias)[0].norm() > 0.1


def attention_or_error(name: str, attention: str, *flags: str, **config: object) -> str:
    """Return the attention that `set_attention` chooses for a model, or its error message."""
    args = parse_flags(llama_fsdp, [*FLAGS, "--attention", attention, *flags])
    model_class = getattr(transformers, f"{name}ForCausalLM")
    try:
        kernel = set_attention(args, model_class.config_class(**config), model_class)
    except ValueError as error:
        return str(error)
    return kernel.partition(" (")[0]


def test_unsupported_attention_is_refused():
    assert attention_or_error("GptOss", "auto") == attention_or_error("GptOss", "eager") == "eager"
    assert attention_or_error("GptOss", "sdpa").endswith("GptOssForCausalLM lacks it. Pass eager.")
    for name, other in (("Falcon", "sdpa"), ("StableLm", "sdpa"), ("GPTJ", "eager")):
        assert attention_or_error(name, "auto") == other
        error = attention_or_error(name, "varlen", "--precision", "bf16")
        assert error.endswith(f"attention of its own. Pass --attention {other}.")
    assert attention_or_error("Lfm2", "auto") == "varlen"  # its config has no attention_dropout


def test_chunks_windows_and_selection_need_a_mask():
    assert attention_or_error("Llama4", "auto", attention_chunk_size=64) == "varlen"
    assert attention_or_error("Llama4", "auto", attention_chunk_size=63) == "sdpa"
    assert attention_or_error("DeepseekV32", "auto") == "sdpa"  # its layers select keys
    assert attention_or_error("Phimoe", "auto", sliding_window=63) == "sdpa"
    error = attention_or_error("Phimoe", "varlen", sliding_window=63)  # layers do not pass it on
    assert error.endswith("attention of its own. Pass --attention sdpa.")
    error = attention_or_error("Llama4", "varlen", attention_chunk_size=63)
    assert error.endswith("attention of its own. Pass --attention sdpa.")


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
    facts = Facts.of(model, None)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, others = parameter_groups(model, facts.shapes, 0.1)
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
    """FSDP1 flattens parameters, so their shapes are recorded beforehand."""
    config = transformers.Qwen3NextConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        head_dim=16, num_key_value_heads=2, vocab_size=64,
        linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=16, linear_value_head_dim=16, num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=16, shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    model = transformers.Qwen3NextForCausalLM(config)
    model.rows = nn.ParameterDict({"gate_up_proj_bias": torch.zeros(4, 8)})  # as in gpt-oss
    shapes = {name: parameter.dim() for name, parameter in model.named_parameters()}
    facts = Facts.of(model, None)
    sharded = FSDP(model, device_id=device, use_orig_params=True)
    names = {id(p): n.replace("_fsdp_wrapped_module.", "") for n, p in model.named_parameters()}
    for parameter in sharded.parameters():
        parameter.data = parameter.data.flatten()  # as on several ranks
    groups = parameter_groups(sharded, facts.shapes, 0.1)
    decayed, others = ({names[id(p)] for p in group["params"]} for group in groups)
    assert decayed | others == shapes.keys() and not decayed & others
    assert "model.layers.0.linear_attn.A_log" in others
    assert "model.layers.0.linear_attn.dt_bias" in others
    assert "rows.gate_up_proj_bias" in others
    assert {name for name in others if shapes[name] > 1} == {"rows.gate_up_proj_bias"}
    assert "model.embed_tokens.weight" in decayed
