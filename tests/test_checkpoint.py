"""Checkpoints: memory of a save and a resume (12 bytes per parameter, for weights and moments),
resumes with other strategies and world sizes, and damaged files."""

import itertools
import json
import os
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import launch, losses, metrics, save_model, weights
from in_process import start
from transformers import GPT2LMHeadModel

import gpt2_fsdp
from core import checkpoint, log
from core.args import Run
from core.ranks import Problem
from core.weights import saved_names
from optional import checksums


def test_save_and_resume_use_one_host_copy(texts, tmp_path):
    """In a GPT-2 with 19 million parameters in 24 blocks, so that each block is small."""
    shape = {"n_embd": 256, "n_layer": 24, "n_head": 4, "n_positions": 64}
    tokens = {"bos_token_id": 1, "eos_token_id": 1}
    model = save_model(tmp_path / "deep", GPT2LMHeadModel, **tokens, **shape)
    # Every tensor has separate pages, which malloc returns as soon as the tensor is freed.
    malloc = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_ARENA_MAX": "1"}
    flags = ["--model-name", model, "--dataset", texts[0], "--val-dataset", texts[1],
             "--block-size", "32", "--batch-size", "1", "--save-every", "1", "--eval-every", "0",
             "--no-save-best", "--output-dir", tmp_path / "run"]  # fmt: skip
    worker = ["tests/workers/state_dict_worker.py", tmp_path / "result.json", *flags]
    launch(2, *worker, env=os.environ | malloc)
    memory = json.loads((tmp_path / "result.json").read_text())
    parameter, save, resume = memory["parameter"], memory["save"], memory["resume"]
    assert resume["momentum"] == pytest.approx(save["momentum"], rel=1e-9) and save["momentum"] > 0
    assert 12 * parameter < save["peak"] < 13 * parameter and save["after"] < parameter
    moments = 8 * parameter  # the moments stay allocated
    assert resume["peak"] - moments < 12 * parameter + memory["unit"]
    assert resume["after"] - moments < parameter


