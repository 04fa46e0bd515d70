"""--evaluate-only and --export-only. Without this file, a script only trains. All ranks call
`run` and `scores` together; the other functions need one rank."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from core import checkpoint, ranks, weights
from core.ranks import Problem


@dataclass
class Only:
    """What to do in place of training."""

    evaluate_only: bool = False
    """validate --model-name, or with --export-only what is exported"""
    export_only: bool = False
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
    return (lambda: (None, {})) if only.export_only else load


def run(names: dict[str, Any]) -> None:
    """If flags ask for it, write final/, evaluation.json, or both, and end the process; otherwise
    return. `names` are those of a script and of its fsdp_main."""
    script = SimpleNamespace(**names)
    args, model, tokenizer = script.args, script.model, script.tokenizer
    only, output = args.only, args.run.output_dir
    if not (only.evaluate_only or only.export_only):
        return
    if uses_checkpoint(args):
        newest = script.newest
        if newest is None:
            raise Problem("There is no checkpoint in --output-dir. Pass that of a run.")
        identity = {"model": checkpoint.model_identity(model, script.shapes)}
        saved = checkpoint.compare_runs(newest, identity, {})
        if "chat" in saved and not only.evaluate_only:  # the data may not be there
            tokenizer.chat_template = saved["chat"]["template"]
            weights.unwrapped(model).generation_config.eos_token_id = saved["chat"]["ends"]
        if hasattr(script, "more_identity"):
            checkpoint.compare_runs(newest, script.more_identity(model, tokenizer), {})
        saved_names = weights.saved_names(model)
        if hasattr(script, "lora"):  # an optional module
            saved_names -= script.lora.frozen_names(model)
        checkpoint.load_weights(newest, model, saved_names)
    if only.export_only:
        script.export_model(model, tokenizer, output / "final", args.run.export_dtype)
    if only.evaluate_only:
        results = scores(script)
        path = output / "evaluation.json"
        text = json.dumps(results | {"arguments": asdict(args)}, indent=1, default=str)
        ranks.on_rank_zero(path.write_text, text)
        ranks.print0(f"{json.dumps(results, indent=1)}\nThe results are in {path}")
    ranks.finish()


def scores(script: SimpleNamespace) -> dict:
    """Return the losses of the validation sets and, if the script has summaries, their scores."""
    args, device, model, collate = script.args, script.device, script.model, script.collate
    _, val_sets = script.data
    if hasattr(script, "checks"):
        losses = script.summed_loss, script.token_loss
        script.checks.check_model(args, device, model, *losses, collate)
    results = script.validation(args, device, model, collate, val_sets, ranks.StopRequest())
    if hasattr(script, "rouge"):
        results |= script.rouge.evaluate(args, device, model, script.tokenizer, collate, val_sets)
    return results
