"""Tokens that tools/prepare.py wrote. Any rank may call these functions."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow.compute as compute
from transformers import PreTrainedTokenizerBase as Tokenizer

from core.ranks import Problem
from core.weights import tokenizer_digest

NOTES = "prepared.json"  # a file in a prepared directory: what it was made with


def read_notes(name: str) -> dict:
    """Return what a prepared directory was made with; {} for other data sets."""
    path = Path(name).expanduser() / NOTES
    return json.loads(path.read_text()) if path.is_file() else {}


def load(args: Any, tokenizer: Tokenizer, limits: dict, evaluate_only: bool) -> tuple:
    """Return the training set, None with `evaluate_only`, and the validation set by name, of the
    prepared directory --dataset. `limits` are a flag and its value for the tokens in each column.
    Raise Problem if they are not for this script, tokenizer, chat template and limits."""
    name = args.dataset[0]
    notes = read_notes(name)
    if not notes or len(args.dataset + args.val_dataset) > 1:
        raise Problem("Without prepare/, pass one --dataset, a directory of tools/prepare.py.")
    advice = "Prepare it again with this run's flags."
    if notes["data"] != type(args).__module__:
        raise Problem(f"{name} was prepared for {notes['script']}. {advice}")
    if notes["tokenizer"] != tokenizer_digest(tokenizer):
        raise Problem(f"{name} was prepared with another tokenizer or chat template. {advice}")
    parts = datasets.load_from_disk(Path(name).expanduser()).with_format("numpy")
    size = getattr(tokenizer, "embedding_size", len(tokenizer))
    for samples in parts.values():
        for column, (flag, limit) in limits.items():
            ids = samples.data[column]
            longest = compute.max(compute.list_value_length(ids)).as_py()
            largest = compute.max(compute.list_flatten(ids)).as_py()
            if longest > limit:
                raise Problem(f"{name} has {longest} tokens, but {flag} allows {limit}. {advice}")
            if largest >= size:
                raise Problem(f"The embedding has {size:,} rows, and none for token {largest}.")
    return None if evaluate_only else parts["train"], {name: parts["validation"]}
