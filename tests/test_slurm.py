"""Run launch.slurm on a private Slurm cluster of two nodes and check which jobs it requeues."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from conftest import ROOT, TINY, live_metrics, losses, metrics, status, wait_until
from slurm_cluster import slurm, slurm_cluster

LAUNCH = ROOT / "launch.slurm"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # has torchrun and shellcheck

# Waits for a stop signal. Its arguments are the steps saved by each start.
IDLE_SCRIPT = """
import os, pathlib, signal, sys, time
status = pathlib.Path(sys.argv[1].removeprefix("--output-dir="), "status")
restart = int(os.environ.get("SLURM_RESTART_COUNT", 0))
saved = [0, *map(int, sys.argv[2:]), 100, 200][restart : restart + 2]
def write(word):
    status.write_text(f"{word}\\nsaved step {saved[word == 'stopped']}\\n")
def stop(*_):
    write("stopped")
    sys.exit()
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGUSR1, stop)
write(f"running")
time.sleep(10_000)
"""

FAILING_SCRIPT = """
import os, sys, time
if os.environ["GROUP_RANK"] == "1":
    sys.exit("no luck")
time.sleep(10_000)
"""

# With PYTHONUNBUFFERED, print writes the newline separately, so the ranks' lines would mix.
PRINTING_SCRIPT = """
from os import environ as e
line = "{WORLD_SIZE} ranks, GPUs {CUDA_VISIBLE_DEVICES}, {OMP_NUM_THREADS} threads"
print(end=line.format(**e) + "\\n")
"""


def test_two_requests_to_stop_are_signalled_once(tmp_path):
    """torchrun forwards the signal that its processes get from scancel too."""
    stop = re.search(r"^stop\(\) \{.*?^\}$", LAUNCH.read_text(), re.MULTILINE | re.DOTALL)[0]
    log = tmp_path / "log"
    lines = [f"scancel() {{ echo \"$*\" >>{log}; }}", "interrupted=false requeue=false",
             "SLURM_JOB_ID=7", stop, "stop", "stop", "$interrupted && $requeue"]  # fmt: skip
    subprocess.run(["bash", "-euc", "\n".join(lines)], check=True)
    assert log.read_text() == "--signal=USR1 7\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start a private cluster for Slurm's commands."""
    with slurm_cluster(tmp_path_factory.mktemp("slurm")):
        yield


class Job:
    """launch.slurm, submitted with sbatch options; `output` is the run's directory."""

    def __init__(self, output: Path, options: Sequence[str], *words: object, **env: str) -> None:
        self.log = output.with_suffix(".log")
        command = ["sbatch", "--parsable", "--output", self.log, *options, LAUNCH, *words]
        env = os.environ | {"PATH": PATH, "CUDA_VISIBLE_DEVICES": ""} | env
        self.number = slurm(*command, cwd=ROOT, env=env)

    def __getitem__(self, field: str) -> str:
        """Return a field of `scontrol show job`, such as JobState or Restarts."""
        return re.search(rf"\b{field}=(\S+)", slurm("scontrol", "show", "job", self.number))[1]

    def report(self) -> str:
        return f"{self['JobState']}\n{self.log.read_text() if self.log.exists() else ''}"

    def wait(self, *states: str) -> None:
        """Wait until the job ends or reaches one of `states`; fail if it ends in another state."""
        awaited = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", *states}
        state = ""

        def is_settled() -> bool:
            nonlocal state
            state = self["JobState"]  # read once, because it may change at any time
            return state in awaited

        wait_until(is_settled, 90, self.report)
        assert state in states, self.report()

    def wait_for(self, path: Path, text: str) -> None:
        """Wait until the file contains the text."""
        wait_until(lambda: path.exists() and text in path.read_text(), 60, self.report)


@pytest.fixture(scope="module")
def flags() -> list[str]:
    """Return flags for one epoch that is short enough for two cores."""
    return [*TINY, "--source-length", "64", "--target-length", "16", "--rouge-samples", "0",
            "--num-train-samples", "280", "--num-val-samples", "40", "--batch-size", "2",
            "--max-steps", "35"]  # fmt: skip


TWO_BY_TWO = ["--nodes", "2", "--ntasks-per-node", "2"]


