"""Which samples make up each step, worker processes that load them, and groups for weight decay."""

import importlib
import os
import re
import signal
import subprocess
import sys
from collections import Counter

import pytest
import torch
import transformers
from chaos import workers
from conftest import ROOT, SCRIPTS, SHORT, TINY, losses, status, wait_for_step
from in_process import start
from plain import loss_class
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from core import steps, weights
from core.ranks import Problem
from core.steps import MicroBatches, StepSampler, parameter_groups
from summarization_dataset import LengthSampler


@pytest.fixture
def rank_of(monkeypatch: pytest.MonkeyPatch):
    """Return a function that makes this process rank `rank` of `size`."""

    def become(rank: int, size: int) -> None:
        monkeypatch.setattr(steps.dist, "get_rank", lambda: rank)
        monkeypatch.setattr(steps.dist, "get_world_size", lambda: size)

    return become


def twelve_steps(batch: int, accumulation: int, **more: bool) -> list[list[int]]:
    """Return this rank's sample indices of 12 steps over 35 samples."""
    sampler = StepSampler(35, batch, accumulation, seed=1, **more)
    sampler.stop = 12
    assert sampler.steps_per_epoch == 5 and sampler.global_batch == 8
    return list(sampler)


def test_every_sample_occurs_once_per_epoch_at_any_world_size(rank_of):
    """The order depends on seed, epoch and global batch alone; ranks take samples in turn."""
    rank_of(0, 1)
    whole = twelve_steps(8, 1)
    assert [len(step) for step in whole[:6]] == [8, 8, 8, 8, 3, 8]
    for epoch in (whole[:5], whole[5:10]):
        assert sorted(i for step in epoch for i in step) == list(range(35))
    assert whole[:5] != whole[5:10]
    for size, batch, accumulation in ((2, 4, 1), (2, 2, 2), (4, 1, 2), (8, 1, 1)):
        for rank in range(size):
            rank_of(rank, size)
            assert twelve_steps(batch, accumulation) == [step[rank::size] for step in whole]
    # If the samples of epochs differ, they have numbers of their own.
    rank_of(0, 1)
    expected = [[i + n // 5 * 35 for i in step] for n, step in enumerate(whole)]
    assert twelve_steps(8, 1, epochs_differ=True) == expected


def test_length_groups_keep_every_sample_at_any_world_size(rank_of):
    """Also after a resume. The longest step comes first, so that out-of-memory errors occur at
    once."""
    lengths = torch.randint(8, 512, (1003,)).tolist()
    rows = [{"input_ids": range(length)} for length in lengths]

    def sampler(rank: int, size: int) -> LengthSampler:
        rank_of(rank, size)
        result = LengthSampler(rows, 16 // size, 1, 7)
        result.stop = result.steps_per_epoch
        return result

    whole = list(sampler(0, 1))
    assert sorted(sum(whole, [])) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in step) for step in whole[:-1]]
    assert sums[0] == max(sums) and len(whole[-1]) == 1003 % 16
    assert sums != sorted(sums) and sums != sorted(sums, reverse=True)
    rank_steps = list(zip(*[list(sampler(rank, 4)) for rank in range(4)], strict=True))
    assert [sorted(sum(ranks, [])) for ranks in rank_steps] == [sorted(step) for step in whole]
    longest = [max(lengths[i] for ranks in step for i in ranks) for step in rank_steps]
    padded_lengths = [n * len(step) for n, step in zip(longest, whole, strict=True)]
    assert sum(padded_lengths) < 1.05 * sum(lengths)  # 1.9 in random order
    resumed = sampler(0, 1)
    resumed.start, resumed.stop = 3, 2 * resumed.steps_per_epoch
    order = list(resumed)
    second = order[len(whole) - 3 :]
    assert order[: len(whole) - 3] == whole[3:]
    assert sorted(sum(second, [])) == list(range(len(lengths)))
    common = {frozenset(step) for step in whole} & {frozenset(step) for step in second}
    assert len(common) <= 1  # the epochs group samples differently


def test_step_has_as_many_micro_batches_as_asked_for():
    cut = MicroBatches(list, batch_size=3, accumulation=3)
    assert cut([*range(9)]) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert cut([*range(4)]) == [[0, 1, 2], [3], []] and cut([]) == [[], [], []]


def test_validation_batches_contain_each_sample_once(rank_of):
    """All ranks have equally many batches."""
    for size, count in ((1, 10), (3, 10), (4, 2), (2, 8)):
        ranks = []
        for rank in range(size):
            rank_of(rank, size)
            loader = steps.ordered_loader(list(range(count)), 2, list, torch.device("cpu"))
            ranks.append(list(loader))
        assert len({len(batches) for batches in ranks}) == 1
        samples = [i for batches in ranks for batch in batches for i in batch]
        assert Counter(samples) == Counter(range(count))


SMALL = [*TINY, "--num-train-samples", "60", "--num-val-samples", "4", "--batch-size", "4",
         "--precision", "fp32", "--num-workers"]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
def test_worker_processes_do_not_change_the_losses(script, tmp_path):
    """T5 and GPT-2 have dropout. The last run resumes within the second epoch."""
    module = importlib.import_module(script)
    more = [*SHORT[script], "--lr-schedule", "constant", "--warmup-steps", 1]
    if script == "T5_training":
        more += ["--rouge-samples", 0]
    for name, count, last in (
        ("none", 0, 22), ("two", 2, 22), ("resumed", 2, 18), ("resumed", 2, 22)
    ):  # fmt: skip
        flags = [*SMALL, count, *more, "--max-steps", last, "--output-dir", tmp_path / name]
        assert start(module, *flags) == 0
    expected = losses(tmp_path / "none")
    assert len(expected) == 22
    assert losses(tmp_path / "two") == expected == losses(tmp_path / "resumed")
    assert losses(tmp_path / "two", "val") == losses(tmp_path / "none", "val")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_signal_to_all_processes_saves_despite_workers(number, tmp_path):
    """As Ctrl-C in a terminal, or scancel: the loader's processes get the signal too."""
    command = [sys.executable, str(ROOT / "gpt2_fsdp.py"), *SMALL, "2", *SHORT["gpt2_fsdp"],
               "--max-steps", "5000", "--num-train-samples", "4000", "--output-dir",
               str(tmp_path)]  # fmt: skip
    log = tmp_path.with_suffix(".log")
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    wait_for_step(tmp_path, 3)
    for child in workers(process.pid):
        os.kill(child, number)  # first, so that the rank has time to notice
    wait_for_step(tmp_path, max(losses(tmp_path)) + 10)
    os.killpg(process.pid, number)
    assert process.wait(timeout=60) == 75, log.read_text()
    assert status(tmp_path) == "stopped" and "Traceback" not in log.read_text()


def test_warmup_that_is_not_shorter_than_the_run_is_refused():
    with pytest.raises(Problem, match="The warm-up has 5 of 5 steps. Lower --warm"):
        steps.schedule("linear", 5, 5, 5, 0.85)
    assert steps.schedule("linear", 1, 1, 5, 0.85)(0) > 0
    assert steps.schedule("step", 5, 5, 5, 0.85)(0) == 1


@pytest.mark.parametrize("name", SCRIPTS)
def test_weight_decay_excludes_biases_and_norms(name):
    script = importlib.import_module(name)
    config = script.MODEL.config_class(vocab_size=384, **script.TINY_CONFIG)
    model = loss_class(script)(config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, others = parameter_groups(model, weights.whole_shapes(model), 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0)
    is_other = re.compile(r"(\.bias|norm\w*\.weight|ln_\w+\.weight)$").search
    assert not any(is_other(names[id(p)]) for p in decayed["params"])
    assert all(is_other(names[id(p)]) for p in others["params"])
    assert len(decayed["params"]) + len(others["params"]) == len(names)
    if name == "T5_training":
        bias = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        assert any(parameter is bias for parameter in decayed["params"])


def test_weight_decay_excludes_vectors_after_flattening(process_group):
    """FSDP1 flattens parameters, so their shapes are recorded beforehand."""
    config = transformers.Qwen3NextConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        head_dim=16, num_key_value_heads=2, vocab_size=64,
        linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=16, linear_value_head_dim=16, num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=16, shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    model = transformers.Qwen3NextForCausalLM(config)
    model.rows = nn.ParameterDict({"gate_up_proj_bias": torch.zeros(4, 8)})  # as in gpt-oss
    shapes = weights.whole_shapes(model)
    sharded = FSDP(model, device_id=torch.device("cpu"), use_orig_params=True)
    names = {id(p): weights.plain_name(n) for n, p in model.named_parameters()}
    for parameter in sharded.parameters():
        parameter.data = parameter.data.flatten()  # as on several ranks
    groups = parameter_groups(sharded, shapes, 0.1)
    decayed, others = ({names[id(p)] for p in group["params"]} for group in groups)
    assert decayed | others == shapes.keys() and not decayed & others
    assert {"model.layers.0.linear_attn.A_log", "model.layers.0.linear_attn.dt_bias"} <= others
    assert {name for name in others if len(shapes[name]) > 1} == {"rows.gate_up_proj_bias"}
    assert "model.embed_tokens.weight" in decayed
