"""Run under torchrun by test_t5.py: several short trainings in one process group.

t5_worker.py OUTPUT.pt MODEL_DIRECTORY PAIRS.jsonl
"""

import sys
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import checkpointing
import policies
import T5_training

VARIANTS = {
    "full_shard": [],
    "shard_grad_op": ["--strategy", "shard_grad_op"],
    "no_shard": ["--strategy", "no_shard"],
    "ddp": ["--strategy", "ddp"],
    "accumulate": ["--batch-size", "2", "--gradient-accumulation-steps", "2"],
    "accumulate_no_sync": ["--batch-size", "2", "--gradient-accumulation-steps", "2",
                           "--accumulate-no-sync"],
    "ddp_accumulate": ["--strategy", "ddp", "--batch-size", "2", "--gradient-accumulation-steps",
                       "2"],
    "activation_checkpointing": ["--activation-checkpointing"],
    "ddp_activation_checkpointing": ["--activation-checkpointing", "--strategy", "ddp"],
}  # fmt: skip


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The whole gradient of each parameter, by the name it had before wrapping."""
    if not isinstance(model, FSDP):
        found = {name: p.grad.clone() for name, p in model.module.named_parameters()}
    elif model.sharding_strategy == policies.STRATEGIES["no_shard"]:
        found = {name: p.grad.clone() for name, p in model.named_parameters()}
    else:
        with FSDP.summon_full_params(model, with_grads=True, writeback=False):
            found = {name: p.grad.clone() for name, p in model.named_parameters()}
    wrappers = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
    for wrapper in wrappers:
        found = {name.replace(wrapper, ""): grad for name, grad in found.items()}
    return found


def ten_steps(args: Namespace, device: torch.device) -> dict:
    """Losses and samples of ten steps, and the gradient of the first before clipping."""
    state, _, loader, val_loaders = T5_training.prepare(args, device, None)
    result = {"losses": [], "samples": [], "norms": []}
    clip = policies.clip_gradients

    def keep_gradient(model: torch.nn.Module, max_norm: float) -> torch.Tensor:
        result.setdefault("gradient", gradients(model))
        return clip(model, max_norm)

    policies.clip_gradients = keep_gradient
    while state.step < 10:
        loader.batch_sampler.epoch, loader.batch_sampler.consumed = state.epoch, 0
        micro_batches = iter(loader)
        for samples in loader.batch_sampler.steps():
            batches = [next(micro_batches) for _ in range(args.gradient_accumulation_steps)]
            loss, norm = T5_training.train_step(args, state, batches, samples)
            dist.all_reduce(loss)
            result["losses"].append(loss.item())
            result["norms"].append(norm.item())
            result["samples"].append((state.epoch, samples))
            if state.step == 10:
                break
        state.epoch += 1
    policies.clip_gradients = clip
    result["validation"] = T5_training.validation(args, state, val_loaders)
    return result


def main() -> None:
    """Write what each variant gave, rank 0's view of it, to the first argument."""
    output, model, data = sys.argv[1:]
    common = ["--model-name", model, "--dataset", data, "--num-train-samples", "0", "--precision",
              "fp32", "--lr", "1e-3", "--batch-size", "4", "--max-steps", "10", "--max-grad-norm",
              "0.5", "--output-dir", f"{output}.run", "--weight-decay", "0.1"]  # fmt: skip
    args = T5_training.parse_args(common)
    device = T5_training.setup(args)
    checkpointing.open_output(Path(args.output_dir), "auto")
    results = {}
    for name, flags in VARIANTS.items():
        results[name] = ten_steps(T5_training.parse_args([*common, *flags]), device)

    # One batch, until it is known by heart.
    flags = ["--num-train-samples", "8", "--lr", "1e-2", "--lr-schedule", "constant",
             "--target-length", "12", "--max-steps", "400"]  # fmt: skip
    args = T5_training.parse_args([*common, *flags])
    state, _, loader, _ = T5_training.prepare(args, device, None)
    batch = [next(iter(loader))]
    for _ in range(400):
        loss, _ = T5_training.train_step(args, state, batch, [0])
        dist.all_reduce(loss)
        if loss < 0.05:
            break
    results["overfitted"] = loss.item()
    state.best_step = state.step
    checkpointing.save_best(Path(args.output_dir), state)
    best = checkpointing.best_path(Path(args.output_dir), state)

    # Generation by that model, of seven examples in batches of 2: one rank has none in the last.
    flags += ["--rouge-samples", "7", "--batch-size", "2"]
    for precision in ("fp32", "bf16"):
        for strategy in ("full_shard", "shard_grad_op", "ddp"):
            chosen = ["--precision", precision, "--strategy", strategy]
            args = T5_training.parse_args([*common, *flags, *chosen])
            state, tokenizer, loader, _ = T5_training.prepare(args, device, None)
            checkpointing.load_weights(best, state.model)
            loader.batch_sampler.seed = None  # in their order
            triples = T5_training.summarize(args, state, tokenizer, loader)
            results[f"generated {precision} {strategy}"] = triples
    if dist.get_rank() == 0:
        torch.save(results, output)
    T5_training.cleanup()


if __name__ == "__main__":
    main()
