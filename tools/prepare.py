"""Write the tokens that a script would train on to OUTPUT_DIR/prepared, for its --dataset.

    python tools/prepare.py llama_fsdp.py --dataset chats.jsonl --output-dir output/data
    torchrun --nproc_per_node 8 llama_fsdp.py --dataset output/data/prepared

Takes the script's flags. Needs no GPU, and downloads no weights. The losses are then those of the
data, bit for bit. prepared.json, beside the tokens, says what they were made with: a run with
another tokenizer, template or other flags of data is refused.
"""

import importlib
import json
import shutil
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any directory

import datasets
import pyarrow.compute as compute

import prepared_dataset
from core import ranks, weights
from core.checkpoint import crc_of


def prepare(script: ModuleType, args: Any) -> Path:
    """Write the training and the validation set; return their directory, which has its name only
    when it is complete. Raise Problem if there are several validation sets, or if it exists."""
    path = args.run.output_dir / "prepared"
    if path.exists():
        raise ranks.Problem(f"{path} exists. Delete it, or pass another --output-dir.")
    name = args.model.model_name
    if name != "tiny":  # a directory without weights
        name = str(weights.find_directory(name, weights.SETTINGS))
    *_, tokenizer = weights.open_model(name, script.MODEL, script.TINY_CONFIG)
    data_module = sys.modules[type(args.data).__module__]  # with the section of its flags
    notes = {}
    if hasattr(data_module, "set_chat_template"):
        notes["stops"] = data_module.set_chat_template(tokenizer, args.data)
        notes["chat_template"] = tokenizer.chat_template
    train_set, val_sets = data_module.load(args.data, tokenizer)
    if len(val_sets) > 1:
        raise ranks.Problem(f"There are {len(val_sets)} validation sets. Pass one --dataset, or "
                            "one --val-dataset.")  # fmt: skip
    parts = {"train": train_set, "validation": next(iter(val_sets.values()))}
    rows = {split: getattr(samples, "dataset", samples) for split, samples in parts.items()}
    notes["made_with"] = prepared_dataset.made_with(args.data, tokenizer)
    notes["dataset"] = args.data.dataset
    notes["data"] = rows["train"].info.description
    write(rows, notes, path)
    return path


def write(rows: dict[str, datasets.Dataset], notes: dict, path: Path) -> None:
    """Write data sets by split to the directory `path`, and beside them `notes`, for JSON, with the
    highest token id, a CRC of each file, and one of the notes."""
    temporary = path.with_name(f"tmp-{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
    datasets.DatasetDict(rows).save_to_disk(temporary)
    notes["highest_id"] = max(map(highest_id, rows.values()))
    notes["files"] = {
        str(file.relative_to(temporary)): zlib.crc32(file.read_bytes())
        for file in temporary.glob("**/*.*")
    }
    notes["crc"] = crc_of(notes)
    (temporary / prepared_dataset.NOTES).write_text(json.dumps(notes, indent=1))
    temporary.rename(path)


def highest_id(samples: datasets.Dataset) -> int:
    """Return the highest token id in a data set."""
    columns = {"input_ids", "labels"}.intersection(samples.column_names)
    table = samples.with_format("arrow")
    return max(compute.max(compute.list_flatten(table[name][:])).as_py() for name in columns)


def main(words: list[str]) -> None:
    """Prepare the data of a script and its flags."""
    path = Path(words[0] if words else "SCRIPT")
    if not path.is_file():
        raise ranks.Problem(f"{path} does not exist. Pass a training script, then its flags.")
    sys.path.insert(0, str(path.resolve().parent))  # its data module may be there, too
    script = importlib.import_module(path.stem)
    sys.argv = words
    args = script.parse_args()
    ranks.setup(args.run.timeout_minutes)
    print(f"Pass --dataset {prepare(script, args)} to train on these tokens.")


if __name__ == "__main__":
    ranks.run(main, sys.argv[1:])
