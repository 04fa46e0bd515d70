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
EXERCISE = re.compile(r" *```diff\n(.*?)```.*?```text\n(.*?)```", re.DOTALL)
NUMBER = re.compile(r"\d+\.\d+|\b\d+\b")
FORWARD = "        (loss * size).backward()"
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


def check_lines(lines: str, output: str) -> None:
    """Check that a run printed each line of the page. Other CPUs round otherwise: the last digits
    of a number may differ."""
    expected = textwrap.dedent(lines).splitlines()
    assert expected
    for line in expected:
        values = pytest.approx([float(number) for number in NUMBER.findall(line)], rel=2e-5)
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
    sums = LESSON.partition("        if args.plain:\n")[2].partition("    clip_grads_with")[0]
    norm = "    norm = model.clip_grad_norm_(0.5)\n"
    every = "for parameter in model.parameters()]"
    changes = {
        every: every.replace("]", " if parameter.numel() > 0]"),  # of others, gradients are None
        "import argparse\n": f"import argparse\n{FSDP1_IMPORTS}",
        OPTIMIZER: lines + OPTIMIZER,
        f"        if args.plain:\n{sums}": norm,
        "    clip_grads_with_norm_(model.parameters(), 0.5, norm)\n": "",
    }
    text = run(tmp_path, 2, "--plain", changes=changes)
    assert losses(text) == pytest.approx(losses(output), abs=1.01e-6) and len(losses(text)) == 6
    assert norms(text) == pytest.approx(norms(output), rel=1e-5)
    (sizes,) = re.findall(r"^MB per rank: weights .*$", output, re.MULTILINE)
    assert sizes in text
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
    show = "        print0(f'after {megabytes(model.parameters()):.2f}')\n"
    rows = re.findall(r"^\| (.*?) \| (\d) \| (\d.*) \|$", STEPS, re.MULTILINE)
    assert len(rows) == 5
    for name, processes, cells in rows:
        flags = ["--plain"] if name == "`--plain`" else []
        edits = changes[name] | {FORWARD: show + FORWARD}
        text = run(tmp_path, int(processes), *flags, changes=edits)
        weights, after, gradients, moments, *counts = cells.split(" | ")
        line = f"weights {weights}, gradients {gradients}, moments {moments}"
        assert f"MB per rank: {line}\n" in text
        assert f"after {after}\n" in text
        (collectives,) = re.findall(r"^\{.*\}$", text, re.MULTILINE)
        assert re.findall(r": (\d+)", collectives) == re.findall(r"\d+", " ".join(counts))


def test_exercises_print_the_numbers_of_the_page(output, tmp_path):
    exercises = EXERCISE.findall(EXERCISES)
    assert len(exercises) == 6 == EXERCISES.count("```diff")
    texts = []
    for diff, lines in exercises:
        changes = diffs(f"```diff\n{textwrap.dedent(diff)}```")
        assert len(changes) == 1 and diff.count("\n") == 2  # one line
        texts.append(run(tmp_path, 2, changes=changes))
        is_resumed = lines.strip().startswith("step 4")
        text = run(tmp_path, 2, "--resume", changes=changes) if is_resumed else texts[-1]
        check_lines(lines, text)
    factor, batch, unit, norm, dropout, whole = texts
    assert losses(factor) == losses(unit) == losses(whole) == losses(output)
    assert [2 * x for x in norms(factor)] == pytest.approx(norms(output), rel=1e-5)
    assert norms(norm)[0] < norms(output)[0]
    assert "4.174101" in EXERCISES
    check_lines(f"step 4: loss 4.174101, norm {norms(dropout)[3]}", dropout)
    changes = diffs(f"```diff\n{textwrap.dedent(exercises[1][0])}```")
    one = run(tmp_path, 0, changes=changes)
    assert losses(one) == pytest.approx([x / 2 for x in losses(batch)], rel=1e-5)


def test_lesson_is_short():
    assert count_nodes(tree_of(ROOT / "docs/lesson.py")) <= 950


def test_pictures_are_those_that_are_drawn():
    assert draw_sharding.draw_figure() == (ROOT / "docs/sharding.svg").read_text()
    assert draw_sharding.draw_bars() == (ROOT / "docs/bars.svg").read_text()
