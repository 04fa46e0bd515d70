"""Train a model briefly in several ways in one process group, to compare it with plain PyTorch.

parity_worker.py OUTPUT.pt MODEL_DIRECTORY DATA... BATCH VARIANTS.json  # {name: flags}

The script is the one for the model's type. DATA is the training data and, for GPT-2, validation
data.
"""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from copied import EMA_SECTION, diffs, edited_script
from ten_steps import (
    compile_without_compiler,
    local,
    parse_args,
    patched,
    run,
    strategy_flags,
    ten_steps,
    whole,
)

import gpt2_fsdp
import llama_fsdp
import summarization_dataset
import T5_training
from core import checkpoint, ranks
from optional import rouge

SCRIPTS = {"t5": "T5_training", "gpt2": "gpt2_fsdp", "llama": "llama_fsdp"}
COMMON = ["--precision", "fp32", "--lr", "1e-3", "--max-grad-norm", "0.5", "--weight-decay", "0.1",
          "--log-every", "1", "--timeout-minutes", "7", "--keep-checkpoints", "1",
          "--no-save-best", "--no-activation-checkpointing", "--save-every", "0"]  # fmt: skip
FLAGS = {  # Llama: some documents are truncated to 64 tokens, and batches have several widths
    "T5_training": ["--num-train-samples", "0", "--rouge-samples", "0"],
    "gpt2_fsdp": ["--block-size", "32", "--num-train-samples", "34", "--num-val-samples", "5"],
    "llama_fsdp": ["--max-seq-length", "64", "--chat-template", "chatml"],
}
QUIET = ["--log-every", "10", "--eval-every", "0", "--max-steps", "6"]
OPTIMIZERS = {  # not fused
    "Lion": "Lion(groups, lr=optim.lr)",
    "SGD": "torch.optim.SGD(groups, lr=optim.lr, momentum=0.9)",
    "AdamW": "torch.optim.AdamW(groups, lr=optim.lr, fused=False)",
}


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


def resumed(
    script: ModuleType, flags: list[str], output: str, device: torch.device, last: list | None
) -> tuple[list[dict], list[torch.Tensor]]:
    """Train to step 3 and then, with the flags `last`, to step 6; if they are None, train to step 6
    at once. Return the logged training steps and the weights."""
    for steps, more in ((6, []),) if last is None else ((3, []), (6, last)):
        more = [*more, "--lr-schedule", "constant", "--max-steps", steps, "--output-dir", output]
        args = parse_args(script, [*flags, *more])
        _, seen = run(script, args, device)
    lines = map(json.loads, (args.run.output_dir / "metrics.jsonl").open())
    trained = [line for line in lines if line["event"] == "train"]
    return trained, [whole(p).detach().clone() for p in seen["model"].parameters()]


def paged_resumes(flags: list[str], output: str, device: torch.device) -> dict[str, tuple]:
    """Return the losses of steps 4 to 6 and the weights after them: of an uninterrupted run, of its
    resume from step 3, and of a resume with PyTorch's AdamW."""
    results = {}
    for name, last in (
        ("uninterrupted", None),
        ("paged", ["--optimizer", "paged_adamw_32bit"]),
        ("adamw", ["--optimizer", "adamw"]),
    ):
        lines, weights = resumed(llama_fsdp, flags, f"{output}-{name}", device, last)
        results[name] = [line["loss"] for line in lines[3:]], weights
    return results


def edited_resumes(common: list[str], output: str, device: torch.device) -> dict[str, list]:
    """Return an uninterrupted and a resumed run of GPT-2 with each other optimizer, and with an
    average of the weights under FSDP 1 and 2."""
    edits = {f"ema {fsdp}": (diffs(EMA_SECTION), ["--fsdp", fsdp]) for fsdp in ("1", "2")}
    adamw = "torch.optim.AdamW(groups, lr=optim.lr, fused=True)"
    imports = {"import policies\n": "import policies\nfrom lion import Lion\n"}
    edits |= {name: ({adamw: text} | imports, []) for name, text in OPTIMIZERS.items()}
    results = {}
    for name, (edit, more) in edits.items():
        script, directory = edited_script("gpt2_fsdp", edit), f"{output}-{name}"
        flags = [*common, *more]
        once = resumed(script, flags, f"{directory}-once", device, None)
        results[name] = once, resumed(script, flags, f"{directory}-twice", device, [])
    return results


def generated(flags: list[str], output: str, device: torch.device) -> dict[str, Any]:
    """Train T5 on eight samples until it has memorized them, and generate texts with that model
    under each strategy. Of seven samples in batches of 2, one rank's last batch has none."""
    flags = [*flags, "--num-train-samples", "8", "--lr", "1e-2", "--lr-schedule", "constant",
             "--target-length", "12", "--max-steps", "150", "--output-dir", output]  # fmt: skip
    _, seen = run(T5_training, parse_args(T5_training, flags), device)
    newest = checkpoint.find_newest(Path(output))
    flags += ["--rouge-samples", "7", "--batch-size", "2"]
    results = {}
    for precision in ("fp32", "bf16"):
        for strategy in ("full_shard", "shard_grad_op", "ddp", "fsdp2"):
            options = ["--precision", precision, *strategy_flags(strategy)]
            args = parse_args(T5_training, [*flags, *options])
            model, blocks, tokenizer, source = T5_training.load_model(args, needs_weights=True)
            model = T5_training.wrap_model(args, device, model, blocks, source)
            checkpoint.load_weights(newest, model)
            collate, samples = summarization_dataset.collator(model), {"": seen["train_set"]}
            triples = rouge.summarize(args, device, model, tokenizer, collate, samples)
            results[precision, strategy] = triples
    return results


if __name__ == "__main__":
    compile_without_compiler()
    output, directory, *data, batch, variants = sys.argv[1:]
    name = SCRIPTS[json.loads((Path(directory) / "config.json").read_text())["model_type"]]
    script = importlib.import_module(name)
    common = ["--model-name", directory, "--batch-size", batch, "--dataset", data[0], *FLAGS[name]]
    common += [*COMMON, *(word for path in data[1:] for word in ("--val-dataset", path))]
    device = ranks.setup(7)
    ranks.GRACE_SECONDS = 0
    results: dict[str, Any] = {}
    variants = json.loads(variants)
    for variant, flags in variants.items():
        path = f"{output}.{variant}"
        flags = [*common, *flags, "--output-dir", path]
        results[variant] = ten_steps(
            script, parse_args(script, [*flags, "--max-steps", "10"]), device
        )
        if variant in ("full_shard", "fsdp2", "ddp"):
            quiet = parse_args(script, [*flags, *QUIET, "--output-dir", f"{path}-quiet"])
            results[f"{variant} without log"] = ten_steps(script, quiet, device)
            if script is gpt2_fsdp:
                flags = [*flags, "--max-steps", "6", "--output-dir", f"{path}-bad"]
                bad = [bad_step(kind, flags, device) for kind in ("infinite", "empty")]
                results[variant]["bad"] = bad
        if "--optimizer" in flags:
            results[variant]["resume"] = paged_resumes(flags, path, device)
    if script is gpt2_fsdp and dist.get_world_size() == 2:
        results["edited"] = edited_resumes(common, f"{output}.edited", device)
    if script is T5_training:
        results["generated"] = generated(common, f"{output}.overfitted", device)
    if dist.get_rank() == 0:
        torch.save(results, output)
    ranks.leave(0)
