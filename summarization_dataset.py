"""Summarization pairs for a sequence-to-sequence model, from raw text to padded batches.

`load` cleans and splits the rows (`clean_rows`, `load_wikihow`), draws the requested number and
tokenizes them (`encode`); `collate` pads a batch. For your own data, return its rows from
`load_rows` under a name like wikihow.
"""

import hashlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow.compute
import torch
import tyro
from datasets import Dataset, List, Value
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from core import reading
from core.args import Interval, Names, Range
from core.ranks import Batch, Problem, print0
from core.steps import StepSampler
from core.weights import unwrapped

WIKIHOW = {"all": "wikihowAll.csv", "sep": "wikihowSep.csv"}
SPLITS = ("train", "validation", "test")  # 98, 1 and 1 percent of WikiHow's titles
PAIR = {"text": Value("string"), "summary": Value("string")}
TOKENS = {"input_ids": List(Value("int32")), "labels": List(Value("int32"))}
TOKENS |= {"length": Value("int32")}
KEY = {"key": Value("int64")}  # rows with equal ones are in one split
WIKIHOW_COLUMNS = ("text", "headline", "title")
USUAL_COLUMNS = (  # texts and summaries, if the data lack those of the flags' defaults
    ("article", "highlights"), ("article", "summary"), ("article", "abstract"),
    ("document", "summary"), ("dialogue", "summary"), ("text", "summary"), ("text", "target"),
    ("source", "target"), ("input", "output"), ("prompt", "response"), ("prompt", "completion"),
    ("question", "answer"),
)  # fmt: skip
Length = Annotated[int, Range(2), tyro.conf.arg(metavar="N")]


@dataclass
class Data:
    """NAME is wikihow (in --data-dir), a CSV, JSON, JSONL or Parquet file, a save_to_disk directory
    or a hub id; NAME:train[:1000] takes a split or a part."""

    dataset: Names = ("wikihow",)
    """data to train on, joined"""
    val_dataset: Names = ()
    """data to validate on instead of a part of each --dataset, for example wikihow:test"""
    data_dir: Path = Path("data")
    """directory of WikiHow's CSV files"""
    wikihow_part: Literal[*WIKIHOW] = "all"
    """whole articles or paragraphs"""
    dataset_config: str | None = None
    """configuration of hub data sets"""
    source_column: str = "text"
    """column with the texts"""
    target_column: str = "headline"
    """column with the summaries"""
    source_prefix: str = "summarize: "
    """prepended to each text"""
    source_length: Length = 512
    """tokens per text; the rest is cut"""
    target_length: Length = 150
    """tokens per summary; the rest is cut"""
    num_train_samples: Interval = None
    """rows per data set; 0: all; None: 1500 of wikihow, all of others"""
    num_val_samples: Interval = None
    """rows per data set; 0: all; None: 300 of wikihow, all of others"""
    bad_rows: Literal["fail", "skip"] = "fail"
    """skip: drop unusable rows"""
    group_by_length: bool = True
    """batch texts of similar length, to pad less"""

    def problems(self, _: Any) -> list[str]:
        """Return a message if the source is the target."""
        are_equal = self.source_column == self.target_column
        return ["--source-column and --target-column are the same."] * are_equal


def load(
    args: Data, tokenizer: Tokenizer, evaluate_only: bool = False
) -> tuple[Dataset | None, reading.Parts]:
    """Return the training set, None with `evaluate_only`, and the validation sets by name.

    Their columns are TOKENS: `length` is that of `input_ids`, and EOS is last. The choice of rows
    depends only on the data. Raise Problem if data or flags cannot be used.
    """
    load_parts = partial(load_rows, args=args, tokenizer=tokenizer)
    make = partial(draw, args=args, tokenizer=tokenizer)
    train_set, val_sets = reading.load_sets(args, load_parts, reading.hold_out, make, evaluate_only)
    if train_set:
        text, summary = (tokenizer.decode(train_set[0][x]) for x in ("input_ids", "labels"))
        print0(f"an example, with targets in « »: «{summary}» from {text}"[:400])
    return train_set, val_sets


