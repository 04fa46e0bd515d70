"""Summarization pairs for a sequence-to-sequence model: rows to tokens. Any rank may call these.

`load_rows` cleans and splits the rows (`clean_rows`, `load_wikihow`), `encode` tokenizes those
that were drawn. For your own data, return its rows from `load_rows` under a name like wikihow.
"""

import hashlib
import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, List, Value
from transformers import PreTrainedTokenizerBase as Tokenizer

from core.ranks import Problem, print0
from prepare import losses, read, sets, tables, tokens
from prepare.read import Parts
from prepare.tables import Form, Table

WIKIHOW = {"all": "wikihowAll.csv", "sep": "wikihowSep.csv"}
SPLITS = ("train", "validation", "test")  # 98, 1 and 1 percent of WikiHow's titles, or its lists
# Validation is last, so that a title in two lists is not trained on.
TITLE_LISTS = {"train": "all_train.txt", "test": "all_test.txt", "validation": "all_val.txt"}
PAIR = {"text": Value("string"), "summary": Value("string")}
IDS = List(Value("int32"))
TOKENS = {"input_ids": IDS, "labels": IDS, "length": Value("int32")}
KEY = {"key": Value("int64")}  # rows with equal ones are in one split
WIKIHOW_COLUMNS = ("text", "headline", "title")
FLAGS = ("--source-column", "--target-column")
# Texts and summaries that are read without flags.
USUAL_NAMES = """text headline, input_ids, article highlights, article summary, article abstract,
document summary, dialogue summary, text summary, text target, source target, input output,
prompt response, prompt completion, question answer"""
USUAL_COLUMNS = [tuple(names.split()) for names in USUAL_NAMES.split(",")]
OTHER_COLUMNS = ("title", "topic", "overview", "sectionLabel")  # beside published pairs


def load(args: Any, tokenizer: Tokenizer, evaluate_only: bool) -> tuple:
    """Return the training set, None with `evaluate_only`, and the validation sets by name."""
    if len({args.source_column, args.target_column} - {None}) == 1:
        named = f"--source-column is {args.source_column}, --target-column {args.target_column}"
        raise Problem(f"{named}. Pass both, with two names.")
    parts = partial(load_rows, args=args, tokenizer=tokenizer)
    make = partial(draw, args=args, tokenizer=tokenizer)
    return sets.load_sets(args, parts, make, evaluate_only)


def draw(
    spec: str,
    split: str,
    rows: Dataset,
    limit: int | None,
    args: Any,
    tokenizer: Tokenizer,
) -> Dataset:
    """Return `limit` random rows (0: all, None: the default) as TOKENS, the same in every run."""
    total = len(rows)
    if limit is None and spec.partition(":")[0] == "wikihow":  # whose articles are many
        limit = 1500 if split == "train" else 300
    if limit:
        indices = [*range(total)]
        random.Random(0).shuffle(indices)
        rows = rows.select(sorted(indices[:limit]))  # reads faster than in random order
    print0(f"{spec}, {split}: {len(rows):,} of {total:,} rows drawn")
    if "input_ids" not in rows.column_names:
        rows = encode(spec, rows, tokenizer, args)
    return rows.select_columns([*TOKENS])


def load_rows(spec: str, args: Any, tokenizer: Tokenizer) -> Parts:
    """Return the clean rows of one --dataset argument by split."""
    name, _, split = spec.partition(":")
    if name == "wikihow":
        return read.pick(name, load_wikihow(args), split)
    parts = read.read(spec, args.dataset_config)
    return {part: clean_rows(spec, table, args, tokenizer) for part, table in parts.items()}


def load_wikihow(args: Any) -> Parts:
    """Return WikiHow's rows as PAIR and KEY by split: that of its lists of titles or, if there are
    none, SPLITS by a hash of the title. Rows that WikiHow's authors would drop are left out. Raise
    Problem if the file is missing."""
    directory = args.data_dir.expanduser()
    path = directory / WIKIHOW[args.wikihow_part]
    if not path.is_file():
        raise Problem(f"{path} is missing: see https://github.com/mahnazkoupaee/WikiHow-Dataset")
    titles = read_titles(directory)
    function = partial(clean_article, titles=titles)
    features = PAIR | KEY | {"split": Value("string")}
    table = read.read(str(path))["train"]
    rows = tables.map_rows("wikihow", table, WIKIHOW_COLUMNS, function, features, args.bad_rows)
    splits = np.array(rows["split"][:])
    parts = {split: rows.select(np.flatnonzero(splits == split)) for split in SPLITS}
    sizes = [f"{split} {len(part):,}" for split, part in parts.items()]
    rule = "its lists of titles" if titles else "a hash of the title"
    print0(f"wikihow: split by {rule} into {', '.join(sizes)} rows")
    return parts


def read_titles(directory: Path) -> dict:
    """Return the split of each title in WikiHow's lists, {} if the directory has none. Raise
    FileNotFoundError if it lacks one of them."""
    titles = {}
    if any(directory.glob("all_t*.txt")):
        for split, name in TITLE_LISTS.items():
            text = (directory / name).read_text(encoding="utf-8-sig", errors="replace")
            titles |= dict.fromkeys(map(title_key, text.strip().split("\n")), split)
    return titles


def title_key(title: str) -> str:
    """Return a title's letters and digits, which WikiHow's lists have, without spaces."""
    return "".join(filter(str.isalnum, title))


