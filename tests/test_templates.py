"""Copy each script, adapt it to another model by changing a few lines, and run it."""

import difflib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import ROOT, launch, metrics
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    ByT5Tokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from benchmarks.driven import parse_flags
from runtime.batches import parameter_groups
from runtime.chats import LLAMA_2
from tools.copy_script import needed_files

Changes = list[tuple[str, str]]  # (text in the script, its replacement)


def from_t5(folder: str, model: str, blocks: str, tiny: str = "") -> Changes:
    """Return the changes that adapt T5_training.py to another model."""
    old = "models.t5.modeling_t5 import T5Block"
    comment = "  # FSDP units, each compiled and recomputed separately"
    changes = [
        (old, f"models.{folder}.modeling_{folder} import {blocks}"),
        (
            f"BLOCKS = (T5Block,){comment}",
            "BLOCKS = (" + (blocks if "," in blocks else f"{blocks},") + ")",
        ),
        ("transformers.T5ForConditionalGeneration", f"transformers.{model}"),
    ]
    if tiny:
        shape = '{"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 4}'
        changes.append((f"TINY = {shape}", tiny))
    return changes


def from_gpt2(folder: str, model: str, block: str, tiny: str) -> Changes:
    """Return the changes that adapt gpt2_fsdp.py to another model."""
    old = "models.gpt2.modeling_gpt2 import GPT2Block"
    return [
        (old, f"models.{folder}.modeling_{folder} import {block}"),
        ("BLOCKS = (GPT2Block,)", f"BLOCKS = ({block},)"),
        ("transformers.GPT2LMHeadModel", f"transformers.{model}"),
        ('TINY = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 1024}', tiny),
    ]


def from_llama(folder: str, name: str, more: str = "") -> Changes:
    """Return the changes that adapt llama_fsdp.py to another model, with `more` lines added to
    TINY."""
    block = f"{name}DecoderLayer"
    changes = [
        ("models.llama.modeling_llama import LlamaDecoderLayer",
         f"models.{folder}.modeling_{folder} import {block}"),
        ("BLOCKS = (LlamaDecoderLayer,)", f"BLOCKS = ({block},)"),
        ("transformers.LlamaForCausalLM", f"transformers.{name}ForCausalLM"),
    ]  # fmt: skip
    if more:
        last = '    "num_key_value_heads": 2,\n'
        changes.append((last, last + more))
    return changes


ENCODER_AND_DECODER = """TINY = {"d_model": 128, "encoder_layers": 2, "decoder_layers": 2}
TINY |= {"encoder_ffn_dim": 512, "decoder_ffn_dim": 512}"""
TWO_STACKS = """STACK = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
STACK |= {"intermediate_size": 256, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 384}
TINY = {"encoder": STACK, "decoder": STACK}"""
LAYERS = 'TINY = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}'
WIDER = '\nTINY |= {"intermediate_size": 512}'
EXPERTS = '    "num_experts": 4,\n    "num_experts_per_tok": 2,\n    "moe_intermediate_size": 64,\n'
CASES = {  # name of the copy: (script, changes, class in Transformers)
    "bart": ("T5_training", from_t5(
        "bart", "BartForConditionalGeneration", "BartDecoderLayer, BartEncoderLayer",
        ENCODER_AND_DECODER), transformers.BartForConditionalGeneration),
    "t5gemma": ("T5_training", from_t5(
        "t5gemma", "T5GemmaForConditionalGeneration", "T5GemmaDecoderLayer, T5GemmaEncoderLayer",
        TWO_STACKS), transformers.T5GemmaForConditionalGeneration),
    "opt": ("gpt2_fsdp", from_gpt2(
        "opt", "OPTForCausalLM", "OPTDecoderLayer", LAYERS + '\nTINY |= {"ffn_dim": 512}'),
        transformers.OPTForCausalLM),
    "phi": ("gpt2_fsdp", from_gpt2(
        "phi", "PhiForCausalLM", "PhiDecoderLayer", LAYERS + WIDER),
        transformers.PhiForCausalLM),
    "qwen3": ("llama_fsdp", from_llama("qwen3", "Qwen3", '    "head_dim": 32,\n'),
        transformers.Qwen3ForCausalLM),
    "mistral": ("llama_fsdp", from_llama("mistral", "Mistral"), transformers.MistralForCausalLM),
    "gemma3": ("llama_fsdp", from_llama("gemma3", "Gemma3", '    "head_dim": 32,\n'),
        transformers.Gemma3ForCausalLM),
    "qwen3_moe": ("llama_fsdp", from_llama("qwen3_moe", "Qwen3Moe", EXPERTS),
        transformers.Qwen3MoeForCausalLM),
}  # fmt: skip
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
    "T5_training": ["--source-length", "128", "--target-length", "32"],
    "gpt2_fsdp": ["--block-size", "64"],
    "llama_fsdp": ["--max-seq-length", "128"],
}


