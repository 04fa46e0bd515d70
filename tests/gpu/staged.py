"""Run a script with several ranks on one GPU. NCCL refuses that, so gloo copies through the host.

    torchrun --standalone --nproc_per_node 2 tests/gpu/staged.py llama_fsdp.py FLAGS
    python tests/gpu/staged.py  # only builds the backend, in about a minute

It shows that sharding, streams, saves, resumes and exports are right on CUDA with several ranks,
but nothing of NCCL, speed or overlap. It needs g++ and ninja. Without a GPU it uses CPU tensors.
"""

import os
import runpy
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import cpp_extension

SOURCE = Path(__file__).resolve().with_name("staged.cpp")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
join_group = dist.init_process_group


def build() -> ModuleType:
    """Return the compiled backend, built once for each version of torch."""
    default = Path.home() / ".cache" / f"staged-{torch.__version__}"
    directory = Path(os.environ.get("STAGED_BUILD", default))
    directory.mkdir(parents=True, exist_ok=True)
    lock = directory / "lock"
    if lock.exists() and time.time() - lock.stat().st_mtime > 600:
        lock.unlink()  # of a build that was killed: torch would wait for it forever
    os.environ["PATH"] += f"{os.pathsep}{Path(sys.executable).parent}"  # of ninja
    flags = ["-O1", "-g0", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]
    return cpp_extension.load(
        "staged", [str(SOURCE)], extra_cflags=flags, build_directory=directory, with_cuda=False
    )


def new_backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Backend:
    """Return a backend of gloo for tensors on the GPU."""
    return build().staged(dist.ProcessGroupGloo(store, rank, size, timeout))


def init_process_group(backend: str, device_id: torch.device | None, **options: Any) -> None:
    """Replace torch's, without `device_id`: otherwise a DeviceMesh would split groups, as NCCL
    can, and not make new ones."""
    join_group(backend, **options)


if __name__ == "__main__":
    build()
    if sys.argv[1:]:
        dist.Backend.register_backend("staged", new_backend, devices=[DEVICE])
        dist.get_default_backend_for_device = lambda _: "staged"
        dist.init_process_group = init_process_group
        # All ranks use the one GPU, as if each had a node.
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        del sys.argv[0]
        sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
