"""Scripts accept any data set that has len() and [i], such as a list of samples."""

import importlib

import pytest
from conftest import losses
from own_data import samples

from benchmarks.driven import parse_flags


@pytest.mark.parametrize("script", ["T5_training", "gpt2_fsdp", "llama_fsdp"])
def test_scripts_train_on_a_list_of_samples(script, tmp_path, monkeypatch):
    module = importlib.import_module(script)
    sets = samples(script, 12), {"mine": samples(script, 3), "validation": samples(script, 2)}
    monkeypatch.setattr(module, "load_data", lambda *_: sets)
    flags = ["--model-name", "tiny", "--output-dir", str(tmp_path), "--log-every", "1"]
    for more in (["--max-steps", "2"], ["--max-steps", "4"], ["--evaluate-only"]):
        assert module.fsdp_main(parse_flags(module, [*flags, *more])) == 0
    assert list(losses(tmp_path)) == [1, 2, 3, 4]
    assert (tmp_path / "final/model.safetensors").is_file()
    assert (tmp_path / "evaluation.json").is_file()
