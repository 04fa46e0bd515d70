"""Run a script that is written for torch.cuda on the simulated device: run.py SCRIPT FLAGS...

In the source of the script and of the modules beside it, torch.cuda is read as torch.sim, "cuda" as
"sim" and nccl as simcc.
"""

import os
import re
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist

import simdev  # noqa: F401

REPLACEMENTS = {
    r"\btorch\.cuda\b": "torch.sim",
    r"cpu:gloo,cuda:nccl": "cpu:gloo,sim:simcc",
    r"([\"'])cuda(:\d+)?\1": r"\1sim\2\1",
    r"\.is_cuda\b": ".is_sim",
    r"\.cuda\(": ".sim(",
}
join_group = dist.init_process_group


def translate(source: str) -> str:
    """Return the text of a module with the names of the simulated device."""
    for pattern, replacement in REPLACEMENTS.items():
        source = re.sub(pattern, replacement, source)
    return source


class Loader(SourceFileLoader):
    """Loads translated modules, without a cache of their bytecode."""

    def get_code(self, name: str) -> CodeType:
        return compile(translate(self.get_source(name)), self.path, "exec", dont_inherit=True)


class Finder(MetaPathFinder):
    """Finds the modules in a folder, other than those of an environment that is in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = f"{folder}{os.sep}"

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return None
        file = os.path.realpath(spec.origin)
        if not file.startswith(self.folder) or "site-packages" in file:
            return None
        spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


def init_process_group(*args: Any, device_id: Any = None, **options: Any) -> None:
    """Replace torch's, without `device_id`: otherwise a DeviceMesh would split groups, as NCCL
    can, and not make new ones."""
    join_group(*args, **options)


if __name__ == "__main__":
    del sys.argv[0]
    script = Path(sys.argv[0]).resolve()
    sys.path.insert(0, str(script.parent))
    sys.meta_path.insert(0, Finder(script.parent))
    dist.init_process_group = init_process_group
    module = ModuleType("__main__")
    module.__file__ = str(script)
    sys.modules["__main__"] = module
    exec(compile(translate(script.read_text()), script, "exec", dont_inherit=True), vars(module))
