"""Precision, compiled blocks, fused norms, DDP's buckets, and which flags go together."""

import copy
import importlib
import json
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from conftest import ROOT, launch
from in_process import refusal
from plain import loss_class
from policies_worker import STRATEGIES
from ten_steps import local
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

import gpt2_fsdp
import llama_fsdp
import policies
from optional import fused_norms

CASES = [(script, strategy) for script, names in STRATEGIES.items() for strategy in names]


@pytest.fixture(scope="module")
def results(
    t5_directory: Path, pairs: Path, gpt2_directory: Path, block_flags: list, llama_directory: Path,
    chats: Path, tmp_path_factory: pytest.TempPathFactory,
) -> dict:  # fmt: skip
    """Return the results of policies_worker.py."""
    directory = tmp_path_factory.mktemp("policies")
    flags = {
        "T5_training": ["--model-name", t5_directory, "--dataset", pairs, "--batch-size", 8,
                        "--rouge-samples", 0],
        "gpt2_fsdp": [*block_flags, "--model-name", gpt2_directory],
        "llama_fsdp": ["--model-name", llama_directory, "--dataset", chats, "--max-seq-length", 64,
                       "--batch-size", 2],
    }  # fmt: skip
    result = directory / "result.json"
    worker = "tests/workers/policies_worker.py"
    launch(2, worker, result, directory, json.dumps(flags, default=str))
    return json.loads(result.read_text())


@pytest.mark.parametrize("script, strategy", CASES)
def test_fp16_losses_are_close_to_fp32_and_scale_is_resumed(script, strategy, results):
    result = results[f"{script} {strategy}"]
    assert len(result["fp16"]) == 12
    assert result["fp16"] == pytest.approx(result["fp32"], rel=2e-3)
    assert result["fp16"] != result["fp32"]
    assert result["scale"] == 2**12 and result["resumed"]


@pytest.mark.parametrize("script, strategy", CASES)
def test_overflow_changes_no_weight_and_halves_the_scale(script, strategy, results):
    """A scale below 1 ends the run."""
    result = results[f"{script} {strategy}"]
    applied = {"changed": [True] * 2, "scale": 1}
    skipped = {"changed": [False] * 2, "scale": 0.5}
    expected = {"loss": skipped, "shard": skipped, "nowhere": applied, "last": skipped}
    if strategy == "ddp":
        del expected["shard"]
    assert result["effects"] == expected
    for error in result["errors"]:
        assert error.startswith("The gradient norm of step 17 is not finite, in samples [")


def test_weights_changed_after_an_evaluation_are_used(results):
    """FSDP1's root, or all units, would stay gathered, with the weights of before. The worker also
    checks that FSDP1's limit of all-gathers holds after an evaluation."""
    before, after = results["evaluation"]["ddp"]
    assert abs(after - before) > 1
    for values in results["evaluation"].values():
        assert values == pytest.approx([before, after], rel=1e-6)


def test_groups_of_hybrid_shard_have_the_time_out(process_group):
    """init_device_mesh would give them 30 minutes."""
    sharding = policies.Sharding(strategy="hybrid_shard", shard_group_size=1)
    mesh = policies.device_mesh(torch.device("cpu"), sharding, 7)
    assert mesh.mesh_dim_names == ("replicate", "shard")
    for dim in range(2):
        backend = mesh.get_group(dim)._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(minutes=7)


