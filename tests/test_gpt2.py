"""Compare gpt2_fsdp.py with plain single-process PyTorch under every strategy that a CPU runs."""

import ast
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import ROOT, error_lines, launch
from plain import loss_class
from ten_steps import SHARED_VARIANTS, check_no_host_sync, check_recomputation, parse_args
from transformers import GPT2Config

import gpt2_fsdp
from core import chunked_loss

TWO_RANKS = SHARED_VARIANTS | {
    "size": ["--wrap", "size:3000"],
    "bf16": ["--precision", "bf16"],
    "ddp_bf16": ["--precision", "bf16", "--strategy", "ddp"],
    "fsdp2_compile": ["--fsdp", "2", "--compile", "--activation-checkpointing",
                      *SHARED_VARIANTS["accumulate"]],
    "fsdp2_bf16": ["--fsdp", "2", "--precision", "bf16"],
}  # fmt: skip
FOUR_RANKS = {
    "full_shard": [],
    "shard_grad_op": ["--strategy", "shard_grad_op"],
    "hybrid_shard": ["--strategy", "hybrid_shard", "--shard-group-size", "2"],
    "ddp": ["--strategy", "ddp"],
    "fsdp2_full_shard": ["--fsdp", "2"],
    "fsdp2_hybrid_shard": ["--fsdp", "2", "--strategy", "hybrid_shard", "--shard-group-size", "2"],
}


def run_worker(path: Path, model: Path, texts: tuple, ranks: int, variants: dict) -> dict:
    """Train on `ranks` ranks with a global batch of 8; return the results by variant."""
    flags = [path, model, *texts, 8 // ranks, json.dumps(variants)]
    launch(ranks, "tests/workers/gpt2_worker.py", *flags)
    return torch.load(path, weights_only=False)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, gpt2_directory: Path, texts: tuple) -> dict:
    """Return the results of two ranks by variant."""
    path = tmp_path_factory.mktemp("results") / "two.pt"
    return run_worker(path, gpt2_directory, texts, 2, TWO_RANKS)


@pytest.fixture(scope="module")
def four_ranks(
    tmp_path_factory: pytest.TempPathFactory, gpt2_directory: Path, texts: tuple
) -> dict:
    """Return the results of four ranks by variant."""
    path = tmp_path_factory.mktemp("results") / "four.pt"
    return run_worker(path, gpt2_directory, texts, 4, FOUR_RANKS)


