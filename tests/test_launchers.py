"""launch.k8s.yaml and launch.sky.yaml: their schemas, and what starts again.

The schemas need `pip install kubernetes-validate==1.37.0 skypilot==0.14.1`.
"""

import copy
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import containers
import pytest
import yaml
from conftest import ROOT, launch, logged, losses, metrics, status
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from runtime import stops, torchrun

K8S, SKY = ROOT / "launch.k8s.yaml", ROOT / "launch.sky.yaml"

# A script that writes a status, if it is given one, and ends with an exit code or a signal.
ENDS = """
import os, pathlib, sys
code, *status = sys.argv[3:]
if status:
    word, job, began, saved = status
    text = f"{word}\\njob {job}.0\\nbegan at step {began}\\nsaved step {saved}\\n"
    pathlib.Path(sys.argv[2], "status").write_text(text)
if code.startswith("-"):
    os.kill(os.getpid(), -int(code))
os._exit(int(code))
"""

# gpt2_fsdp.py, slow enough to be killed in the middle.
PACED = f"""
import importlib, os, sys, time
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from killed import before_each_step
script = importlib.import_module("gpt2_fsdp")
before_each_step(lambda _: time.sleep(0.2))
code = script.fsdp_main(script.parse_args(sys.argv[1:]))
sys.stdout.flush()
os._exit(code)
"""


def documents() -> list[dict[str, Any]]:
    """Return the service and the job of launch.k8s.yaml."""
    return list(yaml.safe_load_all(K8S.read_text()))


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_kubernetes_schema(version: str) -> None:
    """Strict: an unknown field is none that is left out."""
    validate = pytest.importorskip("kubernetes_validate").validate
    service, job = documents()
    validate(service, version, strict=True)
    validate(job, version, strict=True)
    wrong = copy.deepcopy(job)
    wrong["spec"]["template"]["spec"]["terminationGracePeriod"] = 360
    with pytest.raises(Exception, match="terminationGracePeriod"):
        validate(wrong, version, strict=True)


def test_skypilot_schema(tmp_path: Path) -> None:
    """As `sky jobs launch` reads it."""
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
    env = os.environ | {"HOME": str(tmp_path)}  # where it writes
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert result.stdout == "2 []\n", result.stderr
    assert "instead of 'nodes'" in result.stderr.lower()


def test_what_an_administrator_looks_at() -> None:
    """And numbers that stand in two places."""
    service, job = documents()
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    command = " ".join(container["command"])
    assert spec["completions"] == spec["parallelism"] == int(re.search(r"nnodes (\d+)", command)[1])
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert f"{job['metadata']['name']}-0.{pod['subdomain']}:" in command
    assert spec["podFailurePolicy"]["rules"][1]["onExitCodes"]["containerName"] == container["name"]
    assert re.fullmatch(r"\S+/\S+:\d+\.\d+", container["image"])
    assert K8S.read_text().count("image:") == 1
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"]
    assert not container["securityContext"]["allowPrivilegeEscalation"]
    assert container["resources"]["requests"] == container["resources"]["limits"]
    env = {x["name"]: x for x in container["env"]}
    assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"]["optional"]
    assert (
        int(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]["value"]) < pod["terminationGracePeriodSeconds"]
    )
    (shm,) = [x for x in pod["volumes"] if x.get("emptyDir", {}).get("medium") == "Memory"]
    assert {"name": shm["name"], "mountPath": "/dev/shm"} in container["volumeMounts"]


@pytest.mark.parametrize("path", [K8S, SKY], ids=lambda path: path.name)
def test_it_is_read_at_a_glance(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) < 60 and max(map(len, lines)) <= 100


