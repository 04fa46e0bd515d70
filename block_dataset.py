"""Text for a causal language model, from rows to blocks of tokens.

`load` tokenizes the rows, joins them and cuts them into blocks; `collate` pads a batch.
Copy this file along with gpt2_fsdp.py and the folder runtime/.
"""

import functools
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase as Tokenizer

from runtime import readers
from runtime.batches import pad
from runtime.options import BadRows, flag
from runtime.ranks import say

FEATURES = {"input_ids": List(Value("int32"))}
BUILT_IN = ("docstrings",)
WIKITEXT = "Salesforce/wikitext"


@dataclass
class Options:
    """data"""

    dataset: list[str] = flag([], "docstrings (built in), text, JSONL or Parquet files, "
        "directories of *.txt or hub ids; NAME:train[:1000] takes a split or a part (default: "
        f"{WIKITEXT})", metavar="DATA")  # fmt: skip
    val_dataset: list[str] = flag([], "validate on these (default: each --dataset's split "
        "validation, or the last 5% of its blocks)", metavar="DATA")  # fmt: skip
    dataset_config: str | None = flag(
        None, f"configuration of a hub data set (default: wikitext-2-raw-v1 of {WIKITEXT})"
    )
    text_column: str = flag("text", "column of a hub data set, JSONL or Parquet file")
    block_size: int = flag(1024, "tokens in a sample", low=2)
    bad_rows: BadRows = flag("fail", "skip: drop unusable rows")
    num_train_samples: int = flag(0, "blocks per training set (0: all)", low=0)
    num_val_samples: int = flag(0, "blocks per validation set (0: all)", low=0)


def load(args: Namespace, tokenizer: Tokenizer) -> tuple[Dataset | None, readers.Parts]:
    """Return the training set (None with --evaluate-only) and the validation sets by name.

    Raise ValueError if data or flags cannot be used.
    """

    load_parts = functools.partial(load_blocks, tokenizer=tokenizer, args=args)
    return readers.load_sets(args, WIKITEXT, load_parts, hold_out, draw)


def draw(spec: str, split: str, rows: Dataset, limit: int) -> Dataset:
    """Return `limit` random blocks (0: all)."""
    blocks = readers.sample(rows, limit)
    say(f"{spec}, {split}: {len(blocks):,} of {len(rows):,} blocks used")
    return blocks


def load_blocks(spec: str, tokenizer: Tokenizer, args: Namespace) -> readers.Parts:
    """Return the blocks of one --dataset argument by split: train, and maybe validation."""
    name, split = readers.split_spec(spec, BUILT_IN)
    if name in BUILT_IN:
        rows = readers.docstring_rows()
        is_held_out = [zlib.crc32(module.encode()) % 8 == 0 for module in rows["module"]]
        parts = readers.split_by(np.array(is_held_out), rows)
    else:
        default = "wikitext-2-raw-v1" if name == WIKITEXT else None
        parts = readers.read(name, args.dataset_config or default)
    parts = readers.pick(name, parts, split)
    return {key: encode(name, rows, tokenizer, args) for key, rows in parts.items()}


