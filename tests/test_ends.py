"""Environments, versions and settings that used to end a run without its exports."""

import json
import os
import runpy
import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from conftest import ROOT, error_lines, launch, metrics, status
from packaging.requirements import Requirement

import runtime
from runtime import checkpoints, export, ranks
from runtime.run import prepare_directory


@pytest.fixture
def flags(t5_directory, pairs, tmp_path):
    """Return flags for two steps of T5 on a copy of the model, which a test may change."""
    model = shutil.copytree(t5_directory, tmp_path / "model")
    return ["--model-name", model, "--dataset", pairs, "--output-dir", tmp_path / "run",
            "--max-steps", 2, "--batch-size", 2, "--rouge-samples", 2]  # fmt: skip


def set_generation(model: Path, **values: object) -> None:
    """Change fields of a model's generation_config.json."""
    path = model / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_settings_that_change_the_outputs_are_ignored(flags, tmp_path):
    values = {"num_return_sequences": 2, "num_beams": 2, "return_dict_in_generate": True}
    set_generation(tmp_path / "model", **values, output_scores=True, stop_strings=["x"])
    environment = os.environ | {"MASTER_ADDR": "localhost", "PYTHONIOENCODING": "ascii"}
    launch(0, "T5_training.py", *flags, env=environment)
    (done,) = metrics(tmp_path / "run", "done")
    assert "rouge1" in done
    exported = json.loads((tmp_path / "run/final/generation_config.json").read_text())
    assert exported["num_return_sequences"] == 2  # as the base had it


def test_generation_that_fails_is_reported_before_training(flags, tmp_path):
    set_generation(tmp_path / "model", num_beams=0)
    result = launch(0, "T5_training.py", *flags, check=False)
    (message,) = error_lines(result.stderr)
    assert result.returncode == 1 and "generation_config.json" in message
    assert not (tmp_path / "run/metrics.jsonl").exists()


ONE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
               "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}  # fmt: skip