def load_rows(spec: str, args: Data, tokenizer: Tokenizer) -> reading.Parts:
    """Return the clean rows of one --dataset argument by split."""
    name, _, split = spec.partition(":")
    if name == "wikihow":
        return reading.pick(load_wikihow(args), split)
    parts = reading.read(spec, args.dataset_config)
    return {key: clean_rows(spec, rows, args, tokenizer) for key, rows in parts.items()}


def load_wikihow(args: Data) -> reading.Parts:
    """Return WikiHow's rows as PAIR and KEY by split: SPLITS by a hash of the title. Rows that
    WikiHow's authors would drop are left out. Raise Problem if the file is missing."""
    directory = args.data_dir.expanduser()
    path = directory / WIKIHOW[args.wikihow_part]
    if not path.is_file():
        raise Problem(f"{path} is missing: see https://github.com/mahnazkoupaee/WikiHow-Dataset")
    rows = reading.read(str(path))["train"]

    def clean(row: dict[str, str]) -> list[dict[str, Any]]:
        text, summary, title = map(row.get, WIKIHOW_COLUMNS)
        text, summary = text.strip(), summary.strip()
        number = stable_hash("".join(filter(str.isalnum, title)) or text)
        if not summary or len(summary) >= 0.75 * len(text):
            return []
        split = SPLITS[max(0, number % 100 - 97)]
        text = re.sub(r"\.+[\r\n]+,", ".\n", text)
        summary = summary.replace(".,", ".")
        text, summary = (re.sub(r"\s*[\r\n]\s*", " ", x) for x in (text, summary))
        return [{"text": text, "summary": summary, "key": number, "split": split}]

    features = PAIR | KEY | {"split": Value("string")}
    rows = reading.map_rows("wikihow", rows, WIKIHOW_COLUMNS, clean, features, args.bad_rows)
    splits = np.array(rows["split"][:])
    rows = rows.remove_columns("split")
    parts = {split: rows.select(np.flatnonzero(splits == split)) for split in SPLITS}
    sizes = ", ".join(f"{split} {len(part):,}" for split, part in parts.items())
    print0(f"wikihow: {sizes} rows")
    return parts


