"""tools/prepare.py: training on prepared tokens equals training on the data."""

from pathlib import Path

import pytest
from conftest import launch, losses

SCRIPTS = {  # {flag: fixture}, other flags
    "T5_training": ({"--model-name": "t5_directory", "--dataset": "pairs"}, ["--rouge-samples=0"]),
    "gpt2_fsdp": ({"--model-name": "gpt2_directory", "--dataset": "texts"}, ["--block-size=32"]),
    "llama_fsdp": (
        {"--model-name": "llama_directory", "--dataset": "chats"}, ["--max-seq-length=64"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
def test_losses_are_those_of_the_data(script, request, tmp_path):
    fixtures, flags = SCRIPTS[script]
    for flag, name in fixtures.items():
        value = request.getfixturevalue(name)
        flags = [*flags, flag, value[0] if isinstance(value, tuple) else value]
    flags += ["--num-train-samples", 30, "--max-steps", 4, "--log-every", 1]
    launch(0, "tools/prepare.py", f"{script}.py", *flags, "--output-dir", tmp_path)
    prepared = swapped(flags, "--dataset", tmp_path / "prepared")
    launch(0, f"{script}.py", *flags, "--output-dir", tmp_path / "data")
    launch(0, f"{script}.py", *prepared, "--output-dir", tmp_path / "tokens")
    for event in ("train", "val"):
        assert losses(tmp_path / "data", event) == losses(tmp_path / "tokens", event)


def swapped(flags: list, name: str, value: Path) -> list:
    """Return flags with another value for one of them."""
    index = flags.index(name) + 1
    return [*flags[:index], value, *flags[index + 1 :]]


def test_several_validation_sets_and_existing_directories_are_refused(texts, tmp_path):
    flags = ["gpt2_fsdp.py", "--model-name", "tiny", "--dataset", texts[0], "--output-dir"]
    result = launch(0, "tools/prepare.py", *flags, tmp_path, "--val-dataset", *texts, check=False)
    assert result.returncode == 1 and "There are 2 validation sets." in result.stderr
    (tmp_path / "prepared").mkdir()
    result = launch(0, "tools/prepare.py", *flags, tmp_path, check=False)
    assert result.returncode == 1 and "prepared exists. Delete it" in result.stderr
    result = launch(0, "tools/prepare.py", "nothere.py", check=False)
    assert result.stderr == "error: nothere.py does not exist. Pass a training script.\n"
