"""Whether there is room for what a run leaves, asked before it trains."""

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from conftest import errors_said, metrics

import gpt2_fsdp
from runtime import free_space

Usage = namedtuple("Usage", "total used free")


def test_what_is_needed_is_what_is_written(
    texts: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:  # fmt: skip
    """Checkpoints, best/ and final/ to a tenth: the rest is what describes the tensors. With less
    than that free nothing is trained, unless it is asked for; what lies there makes way."""
    output = tmp_path / "run"
    flags = ["--model-name", "tiny", "--dataset", str(texts[0]), "--val-dataset", str(texts[1]),
             "--block-size", "32", "--keep-checkpoints", "1", "--save-every", "1",
             "--output-dir", str(output)]  # fmt: skip
    asked = []
    compare = free_space._compare
    monkeypatch.setattr(free_space, "_compare", lambda *a: (asked.append(a[0]), compare(*a)))
    gpt2_fsdp.fsdp_main(gpt2_fsdp.parse_args([*flags, "--max-steps", "1"]))
    (checkpoint,) = output.glob("checkpoints/step-*")
    sizes = {
        path: sum(file.stat().st_size for file in path.rglob(pattern))
        for path, pattern in (
            (checkpoint, "*.distcp"),
            (next(output.glob("checkpoints/best-*")), "*.distcp"),
            (output / "best", "*.safetensors"),
            (output / "final", "*.safetensors"),
        )
    }
    first, best, *exported = sizes.values()
    needed = 2 * first + 2 * best + sum(exported)
    assert asked[0] == pytest.approx(needed, rel=0.1)

    def run_with(free: int, *more: str) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, free))
        gpt2_fsdp.fsdp_main(gpt2_fsdp.parse_args([*flags, "--max-steps", "2", *more]))

    there = sum(file.stat().st_size for path in sizes for file in path.rglob("*"))
    with pytest.raises(SystemExit):
        run_with(asked[0] - there - 1)
    (error,) = errors_said(capfd.readouterr().err)
    assert "make room, lower --keep-checkpoints, or go on with --ignore-free-space" in error
    assert len(metrics(output, "train")) == 1
    run_with(0, "--ignore-free-space")
    assert len(metrics(output, "train")) == 2
