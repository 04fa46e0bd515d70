"""Text for a causal language model, from rows to blocks of tokens.

`load` tokenizes the rows, joins them and cuts them into blocks; `collate` pads a batch.
Copy this file along with gpt2_fsdp.py and the folder runtime/.
"""

import functools
import random
import zlib
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase as Tokenizer

from runtime import readers, tokens
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


def encode_texts(rows: list[dict], column: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the tokens of the texts in a `column`, without special tokens. Rows of a text file
    have the end of the previous piece too, whose tokens are left out."""
    texts, starts = (
        [row.get(column) for row in rows],
        [row.get(readers.BEFORE) or "" for row in rows],
    )
    for text in texts:
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{column} is {text!r}, not text")
    options = {"add_special_tokens": False, "split_special_tokens": True}  # <unk> is plain text
    options |= {"return_attention_mask": False, "verbose": False}
    whole = [start + (text or "") for start, text in zip(starts, texts, strict=True)]
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


def read_parts(name: str, args: Namespace) -> dict[str, Dataset]:
    """Return the rows of a data set by split: train, and maybe validation."""
    if name in BUILT_IN:
        rows = readers.docstring_rows()
        is_held_out = np.array([zlib.crc32(module.encode()) % 8 == 0 for module in rows["module"]])
        parts = {"train": ~is_held_out, "validation": is_held_out}
        return {split: rows.select(np.flatnonzero(mask)) for split, mask in parts.items()}
    config = args.dataset_config or ("wikitext-2-raw-v1" if name == WIKITEXT else None)
    return readers.read(name, config)


def load_blocks(spec: str, tokenizer: Tokenizer, args: Namespace) -> dict[str, Dataset]:
    """Return the blocks of one --dataset argument by split; raise ValueError if there are none."""
    name, split = readers.split_spec(spec, BUILT_IN)
    if Path(name).expanduser().is_dir() and any(Path(name).expanduser().glob("*.txt")):
        name = f"{name}/*.txt"
    parts = readers.pick(name, read_parts(name, args), split)
    return {key: encode(name, rows, tokenizer, args) for key, rows in parts.items()}


def encode(name: str, rows: Dataset, tokenizer: Tokenizer, args: Namespace) -> Dataset:
    """Return token blocks, cut from joined rows of text; rows of `input_ids` are blocks already."""
    size = args.block_size
    columns = readers.column_names(name, rows)
    column = "text" if columns == ["text"] else args.text_column
    texts = readers.text_columns(rows)
    rows = readers.select(rows, [column, "input_ids"])
    joins_rows = "wikitext" in name.lower()  # its rows are lines of articles
    cache_key = size, column, readers.tokenizer_fingerprint(tokenizer)

    def from_texts(batch: list[dict]) -> list[list[dict]]:
        samples = []
        for row, ids in zip(batch, encode_texts(batch, column, tokenizer), strict=True):
            text = row.get(column) or ""
            is_open = not row.get(readers.IS_LAST, True) or (joins_rows and text.endswith("\n"))
            ids = ids if is_open else [*ids, tokenizer.eos_token_id]
            samples.append([{"input_ids": ids}] if text else [])
        return samples

    def from_tokens(batch: list[dict]) -> list[list[dict]]:
        limit = "--block-size", size + 1
        ids = [tokens.check_ids(row.get("input_ids"), *limit, tokenizer) for row in batch]
        return [[{"input_ids": x}] for x in ids]

    if column in columns:
        documents = readers.map_rows(name, rows, from_texts, FEATURES, args, *cache_key)
        key = readers.fingerprint(blocks, documents._fingerprint, size)
        generate = functools.partial(blocks, documents, size)
        return Dataset.from_generator(generate, Features(FEATURES), fingerprint=key)
    if "input_ids" in columns:
        tokens.check_origin(name, args, tokenizer)
        return readers.map_rows(name, rows, from_tokens, FEATURES, args, *cache_key)
    advice = f"Pass --text-column {texts[0]}." if texts else "Pass a file with text."
    raise ValueError(f"{readers.lacks(name, [column], columns)} {advice}")


def hold_out(spec: str, rows: Dataset) -> dict[str, Dataset]:
    """Split blocks into `train` and `validation`, the last 5%. Raise ValueError if too few."""
    first = len(rows) - max(1, len(rows) // 20)
    if first < 1:
        raise ValueError(f"--dataset {spec} gives {len(rows)} blocks, so none can be held out for "
                         "validation. Pass --val-dataset, or a smaller --block-size.")  # fmt: skip
    return {"train": rows.select(range(first)), "validation": rows.select(range(first, len(rows)))}


def draw_blocks(spec: str, split: str, rows: Dataset, args: Namespace) -> Dataset:
    """Return randomly drawn blocks, the same in every run: --num-train-samples or
    --num-val-samples of them."""
    limit = args.num_train_samples if split == "train" else args.num_val_samples
    number = min(limit or len(rows), len(rows))
    say(f"{spec}, {split}: {number:,} of {len(rows):,} blocks used")
    return rows.select(sorted(random.Random(0).sample(range(len(rows)), number)))


def load(args: Namespace, tokenizer: Tokenizer) -> tuple[Dataset | None, dict[str, Dataset]]:
    """Return the training set (None with --evaluate-only) and the validation sets by name.

    Raise ValueError if data or flags cannot be used.
    """
    train_sets = []
    val_sets = {}
    for spec in [] if args.evaluate_only and args.val_dataset else args.dataset or [WIKITEXT]:
        parts = load_blocks(spec, tokenizer, args)
        if not args.val_dataset:
            if "validation" not in parts:
                parts = hold_out(spec, parts["train"])
            val_sets[spec] = parts["validation"]
        train_sets.append(draw_blocks(spec, "train", parts["train"], args))
    for spec in args.val_dataset:
        parts = load_blocks(spec, tokenizer, args)
        val_sets[spec] = parts.get("validation", parts["train"])
    for spec, rows in val_sets.items():
        val_sets[spec] = readers.join([draw_blocks(spec, "validation", rows, args)])
    if args.evaluate_only:
        return None, val_sets
    return readers.join(train_sets), val_sets


def probe_batch(args: Namespace) -> list[dict[str, list[int]]]:
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
    lengths = [len(row) - 1 for row in rows]
    shape = len(rows), max(8, *lengths)
    input_ids = np.zeros(shape, dtype=np.int64)
    labels = np.full(shape, -100)
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        input_ids[number, :length] = row[:-1]
        labels[number, :length] = row[1:]
    tensors = {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}
    return tensors | {"targets": sum(lengths), "tokens": sum(lengths)}
