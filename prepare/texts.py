"""Texts for a causal language model: rows to blocks of tokens. Any rank may call these."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase as Tokenizer

from core.ranks import Problem
from prepare import losses, read, sets, tables, tokens
from prepare.read import Parts
from prepare.tables import CONTINUES, Table

FEATURES = Features({"input_ids": List(Value("int32"))})
WIKITEXT = "Salesforce/wikitext"
USUAL_COLUMNS = [("text",), ("input_ids",), ("content",), ("document",), ("article",)]


def load(args: Any, tokenizer: Tokenizer, evaluate_only: bool) -> tuple:
    """Return the training set, None with `evaluate_only`, and the validation sets by name."""
    parts = partial(load_blocks, args=args, tokenizer=tokenizer)
    return sets.load_sets(args, parts, sets.sample, evaluate_only)


def load_blocks(spec: str, tokenizer: Tokenizer, args: Any) -> Parts:
    """Return the blocks of one --dataset argument by split: train, and maybe validation."""
    config = args.dataset_config
    if config is None and spec.startswith(WIKITEXT):
        config = "wikitext-2-raw-v1"
    parts = read.read(spec, config, has_texts=True)
    return {part: encode(spec, table, tokenizer, args) for part, table in parts.items()}


def encode(name: str, table: Table, tokenizer: Tokenizer, args: Any) -> Dataset:
    """Return token blocks, cut from joined rows of text; rows of `input_ids` are blocks already."""
    named = (args.text_column,)
    form = tables.find_form(name, table, named, USUAL_COLUMNS, ("--text-column",), args)
    (column,) = form.columns
    if CONTINUES not in table.columns:  # not of text files
        tables.print_columns(name, [column], table.columns)
    if column == "input_ids":
        function = partial(read_block, tokenizer=tokenizer, size=args.block_size)
        return tables.map_rows(name, table, table.columns, function, FEATURES, args.bad_rows)
    are_lines = "wikitext" in name.lower()
    function = partial(encode_text, column=column, tokenizer=tokenizer, are_lines=are_lines)
    features = FEATURES | losses.FEATURES
    documents = tables.map_rows(name, table, [column], function, features, args.bad_rows)
    losses.print_losses(name, documents)
    if all(len(ids) < 2 for ids in documents["input_ids"]):  # EOS at most
        raise Problem(f"Data set {name} has no text.")
    return cut(documents, args.block_size, tokenizer)


def read_block(row: dict, tokenizer: Tokenizer, size: int) -> list:
    """Return the block that a tokenized row is. Raise ValueError if it has other labels."""
    ids = tokens.check_tokens(row, "input_ids", "--block-size", size + 1, tokenizer)
    if row.get("labels") not in (None, ids):
        raise ValueError("labels are not input_ids, but each token is trained on. Remove others")
    return [{"input_ids": ids}]


def encode_text(row: dict, column: str, tokenizer: Tokenizer, are_lines: bool) -> list:
    """Return the documents of a row, which end in EOS unless the next row continues the last one.
    With `are_lines`, a text that ends in a line break is a line of an article."""
    text = row.get(column)
    if not isinstance(text, str):
        raise ValueError(f"{column} is {text!r}, not text")
    texts = [text] if text else []
    if CONTINUES in row:  # in a text file, the text of EOS separates documents
        texts = text.split(tokenizer.eos_token)
    documents = []
    for part in texts:
        # The text of a special token, such as <unk>, is plain text.
        encoded = tokenizer(
            part, add_special_tokens=False, split_special_tokens=True, verbose=False
        )
        ids = encoded["input_ids"]
        spelled = [word for word in tokenizer.all_special_tokens if word in part]
        document = {
            "input_ids": [*ids, tokenizer.eos_token_id],
            "change": losses.find_change(part, ids, tokenizer),
            "mark": losses.find_mark(part, tokenizer) or "".join(spelled[:1]),
        }
        documents.append(document)
    is_line = are_lines and text.endswith(" \n")
    if is_line or row.get(CONTINUES):
        documents[-1]["input_ids"].pop()
    return documents


def cut(documents: Dataset, size: int, tokenizer: Tokenizer) -> Dataset:
    """Return the blocks of documents, with BOS if the tokenizer adds it."""
    bos = []
    added = tokenizer("", verbose=False)["input_ids"]
    if tokenizer.bos_token_id in added and tokenizer.bos_token_id != tokenizer.eos_token_id:
        bos = [tokenizer.bos_token_id]
    key = tables.cache_key(blocks, documents._fingerprint, size, bos)
    generate = partial(blocks, documents, size, tokenizer.eos_token_id, bos)
    return Dataset.from_generator(generate, FEATURES, fingerprint=key)


def blocks(documents: Dataset, size: int, eos: int, bos: list) -> Iterator:
    """Join the documents and yield blocks of `size` + 1 tokens; the last one may be shorter. Each
    starts with the last token of the one before, so every token but the first is a target once.
    `bos` precedes each document: some models cannot predict without it."""
    pending = []
    is_start = True  # the next token starts a document
    for document in documents:
        ids = document["input_ids"]
        if is_start:
            if ids in ([], [eos]):
                continue
            pending += bos
        pending += ids
        is_start = ids[-1:] == [eos]
        stop = (len(pending) - 1) // size * size
        for start in range(0, stop, size):
            yield {"input_ids": pending[start : start + size + 1]}
        del pending[:stop]
    if len(pending) > 1:
        yield {"input_ids": pending}
