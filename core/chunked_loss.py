"""The loss of a causal model from the logits of CHUNK tokens at a time. Its gradients are computed
in the forward pass: the whole logits [positions, vocabulary] are never in memory."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

CHUNK = 1024  # positions


class LossHead(nn.Linear):
    """An output head that returns the summed loss if it gets targets, otherwise the logits: FSDP
    gathers its weight only in its forward.

    `head` is the model's own. `token_loss` takes fp32 logits [positions, vocabulary] and int64
    targets [positions], and returns the sum over those that are not -100.
    """

    def __init__(self, head: nn.Linear, config: PretrainedConfig, token_loss: Callable) -> None:
        super().__init__(head.in_features, head.out_features, bias=head.bias is not None)
        # Cohere's name, and Granite's for the inverse.
        scale = getattr(config, "logit_scale", None) or 1.0  # MPT has None
        self.scale = scale / getattr(config, "logits_scaling", 1.0)
        self.cap = getattr(config, "final_logit_softcapping", None)
        self.token_loss = token_loss

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits of hidden states [..., width]; given `targets` [positions], return the
        sum of `token_loss` over the chunks of `hidden` [positions, width]."""
        if targets is None:
            return super().forward(hidden)
        if torch.is_grad_enabled():
            return _ChunkedLoss.apply(self, targets, hidden, self.weight, self.bias)
        total = torch.zeros((), device=hidden.device)
        for part, labels in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True):
            total += self.token_loss(self.loss_logits(part, self.weight, self.bias), labels)
        return total

    def loss_logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the logits in fp32, scaled and capped as the model's own forward does."""
        logits = F.linear(hidden, weight, bias).float()
        if self.scale != 1:
            logits = logits * self.scale
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        return logits


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, head: LossHead, targets: Tensor, hidden: Tensor, weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Return the summed loss; keep its gradients for hidden states, weight and bias."""
        # Autocast may choose another dtype for logits.
        dtype = F.linear(hidden[:0], weight).dtype
        if dtype == torch.float16:  # no loss scale keeps these gradients in its range yet
            dtype = torch.float32
        weights = [x.detach().to(dtype) for x in (weight, bias) if x is not None]
        trained = []
        if any(ctx.needs_input_grad[3:]):  # the head is not frozen
            trained = [tensor.requires_grad_() for tensor in weights]
        # Sum the chunks' gradients in fp32, so that they are rounded once.
        sums = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in trained]
        hidden_gradient = torch.empty_like(hidden, dtype=dtype)
        total = torch.zeros((), device=hidden.device)
        for start in range(0, len(hidden), CHUNK):
            chunk = slice(start, start + CHUNK)
            part = hidden[chunk].detach().to(dtype).requires_grad_()
            with torch.enable_grad(), torch.autocast(hidden.device.type, enabled=False):
                loss = head.token_loss(head.loss_logits(part, *weights), targets[chunk])
                part_gradient, *gradients = torch.autograd.grad(loss, [part, *trained])
            hidden_gradient[chunk] = part_gradient
            for gradient_sum, gradient in zip(sums, gradients, strict=True):
                gradient_sum += gradient
            total += loss.detach()
        ctx.save_for_backward(hidden_gradient, *sums)
        return total

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> Any:
        """Return the kept gradients times `factor`; autograd casts them to their inputs' dtypes."""
        # With a dimension, or a scalar would be rounded to bf16 before it multiplies.
        gradients = [gradient.mul_(factor[None]) for gradient in ctx.saved_tensors]
        missing = [None] * (3 - len(gradients))  # of a head that is frozen or has no bias
        return None, None, *gradients, *missing
