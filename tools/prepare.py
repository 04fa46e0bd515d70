"""Write the tokens that a script would train on to OUTPUT_DIR/prepared, for its --dataset.

    python tools/prepare.py llama_fsdp.py --dataset chats.jsonl --output-dir output/data
    torchrun --nproc_per_node 8 llama_fsdp.py --dataset output/data/prepared

Takes the script's flags. Needs no GPU, and downloads no weights. The losses are then those of the
data, bit for bit. prepared.json, beside the tokens, says what they were made with: a run with
another tokenizer, template or other flags of data is refused.
"""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any directory

import datasets

import prepared_dataset
from core import ranks, weights


def prepare(script: ModuleType, args: Any) -> Path:
    """Write the training and the validation set; return their directory. Raise Problem if there are
    several validation sets, or if the directory exists."""
    path = args.run.output_dir / "prepared"
    if path.exists():
        raise ranks.Problem(f"{path} exists. Delete it, or pass another --output-dir.")
    name = args.model.model_name
    if name != "tiny":  # a directory without weights
        name = str(weights.find_directory(name, weights.SETTINGS))
    model = script.MODEL, script.OTHER_SCRIPT, script.TINY_CONFIG
    *_, tokenizer = weights.open_model(name, *model)
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
    datasets.DatasetDict(rows).save_to_disk(path)
    notes["made_with"] = prepared_dataset.made_with(args.data, tokenizer)
    notes["dataset"] = args.data.dataset
    (path / prepared_dataset.NOTES).write_text(json.dumps(notes, indent=1))
    return path


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
