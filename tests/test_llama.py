"""Compare llama_fsdp.py with plain single-process PyTorch: loading, packing, loss, attention."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import launch
from ten_steps import (
    COMPILED,
    CORE_VARIANTS,
    PAGED,
    check_no_host_sync,
    check_recomputation,
    check_resume,
)
from transformers import LlamaConfig, LlamaForCausalLM

import chat_dataset
import llama_fsdp
from benchmarks.driven import parse_flags
from runtime.attention import per_document, register, set_attention
from runtime.chunked_loss import LossHead

TWO_RANKS = CORE_VARIANTS | {
    "compile": COMPILED,
    "padded": ["--no-packing"],
    "eager": ["--attention", "eager"],
    "bf16": ["--precision", "bf16"],
    "ddp_bf16": ["--precision", "bf16", "--strategy", "ddp"],
    "fsdp2_bf16": ["--fsdp", "2", "--precision", "bf16"],
    "fsdp2_compile": ["--fsdp", "2", *COMPILED],
    **PAGED,
}
HYBRID = ["--strategy", "hybrid_shard", "--shard-group-size", "2"]
WORKER = "tests/workers/llama_worker.py"
FOUR_RANKS = {"hybrid_shard": HYBRID, "fsdp2_hybrid_shard": ["--fsdp", "2", *HYBRID]}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, llama_directory: Path, chats: Path) -> dict:
    """Return two ranks' results for each variant, at a global batch of 8 sequences."""
    path = tmp_path_factory.mktemp("results") / "two.pt"
    launch(2, WORKER, path, llama_directory, chats, 4, json.dumps(TWO_RANKS))
    return torch.load(path, weights_only=False)


@pytest.fixture(scope="module")
def four_ranks(
    tmp_path_factory: pytest.TempPathFactory, llama_directory: Path, chats: Path
) -> dict:
    """Return four ranks' results for each variant, at the same global batch."""
    path = tmp_path_factory.mktemp("results") / "four.pt"
    launch(4, WORKER, path, llama_directory, chats, 2, json.dumps(FOUR_RANKS))
    return torch.load(path, weights_only=False)


def reference(result: dict, llama_directory: Path) -> dict:
    """Train on the batches of `result` in a plain loop, one document at a time."""
    model = transformers.LlamaForCausalLM.from_pretrained(llama_directory, dtype=torch.float32)
    model.train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return plain_steps(model, groups, result["rows"])


def plain_steps(model: torch.nn.Module, groups: list[dict], steps: list[list]) -> dict:
    """Return the losses of ten steps on these rows and the first step's gradient."""
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    cosine = [(1 + torch.tensor(torch.pi * step / 9).cos().item()) / 2 for step in range(10)]
    rates = [0.5, *cosine]  # one step of warm-up
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rates.__getitem__)
    results: dict = {"losses": []}
    for rows in steps:
        loss, count = torch.zeros(()), 0
        for document in (document for row in rows for document in row):
            labels = torch.tensor(document["labels"][1:])
            if (labels == -100).all():
                continue
            logits = model(torch.tensor([document["input_ids"][:-1]]), use_cache=False).logits[0]
            loss = loss + F.cross_entropy(logits, labels, reduction="sum")
            count += int((labels != -100).sum())
        loss = loss / count
        loss.backward()
        trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        results.setdefault("gradient", {n: p.grad.clone() for n, p in trainable})
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        results["losses"].append(loss.item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return results


@pytest.fixture(scope="module")
def plain(two_ranks: dict, llama_directory: Path) -> dict:
    """Return the reference results of all packed variants, which train on the same documents."""
    return reference(two_ranks["full_shard"], llama_directory)


def check_parity(result: dict, expected: dict) -> None:
    """Check that the losses are within 1e-5 and the first gradient within 1e-5 of its norm."""
    assert len(result["losses"]) == 10
    assert result["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    assert result["gradient"].keys() == expected["gradient"].keys()
    reference_gradient = torch.cat([grad.flatten() for grad in expected["gradient"].values()])
    gradient = torch.cat([result["gradient"][name].flatten() for name in expected["gradient"]])
    assert (gradient - reference_gradient).norm() <= 1e-5 * reference_gradient.norm()


@pytest.mark.parametrize("variant", [x for x in TWO_RANKS if "bf16" not in x and x != "padded"])
def test_ten_steps_on_two_ranks_equal_plain_pytorch(variant, two_ranks, plain):
    """The reference has no packs. Some steps do not divide evenly among the ranks."""
    check_parity(two_ranks[variant], plain)


@pytest.mark.parametrize("variant", PAGED)
def test_paged_optimizer_resumes(variant, two_ranks):
    """Also resume from its checkpoint with PyTorch's AdamW."""
    pytest.importorskip("bitsandbytes")
    check_resume(two_ranks[variant]["resume"])


def test_step_never_waits_for_the_device(two_ranks):
    check_no_host_sync(two_ranks, ["full_shard", "fsdp2", "ddp", "accumulate"])


@pytest.mark.parametrize("variant", ["compile", "fsdp2_compile"])
def test_blocks_compile_without_graph_breaks(variant, two_ranks):
    compiled = two_ranks[variant]
    assert compiled["graphs"] > 1 and not compiled["graph_breaks"]
    assert len({length for _, length in compiled["shapes"]}) > 1
    assert not two_ranks["full_shard"]["graphs"]


def test_recomputation_changes_no_loss(two_ranks):
    check_recomputation(two_ranks, activation_checkpointing="full_shard")


def test_padded_steps_equal_plain_pytorch(two_ranks, llama_directory):
    assert all(len(row) == 1 for rows in two_ranks["padded"]["rows"] for row in rows)
    check_parity(two_ranks["padded"], reference(two_ranks["padded"], llama_directory))


@pytest.mark.parametrize("variant", FOUR_RANKS)
def test_hybrid_shard_on_four_ranks_equals_plain_pytorch(variant, four_ranks, plain):
    check_parity(four_ranks[variant], plain)


@pytest.mark.parametrize("variant", ["bf16", "ddp_bf16", "fsdp2_bf16"])
def test_bf16_is_near_and_frequencies_stay_fp32(variant, two_ranks, plain):
    losses = two_ranks[variant]["losses"]
    assert losses == pytest.approx(plain["losses"], abs=0.05)
    assert losses != pytest.approx(plain["losses"], abs=1e-5)
    frequencies = two_ranks[variant]["frequencies"]
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, 10000 ** -(torch.arange(0, 8, 2) / 8))


def test_weights_equal_from_pretrained(two_ranks, llama_directory):
    model = transformers.LlamaForCausalLM.from_pretrained(llama_directory)
    expected = dict(model.named_parameters())
    assert two_ranks["loaded"].keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in two_ranks["loaded"].items())
    assert two_ranks["full_shard"]["units"] == 3 + 3
    assert two_ranks["ddp"]["units"] == 0


