"""Text for a causal language model, from rows to blocks of tokens.

`load` tokenizes the rows, joins them and cuts them into blocks; `collate` pads a batch.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import IO, Annotated, Any, Literal

import torch
import tyro
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase as Tokenizer

from core import reading
from core.args import Names, Range, Size
from core.ranks import Batch, Problem, print0

FEATURES = Features({"input_ids": List(Value("int32"))})
WIKITEXT = "Salesforce/wikitext"
USUAL_COLUMNS = [("text",), ("content",), ("document",), ("article",)]
CONTINUES = "text continues"  # in the next row: a key of pieces of text files
ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|im_end|>")  # EOS of several models
PIECE = 1 << 14  # characters of a text file that make a row
# The start of a text that ends after a word, or after a line break between two lines. A text
# without these is cut anywhere.
START = re.compile(r"(?s).*([^\W\d_](?=\s+\S)|\S\n(?=\S))|.{1000000}")


@dataclass
class Data:
    """NAME is a text, CSV, JSON, JSONL or Parquet file, a directory of *.txt or of save_to_disk, or
    a hub id; NAME:train[:1000] takes a split or a part."""

    dataset: Names = (WIKITEXT,)
    """data to train on, joined"""
    val_dataset: Names = ()
    """data to validate on; none: validation splits, or the last 5% of each --dataset's blocks"""
    dataset_config: str | None = None
    """configuration of hub data sets; none: for WikiText, wikitext-2-raw-v1"""
    text_column: str = "text"
    """column with the text"""
    block_size: Annotated[int, Range(2), tyro.conf.arg(metavar="N")] = 1024
    """tokens in a sample"""
    bad_rows: Literal["fail", "skip"] = "fail"
    """skip: drop unusable rows"""
    num_train_samples: Size = 0
    """blocks per training set; 0: all"""
    num_val_samples: Size = 0
    """blocks per validation set; 0: all"""


def load(
    args: Data, tokenizer: Tokenizer, evaluate_only: bool = False
) -> tuple[Dataset | None, reading.Parts]:
    """Return the training set, None with `evaluate_only`, and the validation sets by name. Raise
    Problem if data or flags cannot be used."""
    load_parts = partial(load_blocks, tokenizer=tokenizer, args=args)
    return reading.load_sets(args, load_parts, hold_out, draw, evaluate_only)


def draw(name: str, split: str, rows: Dataset, limit: int) -> Dataset:
    """Return `limit` random blocks (0: all)."""
    return reading.sample(rows, limit)


def load_blocks(spec: str, tokenizer: Tokenizer, args: Data) -> reading.Parts:
    """Return the blocks of one --dataset argument by split: train, and maybe validation."""
    default = "wikitext-2-raw-v1" if spec.startswith(WIKITEXT) else None
    parts = reading.read(spec, args.dataset_config or default, text_pieces)
    return {key: encode(spec, rows, tokenizer, args) for key, rows in parts.items()}


