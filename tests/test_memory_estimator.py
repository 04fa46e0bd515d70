"""tools/memory_estimator.py against what ranks hold and send, and against published figures."""

import gc
import importlib
import importlib.util
import json
import shlex
import statistics
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import published
import pytest
import torch
import torch.distributed as dist
import transformers
from conftest import ROOT, launch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface

import policies
from runtime import ranks
from tools import memory_estimator

STATES = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
HAS_EXTRAS = importlib.util.find_spec("bitsandbytes") is not None
needs_extras = pytest.mark.skipif(not HAS_EXTRAS, reason="needs requirements-extras.txt")
RECOMPUTED = "--activation-checkpointing"


def read(*flags: object) -> tuple[Any, memory_estimator.Model]:
    """Return the arguments and the model."""
    args = memory_estimator.parse_args(list(map(str, flags)))
    return args, memory_estimator.read_model(args)


def rows(*flags: object) -> dict[str, dict]:
    """Return the rows by strategy; those with offload have " + offload" after it."""
    args, model = read(*flags)
    choices = memory_estimator.choices(model, args)
    estimates = [memory_estimator.estimate(model, args, *choice) for choice in choices]
    return {r["strategy"] + " + offload" * r["cpu_offload"]: r for r in estimates}


@pytest.fixture(scope="session")
def odd_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save small models without dropout whose flat parameters all need padding, by script."""
    torch.manual_seed(0)
    llama = transformers.LlamaConfig(
        hidden_size=39, intermediate_size=61, num_hidden_layers=3, head_dim=6, vocab_size=385,
        num_attention_heads=3, num_key_value_heads=1,
    )  # fmt: skip
    gpt2 = transformers.GPT2Config(
        n_embd=38, n_layer=3, n_head=2, vocab_size=385, embd_pdrop=0.0, resid_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    t5 = transformers.T5Config(
        d_model=34, d_kv=6, d_ff=61, num_layers=2, num_heads=3, dropout_rate=0.0, vocab_size=385,
        decoder_start_token_id=0,
    )  # fmt: skip
    root = tmp_path_factory.mktemp("odd")
    for script, config in (("llama_fsdp", llama), ("gpt2_fsdp", gpt2), ("T5_training", t5)):
        importlib.import_module(script).MODEL(config).save_pretrained(root / script)
        transformers.ByT5Tokenizer().save_pretrained(root / script)
    return {script: root / script for script in ("llama_fsdp", "gpt2_fsdp", "T5_training")}


@needs_extras
@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_bytes_held_and_sent_equal_those_measured(
    nodes: int, odd_models: dict[str, Path], tmp_path: Path
) -> None:
    """On nodes of two ranks, padding included: fp32, bf16, which pads differently, LoRA and 4 bits.
    DDP's collectives are not visible from Python. Optimizer states have no padding: rank 0's is
    estimated, and together the ranks hold two moments of each copy."""
    models = {}
    for script, path in odd_models.items():
        for strategy in dict(memory_estimator.MODES):
            models[f"{script} {strategy}"] = [path, "fp32"]
        models[f"{script} full_shard bf16"] = [path, "bf16"]
        models[f"{script} full_shard tiny"] = ["tiny", "fp32"]
    lora = [odd_models["llama_fsdp"], "bf16", "--lora-rank", "5"]
    models["llama_fsdp full_shard lora"] = lora
    models["llama_fsdp full_shard nf4"] = ["tiny", "bf16", "--lora-rank", "8", "--load-in-4bit"]
    commands = {}
    for key, (path, *flags) in models.items():
        script, strategy, *_ = key.split()
        flags = ["--model-name", str(path), "--strategy", strategy, "--precision", *flags]
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
        estimates = rows("--model-name", name, *machine, "--precision", *flags)
        ours, theirs = estimates[strategy], measured[key]
        assert {state: theirs[0][state] for state in STATES} == {x: ours[x] for x in STATES}, key
        if "--lora-rank" in flags:
            continue
        for rank in theirs:
            assert [rank[x] for x in STATES[:2]] == [ours[x] for x in STATES[:2]], key
            if strategy != "ddp":
                assert ours["sent_bytes_per_gpu"] == round(rank["sent_bytes_per_gpu"]), key
        copies = {"ddp": 2 * nodes, "hybrid_shard": nodes}.get(strategy, 1)
        moments = sum(rank["optimizer_bytes"] for rank in theirs)
        assert moments == 2 * copies * estimates["ddp"]["parameter_bytes"], key


class Storages(TorchDispatchMode):
    """Record all storages that operators return, without holding them."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        """Call the operator and record its results."""
        output = function(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(output):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return output


@pytest.mark.parametrize("script, attention, how", [
    ("llama_fsdp", "sdpa", None), ("gpt2_fsdp", "sdpa", None), ("T5_training", "eager", None),
    ("llama_fsdp", "sdpa", "blocks"), ("gpt2_fsdp", "sdpa", "blocks"),
    ("llama_fsdp", "sdpa", "attention"), ("gpt2_fsdp", "sdpa", "attention"),
])  # fmt: skip
def test_activations_are_the_storages_alive_after_a_forward_pass(
    script: str, attention: str, how: str | None, odd_models: dict[str, Path]
) -> None:
    """On the CPU, without and with recomputation."""
    flags = ["--model-name", odd_models[script], "--precision", "fp32", "--batch-size", 2]
    flags += ["--attention", {"sdpa": "fused"}.get(attention, attention), "--seq-length", 12]
    _, estimated = read(*flags, "--target-length", 12)
    expected = estimated.activations
    if how:
        expected = estimated.stays[memory_estimator.checkpointing_label(how)]
    module = importlib.import_module(script)
    model = module.MODEL.from_pretrained(
        odd_models[script], attn_implementation=attention, dtype=torch.float32
    ).train()
    policies.fuse_gelu(model)
    if how:
        policies.checkpoint_activations(model, module.BLOCKS, how)
    with Storages() as storages:
        ids = torch.arange(24).reshape(2, 12)
        inputs = {"decoder_input_ids": ids.clone()} if script == "T5_training" else {}
        logits = model(ids, use_cache=False, **inputs).logits
        gc.collect()
    for tensor in (*model.parameters(), logits):
        storages.made.pop(tensor.untyped_storage()._cdata, None)
    alive = sum(size for reference, size in storages.made.values() if not reference.expired())
    assert alive == expected


def test_flops_follow_chowdhery_et_al() -> None:
    """6 N + 12 L a q T for a token of Llama-2 7B, and a third more with recomputed blocks."""
    flags = ["--batch-size", 2, "--seq-length", 512, "--peak-tflops", 1, RECOMPUTED]
    layers, width, vocabulary, tokens = 32, 4096, 32000, 2 * 512
    weights = layers * (4 * width**2 + 3 * width * 11008) + vocabulary * width
    flops = tokens * (6 * weights + 12 * layers * width * 512)
    assert rows(*flags)["full_shard"]["compute_seconds"] == pytest.approx(4 / 3 * flops * 1e-12)


@needs_extras
def test_published_measurements() -> None:
    """Half of the rows of published.py are within 10%, and all within 25%."""
    errors = [abs(error) for *_, error in published.compare()]
    assert len(errors) >= 8
    assert statistics.median(errors) <= 0.1 and max(errors) <= 0.25


def test_rows_agree_with_one_another() -> None:
    """Nodes, offload, paged moments, accumulation, slow links, and saves, whose bytes were counted
    on a simulated device: test_state_dicts.py has them too."""
    flags = ["--model-name", "llama-2-70b", "--nodes", 2, RECOMPUTED]
    estimates = rows(*flags)
    plain, offload = estimates["full_shard"], estimates["full_shard + offload"]
    assert plain["fits"] and plain["smallest_nodes"] == 2
    assert not rows("--model-name", "llama-2-70b")["full_shard"]["fits"]
    assert estimates["hybrid_shard"]["smallest_nodes"] is None
    held = 8 * sum(plain[name] for name in STATES)  # pinned memory is rounded to powers of two
    assert held < offload["cpu_bytes_per_node"] < 1.7 * held
    assert not any(offload[name] for name in STATES)
    paged = rows(*flags, "--optimizer", "paged_adamw_32bit")["full_shard"]
    assert paged["cpu_bytes_per_node"] == 8 * plain["optimizer_bytes"]
    flags[-1:] = ["--no-activation-checkpointing", "--gradient-accumulation-steps", 4]
    accumulated = rows(*flags)["full_shard"]
    terms = sum(accumulated[f"{term}_bytes"] for term in memory_estimator.TERMS)
    assert accumulated["total_bytes"] == terms
    assert accumulated["sent_bytes_per_gpu"] == pytest.approx(4 * plain["sent_bytes_per_gpu"])
    shard = plain["parameter_bytes"] / 4
    assert plain["save_bytes"] == pytest.approx(16 * shard, rel=1e-3)
    assert plain["save_cpu_bytes_per_node"] == pytest.approx(8 * 12 * shard, rel=1e-3)
    slow = rows("--precision", "fp32", "--nodes", 64, "--internode-gbps", 10)["hybrid_shard"]
    gradients = 2 * 4 * 6738415616 * 63 / 64  # all that crosses nodes
    assert slow["sent_bytes_per_node"] == pytest.approx(gradients, rel=1e-3)
    assert slow["bound_by"] == "internode"
    unit = offload["save_bytes"] / 3
    assert 3e9 < unit < 4e9  # a block of 856M parameters in fp32
    assert offload["resume_bytes"] == pytest.approx(unit + 8 * shard, rel=1e-3)


@pytest.mark.parametrize("flags, line, expected", [
    ("", "full_shard fits on 1 x 8 GPUs: 15.5 of 80 GB. C", {"activation_checkpointing": "blocks"}),
    ("--model-name llama-2-70b", "full_shard with --cpu-offload fits on 1 x 8 GPUs: 72.4 of 80 GB, "
     "and 2,071 GB of CPU memory per node. C", {"cpu_offload": True}),
    ("--model-name tiny-t5 --seq-length 256 --target-length 64", "full_shard fits",
     {"model_name": "tiny", "source_length": 256, "target_length": 64}),
    ("--model-name gpt2 --script gpt2_fsdp.py", "full_shard fits", {"block_size": 1024}),
    ("--seq-length 4096 --no-activation-checkpointing --precision fp32 --optimizer "
     "paged_adamw_32bit", "full_shard fits", {"max_seq_length": 4096, "precision": "fp32",
     "activation_checkpointing": False, "optimizer": "paged_adamw_32bit"}),
    ("--lora-rank 16 --load-in-4bit --gpus-per-node 1 --gpu-memory-gb 24", "full_shard fits on 1 "
     "x 1 GPUs: 5.7 of 24 GB", {"lora_rank": 16, "load_in_4bit": True, "fsdp": 2}),
])  # fmt: skip
@needs_extras
def test_verdict_has_a_command_that_the_script_accepts(
    flags: str, line: str, expected: dict, monkeypatch: Any, capsys: pytest.CaptureFixture
) -> None:
    """The script reads the same values from it."""
    monkeypatch.chdir(ROOT)
    memory_estimator.main(flags.split())
    printed = capsys.readouterr().out
    assert printed.count("\n  full_shard  ") == len(memory_estimator.TABLES)
    first, command, *_ = printed.splitlines()
    assert first.startswith(line)
    words = shlex.split(command)
    assert f"fits on {words[2]} x {words[4]} GPUs" in first
    (place,) = (i for i, word in enumerate(words) if word.endswith(".py"))
    monkeypatch.setenv("WORLD_SIZE", words[4])
    monkeypatch.setattr(ranks, "device_count", lambda: 8)
    script = importlib.import_module(words[place].removesuffix(".py"))
    values = vars(script.parse_args([*words[place + 1 :], "--dataset", "docstrings"]))
    assert {name: values[name] for name in expected} == expected


@pytest.mark.parametrize("flags, message", [
    ("--model-name gpt2 --optimizer paged_adamw_32bit", "--optimizer: the script of gpt2 has no"),
    ("--nodes 0 --peak-tflops 0", "--nodes 0 is out of range: it must be at least 1; --peak-tfl"),
    ("--gpu-memory-gb 4", "On 4096 nodes full_shard takes 2.9 GB, and --reserve-gb 2."),
])  # fmt: skip
def test_errors(flags: str, message: str, capsys: pytest.CaptureFixture) -> None:
    """One line, and exit code 1."""
    with pytest.raises(SystemExit) as end:
        memory_estimator.main(flags.split())
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert end.value.code == 1 and error.startswith("error: ") and message in error


def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
    """Return a gradient for each input of the estimator's FusedAttention."""
    query, key, value, _, _, bias = ctx.saved_tensors
    inputs = (query, key, value, bias)
    return tuple(None if tensor is None else torch.empty_like(tensor) for tensor in inputs)


