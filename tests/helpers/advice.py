"""The flags in messages of the scripts."""

import shlex


def flags_of(advice: str) -> dict[str, object]:
    """Return the flags in an advice, such as `--ignore-columns a b`, as fields of a data module's
    section."""
    flags = {}
    for word in shlex.split(advice):
        if word.startswith("--"):
            values = flags[word[2:].replace("-", "_")] = []
        else:
            values.append(word)
    return {name: tuple(x) if name == "ignore_columns" else x[0] for name, x in flags.items()}
