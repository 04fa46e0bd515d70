"""The loss of a causal model, computed from the logits of one chunk of tokens at a time."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PretrainedConfig

CHUNK = 1024  # positions whose logits are in memory at a time


class LossHead(nn.Linear):
    """An output head that returns the summed loss if it gets targets, otherwise the logits.

    `head` is the model's own. `token_loss` takes logits [positions, vocabulary] in fp32 and int64
    targets [positions], and returns a sum over the targets that are not -100, or a vector of such
    sums. The loss is part of this module's forward, because FSDP gathers the weight only there.
    """

    def __init__(
        self,
        head: nn.Linear,
        config: PretrainedConfig,
        token_loss: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
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
        return self.run_chunks(hidden, targets)[0]

    def run_chunks(
        self, hidden: Tensor, targets: Tensor, factors: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the loss and, if `factors` has its shape, the gradients of (loss * factors).sum()
        for those of hidden states, weight and bias that require one. The weight's gradient is in
        fp32 if there are several chunks, so that the sum is rounded only once."""
        total, hidden_gradients, sums = torch.zeros((), device=hidden.device), [], []
        weights = [w for w in (self.weight, self.bias) if w is not None and w.requires_grad]
        for part, labels in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True):
            with torch.set_grad_enabled(factors is not None):
                part = part.detach().requires_grad_(hidden.requires_grad)
                loss = self.token_loss(self.loss_logits(part), labels)
            total = total + loss.detach()
            inputs = [part, *weights] if hidden.requires_grad else weights
            if factors is None or factors.shape != loss.shape or not inputs:
                continue
            gradients = list(torch.autograd.grad(loss, inputs, factors))
            if hidden.requires_grad:
                hidden_gradients.append(gradients.pop(0))
            if not sums:
                sums = [g.float() if len(hidden) > CHUNK else g for g in gradients]
                continue
            for one_sum, gradient in zip(sums, gradients, strict=True):
                one_sum += gradient
        return total, [torch.cat(hidden_gradients), *sums] if hidden_gradients else sums

    def loss_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits in fp32, scaled and capped as the model's own forward does."""
        logits = F.linear(hidden, self.weight, self.bias).float()
        if self.scale != 1:
            logits = logits * self.scale
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        return logits


def _fp16_scale(hidden: Tensor, targets: Tensor) -> Tensor:
    """Return a factor that keeps small gradients in fp16. A logit's gradient is at most 1, so that
    sums over the targets of a chunk stay below 2**13, one eighth of the largest number."""
    chunks = zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
    sums = [(labels != -100).float() @ part.float().abs() for part, labels in chunks]
    return 2**13 / torch.stack(sums).max().clamp(min=1)


class _ChunkedLoss(torch.autograd.Function):
    """`LossHead.run_chunks`. A scalar's gradients are computed in the forward pass, when the logits
    are in memory; a vector's in the backward pass, when the factor of each term is known."""

    @staticmethod
    def forward(ctx: Any, head: LossHead, targets: Tensor, *inputs: Tensor | None) -> Tensor:
        hidden = inputs[0]
        device = hidden.device.type
        ctx.head, ctx.autocast = head, torch.is_autocast_enabled(device)
        ctx.dtype = torch.get_autocast_dtype(device) if ctx.autocast else hidden.dtype
        ctx.dtypes = [x.dtype for x in inputs if x is not None and x.requires_grad]
        is_fp16 = ctx.dtype == torch.float16
        ctx.scale = (
            _fp16_scale(hidden, targets) if is_fp16 else hidden.new_ones((), dtype=torch.float32)
        )
        loss, gradients = head.run_chunks(hidden, targets, ctx.scale)
        ctx.is_scalar = loss.dim() == 0
        ctx.save_for_backward(*gradients if ctx.is_scalar else (hidden, targets))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients, factor = ctx.saved_tensors, upstream
        if not ctx.is_scalar:
            # Divided by their maximum, the factors of a loss and an accuracy are 1 and 0.
            factor = upstream.abs().max().clamp(min=1e-30)
            with torch.autocast(upstream.device.type, ctx.dtype, ctx.autocast):
                _, gradients = ctx.head.run_chunks(*gradients, upstream / factor * ctx.scale)
        # With a dimension, the factor stays in fp32: 65,536 is infinite in fp16.
        factor = (factor / ctx.scale).reshape(1)
        results = (
            torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return tuple(next(results) if needed else None for needed in ctx.needs_input_grad)