@pytest.fixture(scope="module")
def finished_run(cluster: None, flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output directory of a finished run on two nodes with two ranks each."""
    output = tmp_path_factory.mktemp("run") / "output"
    Job(output, TWO_BY_TWO, *flags, "--output-dir", output).wait("COMPLETED")
    return output


def test_two_nodes_train_t5_by_default(finished_run):
    assert status(finished_run) == "finished"
    (start,) = metrics(finished_run, "start")
    assert "source_length" in start["arguments"]["data"] and start["world_size"] == 4
    assert list(losses(finished_run)) == list(range(1, 36))


def test_job_stopped_by_its_time_limit_is_requeued(finished_run, flags, tmp_path):
    output = tmp_path / "output"
    command = ["tests/workers/slowed.py", "T5_training", *flags, f"--output-dir={output}"]
    job = Job(output, TWO_BY_TWO, *command)
    wait_until(lambda: live_metrics(output, "train"), 60, job.report)
    # Slurm signals a job with five minutes left; it checks twice a minute.
    slurm("scontrol", "update", f"JobId={job.number}", "TimeLimit=5")
    job.wait("PENDING")
    assert status(output) == "stopped"
    slurm("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")
    job.wait("COMPLETED")
    assert status(output) == "finished" and job["Restarts"] == "1"
    first, second = metrics(output, "start")
    assert first["step"] == 0 < second["step"] < 35
    assert losses(output) == losses(finished_run)


@pytest.mark.slow
def test_job_stopped_before_its_first_step_is_requeued(cluster, flags, tmp_path):
    output = tmp_path / "output"
    words = ["tests/workers/phases.py", "T5_training", "load", 100, *flags, "--max-steps", "3"]
    job = Job(output, [], *words, f"--output-dir={output}")
    wait_until((tmp_path / "output.load-0").exists, 60, job.report)
    slurm("scancel", "--batch", "--signal=USR1", job.number)
    job.wait("COMPLETED")
    assert job["Restarts"] == "1" and status(output) == "finished"
    assert list(losses(output)) == [1, 2, 3]


def submit(text: str, directory: Path, *words: object, options: tuple = (), **env: str) -> Job:
    """Submit a script that has this text; `directory` is its output directory."""
    (directory / "script.py").write_text(text)
    words = [directory / "script.py", f"--output-dir={directory}", *words]
    return Job(directory, options, *words, **env)


def test_requeues_are_limited(cluster, tmp_path):
    job = submit(IDLE_SCRIPT, tmp_path, MAX_REQUEUES="1")
    job.wait_for(tmp_path / "status", "running")
    slurm("scancel", "--signal=USR1", job.number)
    job.wait_for(tmp_path / "status", "stopped")
    job.wait_for(tmp_path / "status", "running")
    slurm("scancel", "--signal=USR1", job.number)
    job.wait("FAILED")
    assert job["ExitCode"] == "1:0"  # torchrun waited; it would be 138 if SIGUSR1 had killed it
    assert job["Restarts"] == "1" and "stopped after 1 requeues" in job.report()


@pytest.mark.slow
def test_two_starts_without_progress_fail_the_job(cluster, tmp_path):
    job = submit(IDLE_SCRIPT, tmp_path, 0, 5, 5, 5)
    for restart in range(4):
        wait_until(lambda restart=restart: job["Restarts"] == str(restart), 60, job.report)
        job.wait_for(tmp_path / "status", "running")
        slurm("scancel", "--signal=USR1", job.number)
        job.wait_for(tmp_path / "status", "stopped")
    job.wait("FAILED")
    assert job["Restarts"] == "3" and job.report().count("and requeued") == 3
    assert "two starts in a row saved no step" in job.report()


def test_cancelled_job_is_not_requeued(cluster, tmp_path):
    job = submit(IDLE_SCRIPT, tmp_path)
    job.wait_for(tmp_path / "status", "running")
    slurm("scancel", job.number)
    job.wait("CANCELLED")
    job.wait_for(tmp_path / "status", "stopped")
    assert job["Restarts"] == "0"


def test_failed_job_is_not_requeued(cluster, flags, tmp_path):
    output = tmp_path / "output"
    output.mkdir()
    (output / "status").write_text("stopped\n")
    job = Job(output, [], *flags, "--lr", "-1", "--output-dir", output)
    job.wait("FAILED")
    assert job["Restarts"] == "0" and "--lr is -1.0, but must be" in job.report()


def test_failing_node_stops_the_others(cluster, tmp_path):
    job = submit(FAILING_SCRIPT, tmp_path, options=("--nodes", "2"))
    job.wait("FAILED")
    assert job["Restarts"] == "0" and job["RunTime"] < "00:10:00", job.report()


def test_job_starts_one_process_per_gpu(cluster, tmp_path):
    job = submit(PRINTING_SCRIPT, tmp_path, options=("--partition", "gpus"))
    job.wait("COMPLETED")
    assert job.log.read_text().splitlines() == ["2 ranks, GPUs 0,1, 2 threads"] * 2


def test_job_without_gpus_does_not_train_on_cpus(cluster, tmp_path):
    """Unless CUDA_VISIBLE_DEVICES is empty, as in the other tests."""
    job = submit(PRINTING_SCRIPT, tmp_path, CUDA_VISIBLE_DEVICES="0")
    job.wait("FAILED")
    (line,) = job.log.read_text().splitlines()
    assert line.startswith("error: Slurm gave this job no GPU. Pass --gpus-per-node=8")


SHIMS = {  # in place of Slurm's commands, for launch.slurm's own logic
    "scontrol": 'if [[ $1 == show ]]; then echo localhost; else echo "$*" >> calls; fi',
    "srun": 'printf "$STATUS" > run/status; exit 1',  # a run that a signal stopped
}


@pytest.mark.parametrize("words", [["--output-dir", "run"], ["--output_dir", "run"],
                                   ["--output-dir=run"], ["--output_dir=run"]])  # fmt: skip
@pytest.mark.parametrize("before, requeue, status, is_requeued", [
    ("", "", r"stopped\nsaved step 10\n", True),
    ("", "", r"stopped\r\nsaved step 10\r\n", True),
    ("", "7 10 1\r\n", r"stopped\nsaved step 20\n", True),
    ("", "7 10 1", r"stopped\nsaved step 10\n", False),  # the second start that saved nothing
    ("saved step PATH[$(touch ran)]", "", r"stopped\nsaved step 10\n", True),
    ("", "7 PATH[$(touch ran)] PATH[$(touch ran)]", r"stopped\nsaved step 08\n", True),
    ("", "7 08 09", r"stopped\nsaved step PATH[$(touch ran)]\n", True),
    ("", "", r"PATH[$(touch ran)]\nsaved step 10\n", False),
])  # fmt: skip
def test_only_numbers_are_taken_from_files(words, before, requeue, status, is_requeued, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "run").mkdir()
    for name, text in SHIMS.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "run/status").write_text(f"stopped\n{before}\n")
    (tmp_path / "run/requeue").write_text(requeue)
    variables = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "1",
                 "SLURM_CPUS_ON_NODE": "1", "SLURM_JOB_NODELIST": "x", "CUDA_VISIBLE_DEVICES": "",
                 "STATUS": status, "PATH": f"{tmp_path / 'bin'}:{PATH}"}  # fmt: skip
    command = ["bash", LAUNCH, "gpt2_fsdp.py", *words]
    subprocess.run(command, cwd=tmp_path, env=os.environ | variables, capture_output=True)
    assert (tmp_path / "calls").exists() == is_requeued
    assert not (tmp_path / "ran").exists()


def test_sbatch_options_precede_all_commands():
    """sbatch ignores options after the first command, and "# SBATCH" with a space."""
    first, *lines = LAUNCH.read_text().splitlines()
    assert first == "#!/usr/bin/env bash"
    options = [number for number, line in enumerate(lines) if line.startswith(("#SB", "# SB"))]
    assert all(line.startswith("#") for line in lines[: options[-1] + 1] if line)
    for number in range(options[0], options[-1] + 1):
        assert re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", lines[number])


def test_launch_script_passes_shellcheck():
    program = shutil.which("shellcheck", path=PATH)
    if not program:
        pytest.skip("needs shellcheck")
    subprocess.run([program, LAUNCH], check=True)
