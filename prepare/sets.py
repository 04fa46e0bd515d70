"""The training and validation sets that are made of the rows of several data sets. Any rank may
call these."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase as Tokenizer

from core.ranks import Problem, print0

Parts = dict  # rows, samples or names of files by split


def load_sets(
    args: Any, tokenizer: Tokenizer, evaluate_only: bool, load_parts: Callable, draw: Callable
) -> tuple:
    """Return the training set, None with `evaluate_only`, and the validation sets by name. Last,
    print what is read of each data set and what is left out, which their descriptions say.

    Modules of data bind two functions: `load_parts(name, tokenizer, args)` returns samples by
    split, and `draw(name, split, samples, limit, tokenizer, args)` at most `limit` (0: all).
    """
    training = []
    validation = {}
    for name in args.val_dataset:
        parts = load_parts(name, tokenizer, args)
        validation[name] = parts.get("validation", parts.get("train"))
        if name in args.dataset and "validation" not in parts:
            print0(f"{name} is also trained on: its validation loss will be too low.")
    names = () if evaluate_only and validation else args.dataset
    for name in names:
        parts = load_parts(name, tokenizer, args)
        if "train" not in parts:
            raise Problem(f"{name} has no split train. Pass another one: {name}:SPLIT.")
        if not args.val_dataset:
            if "validation" not in parts:
                parts = hold_out(name, parts["train"])
            validation[name] = parts["validation"]
        if not evaluate_only:
            limit = args.num_train_samples
            training.append(draw(name, "train", parts["train"], limit, tokenizer, args))
    for name, samples in validation.items():
        validation[name] = draw(
            name, "validation", samples, args.num_val_samples, tokenizer, args
        ).with_format("numpy")
    described = [samples.info.description for samples in (*training, *validation.values())]
    for line in dict.fromkeys(filter(None, described)):
        print0(line)
    if evaluate_only:
        return None, validation
    return concatenate_datasets(training).with_format("numpy"), validation


def sample(name: str, split: str, samples: Dataset, limit: int, *_: Any) -> Dataset:
    """Return `limit` random samples of any set (0: all), the same in every run."""
    if 0 < limit < len(samples):
        indices = random.Random(0).sample(range(len(samples)), limit)
        samples = samples.select(sorted(indices))
    return samples


def hold_out(name: str, samples: Dataset) -> Parts:
    """Split samples into `train` and `validation`: those with the lowest hashes in the column
    `key`, at most 5%, or the last ones if there is none. Equal hashes stay together. Raise Problem
    if the lowest one has more rows."""
    keys = np.arange(len(samples), 0, -1)
    if "key" in samples.column_names:
        keys = samples.with_format("numpy")["key"][:]
    count = max(1, len(keys) // 20)
    is_held_out = keys < np.sort(keys)[: count + 1][-1]
    if not is_held_out.any():
        raise Problem(f"{name} has too few different rows to hold some out. Pass --val-dataset.")
    parts = {"train": ~is_held_out, "validation": is_held_out}
    return {part: samples.select(np.flatnonzero(mask)) for part, mask in parts.items()}
