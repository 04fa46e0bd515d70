"""Models as people have them: hub caches, configs, old buffers, and tokenizers with more tokens."""

import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
from conftest import launch, metrics, status
from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GPT2LMHeadModel, T5ForConditionalGeneration

from runtime import weights

SHORT = ["--dataset", "docstrings", "--num-train-samples", "8", "--num-val-samples", "4",
         "--max-steps", "2", "--log-every", "1"]  # fmt: skip


@pytest.mark.parametrize("error", [LocalEntryNotFoundError, PermissionError, ConnectionError])
def test_cached_files_are_used_if_the_hub_or_its_list_is_missing(error, tmp_path, monkeypatch):
    """The cache may lack files that nobody needs, or be read-only."""
    calls = []

    def snapshot_download(name: str, local_files_only: bool = False, **_: object) -> str:
        calls.append(local_files_only)
        if not local_files_only:
            raise error("no network")
        raise IncompleteSnapshotError("LICENSE.txt is missing", snapshot_path=str(tmp_path))

    monkeypatch.setattr(weights, "snapshot_download", snapshot_download)
    assert weights.find_directory("org/model", ["*.json"]) == tmp_path
    assert calls == [False, True]


def test_missing_model_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="org/model is not cached, and the hub cannot be reached"):
        weights.find_directory("org/model", ["*.json"])


def change(directory: Path, base: Path, **fields: object) -> Path:
    """Write a copy of a model with other fields in its config.json; return its path."""
    directory.mkdir()
    for file in base.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    config = json.loads((base / "config.json").read_text()) | fields
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_config_that_changes_what_forward_returns_trains_and_is_kept(gpt2_directory, tmp_path):
    """So do the buffers of a file of Transformers 4."""
    fields = {"return_dict": False, "output_attentions": True, "output_hidden_states": True}
    fields |= {"torchscript": True, "layerdrop": 0.1, "pad_token_id": 10**6}
    base = change(tmp_path / "base", gpt2_directory, **fields)
    tensors = load_file(base / "model.safetensors")
    for i in range(2):
        tensors[f"transformer.h.{i}.attn.bias"] = torch.ones(1, 1, 8, 8)
        tensors[f"transformer.h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    for name, directory in (("plain", gpt2_directory), ("changed", base)):
        launch(0, "gpt2_fsdp.py", "--model-name", directory, *SHORT, "--block-size", "32",
               "--output-dir", tmp_path / name)  # fmt: skip
    one, two = (metrics(tmp_path / name, "train") for name in ("plain", "changed"))
    assert [line["loss"] for line in one] == [line["loss"] for line in two]
    config = json.loads((tmp_path / "changed/final/config.json").read_text())
    assert {key: config[key] for key in fields} == fields
    GPT2LMHeadModel.from_pretrained(tmp_path / "changed/final")


def test_generation_settings_of_older_models_are_in_their_config(
    process_group, t5_directory, tmp_path
):
    base = change(tmp_path / "base", t5_directory, num_beams=3, min_length=5, forced_bos_token_id=7)
    (base / "generation_config.json").unlink()
    plain = T5ForConditionalGeneration.from_pretrained(base)
    model, _ = weights.new_model(type(plain), plain.config, base)
    assert model.generation_config.num_beams == 3
    assert model.generation_config.to_dict() == plain.generation_config.to_dict()


def test_token_without_a_row_is_an_error_only_if_the_data_have_it(t5_directory, tmp_path):
    base = change(tmp_path / "base", t5_directory)
    tokenizer = AutoTokenizer.from_pretrained(base)
    count = T5ForConditionalGeneration.from_pretrained(base).config.vocab_size
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(count - len(tokenizer) + 1)])
    tokenizer.save_pretrained(base)
    last = tokenizer.convert_ids_to_tokens(count)
    for text, problem in (("plain words", None), (f"with {last} inside", last)):
        path = tmp_path / f"{len(text)}.jsonl"
        rows = [{"text": f"{text} {i}", "headline": "a summary"} for i in range(20)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        output = tmp_path / str(len(text))
        result = launch(0, "T5_training.py", "--model-name", base, "--dataset", path,
                        "--val-dataset", path, "--max-steps", "1", "--rouge-samples", "0",
                        "--output-dir", output, check=False)  # fmt: skip
        if problem is None:
            assert status(output) == "finished"
        else:
            assert result.returncode == 1 and f"the token {problem} ({count:,})" in result.stderr
            assert "It is in: " in result.stderr


@pytest.mark.parametrize("target", [None, "eng_Latn", "deu_Latn"])
def test_languages_of_a_tokenizer_are_printed_or_missing(target, monkeypatch, tmp_path, capsys):
    class Multilingual:
        vocab_files_names = {}
        src_lang, tgt_lang, eos_token_id = "eng_Latn", target, 2

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: Multilingual())
    text = f"The tokenizer has src_lang eng_Latn and tgt_lang {target}."
    if target is None:
        with pytest.raises(ValueError, match=f"{text} Set both in its tokenizer_config.json"):
            weights.load_tokenizer(tmp_path)
    else:  # equal ones too: summaries in one language
        weights.load_tokenizer(tmp_path)
        assert text in capsys.readouterr().out