def test_full_file_and_extra_tensors_of_single_ranks(process_group, tmp_path, monkeypatch):
    """The extra tensors need as many processes."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    state = checkpoint.State({"--seed": 0}, checkpoint.hyperparameters([optimizer]), step=2)
    mean, seven = torch.zeros(2), torch.full((2,), 7.0)
    tensors = checkpoint.snapshot(model, saved_names(model), [optimizer], state)
    tensors |= checkpoint.extra_state("mine", {"mean": seven})
    assert checkpoint.save(Run(tmp_path, checkpoint_type="full"), tensors, state, LOG)
    path = tmp_path / "checkpoints/step-00000002"
    assert torch.equal(torch.load(path / "full.pt")["model"]["weight"], model.weight)
    checkpoint.read(path, checkpoint.extra_state("mine", {"mean": mean}))
    assert torch.equal(mean, seven)
    monkeypatch.setattr(checkpoint.dist, "get_world_size", lambda: 2)
    extra = checkpoint.extra_state("mine", {"mean": mean})
    monkeypatch.undo()
    with pytest.raises(dcp.CheckpointException, match="mean of rank 0 of 2"):
        checkpoint.read(path, extra)


def test_checkpoints_cross_strategies_and_world_sizes(gpt2_directory, texts, tmp_path):
    """A run is killed under FSDP1 on 2 ranks, FSDP2 on 4 and FSDP1 on 2, then ends under DDP on 1.
    It uses sharded and full saves."""
    common = ["--model-name", gpt2_directory, "--dataset", texts[0], "--val-dataset", texts[1],
              "--block-size", "32", "--max-steps", "8", "--log-every", "1", "--eval-every", "3",
              "--save-every", "2", "--lr", "1e-3"]  # fmt: skip
    whole, output = tmp_path / "whole", tmp_path / "parts"
    alone = [*common, "--batch-size", "8"]
    assert start(gpt2_fsdp, *alone, "--fsdp", "2", "--output-dir", whole) == 0
    one = ["--batch-size", "4"]
    two = ["--fsdp", "2", "--batch-size", "2", "--checkpoint-type", "full"]
    hybrid = ["--strategy", "hybrid_shard", "--shard-group-size", "2"]
    for processes, step, flags in ((2, 3, one), (4, 7, [*two, *hybrid]), (2, 8, one)):
        killed = ["tests/workers/killed.py", "gpt2_fsdp", 0, step, *common, *flags]
        assert launch(processes, *killed, "--output-dir", output, check=False).returncode
    for path in output.glob("checkpoints/*"):
        names = {file.name for file in path.iterdir()} - {checkpoint.STATE}
        of_ranks = checkpoint.read_state(path)["sums"]
        assert set().union(*of_ranks) == names and len(of_ranks) in (2, 4)
    assert start(gpt2_fsdp, *alone, "--strategy", "ddp", "--output-dir", output) == 0
    starts = [line["step"] for line in metrics(output, "start")]
    assert starts == [0, 2, 6, 6]
    for event in ("train", "val"):
        assert losses(output, event) == pytest.approx(losses(whole, event), abs=1e-5)
    for name in ("final", "best"):
        expected = weights(whole / name)
        for key, tensor in weights(output / name).items():
            assert tensor.sub(expected[key]).abs().max() < 1e-4
    before = weights(output / "final")
    assert start(gpt2_fsdp, *alone, "--fsdp", "2", "--export-only", "--output-dir", output) == 0
    assert all(tensor.equal(before[key]) for key, tensor in weights(output / "final").items())


LOG = mock.Mock()  # events of saves go nowhere
FILES = ["__0_0.distcp", "__1_0.distcp", ".metadata"]
DAMAGE = {  # the new content of a file, by its own and that of another step
    "flipped bit": lambda own, _: own[:-9] + bytes([own[-9] ^ 1]) + own[-8:],
    "zeros": lambda own, _: bytes(len(own)),
    "exchanged": lambda _, other: other,
}


@pytest.fixture
def saved(process_group: None, tmp_path: Path) -> Path:
    """Return a directory with two complete checkpoints of two ranks, with checksums."""
    directory = tmp_path / "checkpoints"
    for step in (2, 4):
        path = directory / f"step-{step:08d}"
        path.mkdir(parents=True)
        for name in FILES:
            (path / name).write_bytes(bytes([step, *range(200)]))
        sums = [{name: checksums.crcs(path / name) for name in FILES}]
        checkpoint._finish(Run(tmp_path), path, checkpoint.State({}, [], step=step), sums)
    return directory


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", [*FILES, "train_state.json"])
def test_damaged_checkpoint_is_skipped(name, damage, saved, capsys):
    newest, older = saved / "step-00000004", saved / "step-00000002"
    assert checksums.find_intact(saved) == newest
    new, old = ((path / name).read_bytes() for path in (newest, older))
    (newest / name).write_bytes(DAMAGE[damage](new, old))
    assert checksums.find_intact(saved) == older
    is_complete = newest in checkpoint.complete_checkpoints(saved)  # otherwise its JSON is damaged
    assert (f"{newest} is damaged, so it is skipped" in capsys.readouterr().out) == is_complete
    (older / name).write_bytes(DAMAGE[damage](old, new))
    with pytest.raises(Problem, match="No checkpoint in .* is intact"):
        checksums.find_intact(saved)


def test_truncated_file_makes_a_checkpoint_incomplete(saved):
    """Also without checksums, by its size."""
    path = saved / "step-00000004"
    for name in FILES:
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[:-1])
        assert not checkpoint.is_complete(path)
        (path / name).write_bytes(content)
        assert checkpoint.is_complete(path)


def changed(values: dict, **more: object) -> str:
    """Return the text of a train_state.json with other values; None deletes one."""
    values = values | more
    return json.dumps({name: x for name, x in values.items() if x is not None})


ODD = {  # texts of train_state.json, from its values
    "list": lambda values: json.dumps([values]),
    "number": lambda _: "3",
    "null": lambda _: "null",
    "nested": lambda _: "[" * 100_000,
    "empty": lambda _: "{}",
    "not UTF-8": lambda _: b"\xff",
    "no step": lambda values: changed(values, step=None),
    "step of another": lambda values: changed(values, step=3),
    "step as text": lambda values: changed(values, step="4"),
    "no identity": lambda values: changed(values, identity=None),
    "identity as list": lambda values: changed(values, identity=[]),
    "no sums": lambda values: changed(values, sums=None),
    "no tokens": lambda values: changed(values, tokens=None),
    "no files": lambda values: changed(values, files={}),
    "files as list": lambda values: changed(values, files=list(values["files"])),
}


@pytest.mark.parametrize("odd", ODD)
def test_checkpoint_with_odd_values_is_skipped_with_its_name(odd, saved, capsys):
    path = saved / "step-00000004" / checkpoint.STATE
    (saved.parent / "status").touch()
    assert checkpoint.find_newest(saved.parent) == path.parent
    text = ODD[odd](json.loads(path.read_text()))
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert checkpoint.find_newest(saved.parent) == saved / "step-00000002"
    assert f"{path.parent} is damaged" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["file", "link to nothing", "directory in place of its state"])
def test_other_files_with_names_of_checkpoints_are_skipped(kind, saved, capsys):
    """A save of that step replaces a file."""
    path = saved / "step-00000006"
    if kind == "file":
        path.touch()
    elif kind == "link to nothing":
        path.symlink_to(saved / "nothing")
    else:
        (path / checkpoint.STATE).mkdir(parents=True)
    (saved.parent / "status").write_bytes(b"\xff")
    assert checkpoint.find_newest(saved.parent) == saved / "step-00000004"
    assert f"{path} is damaged" in capsys.readouterr().out
    if kind == "file":
        state = checkpoint.State({}, [], step=6)
        assert checkpoint.save(Run(saved.parent), {"x": torch.zeros(1)}, state, LOG)
        assert checkpoint.find_newest(saved.parent) == path


def test_failed_save_without_a_reason_is_reported(process_group, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.dcp, "save", mock.Mock(side_effect=OSError()))
    with pytest.raises(OSError, match=r"could not be saved: OSError\(\)\."):
        checkpoint.save(Run(tmp_path), {}, checkpoint.State({}, [], step=6), LOG)


def test_clean_up_that_fails_does_not_end_the_run(process_group, tmp_path, monkeypatch, capsys):
    """As on a file system that is gone for a moment: the next save tries again."""
    monkeypatch.setattr(checkpoint.dcp, "save", mock.Mock(side_effect=OSError("stale")))
    monkeypatch.setattr(checkpoint, "clear", mock.Mock(side_effect=[None, OSError("gone")]))
    state = checkpoint.State({}, {}, step=6)
    assert not checkpoint.save(Run(tmp_path), {}, state, LOG, must_succeed=False)
    assert "could not be saved: stale. The next save tries again." in capsys.readouterr().out


def test_large_files_have_a_sum_for_each_block(tmp_path, monkeypatch):
    content = os.urandom(1000)
    (tmp_path / "file").write_bytes(content)
    assert checksums.crcs(tmp_path / "file") == [zlib.crc32(content)]
    monkeypatch.setattr(checksums, "BLOCK", 400)
    expected = [zlib.crc32(content[i : i + 400]) for i in (0, 400, 800)]
    assert checksums.crcs(tmp_path / "file") == expected


def test_checkpoint_without_checksums_counts_as_intact(saved):
    """A copy without the module has saved it."""
    path = saved / "step-00000004"
    (path / checkpoint.STATE).unlink()
    checkpoint._finish(Run(saved.parent), path, checkpoint.State({}, [], step=4), [{}, {}])
    assert checksums.find_intact(saved) == path


def test_flipped_bits_of_train_state_are_noticed(saved, capsys):
    """One bit of each byte: in names, values and punctuation. The values are of several types."""
    state = checkpoint.State({"--seed": 0}, [{"betas": "(0.9, 0.95)"}], step=4, best_loss=2.5)
    state.counts = {"10": 1, "9": [2, 3], "2": float("inf")}  # of a copy
    path = saved / "step-00000004"
    (path / checkpoint.STATE).unlink()
    checkpoint._finish(Run(saved.parent), path, state, [{"file": [1, 2]}])
    content = (path / checkpoint.STATE).read_bytes()
    assert checkpoint.is_complete(path)
    values = checkpoint.read_state(path)
    for i in range(len(content)):
        flipped = content[i] ^ (1 << i % 7)
        (path / checkpoint.STATE).write_bytes(content[:i] + bytes([flipped]) + content[i + 1 :])
        assert not checkpoint.is_complete(path) or checkpoint.read_state(path) == values, i
    (saved.parent / "status").touch()
    (path / checkpoint.STATE).write_bytes(content.replace(b'"best_loss": 2', b'"best_loss": 0'))
    assert checkpoint.find_newest(saved.parent) == saved / "step-00000002"
    assert f"{path} is damaged" in capsys.readouterr().out


def test_damaged_status_and_metrics_do_not_prevent_a_resume(process_group, tmp_path):
    line = json.dumps({"event": "train", "step": 1})
    (tmp_path / "status").write_bytes(bytes(9))
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\0\0\n" + line.encode())
    log.open_directory(tmp_path)
    log.Log(tmp_path, checkpoint.State({}, [], step=2), 9)
    assert metrics(tmp_path, "train") == [json.loads(line)]


class Killed(BaseException):
    """What a test raises in place of a SIGKILL."""


@pytest.mark.parametrize("moment", ["write_text", "rename"])
def test_train_state_is_complete_or_absent(moment, process_group, tmp_path, monkeypatch):
    """A kill in the first save leaves none, so that the run may start over."""
    original = getattr(Path, moment)

    def kill(path: Path, value: object) -> object:
        if not path.name.startswith(checkpoint.STATE):
            return original(path, value)
        if moment == "write_text":
            path.write_bytes(value[:99].encode())
        raise Killed

    (tmp_path / "status").touch()
    save = partial(checkpoint.save, Run(tmp_path), {"x": torch.zeros(1)}, log=LOG)
    with monkeypatch.context() as patch:
        patch.setattr(Path, moment, kill)
        with pytest.raises(Killed):
            save(checkpoint.State({}, [], step=2))
    path = tmp_path / "checkpoints/step-00000002"
    assert path.is_dir() and not (path / checkpoint.STATE).exists()
    assert checkpoint.find_newest(tmp_path) is None
    save(checkpoint.State({}, [], step=2))
    assert checkpoint.find_newest(tmp_path) == path
    assert {file.name for file in path.iterdir()} == {"__0_0.distcp", ".metadata", checkpoint.STATE}


def test_prune_keeps_the_newest_complete_checkpoints(saved):
    """One that is damaged does not count, nor one of later steps."""
    for step in (1, 3, 6):
        (saved / f"step-{step:08d}").mkdir()
    checkpoint.prune(saved, 2, saved / "step-00000004")
    assert {path.name for path in saved.iterdir()} == {"step-00000002", "step-00000004"}
    checkpoint.prune(saved, 1, saved / "step-00000004")
    assert {path.name for path in saved.iterdir()} == {"step-00000004"}


@pytest.fixture
def rank_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Return a function that makes this process rank `rank` of `size`."""

    def become(rank: int, size: int) -> None:
        monkeypatch.setattr(checkpoint.dist, "get_rank", lambda: rank)
        monkeypatch.setattr(checkpoint.dist, "get_world_size", lambda: size)

    return become


