"""Record how edited scripts are refused under torchrun, for test_model_checks.py.

model_checks_worker.py CASES.json OUTPUT.json

CASES.json maps names to [script, replacements in its text, flags] and, optionally, replacements in
the text of its data module.
"""

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests")]

import torch.distributed as dist
from copied import edited_script

import llama_fsdp
from benchmarks.driven import Driven, parse_flags


def main() -> None:
    """Write each rank's error message by case, empty if the script is accepted."""
    cases, output = map(Path, sys.argv[1:])
    device = llama_fsdp.setup(parse_flags(llama_fsdp, ["--model-name", "tiny"]))
    results: dict[str, list[str]] = {}
    for case, (name, changes, flags, *data) in json.loads(cases.read_text()).items():
        script = edited_script(name, changes, *data)
        message = ""
        try:
            common = ["--model-name", "tiny", "--output-dir", str(output.with_suffix("")), *flags]
            Driven(script, parse_flags(script, common), device)
        except ValueError as error:
            message = str(error)
        results[case] = [""] * dist.get_world_size()
        dist.all_gather_object(results[case], message)
    if dist.get_rank() == 0:
        output.write_text(json.dumps(results))
    llama_fsdp.cleanup()


if __name__ == "__main__":
    main()
    os._exit(0)  # as the scripts do
