"""tools/generate.py: prompts from arguments and from standard input."""

import subprocess
import sys

import pytest
from conftest import ROOT


def generate(*args: object, lines: str = "") -> subprocess.CompletedProcess:
    """Run tools/generate.py with `lines` as standard input."""
    command = [sys.executable, str(ROOT / "tools/generate.py"), *map(str, args)]
    return subprocess.run(command, input=lines, capture_output=True, text=True)


@pytest.mark.parametrize("kind", ["t5", "gpt2", "llama"])
def test_each_line_is_a_prompt(kind, request):
    directory = request.getfixturevalue(f"{kind}_directory")
    lines = generate(directory, "--max-new-tokens", 5, lines="one\ntwo\n")
    assert lines.returncode == 0 and not lines.stderr, lines.stderr
    single = generate(directory, "one", "--max-new-tokens", 5)
    assert lines.stdout.count("\n") >= 2 and single.stdout
    if kind != "llama":  # its generation_config.json enables sampling
        assert lines.stdout.startswith(single.stdout)


def test_directory_without_a_model_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "nothere"):
        result = generate(path, "one")
        assert result.returncode == 1
        assert result.stderr == (f"error: {path} has no model. Pass a final/ or best/ of a run.\n")
