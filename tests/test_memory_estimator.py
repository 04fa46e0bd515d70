"""Compare tools/memory_estimator.py with measured memory and published figures."""

import gc
import importlib
import importlib.util
import json
import re
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import ROOT, launch
from copied import edited_text
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import policies
from benchmarks import published
from core import ranks
from optional import fused_norms
from tools import memory_estimator

STATES = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
ODD_SIZES = {  # small models by script; all flat parameters need padding
    "llama_fsdp": {"hidden_size": 39, "intermediate_size": 61, "num_hidden_layers": 3,
                   "head_dim": 6, "num_attention_heads": 3, "num_key_value_heads": 1},
    "gpt2_fsdp": {"n_embd": 38, "n_layer": 3, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1,
                  "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0},
    "T5_training": {"d_model": 34, "d_kv": 6, "d_ff": 61, "num_layers": 2, "num_heads": 3,
                    "dropout_rate": 0.0, "decoder_start_token_id": 0},
}  # fmt: skip
LLAMA_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
               "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 384}  # fmt: skip
HAS_EXTRAS = importlib.util.find_spec("bitsandbytes") is not None
DOCUMENT = (ROOT / "docs/memory.md").read_text()
needs_extras = pytest.mark.skipif(not HAS_EXTRAS, reason="needs requirements-extras.txt")


def read(*flags: object) -> tuple[Any, memory_estimator.Model]:
    """Return the parsed arguments and the model that they describe."""
    args = memory_estimator.parse_args(list(map(str, flags)))
    return args, memory_estimator.Model(args)


@pytest.fixture(scope="session")
def odd_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return paths, by script, of models of ODD_SIZES."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("odd")
    for script, sizes in ODD_SIZES.items():
        model = importlib.import_module(script).MODEL
        model(model.config_class(vocab_size=385, **sizes)).save_pretrained(root / script)
        transformers.ByT5Tokenizer().save_pretrained(root / script)
    return {script: root / script for script in ODD_SIZES}


@needs_extras
@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_estimates_equal_measured_memory(nodes, odd_models, tmp_path):
    """Padding is not counted: tiny models have none, in odd and 4-bit ones it is at most 10%.
    All ranks together hold two moments for each copy of the model."""
    models = {}
    for script, path in odd_models.items():
        for strategy in memory_estimator.STRATEGIES:
            models[f"{script} {strategy}"] = [path, "fp32"]
        models[f"{script} full_shard bf16"] = [path, "bf16"]
        models[f"{script} full_shard tiny"] = ["tiny", "fp32"]
    llama = odd_models["llama_fsdp"]
    models["llama_fsdp full_shard lora"] = [llama, "bf16", "--lora-rank", "8"]
    models["llama_fsdp full_shard nf4"] = ["tiny", "bf16", "--lora-rank", "8", "--load-in-4bit"]
    commands = {}
    for key, (path, *flags) in models.items():
        script, strategy, *_ = key.split()
        flags = ["--model-name", str(path), "--strategy", strategy, "--precision", *flags]
        if script == "llama_fsdp":
            flags += ["--attention", "sdpa"]  # the worker does not pack documents
        if strategy == "hybrid_shard":
            flags += ["--shard-group-size", "2"]
        commands[key] = script, flags
    output = tmp_path / "sizes.json"
    launch(2 * nodes, "tests/workers/estimator_worker.py", output, json.dumps(commands))
    measured = json.loads(output.read_text())
    tiny = {"llama_fsdp": "tiny", "gpt2_fsdp": "tiny-gpt2", "T5_training": "tiny-t5"}
    for key, (path, *flags) in models.items():
        script, strategy, *_ = key.split()
        name = tiny[script] if path == "tiny" else path
        machine = ["--nodes", nodes, "--gpus-per-node", 2, "--seq-length", 8]
        args, model = read("--model-name", name, *machine, "--precision", *flags)
        rows = memory_estimator.estimates(model, args)
        estimates = {row["strategy"]: row for row in rows if not row["cpu_offload"]}
        estimate, ranks = estimates[strategy], measured[key]
        is_exact = path == "tiny" and "--load-in-4bit" not in flags
        padding = 0 if is_exact else 0.1
        if "--lora-rank" in flags:
            ranks = ranks[:1]  # the others have fewer rows
        for rank in ranks:
            for state in STATES:
                assert rank[state] == pytest.approx(estimate[state], rel=padding), (key, state)
        if "--lora-rank" in flags:
            continue
        copies = {"ddp": 2 * nodes, "hybrid_shard": nodes}.get(strategy, 1)
        moments = sum(rank["optimizer_bytes"] for rank in ranks)
        assert moments == 2 * copies * estimates["ddp"]["parameter_bytes"], key


class Storages(TorchDispatchMode):
    """Record the storages that operators return, without keeping them alive."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        """Call the operator and record its results."""
        output = function(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(output):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self.sizes[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return output


@pytest.mark.parametrize("script, attention, kind", [
    ("llama_fsdp", "sdpa", "none"), ("gpt2_fsdp", "sdpa", "none"), ("T5_training", "eager", "none"),
    ("llama_fsdp", "sdpa", "blocks"), ("gpt2_fsdp", "sdpa", "blocks"),
    ("llama_fsdp", "sdpa", "selective"), ("gpt2_fsdp", "sdpa", "selective"),
])  # fmt: skip
def test_activation_estimate_equals_live_storages(script, attention, kind, odd_models):
    flags = ["--model-name", odd_models[script], "--precision", "fp32", "--batch-size", 2]
    flags += ["--attention", {"sdpa": "fused"}.get(attention, attention), "--seq-length", 12]
    _, estimated = read(*flags, "--target-length", 12)
    expected, _ = estimated.activations[kind]
    module = importlib.import_module(script)
    options = {"attn_implementation": attention, "dtype": torch.float32}
    if script == "gpt2_fsdp":
        options["activation_function"] = "gelu_pytorch_tanh"
    model = module.MODEL.from_pretrained(odd_models[script], **options).train()
    if script != "gpt2_fsdp":
        fused_norms.fuse(model)
    if kind != "none":
        args = policies.Sharding(activation_checkpointing=kind)
        policies.checkpoint_blocks(model, module.BLOCKS, args)
    with Storages() as storages:
        ids = torch.arange(24).reshape(2, 12)
        inputs = {"decoder_input_ids": ids.clone()} if script == "T5_training" else {}
        logits = model(ids, use_cache=False, **inputs).logits
        gc.collect()
    for tensor in (*model.parameters(), logits):
        storages.sizes.pop(tensor.untyped_storage()._cdata, None)
    alive = sum(size for reference, size in storages.sizes.values() if not reference.expired())
    assert alive == expected


def test_documented_flops_equal_those_of_a_step_on_meta():
    """docs/memory.md says how many FLOPs recomputation adds to a step of Llama 2 7B."""
    args, _ = read("--seq-length", 2048)  # registers the attention
    config = memory_estimator.load_config(args.model_name)
    # The counter does not know the attention kernel for CPUs.
    aten = torch.ops.aten
    mapping = {
        aten._scaled_dot_product_flash_attention_for_cpu: (
            lambda query, key, *_, **__: 4 * query.numel() * key[2]
        ),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda gradient, query, key, *_, **__: 8 * query.numel() * key[2]
        ),
    }
    counts = {}
    for kind in memory_estimator.RECOMPUTED:
        model, blocks = memory_estimator.build(importlib.import_module("llama_fsdp"), config)
        if kind != "none":
            sharding = policies.Sharding(activation_checkpointing=kind)
            policies.checkpoint_blocks(model, blocks, sharding)
        ids = torch.empty(1, 2048, dtype=torch.int64, device="meta")
        with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
            model(ids, attention_mask=ids, use_cache=False).logits.sum().backward()
        counts[kind] = counter.get_total_flops()
        cell = f"| {counts[kind] / counts['none']:.2f} |"
        assert re.search(rf"\| `{kind}` \|.*{re.escape(cell)}", DOCUMENT), (kind, cell)


@needs_extras
def test_estimates_are_near_published_measurements():
    errors = [abs(error) for *_, error in published.compare()]
    assert len(errors) >= 8
    assert statistics.median(errors) <= 0.1 and max(errors) <= 0.25


@pytest.mark.parametrize("flags, strategy, peak, nodes", [
    ("", "full_shard, recomputed", "15.51", 1),
    ("--model-name meta-llama/Llama-2-7b-hf", "ddp, recomputed", "122.83", None),
    ("--model-name llama-2-70b", "full_shard, recomputed", "145.68", 3),
    ("--model-name llama-2-70b --fsdp 2 --nodes 2", "full_shard, offload, recomputed", "10.58", 1),
    ("--model-name llama-2-70b --precision fp16 --fsdp 2", "full_shard, recomputed", "145.68", 3),
    ("--lora-rank 16 --load-in-4bit --gpus-per-node 1 --gpu-memory-gb 24",
     "full_shard, recomputed", "5.73", 1),
])  # fmt: skip
def test_tables_say_what_fits(flags, strategy, peak, nodes, monkeypatch, capsys):
    for name in ("peft", "bitsandbytes"):  # not needed
        monkeypatch.setitem(sys.modules, name, None)
    memory_estimator.main(flags.split())
    table = capsys.readouterr().out.split("\n\n")[1]
    rows = {line[:34].strip(): line[34:].split() for line in table.splitlines()}
    cells = dict(zip(memory_estimator.COLUMNS, rows[strategy], strict=True))
    assert cells["step"] == peak
    assert [cells["fits"], cells["nodes"]] == [str(nodes == 1), str(nodes)]


@pytest.mark.parametrize("flags, script, words", [
    ("--model-name llama-2-70b", "llama_fsdp",
     "selective --max-seq-length 2048 --cpu-offload"),
    ("--model-name llama-2-70b --nodes 3", "llama_fsdp", "--rdzv-endpoint HOST:29500"),
    ("--model-name tiny-t5 --fsdp 2", "T5_training", "--target-length 64 --fsdp 2"),
    ("--model-name gpt2-xl --batch-size 4", "gpt2_fsdp", "openai-community/gpt2-xl"),
    ("--lora-rank 8 --lora-targets q_proj v_proj", "llama_fsdp", "--lora-targets q_proj v_proj"),
])  # fmt: skip
def test_command_of_what_fits_is_accepted_by_the_script(
    flags, script, words, tmp_path, monkeypatch, capsys
):
    memory_estimator.main(flags.split())
    line = capsys.readouterr().out.splitlines()[-1]
    command, program, rest = line.partition(f" {script}.py ")
    assert program and words in line and command.startswith("torchrun --nnodes ")
    (tmp_path / "rows.jsonl").write_text('{"text": "a", "headline": "b"}\n')
    data = ["--dataset", str(tmp_path / "rows.jsonl"), "--output-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [script, *rest.split(), *data])
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "0")
    args = importlib.import_module(script).parse_args()
    assert args.sharding.strategy == "full_shard"


def test_defaults_of_a_copy_are_estimated(tmp_path, capsys):
    old = "field(default_factory=block_dataset.Data)"
    new = "field(default_factory=lambda: block_dataset.Data(block_size=512))"
    (tmp_path / "my_script.py").write_text(edited_text("gpt2_fsdp", {old: new}))
    memory_estimator.main(["--model-name", "gpt2", "--script", str(tmp_path / "my_script.py")])
    assert "seq_length=512," in capsys.readouterr().out


@pytest.mark.parametrize("name, sizes, block, units", [
    ("MixtralConfig", LLAMA_SIZES | {"num_local_experts": 4}, "MixtralDecoderLayer", 5),
    ("GPTNeoXConfig", LLAMA_SIZES, "GPTNeoXLayer", 5),
    ("BartConfig", {"d_model": 32, "encoder_layers": 2, "decoder_layers": 3}, "BartEncoderLayer",
     6),
    ("Gemma3Config", {"text_config": LLAMA_SIZES | {"head_dim": 8}}, "Gemma3DecoderLayer", 3),
])  # fmt: skip
def test_other_architectures_are_estimated(name, sizes, block, units, tmp_path, capsys):
    config = getattr(transformers, name)(**sizes)
    config.save_pretrained(tmp_path)
    memory_estimator.main(["--model-name", str(tmp_path), "--seq-length", "64"])
    assert f" in {units} units\n" in capsys.readouterr().out
    args, model = read("--model-name", tmp_path, "--seq-length", 64)
    script = memory_estimator.load_script(args, config)
    built, blocks = memory_estimator.build(script, config)
    assert block in {x.__name__ for x in blocks}
    kept = [model.activations[kind][0] for kind in memory_estimator.RECOMPUTED]
    assert model.parameters == built.num_parameters() and kept[0] > kept[1] > kept[2]


def test_unknown_model_is_refused(process_group):
    with pytest.raises(ranks.Problem, match="lama-2-7b is not a directory, and not available"):
        memory_estimator.load_config("lama-2-7b")


def test_table_of_recomputation_matches_the_estimator():
    args, model = read("--seq-length", 2048)
    for kind in memory_estimator.RECOMPUTED:
        row = memory_estimator.estimate(model, replace(args, activation_checkpointing=kind))
        cells = f"| {row['activation_bytes'] / 1e9:.2f} |"
        assert re.search(rf"\| `{kind}` \|.*{re.escape(cells)}", DOCUMENT), kind


def test_saves_of_fsdp2_and_ddp_copy_one_tensor_at_a_time():
    args, model = read("--model-name", "llama-2-7b", "--gpus-per-node", 8)
    embedding = 4 * 32000 * 4096
    for changes, copied in (
        ({"fsdp": 2}, embedding / 8),
        ({"strategy": "ddp"}, embedding),
        ({"fsdp": 2, "cpu_offload": True}, 0),
    ):
        sizes = memory_estimator.memory(model, replace(args, **changes))
        assert sizes["save_cpu_bytes_per_node"] == 8 * copied
    adapters, adapted = read("--lora-rank", 8, "--lora-targets", "down_proj")
    sizes = memory_estimator.memory(adapted, adapters)
    assert sizes["save_cpu_bytes_per_node"] == 4 * 8 * 11008  # no frozen weights
    sizes = memory_estimator.memory(model, args)  # FSDP1
    assert sizes["save_cpu_bytes_per_node"] == pytest.approx(12 * model.parameters, rel=1e-3)
