"""--evaluate-only and --export-only. Without this file, a script only trains. All ranks call
`run` together; the other functions need one rank."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from core import checkpoint, ranks, weights
from core.args import Switch
from core.ranks import Problem


@dataclass
class Only:
    """What to do in place of training."""

    evaluate_only: Switch = False
    """validate --model-name, or with --export-only what is exported"""
    export_only: Switch = False
    """export the newest checkpoint to final/"""


def uses_checkpoint(args: Any) -> bool:
    """Return whether the weights are those of the newest checkpoint: all, or only adapters."""
    has_adapters = hasattr(args, "adapters") and args.adapters.lora_rank > 0
    return has_adapters or args.only.export_only or not args.only.evaluate_only


def choose_checkpoint(args: Any, newest: Path | None) -> Path | None:
    """Return `newest`, or None if the weights of --model-name are evaluated. Raise Problem if they
    are not those of the run in --output-dir."""
    if uses_checkpoint(args):
        return newest
    name, output = args.model.model_name, args.run.output_dir
    parent = Path(name).absolute().parent  # best/ and final/ may be links
    if (output / "checkpoints").is_dir() and parent.resolve() != output.resolve():
        raise Problem(f"--model-name {name} is not the run in {output}. Pass --model-name "
                      f"{output}/final, or --export-only and all flags of the run.")  # fmt: skip
    return None


def choose_data(only: Only, load: Callable) -> Callable:
    """Return a function like `load`, the data module's, that loads only what is needed."""
    if only.evaluate_only:
        return partial(load, evaluate_only=True)
    return no_data if only.export_only else load


def no_data(*_: Any) -> tuple[None, dict]:
    """Return no training set and no validation sets."""
    return None, {}


def run(
    args: Any, device: torch.device, model: nn.Module, tokenizer: Tokenizer, collate: Callable,
    data: tuple, shapes: weights.Shapes, newest: Path | None, scores: Callable, export: Callable,
    more_identity: Callable = lambda *_: {},
) -> None:  # fmt: skip
    """If flags ask for it, write final/ by `export`, evaluation.json by `scores`, or both, and end
    the process; otherwise return. `more_identity` is that of a script which compares more."""
    only, output = args.only, args.run.output_dir
    if not (only.evaluate_only or only.export_only):
        return
    if uses_checkpoint(args):
        if newest is None:
            raise Problem("There is no checkpoint in --output-dir. Pass that of a run.")
        identity = {"model": checkpoint.model_identity(model, shapes)}
        saved = checkpoint.compare_runs(newest, identity)
        if "chat" in saved and not only.evaluate_only:  # the data may not be there
            tokenizer.chat_template = saved["chat"]["template"]
            weights.unwrapped(model).generation_config.eos_token_id = saved["chat"]["ends"]
        checkpoint.compare_runs(newest, more_identity(model, tokenizer))
        # Checkpoints lack weights that adapters freeze.
        keys = checkpoint.Reader(newest).read_metadata().state_dict_metadata
        names = weights.saved_names(model) & {key.removeprefix("model.") for key in keys}
        checkpoint.load_weights(newest, model, names)
    if only.export_only:
        export(model, tokenizer, output / "final", args.run.export_dtype)
    if only.evaluate_only:
        results = scores(args, device, model, tokenizer, collate, data[1])
        write_results(output / "evaluation.json", results, asdict(args))
    ranks.finish()


def write_results(path: Path, results: dict, arguments: dict) -> None:
    """Print results, and write them to a file with the run's arguments."""
    text = json.dumps(results | {"arguments": arguments}, indent=1, default=str)
    ranks.on_rank_zero(path.write_text, text)
    ranks.print0(f"{json.dumps(results, indent=1)}\nThe results are in {path}")
