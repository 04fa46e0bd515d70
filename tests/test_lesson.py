"""docs/lesson.py prints what docs/sharding.md says, with and without the exercises' changes."""

import re
import textwrap
from pathlib import Path

import draw_sharding
import pytest
from conftest import ROOT, launch
from copied import diffs
from test_weight import count_nodes, tree_of

LESSON = (ROOT / "docs/lesson.py").read_text()
PAGE = (ROOT / "docs/sharding.md").read_text()
STEPS, EXERCISES = PAGE.split("## Exercises")
EXERCISE = re.compile(r"^\d\. .*?( *```diff\n.*?)```text\n(.*?)```", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"\d+\.\d+|\b\d+\b")
OPTIMIZER = "optimizer = AdamW(model.parameters(), lr=5e-4)"
FSDP1_IMPORTS = """import functools
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
"""


def run(directory: Path, processes: int, *flags: str, changes: dict[str, str] | None = None) -> str:
    """Run the lesson, with each key of `changes` replaced by its value, in `directory`; return
    what it prints. Fail if a library warns."""
    text = LESSON
    for old, new in (changes or {}).items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (directory / "lesson.py").write_text(text)
    result = launch(processes, directory / "lesson.py", *flags, cwd=directory)
    assert not re.search("warn", result.stderr, re.IGNORECASE), result.stderr
    return result.stdout


def losses(output: str) -> list[float]:
    """Return the losses of all steps that a run printed."""
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]


def norms(output: str) -> list[float]:
    """Return the gradient norms of all steps that a run printed."""
    return [float(norm) for norm in re.findall(r"norm (\d+\.\d+)", output)]


