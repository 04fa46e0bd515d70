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
import sys
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
    random_batch,
    write_llama,
)
from driven import Driven
from transformers import ByT5Tokenizer

import llama_fsdp
from benchmarks.driven import parse_flags
from runtime import export, ranks
from runtime.checkpoints import Saver
from runtime.run import Run

OURS = {
    "ours-fsdp1": ["--fsdp", "1"],
    "ours-fsdp1-full": ["--fsdp", "1", "--checkpoint-type", "full"],
    "ours-fsdp1-async": ["--fsdp", "1", "--async-save"],
    "ours-fsdp2": ["--fsdp", "2"],
    "ours-fsdp2-async": ["--fsdp", "2", "--async-save"],
}


class Resumed(Driven):
    """A training of ours that records when it is restored or initialized."""

    def restore(self, *parts: Any) -> Run | None:
        """Restore, and record the time before the checks of the loss."""
        *parts, check = parts

        def record() -> None:
            self.restored = time.perf_counter()
            check()

        return super().restore(*parts, record)


class Ours:
    """Load, save, resume and export as llama_fsdp.py does."""

    def __init__(self, args: argparse.Namespace, device: torch.device):
        self.args, self.device = args, device

    def load(self) -> None:
        """Load the model and shard it."""
        model, _, init = llama_fsdp.load_model(self.args, self.device)
        self.model = llama_fsdp.wrap_model(self.args, self.device, model, init)

    def begin(self, checkpoint: Path | None = None) -> float:
        """Prepare the first step; return the time when model and optimizer were ready."""
        self.run = Resumed(llama_fsdp, self.args, self.device, checkpoint, NO_DATA)
        state = self.run.state
        self.saver = Saver(self.args, self.run.directory, state, self.run.run.identity, state.step)
        return self.run.restored

    def step(self) -> None:
        """Make a step."""
        self.run.step([random_batch(llama_fsdp, self.args)])

    def save(self, note: Callable[..., None]) -> None:
        """Save, and call `note` when the save is on the disk, maybe later."""
        self.saver.save()
        if self.saver.under_way:
            self.saver.under_way.add_done_callback(note)
        else:
            note()

    def wait(self) -> None:
        """Wait for a save in the background."""
        self.saver.wait()

    def resume(self) -> float:
        """Resume from the newest checkpoint; return the time when it is restored."""
        return self.begin(max(Path(self.args.output_dir).glob("checkpoints/step-*")))

    def export(self, path: Path) -> None:
        """Write a directory for `from_pretrained`."""
        dtype = export.EXPORT_DTYPES[self.args.export_dtype]
        export.export_model(self.model, ByT5Tokenizer(), path, dtype)


class Transformers:
    """Load, save, resume and export with the functions of Transformers."""

    def __init__(self, args: argparse.Namespace, device: torch.device):
        self.args, self.device = args, device
        self.saved = f"{args.output_dir}/saved"

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

    def wait(self) -> None:
        """Do nothing, because no save is in the background."""

    def resume(self) -> float:
        """Load the saved model and optimizer; return the time when they are ready."""
        from transformers.distributed.checkpoint import load_optimizer_distributed

        self.args.model_name = self.saved
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
    dist.barrier(group=ranks.cpu_group())
    start = time.perf_counter()
    action(*parts)
    synchronize()
    dist.barrier(group=ranks.cpu_group())
    return time.perf_counter() - start


def with_memory(action: Callable[..., Any], *parts: Any) -> tuple[float, float]:
    """Run an action; return the seconds and the most MB of anonymous memory it added on a rank."""
    with AnonymousMemory() as memory:
        seconds = timed(action, *parts)
    rise = torch.tensor(memory.peak - memory.first)
    dist.all_reduce(rise, op=dist.ReduceOp.MAX, group=ranks.cpu_group())
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
        way.wait()
        seconds["on disk"].append(ends.get() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def worker(options: argparse.Namespace) -> None:
    """Run one stage on this rank; rank 0 prints the measurements as JSON."""
    name, stage, directory = options.worker
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    flags = ["--model-name", f"{directory}/model", "--dataset", "docstrings", "--export-dtype",
             "fp32", "--no-activation-checkpointing", "--max-seq-length", "64", "--batch-size",
             "1", "--keep-checkpoints", "1", "--output-dir", f"{directory}/output"]  # fmt: skip
    args = parse_flags(llama_fsdp, [*flags, *OURS.get(name, [])])
    device = llama_fsdp.setup(args)
    way = PEERS.get(name, Ours)(args, device)
    if stage == "save":
        result = save(way, options.saves)
    elif stage == "resume":
        dist.barrier(group=ranks.cpu_group())
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
    llama_fsdp.cleanup()


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
    sys.stdout.flush()
    os._exit(0)  # like `launch` in runtime/run.py, which explains it
