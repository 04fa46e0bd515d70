"""--global-batch-size: samples per step, on any number of processes. Without this file, choose
--batch-size and --gradient-accumulation-steps for each number."""

from dataclasses import dataclass
from typing import Any

from core.args import Size
from core.ranks import environment_size


@dataclass
class Total:
    """The samples per step."""

    global_batch_size: Size = 0
    """samples per step, in micro-batches of at most --batch-size; 0: not given"""

    def resolve(self, args: Any) -> None:
        """Cut the samples into the fewest micro-batches of at most --batch-size."""
        optim = args.optim
        samples = self.global_batch_size // environment_size()
        if samples and optim.gradient_accumulation_steps == 1:
            size = min(optim.batch_size, samples)
            while samples % size:
                size -= 1
            optim.batch_size = size
            optim.gradient_accumulation_steps = samples // size

    def problems(self, args: Any) -> list[str]:
        """Return a message if the samples could not be cut."""
        optim = args.optim
        total = self.global_batch_size
        processes = environment_size()
        if total in (0, optim.batch_size * optim.gradient_accumulation_steps * processes):
            return []
        return [f"--global-batch-size {total} is not a multiple of {processes} processes, or is "
                "passed beside --gradient-accumulation-steps."]  # fmt: skip
