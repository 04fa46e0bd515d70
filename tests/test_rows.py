"""readers.Rows gives what a Dataset gives, without making lists."""

from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, Features, List, Value, concatenate_datasets, load_from_disk
from runtime.rows.readers import Rows

from runtime.identity import as_lists

FEATURES = Features({"ids": List(Value("int32")), "count": Value("int64")})


def dataset(directory: Path) -> Dataset:
    """Lists of 0 to 6 numbers, in a file of several chunks."""
    rows = {"ids": [list(range(i, i + i % 7)) for i in range(50)], "count": list(range(50))}
    parts = Dataset.from_dict(rows, features=FEATURES)
    parts.save_to_disk(directory, num_shards=3)
    return load_from_disk(directory)


@pytest.mark.parametrize("how", ["whole", "selected", "selected twice", "joined", "renamed"])
def test_the_same_as_the_dataset(how: str, tmp_path: Path) -> None:
    """Whatever was done to it before."""
    rows = dataset(tmp_path)
    if how.startswith("selected"):
        rows = rows.select([40, 3, 3, 17, 49, 0])
    if how == "selected twice":
        rows = rows.select([5, 1])
    if how == "joined":
        rows = concatenate_datasets([rows.select([1, 30]), rows, rows.select(range(3))])
    if how == "renamed":
        rows = rows.rename_column("ids", "tokens").select_columns(["count", "tokens"])
    found = Rows(rows)
    assert len(found) == len(rows)
    assert as_lists([found[i] for i in range(len(rows))]) == list(rows)
    order = list(range(len(rows)))[::-1]
    assert as_lists(found.__getitems__(order)) == rows.__getitems__(order)


def test_nothing_is_copied(tmp_path: Path) -> None:
    """An array is a view of the mapped file, which nobody can write to."""
    ids = Rows(dataset(tmp_path))[6]["ids"]
    assert isinstance(ids, np.ndarray) and ids.dtype == np.int32
    assert not ids.flags.owndata and not ids.flags.writeable
