"""Data sets of tokens: written by --prepare-only, or made by other tools as rows of `input_ids`."""

import hashlib
import json
import shutil
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import DatasetDict
from transformers import PreTrainedTokenizerBase

from . import readers

PREPARED = "prepared"  # the directory in OUTPUT_DIR that --prepare-only writes
FILE = "prepared.json"  # in it: what made the tokens
FLAGS = ("source_length", "target_length", "source_prefix", "block_size", "max_seq_length",
         "train_on_prompt")  # fmt: skip


def describe(args: Namespace, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return what decides the tokens of a row: version, tokenizer, chat template and flags."""
    found = {"version": 1, "tokenizer": readers.tokenizer_fingerprint(tokenizer)}
    if hasattr(args, "chat_template"):
        template = str(tokenizer.chat_template).encode()
        found["--chat-template"] = hashlib.sha256(template).hexdigest()[:32]
    flags = {f"--{x.replace('_', '-')}": getattr(args, x) for x in FLAGS if hasattr(args, x)}
    return found | flags


def save(
    path: Path, train: Any, val: Any, tokenizer: PreTrainedTokenizerBase, args: Namespace
) -> None:
    """Write the splits train and validation as the directory `path`, complete or not at all."""
    parts = {"train": train, "validation": val}
    parts = {name: getattr(rows, "dataset", rows) for name, rows in parts.items()}
    if path.exists():
        raise ValueError(f"{path} exists. Delete it, or pass another --output-dir.")
    temporary = path.with_name(f"tmp-{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    DatasetDict(parts).save_to_disk(temporary)
    (temporary / FILE).write_text(json.dumps(describe(args, tokenizer), indent=2))
    temporary.rename(path)


def check_origin(name: str, args: Namespace, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if --prepare-only made data set `name` with another tokenizer or flags."""
    file = Path(name).expanduser() / FILE
    if not file.is_file():
        return
    there, here = json.loads(file.read_text()), describe(args, tokenizer)
    keys = [key for key in here | there if here.get(key) != there.get(key)]
    if keys:
        words = ", ".join(f"{key} ({there.get(key)} there, {here.get(key)} here)" for key in keys)
        raise ValueError(f"--dataset {name} was prepared with another {words}. Pass the same "
                         "model and flags, or prepare it again.")  # fmt: skip


def check_ids(ids: Any, flag: str, limit: int, tokenizer: PreTrainedTokenizerBase) -> Sequence[int]:
    """Return a list of 1 to `limit` token ids of a tokenizer; ValueError if it is anything else."""
    if not ids or not isinstance(ids, list) or not all(isinstance(x, int) for x in ids):
        raise ValueError("tokens are not a list of integers, or empty")
    if len(ids) > limit:
        raise ValueError(f"{len(ids):,} tokens, but {flag} allows {limit:,}")
    if min(ids) < 0 or max(ids) >= len(tokenizer):
        wrong = next(x for x in ids if not 0 <= x < len(tokenizer))
        raise ValueError(f"token {wrong} is not one of the tokenizer's {len(tokenizer):,}")
    return ids
