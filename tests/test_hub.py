"""The hub as it answers, or does not: what a user is told, how soon, and what is still loaded."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets
import pytest
from conftest import ROOT
from huggingface_hub import constants

from runtime import hf_load, hub

ANSWERS = {  # status and X-Error-Code, by what is in the URL; as the hub gives them to strangers
    "gated": (401, "GatedRepo"),
    "forbidden": (403, "GatedRepo"),
    "private": (401, "RepoNotFound"),
    "gtp2": (404, "RepoNotFound"),
    "nofile": (404, "EntryNotFound"),
    "busy": (503, ""),
}


class Handler(BaseHTTPRequestHandler):
    """Answers as ANSWERS say; of silent nothing in five seconds."""

    def do_HEAD(self) -> None:
        if "silent" in self.path:
            time.sleep(5)
        status, code = next((x for key, x in ANSWERS.items() if key in self.path), (200, ""))
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("ETag", '"1"')
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a hub."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as hub_server:
        threading.Thread(target=hub_server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{hub_server.server_port}"
        hub_server.shutdown()


def connect(monkeypatch: pytest.MonkeyPatch, address: str, cache: Path) -> None:
    """Have the libraries ask the hub at this address, as HF_ENDPOINT does if set beforehand."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))


def refused(capfd: pytest.CaptureFixture, function: Callable, *args: object) -> str:
    """Return the sentence with which a function ends, soon, and with nothing on the screen."""
    start = time.monotonic()
    with pytest.raises(ValueError) as error:
        function(*args)
    assert time.monotonic() - start < 3
    assert capfd.readouterr() == ("", "")
    return str(error.value)


NOBODY = "http://127.0.0.1:1"
UNREACHED = f"not whole in the cache, and {NOBODY} cannot be reached (ConnectError): give a "


@pytest.mark.parametrize("name, parts", [
    ("meta/gated", ["does not give --model-name meta/gated to this account (401): accept its "
                    "licence on SERVER/meta/gated and set HF_TOKEN"]),
    ("meta/forbidden", ["(403): accept its licence on SERVER/meta/forbidden and set HF_TOKEN"]),
    ("me/private", ["no public model of that name", "set HF_TOKEN for a private one"]),
    ("gtp2", ["gtp2 (did you mean someone/gpt2?) is no directory here, and the hub has no public"]),
    ("tinny", ["tinny (did you mean tiny?) is no directory here and not whole", UNREACHED,
               "set HF_HOME to a cache that has it, with HF_HUB_OFFLINE=1 where there is no"]),
    ("gpt2", ["--model-name gpt2 is no directory here and not whole in the cache", UNREACHED]),
    ("runs/finl", ["--model-name runs/finl (did you mean runs/final?) is no directory", UNREACHED]),
    ("a/b/c", ["--model-name a/b/c is no directory here, and cannot be a name on the hub"]),
])  # fmt: skip
def test_a_model_that_cannot_be_had(
    name: str,
    parts: list[str],
    server: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    """One sentence, soon, and nothing of the library's on the screen; no licence without a hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/final").mkdir(parents=True)
    address = NOBODY if UNREACHED in parts else server
    connect(monkeypatch, address, tmp_path / "cache")
    said = refused(capfd, hf_load.model_directory, name, ("tiny", "someone/gpt2"))
    for part in parts:
        assert part.replace("SERVER", server) in said
    assert ("licence" in said) == ("licence" in parts[0]) and "\n" not in said


@pytest.mark.parametrize("name", ["fine", "nofile", "busy"])
def test_a_hub_that_refuses_nothing(
    name: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the file, or not that one, or is too busy, for which the libraries wait."""
    connect(monkeypatch, server, tmp_path)
    assert hub.refusal("model", name) is None


def test_a_hub_that_does_not_answer(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for as long as HF_HUB_ETAG_TIMEOUT says, if the user has set it."""
    connect(monkeypatch, server, tmp_path)
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "1")
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
    start = time.monotonic()
    refusal = hub.refusal("model", "silent")
    assert 0.9 < time.monotonic() - start < 3
    said = hub.explain("--model-name silent", "model", "silent", refusal, [])
    assert "cannot be reached (ReadTimeout, HF_HUB_ETAG_TIMEOUT=60 waits longer)" in said


@pytest.mark.parametrize("place", [NOBODY, "gated"])
def test_what_is_in_the_cache_needs_no_hub(
    place: str,
    gpt2_directory: Path,
    server: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither a network nor a token."""
    connect(monkeypatch, NOBODY if place == NOBODY else server, tmp_path)
    folder = tmp_path / "models--someone--gated"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("abc")
    (folder / "snapshots").mkdir()
    (folder / "snapshots/abc").symlink_to(gpt2_directory)
    assert hf_load.model_directory("someone/gated", []) == folder / "snapshots/abc"


def test_the_estimator_without_a_network(tmp_path: Path) -> None:
    """From the command line: one sentence is all that is printed."""
    settings = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": NOBODY, "HF_HOME": str(tmp_path)}
    command = [sys.executable, ROOT / "memory_estimator.py", "--model-name", "llama2-7b"]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
    assert result.returncode == 1 and not result.stdout
    said = "error: --model-name llama2-7b (did you mean llama-2-7b?) is no directory here and not "
    assert result.stderr.startswith(said) and result.stderr.count("\n") == 1
    assert "licence" not in result.stderr
