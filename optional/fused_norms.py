"""RMS norms by PyTorch's kernel. Without this file, Transformers computes them in six kernels."""

import functools

import torch
import torch.nn.functional as F
from torch import nn


def fuse(model: nn.Module, own: type[nn.Module], norms: tuple[type, ...]) -> None:
    """Replace the forward of plain RMS norms by PyTorch's, one kernel, not six: of the classes
    `norms` in a model of class `own`, in others of all that have a `variance_epsilon`."""
    is_own = isinstance(model, own)
    for module in model.modules():
        is_norm = isinstance(module, norms) if is_own else hasattr(module, "variance_epsilon")
        if is_norm:
            module.__class__ = _fused_class(type(module))


@functools.cache
def _fused_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a plain RMS norm, or `kind` itself if it computes something else, such
    as Gemma's 1 + weight. All layers share it, so torch.compile shares graphs."""

    def forward(self: nn.Module, hidden: torch.Tensor, *gate: torch.Tensor) -> torch.Tensor:
        if gate or hidden.dtype != self.weight.dtype:  # models differ in the dtype of the result
            return kind.forward(self, hidden, *gate)
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.variance_epsilon)

    try:
        norm = kind(16)
        norm.weight.data = torch.linspace(-1, 2, 16)
        vectors = torch.outer(torch.tensor([1e-4, 1e-2, 1, 100]), norm.weight.roll(1))
        is_plain = torch.allclose(forward(norm, vectors), norm(vectors), 1e-6, 0)
    except (AttributeError, TypeError):  # other arguments
        is_plain = False
    return type(kind.__name__, (kind,), {"forward": forward}) if is_plain else kind