def hold_out(spec: str, rows: Dataset) -> readers.Parts:
    """Split blocks into `train` and `validation`, the last 5%. Raise ValueError if too few."""
    if len(rows) < 2:
        raise ValueError(f"--dataset {spec} gives {len(rows)} blocks, so none can be held out for "
                         "validation. Pass --val-dataset, or a smaller --block-size.")  # fmt: skip
    first = len(rows) - max(1, len(rows) // 20)
    return readers.split_by(np.arange(len(rows)) >= first, rows)


def encode(name: str, rows: Dataset, tokenizer: Tokenizer, args: Namespace) -> Dataset:
    """Return token blocks, cut from joined rows of text; rows of `input_ids` are blocks already."""
    size = args.block_size
    columns = readers.columns_of(name, rows)
    column = "text" if [*columns] == ["text"] else args.text_column
    rows = readers.select(rows, [column, "input_ids"])
    joins_rows = "wikitext" in name.lower()  # its rows are lines of articles

    def from_texts(batch: list[dict]) -> list[list[dict]]:
        samples = []
        for row, ids in zip(batch, encode_texts(batch, column, tokenizer), strict=True):
            text = row[column]
            is_open = row.get(readers.CONTINUES) or (joins_rows and text.endswith("\n"))
            ids = ids if is_open else [*ids, tokenizer.eos_token_id]
            samples.append([{"input_ids": ids}] if text else [])
        return samples

    def from_tokens(batch: list[dict]) -> list[list[dict]]:
        limit = "--block-size", size + 1
        ids = [readers.token_ids(row, "input_ids", *limit, tokenizer) for row in batch]
        return [[{"input_ids": x}] for x in ids]

    def map_rows(function: Callable) -> Dataset:
        key = size, column, readers.tokenizer_digest(tokenizer)
        return readers.map_rows(name, rows, function, FEATURES, args.bad_rows, *key)

    if column in columns:
        documents = map_rows(from_texts)
        key = readers.cache_key(blocks, documents._fingerprint, size)
        generate = functools.partial(blocks, documents, size)
        return Dataset.from_generator(generate, Features(FEATURES), fingerprint=key)
    if "input_ids" in columns:
        readers.compare_origin(name, readers.token_origin(args, tokenizer))
        return map_rows(from_tokens)
    likely = readers.guess_columns(columns)
    advice = f"Pass --text-column {likely[0]}." if likely else "Pass a file with text."
    raise ValueError(f"{readers.lacks(name, [column], columns)} {advice}")


def encode_texts(rows: list[dict], column: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the tokens of the texts in a `column`, without special tokens. Rows of a text file
    have the end of the previous piece too, whose tokens are left out."""
    texts = [row.get(column) for row in rows]
    starts = [row.get(readers.BEFORE) or "" for row in rows]
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"{column} is {text!r}, not text")
    options = {"add_special_tokens": False, "split_special_tokens": True}  # <unk> is plain text
    options |= {"return_attention_mask": False, "verbose": False}
    whole = [start + text for start, text in zip(starts, texts, strict=True)]
    ids = tokenizer([*whole, *starts], **options)["input_ids"]
    return [x[len(start) :] for x, start in zip(ids[: len(rows)], ids[len(rows) :], strict=True)]


def blocks(rows: Dataset, size: int) -> Iterator[dict[str, list[int]]]:
    """Join the documents and yield blocks of `size` + 1 tokens; the last one may be shorter. Each
    starts with the last token of the one before, so every token but the first is a target once."""
    pending: list[int] = []
    for row in rows:
        pending += row["input_ids"]
        last = (len(pending) - 1) // size * size
        for start in range(0, last, size):
            yield {"input_ids": pending[start : start + size + 1]}
        del pending[: max(0, last)]
    if len(pending) > 1:
        yield {"input_ids": pending}


def probe_batch() -> list[dict[str, list[int]]]:
    """Return two blocks that start alike, for checks.check_model. The second one is shorter."""
    return [
        {"input_ids": [*range(10, 43)]},
        {"input_ids": [*range(10, 26), *range(50, 55)]},
    ]


def collate(examples: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor | int]:
    """Return int64 `input_ids` and `labels` (the next tokens) [batch, length]. Padding is 0, in
    labels -100. The ints `targets` and `tokens` both count the labels that are not -100.

    If there are no examples, as on a rank that has none left, the batch is one row without targets.
    """
    rows = [example["input_ids"] for example in examples] or [[0]]
    count = sum(len(row) - 1 for row in rows)
    return {
        "input_ids": pad([row[:-1] for row in rows], 0, least=8),
        "labels": pad([row[1:] for row in rows], -100, least=8),
        "targets": count,
        "tokens": count,
    }
