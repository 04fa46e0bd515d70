"""Build the simulated device from sim.cpp, once for each version of torch; it takes a minute."""

import os
import sys
import time
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).resolve().with_name("sim.cpp")


def load() -> ModuleType:
    """Return the compiled extension."""
    default = Path.home() / ".cache" / f"simdev-{torch.__version__}"
    directory = Path(os.environ.get("SIMDEV_BUILD", default))
    directory.mkdir(parents=True, exist_ok=True)
    lock = directory / "lock"
    if lock.exists() and time.time() - lock.stat().st_mtime > 600:
        lock.unlink()  # of a build that was killed: torch would wait for it forever
    os.environ["PATH"] += f"{os.pathsep}{Path(sys.executable).parent}"  # of ninja
    flags = ["-O1", "-g0", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]
    return cpp_extension.load(
        "simdev_C", [str(SOURCE)], extra_cflags=flags, build_directory=directory
    )
