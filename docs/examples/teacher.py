"""Distillation of a teacher model, for docs/change-a-script.md. Each rank holds it whole."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Teacher:
    """A model whose logits are targets. It is no part of the trained model, so FSDP ignores it."""

    def load(self, model: nn.Module, device: torch.device) -> None:
        """Set the model, which must have the same vocabulary."""
        self.model = model.to(device).eval().requires_grad_(False)

    def loss(self, inputs: dict[str, Tensor], logits: Tensor, labels: Tensor) -> Tensor | int:
        """Return the divergence from the teacher, summed over the labels that are not -100; in
        validations 0."""
        if not torch.is_grad_enabled():
            return 0
        with torch.no_grad():
            expected = self.model(**inputs, use_cache=False).logits
        is_target = labels != -100
        own, other = (x[is_target].float().log_softmax(-1) for x in (logits, expected))
        return F.kl_div(own, other, reduction="sum", log_target=True)
