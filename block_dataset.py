"""Text for a causal language model, from files to blocks of tokens.

`--train-file` and `--val-file` name text, JSONL or Parquet files; without them `--dataset` is
`docstrings` (those of the installed Python, no download) or a hub id. `load_blocks` reads the texts
(`read_texts`), tokenises them and cuts the joined documents into blocks; `collate` pads a batch.
Results stay in the `datasets` cache: let one process per node load first.

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

from runtime import arguments, readers

EXAMPLE = {"input_ids": list(range(33))}  # a block


def add_arguments(parser: ArgumentParser) -> None:
    """Add the group "data" to `parser`, whose formatter shows the defaults."""
    add = parser.add_argument_group("data").add_argument
    add("--dataset", default="Salesforce/wikitext", help="hub id, or docstrings (no download)")
    add("--dataset-config", default="wikitext-2-raw-v1", help="configuration of a hub data set")
    add("--train-split", default="train", help="split of a hub data set")
    add("--val-split", default="validation", help="split of a hub data set")
    add("--train-file", nargs="+", help="text, JSONL or Parquet files or globs, for --dataset")
    add("--val-file", nargs="+", help="the same for validation")
    add("--text-column", default="text", help="column of a hub data set, JSONL or Parquet file")
    add("--block-size", type=int, default=1024, help="tokens in a sample")
    add("--num-train-samples", type=int, default=2000, help="training blocks (0: all)")
    add("--num-val-samples", type=int, default=500, help="validation blocks (0: all)")


def check_arguments(args: Namespace) -> list[str]:
    """One sentence for each value that is out of range."""
    limits = dict.fromkeys(("num_train_samples", "num_val_samples"), (0, arguments.ANY))
    problems = arguments.out_of_range(args, {"block_size": (2, arguments.ANY)} | limits)
    is_enough = args.evaluate_only and args.val_file
    if bool(args.train_file) != bool(args.val_file) and not is_enough:
        problems.append("--train-file and --val-file need each other")
    return problems


def read_file(path: Path, column: str) -> Dataset:
    """A file's texts, a row each: of a column, or the lines of a text file; raises ValueError."""
    if path.suffix.lower() in readers.KINDS:
        return readers.text_column(str(path), readers.read_file(path), column)
    return readers.read_lines(path)


def read_texts(args: Namespace, split: str) -> Dataset:
    """The texts of split train or validation, a row each; raises ValueError.

    A row is a document, unless it ends in a newline: then the next row goes on with it, as do the
    lines of a text file, and the rows of WikiText.
    """
    patterns = args.train_file if split == "train" else args.val_file
    if patterns:
        paths = [Path(name) for pattern in patterns for name in sorted(glob(pattern)) or [pattern]]
        return concatenate_datasets([read_file(path, args.text_column) for path in paths])
    if args.dataset != "docstrings":
        parts = readers.read_hub(args.dataset, args)
        name = args.train_split if split == "train" else args.val_split
        return readers.text_column(args.dataset, parts[name], args.text_column)
    rows = readers.docstring_rows()
    held_out = [zlib.crc32(module.encode()) % 8 == 0 for module in rows["module"]]
    return rows.select([i for i, out in enumerate(held_out) if out == (split != "train")])


def blocks(rows: Dataset, size: int) -> Iterator[dict[str, list[int]]]:
    """Cut the joined documents into blocks; each ends with the token that the next begins with,
    so that every token but the first is predicted once. The last block is what is left."""
    pending: list[int] = []
    for row in rows:
        pending += row["input_ids"]
        while len(pending) > size:
            yield {"input_ids": pending[: size + 1]}
            del pending[:size]
    if len(pending) > 1:
        yield {"input_ids": pending}


def load_blocks(
    args: Namespace, tokenizer: Tokenizer, split: str, number: int, verbose: bool
) -> Dataset:
    """`number` blocks (0: all) of a split in a column input_ids, from the cache if they are there.

    Raises ValueError if there is none.
    """
    readers.show_progress(verbose)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        texts = [text or "" for text in batch["text"]]
        plain = {"add_special_tokens": False, "split_special_tokens": True}  # "<unk>" is text here
        ids = tokenizer(texts, **plain, verbose=False)["input_ids"]
        eos = [tokenizer.eos_token_id]
        ends = [bool(text) and not text.endswith("\n") for text in texts]
        return {"input_ids": [x + eos * end for x, end in zip(ids, ends, strict=True)]}

    features = {"input_ids": List(Value("int32"))}
    identity = readers.tokenizer_identity(tokenizer)
    rows = readers.cached_map(read_texts(args, split), encode, features, *identity)
    if next(blocks(rows, args.block_size), None) is None:
        raise ValueError(f"the {split} texts give no block: they have fewer than two tokens")
    cut = Dataset.from_generator(
        functools.partial(blocks, rows, args.block_size),
        features=Features(features),
        fingerprint=readers.fingerprint(blocks, rows._fingerprint, args.block_size),
    )
    number = min(number or len(cut), len(cut))
    if verbose:
        print(f"{split}: {len(cut):,} blocks, {number:,} used", flush=True)
    return cut.select(sorted(random.Random(0).sample(range(len(cut)), number)))


def collate(examples: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor | int]:
    """int64 input_ids and labels, the tokens that follow, [batch, length]; -100 past a block's end.
    The ints `targets` and `tokens` are the number of labels that are not -100.

    No examples give one without labels, for a rank that has none left.
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
