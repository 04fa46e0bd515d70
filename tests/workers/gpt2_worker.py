"""Train GPT-2 briefly in several ways in one process group under torchrun, for test_gpt2.py.

gpt2_worker.py OUTPUT.pt MODEL_DIRECTORY TRAIN.txt VAL.txt BATCH VARIANTS.json
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests")]

import torch
import torch.distributed as dist
from copied import edited_script
from ema import EMA
from ten_steps import compile_without_compiler, local, parse_args, patched, run, ten_steps

import gpt2_fsdp
from core import ranks

ADAMW = "torch.optim.AdamW(groups, lr=optim.lr, fused=True)"


def bad_step(name: str, flags: list[str], device: torch.device) -> tuple[str, bool]:
    """Train with an infinite loss on rank 1 from step 4 on, or without targets in step 4. Return
    the message, and whether any rank changed a weight after step 3."""
    summed_loss, host_sums = gpt2_fsdp.summed_loss, ranks.host_sums
    weights, calls = [], []

    def infinite_loss(model: torch.nn.Module, batch: dict) -> torch.Tensor:
        if model.training:
            calls.append(1)
        if len(calls) == 4:  # the weights before the step
            weights[:] = [model, [local(p).clone() for p in model.parameters()]]
        is_bad = dist.get_rank() == 1 and len(calls) >= 4 and name == "infinite"
        return summed_loss(model, batch) * (float("inf") if is_bad else 1)

    def no_targets(numbers: list) -> list:
        is_bad = name == "empty" and len(numbers) == 3 and len(calls) == 3
        return [0, 0, 0] if is_bad else host_sums(numbers)

    args = parse_args(gpt2_fsdp, [*flags[:-1], f"{flags[-1]}-{name}"])
    message = "no error"
    with patched(gpt2_fsdp, summed_loss=infinite_loss), patched(ranks, host_sums=no_targets):
        try:
            run(gpt2_fsdp, args, device)
        except ranks.Problem as problem:
            message = str(problem)
    pairs = zip(weights[1], weights[0].parameters(), strict=True) if weights else ()
    has_changed = not all(torch.equal(old, local(new)) for old, new in pairs)
    return message, bool(ranks.host_sums([has_changed])[0])


def two_runs(script, flags: list[str], device: torch.device) -> list[tuple]:
    """Train five steps, in one run and in two, of three and two steps. Return for each the losses,
    the weights on this rank, and what else `train` had."""
    results = []
    for name, stages in (("once", ["5"]), ("twice", ["3", "5"])):
        for steps in stages:
            more = ["--max-steps", steps, "--output-dir", f"{flags[-1]}-{name}"]
            args = parse_args(script, [*flags, "--lr-schedule", "constant", *more])
            _, seen = run(script, args, device)
        lines = (args.run.output_dir / "metrics.jsonl").read_text().splitlines()
        events = [x for x in map(json.loads, lines) if x["event"] == "train"]
        weights = [local(p).detach().clone() for p in seen["model"].parameters()]
        results.append(([x["loss"] for x in events], weights, [x.get("updates") for x in events]))
    return results


def other_optimizers(flags: list[str], device: torch.device) -> dict[str, list]:
    """Return `two_runs` of optimizers that are not fused, and the message of a NaN."""
    results = {}
    for name, optimizer in (
        ("Lion", "Lion(groups, lr=optim.lr)"),
        ("SGD", "torch.optim.SGD(groups, lr=optim.lr, momentum=0.9)"),
        ("AdamW", "torch.optim.AdamW(groups, lr=optim.lr, fused=False)"),
    ):
        imports = {"import policies\n": "import policies\nfrom lion import Lion\n"}
        script = edited_script("gpt2_fsdp", {ADAMW: optimizer} | imports)
        output = f"{flags[-1]}-{name}"
        results[name] = two_runs(script, [*flags[:-1], output], device)
    return results


def main() -> None:
    """Write rank 0's results of each variant to the first argument."""
    compile_without_compiler()
    output, model, train, val, batch, variants = sys.argv[1:]
    common = ["--model-name", model, "--dataset", train, "--val-dataset", val, "--block-size", "32",
              "--num-train-samples", "34", "--num-val-samples", "5", "--precision", "fp32", "--lr",
              "1e-3", "--batch-size", batch, "--max-grad-norm", "0.5", "--weight-decay", "0.1",
              "--log-every", "1", "--timeout-minutes", "7", "--keep-checkpoints", "1",
              "--no-save-best"]  # fmt: skip
    device = ranks.setup(7)
    ranks.GRACE_SECONDS = 0
    results = {}
    for name, flags in json.loads(variants).items():
        directory = ["--max-steps", "10", "--output-dir", f"{output}.{name}"]
        args = parse_args(gpt2_fsdp, [*common, *flags, *directory])
        results[name] = ten_steps(gpt2_fsdp, args, device)
        if name in ("full_shard", "fsdp2", "ddp"):
            quiet = [*common, *flags, "--log-every", "10", "--save-every", "0", "--eval-every", "0"]
            args = parse_args(
                gpt2_fsdp, [*quiet, "--max-steps", "6", "--output-dir", f"{output}.{name}-quiet"]
            )
            results[f"{name} without log"] = ten_steps(gpt2_fsdp, args, device)
            directory = ["--max-steps", "6", "--output-dir", f"{output}.{name}-bad"]
            flags = [*common, *flags, *directory]
            results[name]["bad"] = [bad_step(kind, flags, device) for kind in ("infinite", "empty")]
    if dist.get_world_size() == 2:
        flags = [*common, "--output-dir", f"{output}.two"]
        results["other optimizers"] = other_optimizers(flags, device)
        for fsdp in ("1", "2"):
            flags = [*common, "--fsdp", fsdp, "--output-dir", f"{output}.ema-{fsdp}"]
            results[f"ema {fsdp}"] = two_runs(edited_script("gpt2_fsdp", EMA), flags, device)
    if dist.get_rank() == 0:
        torch.save(results, output)


if __name__ == "__main__":
    main()
    ranks.leave(0)