def copy_script(script: str, changes: list[tuple[str, str]], name: str, folder: Path) -> Path:
    """Write a changed copy of a script, with the files it imports, to `folder`; return its path."""
    text = (ROOT / f"{script}.py").read_text()
    (folder / "runtime").mkdir()
    for file in needed_files(ROOT / f"{script}.py"):
        shutil.copy(file, folder / file.relative_to(ROOT))
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / f"{name}.py"
    path.write_text(text)
    return path


def import_copy(path: Path) -> ModuleType:
    """Import the copy and return the module."""
    spec = importlib.util.spec_from_file_location(f"copied_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", CASES)
def test_copy_changes_at_most_eight_lines(name, process_group, tmp_path):
    script, changes, model_class = CASES[name]
    path = copy_script(script, changes, name, tmp_path)
    config = ["--config", ROOT / "pyproject.toml"]
    ruff = [sys.executable, "-m", "ruff"]
    subprocess.run([*ruff, "format", "--quiet", *config, path], check=True)
    subprocess.run([*ruff, "check", "--quiet", *config, path], check=True)
    before = (ROOT / f"{script}.py").read_text().splitlines()
    diff = difflib.unified_diff(before, path.read_text().splitlines(), n=0, lineterm="")
    added = [line for line in diff if re.match(r"\+(?!\+\+ )", line)]
    print(name, len(added), "added lines")  # pytest -s shows it
    assert 0 < len(added) <= 8

    copy = import_copy(path)
    args = parse_flags(copy, ["--model-name", "tiny", "--dataset", "docstrings"])
    model, facts, _ = copy.load_model(args, torch.device("cpu"))
    tokenizer = facts.tokenizer
    assert isinstance(model, model_class) and type(model).__name__ == model_class.__name__
    assert sum(parameter.numel() for parameter in model.parameters()) < 3e6
    assert model.config.pad_token_id in (tokenizer.pad_token_id, None)
    assert not any(value for key, value in vars(model.config).items() if "layerdrop" in key)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    for block in copy.BLOCKS:
        assert any(isinstance(module, block) for module in model.modules())
    decayed, others = parameter_groups(model, facts.shapes, weight_decay=0.1)
    assert all(parameter.dim() > 1 for parameter in decayed["params"])
    assert all(parameter.dim() == 1 for parameter in others["params"])


def byte_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return a tokenizer with bytes as tokens, padding 0 and EOS 1."""
    if CASES[name][0] != "llama_fsdp":
        return ByT5Tokenizer()
    # For some of these models Transformers reads tokenizers only from a tokenizer.json.
    tokens = ["<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")


def save_model(name: str, path: Path) -> Path:
    """Save a small model and a byte tokenizer; return the directory. No weight keeps its initial
    0 or 1."""
    torch.manual_seed(0)
    model_class = CASES[name][2]
    config = model_class.config_class(
        vocab_size=384, bos_token_id=None, eos_token_id=1, **SHAPES[name]
    )
    model = model_class(config)
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            tensor.add_(torch.randn_like(tensor), alpha=0.2)
    model.save_pretrained(path, save_original_format=False)  # keep experts stacked as in the model
    byte_tokenizer(name).save_pretrained(path)
    return path


def data_flags(script: str, pairs: Path, texts: tuple, chats: Path) -> list[str]:
    """Return the flags of the script for data, lengths, learning rate and logging."""
    if script == "T5_training":
        data = ["--dataset", pairs, "--rouge-samples", "2"]
    elif script == "gpt2_fsdp":
        data = ["--dataset", texts[0], "--val-dataset", texts[1]]
    else:
        data = ["--dataset", chats, "--export-dtype", "fp32"]
    return [*map(str, data), *SHORT[script], "--lr", "1e-2", "--log-every", "1"]


def samples(script: str, flags: list[str], split: str) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the samples of a split as inputs of a Transformers model, each a batch of one."""
    args = parse_flags(importlib.import_module(script), flags)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name)
    if script == "llama_fsdp":
        tokenizer.chat_template = LLAMA_2
    train_set, val_sets = importlib.import_module(script).data.load(args, tokenizer)
    rows = train_set if split == "train" else val_sets.popitem()[1]
    for row in getattr(rows, "dataset", rows).with_format(None):
        row.setdefault("labels", row["input_ids"])  # GPT-2's data has no labels
        yield {key: torch.tensor([row[key]]) for key in ("input_ids", "labels")}


