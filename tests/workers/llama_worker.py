"""Load and briefly train Llama in one process group under torchrun, for test_llama.py.

llama_worker.py OUTPUT.pt MODEL_DIRECTORY CHATS.jsonl BATCH VARIANTS.json
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests")]

import torch
import torch.distributed as dist
from ten_steps import compile_without_compiler, parse_args, patched, run, ten_steps, whole
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import llama_fsdp
from core import ranks, weights


def rotary(model: torch.nn.Module) -> torch.nn.Module:
    """Return the rotary embedding, whose buffers are not stored in any file."""
    return next(m for m in model.modules() if type(m).__name__ == "LlamaRotaryEmbedding")


def resume(flags: list[str], output: str, device: torch.device) -> dict[str, tuple[list, list]]:
    """Return the losses of steps 4 to 6 and the weights after them: of an uninterrupted run, of its
    resume from step 3, and of a resume with PyTorch's AdamW."""
    results = {}
    for name, stages in (("uninterrupted", ["6"]), ("paged", ["3", "6"]), ("adamw", ["3", "6"])):
        for steps in stages:
            optimizer = ["--optimizer", "adamw"] if name == "adamw" and steps == "6" else []
            more = ["--max-steps", steps, "--output-dir", f"{output}-{name}", *optimizer]
            args = parse_args(llama_fsdp, [*flags, "--lr-schedule", "constant", *more])
            _, seen = run(llama_fsdp, args, device)
        lines = map(json.loads, (args.run.output_dir / "metrics.jsonl").open())
        losses = {line["step"]: line["loss"] for line in lines if line["event"] == "train"}
        parameters = [whole(p).detach().clone() for p in seen["model"].parameters()]
        results[name] = [losses[step] for step in (4, 5, 6)], parameters
    return results


def main() -> None:
    """Write rank 0's results of each variant to the first argument."""
    compile_without_compiler()
    output, directory, chats, batch, variants = sys.argv[1:]
    # Some documents are cut at 64 tokens, and batches have several widths.
    common = ["--model-name", directory, "--dataset", chats, "--chat-template", "chatml",
              "--max-seq-length", "64", "--precision", "fp32", "--lr", "1e-3", "--batch-size",
              batch, "--max-grad-norm", "0.5", "--no-activation-checkpointing", "--weight-decay",
              "0.1", "--log-every", "1", "--timeout-minutes", "7", "--keep-checkpoints",
              "1"]  # fmt: skip
    device = ranks.setup(7)
    ranks.GRACE_SECONDS = 0
    results: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    wrap_model = llama_fsdp.wrap_model

    def recording_wrap(*arguments: Any) -> torch.nn.Module:
        model = wrap_model(*arguments)
        if "loaded" not in results:
            options = StateDictOptions(full_state_dict=True)
            results["loaded"] = get_model_state_dict(model, options=options)
        kept["initial_adapters"] = {
            weights.plain_name(name): whole(parameter).clone()
            for name, parameter in model.named_parameters()
            if ".lora_" in name
        }

        def keep(module: torch.nn.Module, *_: Any) -> None:
            kept["frequencies"] = module.inv_freq.clone()

        rotary(model).register_forward_hook(keep)
        return model

    with patched(llama_fsdp, wrap_model=recording_wrap):
        for name, flags in json.loads(variants).items():
            path = ["--output-dir", f"{output}.{name}"]
            args = parse_args(llama_fsdp, [*common, *flags, "--max-steps", "10", *path])
            results[name] = ten_steps(llama_fsdp, args, device) | kept
            if name in ("full_shard", "fsdp2", "ddp", "accumulate"):
                quiet = ["--log-every", "10", "--save-every", "0", "--eval-every", "0"]
                path = ["--max-steps", "6", "--output-dir", f"{output}.{name}-quiet"]
                args = parse_args(llama_fsdp, [*common, *flags, *quiet, *path])
                results[f"{name} without log"] = ten_steps(llama_fsdp, args, device)
            if "--optimizer" in flags:
                results[name]["resume"] = resume([*common, *flags], path[1], device)
    if dist.get_rank() == 0:
        torch.save(results, output)


if __name__ == "__main__":
    main()
    ranks.leave(0)
