"""T5_training.py's batches of samples with similar lengths."""

import torch
import torch.distributed as dist

import summarization_dataset


def test_length_groups_keep_every_sample_at_any_world_size(monkeypatch):
    """Also after a resume. The longest step comes first, so that out-of-memory errors occur at
    once."""
    lengths = torch.randint(8, 512, (1003,)).tolist()
    rows = [{"input_ids": range(length)} for length in lengths]

    def sampler(world_size: int, rank: int = 0) -> summarization_dataset.LengthSampler:
        monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        result = summarization_dataset.LengthSampler(rows, 16 // world_size, 1, 7)
        result.stop = result.steps_per_epoch
        return result

    steps = list(sampler(1))
    assert sorted(sum(steps, [])) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in step) for step in steps[:-1]]
    assert sums[0] == max(sums) and len(steps[-1]) == 1003 % 16
    assert sums != sorted(sums) and sums != sorted(sums, reverse=True)
    rank_steps = list(zip(*[list(sampler(4, rank)) for rank in range(4)], strict=True))
    assert [sorted(sum(ranks, [])) for ranks in rank_steps] == [sorted(step) for step in steps]
    longest = [max(lengths[i] for ranks in step for i in ranks) for step in rank_steps]
    padded_lengths = [n * len(step) for n, step in zip(longest, steps, strict=True)]
    assert sum(padded_lengths) < 1.05 * sum(lengths)  # 1.9 in random order
    whole = sampler(1)
    whole.start, whole.stop = 3, 2 * whole.steps_per_epoch
    resumed = list(whole)
    second = resumed[len(steps) - 3 :]
    assert resumed[: len(steps) - 3] == steps[3:]
    assert sorted(sum(second, [])) == list(range(len(lengths)))
    common = {frozenset(step) for step in steps} & {frozenset(step) for step in second}
    assert len(common) <= 1  # the epochs group samples differently
