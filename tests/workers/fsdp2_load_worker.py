"""Load models under FSDP2, FSDP1 and DDP with torchrun, for test_fsdp2.py.

    fsdp2_load_worker.py RESULT.json OUTPUT_DIR MODELS.json

MODELS.json maps scripts to model directories. Each model is loaded in every way of WAYS, with the
weights visible only to rank 0, and exported. Rank 0 writes the results of all ranks.
"""

import importlib
import json
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests")]

import torch
import torch.distributed as dist
from ten_steps import local
from torch.distributed.tensor import DTensor

from benchmarks.driven import parse_flags
from runtime import export, ranks, weights

WAYS = {
    "1-D mesh": ["--fsdp", "2"],
    "2-D mesh": ["--fsdp", "2", "--strategy", "hybrid_shard", "--shard-group-size", "2"],
    "FSDP1": [],
    "DDP": ["--strategy", "ddp"],
}
LENGTHS = {
    "T5_training": ["--dataset", "docstrings"],
    "gpt2_fsdp": ["--block-size", "32"],
    "llama_fsdp": ["--max-seq-length", "64"],
}


def copy_without_weights(directory: Path, target: Path) -> Path:
    """Copy a model directory except its weights, and return the copy."""
    ignore = shutil.ignore_patterns("*.safetensors*")
    return Path(shutil.copytree(directory, target, ignore=ignore, dirs_exist_ok=True))


def main() -> None:
    """Load all models in one process group."""
    result, output, directories = sys.argv[1:]
    rank, results, device = int(os.environ["RANK"]), {}, None
    for name, directory in json.loads(directories).items():
        script = importlib.import_module(name)
        for way, flags in WAYS.items():
            common = ["--model-name", directory, *LENGTHS[name], "--export-dtype", "fp32"]
            args = parse_flags(script, [*common, *flags])
            device = device or script.setup(args)
            path = Path(directory)
            if rank != 0:
                path = copy_without_weights(path, Path(output) / f"{name} {rank}")
            weights.find_directory = lambda *_, path=path: path
            model, facts, init = script.load_model(args, device)
            model = script.wrap_model(args, device, model, init)
            export.export_model(model, facts.tokenizer, Path(output) / name / way, torch.float32)
            head = weights.unwrapped(model).get_output_embeddings().weight
            summary = {
                "bytes": sum(local(p).nbytes for p in model.parameters()),
                "sharded": all(isinstance(p, DTensor) for p in model.parameters()),
                "tied": head is weights.unwrapped(model).get_input_embeddings().weight,
            }
            results[f"{name}, {way}"] = ranks.on_every_rank(lambda summary=summary: summary)
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(results))
    script.cleanup()


if __name__ == "__main__":
    main()
    os._exit(0)  # as the scripts do