@pytest.mark.parametrize(("variables", "wrong"), [
    ({"WORLD_SIZE": "2"}, "RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_PORT, MASTER_ADDR"),
    ({"RANK": ""}, "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_PORT, MASTER_ADDR"),
    ({"SLURM_STEP_NUM_TASKS": "4"}, "RANK, WORLD_SIZE, .*, MASTER_ADDR"),
    ({"OMPI_COMM_WORLD_SIZE": "4"}, "RANK, WORLD_SIZE, .*, MASTER_ADDR"),
    (ONE_PROCESS | {"RANK": "-1"}, "RANK"),
    (ONE_PROCESS | {"RANK": "1"}, "WORLD_SIZE"),
    (ONE_PROCESS | {"WORLD_SIZE": "0"}, "WORLD_SIZE"),
    (ONE_PROCESS | {"LOCAL_RANK": "x"}, "LOCAL_RANK"),
    (ONE_PROCESS | {"MASTER_PORT": "a"}, "MASTER_PORT"),
    (ONE_PROCESS | {"MASTER_ADDR": ""}, "MASTER_ADDR"),
])  # fmt: skip
def test_environment_of_another_launcher_is_refused(variables, wrong, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    name = next(iter(variables))
    with pytest.raises(SystemExit, match=rf"has {name}.*, but no valid {wrong}\. .*unset {name}"):
        ranks._check_environment()


@pytest.mark.parametrize("variables", [
    {}, {"SLURM_STEP_NUM_TASKS": "1"}, {"MASTER_ADDR": "localhost"},
    {"SLURM_STEP_NUM_TASKS": "2"} | ONE_PROCESS,
])  # fmt: skip
def test_environment_of_torchrun_or_of_one_process_is_accepted(variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ranks._check_environment()


def test_scripts_check_the_environment(flags):
    environment = os.environ | {"WORLD_SIZE": "4"}
    result = launch(0, "T5_training.py", *flags, env=environment, check=False)
    assert result.returncode == 1
    (message,) = error_lines(result.stderr)
    assert "unset WORLD_SIZE" in message


@pytest.mark.parametrize("is_closed", [False, True])
def test_output_that_cannot_be_written_does_not_end_a_run(is_closed, flags, tmp_path):
    close = (lambda: os.close(1)) if is_closed else None
    with open("/dev/full", "w") as full:
        options = {"capture_output": False, "stdout": full, "preexec_fn": close}
        launch(0, "T5_training.py", *flags, **options)
    assert status(tmp_path / "run") == "finished"


def test_export_lands_in_the_target_of_a_link(process_group, tmp_path):
    (tmp_path / "disk").mkdir()
    link = tmp_path / "final"
    link.symlink_to(tmp_path / "disk/final")
    for text in ("old", "new"):
        with export.new_directory(link) as temporary:
            (temporary / "tokenizer_config.json").write_text(text)
    assert link.is_symlink() and (tmp_path / "disk/final/tokenizer_config.json").exists()
    with pytest.raises(OSError, match="full"), export.new_directory(link):
        raise OSError("full")
    assert (link / "tokenizer_config.json").read_text() == "new"
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["final"]


def test_new_run_may_have_links_for_its_exports(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "best").symlink_to(tmp_path / "disk")
    (tmp_path / "final").symlink_to(tmp_path / "disk/not yet")
    assert not prepare_directory(tmp_path)
    (tmp_path / "disk/config.json").touch()
    with pytest.raises(ValueError, match="but no run"):
        prepare_directory(tmp_path)


def test_link_to_other_files_is_refused(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/photo.png").touch()
    (tmp_path / "status").touch()
    (tmp_path / "final").symlink_to(tmp_path / "disk")
    with pytest.raises(ValueError, match="Empty it"):
        prepare_directory(tmp_path)


def test_versions_agree_with_requirements_and_constraints():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    ranges = {x.name: x.specifier for x in map(Requirement, lines[1:])}
    for name, (low, high) in runtime.RANGES.items():
        assert {str(x) for x in ranges[name]} == {f">={low}", f"<{high}"}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {x.name: next(iter(x.specifier)).version for x in map(Requirement, lines[1:])}
    assert all(pins[name] in specifier for name, specifier in ranges.items() if name in pins)


@pytest.mark.parametrize("installed", ["0.9.9+cpu", None])
@pytest.mark.parametrize("name", ["transformers", "filelock", "torch"])
def test_old_or_missing_package_ends_with_one_sentence(name, installed, monkeypatch):
    def version(package: str) -> str:
        if package == name and installed is None:
            raise metadata.PackageNotFoundError
        return installed if package == name else "99.0.dev1"

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.delitem(sys.modules, "runtime")
    message = f"{name} is {installed or 'missing'}, but {name}>=".replace("+", r"\+")
    with pytest.raises(SystemExit, match=message):
        runpy.run_path(str(ROOT / "runtime/__init__.py"))


@pytest.mark.parametrize("script", ["T5_training.py", "gpt2_fsdp.py", "llama_fsdp.py",
    "tools/memory_estimator.py", "tools/preflight.py", "tools/generate.py"])  # fmt: skip
def test_version_is_checked_before_names_are_imported(script, tmp_path):
    """Old packages lack these names, so that the imports would fail."""
    for package in ("torch", "transformers"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        (tmp_path / f"{package}-2.5.1.dist-info").mkdir()
        metadata_file = tmp_path / f"{package}-2.5.1.dist-info/METADATA"
        metadata_file.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 2.5.1\n")
    result = launch(0, script, "--help", env=os.environ | {"PYTHONPATH": tmp_path}, check=False)
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: torch is 2.5.1, but torch>=")


def test_refused_checkpoint_names_both_versions():
    saved = {"model": "t5, crc 1", checkpoints.VERSION: "5.22.0"}
    checkpoints.compare_starts(Path("step-1"), saved, saved | {checkpoints.VERSION: "5.23.0"})
    here = {"model": "t5, crc 2", checkpoints.VERSION: "5.23.0"}
    with pytest.raises(ValueError, match=r"Transformers is 5\.23\.0, was 5\.22\.0"):
        checkpoints.compare_starts(Path("step-1"), saved, here)


def test_meta_model_is_tied_like_the_loaded_one(process_group, gpt2_directory, monkeypatch):
    """As with Transformers 5.0.0, which left models on meta untied."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from runtime import weights

    class Untied(GPT2LMHeadModel):
        def tie_weights(self, *args, **options):
            if self.transformer.wte.weight.is_meta:
                self.lm_head.weight = torch.nn.Parameter(self.lm_head.weight.detach().clone())
            else:
                super().tie_weights(*args, **options)

    model, _ = weights.new_model(Untied, GPT2Config.from_pretrained(gpt2_directory), None)
    assert model.lm_head.weight is model.transformer.wte.weight