def documents(count: int) -> list[dict]:
    """Return `count` documents of 2 to 12 tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 13, (count,), generator=generator).tolist()
    ids = [torch.randint(3, 300, (n,), generator=generator).tolist() for n in lengths]
    return [{"input_ids": row, "labels": row} for row in ids]


def test_loss_is_summed_in_fp32():
    """A sum in bf16 has three digits, so 1e-3 over 4,000 tokens shows the difference."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(4000, 32), torch.randn(300, 32)
    targets = torch.randint(0, 300, (4000,))
    plain = F.cross_entropy(hidden @ weight.T, targets, reduction="sum").item()
    for dtype in (torch.bfloat16, torch.float16):
        head = LossHead(torch.nn.Linear(32, 300, bias=False), LlamaConfig(), llama_fsdp.token_loss)
        head.weight.data = weight.to(dtype)
        loss = head(hidden.to(dtype), targets)
        assert loss.dtype == torch.float32 and loss.item() == pytest.approx(plain, rel=1e-3)


def logits(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """Return the logits of a packed batch, computed from the loss head's input."""
    hidden: list = []
    handle = model.lm_head.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    with torch.no_grad():
        llama_fsdp.summed_loss(model, batch)
        handle.remove()
        return model.lm_head(hidden[0])


@pytest.mark.parametrize("attention", ["sdpa", "eager", "packed"])
def test_packed_documents_do_not_attend_to_each_other(attention, llama_directory):
    register(per_document)
    model = llama_fsdp.LossModel.from_pretrained(
        llama_directory, attn_implementation=attention
    ).train()
    packs = [documents(8)[:5], documents(8)[5:]]
    batch = chat_dataset.collate(packs)
    packed = logits(model, batch).split(batch["input_ids"].size(1))
    plain = transformers.LlamaForCausalLM.from_pretrained(llama_directory)
    for row, pack in zip(packed, packs, strict=True):
        start = 0
        for ids in (document["input_ids"][:-1] for document in pack):
            expected = plain(torch.tensor([ids]), use_cache=False).logits[0]
            assert (row[start : start + len(ids)] - expected).abs().max() < 1e-5
            start += len(ids)
    first = len(packs[0][0]["input_ids"]) - 1
    batch["input_ids"][0, first] += 1  # the second document's first token
    changed = (logits(model, batch) - torch.cat(packed)).abs().amax(dim=1).nonzero().flatten()
    assert changed.min() == first
    assert changed.max() < first + len(packs[0][1]["input_ids"]) - 1


def test_auto_avoids_kernels_that_cannot_run(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        parse_flags(llama_fsdp, ["--model-name", "tiny", "--attention", "flash"])
    assert "--attention flash needs a GPU" in capsys.readouterr().err
    for flags, shape, expected in (
        ([], {}, "varlen"),
        (["--compile"], {}, "sdpa"),
        ([], {"sliding_window": 9}, "sdpa"),
        ([], {"sliding_window": 9, "use_sliding_window": False}, "varlen"),
        ([], {"sliding_window": 4096}, "varlen"),
        ([], {"attention_dropout": 0.1}, "sdpa"),
    ):
        args = parse_flags(llama_fsdp, flags)
        assert set_attention(args, LlamaConfig(**shape), LlamaForCausalLM).split()[0] == expected
