"""The seam between whole models and adapters: what of a model is trained, saved and exported.

The rest of this folder asks `of(model)`. A model without adapters is `Whole`; `adapters.Lora` is
the other answer, in a file that a copy may leave out.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import hf_export, models


class Whole:
    """All weights are trained, saved and exported."""

    is_part = False  # or a checkpoint holds but some of the weights

    def identity(self, args: Namespace, model: nn.Module) -> dict[str, Any]:
        """Return what else must not differ between a run and its continuation."""
        if getattr(args, "lora_rank", 0):
            raise ValueError("--lora-rank: load_model has added no adapters to this model")
        return {}

    def is_saved(self, name: str) -> bool:
        """Return whether a checkpoint holds the tensor called `name`."""
        return True

    def is_in_files(self, name: str) -> bool:
        """Return whether the pretrained model's files hold the tensor called `name`."""
        return True

    def initialize(self, model: PreTrainedModel, module: nn.Module, name: str) -> None:
        """Initialise a module that no file holds; `name` is its weight's."""
        model._init_weights(module)

    def exported_bytes(self, args: Namespace, trained: int, whole: int) -> int:
        """Return the size of an export of so many `trained` parameters, of `whole` in all."""
        return models.EXPORT_DTYPES[args.export_dtype].itemsize * whole

    def export(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, path: Path, args: Namespace
    ) -> None:
        """Write the wrapped model as a Hugging Face directory; all ranks."""
        hf_export.export_model(model, tokenizer, path, args)


def of(model: nn.Module) -> Whole:
    """Return the answer for a model, wrapped or not."""
    return getattr(models.unwrapped(model), "trained", None) or Whole()
