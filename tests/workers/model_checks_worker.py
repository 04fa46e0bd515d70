"""Run under torchrun by test_model_checks.py: which copies of the scripts are refused, and how.

model_checks_worker.py CASES.json OUTPUT.json

CASES holds a script, the changes to its text and flags, by name.
"""

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests")]

import torch.distributed as dist
from copied import copied

import llama_fsdp
from benchmarks.driven import Driven


def main() -> None:
    """Write what every rank was told, by case; empty where all is well."""
    cases, output = map(Path, sys.argv[1:])
    device = llama_fsdp.setup(llama_fsdp.parse_args(["--model-name", "tiny"]))
    results: dict[str, list[str]] = {}
    for case, (name, changes, flags) in json.loads(cases.read_text()).items():
        script = copied(name, changes)
        said = ""
        try:
            run = ["--model-name", "tiny", "--output-dir", str(output.with_suffix("")), *flags]
            Driven(script, script.parse_args(run), device)
        except ValueError as error:
            said = str(error)
        results[case] = [""] * dist.get_world_size()
        dist.all_gather_object(results[case], said)
    if dist.get_rank() == 0:
        output.write_text(json.dumps(results))
    llama_fsdp.cleanup()


if __name__ == "__main__":
    main()
    os._exit(0)  # as the scripts do, and why
