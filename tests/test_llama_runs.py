"""Test whole runs of llama_fsdp.py: resume after a kill, export and evaluation."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import check_equal_weights, launch, losses, metrics, weights
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

import chat_dataset
import llama_fsdp
from benchmarks.driven import parse_flags
from runtime.chats import LLAMA_2

RELOAD = """
import json, sys, torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
sys.path.insert(0, ".")
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
    return ["--model-name", str(llama_directory), "--dataset", str(chats), "--dataset", str(pairs),
            "--max-seq-length", "96", "--num-train-samples", "20", "--max-steps", "12",
            "--log-every", "1", "--eval-every", "4", "--save-every", "2", "--lr", "1e-2",
            "--export-dtype", "fp32"]  # fmt: skip


@pytest.fixture(scope="module")
def reference_run(tmp_path_factory: pytest.TempPathFactory, flags: list[str]) -> Path:
    """Return the directory of a finished run of two ranks."""
    output = tmp_path_factory.mktemp("run") / "uninterrupted"
    launch(2, "llama_fsdp.py", *flags, "--batch-size", "2", "--output-dir", output)
    return output


def test_run_validates_each_data_set(reference_run, flags):
    train, val = losses(reference_run), metrics(reference_run, "val")
    assert train[12] < 0.9 * train[1]
    assert metrics(reference_run, "train")[-1]["epoch"] > 0
    assert list(val[-1]["losses"]) == [flags[3], flags[5]]
    args, tokenizer = parse_flags(llama_fsdp, flags), ByT5Tokenizer(chat_template=LLAMA_2)
    _, sets = chat_dataset.load(args, tokenizer)
    counts = [chat_dataset.count_targets(packs.dataset) for packs in sets.values()]
    total = sum(n * x for n, x in zip(counts, val[-1]["losses"].values(), strict=True))
    assert val[-1]["loss"] == pytest.approx(total / sum(counts), rel=1e-6)


@pytest.mark.slow
def test_tied_model_stays_tied(llama_directory, flags, tmp_path):
    config = LlamaConfig.from_pretrained(llama_directory)
    config.tie_word_embeddings = True
    torch.manual_seed(1)
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "tied")
    llama_fsdp.ByT5Tokenizer().save_pretrained(tmp_path / "tied")
    command = [*flags[2:], "--model-name", tmp_path / "tied", "--output-dir", tmp_path / "run"]
    launch(2, "llama_fsdp.py", *command, "--max-steps", "2")
    args, tokenizer = parse_flags(llama_fsdp, flags), ByT5Tokenizer(chat_template=LLAMA_2)
    total, count = 0.0, 0
    _, sets = chat_dataset.load(args, tokenizer)
    for row in sets[args.dataset[0]].dataset.with_format(None):
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
        logits = model(ids[:, :-1]).logits[0]
        total += F.cross_entropy(logits, labels[1:], reduction="sum").item()
        count += int((labels != -100).sum())
    first = metrics(tmp_path / "run", "val")[0]["losses"][args.dataset[0]]
    assert first == pytest.approx(total / count, rel=1e-5)
    assert "lm_head.weight" not in weights(tmp_path / "run/final")
    exported = LlamaForCausalLM.from_pretrained(tmp_path / "run/final")
    assert exported.lm_head.weight is exported.model.embed_tokens.weight


def test_killed_run_with_full_checkpoints_resumes_bit_for_bit(reference_run, flags, tmp_path):
    command = [*flags, "--batch-size", "2", "--output-dir", tmp_path, "--checkpoint-type", "full"]
    assert launch(
        2, "tests/workers/killed.py", "llama_fsdp", 1, 8, *command, check=False
    ).returncode
    newest = tmp_path / "checkpoints/step-00000006"
    assert (newest / "full.pt").exists() and not any(newest.glob("*.distcp"))
    launch(2, "llama_fsdp.py", *command)
    assert [line["step"] for line in metrics(tmp_path, "start")] == [0, 6]
    assert losses(tmp_path) == losses(reference_run)
    assert losses(tmp_path, "val") == losses(reference_run, "val")
    check_equal_weights(tmp_path / "final", reference_run / "final")
    assert not list(tmp_path.glob("checkpoints/tmp-*"))


def test_export_has_the_same_loss_in_plain_transformers(reference_run, flags, tmp_path):
    """Load weights, chat template and generation settings in a new process."""
    args, tokenizer = parse_flags(llama_fsdp, flags), ByT5Tokenizer(chat_template=LLAMA_2)
    _, sets = chat_dataset.load(args, tokenizer)
    rows = []
    for ids in sets[args.dataset[1]].dataset.with_format(None)["input_ids"]:
        prompt, answer = tokenizer.decode(ids).split(" [/INST] ")
        prompt = prompt.removeprefix("[INST] ")
        completion = answer.removesuffix("</s>").strip()
        rows.append(json.dumps({"prompt": prompt, "completion": completion}) + "\n")
    (tmp_path / "held_out.jsonl").write_text("".join(rows))
    command = [sys.executable, "-c", RELOAD, reference_run / "final", tmp_path / "held_out.jsonl"]
    result = json.loads(subprocess.check_output(command, text=True))
    expected = metrics(reference_run, "val")[-1]["losses"][flags[5]]
    assert result["loss"] == pytest.approx(expected, rel=1e-5)
    assert result["class"] == "LlamaForCausalLM" and result["dtype"] == "torch.float32"
    assert result["temperature"] == 0.6


def test_evaluation_reports_the_loss_of_each_data_set(reference_run, flags, tmp_path):
    run = Path(shutil.copytree(reference_run, tmp_path / "run"))
    words = [*flags, "--evaluate-only", "--fsdp", "2", "--output-dir", str(run)]
    llama_fsdp.fsdp_main(parse_flags(llama_fsdp, [*words, "--model-name", str(run / "final")]))
    evaluation = json.loads((run / "evaluation.json").read_text())
    expected = metrics(run, "val")[-1]
    assert evaluation["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert evaluation["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    for name in ("status", "metrics.jsonl"):
        assert (run / name).read_bytes() == (reference_run / name).read_bytes()
