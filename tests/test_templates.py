"""The scripts as templates: each is copied, changed to another model in a few lines, and run."""

import difflib
import importlib.util
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
from conftest import ROOT, launch, metrics, status
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    ByT5Tokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

import block_dataset
import chat_dataset
import summarization_dataset
from runtime import hf_weights
from runtime.optimization import note_decay, parameter_groups

# The changes: what stands in the script, and what takes its place.
BART = [
    (
        "from transformers.models.t5.modeling_t5 import T5Block",
        "from transformers.models.bart.modeling_bart import BartDecoderLayer, BartEncoderLayer",
    ),
    ("transformers.T5ForConditionalGeneration", "transformers.BartForConditionalGeneration"),
    ("BLOCKS = (T5Block,)", "BLOCKS = (BartEncoderLayer, BartDecoderLayer)"),
    (
        'TINY = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 4}',
        'TINY = {"d_model": 128, "encoder_layers": 2, "decoder_layers": 2}\n'
        'TINY |= {"encoder_ffn_dim": 512, "decoder_ffn_dim": 512}',
    ),
]
MT5 = [
    (
        "from transformers.models.t5.modeling_t5 import T5Block",
        "from transformers.models.mt5.modeling_mt5 import MT5Block",
    ),
    ("transformers.T5ForConditionalGeneration", "transformers.MT5ForConditionalGeneration"),
    ("BLOCKS = (T5Block,)", "BLOCKS = (MT5Block,)"),
]
GPT2_TINY = 'TINY = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 1024}'
OPT = [
    (
        "from transformers.models.gpt2.modeling_gpt2 import GPT2Block",
        "from transformers.models.opt.modeling_opt import OPTDecoderLayer",
    ),
    ("BLOCKS = (GPT2Block,)", "BLOCKS = (OPTDecoderLayer,)"),
    (
        GPT2_TINY,
        'TINY = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}\n'
        'TINY |= {"ffn_dim": 512}',
    ),
    ("transformers.GPT2LMHeadModel", "transformers.OPTForCausalLM"),
]
GPT_NEOX = [
    (
        "from transformers.models.gpt2.modeling_gpt2 import GPT2Block",
        "from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer",
    ),
    ("BLOCKS = (GPT2Block,)", "BLOCKS = (GPTNeoXLayer,)"),
    (
        GPT2_TINY,
        'TINY = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}\n'
        'TINY |= {"intermediate_size": 512}',
    ),
    ("transformers.GPT2LMHeadModel", "transformers.GPTNeoXForCausalLM"),
]
QWEN3 = [
    (
        "from transformers.models.llama.modeling_llama import LlamaDecoderLayer",
        "from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer",
    ),
    ("BLOCKS = (LlamaDecoderLayer,)", "BLOCKS = (Qwen3DecoderLayer,)"),
    ('    "num_key_value_heads": 2,\n', '    "num_key_value_heads": 2,\n    "head_dim": 32,\n'),
    ("transformers.LlamaForCausalLM", "transformers.Qwen3ForCausalLM"),
]
MISTRAL = [
    (
        "from transformers.models.llama.modeling_llama import LlamaDecoderLayer",
        "from transformers.models.mistral.modeling_mistral import MistralDecoderLayer",
    ),
    ("BLOCKS = (LlamaDecoderLayer,)", "BLOCKS = (MistralDecoderLayer,)"),
    ("transformers.LlamaForCausalLM", "transformers.MistralForCausalLM"),
]
QWEN2 = [
    (
        "from transformers.models.llama.modeling_llama import LlamaDecoderLayer",
        "from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer",
    ),
    ("BLOCKS = (LlamaDecoderLayer,)", "BLOCKS = (Qwen2DecoderLayer,)"),
    ("transformers.LlamaForCausalLM", "transformers.Qwen2ForCausalLM"),
]
CASES = {  # the name of a copy: its script, its changes, and the class in Transformers
    "bart": ("T5_training", BART, transformers.BartForConditionalGeneration),
    "mt5": ("T5_training", MT5, transformers.MT5ForConditionalGeneration),
    "opt": ("gpt2_fsdp", OPT, transformers.OPTForCausalLM),
    "gpt_neox": ("gpt2_fsdp", GPT_NEOX, transformers.GPTNeoXForCausalLM),
    "qwen3": ("llama_fsdp", QWEN3, transformers.Qwen3ForCausalLM),
    "mistral": ("llama_fsdp", MISTRAL, transformers.MistralForCausalLM),
    "qwen2": ("llama_fsdp", QWEN2, transformers.Qwen2ForCausalLM),
}
LIKE_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
SHAPES = {  # of the models in files; no dropout
    "bart": {
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 1,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "decoder_start_token_id": 2,  # not the padding, as in T5
        "dropout": 0.0,
    },
    "mt5": {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
        "dropout_rate": 0.0,
        "tie_word_embeddings": False,
    },
    "opt": {
        "hidden_size": 32,
        "word_embed_proj_dim": 16,  # a projection stands between the last block and the head
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "dropout": 0.0,
    },
    "gpt_neox": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    },
    "qwen3": {**LIKE_LLAMA, "head_dim": 16, "tie_word_embeddings": True},
    "mistral": {**LIKE_LLAMA, "sliding_window": 8},  # shorter than the documents
    "qwen2": LIKE_LLAMA,
}


