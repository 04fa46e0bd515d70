"""Scripts accept any data set that has len() and [i], such as a list of samples."""

import importlib

import pytest
from conftest import losses
from own_data import samples

import gpt2_fsdp
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


@pytest.mark.parametrize("val_sets", [{}, {"mine": []}])
def test_missing_validation_set_is_an_error_before_training(val_sets, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(gpt2_fsdp, "load_data", lambda *_: (samples("gpt2_fsdp", 12), val_sets))
    with pytest.raises(SystemExit):
        flags = ["--model-name", "tiny", "--output-dir", str(tmp_path)]
        gpt2_fsdp.fsdp_main(parse_flags(gpt2_fsdp, flags))
    assert "error: load_data must return a validation set" in capfd.readouterr().err
