"""The identity of a run, which its continuation must share: model, data, global batch and seed.

A checkpoint holds it as {name: value}.
"""

import json
import os
import socket
import zlib
from argparse import ArgumentParser, Namespace
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch.distributed as dist
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader

from . import arguments, metrics, ranks, readers, weights

IRRELEVANT = {  # to model and data
    "attention", "optimizer", "num_beams", "rouge_samples",
}  # fmt: skip
OF_FILES = {  # in a configuration: what it says of its files
    "_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
PLACES = {  # arguments that may differ between nodes, or say where things are
    "output_dir", "resume", "model_name", "dataset", "val_dataset", "data_dir",
}  # fmt: skip
OTHERS = {  # values that are checksums, in words
    "model": "its parameters or its configuration are others, by checksum",
    "data": "the samples of {data}, or those to validate on, are others, by checksum",
    "base": "the weights below the adapters are others",
}
PROBES = 256  # samples at most of each data set that are looked at as they are


def began(checkpoint: Path | None, finished: Path | None) -> str:
    """Return the day, such as 2026-11-23, on which the run began that goes on from `checkpoint`, or
    that is `finished` in that directory; any other begins today. Rank 0 alone: nodes may have two
    days."""
    saved = {}
    if checkpoint is not None:
        saved = json.loads((checkpoint / "train_state.json").read_text())
    elif finished is not None:
        saved = metrics.last_start(finished)
    return saved.get("identity", {}).get("began", date.today().isoformat())


def of_model(args: Namespace, script: str, model: nn.Module) -> dict[str, Any]:
    """Return what tells this script's model from others, by names, shapes and configuration.

    All ranks call it before wrapping. Raises ValueError if the nodes have other configurations.
    """
    named = []
    for name, parameter in model.named_parameters():
        named.append((name, list(weights.whole_shape(parameter))))
    config = described(model)
    if any(other != config for _, other in _on_all_nodes(config)):
        raise ValueError(f"--model-name {args.model_name}: the nodes have another config.json each")
    identity = {"script": script, "model": checksum([*named, config])}
    if hasattr(args, "chat_template"):  # of the tokenizer, which is exported with the model
        identity["--chat-template"] = content_of(args.chat_template)
    adapters = getattr(model, "adapters", None)
    return identity | (adapters.identity(args, model) if adapters else {})


def content_of(flag: str | None) -> str | None:
    """Return the value of a flag, or where that names a file a checksum of what it holds."""
    if flag is None or not Path(flag).expanduser().is_file():
        return flag
    content = Path(flag).expanduser().read_bytes()
    return f"a file, crc {zlib.crc32(content):08x}"


def described(model: nn.Module) -> list[tuple[str, Any]]:
    """Return what a model's configuration says of what it computes."""
    config = model.config.to_diff_dict()
    return sorted((key, repr(value)) for key, value in config.items() if key not in OF_FILES)


def of_data(
    args: Namespace, loader: DataLoader | None, val_loaders: dict[str, DataLoader]
) -> dict[str, Any]:
    """Return what tells data, global batch and seed from others; all ranks.

    Raises ValueError, on all ranks, if some have other data. `loader` is None in an evaluation.
    """
    sets = {f"validation on {name}": other.dataset for name, other in val_loaders.items()}
    if loader is not None:
        sets[f"training on {_names(args)}"] = loader.dataset
    sums = {name: sum_of(dataset, name) for name, dataset in sets.items()}
    _compare_ranks(sums)
    if loader is None:
        return {}
    return {
        "data": checksum([sums[name] for name in sets]),
        "global batch": loader.batch_sampler.global_batch,
        "seed": args.seed,
        "began": args.began,
        "--group-by-length": loader.batch_sampler.lengths is not None,
    }


def _names(args: Namespace) -> str:
    """Name the training data as the flags do."""
    return args.dataset if isinstance(args.dataset, str) else ", ".join(args.dataset)


def sum_of(dataset: Any, name: str) -> list[Any]:
    """Return what tells a data set from others: its length, and a checksum of up to PROBES samples
    and, where it has a `datasets.Dataset`, of all rows of that. Rank 0 says if it has not."""
    stride = len(dataset) // PROBES + 1
    samples = [as_lists(dataset[i]) for i in range(0, len(dataset), stride)]
    crc = zlib.crc32(repr(samples).encode())
    rows = getattr(dataset, "dataset", dataset)
    if isinstance(rows, Dataset):
        crc = readers.content_sum(rows, crc)
    elif stride > 1:
        ranks.say(
            f"{name}: known by {len(samples)} of {len(dataset):,} samples; a change between them "
            "is not seen when the run goes on"
        )
    return [len(dataset), crc]


def check_flags(args: Namespace) -> None:
    """Raise ValueError, on all ranks, if some were given other flags; only places may differ."""
    mine = {name: value for name, value in vars(args).items() if name not in PLACES}
    everyone = _on_all_nodes(mine)
    for name, value in mine.items():
        found = {node: there.get(name) for node, there in everyone}
        if any(other != value for other in found.values()):
            values = ", ".join(f"{other} on {node}" for node, other in found.items())
            raise ValueError(f"--{name.replace('_', '-')} is {values}: give all nodes the same")


def _on_all_nodes(value: Any) -> list[tuple[str, Any]]:
    """Return what each rank has for `value`, with the name of its node."""
    node = f"node {os.environ.get('GROUP_RANK', 0)} ({socket.gethostname()})"
    return ranks.on_every_rank(lambda: (node, value))


def _compare_ranks(sums: dict[str, list[Any]]) -> None:
    """Raise ValueError, on all ranks, that names the nodes, if some have other `sums`."""
    everyone = _on_all_nodes(sums)
    _, first = everyone[0]
    for name in first:
        found = {node: there.get(name, [0]) for node, there in everyone}
        if any(there.get(name) != first[name] for _, there in everyone):
            counts = ", ".join(f"{node}: {total:,} samples" for node, (total, *_) in found.items())
            raise ValueError(
                f"{name}: the nodes have different data ({counts}): give all of them the same "
                "files; if those are the same, a cache is of another age: empty "
                f"{datasets.config.HF_DATASETS_CACHE} on each, or name a new HF_DATASETS_CACHE"
            )


def as_lists(sample: Any) -> Any:
    """Return a sample with lists in place of arrays."""
    if isinstance(sample, dict):
        return {name: as_lists(value) for name, value in sample.items()}
    if isinstance(sample, list | tuple):
        return [as_lists(value) for value in sample]
    if isinstance(sample, np.ndarray | Tensor):  # which print only some of their numbers
        return sample.tolist()
    return sample


def checksum(items: list[Any]) -> str:
    """Return the number of items and the CRC-32 of what they print as."""
    return f"{len(items)} items, crc {zlib.crc32(repr(items).encode()):08x}"


def compare_saved(path: Path, here: dict[str, Any], args: Namespace) -> None:
    """Raise ValueError with all that differs between the run that wrote `path` and this one."""
    saved = json.loads((path / "train_state.json").read_text())["identity"]
    compare(f"{path} was saved by a run", saved, here, path.parent.parent, args)


def compare(
    who: str, saved: dict[str, Any], here: dict[str, Any], directory: Path, args: Namespace
) -> None:
    """Raise ValueError with all that differs between the identity that `who`, the run in
    `directory`, had, and the one `here`."""
    differing = [name for name in here if here[name] != saved.get(name)]
    if not differing:
        if "adapters" not in here:  # whose frozen weights are those of --model-name
            _say_other_name(directory, args)
        return
    if "script" in differing:
        differing = ["script"]  # from which all else follows
    what = ", ".join(_in_words(name, saved.get(name), here[name], args) for name in differing)
    remedy = "give what it had, or another --output-dir"
    flags = _changed_flags(directory, args)
    if "data" not in differing:
        flags = [flag for flag in flags if flag.startswith("--model-name ")]
    if flags and {"model", "data"} & set(differing):
        remedy = f"give what it had of {', '.join(flags)}, or another --output-dir"
    if differing == ["global batch"]:
        remedy = (
            f"--global-batch-size {saved['global batch']}, in place of "
            "--gradient-accumulation-steps, keeps it"
        )
        if saved["global batch"] % dist.get_world_size():
            remedy = f"use a number of processes that divides {saved['global batch']}"
    raise ValueError(f"{who} that differs in {what}: {remedy}")


def _in_words(name: str, there: Any, here: Any, args: Namespace) -> str:
    """Say what differs under a name of the identity; of a checksum what it is of."""
    if name not in OTHERS:
        return f"{name} ({there} there, {here} here)"
    words = OTHERS[name].format(data=_names(args))
    return f"{name} ({words}: {_sum(there)} there, {_sum(here)} here)"


def _sum(value: Any) -> str:
    """Return the checksum of what `checksum` has returned, without the number of items."""
    return str(value).rpartition("crc ")[2]


def _say_other_name(directory: Path, args: Namespace) -> None:
    """Say, on rank 0, that another --model-name changes nothing but the name."""
    before = metrics.last_start(directory)["arguments"].get("model_name", args.model_name)
    if before != args.model_name:
        ranks.say(
            f"the run began with --model-name {before}, not {args.model_name}: the weights are "
            "those of its checkpoint"
        )


def _changed_flags(directory: Path, args: Namespace) -> list[str]:
    """List the flags of model and data that had other values when the run in `directory` last
    started, each with that value and the one in `args`."""
    parser = ArgumentParser()
    arguments.add_common(parser, [], [])
    common = vars(parser.parse_args([])).keys()
    before = metrics.last_start(directory)["arguments"]
    found = []
    for name, value in vars(args).items():
        if name not in common | IRRELEVANT and before.get(name, value) != value:
            found.append(f"--{name.replace('_', '-')} ({before[name]} there, {value} here)")
    return found