def test_each_rank_resumes_its_loss_sum_and_other_ranks_share_them(rank_of):
    state = checkpoint.State({}, [], loss_sums=[1.0, 2.0])
    sums = {}
    for size in (1, 2, 4):
        sums[size] = []
        for rank in range(size):
            rank_of(rank, size)
            sums[size].append(state.own_loss_sum())
    assert sums == {1: [3.0], 2: [1.0, 2.0], 4: [0.75] * 4}


@pytest.mark.parametrize("saved_by, now", [(3, "cpu"), (2, "cpu device")])
def test_dropout_is_reseeded_by_seed_step_and_rank_for_other_processes(
    saved_by, now, rank_of, tmp_path, monkeypatch
):
    """Another number of processes, or as many on CPUs, saved what now runs on GPUs."""
    keys = [f"random.cpu of rank {rank} of {saved_by}" for rank in range(saved_by)]
    metadata = SimpleNamespace(state_dict_metadata=dict.fromkeys(keys))
    monkeypatch.setitem(checkpoint.UNPICKLED, tmp_path, metadata)
    states = dict.fromkeys(now.split(), torch.get_rng_state())
    monkeypatch.setattr(checkpoint, "_random_states", lambda: states)
    numbers = []
    for rank, seed, step in itertools.product((0, 1), (0, 9), (6, 7)):
        rank_of(rank, 2)
        checkpoint.load_random_states(tmp_path, {"identity": {"--seed": seed}, "step": step})
        numbers.append(torch.rand(1).item())
    assert len(set(numbers)) == 8