def test_the_codes_that_start_again() -> None:
    """Are the script's own, and not what SkyPilot gives to the nodes that it kills."""
    _, job = documents()
    values = job["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"]
    recovered = yaml.safe_load(SKY.read_text())["resources"]["job_recovery"]
    assert values == [stops.STOPPED, 128 + signal.SIGKILL, 128 + signal.SIGTERM]
    assert recovered["recover_on_exit_codes"] == [stops.STOPPED]


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Run runtime.torchrun in this process, with a script that ends as told."""
    (tmp_path / "ends.py").write_text(ENDS)
    monkeypatch.setenv("JOB_ID", "mine")
    handler = DynamicRendezvousHandler
    monkeypatch.setattr(handler, "num_nodes_waiting", handler.num_nodes_waiting)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = [signal.getsignal(number) for number in numbers]

    def run(*told: object) -> int:
        words = ["--standalone", "--nproc-per-node", "1", tmp_path / "ends.py"]
        words += ["--output-dir", tmp_path, *told]
        return torchrun.main([str(word) for word in words])

    yield run
    for number, action in zip(numbers, before, strict=True):
        signal.signal(number, action)


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (75, 75), (1, 1), (2, 1), (-9, 75)])
def test_exit_code(code: int, expected: int, ends: Callable[..., int], tmp_path: Path) -> None:
    """A process that is killed starts again; an error does not, whatever an earlier start left."""
    (tmp_path / "status").write_text("stopped\njob mine.0\nbegan at step 0\nsaved step 5\n")
    assert ends(code) == expected


def test_two_starts_without_a_step(
    ends: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """In a row, of this job, which have begun to train."""
    assert ends(75, "stopped", "another's", 0, 0) == 75
    assert ends(75, "stopped", "mine", 0, 0) == 75
    assert ends(75, "stopped", "mine", 0, 5) == 75
    assert ends(-9, "running", "mine", 5, 5) == 75
    assert ends(75) == 75
    assert ends(-9, "running", "mine", 5, 5) == 1
    assert "no step was saved in two starts in a row" in capsys.readouterr().out


def test_what_this_job_has_finished(ends: Callable[..., int]) -> None:
    """The other pods may have gone: it could wait for them for ever."""
    assert ends(0, "finished", "another's", 0, 5) == 0
    assert ends(1, "finished", "mine", 0, 5) == 1
    assert ends(1) == 0


def test_a_node_that_never_comes(ends: Callable[..., int], tmp_path: Path) -> None:
    """Nor does the one with the rendezvous: this one starts again."""
    place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{containers.free_port()}"]
    conf = ["--rdzv-conf", "is_host=0,read_timeout=1"]
    assert torchrun.run_node(["--nnodes", "2", *place, *conf, str(tmp_path / "ends.py")]) == 75


def test_a_mistake_in_the_flags(tmp_path: Path) -> None:
    """Of torchrun is none of the nodes'."""
    with pytest.raises(ValueError, match="nproc"):
        torchrun.run_node(["--nproc-per-node", "two", str(tmp_path / "ends.py")])


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [containers.Kubernetes, containers.SkyPilot])
def test_killed_and_started_again(
    launcher: type[containers.Job], texts: tuple[Path, Path], tmp_path: Path
) -> None:
    """On two nodes: one is asked to leave, the first is killed, then the second. What comes out is
    what comes out of a run that was left alone."""
    if not containers.possible():
        pytest.skip("needs unshare, and the right to make name spaces")
    (tmp_path / "paced.py").write_text(PACED)
    flags = ["--model-name", "tiny", "--dataset", texts[0], "--val-dataset", texts[1],
             "--block-size", "32", "--max-steps", "24", "--log-every", "1", "--save-every", "4",
             "--batch-size", "2"]  # fmt: skip
    launch(2, "gpt2_fsdp.py", *flags, "--output-dir", tmp_path / "whole")
    output = tmp_path / "output"
    job = launcher(tmp_path, [tmp_path / "paced.py", *flags, "--output-dir", output])
    try:
        for step, node, number in ((3, 1, "SIGTERM"), (10, 0, "SIGKILL"), (18, 1, "SIGKILL")):

            def is_there(step: int = step) -> bool:
                return step in [line["step"] for line in logged(output, "train")]

            assert job.run(is_there) == "running", job.log.read_text()
            _, _, began, saved = (output / "status").read_text().splitlines()
            assert step == 3 or began.split()[-1] != saved.split()[-1]
            job.seconds = 40.0 if step == 18 else 0.0  # the other one notices that this is lost
            job.taken.add(node)
            job.nodes[node].send(signal.Signals[number])
        assert job.run() == "complete", job.log.read_text()
    finally:
        job.close()
    began = [line["step"] for line in metrics(output, "start")]
    assert len(began) == 4 and began[0] == 0 and sorted(set(began)) == began
    assert status(output) == "finished"
    assert losses(output) == losses(tmp_path / "whole")
    assert losses(output, "val") == losses(tmp_path / "whole", "val")


@pytest.mark.slow
def test_a_failure_ends_the_job(tmp_path: Path) -> None:
    """Of one pod: the other, which waits for it, is ended with the job."""
    if not containers.possible():
        pytest.skip("needs unshare, and the right to make name spaces")
    words = [ROOT / "gpt2_fsdp.py", "--lr", "-1", "--output-dir", tmp_path / "output"]
    job = containers.Kubernetes(tmp_path, words)
    assert job.run() == "failed"
    assert {code for _, code in job.codes} == {1}
    assert "is out of range: it must be above 0" in job.log.read_text()
