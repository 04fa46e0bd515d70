"""A command as a container runs it: with process ids, mounts and a host name of its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

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
        with log.open("a") as file:
            pipes = {"stdout": file, "stderr": subprocess.STDOUT}
            self.process = subprocess.Popen(words, cwd=ROOT, env=kept | env, **pipes)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the command alone; SIGKILL ends all that is in the container, too."""
        pid = self.process.pid
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(child), number)
