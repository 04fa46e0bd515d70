"""Copy each script, adapt it to another model by changing a few lines, and run it."""

import difflib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, launch, metrics
from copied import edited_script
from plain import mean_loss, save
from ten_steps import parse_args

from core.steps import parameter_groups
from core.weights import whole_shapes

T5_LINES = {
    "import": "from transformers.models.t5.modeling_t5 import T5Block, T5LayerNorm",
    "MODEL": "MODEL = transformers.T5ForConditionalGeneration",
    "BLOCKS": "BLOCKS = (T5Block,)  # FSDP units, each compiled and recomputed separately",
    "NORMS": "NORMS = (T5LayerNorm,)  # RMS norms, each computed by one kernel",
    "TINY": 'TINY_CONFIG = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, '
    '"num_heads": 4,',
}
GPT2_LINES = {
    "import": "from transformers.models.gpt2.modeling_gpt2 import GPT2Block",
    "MODEL": "MODEL = transformers.GPT2LMHeadModel",
    "BLOCKS": "BLOCKS = (GPT2Block,)  # FSDP units, each compiled and recomputed separately",
    "TINY": '{"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 1024,',
}
LLAMA_LINES = {
    "import": "from transformers.models.llama import modeling_llama",
    "MODEL": "MODEL = transformers.LlamaForCausalLM",
    "BLOCKS": "BLOCKS = (modeling_llama.LlamaDecoderLayer,)  # FSDP units, each compiled and "
    "recomputed separately",
    "NORMS": "NORMS = (modeling_llama.LlamaRMSNorm,)",
    "TINY": '"num_attention_heads": 4, "num_key_value_heads": 2,',
}


def from_t5(folder: str, name: str, tiny: str) -> tuple[str, dict[str, str]]:
    """Return the script T5_training and the changes that adapt it to another model."""
    blocks = f"{name}DecoderLayer, {name}EncoderLayer"
    new = {
        "import": f"from transformers.models.{folder}.modeling_{folder} import {blocks}",
        "MODEL": f"MODEL = transformers.{name}ForConditionalGeneration",
        "BLOCKS": f"BLOCKS = ({blocks})",
        "NORMS": "NORMS = ()",
        "TINY": tiny,
    }
    return "T5_training", {T5_LINES[key]: text for key, text in new.items()}


def from_gpt2(folder: str, name: str, tiny: str) -> tuple[str, dict[str, str]]:
    """Return the script gpt2_fsdp and the changes that adapt it to another model."""
    new = {
        "import": f"from transformers.models.{folder}.modeling_{folder} import {name}DecoderLayer",
        "MODEL": f"MODEL = transformers.{name}ForCausalLM",
        "BLOCKS": f"BLOCKS = ({name}DecoderLayer,)",
        "TINY": '{"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,' + tiny,
    }
    return "gpt2_fsdp", {GPT2_LINES[key]: text for key, text in new.items()}


def from_llama(
    folder: str, name: str, tiny: str = "", norm: str = "RMSNorm"
) -> tuple[str, dict[str, str]]:
    """Return the script llama_fsdp and the changes that adapt it to another model, with `tiny`
    added to TINY_CONFIG. `norm` is empty if its norms are no plain RMS norms."""
    new = {
        "import": f"from transformers.models.{folder} import modeling_{folder}",
        "MODEL": f"MODEL = transformers.{name}ForCausalLM",
        "BLOCKS": f"BLOCKS = (modeling_{folder}.{name}DecoderLayer,)",
        "NORMS": f"NORMS = (modeling_{folder}.{name}{norm},)" if norm else "NORMS = ()",
        "TINY": LLAMA_LINES["TINY"] + tiny,
    }
    return "llama_fsdp", {LLAMA_LINES[key]: text for key, text in new.items()}


ENCODER_AND_DECODER = """TINY_CONFIG = {"d_model": 128, "encoder_layers": 2, "decoder_layers": 2,
               "encoder_ffn_dim": 512, "decoder_ffn_dim": 512,"""
