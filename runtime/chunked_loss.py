"""The loss of a causal model, computed from the logits of one chunk of tokens at a time."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

CHUNK = 1024  # positions whose logits are in memory at a time


class LossHead(nn.Linear):
    """An output head that returns the summed loss if it gets targets, otherwise the logits.

    `head` is the model's own. `token_loss` takes logits [positions, vocabulary] in fp32 and int64
    targets [positions], and returns a sum over the targets that are not -100, or a vector of such
    sums. The loss is part of this module's forward, because FSDP gathers the weight only there.
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
        return self.run_chunks(hidden, targets)[0]

    def run_chunks(self, hidden: Tensor, targets: Tensor, factors: Tensor | None = None) -> tuple:
        """Return the loss and a list, empty unless `factors` has its shape: the gradients of
        (loss * factors).sum() for those of hidden states, weight and bias that need one. Those of
        several chunks are summed in fp32, to be rounded once."""
        total, hidden_gradients, sums = torch.zeros((), device=hidden.device), [], []
        weights = [w for w in (self.weight, self.bias) if w is not None and w.requires_grad]
        for part, labels in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True):
            with torch.set_grad_enabled(factors is not None):
                part = part.detach().requires_grad_(hidden.requires_grad)
                loss = self.token_loss(self.loss_logits(part), labels)
            total = total + loss.detach()
            if factors is not None and factors.shape == loss.shape and loss.requires_grad:
                inputs = [part, *weights] if hidden.requires_grad else weights
                gradients = list(torch.autograd.grad(loss, inputs, factors))
                hidden_gradients += [gradients.pop(0)] if hidden.requires_grad else []
                if sums:
                    sums = [a.add_(b) for a, b in zip(sums, gradients, strict=True)]
                else:
                    sums = [g.float() if len(hidden) > CHUNK else g for g in gradients]
        return total, [torch.cat(hidden_gradients), *sums] if hidden_gradients else sums

    def loss_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits in fp32, scaled and capped as the model's own forward does."""
        logits = F.linear(hidden, self.weight, self.bias).float()
        if self.scale != 1:
            logits = logits * self.scale
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        return logits


class _ChunkedLoss(torch.autograd.Function):
    """`LossHead.run_chunks` with gradients."""

    @staticmethod
    def forward(ctx: Any, head: LossHead, targets: Tensor, hidden: Tensor, *weights: Any) -> Tensor:
        """Return the loss. A scalar's gradients are computed now, while the logits are there."""
        kind = hidden.device.type
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        ctx.head, ctx.scale = head, torch.ones((), device=hidden.device)
        if torch.float16 == (ctx.autocast[1] if ctx.autocast[2] else hidden.dtype):
            # Keep small gradients. A logit's is at most 1, so those of the weight fit eight times.
            sizes = hidden.abs() * (targets != -100)[:, None]
            sums = [part.sum(0, dtype=torch.float32) for part in sizes.split(CHUNK)]
            ctx.scale = 2**13 / torch.stack(sums).max().clamp(min=1)
        loss, gradients = head.run_chunks(hidden, targets, ctx.scale)
        ctx.dtypes = [x.dtype for x in (hidden, *weights) if x is not None and x.requires_grad]
        ctx.save_for_backward(*(hidden, targets) if loss.dim() else gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients; a vector's need the factor of each term, which is known now."""
        gradients = ctx.saved_tensors
        if factor.dim():  # normalized, so that a logged term leaves the bits of the others alone
            factors = factor
            factor = factor.abs().max().clamp(min=1e-30)
            with torch.autocast(*ctx.autocast):
                _, gradients = ctx.head.run_chunks(*gradients, factors / factor * ctx.scale)
        factor = (factor / ctx.scale)[None]  # a dimension, as scalars become fp16 or bf16 here
        pairs = zip(gradients, ctx.dtypes, strict=True)
        results = (torch.mul(g, factor, out=torch.empty_like(g, dtype=dtype)) for g, dtype in pairs)
        return tuple(next(results) if needed else None for needed in ctx.needs_input_grad)
