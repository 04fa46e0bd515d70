"""launch/k8s.yaml and launch/sky.yaml: the schema of Kubernetes, and the flags."""

import shlex
import sys
from typing import Any

import pytest
import yaml
from conftest import ROOT

import T5_training

K8S, SKY = ROOT / "launch/k8s.yaml", ROOT / "launch/sky.yaml"


def documents() -> list[dict[str, Any]]:
    """Return the service and the job of launch/k8s.yaml."""
    return list(yaml.safe_load_all(K8S.read_text()))


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_kubernetes_file_is_valid(version):
    validate = pytest.importorskip("kubernetes_validate").validate
    service, job = documents()
    validate(service, version, strict=True)
    validate(job, version, strict=True)


def test_launch_files_train_on_data_that_is_there(tmp_path, monkeypatch):
    _, job = documents()
    (container,) = job["spec"]["template"]["spec"]["containers"]
    sky_words = shlex.split(yaml.safe_load(SKY.read_text())["run"], comments=True)
    monkeypatch.chdir(tmp_path)  # without data/wikihowAll.csv
    for words in (container["args"], sky_words[sky_words.index("T5_training.py") :]):
        monkeypatch.setattr(sys, "argv", words)
        args = T5_training.parse_args()
        assert list(args.data.dataset) == ["pairs.jsonl"]
        assert str(args.run.output_dir) == "/output/t5"
