"""Compare llama_fsdp.py with plain single-process PyTorch: loading, packing, loss; and whole runs:
resume after a kill, export and evaluation."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import check_equal_weights, launch, losses, metrics, weights
from in_process import start
from ten_steps import (
    COMPILED,
    CORE_VARIANTS,
    check_no_host_sync,
    check_recomputation,
    parse_args,
)
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

import chat_dataset
import llama_fsdp
from core.chunked_loss import LossHead

TWO_RANKS = CORE_VARIANTS | {
    "compile": COMPILED,
    "padded": ["--no-packing"],
    "eager": ["--attention", "eager"],
    "bf16": ["--precision", "bf16"],
    "ddp_bf16": ["--precision", "bf16", "--strategy", "ddp"],
    "fsdp2_bf16": ["--fsdp", "2", "--precision", "bf16"],
    "fsdp2_compile": ["--fsdp", "2", *COMPILED],
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
    model = LlamaForCausalLM.from_pretrained(llama_directory, dtype=torch.float32)
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


def test_step_never_waits_for_the_device(two_ranks):
    variants = "full_shard", "fsdp2", "ddp", "accumulate"
    check_no_host_sync(two_ranks, [f"{name} without log" for name in variants])


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
    model = LlamaForCausalLM.from_pretrained(llama_directory)
    expected = dict(model.named_parameters())
    assert two_ranks["loaded"].keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in two_ranks["loaded"].items())
    assert two_ranks["full_shard"]["units"] == 3 + 3
    assert two_ranks["ddp"]["units"] == 0


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


RELOAD = """
import json, sys, torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
total, count = 0.0, 0
for line in open(sys.argv[2]):
    row = json.loads(line)
    chat = [{"role": "user", "content": row["prompt"]}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    start = tokenizer(text, add_special_tokens=False).input_ids
    answer = " " + row["completion"] + " " + tokenizer.eos_token
    end = tokenizer(answer, add_special_tokens=False).input_ids
    ids = torch.tensor([start + end])
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits[0, len(start) - 1 :]
    total += F.cross_entropy(logits.double(), ids[0, len(start) :], reduction="sum").item()
    count += len(end)
settings = model.generation_config
print(json.dumps({"loss": total / count, "class": type(model).__name__, "dtype": str(model.dtype),
                  "temperature": settings.temperature}))
"""


@pytest.fixture(scope="module")
def flags(llama_directory: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> list:
    """Return flags for twelve steps on two data sets; at a global batch of 4, more than one
    epoch."""
    pairs = tmp_path_factory.mktemp("pairs") / "pairs.csv"
    rows = "".join(f"how much is {i}?,it is {'x' * (i % 5)}\n" for i in range(30))
    pairs.write_text("prompt,completion\n" + rows)
    return ["--model-name", str(llama_directory), "--dataset", str(chats), str(pairs),
            "--max-seq-length", "96", "--num-train-samples", "20", "--max-steps", "12",
            "--log-every", "1", "--eval-every", "4", "--save-every", "2", "--lr", "1e-2",
            "--export-dtype", "fp32"]  # fmt: skip


@pytest.fixture(scope="module")
def reference_run(tmp_path_factory: pytest.TempPathFactory, flags: list[str]) -> Path:
    """Return the directory of a finished run of two ranks."""
    output = tmp_path_factory.mktemp("run") / "uninterrupted"
    launch(2, "llama_fsdp.py", *flags, "--batch-size", "2", "--output-dir", output)
    return output


def val_documents(flags: list[str]) -> dict[str, list[dict]]:
    """Return the validation documents, token ids and labels, by data set."""
    data = parse_args(llama_fsdp, flags).data
    _, sets = chat_dataset.load(data, ByT5Tokenizer(chat_template=chat_dataset.LLAMA_2))
    return {name: list(packs.dataset.with_format(None)) for name, packs in sets.items()}


def held_out_loss(model: torch.nn.Module, documents: list[dict]) -> float:
    """Return the mean loss over the target tokens of documents."""
    total, count = 0.0, 0
    for row in documents:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"][1:])
        with torch.no_grad():
            logits = model(ids[:, :-1]).logits[0]
        total += F.cross_entropy(logits.double(), labels, reduction="sum").item()
        count += int((labels != -100).sum())
    return total / count


def test_run_validates_each_data_set(reference_run, flags):
    train, val = losses(reference_run), metrics(reference_run, "val")
    assert train[12] < 0.9 * train[1]
    assert list(val[-1]["losses"]) == [flags[3], flags[4]]
    model = LlamaForCausalLM.from_pretrained(reference_run / "final")
    documents = val_documents(flags)
    for name, loss in val[-1]["losses"].items():
        assert loss == pytest.approx(held_out_loss(model, documents[name]), rel=1e-5)
    every = [row for rows in documents.values() for row in rows]
    assert val[-1]["loss"] == pytest.approx(held_out_loss(model, every), rel=1e-5)


@pytest.mark.slow
def test_tied_model_stays_tied(llama_directory, flags, tmp_path):
    config = LlamaConfig.from_pretrained(llama_directory)
    config.tie_word_embeddings = True
    torch.manual_seed(1)
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "tied")
    ByT5Tokenizer().save_pretrained(tmp_path / "tied")
    command = [*flags[2:], "--model-name", tmp_path / "tied", "--output-dir", tmp_path / "run"]
    launch(2, "llama_fsdp.py", *command, "--max-steps", "2")
    first = metrics(tmp_path / "run", "val")[0]["losses"][flags[3]]
    expected = held_out_loss(model, val_documents(flags)[flags[3]])
    assert first == pytest.approx(expected, rel=1e-5)
    assert "lm_head.weight" not in weights(tmp_path / "run/final")
    exported = LlamaForCausalLM.from_pretrained(tmp_path / "run/final")
    assert exported.lm_head.weight is exported.model.embed_tokens.weight


def test_killed_run_with_full_checkpoints_resumes_bit_for_bit(reference_run, flags, tmp_path):
    command = [*flags, "--batch-size", "2", "--output-dir", tmp_path, "--checkpoint-type", "full"]
    killed = launch(2, "tests/workers/killed.py", "llama_fsdp", 1, 8, *command, check=False)
    assert killed.returncode
    newest = tmp_path / "checkpoints/step-00000006"
    assert (newest / "full.pt").exists() and not any(newest.glob("*.distcp"))
    launch(2, "llama_fsdp.py", *command)
    assert [line["step"] for line in metrics(tmp_path, "start")] == [0, 6]
    assert losses(tmp_path) == losses(reference_run)
    assert losses(tmp_path, "val") == losses(reference_run, "val")
    check_equal_weights(tmp_path / "final", reference_run / "final")


def test_export_has_the_same_loss_in_plain_transformers(reference_run, flags, tmp_path):
    """Load weights, chat template and generation settings in a new process."""
    tokenizer, rows = ByT5Tokenizer(), []
    for document in val_documents(flags)[flags[4]]:
        prompt, answer = tokenizer.decode(document["input_ids"]).split(" [/INST] ")
        prompt = prompt.removeprefix("[INST] ")
        completion = answer.removesuffix("</s>").strip()
        rows.append(json.dumps({"prompt": prompt, "completion": completion}) + "\n")
    (tmp_path / "held_out.jsonl").write_text("".join(rows))
    command = [sys.executable, "-c", RELOAD, reference_run / "final", tmp_path / "held_out.jsonl"]
    result = json.loads(subprocess.check_output(command, text=True))
    expected = metrics(reference_run, "val")[-1]["losses"][flags[4]]
    assert result["loss"] == pytest.approx(expected, rel=1e-5)
    assert result["class"] == "LlamaForCausalLM" and result["dtype"] == "torch.float32"
    assert result["temperature"] == 0.6


def test_evaluation_reports_the_loss_of_each_data_set(reference_run, flags, tmp_path):
    run = Path(shutil.copytree(reference_run, tmp_path / "run"))
    words = [*flags, "--evaluate-only", "--fsdp", "2", "--output-dir", run]
    assert start(llama_fsdp, *words, "--model-name", run / "final") == 0
    evaluation = json.loads((run / "evaluation.json").read_text())
    expected = metrics(run, "val")[-1]
    assert evaluation["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert evaluation["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    for name in ("status", "metrics.jsonl"):
        assert (run / name).read_bytes() == (reference_run / name).read_bytes()
