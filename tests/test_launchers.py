"""launch/k8s.yaml and launch/sky.yaml: their schemas, and the lock of another container.

The schema tests need `pip install kubernetes-validate==1.37.0 skypilot==0.14.1`.
"""

import copy
import os
import shlex
import signal
import subprocess
import sys
from typing import Any

import containers
import pytest
import yaml
from conftest import ROOT, live_metrics
from slurm_cluster import wait_until

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
    invalid = copy.deepcopy(job)
    invalid["spec"]["template"]["spec"]["terminationGracePeriod"] = 360
    with pytest.raises(Exception, match="terminationGracePeriod"):
        validate(invalid, version, strict=True)


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


def test_skypilot_file_is_valid(tmp_path):
    pytest.importorskip("sky")
    program = """
import inspect, sys, sky
from sky.jobs.recovery_strategy import StrategyExecutor
task = sky.Task.from_yaml(sys.argv[1])
read = inspect.getsource(StrategyExecutor.make)
(resources,) = task.resources
unknown = [key for key in resources.job_recovery if f"'{key}'" not in read]
print(task.num_nodes, unknown)
sky.Task.from_yaml(sys.argv[2])
"""
    (tmp_path / "wrong.yaml").write_text(SKY.read_text().replace("num_nodes", "nodes"))
    command = [sys.executable, "-c", program, SKY, tmp_path / "wrong.yaml"]
    env = os.environ | {"HOME": str(tmp_path)}  # SkyPilot writes to HOME
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert result.stdout == "2 []\n", result.stderr
    assert "instead of 'nodes'" in result.stderr.lower()


@pytest.mark.slow
def test_lock_of_another_container_is_respected_while_its_run_is_alive(texts, tmp_path):
    if not containers.is_available():
        pytest.skip("needs unshare and the permission to create namespaces")
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost a b c\n")
    command = [sys.executable, "gpt2_fsdp.py", "--model-name", "tiny", "--dataset",
               texts[0], "--val-dataset", texts[1], "--block-size", "32", "--log-every", "1",
               "--max-steps", "100000", "--output-dir", tmp_path / "output"]  # fmt: skip

    def start(host: str) -> containers.Container:
        return containers.Container(host, hosts, tmp_path / f"{host}.log", [*map(str, command)])

    def log(host: str) -> str:
        path = tmp_path / f"{host}.log"
        return path.read_text() if path.exists() else ""

    holder = start("a")
    wait_until(lambda: live_metrics(tmp_path / "output", "train"), 120, lambda: log("a"))
    other = start("b")
    assert other.process.wait(120) == 1
    assert "is in use by process 1 on a" in log("b")
    holder.send(signal.SIGKILL)
    holder.process.wait()
    third = start("c")
    wait_until(lambda: "parameters" in log("c"), 120, lambda: log("c"))
    third.process.kill()
    third.process.wait()
