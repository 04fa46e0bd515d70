"""RMS norms by PyTorch's kernel. Without this file, Transformers computes them in six kernels."""

import functools

import torch
import torch.nn.functional as F
from torch import nn


def fuse(model: nn.Module) -> None:
    """Replace the forward of plain RMS norms by PyTorch's, one kernel, not six. They are found by
    Transformers' name of their epsilon."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.__class__ = _fused_class(type(module))


@functools.cache
def _fused_class(norm_class: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a plain RMS norm, or the class itself if it computes something else,
    such as Gemma's 1 + weight. All layers share it, so torch.compile shares graphs."""

    def forward(self: nn.Module, hidden: torch.Tensor, *gate: torch.Tensor) -> torch.Tensor:
        if gate or hidden.dtype != self.weight.dtype:  # models differ in the dtype of the result
            return norm_class.forward(self, hidden, *gate)
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.variance_epsilon)

    try:
        norm = norm_class(16)
        norm.weight.data = torch.linspace(-1, 2, 16)
        vectors = torch.outer(torch.tensor([1e-4, 1e-2, 1, 100]), norm.weight.roll(1))
        is_plain = torch.allclose(forward(norm, vectors), norm(vectors), 1e-6, 0)
    except (AttributeError, TypeError):  # other arguments
        is_plain = False
    return (
        type(norm_class.__name__, (norm_class,), {"forward": forward}) if is_plain else norm_class
    )