ONE_BLOCK = {
    "T5_training": {"num_layers": 1, "dropout_rate": 0.0},
    "gpt2_fsdp": {"n_layer": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama_fsdp": {"num_hidden_layers": 1},
}


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
@pytest.mark.parametrize(
    "name", ["gpt2_fsdp", "llama_fsdp", pytest.param("T5_training", marks=pytest.mark.slow)]
)
def test_compiled_block_equals_eager(name):
    """Inductor compiles one block in seconds and caches it."""
    script = importlib.import_module(name)
    torch.manual_seed(0)
    config = script.MODEL.config_class(vocab_size=384, **script.TINY_CONFIG | ONE_BLOCK[name])
    eager = loss_class(script)(config).train()
    compiled = copy.deepcopy(eager)
    stack = compiled.decoder if name == "T5_training" else compiled
    policies.compile_blocks(stack, script.BLOCKS)
    ids = torch.arange(24).reshape(2, 12)
    inputs = {"decoder_input_ids": ids} if name == "T5_training" else {}
    results = []
    counters.clear()
    for model in (eager, compiled):
        logits = model(input_ids=ids, use_cache=False, **inputs).logits
        logits.logsumexp(-1).sum().backward()
        results.append([logits.detach(), *(p.grad for p in model.parameters())])
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert counters["inductor"]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


WIDTH = 64


class ClampedNorm(LlamaRMSNorm):
    """A norm that differs from Llama's only for large values."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.clamp(-50, 50))


class OtherEpsilon(LlamaRMSNorm):
    """A norm that does not use the epsilon in its attribute."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(hidden.float().square().mean(-1, keepdim=True) + 1e-5)
        return self.weight * (hidden.float() * scale).to(hidden.dtype)


def fused(norm: nn.Module) -> nn.Module:
    """Return a fused copy of a norm with random weights."""
    torch.manual_seed(0)
    norm.weight.data = torch.randn(WIDTH)
    copied = nn.Sequential(copy.deepcopy(norm))
    fused_norms.fuse(copied)
    return copied[0]


def forward_and_backward(norm: nn.Module, values: torch.Tensor) -> list[torch.Tensor]:
    """Return the output of a norm, and the gradients of its input and weight."""
    values = values.clone().requires_grad_()
    output = norm(values)
    loss = (output * torch.linspace(-1, 1, WIDTH)).sum()
    return [output.detach(), *torch.autograd.grad(loss, (values, norm.weight))]


@pytest.mark.parametrize("kind", [LlamaRMSNorm, T5LayerNorm])
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_fused_norm_computes_the_same(kind, eps):
    norm = kind(WIDTH, eps)
    other = fused(norm)
    assert type(other) is not kind and type(other) is type(fused(kind(WIDTH)))
    values = 3 * torch.randn(5, 7, WIDTH) + 1
    pairs = (forward_and_backward(x, values) for x in (other, norm))
    for result, expected in zip(*pairs, strict=True):
        largest = expected.abs().max().item()
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6 * largest)
    # In bf16 it is no farther from the result in float64.
    low, low_other = copy.deepcopy(norm).bfloat16(), copy.deepcopy(other).bfloat16()
    values = values.bfloat16()
    x, weight = values.double(), low.weight.double()
    exact = weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    assert low_other(values).dtype == torch.bfloat16
    assert (low_other(values) - exact).norm() <= (low(values) - exact).norm()
    compiled = torch.compile(nn.Sequential(other), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x.float()), other(x.float()))


@pytest.mark.parametrize("kind", [LlamaRMSNorm, T5LayerNorm])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32),
                                    (torch.float32, torch.bfloat16)])  # fmt: skip
def test_norm_of_mixed_dtypes_uses_the_original_forward(kind, dtypes):
    norm = kind(WIDTH)
    other = fused(norm).to(dtypes[0])
    values = torch.randn(3, WIDTH, dtype=dtypes[1])
    torch.testing.assert_close(other(values), norm.to(dtypes[0])(values), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [GemmaRMSNorm, ClampedNorm, OtherEpsilon])
def test_other_norms_keep_their_forward(kind):
    assert type(fused(kind(WIDTH))) is kind


def test_auto_is_fp32_on_a_cpu_and_bf16_where_it_is_native(monkeypatch):
    assert policies.compute_precision("fp16") == "fp16"
    for is_native in (True, False):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        module = type("", (), {"is_bf16_supported": lambda is_native=is_native, **_: is_native})
        monkeypatch.setattr(torch, "get_device_module", lambda module=module: module)
        assert policies.compute_precision("auto") == ("bf16" if is_native else "fp32")


