"""Load and briefly train Llama in one process group under torchrun, for test_llama.py.

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
from benchmarks.driven import parse_flags
from runtime import weights
from runtime.run import prepare_directory


def rotary(model: torch.nn.Module) -> torch.nn.Module:
    """Return the rotary embedding, whose buffers are not stored in any file."""
    return next(m for m in model.modules() if type(m).__name__ == "LlamaRotaryEmbedding")


def load_wrapped(args: Namespace, device: torch.device) -> torch.nn.Module:
    """Return the wrapped model of the flags, with its weights."""
    model, _, init = llama_fsdp.load_model(args, device)
    return llama_fsdp.wrap_model(args, device, model, init)


def main() -> None:
    """Write rank 0's results of each variant to the first argument."""
    compile_without_compiler()
    output, directory, chats, batch, variants = sys.argv[1:]
    # Some documents are cut at 64 tokens, and batches have several widths.
    common = ["--dataset", chats, "--chat-template", "chatml", "--max-seq-length", "64",
              "--precision", "fp32", "--lr", "1e-3", "--batch-size", batch,
              "--max-steps", "10", "--max-grad-norm", "0.5", "--no-activation-checkpointing",
              "--output-dir", f"{output}.run", "--weight-decay", "0.1"]  # fmt: skip
    named = [*common, "--model-name", directory]
    device = llama_fsdp.setup(parse_flags(llama_fsdp, named))
    results: dict = {}
    args = parse_flags(llama_fsdp, named)
    model = load_wrapped(args, device)
    results["loaded"] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    frequencies: list[torch.Tensor] = []  # after each forward pass
    initial_adapters: list[dict[str, torch.Tensor]] = []
    wrap_model = llama_fsdp.wrap_model

    def recording_wrap(*arguments: object) -> torch.nn.Module:
        model = wrap_model(*arguments)
        initial_adapters.append(
            {
                weights.WRAPPERS.sub("", name): whole(parameter).clone()
                for name, parameter in model.named_parameters()
                if ".lora_" in name
            }
        )
        rotary(model).register_forward_hook(
            lambda module, *_: frequencies.append(module.inv_freq.clone())
        )
        return model

    llama_fsdp.wrap_model = recording_wrap
    for name, flags in json.loads(variants).items():
        args = parse_flags(llama_fsdp, [*named, *flags])
        prepare_directory(Path(args.output_dir))
        results[name], driven = ten_steps(llama_fsdp, args, device)
        results[name]["frequencies"] = frequencies[-1]
        results[name]["initial_adapters"] = initial_adapters[-1]
        unit = FSDPModule if args.fsdp == 2 else FSDP
        results[name]["units"] = sum(isinstance(m, unit) for m in driven.model.modules())
    if dist.get_rank() == 0:
        torch.save(results, output)
    llama_fsdp.cleanup()


if __name__ == "__main__":
    main()
    os._exit(0)  # as the scripts do
