"""Compare T5_training.py with plain single-process PyTorch, and test generation under FSDP."""

from pathlib import Path

import pytest
import torch
from conftest import launch
from ten_steps import CORE_VARIANTS, check_no_host_sync
from transformers import ByT5Tokenizer, T5Config, T5ForConditionalGeneration

import T5_training
from benchmarks.driven import parse_flags
from runtime import batches


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, t5_directory: Path, pairs: Path) -> dict:
    """Return the results of t5_worker.py on two ranks."""
    directory = tmp_path_factory.mktemp("results")
    path, shallow = directory / "results.pt", directory / "shallow"
    config = T5Config.from_pretrained(t5_directory, num_layers=1, num_decoder_layers=1)
    T5ForConditionalGeneration(config).save_pretrained(shallow)
    ByT5Tokenizer().save_pretrained(shallow)
    launch(2, "tests/workers/t5_worker.py", path, t5_directory, shallow, pairs)
    return torch.load(path, weights_only=False)


@pytest.fixture(scope="module")
def reference(results: dict, t5_directory: Path) -> dict:
    """Train on the same ten global batches in a plain loop, each as one batch."""
    tokenizer = ByT5Tokenizer()
    model = T5ForConditionalGeneration.from_pretrained(t5_directory, dtype=torch.float32)
    model.train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    rates = [0.5, *(1 - step / 9 for step in range(9))]  # one step of warm-up, then linear
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [*rates, 0.0].__getitem__)
    plain = {"losses": [], "norms": []}
    for rows in results["full_shard"]["rows"]:
        sources = [tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in rows]
        targets = [tokenizer.decode(row["labels"], skip_special_tokens=True) for row in rows]
        batch = tokenizer(sources, padding=True, return_tensors="pt")
        labels = tokenizer(targets, padding=True, return_tensors="pt").input_ids
        labels[labels == tokenizer.pad_token_id] = -100
        loss = model(**batch, labels=labels, use_cache=False).loss
        loss.backward()
        plain.setdefault("gradient", {n: p.grad.clone() for n, p in model.named_parameters()})
        plain["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        plain["losses"].append(loss.item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return plain


@pytest.mark.parametrize("variant", CORE_VARIANTS)
def test_ten_steps_equal_plain_pytorch(variant, results, reference):
    """Losses are within 1e-5 and the first gradient within 1e-5 of its norm."""
    result = results[variant]
    assert len(result["losses"]) == 10
    assert result["losses"] == pytest.approx(reference["losses"], abs=1e-5)
    assert result["norms"] == pytest.approx(reference["norms"], rel=1e-4)
    assert result["gradient"].keys() == reference["gradient"].keys()
    reference_gradient = torch.cat([grad.flatten() for grad in reference["gradient"].values()])
    gradient = torch.cat([result["gradient"][name].flatten() for name in reference["gradient"]])
    assert (gradient - reference_gradient).norm() <= 1e-5 * reference_gradient.norm()


def test_step_never_waits_for_the_device(results):
    variants = ["full_shard", "fsdp2", "ddp", "accumulate"]
    check_no_host_sync(results, variants, exempt="masking_utils.py")  # Transformers' masks


def test_compiled_blocks_train_like_eager_blocks(results):
    eager, compiled = results["--no-compile"], results["--compile"]
    assert compiled["graphs"] >= 4 and not compiled["graph_breaks"] and not eager["graphs"]
    assert len({length for _, length in compiled["shapes"]}) > 2
    assert compiled["losses"] == pytest.approx(eager["losses"], abs=1e-5)
    assert compiled["validation"] == pytest.approx(eager["validation"], abs=1e-5)
    assert compiled["gradient"].keys() == eager["gradient"].keys()
    for name, gradient in eager["gradient"].items():
        torch.testing.assert_close(compiled["gradient"][name], gradient, rtol=1e-5, atol=1e-6)


def test_every_sample_occurs_once_per_epoch(results):
    by_epoch: dict[int, list[list[int]]] = {}
    for epoch, samples in results["full_shard"]["samples"]:
        by_epoch.setdefault(epoch, []).append(samples)
    first, second = by_epoch[0], by_epoch[1]
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(sum(map(len, first))))
    assert first != second
    assert len(first[-1]) < len(first[0])


