"""Run under torchrun by test_fsdp2.py: models loaded under FSDP2, FSDP1 and DDP.

    fsdp2_load_worker.py RESULT.json OUTPUT_DIR MODELS.json

MODELS.json has a directory by script. Each is loaded in every way of WAYS from weights that only
rank 0 sees, and exported. Rank 0 writes what each rank had.
"""

import importlib
import json
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests")]

import torch.distributed as dist
from ten_steps import local
from torch.distributed.tensor import DTensor

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


def without_weights(directory: Path, place: Path) -> Path:
    """Return a copy of all but the weights."""
    ignore = shutil.ignore_patterns("*.safetensors*")
    return Path(shutil.copytree(directory, place, ignore=ignore, dirs_exist_ok=True))


def main() -> None:
    """Load all models in one process group."""
    result, output, directories = sys.argv[1:]
    rank, found, device = int(os.environ["RANK"]), {}, None
    for name, directory in json.loads(directories).items():
        script = importlib.import_module(name)
        for way, flags in WAYS.items():
            own = ["--model-name", directory, *LENGTHS[name], "--export-dtype", "fp32"]
            args = script.parse_args([*own, *flags])
            device = device or script.setup(args)
            place = Path(directory)
            if rank != 0:
                place = without_weights(place, Path(output) / f"{name} {rank}")
            weights.find_directory = lambda *_, place=place: place
            model, tokenizer, init = script.load_model(args, device)
            model = script.wrap_model(args, device, model, init)
            export.export_model(model, tokenizer, Path(output) / name / way, args)
            tied = weights.unwrapped(model).get_output_embeddings().weight
            mine = {
                "bytes": sum(local(p).nbytes for p in model.parameters()),
                "sharded": all(isinstance(p, DTensor) for p in model.parameters()),
                "tied": tied is weights.unwrapped(model).get_input_embeddings().weight,
            }
            found[f"{name}, {way}"] = ranks.on_every_rank(lambda mine=mine: mine)
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(found))
    script.cleanup()


if __name__ == "__main__":
    main()
    os._exit(0)  # as the scripts do, and why
