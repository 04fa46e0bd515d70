"""A command as a container runs it, and the restarts of launch/k8s.yaml's Job and of SkyPilot."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from conftest import ROOT

UNSHARE = ["unshare", "--pid", "--mount", "--mount-proc", "--uts", "--fork", "--kill-child"]


def possible() -> bool:
    """Tell whether this user may make name spaces, as root may."""
    try:
        return subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


class Container:
    """A command as process 1 of its own pid namespace, with its own host name and /etc/hosts."""

    def __init__(self, host: str, hosts: Path, log: Path, command: list[str], **env: str) -> None:
        inside = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'
        words = [*UNSHARE, "bash", "-c", inside, "_", host, hosts, *command]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        kept = {key: os.environ[key] for key in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE")}
        kept |= {"PATH": path, "HOME": str(log.parent), "CUDA_VISIBLE_DEVICES": ""}
        self.is_killed = False
        with log.open("a") as file:
            pipes = {"stdout": file, "stderr": subprocess.STDOUT}
            self.process = subprocess.Popen(words, cwd=ROOT, env=kept | env, **pipes)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the command alone; SIGKILL ends all that is in the container, too."""
        pid = self.process.pid
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(child), number)
        self.is_killed = number == signal.SIGKILL

    def exit_code(self) -> int | None:
        """Return the code as a kubelet has it; None while the command runs."""
        code = self.process.poll()
        return 137 if code is not None and self.is_killed else code  # unshare fails then


def free_port() -> int:
    """Return a port that nobody has, for the one that the files name."""
    with socket.socket() as found:
        found.bind(("", 0))
        return found.getsockname()[1]


class Job:
    """Nodes that run a launcher's command, started again as the launcher would."""

    def __init__(self, directory: Path, words: list[object]) -> None:
        self.directory = directory
        self.words = [str(word) for word in words]
        self.port = str(free_port())
        self.hosts = directory / "hosts"
        self.log = directory / "log"
        self.codes: list[tuple[int, int]] = []  # of each end: the node and its exit code
        self.addresses = {0: "127.0.0.1", 1: "127.0.0.1"}
        self.starts = 0
        self.due: dict[int, float] = {}  # when a node that has ended starts again
        self.nodes: dict[int, Container] = {index: self.start(index) for index in range(2)}

    def start(self, index: int) -> Container:
        """Start a node's command with what the launcher gives it."""
        raise NotImplementedError

    def new_address(self, index: int) -> str:
        """Give a node another address, under its name, as a new pod gets one."""
        self.starts += 1
        self.addresses[index] = f"127.0.{self.starts}.{index + 2}"
        names = [f"{ip} train-{i}.train train-{i}\n" for i, ip in self.addresses.items()]
        self.hosts.write_text("127.0.0.1 localhost\n" + "".join(names))
        return self.addresses[index]

    def ended(self, index: int, code: int) -> bool:
        """Do what the launcher does at the end of a node's command; return whether it fails."""
        raise NotImplementedError

    def run(self, until: Callable[[], object] = lambda: False, seconds: float = 300) -> str:
        """Run until the condition holds ("running"), or to the end ("complete" or "failed")."""
        deadline = time.monotonic() + seconds
        while self.nodes or self.due:
            for index, at in list(self.due.items()):
                if time.monotonic() > at:
                    del self.due[index]
                    self.nodes[index] = self.start(index)
            for index, node in list(self.nodes.items()):
                code = node.exit_code()
                if code is None:
                    continue
                self.codes.append((index, code))
                del self.nodes[index]
                if self.ended(index, code):
                    self.close()
                    return "failed"
                break  # the others may be new
            if until():
                return "running"
            assert time.monotonic() < deadline, self.log.read_text()[-8000:]
            time.sleep(0.05)
        return "complete"

    def close(self) -> None:
        """Kill what still runs."""
        for node in self.nodes.values():
            node.process.kill()
            node.process.wait()


class Kubernetes(Job):
    """The Job of launch/k8s.yaml: each pod restarts alone, up to backoffLimitPerIndex times."""

    seconds = 0.0  # until a pod starts again

    def __init__(self, *args: Any, **options: Any) -> None:
        _, self.job = yaml.safe_load_all((ROOT / "launch/k8s.yaml").read_text())
        super().__init__(*args, **options)

    def start(self, index: int) -> Container:
        (container,) = self.job["spec"]["template"]["spec"]["containers"]
        command = [word.replace("29500", self.port) for word in container["command"]]
        command = [word.replace("--nproc-per-node gpu", "--nproc-per-node 1") for word in command]
        env = {x["name"]: x["value"] for x in container["env"] if "value" in x}
        env["HOME"] = str(self.directory)
        env["POD_IP"] = self.new_address(index)
        env["JOB_COMPLETION_INDEX"] = str(index)
        return Container(f"train-{index}", self.hosts, self.log, [*command, *self.words], **env)

    def ended(self, index: int, code: int) -> bool:
        if code == 0:
            return False
        failures = [node for node, _ in self.codes].count(index)
        if failures > self.job["spec"]["backoffLimitPerIndex"]:
            return True
        self.due[index] = time.monotonic() + self.seconds
        return False