@pytest.fixture(scope="module")
def reference(two_ranks: dict, gpt2_directory: Path) -> dict:
    """Train on the same ten global batches in a plain loop, one example at a time."""
    model = transformers.GPT2LMHeadModel.from_pretrained(gpt2_directory, dtype=torch.float32)
    model.train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    rates = [0.5, *(1 - step / 9 for step in range(9))]  # one step of warm-up, then linear
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [*rates, 0.0].__getitem__)
    result: dict = {"losses": []}
    for rows in two_ranks["full_shard"]["rows"]:
        loss = torch.zeros(())
        for row in rows:
            ids = torch.tensor([row["input_ids"]])
            logits = model(ids[:, :-1], use_cache=False).logits[0]
            loss = loss + F.cross_entropy(logits, ids[0, 1:], reduction="sum")
        loss = loss / sum(len(row["input_ids"]) - 1 for row in rows)
        loss.backward()
        result.setdefault("gradient", {n: p.grad.clone() for n, p in model.named_parameters()})
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        result["losses"].append(loss.item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return result


def check_parity(result: dict, reference: dict) -> None:
    """Check that losses match to 1e-5 and the first gradient to 1e-5 of its norm."""
    assert len(result["losses"]) == 10
    assert result["losses"] == pytest.approx(reference["losses"], abs=1e-5)
    assert result["gradient"].keys() == reference["gradient"].keys()
    expected = torch.cat([grad.flatten() for grad in reference["gradient"].values()])
    actual = torch.cat([result["gradient"][name].flatten() for name in reference["gradient"]])
    assert (actual - expected).norm() <= 1e-5 * expected.norm()
    assert result["tied"]


@pytest.mark.parametrize("variant", [name for name in TWO_RANKS if "bf16" not in name])
def test_ten_steps_on_two_ranks_equal_plain_pytorch(variant, two_ranks, reference):
    """The last block is short, and some batches cannot be divided evenly among the ranks."""
    check_parity(two_ranks[variant], reference)


def test_recomputation_changes_no_loss(two_ranks):
    check_recomputation(
        two_ranks,
        activation_checkpointing="full_shard",
        ddp_activation_checkpointing="ddp",
        fsdp2_activation_checkpointing="fsdp2",
    )


def test_step_never_waits_for_the_device(two_ranks):
    """A step has three collectives for each unit (two for the root, which stays gathered for the
    backward pass), one for the gradient norm and one for the counts of the hosts."""
    names = [f"{name} without log" for name in ("full_shard", "fsdp2", "ddp")]
    check_no_host_sync(two_ranks, names)
    for name in names[:2]:
        assert not two_ranks[name]["waits"]
        assert two_ranks[name]["collectives"] == 3 * two_ranks[name]["units"] + 1


def test_bad_step_changes_nothing_and_is_reported(two_ranks):
    for name in ("full_shard", "fsdp2", "ddp"):
        (error, changed), (empty_error, changed_by_empty) = two_ranks[name]["bad"]
        assert not changed and not changed_by_empty, name
        assert "The gradient norm of step 4 is not finite, in samples [" in error
        assert "Step 4 has no target tokens, in samples [" in empty_error


@pytest.mark.parametrize("name", ["Lion", "SGD", "AdamW"])
def test_unfused_optimizer_resumes_exactly(name, two_ranks):
    runs = two_ranks["other optimizers"][name]
    (losses, weights, _), (resumed, resumed_weights, _) = runs
    assert losses == resumed and len(losses) == 5
    assert all(map(torch.equal, weights, resumed_weights))


@pytest.mark.parametrize("fsdp", ["1", "2"])
def test_average_of_the_weights_resumes(fsdp, two_ranks):
    (losses, _, updates), (resumed, _, resumed_updates) = two_ranks[f"ema {fsdp}"]
    assert losses == resumed
    assert updates == resumed_updates == [1, 2, 3, 4, 5]


def test_blocks_compile_without_graph_breaks(two_ranks):
    compiled = two_ranks["fsdp2_compile"]
    assert compiled["graphs"] > 1 and not compiled["graph_breaks"]
    assert len({length for _, length in compiled["shapes"]}) > 1
    assert not two_ranks["full_shard"]["graphs"]


@pytest.mark.slow  # the equivalent test of Llama is not slow
@pytest.mark.parametrize("variant", FOUR_RANKS)
def test_ten_steps_on_four_ranks_equal_plain_pytorch(variant, four_ranks, reference):
    check_parity(four_ranks[variant], reference)


@pytest.mark.parametrize("variant", ["bf16", "ddp_bf16", "fsdp2_bf16"])
def test_bf16_losses_are_near_fp32(variant, two_ranks, reference):
    losses = two_ranks[variant]["losses"]
    assert losses == pytest.approx(reference["losses"], abs=0.05)
    assert losses != pytest.approx(reference["losses"], abs=1e-5)


def test_units_are_blocks_and_root(two_ranks):
    """Wrapping by size makes more units, and none of them contains the tied embedding."""
    assert two_ranks["full_shard"]["units"] == two_ranks["fsdp2"]["units"] == 4
    assert two_ranks["size"]["units"] > 4
    assert two_ranks["ddp"]["units"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("strategy, share", [
    ("full_shard", 4), ("shard_grad_op", 4), ("hybrid_shard", 2), ("ddp", 1),
    ("fsdp2_full_shard", 4), ("fsdp2_hybrid_shard", 2),
])  # fmt: skip
def test_rank_holds_its_share_of_the_bytes(strategy, share, four_ranks, reference):
    count = sum(grad.numel() for grad in reference["gradient"].values())
    padding = 4 * 16 * four_ranks["full_shard"]["units"]  # 15 elements per unit, and rounding
    result = four_ranks[strategy]
    for kind, copies in (("parameter", 1), ("gradient", 1), ("optimizer", 2)):
        expected = copies * 4 * count / share
        assert expected <= result[f"{kind}_bytes"] + copies * padding
        assert result[f"{kind}_bytes"] <= expected + copies * padding


def test_chunked_loss_equals_cross_entropy(monkeypatch):
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=500, n_positions=256)
    model = loss_class(gpt2_fsdp)(config).eval()
    ids = torch.randint(0, 500, (3, 200))
    targets = ids.roll(-1, dims=1).masked_fill(torch.rand(3, 200) < 0.3, -100)
    monkeypatch.setattr(chunked_loss, "CHUNK", 128)

    def value_and_gradient(loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        loss.backward()
        return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])

    logits = model(ids, use_cache=False).logits.flatten(0, 1)
    plain = value_and_gradient(F.cross_entropy(logits, targets.flatten(), reduction="sum"))
    loss, gradient = value_and_gradient(model(ids, targets=targets))
    assert loss.item() == pytest.approx(plain[0].item(), rel=1e-5)
    assert (gradient - plain[1]).norm() <= 1e-5 * plain[1].norm()