def plain_logits(
    model: PreTrainedModel, sample: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Transformers' logits and the targets of one sample."""
    if model.config.is_encoder_decoder:
        return model(**sample).logits[0], sample["labels"][0]
    return model(sample["input_ids"][:, :-1]).logits[0], sample["labels"][0, 1:]


@torch.no_grad()
def plain_loss(model: PreTrainedModel, samples: list[dict[str, torch.Tensor]]) -> float:
    """Return the mean loss of Transformers' logits over the target tokens, sample by sample."""
    model.eval()
    total = 0.0
    count = 0
    for sample in samples:
        logits, targets = plain_logits(model, sample)
        total += F.cross_entropy(logits.double(), targets, reduction="sum").item()
        count += int((targets != -100).sum())
    return total / count


def plain_gradient(
    model: PreTrainedModel, samples: list[dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Return the gradient of `plain_loss` by parameter name."""
    model.eval()
    count = 0
    for sample in samples:
        logits, targets = plain_logits(model, sample)
        F.cross_entropy(logits, targets, reduction="sum").backward()
        count += int((targets != -100).sum())
    named = model.named_parameters()
    return {name: p.grad / count for name, p in named if p.grad is not None}


@pytest.fixture(scope="module")
def trained_copies(
    tmp_path_factory: pytest.TempPathFactory, pairs: Path, texts: tuple, chats: Path
) -> Path:
    """Train each copy for two steps on two ranks under FSDP2. Return the folder with their models
    and outputs. The first step uses all samples."""
    folder = tmp_path_factory.mktemp("trained")
    cases = {}
    for name, (script, changes, _) in CASES.items():
        model, output = save_model(name, folder / name / "model"), folder / name / "output"
        flags = ["--model-name", str(model), "--output-dir", str(output), "--fsdp", "2"]
        flags += ["--max-steps", "2", "--batch-size", "64", "--save-every", "0"]
        cases[name] = [script, dict(changes), flags + data_flags(script, pairs, texts, chats)]
    (folder / "cases.json").write_text(json.dumps(cases))
    launch(2, "tests/workers/templates_worker.py", folder / "cases.json")
    return folder


@pytest.mark.parametrize("name", CASES)
def test_copy_trains_and_exports_like_plain_pytorch(trained_copies, name):
    """Compare the loss before and after training, and the first gradient."""
    script, _, model_class = CASES[name]
    output = trained_copies / name / "output"
    flags = json.loads((trained_copies / "cases.json").read_text())[name][2]
    held_out = list(samples(script, flags, "validation"))
    model = model_class.from_pretrained(trained_copies / name / "model")
    first, *_, last = metrics(output, "val")
    loss_error = first["loss"] - plain_loss(model, held_out)
    expected = plain_gradient(model, list(samples(script, flags, "train")))
    gradients = torch.load(output / "gradient.pt")
    assert gradients.keys() == expected.keys()
    errors = [(gradients[key] - expected[key]).norm() for key in expected]
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    gradient_error = torch.stack(errors).norm() / norm
    final, report = model_class.from_pretrained(output / "final", output_loading_info=True)
    assert not any(report.values()), report
    export_error = last["loss"] - plain_loss(final, held_out)
    print(name, f"loss {loss_error:.1e}, gradient {gradient_error:.1e}, export {export_error:.1e}")
    assert abs(loss_error) < 1e-5 and gradient_error < 1e-4 and abs(export_error) < 1e-4
    assert abs(first["loss"] - last["loss"]) > 1e-3
