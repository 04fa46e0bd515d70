"""Run a script so that --compile needs no C++ compiler: compiled.py SCRIPT FLAGS..."""

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests")]

from ten_steps import compile_without_compiler

from benchmarks.driven import parse_flags
from runtime import run

if __name__ == "__main__":
    compile_without_compiler()
    script = importlib.import_module(sys.argv[1])
    run.launch(script.fsdp_main, parse_flags(script, sys.argv[2:]))