TWO_STACKS = """STACK = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
         "intermediate_size": 256, "num_key_value_heads": 2, "head_dim": 32,
         "vocab_size": 384}  # fmt: skip
TINY_CONFIG = {"encoder": STACK, "decoder": STACK,"""
WIDER = """
               "intermediate_size": 512,"""
EXPERTS = """
               "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,"""
CASES = {  # name of the copy: script and changes
    "bart": from_t5("bart", "Bart", ENCODER_AND_DECODER),
    "t5gemma": from_t5("t5gemma", "T5Gemma", TWO_STACKS),
    "opt": from_gpt2("opt", "OPT", ' "ffn_dim": 512,'),
    "phi": from_gpt2("phi", "Phi", WIDER),
    "qwen3": from_llama("qwen3", "Qwen3", ' "head_dim": 32,'),
    "mistral": from_llama("mistral", "Mistral"),
    "gemma3": from_llama("gemma3", "Gemma3", ' "head_dim": 32,', norm=""),
    "qwen3_moe": from_llama("qwen3_moe", "Qwen3Moe", EXPERTS),
}
LIKE_LLAMA = {"hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2,
              "max_position_embeddings": 128}  # fmt: skip
LIKE_BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 64,
             "decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
             "max_position_embeddings": 128, "pad_token_id": 0, "dropout": 0.0,
             "attention_dropout": 0.0,
             "decoder_start_token_id": 2}  # fmt: skip  # T5 uses the padding token
LIKE_NEOX = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 4, "max_position_embeddings": 64}  # fmt: skip
NO_DROPOUT = dict.fromkeys(
    ("embd_pdrop", "resid_pdrop", "embedding_dropout", "residual_dropout", "attention_dropout"), 0.0
)
HALF = {**LIKE_LLAMA, "head_dim": 8, "vocab_size": 384}  # each half of T5Gemma
SHAPES = {  # configs of the saved models, without dropout
    "bart": LIKE_BART,
    "t5gemma": {"encoder": HALF, "decoder": HALF},
    "opt": LIKE_NEOX | {"word_embed_proj_dim": 16, "ffn_dim": 64, "pad_token_id": 0}
    | {"dropout": 0.0},
    "phi": LIKE_NEOX | NO_DROPOUT,  # its head has a bias
    "qwen3": LIKE_LLAMA | {"head_dim": 16, "tie_word_embeddings": True},
    "mistral": LIKE_LLAMA | {"sliding_window": 8},  # shorter than the documents
    "gemma3": LIKE_LLAMA | {"head_dim": 16, "sliding_window": 8, "pad_token_id": 0},
    "qwen3_moe": LIKE_LLAMA | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
                               "moe_intermediate_size": 32},
}  # fmt: skip
SHORT = {  # length flags that fit these models
    "T5_training": ["--source-length", "128", "--target-length", "32", "--rouge-samples", "2"],
    "gpt2_fsdp": ["--block-size", "64"],
    "llama_fsdp": ["--max-seq-length", "128"],
}


