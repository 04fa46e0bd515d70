"""A private Slurm cluster on this machine: two nodes with two CPUs and one that also has "GPUs"."""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import wait_until

# The node names are loopback addresses, which resolve on every machine.
# cred_expire: a requeued job restarts after this many seconds instead of two minutes.
# JobRequeue=0: launch.slurm must request requeues itself.
CONFIG = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={directory}/munge.socket,cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
GresTypes=gpu
MpiDefault=none
SelectType=select/cons_tres
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
KillWait=5
JobRequeue=0
NodeName=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=127.0.0.2 Port={ports[2]} CPUs=2
NodeName=127.0.0.3 Port={ports[3]} CPUs=4 Gres=gpu:2
PartitionName=main Nodes=127.0.0.[1-2] Default=YES
PartitionName=gpus Nodes=127.0.0.3
"""
GPUS = "".join(f"NodeName=127.0.0.3 Name=gpu File={file}\n" for file in ("/dev/null", "/dev/zero"))


def slurm(*command: object, **options: object) -> str:
    """Return the output of a Slurm command."""
    return subprocess.check_output(list(map(str, command)), text=True, **options).strip()


def free_ports(count: int) -> list[int]:
    """Return `count` free TCP ports."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def slurm_cluster(directory: Path) -> Iterator[None]:
    """Run a cluster in `directory` and point Slurm's commands at it. Skip without Slurm."""
    path = os.environ["PATH"] + ":/usr/sbin"  # Debian installs the daemons there
    programs = {name: shutil.which(name, path=path) for name in ("munged", "slurmctld", "slurmd")}
    if None in programs.values():
        pytest.skip(f"needs {', '.join(name for name in programs if not programs[name])}")
    config, key = directory / "slurm.conf", directory / "munge.key"
    ports, user = free_ports(4), getpass.getuser()
    config.write_text(CONFIG.format(ports=ports, user=user, directory=directory))
    (directory / "gres.conf").write_text(GPUS)
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed"}
    munge = [f"--{flag}={directory}/munge.{name}" for flag, name in files.items()]
    commands = [
        ["munged", "--foreground", "--force", *munge],  # --force: `directory` is private
        ["slurmctld", "-D"],
        *(["slurmd", "-D", "-N", f"127.0.0.{node}"] for node in (1, 2, 3)),
    ]
    log = directory / "daemons.log"
    with (
        pytest.MonkeyPatch.context() as patch,
        log.open("w") as output,
        contextlib.ExitStack() as stack,
    ):
        patch.setenv("SLURM_CONF", str(config))
        for name, *flags in commands:
            command = [programs[name], *flags]
            daemon = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            stack.callback(daemon.wait, 30)
            stack.callback(daemon.terminate)
            if name == "munged":
                wait_until((directory / "munge.socket").exists, 5, log.read_text)
        idle = ["sinfo", "--noheader", "--Node", "--states", "idle"]
        wait_until(
            lambda: slurm(*idle, stderr=subprocess.DEVNULL).count("\n") == 2, 20, log.read_text
        )
        try:
            yield
        finally:  # job processes are not children of the daemons and would outlive them
            slurm("scancel", "--user", user)
            wait_until(lambda: not slurm("squeue", "--noheader"), 20, log.read_text)