@pytest.mark.parametrize("variant", ["bf16", "fsdp2_bf16"])
def test_bf16_losses_are_near_fp32(variant, results, reference):
    losses = results[variant]["losses"]
    assert losses == pytest.approx(reference["losses"], abs=0.05)
    assert losses != pytest.approx(reference["losses"], abs=1e-5)


def test_one_batch_can_be_overfitted(results):
    assert results["overfitted"] < 0.1


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "ddp", "fsdp2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_generation_reproduces_overfitted_examples(precision, strategy, results):
    triples = results[f"generated {precision} {strategy}"]
    plain = results["generated fp32 ddp"]
    assert [triple[:2] for triple in triples] == [triple[:2] for triple in plain]
    assert len(triples) == len(set(triples)) == 7
    assert sum(reference == generated for _, reference, generated in triples) >= 6


def test_length_groups_keep_every_sample_at_any_world_size(monkeypatch):
    """Also after a resume. The longest step comes first, so that out-of-memory errors occur at
    once."""
    lengths = torch.randint(8, 512, (1003,)).tolist()

    def sampler(world_size: int, rank: int = 0) -> batches.GlobalBatchSampler:
        monkeypatch.setattr(batches.dist, "get_world_size", lambda: world_size)
        monkeypatch.setattr(batches.dist, "get_rank", lambda: rank)
        return batches.GlobalBatchSampler(len(lengths), 16 // world_size, 1, 7, lengths)

    whole = sampler(1)
    steps = list(whole.steps())
    assert sorted(sum(steps, [])) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in step) for step in steps[:-1]]
    assert sums[0] == max(sums) and len(steps[-1]) == 1003 % 16
    assert sums != sorted(sums) and sums != sorted(sums, reverse=True)
    rank_steps = list(zip(*(sampler(4, rank) for rank in range(4)), strict=True))
    assert [sorted(sum(ranks, [])) for ranks in rank_steps] == [sorted(step) for step in steps]
    longest = [max(lengths[i] for ranks in step for i in ranks) for step in rank_steps]
    padded_lengths = [n * len(step) for n, step in zip(longest, steps, strict=True)]
    assert sum(padded_lengths) < 1.05 * sum(lengths)  # 1.9 in random order
    whole.consumed = 3 * 16
    assert list(whole.steps()) == steps[3:]
    whole.epoch, whole.consumed = 1, 0
    common = {frozenset(step) for step in steps} & {frozenset(step) for step in whole.steps()}
    assert len(common) <= 1  # the epochs group samples differently
    with pytest.raises(ValueError, match="1003 training samples are fewer than the 1004 proc"):
        sampler(1004)


def test_schedules_follow_their_formulas():
    rates = {}
    for name in ("linear", "cosine", "constant", "step"):
        flags = ["--lr-schedule", name, "--warmup-ratio", "0.2", "--gamma", "0.5", "--lr", "1"]
        args = parse_flags(T5_training, ["--dataset", "docstrings", *flags])
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.lr)
        factor = batches.learning_rate(args, 10, 4)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        rates[name] = []
        for _ in range(10):
            rates[name].append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    assert rates["step"] == [1] * 4 + [0.5] * 4 + [0.25] * 2
    assert rates["constant"] == pytest.approx([1 / 3, 2 / 3] + [1] * 8)
    assert rates["linear"] == pytest.approx([1 / 3, 2 / 3] + [1 - i / 8 for i in range(8)])
    assert rates["cosine"][2] == 1 and rates["cosine"][6] == pytest.approx(0.5)
