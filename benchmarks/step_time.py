"""Compare the step time of a Llama under FSDP in this repository's loop and in others.

    python benchmarks/step_time.py                              # 98M parameters, two CPU processes
    python benchmarks/step_time.py --model 1.1B --length 2048 --processes 8                 # GPUs
    python benchmarks/step_time.py --loops ours-fsdp2 ours-blocks    # recomputation

- ours: the unchanged `train` of llama_fsdp.py, from the end of one step to the next: data, token
  count, forward, backward, clip, optimizer, schedule, progress bar and log.
- transformers: only forward, backward, clip, step and zero_grad, on a model that Transformers has
  sharded by FSDP2 while loading it.
- accelerate: the same on a model that Accelerate has sharded by FSDP2. On a CPU it would silently
  use DistributedDataParallel, so the benchmark forces it to shard. Its FSDP1 fails there
  ("Inconsistent compute device and `device_id` on rank 0: cpu vs cpu:0"). Transformers' Trainer
  uses Accelerate: there FSDP2 becomes DistributedDataParallel, and FSDP1 fails ("There are
  currently no available devices found").

All train from the same weights on the same batches, in which every position is a target, with fused
AdamW in the same precision, so the loss of the last step agrees. Only ours-blocks, under FSDP2,
recomputes the blocks. The peers need two processes: on one, Transformers does not shard and leaves
the model on the CPU in fp32. Each loop runs in its own thread. It waits while the others make their
step, after a barrier of all ranks. On GPUs a turn is ten steps, so that a step need not wait for
the GPU. CPU seconds are those of rank 0 and vary less than wall time.
"""

import argparse
import functools
import json
import math
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from common import LLAMAS, add_peers, launch, relay, write_llama
from driven import TimedRun
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader

import llama_fsdp
import policies
from benchmarks.driven import parse_flags
from runtime import batches

OURS = {
    "ours-ddp": ["--strategy", "ddp"],
    "ours-fsdp1": ["--fsdp", "1"],
    "ours-fsdp2": ["--fsdp", "2"],
}
RECOMPUTING = {"ours-blocks": ["--fsdp", "2", "--activation-checkpointing"]}
UNFUSED = {"ours-unfused": ["--fsdp", "2"]}  # with the model's own RMS norms


def load_with_transformers(args: argparse.Namespace) -> tuple[nn.Module, Optimizer]:
    """Return the model, sharded by Transformers, and its optimizer."""
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(
        fsdp_size=dist.get_world_size(), fsdp_mixed_precision=args.precision == "bf16"
    )
    model = transformers.LlamaForCausalLM.from_pretrained(
        args.model_name, dtype=torch.float32, distributed_config=config
    )
    return model, new_optimizer(args, model)


def load_with_accelerate(args: argparse.Namespace) -> tuple[nn.Module, Optimizer]:
    """Return the model, sharded by Accelerate, and its optimizer."""
    return accelerator(args).prepare(*load_unsharded(args))