def hold_out(name: str, rows: Dataset) -> reading.Parts:
    """Split blocks into `train` and `validation`, the last 5%. Raise Problem if too few."""
    count = len(rows)
    if count < 2:
        raise Problem(f"{name} has {count} blocks. Pass --val-dataset, or a smaller --block-size.")
    first = count - max(1, count // 20)
    return {"train": rows.take(first), "validation": rows.skip(first)}


def encode(name: str, rows: Dataset, tokenizer: Tokenizer, args: Data) -> Dataset:
    """Return token blocks, cut from joined rows of text; rows of `input_ids` are blocks already."""
    size, column, eos = args.block_size, args.text_column, tokenizer.eos_token
    columns = reading.first_row(name, rows)
    if {column, "input_ids"}.isdisjoint(columns):
        # With several data sets, the flag is for those that have the column.
        is_default = column == Data.text_column or len(args.dataset + args.val_dataset) > 1
        usual = is_default and reading.usual_columns(columns, USUAL_COLUMNS)
        if not usual:
            raise reading.no_columns(name, [column], columns, "Pass --text-column.")
        (column,) = usual

    def from_tokens(row: dict) -> list[dict]:
        ids = reading.token_ids(row, "input_ids", "--block-size", size + 1, tokenizer)
        return [{"input_ids": ids}]

    def from_text(row: dict) -> list[dict]:
        text = row.get(column)
        if not isinstance(text, str):
            raise ValueError(f"{column} is {text!r}, not text")
        parts = [text] if text else []
        if CONTINUES in row:  # in a text file, the text of EOS separates documents
            parts = text.split(eos)
        options = {"add_special_tokens": False, "split_special_tokens": True}  # <unk> is plain text
        documents = [tokenizer(part, verbose=False, **options)["input_ids"] for part in parts]
        for ids in documents:
            ids.append(tokenizer.eos_token_id)
        is_line = "wikitext" in name.lower() and text.endswith(" \n")  # of an article
        if is_line or row.get(CONTINUES):
            documents[-1].pop()
        return [{"input_ids": ids} for ids in documents]

    key = args.bad_rows, size, column, reading.tokenizer_digest(tokenizer)
    if column not in columns:
        return reading.map_rows(name, rows, columns, from_tokens, FEATURES, *key)
    reading.print_columns(name, [column], [x for x in columns if x != CONTINUES])
    first = rows.select(range(min(len(rows), 1000)))
    some = str([reading.parse(row).get(column) for row in first])
    special = [str(x) for x in tokenizer.added_tokens_decoder.values() if x.special]
    special += [x for x in ENDS if x not in special]
    spelled = [x for x in special if x in some and (x != eos or CONTINUES not in columns)]
    if spelled:
        print0(f"{name}: the texts spell {' and '.join(spelled)}, which stay plain text")
    documents = reading.map_rows(name, rows, [column], from_text, FEATURES, *key)
    if all(len(ids) < 2 for ids in documents["input_ids"]):  # EOS at most
        raise Problem(f"Data set {name} has no text.")
    reading.print_unknown(name, documents, tokenizer)
    if CONTINUES in columns and len(documents) > len(rows):
        print0(f"{name}: {len(documents) - len(rows):,} times, {eos} ends a document")
    added = tokenizer("", verbose=False)["input_ids"]
    bos = [x for x in added if x == tokenizer.bos_token_id != tokenizer.eos_token_id]
    key = reading.cache_key(blocks, documents._fingerprint, size, bos)
    generate = partial(blocks, documents, size, tokenizer.eos_token_id, bos)
    return Dataset.from_generator(generate, FEATURES, fingerprint=key)


def text_pieces(file: IO[str]) -> Iterator[dict[str, Any]]:
    """Yield a text file in pieces that have the same tokens as in the whole text: those of
    byte-level BPE span neither a letter and the space after it, nor a single line break and the
    next word. The line breaks at the end are left out."""
    pending = ""
    while block := file.read(PIECE):
        if "\0" in block:
            raise ValueError("it is not text, because it contains a zero byte")
        pending += block
        if start := START.match(pending):
            yield {"text": start.group(), CONTINUES: True}
            pending = pending[start.end() :]
    yield {"text": pending.rstrip("\r\n"), CONTINUES: False}


def blocks(rows: Dataset, size: int, eos: int, bos: list[int]) -> Iterator[dict[str, list[int]]]:
    """Join the documents and yield blocks of `size` + 1 tokens; the last one may be shorter. Each
    starts with the last token of the one before, so every token but the first is a target once.
    `bos` precedes each document: some models cannot predict without it."""
    pending = []
    is_start = True  # of a document
    for row in rows:
        ids = row["input_ids"]
        if is_start and ids in ([], [eos]):
            continue
        pending += [*bos, *ids] if is_start else ids
        is_start = ids[-1:] == [eos]
        last = (len(pending) - 1) // size * size
        for start in range(0, last, size):
            yield {"input_ids": pending[start : start + size + 1]}
        del pending[: max(0, last)]
    if len(pending) > 1:
        yield {"input_ids": pending}


def collate(examples: list[dict[str, Any]]) -> Batch:
    """Return int64 `input_ids` and `labels` (the next tokens) [batch, length]. Padding is 0, in
    labels -100. The ints `targets` and `tokens` both count the labels that are not -100.

    If there are no examples, as on a rank that has none left, the batch is one row without targets.
    """
    rows = [example["input_ids"] for example in examples] or [[0]]
    width = max(8, *(len(row) - 1 for row in rows))
    whole = torch.full((len(rows), width + 1), -100)
    for target, row in zip(whole, rows, strict=True):
        target[: len(row)] = torch.as_tensor(row)
    labels = whole[:, 1:]
    count = sum(len(row) - 1 for row in rows)
    return {
        "input_ids": whole[:, :-1].masked_fill(labels == -100, 0),
        "labels": labels,
        "targets": count,
        "tokens": count,
    }
