"""A copy of a script needs policies.py, its data and runtime/, of which it leaves out some."""

import shutil
from pathlib import Path

import pytest
from conftest import ROOT, errors_said, launch, losses, metrics, status, weights

OPTIONAL = ("adapters.py", "nf4.py", "paged_adamw.py", "paged.py", "attention.py",
            "chats.py", "tokens.py", "trackers.py")  # fmt: skip
SCRIPTS = {  # its data, and flags that make texts short
    "gpt2_fsdp": ("block_dataset", ["--block-size", "32"]),
    "T5_training": (
        "summarization_dataset",
        ["--source-length", "32", "--target-length", "8", "--rouge-samples", "0"],
    ),
}


@pytest.mark.slow  # test_change_a_script has one copy of the kind
@pytest.mark.parametrize("script", list(SCRIPTS))
def test_a_copy_without_the_optional_rooms(script: str, tmp_path: Path) -> None:
    """It trains, goes on, and exports; a flag that needs what was left out is refused."""
    data, short = SCRIPTS[script]
    for name in (script, data, "policies"):
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    left_out = shutil.ignore_patterns("__pycache__", *OPTIONAL)
    shutil.copytree(ROOT / "runtime", tmp_path / "runtime", ignore=left_out)
    copied = {path.name for path in tmp_path.rglob("*.py")}
    assert not copied & set(OPTIONAL) and "readers.py" in copied

    output = tmp_path / "output"
    command = [tmp_path / f"{script}.py", "--model-name", "tiny", "--dataset", "docstrings",
               "--num-train-samples", "16", "--num-val-samples", "4", "--log-every", "1",
               "--output-dir", output, *short]  # fmt: skip
    for steps in (2, 3):
        launch(0, *command, "--max-steps", steps, cwd=tmp_path)
        assert status(output) == "finished"
    assert [line["step"] for line in metrics(output, "start")] == [0, 2]
    assert list(losses(output)) == [1, 2, 3]
    assert len(weights(output / "final")) > 20

    result = launch(0, *command, "--track", "tensorboard", check=False, cwd=tmp_path)
    assert result.returncode == 1
    (error,) = errors_said(result.stderr)
    assert "--track needs runtime/trackers.py, which is not here" in error
