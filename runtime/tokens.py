"""Data sets of tokens, written by --prepare-only or by other tools as rows of `input_ids`."""

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import DatasetDict
from transformers import PreTrainedTokenizerBase

from . import ranks, readers
from .options import as_flag

PREPARED = "prepared"  # the directory in OUTPUT_DIR that --prepare-only writes
FILE = "prepared.json"  # a file in it with the origin of the tokens
FLAGS = "source_length target_length source_prefix block_size max_seq_length train_on_prompt"


def describe(args: Namespace, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the values that determine a row's tokens: version, tokenizer, template and flags."""
    origin = {"version": 1, "tokenizer": readers.tokenizer_fingerprint(tokenizer)}
    if hasattr(args, "chat_template"):
        origin["--chat-template"] = readers.digest(tokenizer.chat_template)
    return origin | {as_flag(x): vars(args)[x] for x in FLAGS.split() if x in vars(args)}


def write_prepared(
    args: Namespace, train_set: Any, val_sets: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write the samples to OUTPUT_DIR/prepared; all ranks.

    Raise ValueError if there are several validation sets or the directory exists.
    """
    if len(val_sets) > 1:
        raise ValueError(
            f"--prepare-only writes one validation set, not {len(val_sets)}. Pass one --dataset or "
            "one --val-dataset."
        )
    path = Path(args.output_dir) / PREPARED
    sets = {"train": train_set, "validation": next(iter(val_sets.values()))}
    ranks.on_rank_zero(save, path, sets, describe(args, tokenizer))
    ranks.say(f"Pass --dataset {path} to train on these tokens.")


def save(path: Path, sets: dict[str, Any], origin: dict[str, Any]) -> None:
    """Write the origin of the samples, then the samples by split; rank 0 only. `load_from_disk`
    rejects a directory whose last file is missing."""
    if path.exists():
        raise ValueError(f"{path} exists. Delete it, or pass another --output-dir.")
    path.mkdir()
    (path / FILE).write_text(json.dumps(origin, indent=2))
    rows = {split: getattr(samples, "dataset", samples) for split, samples in sets.items()}
    DatasetDict(rows).save_to_disk(path)


def check_origin(name: str, args: Namespace, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if data set `name` was prepared with another tokenizer or flags."""
    file = Path(name).expanduser() / FILE
    expected = describe(args, tokenizer)
    origin = json.loads(file.read_text()) if file.is_file() else expected
    for key, value in expected.items():
        if origin.get(key) != value:
            raise ValueError(f"--dataset {name} was prepared with {key} {origin.get(key)}, not "
                             f"{value}. Pass the same, or prepare it again.")  # fmt: skip


def check_ids(ids: Any, flag: str, limit: int, tokenizer: PreTrainedTokenizerBase) -> Sequence[int]:
    """Return `ids`; raise ValueError unless they are 1 to `limit` token ids of the tokenizer."""
    if not ids or not isinstance(ids, list) or not all(isinstance(x, int) for x in ids):
        raise ValueError("tokens are empty or not a list of integers")
    if len(ids) > limit:
        raise ValueError(f"{len(ids):,} tokens, but {flag} allows {limit:,}")
    for token in [x for x in (min(ids), max(ids)) if not 0 <= x < len(tokenizer)]:
        raise ValueError(f"token {token} is not one of the tokenizer's {len(tokenizer):,}")
    return ids
