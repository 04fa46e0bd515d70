"""Run a command as in a container, with its own process ids, mounts and host name."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from conftest import ROOT

UNSHARE = ["unshare", "--pid", "--mount", "--mount-proc", "--uts", "--fork", "--kill-child"]


def is_available() -> bool:
    """Return whether this user may create namespaces, as root may."""
    try:
        return subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


class Container:
    """A command that is process 1 of a new pid namespace, with its own host name and /etc/hosts."""

    def __init__(self, host: str, hosts: Path, log: Path, command: list[str], **env: str) -> None:
        setup = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'
        words = [*UNSHARE, "bash", "-c", setup, "_", host, hosts, *command]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {key: os.environ[key] for key in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE")}
        environment |= {"PATH": path, "HOME": str(log.parent), "CUDA_VISIBLE_DEVICES": ""}
        with log.open("a") as file:
            pipes = {"stdout": file, "stderr": subprocess.STDOUT}
            self.process = subprocess.Popen(words, cwd=ROOT, env=environment | env, **pipes)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the command only. SIGKILL ends every process in the container."""
        pid = self.process.pid
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(child), number)
