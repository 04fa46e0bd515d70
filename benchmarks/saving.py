"""Compare load, save, resume and export of a Llama with FSDP in Transformers and Accelerate.

    python benchmarks/saving.py                                 # 98M parameters, two CPU processes
    python benchmarks/saving.py --model 1.1B --processes 8

The files are bf16, as on the hub, and the weights fp32. Each stage is a separate launch:

- load: seconds until the model is sharded
- save: seconds that training waits for a save of weights and AdamW's moments, seconds until the
  files are on the disk, and seconds of a step without a save and of one right after a save
- resume: seconds until new processes have restored model and optimizer
- export: seconds until `from_pretrained` can load the directory, in fp32

MB (10^6 bytes) are the growth of a rank's anonymous memory, the maximum over ranks. On a CPU, the
MB of a load include the shard.

Transformers saves and exports with `save_pretrained`, with and without `distributed_checkpoint`,
and saves the optimizer with `save_optimizer_distributed`. Accelerate uses `save_state` and
`get_state_dict`. Both need two processes. A row is printed after each launch, with the medians so
far.
"""

import argparse
import itertools
import json
import os
import queue
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import step_time
import torch
import torch.distributed as dist
import transformers
from common import (
    LLAMAS,
    NO_DATA,
    AnonymousMemory,
    add_peers,
    launch,
    load,
    parse,
    random_batch,
    write_llama,
)
from transformers import ByT5Tokenizer

import llama_fsdp
from core import checkpoint, ranks
from core.export import export_model
from core.ranks import to_device
from core.steps import StepSampler, parameter_groups
from optional import checksums, safe_checkpoint

OURS = {
    "ours-fsdp1": ["--fsdp", "1"],
    "ours-fsdp1-full": ["--fsdp", "1", "--checkpoint-type", "full"],
    "ours-fsdp2": ["--fsdp", "2"],
}


class Ours:
    """Load, save, resume and export as llama_fsdp.py does."""

    def __init__(self, args: Any, device: torch.device):
        self.args, self.device = args, device
        self.checkpoints = args.run.output_dir / "checkpoints"
        self.steps = 0

    def load(self, needs_weights: bool = True) -> None:
        """Load the model and shard it."""
        self.model, _, self.shapes = load(llama_fsdp, self.args, self.device, needs_weights)

    def begin(self, needs_weights: bool = True) -> None:
        """Prepare the first step."""
        self.load(needs_weights)
        groups = parameter_groups(self.model, self.shapes, self.args.optim.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=self.args.optim.lr, fused=True)
        sampler = StepSampler(len(NO_DATA), 1, 1, self.args.optim.seed)
        self.state = checkpoint.new_state(
            __file__, self.model, self.shapes, [], self.optimizer, sampler, self.args
        )

    def step(self) -> None:
        """Make a step, as the peers do."""
        batch = to_device(random_batch(llama_fsdp, self.args), self.device)
        (llama_fsdp.summed_loss(self.model, batch) / batch["targets"]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def save(self, note: Callable[..., None]) -> None:
        """Save, and call `note` when the save is on the disk."""
        path = self.checkpoints / f"step-{self.steps:08d}"
        full = self.args.run.checkpoint_type == "full"
        tensors = checkpoint.snapshot(self.model, self.optimizer, self.state)
        checksums.save(path, tensors, self.state, full)
        note()
        ranks.on_rank_zero(checkpoint.prune, self.checkpoints, 1, path)

    def resume(self) -> float:
        """Resume from the newest checkpoint; return the time when it is restored."""
        newest = checksums.find_intact(self.checkpoints)
        self.begin(needs_weights=False)
        safe_checkpoint.check(newest)
        checkpoint.load(newest, self.model, self.optimizer, self.state)
        return time.perf_counter()

    def export(self, path: Path) -> None:
        """Write a directory for `from_pretrained`."""
        export_model(self.model, ByT5Tokenizer(), path, self.args.run.export_dtype)


class Transformers:
    """Load, save, resume and export with the functions of Transformers."""

    def __init__(self, args: Any, device: torch.device):
        self.args, self.device = args, device
        self.saved = f"{args.run.output_dir}/saved"

    def load(self) -> None:
        """Load the model and shard it."""
        self.model, self.optimizer = step_time.load_with_transformers(self.args)

    begin = load

    def step(self) -> None:
        """Make a step."""
        ids = random_batch(llama_fsdp, self.args)["input_ids"].to(self.device)
        self.model(ids, labels=ids, use_cache=False).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, note: Callable[..., None]) -> None:
        """Save model and optimizer, then call `note`."""
        from transformers.distributed.checkpoint import save_optimizer_distributed

        self.model.save_pretrained(self.saved, distributed_checkpoint=True)
        save_optimizer_distributed(self.model, self.optimizer, f"{self.saved}/optimizer")
        note()

    def resume(self) -> float:
        """Load the saved model and optimizer; return the time when they are ready."""
        from transformers.distributed.checkpoint import load_optimizer_distributed

        self.args.model.model_name = self.saved
        self.load()
        load_optimizer_distributed(self.model, self.optimizer, f"{self.saved}/optimizer")
        return time.perf_counter()

    def export(self, path: Path) -> None:
        """Write a directory for `from_pretrained`."""
        self.model.save_pretrained(path)


