"""Columns of rows, by their names: those of a format, or those that flags name. One line names all
others, which are left out. Any rank may call these functions."""

import itertools
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from core.ranks import Problem

FEW = 3  # values of a column that are printed
EMPTY = {"None", "", "[]", "{}"}  # values, as text, that say nothing
CHAT = "--prompt-column {}"
PAIR = "--prompt-column {} --completion-column {}"


@dataclass
class Form:
    """The `columns` of a format, `more` that are read if rows have them, and the `flags` that name
    such columns. `is_named`: these flags were passed."""

    flags: str
    columns: tuple
    more: tuple = ()
    is_named: bool = False

    def fits(self, names: list) -> bool:
        """Return whether these are different columns, and all among `names`."""
        return len({*self.columns} & {*names}) == len(self.columns)


def forms_of(flags: str, names: str, *more: str) -> list:
    """Return the forms that `names` lists, such as "question answer, prompt response"."""
    return [Form(flags, tuple(columns.split()), more) for columns in names.split(", ")]


def find_form(name: str, names: list, forms: list, named: dict, args: Any) -> Form:
    """Return which of the columns `names` of a data set are read: those `named`, by flags, or those
    of one of `forms`. With several data sets, the flags are for those that have the columns. Raise
    Problem if nothing fits, or several forms do."""
    chosen = []
    for flags, columns in named.items():
        if any(columns):
            # Beside other columns, the same may be read as in the first format of this kind.
            alike = [form for form in forms if form.flags == flags]
            same = [form for form in alike if form.columns == columns]
            chosen.append(Form(flags, columns, (same or alike)[0].more, is_named=True))
    fitting = [form for form in chosen if form.fits(names)]
    if not fitting and (not chosen or len(args.dataset + args.val_dataset) > 1):
        fitting = [form for form in forms if form.fits(names)]
    if any(form.flags == CHAT for form in fitting):  # pairs beside chats are left out
        fitting = [form for form in fitting if form.flags != PAIR]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        problem = "fits several formats"
        choices = [form.flags.format(*map(shlex.quote, form.columns)) for form in fitting]
    else:
        missing = [str(column) for form in chosen for column in form.columns if column not in names]
        problem = f"has no column {' or '.join(missing)}" if missing else "has no known format"
        choices = dict.fromkeys(form.flags.format("NAME", "NAME") for form in forms)
    raise Problem(
        f"Data set {name} {problem}. Its columns are: {', '.join(names)}. Pass "
        f"{' or '.join(choices)}. If these are not names, the first line of a CSV file must name "
        "them. An object must be columns of its own."
    )


def values_of(items: list, used: Collection = ()) -> dict:
    """Return the different values, as text, of each key of rows or turns that is not `used`: all,
    or FEW and one more. A key that an item lacks has the value None."""
    values = {key: [] for key in dict.fromkeys(itertools.chain(*items)) if key not in used}
    for key, seen in values.items():
        for item in items:
            if len(seen) <= FEW and str(item.get(key)) not in seen:
                seen.append(str(item.get(key)))
    return values


def describe(name: str, used: list, parts: list) -> str:
    """Return the line about a data set: which columns are `used`, and which columns and keys of
    turns are not, with the values in all `parts` of those that have at most FEW. Raise Problem if a
    column `split` has several."""
    others = []
    empty = []
    for key in dict.fromkeys(itertools.chain(*parts)):
        lists = [part.get(key, ["None"]) for part in parts]
        values = sorted({*itertools.chain(*lists)})
        few = ", ".join([" ".join(value.split())[:30] for value in values[:FEW]])
        if key.lower() == "split" and len(values) > 1:
            raise Problem(f"{name} has rows of several splits: {few}. Write a file of each.")
        label = key or "a column without a name"
        if EMPTY.issuperset(values):
            empty.append(label)
        else:
            others.append(f"{label} ({few})" if len(values) <= FEW else label)
    line = f"{name}: uses {' and '.join(used)}"
    if others:
        line += f"; left out: {', '.join(others)}"
    if empty:
        line += f"; empty: {', '.join(empty)}"
    return line