def check_lines(lines: str, output: str, tolerance: float = 2e-5) -> None:
    """Check that a run printed each line of the page. Other CPUs round otherwise: the last digits
    of a number may differ."""
    expected = textwrap.dedent(lines).splitlines()
    assert expected
    for line in expected:
        values = pytest.approx([float(number) for number in NUMBER.findall(line)], rel=tolerance)
        others = [x for x in output.splitlines() if NUMBER.sub("N", x) == NUMBER.sub("N", line)]
        printed = [[float(number) for number in NUMBER.findall(other)] for other in others]
        assert values in printed, (line, others)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return what the lesson prints on two processes."""
    return run(tmp_path_factory.mktemp("lesson"), 2)


def test_page_shows_lines_of_the_lesson_and_of_the_scripts():
    for block in re.findall(r"```python\n(.*?)```", STEPS.partition("## FSDP1")[0], re.DOTALL):
        for line in block.splitlines():
            assert line == "..." or line.strip() in LESSON, line
    links = re.findall(r"\[`([^`]+)`\]\(\.\./(\w+\.py)\)", STEPS)
    assert len(links) >= 6
    for line, file in links:
        assert line in (ROOT / file).read_text(), line


def test_losses_and_collectives_are_the_page_s(output):
    blocks = re.findall(r"```text\n(.*?)```", STEPS, re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        check_lines(block, output)


def test_training_does_not_depend_on_sharding_or_the_number_of_processes(output, tmp_path):
    """Whole or resumed on another number of processes: the losses agree to 1e-6."""
    expected = pytest.approx(losses(output), abs=1.01e-6)
    assert len(losses(output)) == 6
    assert losses(run(tmp_path, 4)) == expected
    resumed = losses(run(tmp_path, 0, "--resume"))
    assert resumed == pytest.approx(losses(output)[3:], abs=1.01e-6)
    assert losses(run(tmp_path, 0)) == expected
    assert losses(run(tmp_path, 0, "--plain")) == expected
    assert losses(run(tmp_path, 2, "--plain")) == expected
    resumed = losses(run(tmp_path, 2, "--resume"))
    assert resumed == pytest.approx(losses(output)[3:], abs=1.01e-6)


def test_lines_of_fsdp1_train_as_the_lesson_does(output, tmp_path):
    """With --plain, the model is whole and filled before they wrap it."""
    (lines,) = re.findall(r"## FSDP1.*?```python\n(.*?)```", STEPS, re.DOTALL)
    sums = LESSON.partition("    if is_plain:\n")[2].partition("    clip_grads_with")[0]
    norm = "    norm = model.clip_grad_norm_(0.5)\n"
    every = "for parameter in model.parameters()]"
    changes = {
        every: every.replace("]", " if parameter.numel() > 0]"),  # of others, gradients are None
        "import os\n": f"import os\n{FSDP1_IMPORTS}",
        OPTIMIZER: lines + OPTIMIZER,
        f"    if is_plain:\n{sums}": norm,
        "    clip_grads_with_norm_(model.parameters(), 0.5, norm)\n": "",
    }
    text = run(tmp_path, 2, "--plain", changes=changes)
    assert losses(text) == pytest.approx(losses(output), abs=1.01e-6) and len(losses(text)) == 6
    assert norms(text) == pytest.approx(norms(output), rel=1e-5)
    sizes = re.compile(r"^MB per rank: (weights .*), after .*(, gradients .*)$", re.MULTILINE)
    assert sizes.findall(text) == sizes.findall(output) != []  # what is kept differs
    # The checkpoints are those of FSDP2.
    resumed = losses(run(tmp_path, 1, "--resume"))
    assert resumed == pytest.approx(losses(output)[3:], abs=1.01e-6)


def test_table_of_memory_is_measured(tmp_path):
    changes = {
        "`--plain`": {},
        "one unit": {"for unit in [*model.transformer.h, model]:": "for unit in [model]:"},
        "each block, kept": {"forward=None": "forward=False"},
        "each block, freed": {},
    }
    rows = re.findall(r"^\| (.*?) \| (\d) \| (\d.*) \|$", STEPS, re.MULTILINE)
    assert len(rows) == 5
    for name, processes, cells in rows:
        flags = ["--plain"] if name == "`--plain`" else []
        text = run(tmp_path, int(processes), *flags, changes=changes[name])
        weights, after, gradients, moments, *counts = cells.split(" | ")
        line = f"weights {weights}, after the forward pass {after}, gradients {gradients}"
        assert f"MB per rank: {line}, moments {moments}\n" in text
        (collectives,) = re.findall(r"^\{.*\}$", text, re.MULTILINE)
        assert re.findall(r": (\d+)", collectives) == re.findall(r"\d+", " ".join(counts))


def changes_of(exercise: str) -> dict[str, str]:
    """Return the changes of an exercise."""
    return diffs(textwrap.dedent(exercise))


def test_exercises_print_the_numbers_of_the_page(output, tmp_path):
    exercises = EXERCISE.findall(EXERCISES)
    assert len(exercises) == 9 == len(re.findall(r"^\d\. ", EXERCISES, re.MULTILINE))
    texts = []
    for number, (exercise, lines) in enumerate(exercises, 1):
        changes = changes_of(exercise)
        assert len(re.findall(r"^ *[+]", exercise, re.MULTILINE)) == (3 if number == 8 else 1)
        texts.append(run(tmp_path, 2, changes=changes))
        is_resumed = lines.strip().startswith("step 4")
        text = run(tmp_path, 2, "--resume", changes=changes) if is_resumed else texts[-1]
        check_lines(lines, text, 2e-3 if "bfloat16" in exercise else 2e-5)
    factor, means, _, unit, norm, dropout, whole, accumulated, halves = texts
    right = losses(output)
    for text in (factor, unit, whole):
        assert losses(text) == pytest.approx(right, abs=1.01e-6)
    assert [2 * x for x in norms(factor)] == pytest.approx(norms(output), rel=1e-5)
    for loss, mean in ((right[1], losses(means)[1]), (right[5], losses(means)[5])):
        assert f"{loss:.6f}" in EXERCISES and mean < loss  # the page compares them
    assert norms(norm)[0] < norms(output)[0]
    assert "4.172704" in EXERCISES
    check_lines(f"step 4: loss 4.172704, norm {norms(dropout)[3]}", dropout)
    assert losses(accumulated) == pytest.approx(right, abs=1.01e-6)
    assert re.findall(r"collectives: (\d+)", accumulated) == ["9", "14"] * 6
    assert losses(halves) == pytest.approx(right, rel=2e-2) and losses(halves)[0] != right[0]


def test_factor_of_the_loss_is_hidden_and_shown_by_the_norm(output, tmp_path):
    """The batch's length in place of the number of targets: the weights are the same."""
    changes = changes_of(EXERCISE.findall(EXERCISES)[2][0])
    one, two = (run(tmp_path, processes, changes=changes) for processes in (0, 2))
    assert losses(one) == pytest.approx([x / 2 for x in losses(two)], rel=1e-5)
    right = {"loss {total:.6f}": "loss {total * len(labels) / targets:.6f}"}
    corrected = losses(run(tmp_path, 2, changes=changes | right))
    assert corrected == pytest.approx(losses(output), rel=1e-5)


def test_lesson_is_short():
    assert count_nodes(tree_of(ROOT / "docs/lesson.py")) <= 950


def test_pictures_are_those_that_are_drawn():
    assert draw_sharding.draw_figure() == (ROOT / "docs/sharding.svg").read_text()
    assert draw_sharding.draw_bars() == (ROOT / "docs/bars.svg").read_text()
