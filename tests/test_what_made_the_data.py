"""Tokens and their makers: templates, special tokens, the date; and data that differ by node."""

import json
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from conftest import ROOT, errors_said
from datasets import Dataset
from runtime.rows import chat_templates
from test_chat_dataset import arguments as chats_arguments
from transformers import AutoTokenizer, ByT5Tokenizer

import chat_dataset
import gpt2_fsdp
import llama_fsdp
import summarization_dataset
import T5_training
from runtime import identity, ranks

DATED = (
    "{{ strftime_now('%d %b %Y') }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>"
    "{% endfor %}{{ '<assistant>' if add_generation_prompt else '' }}"
)
UNDATED = DATED.replace("{{ strftime_now('%d %b %Y') }}", "")
SMALL = ["--max-steps", "2", "--log-every", "1", "--num-val-samples", "4"]


def start(script: ModuleType, *flags: object) -> int:
    """Return the exit code of the script, run in this process."""
    try:
        return script.fsdp_main(script.parse_args([*SMALL, *map(str, flags)]))
    except SystemExit as end:
        return end.code


@pytest.fixture
def model_with(llama_directory: Path, tmp_path: Path) -> Callable:
    """Copies of a model whose tokenizer has other attributes."""

    def make(name: str, **changes: object) -> Path:
        path = Path(shutil.copytree(llama_directory, tmp_path / name))
        tokenizer = AutoTokenizer.from_pretrained(path)
        for attribute, value in changes.items():
            setattr(tokenizer, attribute, value)
        tokenizer.save_pretrained(path)
        return path

    return make


