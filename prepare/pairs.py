"""Summarization pairs for a sequence-to-sequence model: rows to tokens. Any rank may call these.

`load_rows` cleans and splits the rows (`clean_pair`, `load_wikihow`), `draw` tokenizes those that
are drawn:

row     {"article": "Rye grows in ...", "highlights": "Rye."}
PAIR    {"text": "Rye grows in ...", "summary": "Rye.", "key": a hash of the text}
TOKENS  {"input_ids": [19, 7, 8], "labels": [19, 8], "length": 3}

For your own data, return its rows from `load_rows` under a name like wikihow.
"""

import random
import re
from functools import partial
from typing import Any

import numpy as np
from datasets import Dataset, List, Value
from transformers import PreTrainedTokenizerBase as Tokenizer

from core.ranks import Problem, print0
from prepare import columns, losses, read, sets, tables, tokens
from prepare.columns import Form
from prepare.rows import print_cut, stable_hash
from prepare.sets import Parts

WIKIHOW = {"all": "wikihowAll.csv", "sep": "wikihowSep.csv"}
# Validation is last, so that a title in two lists is not trained on.
TITLE_LISTS = {"train": "all_train.txt", "test": "all_test.txt", "validation": "all_val.txt"}
TEXT = Value("string")
KEY = {"key": Value("int64")}  # rows with equal ones are in one split
PAIR = {"text": TEXT, "summary": TEXT} | KEY
IDS = List(Value("int32"))
TOKENS = {"input_ids": IDS, "labels": IDS, "length": Value("int32")}
# Columns of texts and summaries, or of their tokens.
FORMS = columns.forms_of(
    "--source-column {} --target-column {}",
    "text headline, document summary, article highlights, article summary, dialogue summary, "
    "text summary, source target, input_ids labels",
)


def load_rows(spec: str, tokenizer: Tokenizer, args: Any) -> Parts:
    """Return the rows of one --dataset argument by split, as PAIR or as TOKENS and KEY."""
    name, _, split = spec.partition(":")
    if name == "wikihow":
        return read.pick(name, load_wikihow(args), split)
    parts = {}
    for part, table in read.read(spec, args.dataset_config).items():
        form = columns.find_form(spec, table.columns, FORMS, args)
        function = partial(clean_pair, form=form)
        features = PAIR
        if form.columns == ("input_ids", "labels"):
            limits = (args.source_length, args.target_length)
            function = partial(read_tokens, form=form, limits=limits, tokenizer=tokenizer)
            features = TOKENS | KEY
        parts[part] = tables.map_rows(spec, table, function, features, args)
    return parts


def load_wikihow(args: Any) -> Parts:
    """Return WikiHow's rows as PAIR: those of its lists of titles by split, or all as `train`. Rows
    that WikiHow's authors would drop are left out. Raise Problem if the file is missing."""
    directory = args.data_dir.expanduser()
    path = directory / WIKIHOW[args.wikihow_part]
    if not path.is_file():
        raise Problem(f"{path} is missing: see https://github.com/mahnazkoupaee/WikiHow-Dataset")
    titles = {}
    if any(directory.glob("all_t*.txt")):
        for split, name in TITLE_LISTS.items():
            text = (directory / name).read_text(encoding="utf-8-sig", errors="replace")
            keys = map(title_key, text.strip().split("\n"))
            titles |= dict.fromkeys(keys, split)
    table = read.read(str(path))["train"]
    function = partial(clean_article, titles=titles)
    rows = tables.map_rows("wikihow", table, function, PAIR | {"split": TEXT}, args)
    splits = np.array(rows["split"][:])
    return {split: rows.select(np.flatnonzero(splits == split)) for split in {*splits}}


def title_key(title: str) -> str:
    """Return a title's letters and digits, which WikiHow's lists have, without spaces."""
    return "".join(filter(str.isalnum, title))