def functions(path: Path) -> dict[str, str]:
    """Return the source of each function of a script, with docstrings, by name."""
    text = path.read_text()
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(text, node) for node in nodes}


def test_scripts_share_the_step_and_the_save():
    scripts = [functions(ROOT / f"{x}.py") for x in ("gpt2_fsdp", "T5_training", "llama_fsdp")]
    assert len({script["token_loss"] for script in scripts}) == 1
    steps = [script["train"].partition("        # 3. Count")[2] for script in scripts]
    assert steps[0].partition("# 6. ")[0] == steps[1].partition("# 6. ")[0]
    assert steps[0].partition("# 6. ")[0] == steps[2].partition("# 6. ")[0]
    assert "scaler.step(optimizer)" in steps[0]


@pytest.mark.parametrize("content, flags, message", [
    (b"", ["--wrap", "size"], "--wrap size is neither block nor size:N"),
    (b"text text", ["--block-size", "2000"], "above the model's 1024 positions"),
    (b"", ["--output-dir", __file__], "is a file. Pass a directory"),
    (b"", [], "has no usable rows"),
])  # fmt: skip
def test_bad_input_is_one_message(content, flags, message, texts, tmp_path):
    file = tmp_path / "train.txt"
    file.write_bytes(content)
    command = ["--model-name", "tiny", "--dataset", file, "--val-dataset", texts[1],
               "--output-dir", tmp_path / "run", "--block-size", "32", "--max-steps", "1",
               *flags]  # fmt: skip
    result = launch(0, "gpt2_fsdp.py", *command, check=False)
    (error,) = error_lines(result.stderr)
    assert result.returncode == 1 and message in error


def test_one_token_of_text_trains(tmp_path, texts):
    """The smallest possible text is one byte and EOS."""
    file = tmp_path / "train.txt"
    file.write_bytes(b"a")
    launch(0, "gpt2_fsdp.py", "--model-name", "tiny", "--dataset", file, "--val-dataset", texts[1],
           "--output-dir", tmp_path / "run", "--block-size", "32", "--max-steps", "1")  # fmt: skip


ACCUMULATE = ["--gradient-accumulation-steps", "2"]


@pytest.mark.parametrize("processes, flags, problem", [
    # FSDP overwrites an offloaded gradient, unless no_sync keeps it on the GPU until the end. A
    # single process never enters no_sync.
    ("1", [*ACCUMULATE, "--accumulate-no-sync"], "--cpu-offload"),
    ("2", ACCUMULATE, "--cpu-offload with accumulation"),
    ("2", [*ACCUMULATE, "--accumulate-no-sync"], ""),
    # FSDP1 offloads unsharded parameters incorrectly.
    ("1", [], "--cpu-offload needs --fsdp 2"),
    ("2", ["--strategy", "no_shard"], "--cpu-offload needs --fsdp 2"),
    ("1", ["--fsdp", "2"], ""),
    ("1", ["--export-only"], ""),
    ("2", [], ""),
])  # fmt: skip
def test_offload_is_refused_where_it_trains_incorrectly(processes, flags, problem, monkeypatch):
    messages = []

    def end(message: str) -> None:
        messages.append(message)
        raise SystemExit(1)

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr("core.args.exit_with", end)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", processes)):
        monkeypatch.setenv(name, value)
    flags = ["--cpu-offload", "--precision", "fp32", *flags]
    if not problem:
        assert parse_args(gpt2_fsdp, flags).sharding.cpu_offload
        return
    with pytest.raises(SystemExit):
        parse_args(gpt2_fsdp, flags)
    assert messages[0].startswith(problem)