def clean_article(row: dict, titles: dict) -> list:
    """Return the sample of a row of WikiHow, with its split. Return none if the summary is empty or
    nearly as long as the text, or if there are lists of titles without the title."""
    text = row.get("text").strip()
    summary = row.get("headline").strip()
    title = title_key(row.get("title"))
    if not summary or len(summary) >= 0.75 * len(text):
        return []
    if titles and title not in titles:
        return []
    number = stable_hash(title or text)
    split = titles.get(title) or SPLITS[max(0, number % 100 - 97)]
    text = re.sub(r"\.+[\r\n]+,", ".\n", text)
    summary = summary.replace(".,", ".")
    sample = {"text": on_one_line(text), "summary": on_one_line(summary)}
    return [sample | {"key": number, "split": split}]


def on_one_line(text: str) -> str:
    """Return a text without line breaks and the spaces around them."""
    return re.sub(r"\s*[\r\n]\s*", " ", text)


def stable_hash(key: str) -> int:
    """Return a 48-bit hash of `key` that, unlike hash(), is the same in every process."""
    digest = hashlib.blake2b(key.encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")


def clean_rows(name: str, table: Table, args: Any, tokenizer: Tokenizer) -> Dataset:
    """Return the usable rows of data set `name` as PAIR and KEY or, if they are tokenized, as
    TOKENS and KEY."""
    named = (args.source_column, args.target_column)
    form = tables.find_form(name, table, named, USUAL_COLUMNS, FLAGS, args)
    used = form.columns
    if used[0] == "input_ids":
        used = ("input_ids", "labels")
        limits = (args.source_length, args.target_length)
        function = partial(read_tokens, limits=limits, tokenizer=tokenizer)
        features = TOKENS | KEY
    else:
        function = partial(clean_pair, form=form)
        features = PAIR | KEY
    tables.print_columns(name, used, table.columns)
    columns = [column for column in table.columns if column not in form.ignored]
    return tables.map_rows(name, table, columns, function, features, args.bad_rows)


def clean_pair(row: dict, form: Form) -> list:
    """Return the text and the summary of a row. Raise ValueError if they are not text, or empty,
    and Problem if other columns may matter."""
    for column in form.columns:
        text = row.get(column)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{column} is {text!r}, not text")
        text.encode()  # raises ValueError for half of a surrogate pair
    text, summary = (row[column] for column in form.columns)
    if not form.is_named:
        read = (*form.columns, *OTHER_COLUMNS)
        document = f"{text}\n\n{summary}"
        flags = tables.with_flags(FLAGS, form.columns)
        form.check(row, read, document, flags)
    return [{"text": text, "summary": summary, "key": stable_hash(text)}]


def read_tokens(row: dict, limits: tuple, tokenizer: Tokenizer) -> list:
    """Return the sample that a tokenized row is, with the columns of TOKENS and KEY."""
    ids = tokens.check_tokens(row, "input_ids", "--source-length", limits[0], tokenizer)
    labels = tokens.check_tokens(row, "labels", "--target-length", limits[1], tokenizer)
    if labels[-1] != tokenizer.eos_token_id:
        raise ValueError("labels do not end in EOS, so the model would not learn to stop")
    key = stable_hash(repr(ids))
    return [{"input_ids": ids, "labels": labels, "length": len(ids), "key": key}]


def encode(spec: str, rows: Dataset, tokenizer: Tokenizer, args: Any) -> Dataset:
    """Tokenize rows of PAIR, cut to the lengths of the flags, and return them with TOKENS. Print
    how many are cut, or changed by the tokenizer."""
    limits = {"--source-length": args.source_length, "--target-length": args.target_length}
    function = partial(encode_pair, prefix=args.source_prefix, limits=limits, tokenizer=tokenizer)
    table = tables.as_table(rows)
    features = TOKENS | losses.FEATURES | dict.fromkeys(limits, Value("int32"))
    samples = tables.map_rows(spec, table, PAIR, function, features, args.bad_rows)
    losses.print_losses(spec, samples)
    for flag, limit in limits.items():
        losses.print_cut(spec, flag, limit, samples[flag][:])
    return samples


def encode_pair(row: dict, prefix: str, limits: dict, tokenizer: Tokenizer) -> list:
    """Return the tokens of a text and of its summary, what the tokenizer changes in these, and by
    flag how many tokens its limit cuts."""
    text = prefix + row["text"]
    both = f"{text} {row['summary']}"
    ids = tokenizer(text, verbose=False)["input_ids"]
    labels = tokenizer(text_target=row["summary"], verbose=False)["input_ids"]
    source, target = limits
    kept = cut(ids, limits[source], tokenizer)
    kept_labels = cut(labels, limits[target], tokenizer)
    sample = {
        "input_ids": kept,
        "labels": kept_labels,
        "length": len(kept),
        source: len(ids) - len(kept),
        target: len(labels) - len(kept_labels),
        "change": losses.find_change(both, ids + labels, tokenizer),
        "mark": losses.find_mark(both, tokenizer),
    }
    return [sample]


def cut(ids: list, length: int, tokenizer: Tokenizer) -> list:
    """Return at most `length` tokens of a text, which end in EOS."""
    if len(ids) <= length and ids[-1:] == [tokenizer.eos_token_id]:
        return ids
    return [*ids[: length - 1], tokenizer.eos_token_id]
