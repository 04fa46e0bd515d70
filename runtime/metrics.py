"""The numbers of a run: metrics.jsonl, log lines, the progress bar, and trackers."""

import contextlib
import importlib
import json
import os
import resource
import subprocess
import uuid
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PretrainedConfig

from . import ranks
from .screen import Progress
from .state import Facts, State
from .weights import unwrapped

# Peak TFLOP/s in dense bf16 by GPU name: half of the figures with sparsity in NVIDIA's data sheets.
PEAK_TFLOPS = {
    "NVIDIA A100-SXM4-40GB": 312, "NVIDIA A100-SXM4-80GB": 312, "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H200": 989, "NVIDIA B200": 2250, "NVIDIA L40S": 362,
}  # fmt: skip
ONLY_IN_FILE = {"peak_memory_mb", "tokens", "best_step"}  # not in log lines
SHORT = {"grad_norm": "norm", "tokens_per_second": "tokens/s", "mfu": "MFU"}  # names in log lines


def truncate(path: Path, step: int) -> None:
    """Delete events after `step` (0: all) and invalid lines from metrics.jsonl; rank 0 only."""
    kept = []
    path.touch()
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):  # cut off by a power failure
            if step and json.loads(line)["step"] <= step:
                kept.append(line + "\n")
    temporary = path.with_name("tmp-metrics.jsonl")
    temporary.write_text("".join(kept))
    temporary.replace(path)


def peak_memory(device: torch.device) -> float:
    """Return this process's peak memory in 10^6 bytes: allocated on a GPU, otherwise RSS."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1.024e-3
    return torch.accelerator.max_memory_allocated() / 1e6


def flops_per_token(config: PretrainedConfig, facts: Facts, length: float) -> float | None:
    """Return the FLOPs of a token's forward and backward pass in a document of `length` tokens.

    They are 6 N + 12 L d T (Chowdhery et al. 2022, PaLM, appendix B): N is `product_weights`,
    L the layers, d the hidden size, T the length. Recomputation does not count. Frozen weights
    below adapters have no gradients: 4 N. None for encoder-decoders and experts.
    """
    config = config.get_text_config()
    if config.is_encoder_decoder or facts.product_weights is None:
        return None
    passes = 4 if facts.trained_size < facts.size else 6
    attention = 12 * config.num_hidden_layers * config.hidden_size * length
    return passes * facts.product_weights + attention


class Metrics:
    """The log of a run. All ranks call it, and rank 0 writes {"event", "step", ...} objects."""

    def __init__(
        self, args: Namespace, directory: Path, script: str, state: State, loader: DataLoader
    ) -> None:
        self.path = directory / "metrics.jsonl"
        self.state = state
        self.flops_per_token: float | None = None  # None: unknown
        self.trackers: Any = None
        self._progress = Progress("step", state.total_steps, "step", state.step)
        self.shares: list[float] = []  # this rank's, of the losses since the last call of `speed`
        self._seconds = 0.0  # of the steps since then
        self._tokens = state.tokens  # at that time
        if dist.get_rank() == 0:
            truncate(self.path, state.step)
            # Kept open: a run that takes over replaces the file, so this run cannot write to it.
            self._file = self.path.open("a", buffering=1)
        self._log_start(script, vars(args), loader)

    def close(self) -> None:
        """Clear the progress bar and close the trackers."""
        self._progress.close()
        if self.trackers:
            self.trackers.close()

    def _log_start(self, script: str, flags: dict[str, Any], loader: DataLoader) -> None:
        """Log and print the run's settings."""
        state, facts = self.state, self.state.facts
        if state.device.type != "cpu":
            length = getattr(loader.dataset, "mean_length", None)  # packs: the mean document length
            length = length or loader.collate_fn([loader.dataset[0]])["input_ids"].size(1)
            config = unwrapped(state.model).config
            self.flops_per_token = flops_per_token(config, facts, length)
        if dist.get_rank() != 0:
            return
        if flags["track"]:
            self.trackers = Trackers(flags, self.path.with_name("track"), script, state.step)
        git = f"git -C '{Path(__file__).parent}' rev-parse HEAD 2>/dev/null"  # "" without git
        settings = {
            "script": script,
            "world_size": dist.get_world_size(),
            "device": ranks.device_name(state.device),
            "attention": facts.attention,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "git": subprocess.getoutput(git),
            "arguments": flags,
        }
        self._write("start", settings)
        ranks.say(
            f"{settings['world_size']} x {settings['device']}, {flags['strategy']}, "
            f"{flags['precision']}, attention {facts.attention}\n"
            f"{len(loader.dataset):,} samples, global batch {loader.batch_sampler.global_batch:,}: "
            f"{loader.batch_sampler.steps_per_epoch:,} steps an epoch, {state.total_steps:,} in all"
        )
        if loader.batch_sampler.global_batch > len(loader.dataset):
            ranks.say("The global batch is larger than the data. Lower --batch-size.")
        elif state.total_steps < 20:
            ranks.say("Few steps train little. Lower --batch-size, or train longer.")

    def log(self, event: str, **values: Any) -> None:
        """Append an event to metrics.jsonl and print its numbers. Tensors become numbers."""
        if dist.get_rank() != 0:
            return
        values = {key: x.item() if hasattr(x, "item") else x for key, x in values.items()}
        self._write(event, values)
        if self.trackers:
            self.trackers.log(event, self.state.step, values)
        if event == "save" and values["seconds"] < 10:
            return
        words = [f"{event:5} {self.state.step}/{self.state.total_steps}"]
        values["loss"] = values.pop("mean_loss", values.get("loss"))  # of the steps since the line
        for key, value in values.items():
            if isinstance(value, int | float) and key not in ONLY_IN_FILE:
                number = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
                words.append(f"{SHORT.get(key, key)} {number}")
        ranks.say("  ".join(words))

    def _write(self, event: str, values: dict[str, Any]) -> None:
        line = {"event": event, "step": self.state.step, "epoch": self.state.epoch, **values}
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:  # a full disk should not end the run
            ranks.say(f"metrics.jsonl could not be written ({error.strerror}).")

    def count_step(self, seconds: float) -> None:
        """Count a finished optimizer step, which took `seconds`."""
        self._seconds += seconds
        self._progress.update()

    def speed(self) -> dict[str, float]:
        """Return tokens so far, mean loss and tokens per second since the last call, peak memory
        and, where it is known, the share of the GPU's peak FLOP/s (MFU)."""
        state = self.state
        if not self.shares or not self._seconds:  # the last call was in this step
            return {}
        mean_loss = sum(ranks.on_every_rank(lambda: sum(self.shares))) / len(self.shares)
        self.shares.clear()
        per_second = (state.tokens - self._tokens) / self._seconds
        self._tokens, self._seconds = state.tokens, 0.0
        peak, name = peak_memory(state.device), ranks.device_name(state.device)
        values = {"mean_loss": mean_loss, "tokens": state.tokens, "peak_memory_mb": peak}
        values["tokens_per_second"] = per_second
        if self.flops_per_token and name in PEAK_TFLOPS:
            flops = per_second / dist.get_world_size() * self.flops_per_token
            values["mfu"] = flops / (PEAK_TFLOPS[name] * 1e12)
        return values


