"""A run's identity: a resume rejects changes to it, and a start rejects nodes that differ."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from conftest import ROOT, error_lines
from transformers import AutoTokenizer

import gpt2_fsdp
import llama_fsdp
from benchmarks.driven import parse_flags
from runtime import checkpoints, ranks
from runtime.chats import CHATML

DATED = (
    "{{ strftime_now('%d %b %Y') }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>"
    "{% endfor %}{{ '<assistant>' if add_generation_prompt else '' }}"
)
UNDATED = DATED.replace("{{ strftime_now('%d %b %Y') }}", "")
SMALL = ["--max-steps", "2", "--log-every", "1", "--num-val-samples", "4"]


def start(script: ModuleType, *flags: object) -> int:
    """Run the script in this process and return its exit code."""
    try:
        return script.fsdp_main(parse_flags(script, [*SMALL, *map(str, flags)]))
    except SystemExit as end:
        return end.code


def test_resume_rejects_changed_chat_template(llama_directory, chats, tmp_path, capfd):
    flags = ["--max-seq-length", 96, "--model-name", llama_directory, "--dataset", chats]
    flags += ["--output-dir", tmp_path / "run"]
    chatml, file = ["--chat-template", "chatml"], tmp_path / "own.jinja"
    assert start(llama_fsdp, *flags, *chatml) == 0
    template = AutoTokenizer.from_pretrained(tmp_path / "run/final").chat_template
    assert template == CHATML
    file.write_text(UNDATED)
    capfd.readouterr()
    for more in [], ["--chat-template", file]:
        assert start(llama_fsdp, *flags, *more, "--max-steps", 4) == 1
        assert "--chat-template is " in capfd.readouterr().err
    prepare = [*flags[:-1], tmp_path / "made"]
    assert start(llama_fsdp, *prepare, "--chat-template", file, "--prepare-only") == 0
    train = [*flags[:4], "--dataset", tmp_path / "made/prepared", "--output-dir", tmp_path / "next"]
    assert start(llama_fsdp, *train, *chatml) == 1
    assert "was prepared with --chat-template " in capfd.readouterr().err
    assert start(llama_fsdp, *train, "--chat-template", file) == 0


def test_nodes_with_different_data_are_refused(texts, tmp_path, monkeypatch):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        shutil.copy(texts[0], folder / "train.txt")
        shutil.copy(texts[1], folder / "val.txt")
    text = texts[0].read_text()
    (folders[1] / "train.txt").write_text(text.replace("sine", "sign", 1))
    files = ["--dataset", "train.txt", "--val-dataset", "val.txt", "--block-size", "32"]
    flags = [*SMALL, *files, "--model-name", "tiny", "--output-dir", str(tmp_path / "run")]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:29411", "--rdzv-id", "d"]
    processes = []
    for rank, folder in enumerate(folders):
        monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", *rendezvous]
        command += ["--node-rank", str(rank), "--nproc-per-node", "1", ROOT / "gpt2_fsdp.py"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen([*command, *flags], cwd=folder, **pipes))
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert all(process.returncode for process in processes)
    message = error_lines(errors[0])[0]
    assert "training data is " in message and "on rank 0, " in message and "on rank 1." in message
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_resume_rejects_different_model_with_same_shapes(gpt2_directory, texts, tmp_path, capfd):
    other = {}
    for name, heads in ("copy", 4), ("heads", 2):
        other[name] = Path(shutil.copytree(gpt2_directory, tmp_path / name))
        config = json.loads((other[name] / "config.json").read_text())
        (other[name] / "config.json").write_text(json.dumps(config | {"n_head": heads}))
    files = ["--dataset", texts[0], "--val-dataset", texts[1], "--block-size", 32]
    flags = [*files, "--output-dir", tmp_path / "run", "--model-name"]
    assert start(gpt2_fsdp, *flags, gpt2_directory) == 0
    for more in ["--max-steps", 4], ["--export-only"]:
        assert start(gpt2_fsdp, *flags, other["heads"], *more) == 1
        assert "model is gpt2, crc " in capfd.readouterr().err
    assert start(gpt2_fsdp, *flags, other["copy"], "--max-steps", 4) == 0


def test_nodes_with_different_flags_are_refused(process_group, monkeypatch):
    flags = {"lr": 1e-3, "dataset": "a", "seed": 0}
    other_rank = checkpoints.flags_identity(flags)
    monkeypatch.setattr(ranks, "on_every_rank", lambda f: [f(), other_rank])
    assert checkpoints.flags_identity(flags | {"dataset": "b"}) == other_rank
    checkpoints.compare_ranks(checkpoints.flags_identity(flags))
    other_rank["--lr"] = "0.0001"
    with pytest.raises(ValueError, match="--lr is 0.001 on rank 0, 0.0001 on rank 1"):
        checkpoints.compare_ranks(checkpoints.flags_identity(flags))