def ruff(text: str, *command: str) -> str:
    """Return what a command of ruff prints for a script's text. Fail if it finds a mistake."""
    arguments = [sys.executable, "-m", "ruff", *command, "--quiet", "--stdin-filename", "copy.py"]
    result = subprocess.run([*arguments, "-"], cwd=ROOT, input=text, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("name", CASES)
def test_copy_changes_at_most_eight_lines(name, process_group):
    script, changes = CASES[name]
    before = text = (ROOT / f"{script}.py").read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    text = ruff(text, "format")
    ruff(text, "check")
    diff = difflib.unified_diff(before.splitlines(), text.splitlines(), n=0, lineterm="")
    added = [line for line in diff if re.match(r"\+(?!\+\+ )", line)]
    print(name, len(added), "added lines")  # pytest -s shows it
    assert 0 < len(added) <= 8

    copy = edited_script(script, changes)
    args = parse_args(copy, ["--model-name", "tiny", "--dataset", "docstrings"])
    model, tokenizer, _ = copy.load_model(args, needs_weights=False)
    assert isinstance(model, copy.MODEL)
    shapes = whole_shapes(model)
    assert sum(shape.numel() for shape in shapes.values()) < 3e6
    assert model.config.pad_token_id in (tokenizer.pad_token_id, None)
    assert not any(value for key, value in vars(model.config).items() if "layerdrop" in key)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    for block in copy.BLOCKS:
        assert any(isinstance(module, block) for module in model.modules())
    decayed, others = parameter_groups(model, shapes, 0.1)
    assert all(parameter.dim() > 1 for parameter in decayed["params"])
    assert all(parameter.dim() == 1 for parameter in others["params"])


def save_model(name: str, path: Path) -> Path:
    """Save a small model, in which no weight has its initial 0 or 1; return the directory."""
    torch.manual_seed(0)
    model_class = edited_script(*CASES[name]).MODEL
    config = model_class.config_class(
        vocab_size=384, bos_token_id=None, eos_token_id=1, **SHAPES[name]
    )
    model = model_class(config)
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            tensor.add_(torch.randn_like(tensor), alpha=0.2)
    save(model, path)
    return path


@pytest.fixture(scope="module")
def trained_copies(
    tmp_path_factory: pytest.TempPathFactory, pairs: Path, texts: tuple, chats: Path
) -> Path:
    """Train each copy for two steps on two ranks under FSDP2. Return the folder with their models
    and outputs. The first step uses all samples."""
    folder = tmp_path_factory.mktemp("trained")
    data = {"T5_training": [pairs], "gpt2_fsdp": [texts[0], "--val-dataset", texts[1]],
            "llama_fsdp": [chats]}  # fmt: skip
    cases = {}
    for name, (script, changes) in CASES.items():
        model, output = save_model(name, folder / name / "model"), folder / name / "output"
        flags = ["--model-name", model, "--output-dir", output, "--dataset", *data[script],
                 *SHORT[script], "--fsdp", 2, "--export-dtype", "fp32", "--max-steps", 2,
                 "--batch-size", 64, "--lr", "1e-2", "--log-every", 1]  # fmt: skip
        cases[name] = [script, changes, [str(flag) for flag in flags]]
    (folder / "cases.json").write_text(json.dumps(cases))
    launch(2, "tests/workers/templates_worker.py", folder / "cases.json")
    return folder


@pytest.mark.parametrize("name", CASES)
def test_copy_trains_and_exports_like_plain_pytorch(trained_copies, name):
    """Compare the loss before and after training, and the first gradient."""
    model_class = edited_script(*CASES[name]).MODEL
    output = trained_copies / name / "output"
    seen = torch.load(output / "seen.pt", weights_only=False)
    model = model_class.from_pretrained(trained_copies / name / "model")
    first, *_, last = metrics(output, "val")
    loss_error = first["loss"] - mean_loss(model, seen["val"]).item()
    mean_loss(model, seen["train"]).backward()
    expected = {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
    assert seen["gradient"].keys() == expected.keys()
    errors = [(seen["gradient"][key] - expected[key]).norm() for key in expected]
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    gradient_error = torch.stack(errors).norm() / norm
    final, report = model_class.from_pretrained(output / "final", output_loading_info=True)
    assert not any(report.values()), report
    export_error = last["loss"] - mean_loss(final, seen["val"]).item()
    print(name, f"loss {loss_error:.1e}, gradient {gradient_error:.1e}, export {export_error:.1e}")
    assert abs(loss_error) < 1e-5 and gradient_error < 1e-4 and abs(export_error) < 1e-4
    assert abs(first["loss"] - last["loss"]) > 1e-3