class Trackers:
    """The trackers of --track, in which a run that resumes at `step` continues."""

    def __init__(self, flags: dict[str, Any], directory: Path, script: str, step: int) -> None:
        self.open: dict[str, Any] = {}  # without those that have failed
        for name in flags["track"]:
            with self._tolerant(name):
                self.open[name] = _start_tracker(name, flags, directory, script, step)

    def log(self, event: str, step: int, values: dict[str, Any]) -> None:
        """Send an event's numbers as event/name, and those of `losses` as event/losses/name."""
        losses = {f"losses/{name}": loss for name, loss in values.get("losses", {}).items()}
        numbers = {f"{event}/{k}": x for k, x in (values | losses).items() if k != "losses"}
        for name, tracker in list(self.open.items()):
            with self._tolerant(name):
                if name == "tensorboard":
                    for key, number in numbers.items():
                        tracker.add_scalar(key, number, step)
                    tracker.flush()
                else:
                    tracker.log(numbers, step=step)

    def close(self) -> None:
        """Close all trackers."""
        for name, tracker in list(self.open.items()):
            with self._tolerant(name):
                tracker.close() if name == "tensorboard" else tracker.finish()

    @contextlib.contextmanager
    def _tolerant(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of any type: the training does not depend on a tracker
            self.open.pop(name, None)
            tqdm.write(f"--track {name} failed and is no longer used: {error!r}")


def _start_tracker(name: str, flags: dict, directory: Path, script: str, step: int) -> Any:
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(directory / name, purge_step=step + 1)  # later steps are repeated
    directory.mkdir(exist_ok=True)
    path = directory / "id"  # shared by all starts in this directory
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:8])
    run = path.read_text()
    ours = {"project": script, "name": run, "group": os.environ.get(f"{name}_run_group".upper())}
    if name == "wandb":
        ours |= {"id": os.environ.get("WANDB_RUN_ID", run), "dir": str(directory)}
    # The user's variables, such as WANDB_NAME or TRACKIO_PROJECT, take precedence.
    options = {key: os.environ.get(f"{name}_{key}".upper(), x) for key, x in ours.items()}
    return importlib.import_module(name).init(resume="allow", config=flags, **options)