class Accelerate(Transformers):
    """Load, save, resume and export with the functions of Accelerate."""

    def load(self) -> None:
        """Load the model on every rank, and shard it."""
        self.accelerator = step_time.accelerator(self.args)
        model, optimizer = step_time.load_unsharded(self.args)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    begin = load

    def save(self, note: Callable[..., None]) -> None:
        """Save model and optimizer, then call `note`."""
        self.accelerator.save_state(self.saved)
        note()

    def resume(self) -> float:
        """Load the model, then its saved state; return the time when both are ready."""
        self.load()
        self.accelerator.load_state(self.saved)
        return time.perf_counter()

    def export(self, path: Path) -> None:
        """Gather the model on rank 0, and write it there."""
        whole = self.accelerator.get_state_dict(self.model)
        if self.accelerator.is_main_process:
            self.accelerator.unwrap_model(self.model).save_pretrained(path, state_dict=whole)


PEERS = {"transformers-fsdp2": Transformers, "accelerate-fsdp2": Accelerate}
if not find_spec("transformers.distributed.checkpoint"):  # Transformers 5.17 has none
    del PEERS["transformers-fsdp2"]
STAGES = ["load", "save", "resume", "export"]  # a launch for each; resume needs the save


def synchronize() -> None:
    """Wait for the GPU, because its work ends later than the calls that start it."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def timed(action: Callable[..., Any], *parts: Any) -> float:
    """Run an action on all ranks together; return the seconds until all have finished."""
    synchronize()
    dist.barrier(group=ranks.cpu_group)
    start = time.perf_counter()
    action(*parts)
    synchronize()
    dist.barrier(group=ranks.cpu_group)
    return time.perf_counter() - start


def with_memory(action: Callable[..., Any], *parts: Any) -> tuple[float, float]:
    """Run an action; return the seconds and the most MB of anonymous memory it added on a rank."""
    with AnonymousMemory() as memory:
        seconds = timed(action, *parts)
    rise = torch.tensor(memory.peak - memory.first)
    dist.all_reduce(rise, op=dist.ReduceOp.MAX, group=ranks.cpu_group)
    return seconds, rise.item()


def save(way: Ours | Transformers, saves: int) -> dict[str, float]:
    """Train and save `saves` times; return the median seconds by name."""
    way.begin()
    way.step()
    seconds: dict[str, list[float]] = {"save": [], "on disk": [], "step": [], "step beside": []}
    for _ in range(saves):
        seconds["step"].append(timed(way.step))
        ends: queue.SimpleQueue = queue.SimpleQueue()
        start = time.perf_counter()
        seconds["save"].append(timed(way.save, lambda *_, ends=ends: ends.put(time.perf_counter())))
        seconds["step beside"].append(timed(way.step))
        seconds["on disk"].append(ends.get() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def worker(options: argparse.Namespace) -> None:
    """Run one stage on this rank; rank 0 prints the measurements as JSON."""
    name, stage, directory = options.worker
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    flags = ["--model-name", f"{directory}/model", "--export-dtype", "fp32",
             "--no-activation-checkpointing", "--max-seq-length", "64", "--batch-size",
             "1", "--output-dir", f"{directory}/output"]  # fmt: skip
    args = parse(llama_fsdp, *flags, *OURS.get(name, []))
    device = ranks.setup(args.run.timeout_minutes)
    way = PEERS.get(name, Ours)(args, device)
    if stage == "save":
        result = save(way, options.saves)
    elif stage == "resume":
        dist.barrier(group=ranks.cpu_group)
        start = time.perf_counter()
        result = {"resume": way.resume() - start}
    else:
        seconds, rise = with_memory(way.load)
        result = {"load": seconds, "load MB": rise}
        if stage == "export":
            seconds, rise = with_memory(way.export, Path(directory, "export"))
            result = {"export": seconds, "export MB": rise}
    if dist.get_rank() == 0:
        print(json.dumps(result))
    ranks.leave(0)


def main() -> None:
    """Print a table with a row per way, after each launch."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(LLAMAS), default="98M", help="shape")
    parser.add_argument("--processes", type=int, default=2, help="ranks")
    parser.add_argument("--saves", type=int, default=5, help="saves of each way")
    parser.add_argument("--turns", type=int, default=3, help="launches of each stage, in turn")
    parser.add_argument("--ways", nargs="+", choices=[*OURS, *PEERS], help="which (default: all; "
        "peers only with two processes or more)")  # fmt: skip
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="which")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)  # way, stage, directory
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    ways = options.ways or add_peers(OURS, PEERS, options.processes)
    print(f"{options.model} parameters, {options.processes} processes; medians of the launches "
          "so far, in turn; seconds, and MB\n")  # fmt: skip
    results: dict[str, dict[str, list[float]]] = {name: {} for name in ways}
    with tempfile.TemporaryDirectory() as directory:
        write_llama(options.model, Path(directory, "model"), torch.bfloat16)
        os.sync()  # otherwise the files are still being written when the first way reads them
        for turn, name in itertools.product(range(1, options.turns + 1), ways):
            row = results[name]
            for stage in options.stages:
                command = [__file__, "--saves", options.saves, "--worker", name, stage, directory]
                for key, value in launch(options.processes, *command).items():
                    row.setdefault(key, []).append(value)
            for path in ("output", "export"):  # large models would fill the disk
                shutil.rmtree(f"{directory}/{path}", ignore_errors=True)
            if turn == 1 and name == ways[0]:
                print(f"| way | launches | {' | '.join(row)} |\n|---|---|{'---|' * len(row)}")
            cells = [f"{statistics.median(values):,.2f}" for values in row.values()]
            print(f"| {name} | {turn} | {' | '.join(cells)} |", flush=True)
    print("\n" + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
