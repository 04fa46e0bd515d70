"""best/: the weights with the lowest validation loss. Without this file, there is only final/. All
ranks call each function together."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from core.checkpoint import State
from core.ranks import on_rank_zero, print0


@dataclass
class Best:
    """Whether the best weights are kept."""

    save_best: bool = True
    """export best/ after each validation with the lowest loss so far"""


def write(
    args: Any, state: State, loss: float, export: Callable, model: nn.Module, check_stop: Callable
) -> float:  # fmt: skip
    """Write best/ by `export`, and its step, if `loss` is the lowest, and return it. If that fails,
    print the reason and return inf; then, and after a stop, a resume repeats the validation."""
    path = args.run.output_dir / "best"
    if not (args.best.save_best and loss < state.best_loss):  # NaN is not lower
        return loss
    state.needs_validation = True
    try:
        export(model, model.tokenizer, path, args.run.export_dtype, check_stop)
        on_rank_zero((path / "step").write_text, str(state.step))
    except OSError as error:
        print0(f"best/ could not be written ({error}).")
        return math.inf
    state.needs_validation = False
    return loss


def check(args: Any, state: State, total_steps: int) -> None:
    """Forget the lowest loss if best/ is not of its step, as after a return to an earlier
    checkpoint: the next validation replaces best/. Without a step left, repeat the last one."""
    file = args.run.output_dir / "best/step"
    is_known = on_rank_zero(lambda: file.is_file() and file.read_text() == str(state.best_step))
    if args.best.save_best and not is_known:
        state.best_loss = math.inf
        if state.step >= total_steps:
            state.needs_validation = True


def check_written(state: State) -> None:
    """Raise OSError if best/ could not be written after the last step."""
    if state.needs_validation:
        raise OSError("best/ could not be written. Run the same command again to write it.")
