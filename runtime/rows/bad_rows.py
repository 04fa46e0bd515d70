"""Rows that cannot be used: named, or left out and counted. Names no model and no task.

A map that makes samples of rows writes each sample's row, and what is wrong with it, into the two
columns of ORIGIN, so that this comes back from other processes and from the cache.
"""

from collections import defaultdict

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, Value

from .json_rows import place
from .readers import shortened

ORIGIN = {"row": Value("int64"), "problem": Value("string")}  # rows from 1; "" if it is good
SHOWN = 10  # reasons at most that are told
NAMED = 3  # rows at most that are named of each
CHOICES = ["fail", "skip"]
HELP = "skip: leave out rows that cannot be used, up to half, and say which"
ADVICE = "--bad-rows skip leaves such rows out"


def problem(name: str, number: int, error: Exception, bad_rows: str) -> str:
    """Return what is wrong with a row, for the column problem; ValueError if `bad_rows` is fail.

    So a run that would not go on ends at the first bad row, before the others are mapped.
    """
    reason = shortened(str(error)) or type(error).__name__
    if bad_rows == "fail":
        raise ValueError(f"{name}, {place(name, number)}: {reason} ({ADVICE})") from error
    return reason


def good_rows(name: str, rows: Dataset, bad_rows: str, verbose: bool) -> Dataset:
    """Return mapped rows without the bad ones, and without the columns of ORIGIN.

    `verbose` prints what is left out. Raises ValueError if there is a bad row and `bad_rows` is
    fail (the cache may hold rows mapped under skip), or if more than half of all are bad.
    """
    origin = rows.with_format("arrow", list(ORIGIN))[:]
    numbers = origin["row"].to_numpy()
    is_bad = pc.not_equal(origin["problem"], "").to_numpy()
    bad = {int(numbers[i]): origin["problem"][i].as_py() for i in np.flatnonzero(is_bad)}
    leave_out(name, bad, len(np.unique(numbers)), bad_rows, verbose)
    rows = rows.remove_columns(list(ORIGIN))
    if not bad:
        return rows
    return rows.select(np.flatnonzero(~is_bad))


def leave_out(name: str, bad: dict[int, str], total: int, bad_rows: str, verbose: bool) -> None:
    """Print which of `total` rows are left out, and why: `bad` has the reasons by their numbers.

    Raises ValueError if there is one and `bad_rows` is fail, or if they are more than half.
    """
    if not bad:
        return
    number, reason = next(iter(bad.items()))
    if bad_rows == "fail":
        raise ValueError(f"{name}, {place(name, number)}: {reason} ({ADVICE})")
    share = f"{len(bad):,} of {total:,} rows"
    if 2 * len(bad) > total:
        raise ValueError(
            f"{name}: {share} are bad, of which --bad-rows skip leaves out half at most; "
            f"the first is {place(name, number)}: {reason}"
        )
    if verbose:
        say_bad_rows(name, share, bad)


def say_bad_rows(name: str, share: str, bad: dict[int, str]) -> None:
    """Print the commonest reasons, each with the first rows that are left out for it."""
    rows_of = defaultdict(list)
    for number, reason in bad.items():
        rows_of[reason].append(number)
    print(f"{name}: {share} left out")
    by_count = sorted(rows_of.items(), key=lambda item: -len(item[1]))
    for reason, numbers in by_count[:SHOWN]:
        places = [place(name, number) for number in numbers[:NAMED]]
        if len(numbers) > NAMED:
            places.append("...")
        print(f"  {len(numbers):,}: {reason} ({', '.join(places)})")
    if others := sum(len(numbers) for _, numbers in by_count[SHOWN:]):
        print(f"  {others:,}: other reasons", flush=True)
