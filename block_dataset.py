"""Text for a causal language model, from files to blocks of tokens.

`--train-file` and `--val-file` name text, JSONL or Parquet files; without `--val-file` the end of
`--train-file` is held out. Without either `--dataset` is `docstrings` (those of the installed
Python, no download) or a hub id. `load_blocks` reads the texts (`read_texts`), tokenises them and
cuts the joined documents into blocks; `collate` pads a batch. Results stay in the `datasets` cache:
let one process per node load first.

Copy this file along with gpt2_fsdp.py and the folder runtime/.
"""

import functools
import random
import zlib
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from glob import glob
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, Features, List, Value, concatenate_datasets
from transformers import PreTrainedTokenizerBase as Tokenizer

from runtime import arguments
from runtime.rows import readers


def add_arguments(parser: ArgumentParser) -> None:
    """Add the group "data" to `parser`, whose formatter shows the defaults."""
    add = parser.add_argument_group("data").add_argument
    add("--dataset", default="Salesforce/wikitext", help="hub id, or docstrings (no download)")
    add("--dataset-config", default="wikitext-2-raw-v1", help="configuration of a hub data set")
    add("--train-split", default="train", help="split of a hub data set")
    add("--val-split", default="validation", help="split of a hub data set")
    add("--train-file", nargs="+", help="text, JSONL or Parquet files or globs, for --dataset")
    add("--val-file", nargs="+", help="the same for validation (default: the last 5%% of "
        "--train-file's blocks)")  # fmt: skip
    add("--text-column", default="text", help="column of a hub data set, JSONL or Parquet file")
    add("--block-size", type=int, default=1024, help="tokens in a sample")
    blocks = "blocks of training (0: all; as by default, but 2000 of docstrings)"
    add("--num-train-samples", type=int, help=blocks)
    blocks = "blocks of validation (0: all; as by default, but 500 of docstrings)"
    add("--num-val-samples", type=int, help=blocks)


def resolve_arguments(args: Namespace) -> dict[str, int]:
    """Resolve --num-train-samples and --num-val-samples."""
    if args.dataset == "docstrings" and not args.train_file:
        return arguments.samples(args, 2000, 500)
    return arguments.samples(args, 0, 0)


def check_arguments(args: Namespace) -> list[str]:
    """List a sentence for each value that is wrong."""
    limits = dict.fromkeys(("num_train_samples", "num_val_samples"), (0, arguments.ANY))
    problems = arguments.out_of_range(args, {"block_size": (2, arguments.ANY)} | limits)
    if args.val_file and not args.train_file and not args.evaluate_only:
        problems.append("--val-file needs --train-file")
    path = Path(args.dataset)
    is_file = path.suffix.lower() in (*readers.KINDS, ".txt")
    if (path.exists() or is_file) and not readers.is_saved(path) and not args.export_only:
        problems.append(f"--dataset {path} is no hub id: name files by --train-file")
    return problems


def read_file(path: Path, column: str) -> Dataset:
    """Return a file's texts, a row each: a column's, or the lines of a text file; or its tokens, if
    it has input_ids and no such column. Raises ValueError."""
    if path.suffix.lower() in readers.KINDS:
        return text_or_tokens(str(path), readers.read_file(path), column)
    return readers.read_lines(path)


def text_or_tokens(name: str, rows: Dataset, column: str) -> Dataset:
    """Return the column of texts, or rows of tokens made beforehand; ValueError if neither."""
    if "input_ids" in rows.column_names and column not in rows.column_names:
        return rows
    return readers.text_column(name, rows, column)


def named_files(patterns: list[str]) -> list[Path]:
    """Return the files that names and globs mean."""
    found = [sorted(glob(pattern, recursive=True)) or [pattern] for pattern in patterns]
    return [Path(name) for names in found for name in names]


def read_texts(args: Namespace, split: str) -> Dataset:
    """Return the texts of split train or validation, a row each; raises ValueError.

    A row is a document, unless it ends in a newline: then the next row continues it, as in a text
    file's lines and the rows of WikiText. `cut_texts` prints how many rows end so.
    """
    patterns = args.train_file
    if split != "train" and args.val_file:
        patterns = args.val_file
    if patterns:
        paths = named_files(patterns)
        return concatenate_datasets([read_file(path, args.text_column) for path in paths])
    if args.dataset != "docstrings":
        flag = "train_split" if split == "train" else "val_split"
        ((name, rows),) = readers.read_parts(args.dataset, args, flag)
        return text_or_tokens(name, rows, args.text_column)
    rows = readers.docstring_rows()
    held_out = [zlib.crc32(module.encode()) % 8 == 0 for module in rows["module"]]
    return rows.select([i for i, out in enumerate(held_out) if out == (split != "train")])


def blocks(rows: Dataset, size: int) -> Iterator[dict[str, list[int]]]:
    """Cut the joined documents into blocks; each ends with the token that the next begins with,
    so that every token but the first is predicted once. The last block has what is left."""
    pending: list[int] = []
    for row in rows:
        pending += row["input_ids"]
        while len(pending) > size:
            yield {"input_ids": pending[: size + 1]}
            del pending[:size]
    if len(pending) > 1:
        yield {"input_ids": pending}


def say_not_held_out(args: Namespace) -> None:
    """Print which files are both trained and validated on, as a glob may name more than meant."""
    held_out = {path.resolve() for path in named_files(args.val_file)}
    both = [str(path) for path in named_files(args.train_file) if path.resolve() in held_out]
    if both:
        print(f"trained on and validated on: {', '.join(both)}")


