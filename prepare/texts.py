"""Texts for a causal language model: rows to blocks of tokens. Any rank may call these."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase as Tokenizer

from core.ranks import Problem
from prepare import columns, losses, read, sets, tables, tokens
from prepare.columns import Form
from prepare.sets import Parts
from prepare.tables import CONTINUES

FEATURES = {"input_ids": List(Value("int32"))}
FLAG = "--text-column {}"
FORMS = columns.forms_of(FLAG, "text") + columns.forms_of(FLAG, "input_ids", "labels")


def load_blocks(spec: str, tokenizer: Tokenizer, args: Any) -> Parts:
    """Return the blocks of one --dataset argument by split: token blocks, cut from joined rows of
    text; rows of `input_ids` are blocks already."""
    config = args.dataset_config
    if config is None and spec.startswith("Salesforce/wikitext"):
        config = "wikitext-2-raw-v1"
    parts = {}
    for part, table in read.read(spec, config, has_texts=True).items():
        form = columns.find_form(spec, table.columns, FORMS, args)
        are_blocks = form.columns == ("input_ids",)
        function = partial(read_block, form=form, tokenizer=tokenizer, size=args.block_size)
        if not are_blocks:
            are_lines = "wikitext" in spec.lower()
            function = partial(encode_text, form=form, tokenizer=tokenizer, are_lines=are_lines)
        rows = tables.map_rows(spec, table, function, FEATURES, args)
        parts[part] = rows if are_blocks else cut(spec, rows, args.block_size, tokenizer)
    return parts


def read_block(row: dict, form: Form, tokenizer: Tokenizer, size: int) -> list:
    """Return the block that a tokenized row is. Raise ValueError if it has other labels."""
    ids = tokens.check_tokens(row, "input_ids", "--block-size", size + 1, tokenizer)
    if row.get("labels") not in (None, ids):
        raise ValueError("labels are not input_ids, but each token is trained on. Remove others")
    return [{"input_ids": ids}]


def encode_text(row: dict, form: Form, tokenizer: Tokenizer, are_lines: bool) -> list:
    """Return the documents of a row, which end in EOS unless the next row continues the last one.
    With `are_lines`, a text that ends in a line break is a line of an article."""
    text = row.get(*form.columns)
    if not isinstance(text, str):
        raise ValueError(f"{form.columns[0]} is {text!r}, not text")
    texts = [text] if text else []
    continues = row.pop(CONTINUES, None)
    if continues is not None:  # in a text file, the text of EOS separates documents
        texts = text.split(tokenizer.eos_token)
    documents = []
    for part in texts:
        # The text of a special token, such as <unk>, is plain text.
        encoded = tokenizer(
            part, add_special_tokens=False, split_special_tokens=True, verbose=False
        )
        ids = encoded["input_ids"]
        documents.append(
            {
                "input_ids": [*ids, tokenizer.eos_token_id],
                "change": losses.find_change(part, ids, tokenizer),
                "mark": losses.find_mark(part, tokenizer),
            }
        )
    is_line = are_lines and text.endswith(" \n")
    if is_line or continues:
        documents[-1]["input_ids"].pop()
    return documents


def cut(name: str, documents: Dataset, size: int, tokenizer: Tokenizer) -> Dataset:
    """Return the blocks of documents, with BOS if the tokenizer adds it."""
    added = tokenizer("", verbose=False)["input_ids"]
    eos = tokenizer.eos_token_id
    bos = [token for token in added if token == tokenizer.bos_token_id != eos]
    if all(len(ids) < 2 for ids in documents["input_ids"]):  # EOS at most
        raise Problem(f"Data set {name} has no text.")
    key = tables.cache_key(blocks, documents._fingerprint, size, bos)
    generate = partial(blocks, documents, size, eos, bos)
    result = Dataset.from_generator(generate, Features(FEATURES), fingerprint=key)
    result.info.description = documents.info.description
    return result


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


load = partial(sets.load_sets, load_parts=load_blocks, draw=sets.sample)