SHORT = {  # texts as long as these models take
    "T5_training": ["--source-length", "128", "--target-length", "32"],
    "gpt2_fsdp": ["--block-size", "64"],
    "llama_fsdp": ["--max-seq-length", "128"],
}


def copy_script(script: str, changes: list[tuple[str, str]], name: str, folder: Path) -> Path:
    """A changed copy of a script in `folder`, with the files that its docstring names."""
    text = (ROOT / f"{script}.py").read_text()
    (needed,) = re.findall(r"copy this one with (.*?),\s+and\s+change", text, re.DOTALL)
    for part in re.findall(r"\w+\.py|\w+/", needed):
        if part.endswith("/"):
            shutil.copytree(ROOT / part, folder / part)
        else:
            shutil.copy(ROOT / part, folder)
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / f"{name}.py"
    path.write_text(text)
    return path


def import_copy(path: Path) -> ModuleType:
    """The copy as a module of this process."""
    spec = importlib.util.spec_from_file_location(f"copied_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", CASES)
def test_changes(name: str, tmp_path: Path) -> None:
    """At most eight added lines, without a lint; and what they do not touch fits the new model."""
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
    args = copy.parse_args(["--model-name", "tiny", "--dataset", "docstrings"])
    model, tokenizer, _ = copy.load_model(args, torch.device("cpu"), pretrained=True)
    assert isinstance(model, model_class) and type(model).__name__ == model_class.__name__
    assert sum(parameter.numel() for parameter in model.parameters()) < 3e6
    assert model.config.pad_token_id in (tokenizer.pad_token_id, None)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    for block in copy.BLOCKS:
        assert any(isinstance(module, block) for module in model.modules())
    note_decay(model)
    decayed, others = parameter_groups(model, weight_decay=0.1)
    assert all(parameter.dim() == 2 for parameter in decayed["params"])
    assert all(parameter.dim() == 1 for parameter in others["params"])


def byte_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Bytes as tokens, padding 0 and EOS 1."""
    if CASES[name][0] != "llama_fsdp":
        return ByT5Tokenizer()
    # For some of these models Transformers reads no tokenizer but from a tokenizer.json.
    tokens = ["<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")


@pytest.fixture
def directory(name: str, tmp_path: Path) -> Path:
    """A small model with a byte tokenizer as a Hugging Face directory; none of it is 0 or 1."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer(name)
    model_class = CASES[name][2]
    config = model_class.config_class(
        vocab_size=384, bos_token_id=None, eos_token_id=1, **SHAPES[name]
    )
    model = model_class(config)
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            tensor.add_(torch.randn_like(tensor), alpha=0.2)
    path = tmp_path / "model"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("name", CASES)
def test_load(name: str, directory: Path, alone: None, tmp_path: Path) -> None:
    """From its files the copy has the tensors that Transformers has, and the tokens."""
    script, changes, model_class = CASES[name]
    (tmp_path / "copy").mkdir()
    copy = import_copy(copy_script(script, changes, name, tmp_path / "copy"))
    flags = ["--dataset", "docstrings", "--model-name", str(directory), *SHORT[script]]
    model, tokenizer, init = copy.load_model(
        copy.parse_args(flags), torch.device("cpu"), pretrained=True
    )
    hf_weights.materialize(model, init)
    own = model_class.from_pretrained(directory).state_dict()
    assert model.state_dict().keys() == own.keys()
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, own[key]), key
    ids = tokenizer("Ab ü\n", add_special_tokens=False).input_ids
    assert len(ids) == 6 and tokenizer.decode(ids) == "Ab ü\n" and tokenizer.eos_token_id == 1


@pytest.mark.parametrize("name", ["bart"])
def test_texts_longer_than_the_model(
    name: str, directory: Path, alone: None, tmp_path: Path
) -> None:
    """BART counts its positions, as T5 does not: the flag is named."""
    (tmp_path / "copy").mkdir()
    copy = import_copy(copy_script("T5_training", BART, "bart", tmp_path / "copy"))
    flags = ["--dataset", "docstrings", "--model-name", str(directory), *SHORT["T5_training"]]
    for flag in ("--source-length", "--target-length"):
        args = copy.parse_args([*flags, flag, "129"])
        with pytest.raises(ValueError, match=f"{flag} 129 is above the model's 128 positions"):
            copy.load_model(args, torch.device("cpu"), pretrained=True)


