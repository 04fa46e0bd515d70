"""Run under torchrun by test_llama.py: loads and short trainings of Llama in one process group.

llama_worker.py OUTPUT.pt MODEL_DIRECTORY CHATS.jsonl BATCH VARIANTS.json
"""

import json
import os
import sys
from argparse import Namespace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests")]

import torch
import torch.distributed as dist
from ten_steps import compile_without_compiler, ten_steps, whole
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import llama_fsdp
from runtime import weights
from runtime.run import prepare_directory


def rotary(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module whose buffers are in no file."""
    return next(m for m in model.modules() if type(m).__name__ == "LlamaRotaryEmbedding")


def wrapped(args: Namespace, device: torch.device) -> torch.nn.Module:
    """Return the model that the flags name, with its weights."""
    model, _, init = llama_fsdp.load_model(args, device)
    return llama_fsdp.wrap_model(args, device, model, init)


def main() -> None:
    """Write what each variant gave, rank 0's view of it, to the first argument."""
    compile_without_compiler()
    output, model, chats, batch, variants = sys.argv[1:]
    # Its documents are long enough to be cut, and for batches of several widths.
    common = ["--dataset", chats, "--chat-template", "chatml", "--max-seq-length", "64",
              "--precision", "fp32", "--lr", "1e-3", "--batch-size", batch,
              "--max-steps", "10", "--max-grad-norm", "0.5", "--no-activation-checkpointing",
              "--output-dir", f"{output}.run", "--weight-decay", "0.1"]  # fmt: skip
    named = [*common, "--model-name", model]
    device = llama_fsdp.setup(llama_fsdp.parse_args(named))
    results: dict = {}
    args = llama_fsdp.parse_args(named)
    loaded = wrapped(args, device)
    results["loaded"] = get_model_state_dict(loaded, options=StateDictOptions(full_state_dict=True))
    frequencies: list[torch.Tensor] = []  # as the last forward pass found them
    begun: list[dict[str, torch.Tensor]] = []  # the adapters as they were made
    wrap_model = llama_fsdp.wrap_model

    def watched(*arguments: object) -> torch.nn.Module:
        made = wrap_model(*arguments)
        begun.append(
            {
                weights.WRAPPERS.sub("", name): whole(parameter).clone()
                for name, parameter in made.named_parameters()
                if ".lora_" in name
            }
        )
        rotary(made).register_forward_hook(
            lambda module, *_: frequencies.append(module.inv_freq.clone())
        )
        return made

    llama_fsdp.wrap_model = watched
    for name, flags in json.loads(variants).items():
        args = llama_fsdp.parse_args([*named, *flags])
        prepare_directory(Path(args.output_dir))
        results[name], trained = ten_steps(llama_fsdp, args, device)
        results[name]["frequencies"] = frequencies[-1]
        results[name]["begun"] = begun[-1]
        unit = FSDPModule if args.fsdp == 2 else FSDP
        results[name]["units"] = sum(isinstance(m, unit) for m in trained.model.modules())
    if dist.get_rank() == 0:
        torch.save(results, output)
    llama_fsdp.cleanup()


if __name__ == "__main__":
    main()
    os._exit(0)  # as the scripts do, and why
