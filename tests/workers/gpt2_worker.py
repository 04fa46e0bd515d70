"""Train GPT-2 briefly in several ways in one process group under torchrun, for test_gpt2.py.

gpt2_worker.py OUTPUT.pt MODEL_DIRECTORY TRAIN.txt VAL.txt BATCH VARIANTS.json
"""

import contextlib
import io
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests")]

import torch
import torch.distributed as dist
from copied import edited_script
from ema import EMA
from ten_steps import compile_without_compiler, local, ten_steps
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import gpt2_fsdp
from benchmarks.driven import Driven, parse_flags
from runtime import ranks, weights


def bad_steps(driven: Driven) -> dict[str, tuple]:
    """Make a step with an infinite loss on rank 1 and one without targets. Return for each whether
    any rank changed a weight, a moment or the step count, and the error message on rank 0."""
    state, batch = driven.state, driven.batch()

    def tensors() -> list[torch.Tensor]:
        moments = [x for values in state.optimizer.state.values() for x in values.values()]
        return [torch.as_tensor(local(x)) for x in (*state.model.parameters(), *moments)]

    def infinite_loss(*args: object) -> torch.Tensor:
        return summed_loss(*args) * (float("inf") if dist.get_rank() == 1 else 1)

    summed_loss = gpt2_fsdp.summed_loss
    empty = batch | {"labels": torch.full_like(batch["labels"], -100), "targets": 0}
    results = {}
    for name, loss, step in (("infinite", infinite_loss, batch), ("empty", summed_loss, empty)):
        before = [tensor.clone() for tensor in tensors()]
        gpt2_fsdp.summed_loss = loss
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr), contextlib.suppress(SystemExit):
            driven.step([step], [7, 8])
            driven.check()
        gpt2_fsdp.summed_loss = summed_loss
        driven.all_steps.unchecked.clear()
        pairs = zip(before, tensors(), strict=True)
        has_changed = ranks.true_on_any(not all(torch.equal(old, new) for old, new in pairs))
        results[name] = has_changed, stderr.getvalue()
    return results


def other_optimizers(flags: list[str], device: torch.device) -> dict[str, dict]:
    """Train with optimizers that are not fused. Return the losses and weights of a run and of its
    resume, and the message and effects of a step with a NaN loss."""
    results = {}
    for name, optimizer in (
        ("Lion", "Lion(groups, lr=args.lr)"),
        ("SGD", "torch.optim.SGD(groups, lr=args.lr, momentum=0.9)"),
        ("AdamW", "torch.optim.AdamW(groups, lr=args.lr, fused=False)"),
    ):
        args = parse_flags(gpt2_fsdp, [*flags, "--output-dir", f"{flags[-1]}-{name}"])
        adamw = "torch.optim.AdamW(groups, lr=args.lr, fused=True)"
        lion_import = {"import policies\n": "import policies\nfrom lion import Lion\n"}
        script = edited_script("gpt2_fsdp", {adamw: optimizer} | lion_import)
        driven = Driven(script, args, device)
        list(driven.all(3))
        resumed = Driven(script, args, device, driven.save())
        runs = []
        for run in (driven, resumed):
            losses = [loss.item() for loss, _ in run.all(2)]
            runs.append((losses, [local(p).detach().clone() for p in run.model.parameters()]))
        summed_loss = script.summed_loss
        script.summed_loss = lambda *args, loss=summed_loss: loss(*args) * float("nan")
        before = [local(p).detach().clone() for p in driven.model.parameters()]
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr), contextlib.suppress(SystemExit):
            driven.step()
        after = [local(p).detach() for p in driven.model.parameters()]
        has_changed = ranks.true_on_any(not all(map(torch.equal, before, after)))
        results[name] = {"runs": runs, "changed": has_changed, "message": stderr.getvalue()}
    return results


def with_ema(flags: list[str], device: torch.device) -> dict[str, dict]:
    """Train with an average of the weights and resume from a checkpoint. Return, for each FSDP
    version, the averages of both runs and the weights."""
    results = {}
    script = edited_script("gpt2_fsdp", EMA)
    for fsdp in ("1", "2"):
        output_dir = f"{flags[-1]}-ema-{fsdp}"
        args = parse_flags(script, [*flags, "--fsdp", fsdp, "--output-dir", output_dir])
        driven = Driven(script, args, device)
        list(driven.all(3))
        resumed = Driven(script, args, device, driven.save())
        averages = []
        for run in (driven, resumed):
            list(run.all(2))
            average = run.state.others["ema"]
            averages.append((average.count, [local(x).clone() for x in average.average]))
        weights = [local(x).detach().clone() for x in driven.model.parameters()]
        results[fsdp] = {"averages": averages, "weights": weights}
    return results


def main() -> None:
    """Write rank 0's results of each variant to the first argument."""
    compile_without_compiler()
    output, model, train, val, batch, variants = sys.argv[1:]
    common = ["--model-name", model, "--dataset", train, "--val-dataset", val, "--block-size", "32",
              "--num-train-samples", "34", "--num-val-samples", "5", "--precision", "fp32", "--lr",
              "1e-3", "--batch-size", batch, "--max-steps", "10", "--max-grad-norm", "0.5",
              "--output-dir", f"{output}.run", "--weight-decay", "0.1",
              "--timeout-minutes", "7"]  # fmt: skip
    device = gpt2_fsdp.setup(parse_flags(gpt2_fsdp, common))
    ranks.GRACE_SECONDS = 0  # rank 0 continues after bad steps
    results = {}
    for name, flags in json.loads(variants).items():
        args = parse_flags(gpt2_fsdp, [*common, *flags])
        results[name], driven = ten_steps(gpt2_fsdp, args, device)
        resumed = Driven(gpt2_fsdp, args, device, driven.save(keep=1))
        unit = FSDPModule if args.fsdp == 2 else FSDP
        results[name]["units"] = sum(isinstance(m, unit) for m in resumed.model.modules())
        results[name]["tied"] = all(
            inner.lm_head.weight is inner.transformer.wte.weight
            for inner in (weights.unwrapped(driven.model), weights.unwrapped(resumed.model))
        )
        if name in ("full_shard", "fsdp2", "ddp"):
            results[name]["bad"] = bad_steps(driven)
    if dist.get_world_size() == 2:
        output_dir = ["--output-dir", f"{output}.run"]
        results["other optimizers"] = other_optimizers([*common, *output_dir], device)
        results["ema"] = with_ema([*common, *output_dir], device)
    if dist.get_rank() == 0:
        torch.save(results, output)
    gpt2_fsdp.cleanup()


if __name__ == "__main__":
    main()
    os._exit(0)  # as the scripts do
