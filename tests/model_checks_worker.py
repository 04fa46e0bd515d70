"""Run under torchrun by test_model_checks.py: which copies of llama_fsdp.py are refused, and how.

model_checks_worker.py OUTPUT.json CHATS.jsonl MODELS.json VARIANTS.json
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch.distributed as dist
from copied import llama_as

import llama_fsdp


def main() -> None:
    """Write what every rank was told, by model and variant; empty where all is well."""
    output, chats, models, variants = sys.argv[1:]
    common = ["--model-name", "tiny", "--dataset", chats, "--max-seq-length", "64"]
    device = llama_fsdp.setup(llama_fsdp.parse_args(common))
    results: dict[str, list[str]] = {}
    for name, config in json.loads(models).items():
        script = llama_as(name, **config)
        for variant, flags in json.loads(variants).items():
            said = ""
            try:
                script.prepare(script.parse_args([*common, *flags]), device, None)
            except ValueError as error:
                said = str(error)
            everyone = [""] * dist.get_world_size()
            dist.all_gather_object(everyone, said)
            results[f"{name} {variant}"] = everyone
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps(results))
    llama_fsdp.cleanup()


if __name__ == "__main__":
    main()
    os._exit(0)  # as the scripts do, and why
