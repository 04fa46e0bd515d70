"""What must not differ between a run and its continuation: model, data, global batch and seed.

A checkpoint holds it as a dict, what it is by what it is called.
"""

import contextlib
import json
import math
import zlib
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from . import adapters, arguments

GROUPING = "grouping by length"
IRRELEVANT = {  # to model and data
    "attention", "attention_kernel", "num_beams", "rouge_samples", "eval_split",
}  # fmt: skip
BEFORE = {"clean": True}  # what versions did that had no such flag
PROBES = 256  # samples at most of each data set that tell it from another


def of_model(args: Namespace, script: str, model: nn.Module) -> dict[str, Any]:
    """What tells this script's model from others, by names and shapes; call it before wrapping."""
    named = []
    for name, parameter in model.named_parameters():
        shape = getattr(parameter, "whole_shape", parameter.shape)  # of what is in 4 bits
        named.append((name, list(shape)))
    identity = {"script": script, "model": checksum(named)}
    if getattr(args, "lora_rank", 0) and not adapters.has_adapters(model):
        raise ValueError("--lora-rank: load_model has added no adapters to this model")
    if adapters.has_adapters(model):
        identity |= adapters.identity(args, model)
    return identity


def of_data(
    args: Namespace, loader: DataLoader, val_loaders: dict[str, DataLoader]
) -> dict[str, Any]:
    """What tells data, global batch and seed from others."""
    contents = []
    samples = []
    for dataset in (loader.dataset, *(other.dataset for other in val_loaders.values())):
        contents.append(len(dataset))
        stride = len(dataset) // PROBES + 1
        samples += [as_lists(dataset[i]) for i in range(0, len(dataset), stride)]
    found = {
        "data": checksum(contents + samples),
        "global batch": loader.batch_sampler.global_batch,
        "seed": args.seed,
    }
    if loader.batch_sampler.lengths is not None:
        found[GROUPING] = "of halves of an epoch"
    return found


def as_lists(sample: Any) -> Any:
    """A sample with lists in place of arrays."""
    if isinstance(sample, dict):
        return {name: as_lists(value) for name, value in sample.items()}
    if isinstance(sample, list):
        return [as_lists(value) for value in sample]
    return sample.tolist() if isinstance(sample, np.ndarray) else sample


def checksum(items: list[Any]) -> str:
    """Their number and the CRC-32 of what they print as: tells data, or shapes, from others."""
    return f"{len(items)} items, crc {zlib.crc32(repr(items).encode()):08x}"


def check(path: Path, here: dict[str, Any], args: Namespace) -> None:
    """Raise ValueError with all that differs between the run that wrote `path` and this one."""
    saved = json.loads((path / "train_state.json").read_text())["identity"]
    differing = [name for name in here if here[name] != saved.get(name)]
    if not differing:
        return
    if "script" in differing:
        differing = ["script"]  # from which all else follows
    what = ", ".join(f"{name} ({saved.get(name)} there, {here[name]} here)" for name in differing)
    remedy = "give what it had, or another --output-dir"
    flags = _changed_flags(path.parent.parent, args)
    if "data" not in differing:
        flags = [flag for flag in flags if flag.startswith("--model-name ")]
    if flags and {"model", "data"} & set(differing):
        remedy = f"give what it had of {', '.join(flags)}, or another --output-dir"
    if GROUPING in differing:
        remedy = "go on with the version of the script that wrote it, or give another --output-dir"
    if differing == ["global batch"]:
        per_rank, rest = divmod(saved["global batch"], dist.get_world_size())
        batch = math.gcd(per_rank, 8)
        remedy = f"--batch-size {batch} --gradient-accumulation-steps {per_rank // batch} keeps it"
        if rest:
            remedy = f"use a number of processes that divides {saved['global batch']}"
    raise ValueError(f"{path} was saved by a run that differs in {what}: {remedy}")


def _changed_flags(directory: Path, args: Namespace) -> list[str]:
    """The flags of model and data that had other values when the run in `directory` last started,
    each with that value and the one in `args`."""
    parser = ArgumentParser()
    arguments.add_common(parser)
    common = vars(parser.parse_args([])).keys()
    before = BEFORE | last_start(directory)["arguments"]
    found = []
    for name, value in vars(args).items():
        if name not in common | IRRELEVANT and before.get(name, value) != value:
            found.append(f"--{name.replace('_', '-')} ({before[name]} there, {value} here)")
    return found


def last_start(directory: Path) -> dict[str, Any]:
    """The last event "start" in metrics.jsonl of the run in OUTPUT_DIR `directory`, with its
    `arguments`; they are {} if there was none."""
    found = {"arguments": {}}
    with contextlib.suppress(FileNotFoundError):
        for line in (directory / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):  # torn
                event = json.loads(line)
                if "arguments" in event:
                    found = event
    return found
