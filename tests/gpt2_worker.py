"""Run under torchrun by test_gpt2.py: short trainings of GPT-2 in one process group.

gpt2_worker.py OUTPUT.pt MODEL_DIRECTORY TRAIN.txt VAL.txt BATCH VARIANTS.json
"""

import argparse
import contextlib
import io
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from ten_steps import compile_without_compiler, local, ten_steps
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import gpt2_fsdp
import policies
from runtime import checkpoints, free_space, ranks
from runtime.checkpoints import TrainState
from runtime.output import open_output
from runtime.run import Run


def bad_steps(args: argparse.Namespace, state: TrainState, batch: dict) -> dict[str, tuple]:
    """A step with an infinite loss on rank 1, and one without targets. Of each: the ranks on which
    it changed a weight, a moment or the count of steps, and what rank 0 says when it is checked."""

    def held() -> list[torch.Tensor]:
        moments = [x for values in state.optimizer.state.values() for x in values.values()]
        return [torch.as_tensor(local(x)) for x in (*state.model.parameters(), *moments)]

    def infinite(*args: object) -> torch.Tensor:
        return summed_loss(*args) * (float("inf") if dist.get_rank() == 1 else 1)

    summed_loss = gpt2_fsdp.summed_loss
    without = batch | {"labels": torch.full_like(batch["labels"], -100), "targets": 0}
    found = {}
    for name, loss, step in (("infinite", infinite, batch), ("empty", summed_loss, without)):
        before = [tensor.clone() for tensor in held()]
        run = Run(args, state.device, "")
        gpt2_fsdp.summed_loss = loss
        gpt2_fsdp.train_step(args, state, [step], [7, 8], run)
        gpt2_fsdp.summed_loss = summed_loss
        pairs = zip(before, held(), strict=True)
        changed = ranks.ranks_where(not all(torch.equal(old, new) for old, new in pairs))
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
            run.check_steps()
        found[name] = changed, said.getvalue()
    return found


def main() -> None:
    """Write what each variant gave, rank 0's view of it, to the first argument."""
    compile_without_compiler()
    output, model, train, val, batch, variants = sys.argv[1:]
    common = ["--model-name", model, "--train-file", train, "--val-file", val, "--block-size", "32",
              "--num-train-samples", "34", "--num-val-samples", "5", "--precision", "fp32", "--lr",
              "1e-3", "--batch-size", batch, "--max-steps", "10", "--max-grad-norm", "0.5",
              "--output-dir", f"{output}.run", "--weight-decay", "0.1",
              "--timeout-minutes", "7"]  # fmt: skip
    device = gpt2_fsdp.setup(gpt2_fsdp.parse_args(common))
    ranks.GRACE_SECONDS = 0  # rank 0 does not end
    results = {}
    for name, flags in json.loads(variants).items():
        args = gpt2_fsdp.parse_args([*common, *flags])
        open_output(Path(args.output_dir), "auto", "gpt2_fsdp")
        results[name], trained = ten_steps(gpt2_fsdp, args, device)
        output_dir = Path(args.output_dir)
        checkpoints.Saver(output_dir, trained, keep=1, full=False).save()
        checkpoint = output_dir / f"checkpoints/step-{trained.step:08d}"
        state, tokenizer, loader, _ = gpt2_fsdp.prepare(args, device, checkpoint)
        results[name]["counted"] = free_space.count_parameters(trained.model)
        unit = FSDPModule if args.fsdp == 2 else FSDP
        results[name]["units"] = sum(isinstance(m, unit) for m in state.model.modules())
        results[name]["tied"] = all(
            inner.lm_head.weight is inner.transformer.wte.weight
            for inner in (policies.unwrapped(trained.model), policies.unwrapped(state.model))
        )
        texts = gpt2_fsdp.continue_prompts(args, state, tokenizer, loader.dataset)
        results[name]["texts"] = texts
        groups = dist.distributed_c10d._world.pg_map
        limits = {group._get_backend(device).options._timeout for group in groups}
        results[name]["limits"] = {limit.total_seconds() for limit in limits}
        if name in ("full_shard", "fsdp2", "ddp", "paged"):
            results[name]["bad"] = bad_steps(args, trained, next(iter(loader)))
    for fsdp in ("1", "2"):
        args = gpt2_fsdp.parse_args([*common, "--fsdp", fsdp])
        state, tokenizer, loader, _ = gpt2_fsdp.prepare(args, device, None)
        texts = gpt2_fsdp.continue_prompts(args, state, tokenizer, loader.dataset)
        results[f"untrained {fsdp}"] = {"texts": texts}
    if dist.get_rank() == 0:
        torch.save(results, output)
    gpt2_fsdp.cleanup()


if __name__ == "__main__":
    main()
    os._exit(0)  # as the scripts do, and why
