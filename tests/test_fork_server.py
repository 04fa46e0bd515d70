"""tests/helpers/fork_server.py: launches that torchrun does not start act as if it had."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import conftest
import pytest
from chaos import is_over
from conftest import ROOT, launch, wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen]:
    """Yield a server of these tests, which others do not use. It ends with its standard input."""
    path = tmp_path_factory.mktemp("server") / "socket"
    path.with_suffix(".py").touch()
    command = [sys.executable, ROOT / "tests/helpers/fork_server.py", path]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORK_SERVER", str(path))
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        launch(0, path.with_suffix(".py"))  # waits for its imports
        yield process
        process.stdin.close()
        assert process.wait() == 0


SHOW = """
import os, pathlib, signal, sys, time
rank, (how, *words) = os.environ.get("RANK", "0"), sys.argv[1:]
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MINE")
values = [os.environ.get(name) for name in names]
line = f"{values} {how} {words} {os.getcwd()} {sys.path[0]} {__name__} {sys.stdin.read()}"
print(end=line.strip() + "\\n", flush=True)  # one write, as torchrun lets ranks not buffer
pathlib.Path(f"rank-{rank}").touch()
while len([*pathlib.Path().glob("rank-*")]) < int(os.environ.get("WORLD_SIZE", 1)):
    time.sleep(0.01)
if how == "fails" and rank == "1":
    raise OSError("the fault")
if how == "exits" and rank == "0":
    sys.exit(75)
if how == "is killed" and rank == "0":
    os.kill(os.getpid(), signal.SIGKILL)
if how != "ends":
    signal.pause()
"""


@pytest.mark.parametrize("processes, how, code", [
    (0, "ends", 0), (0, "exits", 75), (0, "is killed", -9),
    (2, "ends", 0), (2, "exits", 1), (2, "is killed", 1), (2, "fails", 1),
])  # fmt: skip
def test_fork_acts_like_a_started_interpreter(processes, how, code, server, tmp_path, monkeypatch):
    monkeypatch.setenv("MINE", "kept")
    (tmp_path / "show.py").write_text(SHOW)
    results = []
    for torchrun in (False, True):
        words = [tmp_path / "show.py", how, "a b", 3]
        options = {"cwd": tmp_path, "check": False, "torchrun": torchrun}
        results.append(launch(processes, *words, **options, lines=None if processes else "one\n"))
        for path in tmp_path.glob("rank-*"):
            path.unlink()
    forked, started = results
    assert forked.returncode == started.returncode == code
    assert sorted(forked.stdout.splitlines()) == sorted(started.stdout.splitlines())
    assert forked.stdout.count("kept") == max(1, processes)
    assert ("OSError: the fault" in forked.stderr) == (how == "fails")


def test_launch_that_hangs_ends_its_ranks(server, tmp_path, monkeypatch):
    (tmp_path / "hang.py").write_text(
        "import os, pathlib, time\n"
        "pathlib.Path(os.environ['RANK']).write_text(f'{os.getpid()} {os.fork()}')\n"
        "time.sleep(10_000)\n"
    )
    monkeypatch.setattr(conftest, "SLOWDOWN", 1)
    with pytest.raises(pytest.fail.Exception, match="Not over after 5 s"):
        launch(2, tmp_path / "hang.py", cwd=tmp_path, quiet_seconds=5)
    pids = [int(pid) for rank in "01" for pid in Path(tmp_path, rank).read_text().split()]
    wait_until(lambda: all(map(is_over, filter(None, pids))))
