"""Compare gpt2_fsdp.py with plain single-process PyTorch under every strategy that a CPU runs."""

import ast
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import ROOT, launch, metrics
from copied import edited_script
from datasets import Dataset
from ten_steps import SHARED_VARIANTS, check_no_host_sync, check_recomputation
from transformers import ByT5Tokenizer, GPT2Config

import block_dataset
import gpt2_fsdp
import policies
from benchmarks.driven import parse_flags
from runtime import chunked_loss

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
    results = run_worker(path, gpt2_directory, texts, 2, TWO_RANKS)
    return results | {"directory": f"{path}.run"}


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
    backward pass), one for the gradient norm and one exchange of metrics."""
    check_no_host_sync(two_ranks, ["full_shard", "fsdp2", "ddp", "accumulate"])
    for name in ("full_shard", "fsdp2"):
        assert two_ranks[name]["collectives"] == 3 * two_ranks[name]["units"] + 1


def test_bad_step_changes_nothing_and_is_reported(two_ranks):
    for name in ("full_shard", "fsdp2", "ddp"):
        (changed, error), (changed_by_empty, empty_error) = two_ranks[name]["bad"].values()
        assert not changed and not changed_by_empty, name
        assert "Step 11: gradient norm" in error and "ranks [1], samples [8]. Lower" in error
        assert "Step 12 has no target tokens, in samples [7, 8]" in empty_error


@pytest.mark.parametrize("name", ["Lion", "SGD", "AdamW"])
def test_unfused_optimizer_resumes_and_skips_nan_steps(name, two_ranks):
    result = two_ranks["other optimizers"][name]
    (losses, parameters), (resumed_losses, resumed_parameters) = result["runs"]
    assert losses == resumed_losses and len(losses) == 2
    assert all(map(torch.equal, parameters, resumed_parameters))
    assert not result["changed"]
    assert result["message"].count("Step 6: gradient norm nan") == 1


@pytest.mark.parametrize("fsdp", ["1", "2"])
def test_average_of_the_weights_resumes(fsdp, two_ranks):
    result = two_ranks["ema"][fsdp]
    (count, average), (resumed_count, resumed_average) = result["averages"]
    assert count == resumed_count == 5
    assert all(map(torch.equal, average, resumed_average))
    assert not all(map(torch.equal, average, result["weights"]))


@pytest.mark.parametrize("old, new, message", [
    ("            step.guard(optimizer, loss, grad_norm)", "            None",
     "Call step.guard"),
    ("        with step:\n", "        if step:\n", "The step was not entered"),
    ("            optimizer.zero_grad()\n", "", "Call optimizer.zero_grad"),
    ("            scheduler.step() ", "            # ", "Call scheduler.step"),
    ("torch.optim.AdamW(groups, lr=args.lr, fused=True)",
     "type('Own', (torch.optim.SGD,), {'step': lambda self: None})(groups)",
     "needs an argument closure=None"),
])  # fmt: skip
def test_incomplete_loop_fails_in_its_first_step(old, new, message, tmp_path):
    script = edited_script("gpt2_fsdp", {old: new})
    flags = ["--model-name", "tiny", "--dataset", "docstrings", "--num-train-samples", "9",
             "--num-val-samples", "2", "--block-size", "32", "--output-dir",
             str(tmp_path)]  # fmt: skip
    with pytest.raises((RuntimeError, TypeError), match=message):
        script.fsdp_main(parse_flags(script, flags))
    assert not (tmp_path / "checkpoints").exists()


def test_numbers_can_be_logged_at_any_step_and_twice(tmp_path):
    line = "        if step.due(args.eval_every):"
    own = "        run.log_step(own=torch.ones(1).numpy()[0])\n"
    script = edited_script("gpt2_fsdp", {line: own + line})
    flags = ["--model-name", "tiny", "--dataset", "docstrings", "--num-train-samples", "40",
             "--num-val-samples", "2", "--block-size", "32", "--max-steps", "2", "--log-every", "2",
             "--output-dir", str(tmp_path)]  # fmt: skip
    assert script.fsdp_main(parse_flags(script, flags)) == 0
    lines = metrics(tmp_path, "train")
    assert [(line["step"], line.get("own")) for line in lines] == [(1, 1), (2, None), (2, 1)]
    assert ["mean_loss" in line for line in lines] == [False, True, False]


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
    model = gpt2_fsdp.LossModel(config).eval()
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


def test_fused_gelu_equals_transformers():
    """Autograd saves one tensor per block instead of four."""
    torch.manual_seed(0)
    config = GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=100, n_positions=32)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.arange(30)[None]

    def run_model() -> tuple[torch.Tensor, list[torch.Tensor], int]:
        saved = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            return saved.setdefault(id(tensor), tensor)

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logits = model(ids).logits
        gradients = torch.autograd.grad(logits.square().mean(), list(model.parameters()))
        return logits, gradients, sum(x.shape == (1, 30, 256) for x in saved.values())

    logits, gradients, count = run_model()
    policies.fuse(model)
    fused_logits, fused_gradients, fused_count = run_model()
    torch.testing.assert_close(fused_logits, logits, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(fused_gradients, gradients, rtol=1e-5, atol=1e-7)
    assert (count, fused_count) == (8, 2)  # for two blocks


def test_scripts_share_identical_functions():
    t5, gpt2 = functions(ROOT / "T5_training.py"), functions(ROOT / "gpt2_fsdp.py")
    llama = functions(ROOT / "llama_fsdp.py")
    for name in ("setup", "cleanup", "load_data", "validation"):
        assert t5[name] == gpt2[name] == llama[name], name
    assert t5["token_loss"] == gpt2["token_loss"] == llama["token_loss"]
    assert gpt2["summed_loss"] == llama["summed_loss"]
    assert t5["unit_classes"] == gpt2["unit_classes"]
    assert t5["wrap_model"] == llama["wrap_model"]
    loops = [script["train"].partition("    state = State(")[2] for script in (t5, gpt2, llama)]
    assert loops[0] == loops[1] == loops[2] and "scaler.step(optimizer)" in loops[0]


def test_blocks_predict_every_token_once():
    rows = [{"input_ids": list(range(10))}, {"input_ids": []}, {"input_ids": list(range(10, 23))}]
    blocks = [block["input_ids"] for block in block_dataset.blocks(rows, 5)]
    assert [len(block) for block in blocks] == [6, 6, 6, 6, 3]
    assert [token for block in blocks for token in block[1:]] == list(range(1, 23))
    batch = block_dataset.collate([{"input_ids": blocks[0]}, {"input_ids": blocks[-1]}])
    assert batch["labels"].tolist()[0] == [1, 2, 3, 4, 5, -100, -100, -100]
    assert batch["labels"].tolist()[1] == [21, 22] + [-100] * 6
    assert batch["input_ids"].tolist()[1][:2] == [20, 21]
    assert (block_dataset.collate([])["labels"] == -100).all()


def load(tmp_path: Path, *flags: str) -> Dataset:
    """Return the training blocks for these flags."""
    args = parse_flags(gpt2_fsdp, ["--model-name", "tiny", "--block-size", "16", *flags])
    return block_dataset.load_blocks(args.dataset[0], ByT5Tokenizer(), args)["train"]


def decode(rows: Dataset) -> str:
    """Return the text of consecutive blocks."""
    ids = [rows[0]["input_ids"][0], *(i for row in rows for i in row["input_ids"][1:])]
    return ByT5Tokenizer().decode(ids)


def test_documents_are_joined_with_eos(tmp_path):
    for name, text in (("a.txt", "one\u2028\x85 <unk> \ntwo\n"), ("b.txt", "three")):
        (tmp_path / name).write_text(text)
    rows = [{"body": "four"}, {"body": ""}, {"body": "five\n"}, {"body": "six"}]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ["--val-dataset", str(tmp_path / "b.txt"), "--text-column", "body"]
    both = load(tmp_path, "--dataset", str(tmp_path / "*.txt"), *common)
    assert decode(both) == "one\u2028\x85 <unk> \ntwo</s>three</s>"
    assert decode(load(tmp_path, "--dataset", str(tmp_path / "c.jsonl"), *common)) == (
        "four</s>five\n</s>six</s>"
    )
    Dataset.from_list(rows).to_parquet(tmp_path / "c.parquet")
    assert decode(load(tmp_path, "--dataset", str(tmp_path / "c.parquet"), *common)) == (
        "four</s>five\n</s>six</s>"
    )
    wikitext = tmp_path / "wikitext.jsonl"  # its rows are the lines of articles
    wikitext.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert decode(load(tmp_path, "--dataset", str(wikitext), *common)) == "four</s>five\nsix</s>"
    (tmp_path / "text.jsonl").write_text('{"text": "seven", "other": "x"}\n')
    wikitext = ["--dataset", str(tmp_path / "text.jsonl"), "--val-dataset", str(tmp_path / "b.txt")]
    assert decode(load(tmp_path, *wikitext)) == "seven</s>"
    (tmp_path / "b.txt").write_text("changed")  # the cache is stale
    assert decode(load(tmp_path, "--dataset", str(tmp_path / "b.txt"), *common)) == "changed</s>"


def test_end_is_held_out_without_validation_data(texts, tmp_path):
    path = tmp_path / "all.txt"
    path.write_text(texts[0].read_text() * 3)
    flags = ["--dataset", str(path), "--block-size", "16", "--model-name", "tiny"]
    args = parse_flags(gpt2_fsdp, flags)
    train_set, val_sets = block_dataset.load(args, ByT5Tokenizer())
    rows = [part.with_format(None) for part in (train_set, val_sets[str(path)])]
    blocks = load(tmp_path, *flags)
    assert [len(part) for part in rows] == [len(blocks) - len(blocks) // 20, len(blocks) // 20]
    assert list(rows[0]) + list(rows[1]) == list(blocks)
    assert decode(rows[0]) + decode(rows[1])[1:] == path.read_text().rstrip("\n") + "</s>"
    args.evaluate_only = True
    _, val_sets = block_dataset.load(args, ByT5Tokenizer())
    assert list(val_sets[str(path)].with_format(None)) == list(rows[1])
    path.write_text("short")
    with pytest.raises(ValueError, match="gives 1 blocks, .* Pass --val-dataset"):
        block_dataset.load(args, ByT5Tokenizer())


@pytest.mark.parametrize("content, flags, message", [
    (b"a", ["--model-name", "tiny"], None),
    (b"", ["--wrap", "size"], "argument --wrap: invalid unit_size value: 'size'"),
    (b"text text", ["--block-size", "2000"], "above the model's 1024 positions"),
    (b"", ["--output-dir", __file__], "is a file. Pass a directory"),
])  # fmt: skip
def test_bad_input_is_one_message(
    content, flags, message, texts, tmp_path, gpt2_directory, capfd, monkeypatch
):
    file = tmp_path / "train.txt"
    file.write_bytes(content)
    monkeypatch.chdir(ROOT)
    command = ["--model-name", "tiny", "--dataset", str(file), "--val-dataset", str(texts[1]),
               "--output-dir", str(tmp_path / "run"), "--block-size", "32", "--max-steps", "1",
               *flags]  # fmt: skip
    if message is None:  # the smallest possible text: one byte and EOS
        gpt2_fsdp.fsdp_main(parse_flags(gpt2_fsdp, command))
        return
    with pytest.raises(SystemExit) as end:
        gpt2_fsdp.fsdp_main(parse_flags(gpt2_fsdp, command))
    error = capfd.readouterr().err.strip().splitlines()[-1]
    assert end.value.code and error.startswith("error: ") and message in error


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
def test_offload_is_refused_where_it_trains_incorrectly(
    processes, flags, problem, monkeypatch, capsys
):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setenv("WORLD_SIZE", processes)
    flags = ["--cpu-offload", *flags]
    if not problem:
        assert parse_flags(gpt2_fsdp, flags).cpu_offload
        return
    with pytest.raises(SystemExit):
        parse_flags(gpt2_fsdp, flags)
    assert f"error: {problem}" in capsys.readouterr().err