def clean_article(row: dict, titles: dict) -> list:
    """Return the sample of a row of WikiHow, with its split. Return none if the summary is empty or
    nearly as long as the text, or if there are lists of titles without the title."""
    text = row["text"].strip()
    summary = row["headline"].strip()
    title = title_key(row["title"])
    split = titles.get(title) if titles else "train"
    if not summary or len(summary) >= 0.75 * len(text) or split is None:
        return []
    text = re.sub(r"\.+[\r\n]+,", ".\n", text)
    summary = summary.replace(".,", ".")
    return [
        {
            "text": " ".join(text.split()),
            "summary": " ".join(summary.split()),
            "key": stable_hash(title or text),
            "split": split,
        }
    ]


def clean_pair(row: dict, form: Form) -> list:
    """Return the text and the summary of a row. Raise ValueError if they are not text, or empty."""
    for column in form.columns:
        text = row.get(column)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{column} is {text!r}, not text")
        text.encode()  # raises ValueError for half of a surrogate pair
    text, summary = map(row.get, form.columns)
    return [{"text": text, "summary": summary, "key": stable_hash(text)}]


def read_tokens(row: dict, form: Form, limits: tuple, tokenizer: Tokenizer) -> list:
    """Return the sample that a tokenized row is, with the columns of TOKENS and KEY."""
    ids = tokens.check_tokens(row, "input_ids", "--source-length", limits[0], tokenizer)
    labels = tokens.check_tokens(row, "labels", "--target-length", limits[1], tokenizer)
    if labels[-1] != tokenizer.eos_token_id:
        raise ValueError("labels do not end in EOS, so the model would not learn to stop")
    key = stable_hash(repr(ids))
    return [{"input_ids": ids, "labels": labels, "length": len(ids), "key": key}]


def draw(
    name: str, split: str, rows: Dataset, limit: int | None, tokenizer: Tokenizer, args: Any
) -> Dataset:
    """Return `limit` random rows (0: all, None: the default) as TOKENS, the same in every run, cut
    to the lengths of the flags. Print how many are cut, or changed by the tokenizer."""
    total = len(rows)
    if limit is None and name.partition(":")[0] == "wikihow":  # whose articles are many
        limit = 1500 if split == "train" else 300
    if limit:
        indices = [*range(total)]
        random.Random(0).shuffle(indices)
        rows = rows.select(sorted(indices[:limit]))  # reads faster than in random order
    print0(f"{name}, {split}: {len(rows):,} of {total:,} rows drawn")
    if "labels" not in rows.column_names:
        limits = {"--source-length": args.source_length, "--target-length": args.target_length}
        function = partial(
            encode_pair, prefix=args.source_prefix, limits=limits, tokenizer=tokenizer
        )
        features = TOKENS | dict.fromkeys(limits, Value("int32"))
        rows = tables.map_rows(name, tables.as_table(rows), function, features, args)
        for flag, limit in limits.items():
            print_cut(name, flag, limit, rows[flag][:])
    return rows.select_columns([*TOKENS])


def encode_pair(row: dict, prefix: str, limits: dict, tokenizer: Tokenizer) -> list:
    """Return the tokens of a text and of its summary, what the tokenizer changes in these, and by
    flag how many tokens its limit cuts. Both end in EOS."""
    text = prefix + row["text"]
    both = f"{text} {row['summary']}"
    ids = tokenizer(text, verbose=False)["input_ids"]
    labels = tokenizer(text_target=row["summary"], verbose=False)["input_ids"]
    sample = {
        "change": losses.find_change(both, ids + labels, tokenizer),
        "mark": losses.find_mark(both, tokenizer),
    }
    eos = tokenizer.eos_token_id
    for column, whole, flag in zip(("input_ids", "labels"), (ids, labels), limits, strict=True):
        kept = whole
        if len(whole) > limits[flag] or whole[-1:] != [eos]:
            kept = [*whole[: limits[flag] - 1], eos]
        sample |= {column: kept, flag: len(whole) - len(kept)}
    return [sample | {"length": len(sample["input_ids"])}]


load = partial(sets.load_sets, load_parts=load_rows, draw=draw)
