"""What a run trains, saves and restores, and what is known of a model before it is wrapped."""

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from transformers import PreTrainedTokenizerBase

from .ranks import local_device
from .weights import whole_shapes

# Fields of State that a checkpoint stores as JSON.
COUNTERS = ("step", "epoch", "consumed", "tokens", "best_loss", "best_step",
            "validation_due", "ended_of")  # fmt: skip
# Keys of param_groups: values of flags or the schedule, and parameters.
SETTINGS = ("lr", "initial_lr", "momentum", "betas", "weight_decay", "params")


@dataclass(frozen=True)
class Facts:
    """What is known of a model before wrapping, which hides names, shapes and sizes. Those of 4-bit
    weights are the ones before packing."""

    tokenizer: PreTrainedTokenizerBase
    attention: str  # the name of its kernel
    adapters: Any  # adapters.Lora, or None
    shapes: dict[str, torch.Size]  # of the parameters, tied ones under the first name only
    trained_size: int  # parameters that are not frozen
    product_weights: int | None  # weights that a token is multiplied with; None with experts

    @property
    def size(self) -> int:
        """Return the number of parameters."""
        return sum(shape.numel() for shape in self.shapes.values())

    @classmethod
    def of(
        cls, model: nn.Module, tokenizer: PreTrainedTokenizerBase,
        attention: str | None = None, adapters: Any = None,
    ) -> "Facts":  # fmt: skip
        """Return the facts of a model on meta."""
        shapes = whole_shapes(model)
        products = 0
        for path, module in model.named_modules():
            if isinstance(module, nn.Embedding):  # looked up, not multiplied
                continue
            for key, parameter in module.named_parameters(recurse=False):
                shape = shapes.get(f"{path}.{key}", parameter.shape)
                products += shape.numel() if len(shape) == 2 else 0
        has_experts = any(len(shape) > 2 for shape in shapes.values())
        return cls(
            tokenizer,
            attention or model.config._attn_implementation,
            adapters,
            shapes,
            trained_size=sum(x.numel() for x in model.parameters() if x.requires_grad),
            product_weights=None if has_experts else products,
        )


@dataclass
class State:
    """What a run trains, saves and restores.

    `others` are further objects with a `state_dict`, such as {"ema": ema}. Tensors and numbers in
    it are saved: DTensors are sharded, and plain tensors belong to each rank.
    """

    model: nn.Module
    facts: Facts
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler
    total_steps: int
    others: dict[str, Any] = field(default_factory=dict)
    step: int = 0  # optimizer steps done
    epoch: int = 0
    consumed: int = 0  # samples of this epoch, of all ranks
    tokens: int = 0  # of all steps and ranks, without padding
    best_loss: float = float("inf")
    best_step: int = 0  # the step whose weights are in best/
    validation_due: bool = False  # the validation of this step was interrupted
    ended_of: int = 0  # the `total_steps` of which the script has ended the run early

    def __post_init__(self) -> None:
        is_sharded = isinstance(self.model, FSDP | FSDPModule) and dist.get_world_size() > 1
        if is_sharded and type(self.optimizer).__name__ == "Adafactor":
            raise ValueError("Adafactor would factor shards, not tensors. Pass --strategy ddp.")
        self.initial_values = self.outer_values()
        try:
            inspect.signature(type(self.optimizer).step).bind(self.optimizer, closure=None)
        except TypeError:
            text = f"{type(self.optimizer).__name__}.step needs an argument closure=None"
            raise TypeError(f"{text}, which PyTorch passes when a run resumes.") from None

    @property
    def is_last_step(self) -> bool:
        """Return whether no steps are left."""
        return self.step == self.total_steps or self.ended_of == self.total_steps

    @property
    def device(self) -> torch.device:
        """Return the device that computes; with --cpu-offload the parameters are elsewhere."""
        return local_device()

    def outer_values(self) -> list[dict[str, Any]]:
        """Return what the optimizer keeps outside of its `state`: the values in each of its
        param_groups, except settings, as numbers or text, and last its attributes if numbers."""
        groups = [
            {k: x if isinstance(x, int | float) else repr(x)
             for k, x in group.items() if k not in SETTINGS}
            for group in self.optimizer.param_groups
        ]  # fmt: skip
        attributes = vars(self.optimizer).items()
        return [*groups, {k: x for k, x in attributes if type(x) in (int, float)}]

    def changed_numbers(self) -> list[dict[str, float]]:
        """Return the numbers among them that the optimizer has changed, such as a schedule-free
        one its `k`. Raise ValueError if it has changed others: checkpoints do not contain them."""
        pairs = zip(self.outer_values(), self.initial_values, strict=True)
        changed = [{k: x for k, x in now.items() if x != first.get(k)} for now, first in pairs]
        if any(isinstance(x, str) for values in changed for x in values.values()):
            text = "The optimizer changes tensors or lists in its param_groups"
            raise ValueError(f"{text}. Keep them in its `state`, as tensors.")
        return changed

    def set_numbers(self, values: list[dict[str, Any]]) -> None:
        """Give the optimizer the numbers in `values`, which are as `outer_values` returns them."""
        places = [*self.optimizer.param_groups, vars(self.optimizer)]
        for place, new in zip(places, values, strict=True):
            place |= {k: x for k, x in new.items() if not isinstance(x, str)}