def load_blocks(
    args: Namespace, tokenizer: Tokenizer, split: str, number: int, verbose: bool
) -> Dataset:
    """Return `number` blocks (0: all) of a split in a column input_ids, cached if they were.

    Raises ValueError if there is none.
    """
    readers.show_progress(verbose)
    if verbose and split == "train" and args.train_file and args.val_file:
        say_not_held_out(args)
    rows = read_texts(args, split)
    is_shared = bool(args.train_file and not args.val_file)
    if "input_ids" in rows.column_names:
        from runtime.rows import tokens  # a copy may leave it out

        limits = {"input_ids": ("--block-size", args.block_size + 1)}
        name = f"the {split} set"
        rules = readers.token_rules(tokenizer)
        tokens.check_origin(name, rows, limits, args, ["block_size"], rules)
        cut = tokens.checked_columns(name, rows, limits, tokenizer)
    else:
        is_told = verbose and (split == "train" or not is_shared)
        cut = cut_texts(args, tokenizer, split, rows, is_told)
    if is_shared:
        cut = train_or_end(cut, split, verbose)
    number = min(number or len(cut), len(cut))
    if verbose:
        print(f"{split}: {number:,} of {len(cut):,} blocks used", flush=True)
    return cut.select(sorted(random.Random(0).sample(range(len(cut)), number)))


def train_or_end(cut: Dataset, split: str, verbose: bool) -> Dataset:
    """Return all blocks of --train-file but the last 5%, to train on, or those, to validate on.

    The end, because what lies between blocks that are trained on is half known from them. Raises
    ValueError if there is but one block.
    """
    held_out = max(1, len(cut) // 20)
    first = len(cut) - held_out
    if first == 0:
        raise ValueError("--train-file gives one block, of which none can be held out for "
                         "validation: give --val-file")  # fmt: skip
    if verbose and split != "train":
        print(f"validation: the last {held_out:,} of {len(cut):,} blocks of --train-file are held "
              "out; --val-file names others")  # fmt: skip
    return cut.select(range(first) if split == "train" else range(first, len(cut)))


@readers.names_cache
def load(
    args: Namespace, tokenizer: Tokenizer, verbose: bool
) -> tuple[readers.Rows | None, dict[str, readers.Rows]]:
    """Return the training set, with --evaluate-only None, and the validation set by its name."""
    val_set = load_blocks(args, tokenizer, "validation", args.num_val_samples, verbose)
    val_sets = {"validation": readers.Rows(val_set)}
    if args.evaluate_only:
        return None, val_sets
    train_set = load_blocks(args, tokenizer, "train", args.num_train_samples, verbose)
    return readers.Rows(train_set), val_sets


def examples(args: Namespace) -> list[dict[str, list[int]]]:
    """Return two blocks that begin alike, for model_checks.check_logits."""
    return [
        {"input_ids": [*range(10, 43)]},
        {"input_ids": [*range(10, 26), *range(50, 67)]},
    ]


def cut_texts(
    args: Namespace, tokenizer: Tokenizer, split: str, rows: Dataset, verbose: bool
) -> Dataset:
    """Return the blocks of all texts of a split; raises ValueError if there is none."""

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        texts = [text or "" for text in batch["text"]]
        plain = {"add_special_tokens": False, "split_special_tokens": True}  # "<unk>" is text here
        options = plain | {"return_attention_mask": False, "verbose": False}
        ids = tokenizer(texts, **options)["input_ids"]
        eos = [tokenizer.eos_token_id]
        ends = [bool(text) and not text.endswith("\n") for text in texts]
        return {"input_ids": [x + eos * end for x, end in zip(ids, ends, strict=True)]}

    features = {"input_ids": List(Value("int32"))}
    rows = readers.cached_map(rows, encode, features, readers.token_rules(tokenizer))
    if verbose:
        say_joined(split, rows, tokenizer.eos_token_id)
    if next(blocks(rows, args.block_size), None) is None:
        raise ValueError(f"the {split} texts give no block: they have fewer than two tokens")
    return Dataset.from_generator(
        functools.partial(blocks, rows, args.block_size),
        features=Features(features),
        fingerprint=readers.fingerprint(blocks, rows._fingerprint, args.block_size),
    )


def say_joined(split: str, rows: Dataset, eos: int) -> None:
    """Print how many texts are empty, and how many end in a newline, without EOS."""
    empty, ended = 0, 0
    for array in readers.in_order(rows, "input_ids"):
        lengths = array.value_lengths().to_numpy()
        lasts = array.flatten().to_numpy()[lengths.cumsum()[lengths > 0] - 1]
        empty += int((lengths == 0).sum())
        ended += int((lasts == eos).sum())
    joined = len(rows) - empty - ended
    if empty:
        print(f"{split}: {empty:,} of {len(rows):,} texts are empty")
    if joined:
        print(
            f"{split}: {joined:,} of {len(rows):,} texts end in a newline: the next one goes on "
            "with them, without EOS"
        )


def collate(examples: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor | int]:
    """Return int64 input_ids and labels, the tokens that follow, [batch, length]; labels are -100
    past a block's end. The ints `targets` and `tokens` count the labels that are not -100.

    Without examples the batch is one row without labels, for a rank that has none left.
    """
    rows = [example["input_ids"] for example in examples] or [[0]]
    width = max(8, *(len(row) - 1 for row in rows))
    input_ids = np.zeros((len(rows), width), dtype=np.int64)
    labels = np.full((len(rows), width), -100)
    targets = 0
    for number, row in enumerate(rows):
        count = len(row) - 1
        input_ids[number, :count] = row[:-1]
        labels[number, :count] = row[1:]
        targets += count
    tensors = {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}
    return tensors | {"targets": targets, "tokens": targets}
