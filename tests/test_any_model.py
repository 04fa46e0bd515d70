"""Train models of other classes with the scripts as they are, by --model-name."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from chaos import LENGTHS
from conftest import check_equal_weights, launch, metrics
from plain import mean_loss, save

import policies

LLAMA = {"hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 2, "pad_token_id": 0,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
SLIDING = LLAMA | {"head_dim": 16, "sliding_window": 8}  # shorter than the documents
NEOX = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4}  # fmt: skip
OPT = NEOX | {"ffn_dim": 64, "word_embed_proj_dim": 16, "dropout": 0.0, "pad_token_id": 0}
NO_DROPOUT = dict.fromkeys(
    ("embd_pdrop", "resid_pdrop", "embedding_dropout", "residual_dropout", "hidden_dropout",
     "attention_dropout"), 0.0,
)  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
           "moe_intermediate_size": 32}  # fmt: skip
BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "pad_token_id": 0, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
        "decoder_start_token_id": 2, "max_position_embeddings": 128}  # fmt: skip
LED = BART | {"attention_window": 8, "max_encoder_position_embeddings": 128,
              "max_decoder_position_embeddings": 128}  # fmt: skip
MT5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
       "pad_token_id": 0, "decoder_start_token_id": 0}  # fmt: skip
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
          "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
HALF = LLAMA | {"vocab_size": 384}
LORA = ["--lora-rank", "4"]
FSDP2 = ["--fsdp", "2"]
CASES = {  # script, class, config, flags
    "qwen3": ("llama_fsdp", "Qwen3ForCausalLM", LLAMA | {"tie_word_embeddings": True}, []),
    "mistral": ("llama_fsdp", "MistralForCausalLM", SLIDING, FSDP2),
    "gemma3": ("llama_fsdp", "Gemma3ForCausalLM", SLIDING, FSDP2),
    "multimodal": ("llama_fsdp", "Gemma3ForCausalLM", SLIDING, []),
    "phi3": ("llama_fsdp", "Phi3ForCausalLM", LLAMA, []),
    "olmo2": ("llama_fsdp", "Olmo2ForCausalLM", LLAMA, FSDP2),
    "granite": ("llama_fsdp", "GraniteForCausalLM", LLAMA | {"logits_scaling": 4.0}, []),
    "smollm3": ("llama_fsdp", "SmolLM3ForCausalLM", LLAMA, FSDP2),
    "mixtral": ("llama_fsdp", "MixtralForCausalLM", LLAMA | EXPERTS, []),
    "qwen3_moe": ("llama_fsdp", "Qwen3MoeForCausalLM", LLAMA | EXPERTS, FSDP2),
    "neox": ("llama_fsdp", "GPTNeoXForCausalLM", NEOX | NO_DROPOUT, []),
    "opt": ("llama_fsdp", "OPTForCausalLM", OPT, FSDP2),
    "falcon": ("llama_fsdp", "FalconForCausalLM", NEOX | NO_DROPOUT, ["--no-packing"]),
    "gpt2 opt": ("gpt2_fsdp", "OPTForCausalLM", OPT, []),
    "gpt2 llama": ("gpt2_fsdp", "LlamaForCausalLM", LLAMA, FSDP2),
    "gpt2 qwen3": ("gpt2_fsdp", "Qwen3ForCausalLM", LLAMA, []),
    "bart": ("T5_training", "BartForConditionalGeneration", BART, FSDP2),
    "mt5": ("T5_training", "MT5ForConditionalGeneration", MT5, []),
    "pegasus": ("T5_training", "PegasusForConditionalGeneration", BART, []),
    "marian": ("T5_training", "MarianMTModel", BART, FSDP2),
    "led": ("T5_training", "LEDForConditionalGeneration", LED, FSDP2),  # has unused weights
    "t5gemma": ("T5_training", "T5GemmaForConditionalGeneration",
                {"encoder": HALF, "decoder": HALF}, []),
    "qwen3 lora": ("llama_fsdp", "Qwen3ForCausalLM", LLAMA, LORA),
    "gemma3 lora": ("llama_fsdp", "Gemma3ForCausalLM", SLIDING, LORA),
    "multimodal lora": ("llama_fsdp", "Gemma3ForCausalLM", SLIDING, LORA),
    "phi3 lora": ("llama_fsdp", "Phi3ForCausalLM", LLAMA, LORA),
    "opt lora": ("llama_fsdp", "OPTForCausalLM", OPT, LORA),
    "neox lora": ("llama_fsdp", "GPTNeoXForCausalLM", NEOX | NO_DROPOUT, LORA),
}  # fmt: skip
# One of each kind. The others train in make test-all.
QUICK = ("qwen3", "mistral", "multimodal", "granite", "mixtral", "neox", "opt", "falcon",
         "gpt2 llama", "bart", "mt5", "led", "multimodal lora", "neox lora")  # fmt: skip
STEPS = ["--export-dtype", "fp32", "--batch-size", 64, "--lr", "1e-2", "--lr-schedule", "constant",
         "--warmup-ratio", 0, "--log-every", 1]  # fmt: skip
TOKENS = {"vocab_size": 384, "bos_token_id": 2, "eos_token_id": 1, "max_position_embeddings": 256}


def save_model(name: str, path: Path) -> Path:
    """Save a small model, in which no weight has its initial 0 or 1; return the directory."""
    torch.manual_seed(0)
    _, kind, shape, _ = CASES[name]
    model_class = getattr(transformers, kind)
    model = model_class(model_class.config_class(**TOKENS | shape))
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            tensor.add_(torch.randn_like(tensor), alpha=0.2)
    if name.startswith("multimodal"):
        save(model, path.parent / "text")
        parts = {"text_config": model.config.to_dict(), "vision_config": VISION}
        config = transformers.Gemma3Config(**parts, mm_tokens_per_image=4)
        text, model = model, transformers.Gemma3ForConditionalGeneration(config)
        model.model.language_model.load_state_dict(text.model.state_dict())
        model.tie_weights()
    save(model, path)
    return path


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, pairs: Path, texts: tuple, chats: Path
) -> Callable[[str], Path]:
    """Return a function that returns the folder of a model, with its outputs. Its first call for a
    model of QUICK trains all of these, as that for another model does, on two ranks: two steps and,
    in the directory resumed, one and then the other. A step has all samples."""
    data = {"T5_training": [pairs], "gpt2_fsdp": [texts[0], "--val-dataset", texts[1]],
            "llama_fsdp": [chats]}  # fmt: skip

    @functools.cache
    def train(is_quick: bool) -> Path:
        folder = tmp_path_factory.mktemp("trained")
        runs = []
        for name, (script, _, _, flags) in CASES.items():
            if (name in QUICK) != is_quick:
                continue
            model = save_model(name, folder / name / "model")
            flags = ["--model-name", model, "--dataset", *data[script], *LENGTHS[f"{script}.py"],
                     *flags, *STEPS]  # fmt: skip
            for directory, steps in (("output", 2), ("resumed", 1), ("resumed", 2)):
                output = ["--output-dir", folder / name / directory, "--max-steps", steps]
                runs.append([script, [str(flag) for flag in flags + output]])
        (folder / "runs.json").write_text(json.dumps(runs))
        worker = "tests/workers/any_model_worker.py"
        launch(2, worker, folder / "runs.json", quiet_seconds=4 * len(runs))
        return folder

    return lambda name: train(name in QUICK) / name


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in CASES]
)
def test_model_trains_resumes_and_exports_like_plain_pytorch(trained, name):
    script, kind, _, flags = CASES[name]
    base, output = trained(name) / "model", trained(name) / "output"
    text = base.with_name("text")  # a multimodal model has these
    model = getattr(transformers, kind).from_pretrained(text if text.is_dir() else base)
    seen = torch.load(output / "seen.pt", weights_only=False)
    first, *_, last = metrics(output, "val")
    assert first["loss"] == pytest.approx(mean_loss(model, seen["val_rows"]).item(), abs=1e-5)
    check_equal_weights(output / "final", trained(name) / "resumed/final")
    if "--lora-rank" in flags:
        peft = pytest.importorskip("peft")
        whole = transformers.AutoModelForCausalLM.from_pretrained(base)
        final = peft.PeftModel.from_pretrained(whole, output / "final")
    else:
        mean_loss(model, seen["rows"][0]).backward()
        expected = {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
        unused = seen["gradient"].keys() - expected.keys()  # FSDP1 gives them zeros
        assert not any(seen["gradient"][key].any() for key in unused)
        errors = [(seen["gradient"][key] - expected[key]).norm() for key in expected]
        norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
        assert torch.stack(errors).norm() < 1e-4 * norm
        auto = transformers.AutoModelForCausalLM
        if script == "T5_training":
            auto = transformers.AutoModelForSeq2SeqLM
        final, report = auto.from_pretrained(output / "final", output_loading_info=True)
        assert type(final) is type(model) and not any(report.values()), report
    assert last["loss"] == pytest.approx(mean_loss(final, seen["val_rows"]).item(), abs=1e-4)
    assert abs(first["loss"] - last["loss"]) > 1e-3


@pytest.mark.parametrize("name", CASES)
def test_units_are_the_classes_that_transformers_does_not_split(name, capfd):
    """Transformers has no list for some models."""
    _, kind, config, _ = CASES[name]
    model_class = getattr(transformers, kind)
    with torch.device("meta"):
        model = model_class(model_class.config_class(**TOKENS | config | {"decoder_layers": 2}))
    units = policies.layer_classes(model, transformers.GPT2LMHeadModel, ())
    family = kind.partition("For")[0].removesuffix("MTModel")
    expected = {f"{family}EncoderLayer", f"{family}DecoderLayer"}
    assert {unit.__name__ for unit in units} == (set(model._no_split_modules) or expected)
    assert capfd.readouterr().out.startswith(f"{kind}, units: ")


def test_units_of_a_model_of_one_layer_are_its_blocks():
    kind = transformers.T5ForConditionalGeneration
    model = kind(transformers.T5Config(num_layers=1, d_model=8, d_kv=4, d_ff=8, num_heads=2))
    blocks = (type(model.encoder.block[0]),)
    assert policies.layer_classes(model, kind, blocks) == blocks
