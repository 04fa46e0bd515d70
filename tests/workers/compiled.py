"""Run a script whose blocks --compile traces without compiling them: compiled.py SCRIPT FLAGS..."""

import importlib
import sys

from ten_steps import compile_without_compiler, parse_args

from core import ranks

if __name__ == "__main__":
    compile_without_compiler()
    script = importlib.import_module(sys.argv[1])
    ranks.run(script.fsdp_main, parse_args(script, sys.argv[2:]))
