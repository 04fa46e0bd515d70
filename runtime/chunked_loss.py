"""The loss of a causal model, computed from the logits of one chunk of tokens at a time."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
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
        sum of `token_loss` over the chunks of `hidden` [positions, width].

        The backward pass recomputes the logits of each chunk.
        """
        if targets is None:
            return super().forward(hidden)
        total = torch.zeros((), device=hidden.device)
        options = {"use_reentrant": False, "preserve_rng_state": False}
        for chunk in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True):
            total = total + checkpoint(self._chunk_loss, *chunk, **options)
        return total

    def _chunk_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return self.token_loss(self.loss_logits(hidden), targets)

    def loss_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits in fp32, scaled and capped as the model's own forward does."""
        logits = F.linear(hidden, self.weight, self.bias).float()
        if self.scale != 1:
            logits = logits * self.scale
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        return logits