def attention(module: torch.nn.Module, *inputs: Any, **options: Any) -> tuple[Tensor, None]:
    """Call the estimator's attention, but let the graph go that it keeps for the estimate."""
    output = memory_estimator.fused_attention(module, *inputs, **options)
    del module.kernel_outputs
    return output


@pytest.fixture
def fake_ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """Make this process rank 0 of as many as the parameter says."""
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("fake_ranks", [8, 64], indirect=True)
@pytest.mark.parametrize("name", ["llama-2-7b", "gpt2-xl", "t5-3b"])
def test_fsdp2_equals_torch_s_memory_tracker(
    name: str, fake_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters and gradients are equal, peaks are within 10%. Without dropout, whose masks are
    bytes only on a GPU. Tensors and ranks are fake, so nothing is allocated."""
    config = memory_estimator.load_config(name)
    for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate"):
        setattr(config, key, 0.0)
    config.save_pretrained(tmp_path)
    flags = ["--model-name", tmp_path, "--fsdp", 2, "--nodes", fake_ranks // 8]
    ours, (args, _) = rows(*flags)["full_shard"], read(*flags)
    monkeypatch.setattr(memory_estimator.FusedAttention, "backward", staticmethod(backward))
    AttentionInterface.register("fused", attention)
    AttentionMaskInterface.register("fused", lambda **_: None)
    config._attn_implementation = "fused"
    script = memory_estimator.load_script(args, config)
    wanted = Namespace(strategy="full_shard", precision="bf16", cpu_offload=False)
    options = policies.fsdp2_options(wanted, torch.device("cpu"))  # communicates: before fakes
    with FakeTensorMode():
        model = memory_estimator.model_class(script)(config)
        policies.fuse_gelu(model)
        for unit in policies.fsdp2_units(model, policies.wrap_policy(script.units(model))):
            fully_shard(unit, **options)
        policies.plan_gathers(model)
        if script.DEFAULTS.get("activation_checkpointing"):
            policies.checkpoint_activations(model, script.BLOCKS)
        ids = torch.zeros(1, args.seq_length, dtype=torch.int64)
        target = ids
        if config.is_encoder_decoder:
            target = ids[:, : args.target_length].clone()
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": ids}
        batch |= {"decoder_input_ids": target, "labels": target, "cu_seq_lens": ids}
        batch["target_positions"] = torch.arange(args.seq_length)  # as many as possible
        tracker = FSDPMemTracker(model)
        tracker.track_inputs(tuple(batch.values()))
        with tracker:
            script.summed_loss(model, batch | {"longest_document": args.seq_length}).backward()
        (now,) = tracker.get_tracker_snapshot("current").values()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    sizes = {str(key).rpartition(".")[2]: value for key, value in now.items()}
    assert ours["parameter_bytes"] == sizes["SHARDED_PARAM"]
    assert ours["gradient_bytes"] == sizes["SHARDED_GRAD"]
    assert ours["total_bytes"] - ours["optimizer_bytes"] == pytest.approx(peak["Total"], rel=0.1)