def test_prepared_chats_of_another_template(
    model_with: Callable, chats: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """Or of another EOS: refused, with what differs. A set that says nothing is made again."""
    made = tmp_path / "made"
    first = model_with("first", chat_template=UNDATED)
    flags = ["--max-seq-length", 64, "--output-dir"]
    command = [*flags, made, "--dataset", chats, "--model-name", first, "--prepare-only"]
    assert start(llama_fsdp, *command) == 0
    prepared = made / "prepared"
    for name, changes, words in (
        ("second", {"chat_template": UNDATED.replace("<", "[")}, "another chat template than"),
        (
            "third",
            {"chat_template": UNDATED, "eos_token": "<pad>"},
            "another eos_token (</s> there, <pad> here)",
        ),
    ):
        other = model_with(name, **changes)
        command = [*flags, tmp_path / "run", "--dataset", prepared, "--model-name", other]
        assert start(llama_fsdp, *command) == 1
        assert words in capfd.readouterr().err
    again = [*flags, tmp_path / "run", "--dataset", prepared, "--model-name"]
    assert start(llama_fsdp, *again, model_with("fourth", chat_template=UNDATED)) == 0
    for info in prepared.glob("*/dataset_info.json"):
        text = json.loads(info.read_text())
        described = json.loads(text["description"])
        del described["rules"]
        info.write_text(json.dumps(text | {"description": json.dumps(described)}))
    assert start(llama_fsdp, *again, first) == 1
    assert "does not say what made its tokens: make it again" in capfd.readouterr().err


def test_another_chat_template_is_another_run(
    llama_directory: Path, chats: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """It is refused by a resume, an export, and prepared tokens; final/ has the one trained in."""
    flags = ["--max-seq-length", 96, "--model-name", llama_directory, "--dataset", chats]
    flags += ["--output-dir", tmp_path / "run"]
    chatml, file = ["--chat-template", "chatml"], tmp_path / "own.jinja"
    assert start(llama_fsdp, *flags, *chatml) == 0
    template = AutoTokenizer.from_pretrained(tmp_path / "run/final").chat_template
    assert template == chat_templates.CHATML
    capfd.readouterr()
    file.write_text(UNDATED)
    for more in ([], ["--chat-template", "prompter"], ["--chat-template", file]):
        for what in (["--max-steps", 4], ["--export-only"]):
            assert start(llama_fsdp, *flags, *more, *what) == 1
            said = capfd.readouterr().err
            assert "was saved by a different run: " in said and "chat template is " in said
    assert start(llama_fsdp, *flags, *chatml, "--max-steps", 3) == 0
    made = [*flags[:-1], tmp_path / "made"]
    assert start(llama_fsdp, *made, "--chat-template", file, "--prepare-only") == 0
    again = [*flags[:4], "--dataset", tmp_path / "made/prepared", "--output-dir", tmp_path / "next"]
    capfd.readouterr()
    assert start(llama_fsdp, *again, *chatml) == 1
    assert "give the --chat-template that it was made with" in capfd.readouterr().err
    assert start(llama_fsdp, *again, "--chat-template", file) == 0
    file.write_text(UNDATED.replace("<", "["))  # the same name
    assert start(llama_fsdp, *again, "--chat-template", file, "--export-only") == 1
    assert "chat template is " in capfd.readouterr().err


def test_prepared_text_of_another_eos(
    gpt2_directory: Path, texts: tuple, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """The same of GPT-2; a chat template does not matter there."""
    other = {}
    for name, changes in (("a", {"eos_token": "<pad>"}), ("b", {"chat_template": "x"})):
        other[name] = Path(shutil.copytree(gpt2_directory, tmp_path / name))
        tokenizer = AutoTokenizer.from_pretrained(gpt2_directory)
        for attribute, value in changes.items():
            setattr(tokenizer, attribute, value)
        tokenizer.save_pretrained(other[name])
    flags = ["--block-size", 32, "--output-dir"]
    files = ["--train-file", texts[0], "--val-file", texts[1]]
    made = [*flags, tmp_path / "made", *files, "--model-name", gpt2_directory, "--prepare-only"]
    assert start(gpt2_fsdp, *made) == 0
    again = [*flags, tmp_path / "run", "--dataset", tmp_path / "made/prepared", "--model-name"]
    assert start(gpt2_fsdp, *again, other["a"]) == 1
    assert "eos_token (</s> there, <pad> here)" in capfd.readouterr().err
    assert start(gpt2_fsdp, *again, other["b"]) == 0


def test_nodes_with_other_data_do_not_train_together(
    texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two torchruns with their own caches and files; in the second's another word, or fewer."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        shutil.copy(texts[0], folder / "train.txt")
        shutil.copy(texts[1], folder / "val.txt")
    text = texts[0].read_text()
    (folders[1] / "train.txt").write_text(text.replace("sine", "sign", 1))
    files = ["--train-file", "train.txt", "--val-file", "val.txt", "--block-size", "32"]
    flags = [*SMALL, *files, "--model-name", "tiny", "--output-dir", str(tmp_path / "run")]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:29411", "--rdzv-id", "d"]
    processes = []
    for rank, folder in enumerate(folders):
        monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", *rendezvous]
        command += ["--node-rank", str(rank), "--nproc-per-node", "1", ROOT / "gpt2_fsdp.py"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen([*command, *flags], cwd=folder, **pipes))
    ended = [process.communicate(timeout=120)[1] for process in processes]
    assert all(process.returncode for process in processes)
    said = errors_said(ended[0])[0]
    assert "training data is " in said and "on node 0 (" in said and "on node 1 (" in said
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_another_model_of_the_same_shapes(
    gpt2_directory: Path, texts: tuple, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """Other heads compute something else; another name changes nothing."""
    other = {}
    for name, heads in ("copy", 4), ("heads", 2):
        other[name] = Path(shutil.copytree(gpt2_directory, tmp_path / name))
        config = json.loads((other[name] / "config.json").read_text())
        (other[name] / "config.json").write_text(json.dumps(config | {"n_head": heads}))
    files = ["--train-file", texts[0], "--val-file", texts[1], "--block-size", 32]
    flags = [*files, "--output-dir", tmp_path / "run", "--model-name"]
    assert start(gpt2_fsdp, *flags, gpt2_directory) == 0
    for more in ["--max-steps", 4], ["--export-only"]:
        assert start(gpt2_fsdp, *flags, other["heads"], *more) == 1
        assert "model is gpt2, crc " in capfd.readouterr().err
    assert start(gpt2_fsdp, *flags, other["copy"], "--max-steps", 4) == 0


def test_rows_saved_anew_by_the_same_code(tmp_path: Path) -> None:
    """`datasets` takes them for the same; what was made of the old ones is not used."""
    rows = [{"prompt": f"{word} {i}", "completion": "x"} for word in "ab" for i in range(9)]
    found = []
    args, tokenizer = chats_arguments(), ByT5Tokenizer(chat_template=UNDATED)
    for word in range(2):
        made = Dataset.from_list(rows[9 * word :][:9])
        made._fingerprint = "the same"
        shutil.rmtree(tmp_path / "rows", ignore_errors=True)
        made.save_to_disk(tmp_path / "rows")
        sets = chat_dataset.load_documents(args, tokenizer, str(tmp_path / "rows"), False)
        found.append([ids for part in sets for ids in part["input_ids"][:]])
    assert found[0] != found[1]


def test_own_tokens_with_the_columns_of_prepared_ones(tmp_path: Path) -> None:
    """They are split like others: no example is validated on that is trained on."""
    rows = [{"input_ids": [i, 1], "labels": [i, 1], "length": 2} for i in range(5, 65)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--model-name", "tiny", "--dataset", path, "--rouge-samples", "0"]
    args = T5_training.parse_args(list(map(str, flags)))
    sets = summarization_dataset.load_summarization(args, ByT5Tokenizer(), verbose=False)
    train, val = ({tuple(ids) for ids in part["input_ids"][:]} for part in sets)
    assert len(train) == 57 and len(val) == 3 and not train & val


def test_other_flags_on_another_node(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused by name; places of files may differ."""
    args = Namespace(lr=1e-3, dataset="a", seed=0)
    there = identity.of_flags(args) | {}
    monkeypatch.setattr(ranks, "on_every_rank", lambda f: [f(), ("node 1 (b)", there)])
    assert identity.of_flags(args) == identity.of_flags(Namespace(lr=1e-3, dataset="b", seed=0))
    identity.compare_ranks(identity.of_flags(args))
    there["--lr"] = "0.0001"
    with pytest.raises(ValueError, match=r"--lr is 0.001 on node 0 .*; 0.0001 on node 1 \(b\)"):
        identity.compare_ranks(identity.of_flags(args))


def test_validation_data_of_an_evaluation_is_compared(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its length and up to 256 samples."""
    loader = Namespace(dataset=[{"input_ids": [i]} for i in range(600)])
    args = Namespace(dataset="x", seed=0)
    (mine, _) = identity.of_data(args, None, {"mine": loader}).values()
    assert mine == identity.fingerprint(loader.dataset) and mine.startswith("600 samples, crc ")
    there = "node 1 (b)", {"validation data 1": "450 samples, crc 0"}
    monkeypatch.setattr(ranks, "on_every_rank", lambda f: [f(), there])
    with pytest.raises(ValueError, match=r"450 samples, crc 0 on node 1 \(b\). Give all nodes"):
        identity.of_data(args, None, {"mine": loader})


def test_the_date_in_a_template_is_always_the_same(
    model_with: Callable, chats: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """A log line names it; the exported tokenizer keeps its own template."""
    model = model_with("dated", chat_template=DATED)
    flags = ["--max-seq-length", 64, "--dataset", chats, "--model-name", model, "--output-dir"]
    assert start(llama_fsdp, *flags, tmp_path / "run") == 0
    said = capfd.readouterr().out
    assert "The chat template asks for the date: it is always 2024-07-26." in said
    assert "26 Jul 2024" in said  # in the example
    assert "strftime_now" in AutoTokenizer.from_pretrained(tmp_path / "run/final").chat_template
