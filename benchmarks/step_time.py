"""Compare the step time of a Llama under FSDP in this repository's loop and in others.

    python benchmarks/step_time.py                              # 98M parameters, two CPU processes
    python benchmarks/step_time.py --model 1.1B --length 2048 --processes 8                 # GPUs
    python benchmarks/step_time.py --loops ours-fsdp2 ours-blocks    # recomputation

- ours: the unchanged `train` of llama_fsdp.py, from the end of one step to the next: data, token
  count, forward, backward, clip, optimizer, schedule and log.
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
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from common import ENDLESS, LLAMAS, Loop, Steps, add_peers, launch, parse, relay, train, write_llama
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader

import chat_dataset
import llama_fsdp
from core import ranks
from core.steps import MicroBatchCollator, StepSampler

OURS = {
    "ours-ddp": ["--strategy", "ddp"],
    "ours-fsdp1": ["--fsdp", "1"],
    "ours-fsdp2": ["--fsdp", "2"],
}
RECOMPUTING = {"ours-blocks": ["--fsdp", "2", "--activation-checkpointing"]}


def load_with_transformers(args: Any) -> tuple[nn.Module, Optimizer]:
    """Return the model, sharded by Transformers, and its optimizer."""
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(
        fsdp_size=dist.get_world_size(), fsdp_mixed_precision=args.sharding.precision == "bf16"
    )
    model = transformers.LlamaForCausalLM.from_pretrained(
        args.model.model_name, dtype=torch.float32, distributed_config=config
    )
    return model, new_optimizer(args, model)


def load_with_accelerate(args: Any) -> tuple[nn.Module, Optimizer]:
    """Return the model, sharded by Accelerate, and its optimizer."""
    return accelerator(args).prepare(*load_unsharded(args))


def accelerator(args: Any) -> Any:
    """Return an Accelerator that uses FSDP2."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    mixed = "bf16" if args.sharding.precision == "bf16" else "no"
    on_cpu = not torch.cuda.is_available()
    instance = Accelerator(mixed_precision=mixed, fsdp_plugin=plugin, cpu=on_cpu)
    if on_cpu:
        sharded = {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
        PartialState._shared_state |= sharded
        AcceleratorState._shared_state |= sharded
    return instance


def load_unsharded(args: Any) -> tuple[nn.Module, Optimizer]:
    """Return the model without sharding, and its optimizer."""
    name = args.model.model_name
    model = transformers.LlamaForCausalLM.from_pretrained(name, dtype=torch.float32)
    return model, new_optimizer(args, model)


def new_optimizer(args: Any, model: nn.Module) -> Optimizer:
    """Return AdamW with the settings of our loop."""
    optim = args.optim
    return AdamW(model.parameters(), optim.lr, weight_decay=optim.weight_decay, fused=True)


def batches(args: Any, rows: list) -> Steps:
    """Return the loader of llama_fsdp.py for steps of one micro-batch."""
    sampler = StepSampler(len(rows), args.optim)
    sampler.stop = args.optim.max_steps
    collate = MicroBatchCollator(chat_dataset.collate, args.optim)
    return DataLoader(rows, batch_sampler=sampler, collate_fn=collate)


def bare_loop(
    args: Any, model: nn.Module, optimizer: Optimizer, rows: list, losses: list[Tensor],
    end_of_step: Callable[[], None],
) -> None:  # fmt: skip
    """Train a model that a peer has prepared, and call `end_of_step` after each step."""
    device = next(model.parameters()).device
    model.train()
    for (batch,) in batches(args, rows):
        batch = ranks.to_device(batch, device)
        # Our labels are shifted already. Without positions, a row is one document.
        labels = {"labels": batch["labels"], "shift_labels": batch["labels"]}
        loss = model(batch["input_ids"], use_cache=False, **labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        end_of_step()


def own_loop(
    args: Any, device: torch.device, rows: list, end_of_step: Callable[[], None]
) -> None:  # fmt: skip
    """Run `train` of llama_fsdp.py, and call `end_of_step` after each step and its log."""

    def steps(loader: Steps) -> Steps:
        for batches in loader:
            yield batches
            end_of_step()

    train(llama_fsdp, args, device, steps, rows)


PEERS = {"transformers-fsdp2": load_with_transformers, "accelerate-fsdp2": load_with_accelerate}


def worker(options: argparse.Namespace, directory: str) -> None:
    """Run all loops on this rank; rank 0 prints the measurements as JSON."""
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    turn = 10 if torch.cuda.is_available() else 1
    common = ["--model-name", directory, *ENDLESS, "--lr-schedule", "step", "--gamma", "1",
              "--weight-decay", "0", "--log-every", turn, "--max-seq-length", options.length,
              "--batch-size", options.batch_size, "--no-activation-checkpointing"]  # fmt: skip

    def arguments(name: str) -> Any:
        flags = (OURS | RECOMPUTING).get(name, [])
        return parse(llama_fsdp, *common, "--output-dir", f"{directory}/{name}", *flags)

    device = ranks.setup(arguments("ours-fsdp1").run.timeout_minutes)
    vocabulary = transformers.AutoConfig.from_pretrained(directory).vocab_size
    random = torch.Generator().manual_seed(0)
    steps = options.steps + 2 * turn  # with the first turn, which is not timed
    count = steps * options.batch_size * dist.get_world_size()
    ids = torch.randint(vocabulary, (count, options.length + 1), generator=random).numpy()
    rows = [[{"input_ids": row, "labels": row}] for row in ids]
    loops: dict[str, Loop] = {}
    losses: dict[str, list[Tensor]] = {name: [] for name in options.loops if name in PEERS}
    for name in options.loops:
        args = arguments(name)
        if name in PEERS:
            parts = *PEERS[name](args), rows, losses[name]
            loops[name] = functools.partial(bare_loop, args, *parts)
        else:
            loops[name] = functools.partial(own_loop, args, device, rows)
    results = relay(loops, math.ceil(options.steps / turn), device, turn)
    for name in options.loops:
        if name in PEERS:
            loss = torch.stack(losses[name][-turn:]).mean()  # this rank's
            dist.all_reduce(loss)
            results[name]["loss"] = loss.item() / dist.get_world_size()
        elif dist.get_rank() == 0:
            lines = Path(directory, name, "metrics.jsonl").read_text().splitlines()
            results[name]["loss"] = json.loads(lines[-1])["loss"]
    if dist.get_rank() == 0:
        print(json.dumps(results))
    ranks.leave(0)


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
        choices=[*OURS, *PEERS, *RECOMPUTING],
        help="which (default: all but ours-blocks; peers only with two processes)",
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