def accelerator(args: argparse.Namespace) -> Any:
    """Return an Accelerator that uses FSDP2."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    mixed = "bf16" if args.precision == "bf16" else "no"
    on_cpu = not torch.cuda.is_available()
    instance = Accelerator(mixed_precision=mixed, fsdp_plugin=plugin, cpu=on_cpu)
    if on_cpu:
        sharded = {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
        PartialState._shared_state |= sharded
        AcceleratorState._shared_state |= sharded
    return instance


def load_unsharded(args: argparse.Namespace) -> tuple[nn.Module, Optimizer]:
    """Return the model without sharding, and its optimizer."""
    model = transformers.LlamaForCausalLM.from_pretrained(args.model_name, dtype=torch.float32)
    return model, new_optimizer(args, model)


def new_optimizer(args: argparse.Namespace, model: nn.Module) -> Optimizer:
    """Return AdamW with the settings of our loop."""
    return AdamW(model.parameters(), args.lr, weight_decay=args.weight_decay, fused=True)


class Bare:
    """A minimal training loop on a model and optimizer that a peer has prepared."""

    def __init__(self, args: argparse.Namespace, model: nn.Module, optimizer: Optimizer):
        self.args, self.model, self.optimizer = args, model, optimizer
        self.losses: list[Tensor] = []

    def loop(self, loader: DataLoader, end_of_step: Callable[[], None]) -> None:
        """Train on the batches of `loader`, and call `end_of_step` after each step."""
        device = next(self.model.parameters()).device
        self.model.train()
        while True:
            for batch in loader:
                batch = batches.to_device(batch, device)
                # Our labels are shifted already. Without positions, a row is one document.
                labels = {"labels": batch["labels"], "shift_labels": batch["labels"]}
                loss = self.model(batch["input_ids"], use_cache=False, **labels).loss
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.losses.append(loss.detach())
                end_of_step()


PEERS = {"transformers-fsdp2": load_with_transformers, "accelerate-fsdp2": load_with_accelerate}


def worker(options: argparse.Namespace, directory: str) -> None:
    """Run all loops on this rank; rank 0 prints the measurements as JSON."""
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    turn = 10 if torch.cuda.is_available() else 1
    common = ["--model-name", directory, "--dataset", "docstrings", "--max-steps", "10000",
              "--lr-schedule", "step", "--gamma", "1", "--weight-decay", "0", "--log-every", turn,
              "--max-seq-length", options.length, "--batch-size", options.batch_size,
              "--no-activation-checkpointing", "--output-dir", f"{directory}/output"]  # fmt: skip

    def parse(name: str) -> argparse.Namespace:
        return parse_flags(
            llama_fsdp, [*map(str, common), *(OURS | RECOMPUTING | UNFUSED).get(name, [])]
        )

    device = llama_fsdp.setup(parse("ours-fsdp1"))
    vocabulary = transformers.AutoConfig.from_pretrained(directory).vocab_size
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (1024, options.length + 1), generator=random).numpy()
    rows = [[{"input_ids": row, "labels": row}] for row in ids]
    runs: dict[str, TimedRun | Bare] = {}
    loops = {}
    for name in options.loops:
        args = parse(name)
        if name not in PEERS:
            with mock.patch("policies.fuse", policies.fuse if name not in UNFUSED else id):
                runs[name] = TimedRun(llama_fsdp, args, device, sets=(rows, {}))
            loops[name] = runs[name].loop
        else:
            runs[name] = Bare(args, *PEERS[name](args))
            sampler = batches.GlobalBatchSampler(len(rows), args.batch_size, 1, args.seed)
            loader = DataLoader(rows, batch_sampler=sampler, collate_fn=llama_fsdp.data.collate)
            loops[name] = functools.partial(runs[name].loop, loader)
    results = relay(loops, math.ceil(options.steps / turn), device, turn)
    for name, run in runs.items():
        losses = run.losses if name in PEERS else run.run.losses
        loss = torch.as_tensor(losses[-1], device=device)
        if name in PEERS:  # this rank's
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        results[name] |= {"loss": loss.item(), "wrapped": type(run.model).__name__}
    if dist.get_rank() == 0:
        print(json.dumps(results))
    llama_fsdp.cleanup()


def main() -> None:
    """Print a table with a row per loop."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(LLAMAS), default="98M", help="shape")
    parser.add_argument("--processes", type=int, default=2, help="ranks, one per GPU")
    parser.add_argument("--batch-size", type=int, default=2, help="per rank")
    parser.add_argument("--length", type=int, default=512, help="tokens in a sequence")
    parser.add_argument(
        "--steps", type=int, default=15, help="timed steps of each loop; on GPUs in tens"
    )
    parser.add_argument(
        "--loops",
        nargs="+",
        choices=[*OURS, *PEERS, *RECOMPUTING, *UNFUSED],
        help="which (default: all but ours-blocks, ours-unfused; peers only with two processes)",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # directory
    options = parser.parse_args()
    if options.worker:
        worker(options, options.worker)
        return
    options.loops = options.loops or add_peers(OURS, PEERS, options.processes)
    with tempfile.TemporaryDirectory() as directory:
        write_llama(options.model, Path(directory))
        flags = ["--batch-size", options.batch_size, "--length", options.length]
        flags += ["--steps", options.steps, "--worker", directory, "--loops", *options.loops]
        results = launch(options.processes, __file__, *flags)
    print(f"{options.model} parameters, {options.processes} processes x {options.batch_size} x "
          f"{options.length} tokens; medians of {options.steps} steps in turn\n")  # fmt: skip
    base = "transformers-fsdp2" if "transformers-fsdp2" in results else next(iter(results))
    print(f"| loop | s | of {base} | CPU s | of {base} | tokens/s | last loss |")
    print("|---|---|---|---|---|---|---|")
    tokens = options.processes * options.batch_size * options.length
    medians = {
        name: [statistics.median(row[key]) for key in ("seconds", "cpu_seconds")]
        for name, row in results.items()
    }
    for name, (seconds, cpu) in medians.items():
        shares = [f"{x / y:.3f}" for x, y in zip((seconds, cpu), medians[base], strict=True)]
        print(f"| {name} | {seconds:.3f} | {shares[0]} | {cpu:.3f} | {shares[1]} "
              f"| {tokens / seconds:,.0f} | {results[name]['loss']:.6f} |")  # fmt: skip
    print("\n" + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # like `launch` in runtime/run.py, which explains it
