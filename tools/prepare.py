"""Write the tokens that a script would train on to OUTPUT_DIR/prepared, for its --dataset.

    python tools/prepare.py llama_fsdp.py --dataset chats.jsonl --output-dir output/data
    torchrun --nproc_per_node 8 llama_fsdp.py --dataset output/data/prepared

Takes the script's flags. Needs no GPU, and downloads no weights. The losses are then those of the
data, bit for bit. prepared.json, beside the tokens, says what they were made with: a run with
another tokenizer, another template or smaller lengths is refused.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any directory

import datasets
import pyarrow.compute as compute
from transformers import ByT5Tokenizer

import prepared_dataset
from core import ranks, weights


def prepare(args: Any) -> Path:
    """Write the training and the validation set; return their directory. Raise Problem if there are
    several validation sets, or if the directory exists."""
    path = args.run.output_dir / "prepared"
    if path.exists():
        raise ranks.Problem(f"{path} exists. Delete it, or pass another --output-dir.")
    tokenizer = ByT5Tokenizer()
    if args.model.model_name != "tiny":
        directory = weights.find_directory(args.model.model_name, weights.SETTINGS)
        tokenizer = weights.load_tokenizer(directory)
    data_module = sys.modules[type(args.data).__module__]  # with the section of its flags
    stops = []
    if hasattr(data_module, "set_chat_template"):
        stops = data_module.set_chat_template(tokenizer, args.data)
    train_set, val_sets = data_module.load(args.data, tokenizer)
    if len(val_sets) > 1:
        raise ranks.Problem(f"There are {len(val_sets)} validation sets. Pass one --dataset, or "
                            "one --val-dataset.")  # fmt: skip
    parts = {"train": train_set, "validation": next(iter(val_sets.values()))}
    rows = {split: getattr(samples, "dataset", samples) for split, samples in parts.items()}
    datasets.DatasetDict(rows).save_to_disk(path)
    notes = {
        "largest_token": max(map(largest_token, rows.values())),
        "made_with": prepared_dataset.made_with(args.data, tokenizer),
        "flags": vars(args.data),
        "chat_template": tokenizer.chat_template,
        "stops": stops,
    }
    text = json.dumps(notes, indent=1, default=str)
    (path / prepared_dataset.NOTES).write_text(text)
    return path


def largest_token(samples: datasets.Dataset) -> int:
    """Return the largest token in the columns of samples."""
    columns = {"input_ids", "labels"}.intersection(samples.column_names)
    return max(compute.max(compute.list_flatten(samples.data[x])).as_py() for x in columns)


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
    print(f"Pass --dataset {prepare(args)} to train on these tokens.")


if __name__ == "__main__":
    ranks.run(main, sys.argv[1:])
