"""docs/kill-it-three-times.md: its commands, in its order, show what it says."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import ROOT, finish, live_metrics, status, wait_for_step, wait_until
from copied import diffs
from slurm_cluster import free_ports

PAGE = (ROOT / "docs/kill-it-three-times.md").read_text()
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture
def start() -> Iterator[Callable[[str, Path], subprocess.Popen]]:
    """Yield a function that starts commands in a terminal. All are killed after the test."""
    terminals: list[subprocess.Popen] = []

    def start(commands: str, directory: Path) -> subprocess.Popen:
        process = subprocess.Popen(
            ["bash", "-e"], cwd=directory, env=os.environ | {"PATH": PATH}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        process.stdin.write(commands)
        process.stdin.close()
        process.stdin = None  # for communicate()
        terminals.append(process)
        return process

    yield start
    for process in terminals:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def blocks(kind: str) -> list[str]:
    """Return the text of each block of a kind in the page."""
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


def wait_for_start(output: Path, count: int, step: int) -> None:
    """Wait until a run that has started `count` times has logged the step."""
    wait_until(lambda: len(live_metrics(output, "start")) == count, 60)
    wait_for_step(output, step)


def test_run_that_is_killed_three_times_has_equal_losses(start, tmp_path):
    printed, whole, kill, ask, nodes, compare = blocks("bash")
    tiny = "--model-name tiny "
    whole, nodes = (text.replace(tiny, f"{tiny}--block-size 64 ") for text in (whole, nodes))
    resumes, skips, stops = blocks("text")
    kill_alone = kill.splitlines()[0]
    result = finish(start((printed + whole).replace("../", f"{tmp_path}/"), ROOT))
    assert result.returncode == 0 and (tmp_path / "to_read/gpt2_fsdp.py").is_file(), result.stderr
    copy = tmp_path / "to_break"
    output = copy / "output/killed"
    train = whole[whole.index("torchrun") :].replace("output/whole", "output/killed")

    # 1. In a step.
    process = start(train, copy)
    wait_for_step(output, 31)
    assert finish(start(kill, copy)).stdout == "running\nsaved step 30\n"
    result = finish(process)
    assert result.returncode == 1 and "`exitcode  : -9`" in PAGE
    assert "exitcode  : -9" in result.stderr

    # 2. In a save.
    file = copy / "core/checkpoint.py"
    text = file.read_text()
    ((old, new),) = diffs(PAGE).items()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    process = start(train, copy)
    saving = output / "checkpoints/step-00000060"
    wait_until((saving / ".metadata").is_file, 60)
    finish(start(kill_alone, copy))
    assert resumes in finish(process).stdout
    assert not (saving / "train_state.json").exists() and list(saving.glob("*.distcp"))
    file.write_text(text)

    # 3. By SIGTERM, to one rank.
    process = start(train, copy)
    wait_for_start(output, 3, 40)
    finish(start(ask, copy))
    result = finish(process)
    assert skips in result.stdout and status(output) == "stopped"
    for line in stops.splitlines():
        assert re.search(line.replace("N", r"\d+"), result.stdout), result.stdout

    # Two nodes.
    (port,) = free_ports(1)
    processes = [start(nodes.replace("29500", str(port)), copy) for _ in range(2)]
    for process in processes:
        result = finish(process)
        assert result.returncode == 0, result.stderr
    assert status(output) == "finished"
    assert finish(start(compare, copy)).stdout == "equal\n"


def test_page_is_short():
    assert len(PAGE.split()) <= 500
