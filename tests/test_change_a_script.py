"""The diffs of docs/change-a-script.md, all in one copy of the script, train and go on."""

import re
import shutil
from pathlib import Path

from conftest import ROOT, launch, losses, metrics
from test_copies import OPTIONAL

PAGE = (ROOT / "docs/change-a-script.md").read_text()


def changed(source: str, diff: str) -> str:
    """Return the text with a diff applied, whose lines must stand in it once, in this order."""
    lines = diff.splitlines()
    old = "".join(f"{line[1:]}\n" for line in lines if line[0] != "+")
    new = "".join(f"{line[1:]}\n" for line in lines if line[0] != "-")
    assert source.count(old) == 1, diff
    return source.replace(old, new)


def test_all_diffs_together(tmp_path: Path) -> None:
    """BART learns sums by Lion, with smoothed labels, a cosine and an average of its weights, and
    goes on; without the rooms that such a copy may leave out."""
    diffs = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    assert len(diffs) == 12
    source = (ROOT / "T5_training.py").read_text()
    for diff in diffs:
        source = changed(source, diff)
    (tmp_path / "my_script.py").write_text(source)
    for name in ("policies", "summarization_dataset", "tests/lion", "tests/ema"):
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    left_out = shutil.ignore_patterns("__pycache__", *OPTIONAL)
    shutil.copytree(ROOT / "runtime", tmp_path / "runtime", ignore=left_out)

    output = tmp_path / "output"
    flags = ["--model-name", "tiny", "--batch-size", 8, "--lr", 1e-3, "--log-every", 1,
             "--rouge-samples", 4, "--target-length", 8, "--output-dir", output]  # fmt: skip
    for steps in (20, 22):
        launch(0, tmp_path / "my_script.py", *flags, "--max-steps", steps, cwd=tmp_path)
    found = losses(output)
    assert list(found) == list(range(1, 23)) and found[22] < 0.8 * found[1]
    assert [line["updates"] for line in metrics(output, "train")] == list(range(1, 23))
    assert [line["step"] for line in metrics(output, "start")] == [0, 20]
    assert '"BartForConditionalGeneration"' in (output / "final/config.json").read_text()
