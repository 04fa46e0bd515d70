"""The loss of a causal model, computed from the logits of CHUNK tokens at a time.

The gradients are computed in the forward pass, while a chunk's logits are there: the whole logits
[positions, vocabulary] are never in memory.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

CHUNK = 1024  # positions


class LossHead(nn.Linear):
    """An output head that returns the summed loss if it gets targets, otherwise the logits.

    `head` is the model's own. `token_loss` takes logits [positions, vocabulary] in fp32 and int64
    targets [positions], and returns a sum over the targets that are not -100. The loss is part of
    this module's forward, because FSDP gathers the weight only there.
    """

    def __init__(self, head: nn.Linear, config: PretrainedConfig, token_loss: Callable) -> None:
        super().__init__(head.in_features, head.out_features, bias=head.bias is not None)
        self.scale = getattr(config, "logit_scale", None) or 1.0  # Cohere's name for it
        self.scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite's, the inverse
        self.cap = getattr(config, "final_logit_softcapping", None)
        self.token_loss = token_loss

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits of hidden states [..., width]; given `targets` [positions], return the
        sum of `token_loss` over the chunks of `hidden` [positions, width]."""
        if targets is None:
            return super().forward(hidden)
        if torch.is_grad_enabled():
            return _ChunkedLoss.apply(self, targets, hidden, self.weight, self.bias)
        parts = zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
        return sum(self.token_loss(self.loss_logits(part), labels) for part, labels in parts)

    def loss_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits in fp32, scaled and capped as the model's own forward does."""
        logits = F.linear(hidden, self.weight, self.bias).float()
        if self.scale != 1:
            logits = logits * self.scale
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        return logits


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, head: LossHead, targets: Tensor, hidden: Tensor, *weights: Any) -> Tensor:
        """Return the summed loss; keep its gradients for hidden states, weight and bias."""
        trained = [x for x in weights if x is not None and x.requires_grad]
        inputs = [hidden, *trained] if hidden.requires_grad else trained
        scale = _fp16_scale(hidden, targets)
        total = torch.zeros((), device=hidden.device)
        hidden_gradients, sums = [], []
        for part, labels in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True):
            with torch.enable_grad():
                part = part.detach().requires_grad_(hidden.requires_grad)
                loss = head.token_loss(head.loss_logits(part), labels)
            total += loss.detach()
            if not inputs:
                continue
            leaves = [part, *trained] if hidden.requires_grad else trained
            gradients = list(torch.autograd.grad(loss, leaves, scale))
            if hidden.requires_grad:
                hidden_gradients.append(gradients.pop(0))
            if sums:
                sums = [one.add_(x) for one, x in zip(sums, gradients, strict=True)]
            else:  # the sum of several chunks is in fp32, to be rounded once
                sums = [x.float() if len(hidden) > CHUNK else x for x in gradients]
        ctx.save_for_backward(*([torch.cat(hidden_gradients)] if hidden_gradients else []), *sums)
        ctx.scale = scale
        ctx.dtypes = [x.dtype for x in inputs]
        return total

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        """Return the kept gradients times `factor`."""
        factor = (factor / ctx.scale)[None]  # a dimension, as scalars become fp16 or bf16 here
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        results = (torch.mul(g, factor, out=torch.empty_like(g, dtype=dtype)) for g, dtype in pairs)
        return tuple(next(results) if needed else None for needed in ctx.needs_input_grad)


def _fp16_scale(hidden: Tensor, targets: Tensor) -> Tensor:
    """Return a factor that keeps small gradients in fp16, before a loss scale multiplies them; 1 in
    other dtypes. A logit's gradient is at most 1, so those of the weight fit eight times."""
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    if dtype != torch.float16:
        return torch.ones((), device=hidden.device)
    sizes = hidden.abs() * (targets != -100)[:, None]
    sums = [part.sum(0, dtype=torch.float32) for part in sizes.split(CHUNK)]
    return 2**13 / torch.stack(sums).max().clamp(min=1)
