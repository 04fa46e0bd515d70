"""Columns of rows, by their names: those of a format, or those that flags name. One line names all
others, which are left out. Any rank may call these functions."""

import itertools
import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from core.ranks import Problem

FEW = 3  # values of a column that are printed
EMPTY = {"None", "", "[]", "{}"}  # values, as text, that say nothing
MORE = ("tools", "system", "system_prompt")  # columns that are read beside chats
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


def forms_of(flags: str, names: str, *more: str) -> list:
    """Return the forms that `names` lists, such as "question answer, prompt response"."""
    return [Form(flags, tuple(columns.split()), more) for columns in names.split(", ")]


def find_form(name: str, names: list, forms: list, args: Any) -> Form:
    """Return which of the columns `names` of a data set are read: those that flags name, or those
    of one of `forms`. With several data sets, the flags are for those that have the columns. Raise
    Problem if nothing fits, or several forms do."""
    chosen = named_forms(forms, args)
    # One column that is named twice does not fit.
    fitting = [form for form in chosen if len({*form.columns} & {*names}) == len(form.columns)]
    if not fitting and (not chosen or len(args.dataset + args.val_dataset) > 1):
        fitting = [form for form in forms if {*form.columns} <= {*names}]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        problem = "fits several formats"
        choices = [form.flags.format(*map(shlex.quote, form.columns)) for form in fitting]
    else:
        named = [form.flags.format(*form.columns) for form in chosen]
        problem = f"has no {' or '.join(named or ['known format'])}"
        choices = dict.fromkeys(form.flags.format("NAME", "NAME") for form in forms)
    raise Problem(
        f"Data set {name} {problem}. Its columns are: {', '.join(names)}. Pass "
        f"{' or '.join(choices)}. If these are not names, the first line of a CSV file must name "
        "them. An object must be columns of its own."
    )


def named_forms(forms: list, args: Any) -> list:
    """Return the forms whose columns the flags in `args` name. Beside these, the same columns are
    read as in the form with these columns, or in the first one with these flags."""
    named = {}
    for form in forms:
        words = re.findall("[a-z]+_column", form.flags.replace("-", "_"))
        columns = tuple(getattr(args, word) for word in words)
        if form.flags == CHAT and args.completion_column:
            continue  # --prompt-column is that of pairs
        if any(columns) and (form.flags not in named or form.columns == columns):
            named[form.flags] = Form(form.flags, columns, form.more, is_named=True)
    return [*named.values()]


def values_of(items: list, used: Collection) -> dict:
    """Return the different values, as text, of each key of rows or turns that is not `used`: all,
    or FEW and one more. A key that an item lacks has the value None; a set has several values."""
    values = {}
    for key in dict.fromkeys(itertools.chain(*items)):
        if key in used:
            continue
        seen = set()
        for item in items:
            value = item.get(key)
            seen |= value if isinstance(value, set) else {str(value)}
        values[key] = sorted(seen)[: FEW + 1]
    return values


def describe(name: str, used: list, parts: list) -> str:
    """Return the line about a data set: which columns are `used`, and which columns and keys of
    turns are not, with the values in all `parts` of those that have at most FEW. Raise Problem if a
    column `split` has several."""
    groups = {"left out": [], "empty": []}
    for key in dict.fromkeys(itertools.chain(*parts)):
        values = set()
        for part in parts:
            values.update(part.get(key, ["None"]))
        few = ", ".join([" ".join(value.split())[:30] for value in sorted(values)[:FEW]])
        if key.lower() == "split" and len(values) > 1:
            raise Problem(f"{name} has rows of several splits: {few}. Write a file of each.")
        label = key or "a column without a name"
        if values <= EMPTY:
            groups["empty"].append(label)
        else:
            groups["left out"].append(f"{label} ({few})" if len(values) <= FEW else label)
    line = f"{name}: uses {' and '.join(used)}"
    for title, labels in groups.items():
        if labels:
            line += f"; {title}: {', '.join(labels)}"
    return line
