"""The identity of a run: a dict of values that all its ranks and all its starts must share."""

import json
import os
import zlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import transformers
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import PretrainedConfig

from . import ranks, readers
from .options import as_flag
from .state import Facts

# Keys of a config that describe its files.
OF_FILES = {"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"}
PLACES = {"output_dir", "model_name", "dataset", "val_dataset", "data_dir"}  # may differ by node
VERSION = "Transformers"  # the key of the library's version
SAMPLES = 256  # most samples that are read of a data set that is not a `datasets.Dataset`


def of_flags(args: Namespace) -> dict[str, str]:
    """Return by name the values of the flags that all ranks must share."""
    flags = {name: value for name, value in vars(args).items() if name not in PLACES}
    return {as_flag(name): str(value) for name, value in flags.items()}


def of_model(script: str, config: PretrainedConfig, facts: Facts) -> dict[str, Any]:
    """Return the identity of a model: names, shapes, config, chat template, adapters."""
    shapes = [(name, list(shape)) for name, shape in facts.shapes.items()]
    settings = sorted(x for x in config.to_diff_dict().items() if x[0] not in OF_FILES)
    template = checksum(getattr(facts.tokenizer, "chat_template", None))
    text = f"{config.model_type}, {checksum([shapes, settings])}"
    identity = {"script": script, "model": text, "chat template": template}
    identity[VERSION] = transformers.__version__
    return identity | (facts.adapters.identity() if facts.adapters else {})


def of_data(args: Namespace, loader: DataLoader, val_loaders: dict) -> dict[str, Any]:
    """Return data digests, batch and seed by name; raise ValueError if ranks differ. All ranks."""
    sets = {"training data": loader.dataset}
    sets |= {f"validation data {i}": x.dataset for i, x in enumerate(val_loaders.values(), 1)}
    digests = {name: fingerprint(dataset) for name, dataset in sets.items()}
    identity = compare_ranks({name: digest for name, digest in digests.items() if digest})
    identity |= {"--seed": args.seed, "global batch": loader.batch_sampler.global_batch}
    return identity | {"--group-by-length": getattr(args, "group_by_length", False)}


def fingerprint(dataset: Any) -> str | None:
    """Return a data set's length and CRC as text: of up to SAMPLES samples and a Dataset's rows.
    Return None if another process of this node reads the same rows."""
    rows = getattr(dataset, "dataset", dataset)  # from which it makes its samples
    is_table = isinstance(rows, Dataset)
    if is_table and int(os.environ.get("LOCAL_RANK", 0)) != 0:
        return None
    samples = [dataset[i] for i in range(0, len(dataset), len(dataset) // SAMPLES + 1)]
    text = json.dumps(samples, default=lambda x: getattr(x, "tolist", x.__repr__)())  # whole arrays
    crc = zlib.crc32(text.encode())
    crc = readers.content_sum(rows, crc) if is_table else crc
    return f"{len(dataset):,} samples, crc {crc:08x}"


def checksum(value: Any) -> str:
    """Return the CRC-32 of the repr of a value, as text."""
    return f"crc {zlib.crc32(repr(value).encode()):08x}"


def compare_ranks(values: dict[str, Any]) -> dict[str, Any]:
    """Return rank 0's `values`; raise ValueError if a value on another rank differs. All ranks."""
    everyone = ranks.on_every_rank(lambda: values)
    for rank, others in enumerate(everyone):
        for key, there in others.items():
            if there != (here := everyone[0].get(key)):
                text = f"{key} is {here} on rank 0, {there} on rank {rank}."
                raise ValueError(f"{text} Give all nodes the same flags, model and data.")
    return everyone[0]


def compare(path: Path, saved: dict[str, Any], here: dict[str, Any]) -> None:
    """Raise ValueError with all differences between the run that saved `path` and this one."""
    was = {name: saved.get(name) for name in here if here[name] != saved.get(name)}
    if not was.keys() - {VERSION}:  # may differ, but may explain other differences
        return
    text = "; ".join(f"{name} is {here[name]}, was {was[name]}" for name in was)
    remedy = "Pass the flags, model, data and optimizer of that run, or another --output-dir."
    if batch := was.get("global batch"):
        remedy += f" --global-batch-size {batch} keeps the batch if the processes divide {batch}."
    raise ValueError(f"{path} was saved by a different run: {text}. {remedy}")