@pytest.mark.parametrize("name", ["qwen2"])
def test_a_tokenizer_of_another_class(name: str, directory: Path, tmp_path: Path) -> None:
    """Transformers takes Qwen 2's whatever the directory holds, which may leave it empty."""
    path = tmp_path / "other"
    ByT5Tokenizer().save_pretrained(path)
    shutil.copy(directory / "config.json", path)
    with pytest.raises(ValueError, match="makes no tokens of a text"):
        hf_weights.load_tokenizer(path, vocab_size=384)


@pytest.fixture
def flags(name: str, directory: Path, request: pytest.FixtureRequest) -> list[str]:
    """Four steps on the data of the script's kind; the model has no position to spare."""
    script = CASES[name][0]
    if script == "T5_training":
        data = ["--dataset", request.getfixturevalue("pairs"), "--rouge-samples", "2"]
    elif script == "gpt2_fsdp":
        train, val = request.getfixturevalue("texts")
        data = ["--train-file", train, "--val-file", val]
    else:
        data = ["--dataset", request.getfixturevalue("chats"), "--export-dtype", "fp32"]
    flags = ["--model-name", directory, *data, *SHORT[script], "--max-steps", "4"]
    flags += ["--save-every", "2", "--batch-size", "2", "--lr", "1e-2", "--log-every", "1"]
    return [*map(str, flags)]


def validation_samples(script: str, flags: list[str]) -> Iterator[dict[str, torch.Tensor]]:
    """What the validation set holds, a sample at a time, as Transformers takes it."""
    args = importlib.import_module(script).parse_args(flags)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name)
    if script == "T5_training":
        _, rows = summarization_dataset.load_summarization(args, tokenizer, verbose=False)
    elif script == "gpt2_fsdp":
        rows = block_dataset.load_blocks(args, tokenizer, "validation", 0, verbose=False)
        rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows]
    else:
        tokenizer.chat_template = chat_dataset.TEMPLATE
        _, rows = chat_dataset.load_documents(args, tokenizer, args.dataset[0], verbose=False)
    for row in rows:
        yield {key: torch.tensor([row[key]]) for key in ("input_ids", "labels")}


@torch.no_grad()
def plain_loss(model: PreTrainedModel, samples: list[dict[str, torch.Tensor]]) -> float:
    """Mean over the target tokens of the loss of Transformers' logits, each sample by itself."""
    model.eval()
    total = 0.0
    count = 0
    for sample in samples:
        if model.config.is_encoder_decoder:
            targets = sample["labels"]
            logits = model(**sample).logits
        else:
            targets = sample["labels"][:, 1:]
            logits = model(sample["input_ids"][:, :-1]).logits
        total += F.cross_entropy(logits[0].double(), targets[0], reduction="sum").item()
        count += int((targets != -100).sum())
    return total / count


@pytest.mark.parametrize(
    "name",
    [
        "bart",
        pytest.param("mt5", marks=pytest.mark.slow),
        pytest.param("opt", marks=pytest.mark.slow),
        pytest.param("gpt_neox", marks=pytest.mark.slow),
        "qwen3",
        pytest.param("mistral", marks=pytest.mark.slow),
        pytest.param("qwen2", marks=pytest.mark.slow),
    ],
)
def test_run(name: str, directory: Path, flags: list[str], tmp_path: Path) -> None:
    """Killed and resumed in a folder of its own; each loss is Transformers' own."""
    script, changes, model_class = CASES[name]
    folder = tmp_path / "copy"
    (folder / "tests").mkdir(parents=True)
    shutil.copy(ROOT / "tests/killed.py", folder / "tests")
    path = copy_script(script, changes, name, folder)
    output = tmp_path / "output"
    flags = [*flags, "--output-dir", str(output)]
    kill = [folder / "tests/killed.py", name, 0, 4]
    assert launch(2, *kill, *flags, check=False, cwd=folder).returncode
    assert status(output) == "running"
    launch(2, path, *flags, cwd=folder)
    assert status(output) == "finished"
    assert [line["step"] for line in metrics(output, "start")] == [0, 2]
    assert [line["step"] for line in metrics(output, "train")] == [1, 2, 3, 4]

    samples = list(validation_samples(script, flags))
    first, *_, last = metrics(output, "val")
    assert (first["step"], last["step"]) == (0, 4)
    own = plain_loss(model_class.from_pretrained(directory), samples)
    final, report = model_class.from_pretrained(output / "final", output_loading_info=True)
    assert not any(report.values()), report
    after = plain_loss(final, samples)
    differences = first["loss"] - own, last["loss"] - after
    print(name, own, after, "differences", differences)  # pytest -s shows it
    assert max(map(abs, differences)) < 1e-4
    assert after < own
