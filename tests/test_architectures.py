"""Train every architecture in Transformers with a script, by its name, and with plain PyTorch. The
results must match, or the script must refuse the model. Skip those that these shapes break."""

import importlib
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from conftest import losses
from plain import mean_loss, save
from ten_steps import parse_args, run
from transformers.models.auto import modeling_auto

from core.weights import plain_name

CAUSAL = sorted(set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))
SEQ2SEQ = sorted(set(modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values()))
SHAPE = {  # each size and its names in model configurations
    64: "hidden_size d_model n_embd hidden_dim embedding_size word_embed_proj_dim",
    128: "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim",
    2: "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers "
    "num_decoder_layers num_encoder_layers num_key_value_heads num_experts_per_tok moe_k",
    4: "num_attention_heads num_heads n_head n_heads encoder_attention_heads num_experts "
    "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
    "num_local_experts n_routed_experts moe_num_experts",
    16: "head_dim d_kv q_lora_rank kv_lora_rank qk_nope_head_dim v_head_dim",
    32: "moe_intermediate_size",
    8: "qk_rope_head_dim sliding_window",  # shorter than the texts
    1: "n_group topk_group n_shared_experts first_k_dense_replace",
    384: "vocab_size",
    256: "max_position_embeddings n_positions max_target_positions max_source_positions "
    "max_encoder_position_embeddings max_decoder_position_embeddings",
}
SMALL = {name: value for value, names in SHAPE.items() for name in names.split()}
ALWAYS = {"eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0}
TOO_LARGE = 30_000_000  # parameters; some configurations have sizes that SHAPE does not name
TOO_SLOW = {"BambaForCausalLM", "FalconH1ForCausalLM", "GraniteMoeHybridForCausalLM",
            "JambaForCausalLM", "NemotronHForCausalLM"}  # fmt: skip
CRASHES = {"Inkling2ForCausalLM"}  # torch 2.13 crashes in its backward pass under FSDP2
STEPS = ["--max-steps", "2", "--lr", "1e-3", "--weight-decay", "0", "--lr-schedule", "step",
         "--gamma", "1", "--max-grad-norm", "10000", "--fsdp", "2", "--export-dtype", "fp32",
         "--batch-size", "64", "--log-every", "1", "--eval-every", "0",
         "--num-val-samples", "2"]  # fmt: skip


def small_settings(config: transformers.PretrainedConfig) -> dict[str, object]:
    """Return settings that make a configuration small and turn off dropout."""
    defaults = config.to_dict()
    settings = ALWAYS | {name: value for name, value in SMALL.items() if name in defaults}
    for name, value in defaults.items():
        if isinstance(value, float) and ("drop" in name or "jitter" in name):
            settings[name] = 0.0
    if defaults.get("layer_types"):  # one layer of each kind
        kinds = dict.fromkeys(defaults["layer_types"])
        settings["layer_types"] = [*kinds, *defaults["layer_types"]][:2]
    if "kv_lora_rank" in defaults:  # DeepSeek's latent attention
        settings |= {"head_dim": SMALL["qk_rope_head_dim"], "num_key_value_heads": 4}
    if (defaults.get("bos_token_id") or 0) >= SMALL["vocab_size"]:
        settings["bos_token_id"] = 2
    return settings


def small_model(model_class: type) -> transformers.PreTrainedModel:
    """Return a small model with random weights, none of them 0 or 1. Raise any error if these
    settings do not work."""
    config = model_class.config_class()
    shape = small_settings(config)
    for name in config.sub_configs:
        if isinstance(getattr(config, name, None), transformers.PretrainedConfig):
            shape[name] = small_settings(getattr(config, name))
    config = model_class.config_class(**shape)
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(config).parameters())
    if size > TOO_LARGE:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    model = model_class(config)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    if not config.is_encoder_decoder:  # raises an error if it cannot run
        model(torch.arange(3, 40)[None], use_cache=False)
    return model


def check_export(model_class: type, base: Path, final: Path, trained: dict) -> None:
    """Check that an export has the trained weights, and the settings and tokenizer of its base."""
    exported, report = model_class.from_pretrained(final, output_loading_info=True)
    assert not any(report.values()), report
    embedding = exported.get_input_embeddings().weight  # Youtu zeroes row 0 when it loads
    for key, parameter in exported.named_parameters():
        first = 1 if parameter is embedding else 0
        assert torch.equal(parameter[first:], trained.pop(key)[first:]), key
    assert not trained
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        one, other = (json.loads((path / name).read_text()) for path in (base, final))
        for settings in (one, other):
            settings.pop("torch_dtype", None)  # for Transformers 4
        assert one == other, name
    assert (base / "tokenizer.json").read_bytes() == (final / "tokenizer.json").read_bytes()


def train_plain(model: transformers.PreTrainedModel, samples: list) -> list[float]:
    """Train the model for two steps on all samples in plain PyTorch and return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    result = []
    for _ in range(2):
        loss = mean_loss(model, samples)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result.append(loss.item())
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CAUSAL, *SEQ2SEQ])
def test_model_trains_and_exports_like_plain_pytorch(
    name, process_group, chats, pairs, texts, tmp_path
):
    """Compare losses and exported weights, unless the script refuses the model."""
    if name in TOO_SLOW | CRASHES:
        pytest.skip("its layers take minutes on a CPU, or crash")
    base = tmp_path / "model"
    try:
        model = small_model(getattr(transformers, name))
        save(model, base)
    except Exception as error:  # any type: these shapes do not work
        pytest.skip(f"cannot be made small: {type(error).__name__}: {error}")
    if hasattr(model.config, "text_config"):
        pytest.skip("its text part is another class of this list")
    script, variants = "gpt2_fsdp", [[]]
    flags = ["--dataset", texts[1], "--val-dataset", texts[1], "--block-size", "64"]
    if name in SEQ2SEQ:
        script = "T5_training"
        flags = ["--dataset", pairs, "--num-train-samples", "9", "--rouge-samples", "0",
                 "--source-length", "128", "--target-length", "64"]  # fmt: skip
    elif hasattr(model, "model") and hasattr(model, "lm_head"):
        script, variants = "llama_fsdp", [[], ["--no-packing"]]
        flags = ["--dataset", chats, "--num-train-samples", "9", "--max-seq-length", "128"]
    refused = []
    for more in variants:
        output = tmp_path / f"output{len(more)}"
        words = [*flags, *more, *STEPS, "--model-name", base, "--output-dir", output]
        module = importlib.import_module(script)
        try:
            code, seen = run(module, parse_args(module, words), torch.device("cpu"))
        except (Exception, SystemExit) as error:
            refused.append(f"{type(error).__name__}: {error}")
            continue
        assert code == 0
        samples = [seen["train_set"][i] for i in range(len(seen["train_set"]))]
        plain = train_plain(type(model).from_pretrained(base).train(), samples)
        assert list(losses(output).values()) == pytest.approx(plain, abs=2e-4), more
        parameters = seen["model"].named_parameters()
        trained = {plain_name(key): parameter.full_tensor() for key, parameter in parameters}
        check_export(type(model), base, output / "final", trained)
        shutil.rmtree(tmp_path)
        print(name, script, *more, "exact", refused)
        return
    pytest.skip(f"refused: {refused}")
