"""Mixtures of experts in copies of llama_fsdp.py: trained, resumed and exported on two ranks."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from conftest import ROOT, launch, metrics, status, weights
from test_hf_files import GROUPED
from test_templates import byte_tokenizer, copy_script, plain_loss
from transformers import AutoTokenizer, PreTrainedModel

import chat_dataset
import llama_fsdp
from runtime.chats import LLAMA_2

EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "max_position_embeddings": 128}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
          "qk_rope_head_dim": 8, "v_head_dim": 16}  # fmt: skip
GROUPS = {"n_routed_experts": 12, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
SHAPES = {
    "Qwen3Moe": GROUPED | EXPERTS | {"num_experts": 12},
    "Mixtral": GROUPED | EXPERTS | {"num_local_experts": 12},
    "DeepseekV3": GROUPED | EXPERTS | LATENT | GROUPS,
}
MODULES = {"Qwen3Moe": "qwen3_moe", "Mixtral": "mixtral", "DeepseekV3": "deepseek_v3"}


def class_of(name: str) -> type[PreTrainedModel]:
    """Transformers' causal language model of a family."""
    return getattr(transformers, f"{name}ForCausalLM")


@pytest.fixture
def directory(name: str, tmp_path: Path) -> Path:
    """Return a random model none of whose tensors is constant, as the hub has it, and a byte
    tokenizer."""
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    torch.manual_seed(0)
    model = class_of(name)(class_of(name).config_class(**SHAPES[name], **ids))
    for tensor in model.state_dict().values():
        tensor.add_(torch.randn_like(tensor), alpha=0.1)
    path = tmp_path / "model"
    model.save_pretrained(path, max_shard_size="60KB")
    byte_tokenizer("qwen3").save_pretrained(path)
    return path


@pytest.fixture
def copy(name: str, tmp_path: Path) -> Path:
    """llama_fsdp.py for the family, in a folder of its own, with a script that kills it."""
    decoder = f"from transformers.models.{MODULES[name]}.modeling_{MODULES[name]} import "
    changes = [
        (
            "from transformers.models.llama.modeling_llama import LlamaDecoderLayer",
            f"{decoder}{name}DecoderLayer",
        ),
        ("BLOCKS = (LlamaDecoderLayer,)", f"BLOCKS = ({name}DecoderLayer,)"),
        ("MODEL = transformers.LlamaForCausalLM", f"MODEL = transformers.{name}ForCausalLM"),
    ]
    folder = tmp_path / "copy"
    (folder / "tests/workers").mkdir(parents=True)
    shutil.copy(ROOT / "tests/workers/killed.py", folder / "tests/workers")
    return copy_script("llama_fsdp", changes, "moe", folder)


@pytest.fixture
def flags(directory: Path, chats: Path, tmp_path: Path) -> list[str]:
    """Four steps; all steps logged and evaluated twice."""
    flags = ["--model-name", directory, "--dataset", chats, "--max-seq-length", 128]
    flags += ["--export-dtype", "fp32", "--batch-size", 2, "--lr", "1e-2", "--max-steps", 4]
    flags += ["--save-every", 2, "--log-every", 1, "--output-dir", tmp_path / "output"]
    return [*map(str, flags)]


def validation_samples(directory: Path, chats: Path) -> list[dict[str, torch.Tensor]]:
    """What the validation set holds, a document at a time, as Transformers takes it."""
    args = llama_fsdp.parse_args(["--dataset", str(chats), "--max-seq-length", "128"])
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = LLAMA_2
    _, sets = chat_dataset.load(args, tokenizer)
    rows = sets[args.dataset[0]].dataset.with_format(None)
    return [{key: torch.tensor([row[key]]) for key in ("input_ids", "labels")} for row in rows]


@pytest.mark.parametrize(
    ("name", "fsdp"),
    [
        ("Qwen3Moe", 2),
        pytest.param("Qwen3Moe", 1, marks=pytest.mark.slow),
        pytest.param("Mixtral", 1, marks=pytest.mark.slow),
        pytest.param("Mixtral", 2, marks=pytest.mark.slow),
        pytest.param("DeepseekV3", 2, marks=pytest.mark.slow),
    ],
)
def test_experts_train_resume_and_export_on_two_ranks(
    name: str, fsdp: int, copy: Path, directory: Path, flags: list[str], chats: Path, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    flags += ["--fsdp", str(fsdp)]
    kill = [copy.parent / "tests/workers/killed.py", copy.stem, 0, 4]
    assert launch(2, *kill, *flags, check=False, cwd=copy.parent).returncode
    assert status(output) == "running"
    lost = metrics(output, "train")[2]
    launch(2, copy, *flags, cwd=copy.parent)
    assert status(output) == "finished"
    assert [line["step"] for line in metrics(output, "start")] == [0, 2]
    again = metrics(output, "train")[2]
    for key in ("step", "loss", "grad_norm"):
        assert lost[key] == again[key], key

    samples = validation_samples(directory, chats)
    first, *_, last = metrics(output, "val")
    assert (first["step"], last["step"]) == (0, 4)
    model_class = class_of(name)
    own = plain_loss(model_class.from_pretrained(directory), samples)
    assert weights(output / "final").keys() == weights(directory).keys()
    final, report = model_class.from_pretrained(output / "final", output_loading_info=True)
    assert not any(report.values()), report
    after = plain_loss(final, samples)
    print(name, fsdp, own, after, first["loss"] - own, last["loss"] - after)  # pytest -s shows it
    assert first["loss"] == pytest.approx(own, abs=1e-6)
    assert last["loss"] == pytest.approx(after, abs=1e-6)
    assert after < own
