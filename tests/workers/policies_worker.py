"""Train in fp16 with overflowing gradients, and evaluate changed weights, for test_policies.py.

    policies_worker.py RESULT.json OUTPUT_DIR FLAGS.json

Rank 0 writes the results of `try_strategy` by script and strategy, and of `evaluate_twice`.
"""

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from killed import before_each_step
from ten_steps import local, logged, parse_args, patched, run, strategy_flags
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import block_dataset
import gpt2_fsdp
import policies
from core import checkpoint, ranks
from optional import startup_checks

STRATEGIES = {  # the scripts handle strategies alike, so one script tries all of them
    "T5_training": ("full_shard",),
    "gpt2_fsdp": ("full_shard", "shard_grad_op", "ddp", "fsdp2"),
    "llama_fsdp": ("fsdp2",),
}
SCALE = 2.0**12  # the default, 2**16, overflows in Llama's first step


class Overflowing:
    """Runs of a script in which gradients overflow on rank 1 in some steps: in the "loss", before
    reduction, or in the "shard", after it. Keeps the state before each step."""

    def __init__(self, script: types.ModuleType, device: torch.device) -> None:
        self.script, self.device = script, device
        self.model = self.scaler = self.error = None
        self.step = 0
        self.shards: dict[int, list[torch.Tensor]] = {}  # this rank's, before a step
        self.scales: dict[int, float] = {}  # before a step

    def record(self, step: int) -> None:
        """Keep the weights and the scale before `step`."""
        self.step = step
        self.shards[step] = [local(p.detach()).clone() for p in self.model.parameters()]
        self.scales[step] = self.scaler.get_scale()

    def run(
        self, flags: list[str], steps: int, places: dict[int, str], scale: float = 0
    ) -> list[float]:
        """Train to `steps`, from a loss scale if it is not 0. Return all losses so far."""
        args = parse_args(self.script, [*flags, "--max-steps", str(steps)])
        summed_loss, make_scaler = self.script.summed_loss, policies.gradient_scaler

        def make(model: Any, *values: Any) -> torch.amp.GradScaler:
            self.model, self.scaler = model, make_scaler(model, *values)
            if scale and self.scaler.is_enabled():
                self.scaler.load_state_dict(self.scaler.state_dict() | {"scale": scale})
            unscale = self.scaler.unscale_

            def unscale_(optimizer: torch.optim.Optimizer) -> None:
                if dist.get_rank() == 1 and places.get(self.step) == "shard":
                    largest = max(self.model.parameters(), key=lambda x: x.numel())
                    local(largest.grad)[..., 0] = float("inf")
                unscale(optimizer)

            self.scaler.unscale_ = unscale_
            return self.scaler

        def loss(model: Any, batch: dict) -> torch.Tensor:
            is_bad = model.training and places.get(self.step) == "loss" and dist.get_rank() == 1
            return summed_loss(model, batch) * (float("inf") if is_bad else 1)

        with (
            patched(startup_checks, check_model=lambda *_: None),  # it would refuse `loss`
            patched(policies, gradient_scaler=make),
            patched(self.script, progress=self.script.progress, summed_loss=loss),
        ):
            before_each_step(self.script, self.record)
            try:
                run(self.script, args, self.device)
            except ranks.Problem as problem:
                self.error = str(problem)
        self.record(self.step + 1)
        return logged(args.run.output_dir)["losses"]

    def effect(self, step: int) -> dict[str, Any]:
        """Return what a step changed: weights on each rank, and the scale."""
        pairs = list(zip(self.shards[step], self.shards[step + 1], strict=True))
        has_changed = any(not torch.equal(old, new) for old, new in pairs)
        scale = self.scales[step + 1] / self.scales[step]
        return {"changed": ranks.on_every_rank(lambda: has_changed), "scale": scale}


def try_strategy(
    name: str, flags: list[str], strategy: str, device: torch.device, directory: Path
) -> dict[str, Any]:
    """Train in fp32 and fp16, overflow, resume, and overflow at a small scale."""
    script = importlib.import_module(name)
    flags = [*flags, *strategy_flags(strategy), "--log-every", "1", "--save-every", "0",
             "--eval-every", "0", "--no-save-best", "--lr", "1e-3", "--lr-schedule",
             "constant"]  # fmt: skip
    fp32 = ["--precision", "fp32", "--output-dir", f"{directory}-fp32"]
    fp16 = ["--precision", "fp16", "--output-dir", f"{directory}-fp16"]
    result = {"fp32": Overflowing(script, device).run([*flags, *fp32], 12, {})}
    places = {13: "loss", 14: "shard", 15: "nowhere"}
    if strategy == "ddp":  # all ranks have the same gradients
        del places[14]
    trained = Overflowing(script, device)
    losses = trained.run([*flags, *fp16], 15, places, SCALE)
    result |= {"fp16": losses[:12], "scale": trained.scales[13]}
    result["effects"] = {place: trained.effect(step) for step, place in places.items()}
    resumed = Overflowing(script, device)
    resumed.run([*flags, *fp16], 16, {})
    result["resumed"] = resumed.scales[16] == trained.scales[16]
    path = Path(f"{directory}-fp16/checkpoints/step-00000016/train_state.json")
    if dist.get_rank() == 0:
        state = json.loads(path.read_text())
        state["scaler"]["scale"] = 1.5
        del state["crc"]
        state["crc"] = checkpoint.crc_of(state)
        path.write_text(json.dumps(state))
    dist.barrier()
    resumed.run([*flags, *fp16], 17, {17: "loss"})
    result["effects"]["last"] = resumed.effect(17)
    return result | {"errors": ranks.on_every_rank(lambda: resumed.error)}


def evaluate_twice(args: gpt2_fsdp.Args, device: torch.device) -> list[float]:
    """Return the loss before and after all weights are halved."""
    torch.manual_seed(0)
    model, blocks, _, initial = gpt2_fsdp.load_model(args, needs_weights=True)
    model = gpt2_fsdp.wrap_model(args, device, model, blocks, initial)
    batch = block_dataset.collate(startup_checks.examples(args.data))
    losses = []
    with torch.no_grad():
        for _ in range(2):
            with policies.evaluation(model):
                losses.append(gpt2_fsdp.summed_loss(model, batch).item())
            for parameter in model.parameters():
                parameter *= 0.5
    if isinstance(model, FSDP):  # each queued event lets the host gather one more unit ahead
        assert len(model._free_event_queue._queue) <= 4
    return losses


if __name__ == "__main__":
    result, output, scripts = sys.argv[1:]
    device, results = ranks.setup(7), {"evaluation": {}}
    ranks.GRACE_SECONDS = 0
    for name, flags in json.loads(scripts).items():
        for strategy in STRATEGIES[name]:
            directory = Path(output) / f"{name}-{strategy}"
            results[f"{name} {strategy}"] = try_strategy(name, flags, strategy, device, directory)
    for strategy in ("ddp", "full_shard", "shard_grad_op", "fsdp2"):
        flags = [*strategy_flags(strategy), "--model-name", "tiny"]
        results["evaluation"][strategy] = evaluate_twice(parse_args(gpt2_fsdp, flags), device)
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(results))
    ranks.finish()
