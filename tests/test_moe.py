"""Mixtures of experts as the hub has them: stored one by one, and stacked while they are read."""

import importlib
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from conftest import ROOT, launch, metrics, status, weights
from test_hf_files import EXPORT, GROUPED, check_equal, new_model, streamed
from test_templates import byte_tokenizer, copy_script, plain_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

import chat_dataset
import llama_fsdp
from runtime import hf_export, hf_load, models, stored_tensors
from runtime.chats import LLAMA_2

# Twelve experts, so that their order by number is not that of their keys.
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "max_position_embeddings": 128}
SHAPES = {
    "Qwen3Moe": GROUPED | EXPERTS | {"num_experts": 12},
    "Mixtral": GROUPED | EXPERTS | {"num_local_experts": 12},
    "DeepseekV3": GROUPED
    | EXPERTS
    | {
        "num_key_value_heads": 4,
        "n_routed_experts": 12,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
}
KEYS = {  # of an expert's first matrix in the hub's files
    "Qwen3Moe": "model.layers.1.mlp.experts.10.gate_proj.weight",
    "Mixtral": "model.layers.1.block_sparse_moe.experts.10.w1.weight",
    "DeepseekV3": "model.layers.1.mlp.experts.10.gate_proj.weight",
}
MODULES = {"Qwen3Moe": "qwen3_moe", "Mixtral": "mixtral", "DeepseekV3": "deepseek_v3"}
STACKED = "model.layers.1.mlp.experts.gate_up_proj"


def class_of(name: str) -> type[PreTrainedModel]:
    """Transformers' causal language model of a family."""
    return getattr(transformers, f"{name}ForCausalLM")


@pytest.fixture
def made(name: str) -> PreTrainedModel:
    """A random model none of whose tensors is constant."""
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    model = new_model(class_of(name), **SHAPES[name], **ids)
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            tensor.add_(torch.randn_like(tensor), alpha=0.1)
    return model


@pytest.fixture
def directory(name: str, made: PreTrainedModel, tmp_path: Path) -> Path:
    """Its files, as the hub has them, and a byte tokenizer."""
    path = tmp_path / "model"
    made.save_pretrained(path, max_shard_size="60KB")
    byte_tokenizer("qwen3").save_pretrained(path)
    assert KEYS[name] in weights(path) and len(list(path.glob("*.safetensors"))) > 2
    return path


@pytest.mark.parametrize("name", SHAPES)
def test_experts_are_loaded_and_exported_as_by_transformers(
    name: str,
    made: PreTrainedModel,
    directory: Path,
    alone: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every tensor of `from_pretrained`, and every key and value of `save_pretrained`."""
    model_class = class_of(name)
    with monkeypatch.context() as patch:  # rank 0 reads for all
        patch.setattr(hf_load, "_everyone_sees", lambda *_: False)
        check_equal(streamed(model_class, directory).module.state_dict(), made.state_dict())
    loaded = streamed(model_class, directory)
    check_equal(loaded.module.state_dict(), made.state_dict(), least=20)
    for model in (loaded, DDP(made), DDP(made)):  # new ones too, such as `tiny`, and once more
        hf_export.export_model(model, ByT5Tokenizer(), tmp_path / "exported", EXPORT)
        check_equal(weights(tmp_path / "exported"), weights(directory), least=40)
    again = model_class.from_pretrained(tmp_path / "exported")
    check_equal(again.state_dict(), made.state_dict(), least=20)
    # Files that hold them stacked keep them so.
    made.save_pretrained(tmp_path / "stacked", save_original_format=False)
    assert STACKED in weights(tmp_path / "stacked")
    loaded = streamed(model_class, tmp_path / "stacked")
    check_equal(loaded.module.state_dict(), made.state_dict(), least=20)
    hf_export.export_model(loaded, ByT5Tokenizer(), tmp_path / "exported", EXPORT)
    check_equal(weights(tmp_path / "exported"), weights(tmp_path / "stacked"), least=20)


@pytest.mark.parametrize("name", ["Mixtral"])
def test_rows_are_read_alone(
    name: str, made: PreTrainedModel, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank reads the experts of its shard, one at a time, and no others."""
    with torch.device("meta"):
        model = class_of(name)(made.config)
    stored = hf_load._find_weights(model, directory)[STACKED]
    keys = []
    read = stored_tensors.read

    def noted(path: Path, key: str) -> torch.Tensor:
        keys.append(key)
        return read(path, key)

    monkeypatch.setattr(stored_tensors, "read", noted)
    rows = stored.under(directory).read_rows(9, 11)
    assert torch.equal(rows, made.get_parameter(STACKED)[9:11])
    stem = KEYS[name].removesuffix("10.w1.weight")
    assert keys == [f"{stem}{i}.{part}.weight" for i in (9, 10) for part in ("w1", "w3")]


def test_memory_of_a_stacked_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside it some rows are held, not as much again, as if it were stacked whole."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    memory = importlib.import_module("common").AnonymousMemory
    shape = GROUPED | {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1}
    model = new_model(class_of("Mixtral"), **shape, num_local_experts=32)
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = class_of("Mixtral")(model.config)
    stored = hf_load._find_weights(empty, tmp_path)["model.layers.0.mlp.experts.gate_up_proj"]
    size = 4e-6 * math.prod(stored.shape)
    assert size > 130
    stored.read_rows(0, 1)
    with memory() as anonymous:
        tensor = stored.read()
    assert tensor.shape == (32, 2048, 512)
    assert 0.9 * size < anonymous.peak - anonymous.first < 1.5 * size


@pytest.mark.parametrize("name", ["Qwen3Moe"])
@pytest.mark.parametrize("others", ["gate_proj", "down_proj"])
def test_experts_that_are_missing(
    name: str, others: str, made: PreTrainedModel, directory: Path, alone: None
) -> None:
    """One matrix of one expert: the sentence names what should have been made of it."""
    key = KEYS[name].replace("gate_proj", others)
    tensors = weights(directory)
    del tensors[key]
    shutil.rmtree(directory)
    made.save_pretrained(directory, state_dict=tensors)
    said = f"{STACKED} cannot be made of 11 of mlp.experts.*.gate_proj.weight, 12 of"
    if others == "down_proj":
        said = "experts.0.down_proj.weight has shape [11, 32, 16], not [12, 32, 16]"
    with pytest.raises(ValueError, match=re.escape(said)):
        streamed(class_of(name), directory)


@pytest.mark.parametrize("name", ["Qwen3Moe"])
@pytest.mark.parametrize(
    "operations",
    [
        [MergeModulelist(dim=1), Concatenate(dim=1)],
        [MergeModulelist(dim=0), Concatenate(dim=0)],
        [Concatenate(dim=0)],
    ],
)
def test_another_conversion_is_refused_before_anything_is_read(
    name: str,
    operations: list,
    made: PreTrainedModel,
    directory: Path,
    alone: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What another version of Transformers may do; the sentence says how to convert the files."""
    sources = ["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"]
    other = WeightConverter(sources, "mlp.experts.gate_up_proj", operations)
    mapping = models.get_model_conversion_mapping

    def with_other(model: PreTrainedModel, add_legacy: bool) -> list:
        return [other, *mapping(model, add_legacy=add_legacy)[1:]]

    monkeypatch.setattr(models, "get_model_conversion_mapping", with_other)
    with monkeypatch.context() as patch, pytest.raises(ValueError) as error:
        patch.setattr(stored_tensors, "read", None)
        streamed(class_of(name), directory)
    assert "experts.0.gate_proj.weight, and to make model.layers.0" in str(error.value)
    assert "save_pretrained(..., save_original_format=False)" in str(error.value)
    # A new model is written under its own names, which from_pretrained knows as well.
    hf_export.export_model(DDP(made), ByT5Tokenizer(), tmp_path / "new", EXPORT)
    assert STACKED in weights(tmp_path / "new")
    again = class_of(name).from_pretrained(tmp_path / "new")
    check_equal(again.state_dict(), made.state_dict())


@pytest.mark.parametrize("name", ["Mixtral"])
@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("output_router_logits", True, "auxiliary loss is not added here"),
        ("quantization_config", {"quant_method": "fp8"}, r"stored quantized \(fp8\)"),
    ],
)
def test_what_the_config_asks_for_in_vain(
    name: str, setting: str, value: object, said: str, directory: Path
) -> None:
    """Refused before any file of weights is opened; without it the same config is taken."""
    model_class = class_of(name)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {setting: value}))
    with pytest.raises(ValueError, match=said):
        hf_load.load_config(directory, model_class, str(directory))
    path.write_text(json.dumps(config))
    assert hf_load.load_config(directory, model_class, str(directory)).num_local_experts == 12


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
    (folder / "tests").mkdir(parents=True)
    shutil.copy(ROOT / "tests/killed.py", folder / "tests")
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
def test_two_ranks(
    name: str, fsdp: int, copy: Path, directory: Path, flags: list[str], chats: Path, tmp_path: Path
) -> None:
    """Killed and resumed to the last bit; the loss before and after is that of Transformers."""
    output = tmp_path / "output"
    flags += ["--fsdp", str(fsdp)]
    kill = [copy.parent / "tests/killed.py", copy.stem, 0, 4]
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mixtral"])
def test_adapters(name: str, copy: Path, directory: Path, flags: list[str], tmp_path: Path) -> None:
    """Experts get none, which is said once; merged, they stand in the files as they stood."""
    pytest.importorskip("peft")
    flags += ["--lora-rank", "4", "--merge", "--lora-targets", "q_proj", "o_proj"]
    said = launch(2, copy, *flags, cwd=copy.parent).stdout
    line = "the experts (down_proj, gate_up_proj) get no adapters and stay frozen, as float32"
    assert said.count(line) == 1 and f"{line}: --lora-targets are q_proj o_proj" in said
    final = tmp_path / "output/final"
    base, merged = weights(directory), weights(final)
    assert base.keys() == merged.keys()
    changed = {key for key in base if not torch.equal(base[key], merged[key])}
    assert len(changed) == 4 and all(re.search(r"self_attn\.[qo]_proj", key) for key in changed)
    _, report = class_of(name).from_pretrained(final, output_loading_info=True)
    assert not any(report.values()), report
