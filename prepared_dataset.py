"""Tokens that tools/prepare.py wrote. Any rank may call these functions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase as Tokenizer

from core.ranks import Problem
from core.weights import tokenizer_digest

NOTES = "prepared.json"  # a file in a prepared directory: what it was made with
# Flags that may differ: names of data, packing, and the template, which the tokenizer has.
FREE = ("dataset", "val_dataset", "data_dir", "chat_template", "packing", "group_by_length")


def read_notes(args: Any) -> dict:
    """Return what --dataset, a prepared directory, was made with; {} if it is other data."""
    path = Path(args.dataset[0]).expanduser() / NOTES
    names = [*args.dataset, *vars(args).get("val_dataset", ())]
    if len(names) == 1 and path.is_file():
        return json.loads(path.read_text())
    return {}


def made_with(args: Any, tokenizer: Tokenizer) -> dict[str, str]:
    """Return what decides the tokens, by name: the module of `args`, the tokenizer, the flags."""
    flags = {f"--{name}": str(value) for name, value in vars(args).items() if name not in FREE}
    return {
        "the data module": type(args).__module__,
        "the tokenizer and chat template": tokenizer_digest(tokenizer),
        "the rows of the embedding": str(getattr(tokenizer, "embedding_size", "all")),
    } | flags


def load(
    args: Any,
    tokenizer: Tokenizer,
    evaluate_only: bool,
    load_rows: Callable | None,
) -> tuple:
    """Return the training set, None with `evaluate_only`, and the validation sets by name: those of
    a prepared directory, or what `load_rows` returns for other data. Raise Problem if a directory
    was made for another script, tokenizer or template, or with other flags."""
    name = args.dataset[0]
    notes = read_notes(args)
    if not notes and load_rows is None:
        raise Problem("Without prepare/, pass one --dataset, a directory of tools/prepare.py.")
    if not notes:
        return load_rows(args, tokenizer, evaluate_only)
    for key, value in made_with(args, tokenizer).items():
        old = notes["made_with"].get(key, value)
        if old != value:
            key = key.replace("_", "-")
            raise Problem(f"{name} was prepared with {key} {old}, not {value}. Pass the same, or "
                          "prepare it again.")  # fmt: skip
    parts = datasets.load_from_disk(Path(name).expanduser()).with_format("numpy")
    return None if evaluate_only else parts["train"], {name: parts["validation"]}
