"""--evaluate-only and --export-only. Without this file, a script only trains. All ranks call `load`
and `run` together; the other functions need one rank."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from core import checkpoint, ranks
from core.ranks import Problem
from core.weights import Shapes


@dataclass
class Only:
    """What to do in place of training."""

    evaluate_only: bool = False
    """validate --model-name, or with --export-only what is exported"""
    export_only: bool = False
    """export the newest checkpoint to final/"""


def choose_checkpoint(args: Any, newest: Path | None) -> Path | None:
    """Return `newest`, or None if the weights of --model-name are evaluated. Raise Problem if they
    are not those of the run in --output-dir."""
    only = args.only
    name = args.model.model_name
    output = args.run.output_dir
    has_adapters = hasattr(args, "adapters") and args.adapters.lora_rank > 0
    is_checkpoint = only.export_only or (only.evaluate_only and has_adapters)
    if is_checkpoint and newest is None:
        raise Problem("There is no checkpoint in --output-dir. Pass that of a run.")
    if is_checkpoint or not only.evaluate_only:
        return newest
    parent = Path(name).absolute().parent  # best/ and final/ may be links
    if newest is not None and parent.resolve() != output.resolve():
        raise Problem(f"--model-name {name} is not the run in {output}. Pass --model-name "
                      f"{output}/final, or --export-only and all flags of the run.")  # fmt: skip
    return None


def choose_data(only: Only, load: Callable) -> Callable:
    """Return a function like `load`, the data module's, that loads only what is needed."""
    if only.evaluate_only:
        return partial(load, evaluate_only=True)
    return (lambda: (None, {})) if only.export_only else load


def load(args: Any, newest: Path | None, model: nn.Module, shapes: Shapes, more: dict) -> None:
    """Load the weights of `newest` that are evaluated or exported. Raise Problem if they are of a
    different run; `more` is compared besides the model."""
    if newest is not None and (args.only.evaluate_only or args.only.export_only):
        identity = {"model": checkpoint.model_identity(model, shapes), **more}
        checkpoint.compare_runs(newest, identity, {})
        keys = checkpoint.Reader(newest).read_metadata().state_dict_metadata
        names = {key.removeprefix("model.") for key in keys}  # adapters freeze the others
        checkpoint.load_weights(newest, model, names)


def run(
    script: ModuleType, args: Any, device: torch.device, model: nn.Module, tokenizer: Tokenizer,
    collate: Callable, val_sets: dict,
) -> None:  # fmt: skip
    """If flags ask for it, write final/, evaluation.json, or both, by functions of `script`, and
    end the process; otherwise return."""
    only = args.only
    output = args.run.output_dir
    if only.export_only:
        script.export_model(model, tokenizer, output / "final", args.run.export_dtype)
    if only.evaluate_only:
        if hasattr(script, "checks"):  # an optional module, as rouge
            losses = script.summed_loss, script.token_loss
            script.checks.check_model(args, device, model, *losses, collate)
        results = script.validation(args, device, model, collate, val_sets, ranks.StopRequest())
        if hasattr(script, "rouge"):
            results |= script.rouge.evaluate(args, device, model, tokenizer, collate, val_sets)
        path = output / "evaluation.json"
        text = json.dumps(results | {"arguments": asdict(args)}, indent=1, default=str)
        ranks.on_rank_zero(path.write_text, text)
        ranks.print0(f"{json.dumps(results, indent=1)}\nThe results are in {path}")
    if only.export_only or only.evaluate_only:
        ranks.finish()