def problem(script, processes: int, flags: list[str], monkeypatch) -> str:
    """Return the message with which a script refuses flags on a machine with GPUs, or ""."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    common = ["--model-name", "tiny", "--dataset", "docstrings.jsonl", "--precision", "fp32"]
    return refusal(script, *common, *flags)


ROWS = {}  # the cells for FSDP1 and FSDP2 by the text of the first cell
for line in (ROOT / "docs/fsdp1-or-2.md").read_text().splitlines():
    if line.startswith("| "):
        feature, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        ROWS[feature] = cells
ACCUMULATE = ["--gradient-accumulation-steps", "2"]
OFFLOAD = ["--cpu-offload", "--accumulate-no-sync"]
RULES = {  # script, processes and flags of each row that is a rule
    "LoRA and QLoRA": (llama_fsdp, 2, ["--lora-rank", "4"]),
    "`--strategy ddp`": (gpt2_fsdp, 2, ["--strategy", "ddp"]),
    "size-based wrapping (`gpt2_fsdp.py`)": (gpt2_fsdp, 2, ["--wrap", "size:1000"]),
    "`--optimizer paged_adamw_32bit`": (llama_fsdp, 2, ["--optimizer", "paged_adamw_32bit"]),
    "`--cpu-offload` on one GPU": (gpt2_fsdp, 1, ["--cpu-offload"]),
    "`--cpu-offload --precision fp16`": (gpt2_fsdp, 2, [*OFFLOAD, "--precision", "fp16"]),
    "`--cpu-offload` with gradient accumulation": (gpt2_fsdp, 2, ["--cpu-offload", *ACCUMULATE]),
}


def test_every_rule_of_the_table_is_tested():
    cells = {row: cells[0].split(":")[0] for row, cells in ROWS.items()}
    rules = {row for row, cell in cells.items() if cell in ("yes", "no") or "only" in cell}
    assert rules == RULES.keys()


@pytest.mark.parametrize("row", RULES)
@pytest.mark.parametrize("fsdp", [1, 2])
def test_parser_follows_the_table_of_fsdp1_or_2(row, fsdp, monkeypatch):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    script, processes, flags = RULES[row]
    cell = ROWS[row][fsdp - 1]
    flags = [*flags, "--fsdp", str(fsdp)]
    assert bool(problem(script, processes, flags, monkeypatch)) == (cell != "yes")
    if cell.startswith("only with"):
        flag = cell.removeprefix("only with ").strip("`")
        assert not problem(script, processes, [*flags, flag], monkeypatch)


@pytest.mark.parametrize("processes, flags, message", [
    (4, ["--strategy", "hybrid_shard", "--shard-group-size", "1"], "--shard-group-size above 1"),
    (4, ["--strategy", "hybrid_shard", "--shard-group-size", "3"], "that divides the processes"),
    (4, ["--strategy", "hybrid_shard", "--shard-group-size", "2"], ""),
])  # fmt: skip
def test_combinations_that_cannot_work_are_refused(processes, flags, message, monkeypatch):
    text = problem(gpt2_fsdp, processes, flags, monkeypatch)
    assert message in text if message else not text


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2", "ddp"])
def test_all_optimizers_skip_a_step_that_is_bad_for_one(wrapper, precision, value, process_group):
    """GradScaler would tell a fused AdamW only of its own gradients: NaN of Muon's matrices would
    reach AdamW's through clipping."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if wrapper == "fsdp1":
        mixed = policies.PRECISIONS[precision]
        options = {"device_id": torch.device("cpu"), "mixed_precision": mixed}
        model = policies.FSDP(model, use_orig_params=True, **options)
    elif wrapper == "fsdp2":
        fully_shard(model, **policies.fsdp2_options(policies.Sharding(precision=precision)))
    else:
        model = policies.DDP(model, **policies.DDP_OPTIONS)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizers = [torch.optim.AdamW(others, lr=0.1, fused=True), torch.optim.Muon(matrices, lr=0.1)]
    device = torch.device("cpu")
    scaler = policies.gradient_scaler(model, device, precision, optimizers)
    if precision == "fp16":  # the default scale would overflow
        scaler.load_state_dict(scaler.state_dict() | {"scale": 256.0})
    states = []
    for step in (1, 2, 3):
        with policies.autocast(model, device, precision):
            loss = model(torch.ones(2, 4)).float().square().sum()
        scaler.scale(loss).backward()
        if step == 2:
            for parameter in matrices:
                parameter.grad.fill_(value)
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        norm = policies.clip_gradients(model, 1.0)
        policies.skip_if_not_finite(optimizers, norm)
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        moments = [x for each in optimizers for held in each.state.values() for x in held.values()]
        states.append([local(x.detach()).clone() for x in (*matrices, *others, *moments)])
    first, second, third = states
    assert all(map(torch.equal, first, second))
    assert not any(map(torch.equal, second, third))
    assert all(tensor.isfinite().all() for tensor in third)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_norm_that_is_not_finite_ends_the_run_unless_fp16_can_lower_its_scale(value):
    norms = {4: torch.tensor(1.0), 5: torch.tensor(value), 6: torch.tensor(value)}
    scalers = {"no fp16": torch.amp.GradScaler("cpu", enabled=False)}
    for scale in (1, 2):
        scalers[scale] = torch.amp.GradScaler("cpu", init_scale=scale)
    steps = {name: policies.first_bad_step(norms, scaler) for name, scaler in scalers.items()}
    assert steps == {"no fp16": 5, 1: 5, 2: None}
    assert policies.first_bad_step({4: norms[4]}, scalers["no fp16"]) is None
