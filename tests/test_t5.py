"""T5_training.py trains as plain single-process PyTorch does, resumes, exports, and refuses bad
input."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import (
    ROOT,
    check_equal_weights,
    check_tied_once,
    error_lines,
    launch,
    losses,
    metrics,
    status,
    weights,
)
from in_process import start
from safetensors.torch import load_file, save_file
from ten_steps import CORE_VARIANTS
from transformers import ByT5Tokenizer, T5Config, T5ForConditionalGeneration

import summarization_dataset
import T5_training


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, t5_directory: Path, pairs: Path) -> dict:
    """Return the results of t5_worker.py on two ranks."""
    directory = tmp_path_factory.mktemp("results")
    path, shallow = directory / "results.pt", directory / "shallow"
    config = T5Config.from_pretrained(t5_directory, num_layers=1, num_decoder_layers=1)
    T5ForConditionalGeneration(config).save_pretrained(shallow)
    ByT5Tokenizer().save_pretrained(shallow)
    launch(2, "tests/workers/t5_worker.py", path, t5_directory, shallow, pairs)
    results = torch.load(path, weights_only=False)
    return results | {"overfitted": losses(Path(f"{path}.overfitted"))}


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
    plain: dict = {"losses": [], "norms": []}
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
    expected = torch.cat([grad.flatten() for grad in reference["gradient"].values()])
    gradient = torch.cat([result["gradient"][name].flatten() for name in reference["gradient"]])
    assert (gradient - expected).norm() <= 1e-5 * expected.norm()


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
    steps = results["full_shard"]["samples"]
    first, second = steps[:5], steps[5:]
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(sum(map(len, first))))
    assert first != second
    assert len(first[-1]) < len(first[0])


@pytest.mark.parametrize("variant", ["bf16", "fsdp2_bf16"])
def test_bf16_losses_are_near_fp32(variant, results, reference):
    near = results[variant]["losses"]
    assert near == pytest.approx(reference["losses"], abs=0.05)
    assert near != pytest.approx(reference["losses"], abs=1e-5)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "ddp", "fsdp2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_generation_reproduces_overfitted_examples(precision, strategy, results):
    assert results["overfitted"][150] < 0.1
    triples = results[f"generated {precision} {strategy}"]
    plain = results["generated fp32 ddp"]
    assert [triple[:2] for triple in triples] == [triple[:2] for triple in plain]
    assert len(triples) == len(set(map(tuple, triples))) == 7
    assert sum(reference == generated for _, reference, generated in triples) >= 6


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

    whole = sampler(1)
    steps = list(whole)
    assert sorted(sum(steps, [])) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in step) for step in steps[:-1]]
    assert sums[0] == max(sums) and len(steps[-1]) == 1003 % 16
    assert sums != sorted(sums) and sums != sorted(sums, reverse=True)
    rank_steps = list(zip(*(sampler(4, rank) for rank in range(4)), strict=True))
    assert [sorted(sum(ranks, [])) for ranks in rank_steps] == [sorted(step) for step in steps]
    longest = [max(lengths[i] for ranks in step for i in ranks) for step in rank_steps]
    padded_lengths = [n * len(step) for n, step in zip(longest, steps, strict=True)]
    assert sum(padded_lengths) < 1.05 * sum(lengths)  # 1.9 in random order
    whole.start, whole.stop = 3, 2 * whole.steps_per_epoch
    resumed = list(whole)
    assert resumed[: len(steps) - 3] == steps[3:]
    second = resumed[len(steps) - 3 :]
    assert sorted(sum(second, [])) == list(range(len(lengths)))
    common = {frozenset(step) for step in steps} & {frozenset(step) for step in second}
    assert len(common) <= 1  # the epochs group samples differently


@pytest.fixture(scope="module")
def flags(pairs: Path) -> list[str]:
    """Return flags for eight steps of `tiny`, which has dropout, five to an epoch."""
    return ["--dataset", str(pairs), "--num-train-samples", "0", "--max-steps", "8", "--log-every",
            "1", "--eval-every", "3", "--save-every", "2", "--lr", "1e-3", "--rouge-samples", "0",
            "--model-name", "tiny"]  # fmt: skip


def two_ranks(output: Path) -> list[str]:
    """Return flags for a global batch of 8 on two processes."""
    return ["--batch-size", "4", "--output-dir", str(output)]


def run_one_process(flags: list[str], output: Path) -> int:
    """Run the script in this process with a global batch of 8; return its exit code."""
    return start(T5_training, *flags, "--batch-size", "8", "--output-dir", output)


@pytest.fixture(scope="module")
def reference_run(tmp_path_factory: pytest.TempPathFactory, flags: list[str]) -> Path:
    """Return the directory of a finished run of two ranks, with dropout."""
    output = tmp_path_factory.mktemp("run") / "uninterrupted"
    launch(2, "T5_training.py", *flags, *two_ranks(output))
    return output


@pytest.fixture(scope="module")
def solo(tmp_path_factory: pytest.TempPathFactory, flags: list[str], t5_directory: Path) -> Path:
    """Return the directory of a finished run of one process, without dropout."""
    output = tmp_path_factory.mktemp("run") / "solo"
    run_one_process([*flags, "--model-name", str(t5_directory)], output)
    return output


@pytest.fixture
def run_copy(reference_run: Path, tmp_path: Path) -> Path:
    """Return a copy of `reference_run` that a test may change."""
    return Path(shutil.copytree(reference_run, tmp_path / "finished"))


def test_killed_run_resumes_bit_for_bit(reference_run, flags, tmp_path):
    command = [*flags, *two_ranks(tmp_path)]
    killed = launch(2, "tests/workers/killed.py", "T5_training", 1, 8, *command, check=False)
    assert killed.returncode != 0
    assert status(tmp_path) != "finished"
    assert max(losses(tmp_path)) == 7  # step 7 was not saved
    launch(2, "T5_training.py", *command)
    assert status(tmp_path) == "finished"
    assert [line["step"] for line in metrics(tmp_path, "start")] == [0, 6]
    assert losses(tmp_path) == losses(reference_run)
    assert list(losses(tmp_path)) == list(range(1, 9))
    assert losses(tmp_path, "val") == losses(reference_run, "val")
    for kind in ("final", "best"):
        check_equal_weights(tmp_path / kind, reference_run / kind)


@pytest.mark.slow
def test_ddp_process_resumes_two_full_shard_ranks(solo, flags, t5_directory, tmp_path):
    flags = [*flags, "--model-name", str(t5_directory)]
    assert launch(
        2, "tests/workers/killed.py", "T5_training", 0, 7, *flags, *two_ranks(tmp_path), check=False
    ).returncode
    run_one_process([*flags, "--strategy", "ddp"], tmp_path)
    assert [line["world_size"] for line in metrics(tmp_path, "start")] == [2, 1]
    assert losses(tmp_path) == pytest.approx(losses(solo), abs=1e-5)
    assert losses(tmp_path, "val") == pytest.approx(losses(solo, "val"), abs=1e-5)


def test_validation_loss_is_equal_on_one_and_three_processes(solo, flags, t5_directory, tmp_path):
    flags = [*flags, "--model-name", t5_directory, "--max-steps", 1, "--batch-size", 2]
    launch(3, "T5_training.py", *flags, "--output-dir", tmp_path)
    assert losses(tmp_path, "val")[0] == pytest.approx(losses(solo, "val")[0], abs=1e-5)


def test_run_keeps_two_checkpoints_best_final_and_metrics(reference_run):
    val_losses = {step: loss for step, loss in losses(reference_run, "val").items() if step}
    best = min(val_losses.items(), key=lambda item: (item[1], item[0]))
    names = sorted(path.name for path in (reference_run / "checkpoints").iterdir())
    assert best[0] == 8 and names == ["step-00000006", "step-00000008"]
    assert sorted(path.name for path in reference_run.iterdir()) == [
        "best", "checkpoints", "final", "lock", "metrics.jsonl", "status"]  # fmt: skip
    assert sorted(losses(reference_run, "val")) == [0, 3, 5, 6, 8]
    (start,) = metrics(reference_run, "start")
    assert start["arguments"]["optim"]["lr"] == 1e-3 and start["world_size"] == 2
    line = metrics(reference_run, "train")[-1]
    assert {"loss", "lr", "grad_norm", "tokens", "tokens_per_second"} <= line.keys()
    assert line["peak_memory_mb"] > 100
    assert metrics(reference_run, "done")[0]["best_loss"] == best[1]
    check_tied_once(reference_run)


def reload(directory: Path, pairs: Path) -> dict:
    """Run reload.py on an exported model in a new process and return its results."""
    data = summarization_dataset.Data(dataset=(str(pairs),), source_length=256, target_length=64)
    tokenizer = ByT5Tokenizer()
    _, sets = summarization_dataset.load(data, tokenizer)
    texts = [
        [tokenizer.decode(row[key], skip_special_tokens=True) for key in ("input_ids", "labels")]
        for row in sets[str(pairs)].with_format(None)
    ]
    (directory.parent / "validation.json").write_text(json.dumps(texts))
    command = [sys.executable, ROOT / "tests/workers/reload.py", directory]
    return json.loads(
        subprocess.check_output([*command, directory.parent / "validation.json"], text=True)
    )


def test_exports_reload_with_the_same_loss(run_copy, flags, pairs):
    val = losses(run_copy, "val")
    best = min(loss for step, loss in val.items() if step)  # the initial model is not exported
    for kind, loss in (("final", val[8]), ("best", best)):
        result = reload(run_copy / kind, pairs)
        assert result["loss"] == pytest.approx(loss, abs=1e-5)
        assert result["tied"] and result["dtype"] == "torch.float32"
    before = weights(run_copy / "final")
    assert "lm_head.weight" not in before  # tied weights are written once
    shutil.rmtree(run_copy / "final")
    run_one_process([*flags, "--export-only"], run_copy)
    check_equal_weights(run_copy / "final", run_copy / "best")
    run_one_process([*flags, "--export-only", "--export-dtype", "bf16"], run_copy)
    result = reload(run_copy / "final", pairs)
    assert result["dtype"] == "torch.bfloat16"
    assert result["loss"] == pytest.approx(val[8], abs=0.02)


def test_finished_run_continues_with_more_steps(run_copy, flags, capfd):
    before = (run_copy / "metrics.jsonl").read_text()
    assert run_one_process(flags, run_copy) == 0
    assert "is finished at 8 steps" in capfd.readouterr().out
    assert (run_copy / "metrics.jsonl").read_text() == before
    run_one_process([*flags, "--max-steps", "10", "--lr", "2e-3"], run_copy)
    assert list(losses(run_copy)) == list(range(1, 11))
    rates = [line["lr"] for line in metrics(run_copy, "train")[-2:]]
    assert rates == pytest.approx([2e-3 * 2 / 9, 2e-3 * 1 / 9])  # on the new schedule


@pytest.mark.parametrize("changed, message", [
    (["--source-length", "8"], "data is "),
    (["--no-group-by-length"], "--group-by-length is False, was True"),
    (["--gradient-accumulation-steps", "2"], "--global-batch-size 8"),
    (["--model-name", "/no/such/directory"], "/no/such/directory is not a directory"),
    (["--source-column", "body"], "has no column body. Its columns are: text, headline."),
])  # fmt: skip
def test_bad_input_exits_with_one_message(changed, message, run_copy, flags, capfd):
    """A message, and an unchanged run."""

    def files() -> list:
        return sorted((x, x.stat().st_mtime) for x in run_copy.rglob("*.*") if x.is_file())

    before = files()
    assert run_one_process([*flags, *changed], run_copy) == 1
    (error,) = error_lines(capfd.readouterr().err)
    assert message in error
    assert files() == before


def test_two_ranks_report_bad_data_once(flags, tmp_path):
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    command = [*flags, "--val-dataset", tmp_path / "bad.csv", "--output-dir", tmp_path / "run"]
    result = launch(2, "T5_training.py", *command, check=False)
    assert result.returncode != 0
    assert len(error_lines(result.stderr)) == 1 and "Its columns are: a, b" in result.stderr
    script_output = result.stderr[: result.stderr.index("torch/distributed/elastic")]
    assert "Traceback" not in script_output and "Connection closed" not in result.stderr


@pytest.mark.slow
def test_untied_head_stays_untied(flags, t5_directory, pairs, tmp_path):
    for path in t5_directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(t5_directory / "model.safetensors")
    torch.manual_seed(1)
    tensors["lm_head.weight"] = torch.randn_like(tensors["shared.weight"]) * 0.1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    flags, output = [*flags, "--model-name", str(tmp_path)], tmp_path / "run"
    launch(2, "T5_training.py", *flags, *two_ranks(output), "--max-steps", "2")
    assert losses(output, "val")[0] == pytest.approx(reload(tmp_path, pairs)["loss"], abs=1e-5)
    run_one_process(flags, output)
    result = reload(output / "final", pairs)
    assert result["loss"] == pytest.approx(losses(output, "val")[8], abs=1e-5)
    assert not result["tied"] and "lm_head.weight" in weights(output / "final")
