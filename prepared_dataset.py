"""Tokens that tools/prepare.py wrote. Any rank may call these functions."""

import contextlib
import json
import zlib
from pathlib import Path
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase as Tokenizer

from core.args import flags_of
from core.checkpoint import changes, crc_of
from core.ranks import Problem
from core.weights import tokenizer_digest

NOTES = "prepared.json"  # a file in a prepared directory: what it was made with, and CRCs
DAMAGED = "is damaged: prepare it again."
OTHER_FORM = (ValueError, KeyError, TypeError, AttributeError)  # text that is not JSON of a dict
# Flags that may differ: names of data, packing, and the template, which the tokenizer has.
FREE = (
    "--dataset",
    "--val-dataset",
    "--data-dir",
    "--chat-template",
    "--packing",
    "--group-by-length",
)


def read_notes(args: Any) -> dict:
    """Return what --dataset, a prepared directory, was made with; {} if it is other data. Raise
    Problem if it is damaged."""
    path = Path(args.dataset[0]).expanduser() / NOTES
    names = [*args.dataset, *getattr(args, "val_dataset", ())]
    if len(names) > 1 or not path.is_file():
        return {}
    with contextlib.suppress(*OTHER_FORM):
        notes = json.loads(path.read_text())
        if notes.pop("crc") == crc_of(notes):
            return notes
    raise Problem(f"{path} {DAMAGED}")


def made_with(args: Any, tokenizer: Tokenizer) -> dict[str, str]:
    """Return what decides the tokens, by name: the module of `args`, the tokenizer, the flags."""
    values = {
        "the data module": type(args).__module__,
        "the tokenizer and chat template": tokenizer_digest(tokenizer),
    }
    for flag, value in flags_of(args).items():
        if flag not in FREE:
            values[flag] = value
    return values


def load(args: Any, tokenizer: Tokenizer, evaluate_only: bool) -> tuple:
    """Return the training set, None with `evaluate_only`, and the validation sets by name of a
    prepared directory. Raise Problem if there is none, or if it is damaged, or was made for another
    script, tokenizer or template, or with other flags."""
    name = args.dataset[0]
    notes = read_notes(args)
    if not notes:
        raise Problem("Without prepare/, pass one --dataset, a directory of tools/prepare.py.")
    if differences := changes(made_with(args, tokenizer), notes["made_with"]):
        raise Problem(f"{name} was prepared otherwise: {differences[0]} Pass the same, or prepare "
                      "it again.")  # fmt: skip
    path = Path(name).expanduser()
    for file, crc in notes["files"].items():
        if zlib.crc32((path / file).read_bytes()) != crc:  # they have at most 500 MB
            raise Problem(f"{path / file} {DAMAGED}")
    rows = getattr(tokenizer, "embedding_size", len(tokenizer))
    if notes["highest_id"] >= rows:
        raise Problem(f"{name} has token {notes['highest_id']}, but the model has only {rows}.")
    parts = datasets.load_from_disk(path).with_format("numpy")
    return None if evaluate_only else parts["train"], {name: parts["validation"]}
