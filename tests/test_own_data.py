"""Scripts accept any data set that has len() and [i], such as a list of samples."""

import pytest
from conftest import launch, losses


@pytest.mark.parametrize("script", ["T5_training", "gpt2_fsdp", "llama_fsdp"])
def test_scripts_train_on_a_list_of_samples(script, tmp_path):
    flags = ["--model-name", "tiny", "--output-dir", tmp_path, "--log-every", "1"]
    flags += ["--batch-size", "4"]
    evaluated = ["--model-name", tmp_path / "final"]
    for more in (["--max-steps", "2"], ["--max-steps", "5"], ["--evaluate-only", *evaluated]):
        launch(0, "tests/workers/own_data.py", script, *flags, *more)
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5]
    assert (tmp_path / "final/model.safetensors").is_file()
    assert (tmp_path / "evaluation.json").is_file()
