"""The training and validation sets that are made of the rows of several data sets. Any rank may
call these."""

import random
from collections.abc import Callable
from typing import Any

from datasets import Dataset, concatenate_datasets

from core.ranks import Problem, print0
from prepare import read


def load_sets(args: Any, load_parts: Callable, draw: Callable, evaluate_only: bool) -> tuple:
    """Return the training set, None with `evaluate_only`, and the validation sets by name.

    `load_parts(name)` returns samples by split, `draw(name, split, samples, limit)` at most `limit`
    of them (0: all).
    """
    training = []
    validation = {}
    for name in args.val_dataset:
        parts = load_parts(name)
        validation[name] = parts.get("validation", parts.get("train"))
        if name in args.dataset and "validation" not in parts:
            print0(f"{name} is also trained on: its validation loss will be too low.")
    names = () if evaluate_only and validation else args.dataset
    for name in names:
        parts = load_parts(name)
        if "train" not in parts:
            raise Problem(f"{name} has no split train. Pass another one: {name}:SPLIT.")
        if not args.val_dataset:
            if "validation" not in parts:
                parts = read.hold_out(name, parts["train"])
            validation[name] = parts["validation"]
        if not evaluate_only:
            training.append(draw(name, "train", parts["train"], args.num_train_samples))
    for name, samples in validation.items():
        drawn = draw(name, "validation", samples, args.num_val_samples)
        validation[name] = drawn.with_format("numpy")
    if evaluate_only:
        return None, validation
    return concatenate_datasets(training).with_format("numpy"), validation


def sample(name: str, split: str, samples: Dataset, limit: int) -> Dataset:
    """Return `limit` random samples of any set (0: all), the same in every run."""
    if 0 < limit < len(samples):
        indices = random.Random(0).sample(range(len(samples)), limit)
        samples = samples.select(sorted(indices))
    return samples