def stable_hash(key: str) -> int:
    """Return a 48-bit hash of `key` that, unlike hash(), is the same in every process."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "big")


def clean_rows(name: str, rows: Dataset, args: Data, tokenizer: Tokenizer) -> Dataset:
    """Return the usable rows of data set `name` as PAIR and KEY or, if they are tokenized, as
    TOKENS and KEY."""
    columns = reading.first_row(name, rows)
    pair = args.source_column, args.target_column
    if not columns.keys() >= {*pair}:
        if "input_ids" in columns:
            return read_tokens(name, rows, args, tokenizer)
        # With several data sets, the flags are for those that have the columns.
        are_defaults = pair == (Data.source_column, Data.target_column)
        is_free = are_defaults or len(args.dataset + args.val_dataset) > 1
        usual = is_free and reading.usual_columns(columns, USUAL_COLUMNS)
        if not usual:
            missing = [column for column in pair if column not in columns]
            advice = "Pass --source-column and --target-column."
            raise reading.no_columns(name, missing, columns, advice)
        pair = usual
    reading.print_columns(name, pair, columns)

    def clean(row: dict[str, Any]) -> list[dict[str, Any]]:
        for column in pair:
            text = row.get(column)
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"{column} is {text!r}, not text")
        text, summary = map(row.get, pair)
        summary.encode()  # raises ValueError for half of a surrogate pair
        return [{"text": text, "summary": summary, "key": stable_hash(text)}]

    return reading.map_rows(name, rows, pair, clean, PAIR | KEY, args.bad_rows, pair)


def read_tokens(name: str, rows: Dataset, args: Data, tokenizer: Tokenizer) -> Dataset:
    """Return rows that are already tokenized with the columns of TOKENS and KEY."""

    def read(row: dict[str, Any]) -> list[dict[str, Any]]:
        ids = reading.token_ids(row, "input_ids", "--source-length", args.source_length, tokenizer)
        labels = reading.token_ids(row, "labels", "--target-length", args.target_length, tokenizer)
        if labels[-1] != tokenizer.eos_token_id:
            raise ValueError("labels do not end in EOS, so the model would not learn to stop")
        key = stable_hash(repr(ids))
        return [{"input_ids": ids, "labels": labels, "length": len(ids), "key": key}]

    key = args.bad_rows, args.source_length, args.target_length, len(tokenizer)
    return reading.map_rows(name, rows, rows.column_names, read, TOKENS | KEY, *key)


def draw(
    spec: str, split: str, rows: Dataset, limit: int | None, args: Data, tokenizer: Tokenizer
) -> Dataset:
    """Return `limit` random rows (0: all, None: the default) as TOKENS, the same in every run."""
    total = len(rows)
    if limit is None and spec.partition(":")[0] == "wikihow":
        limit = 1500 if split == "train" else 300
    if limit:
        indices = list(range(total))
        random.Random(0).shuffle(indices)
        rows = rows.select(sorted(indices[:limit]))  # reads faster than in random order
    print0(f"{spec}, {split}: {len(rows):,} of {total:,} rows drawn")
    rows = rows.remove_columns([*KEY])
    if "input_ids" not in rows.column_names:
        rows = encode(spec, rows, tokenizer, args)
    for column, kind in (("input_ids", "source"), ("labels", "target")):
        limit = getattr(args, f"{kind}_length")
        lengths = pyarrow.compute.list_value_length(rows.with_format("arrow")[column][:]).to_numpy()
        if count := np.count_nonzero(lengths == limit):
            print0(f"  {count:,} reach --{kind}-length {limit}, which cuts the rest")
    return rows


def encode(spec: str, rows: Dataset, tokenizer: Tokenizer, args: Data) -> Dataset:
    """Tokenize rows of PAIR, cut to the lengths of the flags, and return them as TOKENS. Print how
    many the tokenizer changes."""
    spaces = "\n", "\t", "  "
    lost = [x for x in spaces if x not in tokenizer.decode(tokenizer(f"a{x}b")["input_ids"])]
    special = {tokenizer.unk_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id}

    def tokenize(length: int, **text: str) -> list[int]:
        ids = tokenizer(**text, truncation=True, max_length=length)["input_ids"]
        eos = tokenizer.eos_token_id
        return ids if ids[-1:] == [eos] else [*ids[: length - 1], eos]

    def encode_pair(row: dict) -> list[dict]:
        ids = tokenize(args.source_length, text=args.source_prefix + row["text"])
        labels = tokenize(args.target_length, text_target=row["summary"])
        is_changed = not special.isdisjoint(ids[:-1] + labels[:-1])
        is_changed |= any(x in text for x in lost for text in row.values())
        sample = {"input_ids": ids, "labels": labels, "length": len(ids)}
        return [sample | {"is_changed": is_changed}]

    features = TOKENS | {"is_changed": Value("bool")}
    key = args.source_prefix, args.source_length, args.target_length
    key = *key, reading.tokenizer_digest(tokenizer)
    rows = reading.map_rows(spec, rows, PAIR, encode_pair, features, args.bad_rows, *key)
    if count := sum(rows["is_changed"][:]):
        print0(f"{spec}: in {count:,} rows, the tokenizer loses line breaks, spaces or characters")
    return rows.remove_columns("is_changed")


def collator(model: nn.Module) -> Callable:
    """Return `collate` with the arguments for a model's decoder start token and padding token set.

    Raise Problem if the model lacks one of them, or a row for it.
    """
    config = unwrapped(model).config
    start, padding = getattr(config, "decoder_start_token_id", None), config.pad_token_id
    if start is None and hasattr(config, "decoder"):  # T5Gemma
        start, padding = config.decoder.bos_token_id, config.decoder.pad_token_id
    rows = range(config.get_text_config().vocab_size)
    if start not in rows or padding not in rows:
        raise Problem(f"Set decoder_start_token_id {start} and pad_token_id {padding} to tokens.")
    return partial(collate, pad_token_id=padding, decoder_start_token_id=start)


class LengthSampler(StepSampler):
    """A StepSampler whose steps have samples of similar length, so that there is little padding and
    no rank waits for another.

    The steps come in random order, except that the longest comes first: if it does not fit in
    memory, the run fails at once. If the last step of an epoch is short, it stays last.
    """

    def __init__(self, samples: Any, batch_size: int, accumulation: int, seed: int) -> None:
        super().__init__(len(samples), batch_size, accumulation, seed)
        has_lengths = isinstance(samples, Dataset)
        lengths = samples["length"] if has_lengths else [len(x["input_ids"]) for x in samples]
        self.lengths = torch.tensor(lengths[:])

    def order(self, generator: torch.Generator) -> Tensor:
        """Return an epoch's permutation, with each half sorted by length, then the steps shuffled.

        Each epoch has other halves, hence other steps.
        """
        order, count = super().order(generator), self.num_samples // self.global_batch
        order, remainder = order.tensor_split([count * self.global_batch])
        halves = order.tensor_split([count // 2 * self.global_batch])
        order = torch.cat([half[self.lengths[half].argsort(stable=True)] for half in halves])
        steps = order.view(count, self.global_batch)[torch.randperm(count, generator=generator)]
        if count:
            longest = self.lengths[steps].sum(dim=1).argmax().item()
            steps[[0, longest]] = steps[[longest, 0]]
        return torch.cat((steps.flatten(), remainder))


def pad(rows: list, value: int, multiple: int) -> Tensor:
    """Return rows of ints as int64 [rows, length], padded with `value`. The length is that of the
    longest row, rounded up to a multiple of `multiple`."""
    tensors = [torch.tensor(row, dtype=torch.int64) for row in rows]
    padded = nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)
    return nn.functional.pad(padded, (0, -padded.size(1) % multiple), value=value)


def collate(examples: list[dict], pad_token_id: int, decoder_start_token_id: int) -> Batch:
    """Return a batch padded to the longest example, or on a GPU to a multiple of 8 for its kernels.

    It has int64 tensors: `input_ids` and `attention_mask` [batch, source], `labels`,
    `decoder_input_ids` and `decoder_attention_mask` [batch, target]; padding is `pad_token_id`, in
    `labels` -100. The int `targets` counts the labels that are not -100, `tokens` these and the
    source's tokens. If there are no examples, as on a rank that has none left, the batch is one
    row without targets.
    """
    # One position stays visible, because attention over none would be NaN.
    examples = examples or [{"input_ids": [pad_token_id], "labels": [-100]}]
    multiple = 8 if torch.accelerator.is_available() else 1
    sources = [example["input_ids"] for example in examples]
    masks = [example.get("attention_mask", [1] * len(example["input_ids"])) for example in examples]
    attention_mask = pad(masks, 0, multiple)
    labels = pad([example["labels"] for example in examples], -100, multiple)
    decoder_input_ids = labels.masked_fill(labels == -100, pad_token_id).roll(1, dims=1)
    decoder_input_ids[:, 0] = decoder_start_token_id
    decoder_attention_mask = (labels != -100).long()
    count = len(decoder_attention_mask.nonzero())
    decoder_attention_mask[:, 0] = 1
    return {
        "input_ids": pad(sources, pad_token_id, multiple),
        "attention_mask": attention_mask,
        "labels": labels,
        "decoder_input_ids": decoder_input_ids,
        "decoder_attention_mask": decoder_attention_mask,
        "targets": count,
        "tokens": count + len(attention_mask.nonzero()),
    }
