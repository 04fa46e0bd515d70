"""The numbers of a run: metrics.jsonl, the lines and the bar on the screen, and trackers."""

import copy
import json
import resource
import subprocess
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from . import ranks, trained
from .models import attention_of, unwrapped
from .screen import Progress
from .state import TrainState

# Peak of a GPU whose name contains the key, in dense bf16: half of what NVIDIA's data sheets give
# with sparsity. For Blackwell: HGX B200 and B300, 36 PFLOPS of 8 GPUs; GB200 and GB300 NVL72,
# 360 PFLOPS of 72. The first key that fits counts, so a longer name comes before the one in it.
PEAK_TFLOPS = {
    "GB200": 2500, "GB300": 2500, "B200": 2250, "B300": 2250,
    "H100 PCIe": 756, "H100 NVL": 835, "H200 NVL": 835,
    "A100": 312, "H100": 989, "H200": 989, "L40S": 362,
}  # fmt: skip
DIGITS = {"lr": 3, "grad_norm": 3}  # on the screen; 4 of others
SHORT = {"grad_norm": "norm", "tokens_per_second": "tokens/s", "mfu": "MFU"}  # on the screen
UNSAID = {"tokens_per_second_per_rank", "tflops_per_gpu", "assumed_peak_tflops"}


def shown(number: float, digits: int) -> str:
    """Return a number for the screen: 0.01184, 12,380."""
    if abs(number) >= 1000:
        return f"{number:,.0f}"
    return f"{number:.{digits}g}"


def read_events(directory: Path) -> tuple[list[tuple[str, dict[str, Any]]], int]:
    """Read metrics.jsonl of the run in `directory`; no file is an empty one.

    Returns the events, each with its line, and how many lines are none: torn, or somebody else's.
    """
    path = directory / "metrics.jsonl"
    if not path.exists():
        return [], 0
    events = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        is_event = isinstance(event, dict) and {"event", "step"} <= event.keys()
        if is_event and line.endswith("\n"):
            events.append((line, event))
    return events, len(lines) - len(events)


def last_start(directory: Path) -> dict[str, Any]:
    """Return the last event "start" of the run in OUTPUT_DIR `directory`, with its `arguments`;
    they are {} if there was none."""
    found = {"arguments": {}}
    for _, event in read_events(directory)[0]:
        if "arguments" in event:
            found = event
    return found


def truncate(directory: Path, step: int, without_val: bool = False) -> None:
    """Drop the lines of metrics.jsonl after `step` (0: all), and what is no event; rank 0 alone.

    `without_val` drops the validation of that step too, which is made again.
    """
    events, others = read_events(directory)
    if step and others:
        print(f"{directory / 'metrics.jsonl'}: {others} lines that are no events are left out")
    kept = []
    for line, values in events:
        is_again = without_val and (values["event"], values["step"]) == ("val", step)
        if step and values["step"] <= step and not is_again:
            kept.append(line)
    replace_text(directory / "metrics.jsonl", "".join(kept))


def replace_text(path: Path, text: str) -> None:
    """Write a file that is complete or as before, never half; rank 0 alone."""
    temporary = path.with_name(f"tmp-{path.name}")
    temporary.write_text(text)
    temporary.replace(path)


def peak_memory(device: torch.device) -> dict[str, float]:
    """Return this process's peak in 10^6 bytes: allocated and reserved on a GPU, else RSS."""
    if device.type == "cpu":
        return {"peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1.024e-3}
    return {
        "peak_memory_mb": torch.accelerator.max_memory_allocated() / 1e6,
        "peak_reserved_mb": torch.accelerator.max_memory_reserved() / 1e6,
    }


def peak_tflops(device_name: str) -> int | None:
    """Return the peak TFLOP/s in bf16 of the GPU of this name; None if unknown."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in device_name), None)


def flops_per_token(model: nn.Module, length: float) -> float | None:
    """Return the FLOP of a token's forward and backward pass, in a document of `length` tokens.

    They are 6 N + 12 L d T (Chowdhery et al. 2022, PaLM, appendix B): N parameters stand in matrix
    products, the head's among them, L layers have heads of d in all, and T is the length, masked or
    not. Recomputed activations do not count, nor do adapters. Frozen weights below adapters are
    4 N: they have no gradients. Both terms are read off two forward passes of a copy of the
    unwrapped Transformers `model` on meta: a pass over n tokens costs a n + b n^2. None where the
    model looks at values in its forward pass, for on meta there are none, and of encoder-decoders.
    """
    if model.config.is_encoder_decoder:
        return None
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"  # other kernels are not counted, or do not run on meta
    with torch.device("meta"):
        twin = type(model)(config)

    def cost(tokens: int) -> int:
        ids = torch.empty(1, tokens, dtype=torch.int64, device="meta")
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            twin(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        return counter.get_total_flops()

    try:
        short, long = cost(8), cost(16)
    except RuntimeError:
        return None
    quadratic = (long - 2 * short) / (2 * 8**2)
    linear = (short - quadratic * 8**2) / 8
    passes = 3
    if trained.of(model).is_part:
        passes = 2
    return passes * linear + 3 * quadratic * length


class Metrics:
    """Receives a run's events while it is entered; rank 0 writes, all ranks call.

    Floats are written unrounded. An event is {"event", "step", "epoch", and its values}.
    """

    def __init__(self, args: Namespace, directory: Path, script: str, state: TrainState) -> None:
        self.args = args
        self.directory = directory
        self.script = script
        self.state = state
        self.flops_per_token: float | None = None  # None: not known
        self._trackers: Any = None
        self._stack = ExitStack()
        self._progress = Progress("step", state.total_steps, "step", state.step)
        self._stack.callback(self._progress.close)
        self._seconds = 0.0  # of the steps since the last speed
        self._tokens = state.tokens  # at the last speed

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def log_start(self, loader: DataLoader) -> None:
        """Cut metrics.jsonl to the restored step, and say what this run is."""
        args, state = self.args, self.state
        attention = attention_of(unwrapped(state.model))
        load_memory = ranks.on_every_rank(peak_memory, state.device)
        if state.device.type != "cpu":
            self._count_flops(loader)
        if dist.get_rank() != 0:
            return
        truncate(self.directory, state.step, without_val=state.validation_due)
        if args.track:
            from .trackers import Trackers  # a copy may leave them out

            trackers = Trackers(args, self.directory, self.script, state.step)
            self._trackers = self._stack.enter_context(trackers)
        device = ranks.device_name(state.device)
        git = subprocess.run(
            "git rev-parse HEAD",
            shell=True,
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
        )
        self.log(
            "start",
            script=self.script,
            world_size=dist.get_world_size(),
            device=device,
            torch=torch.__version__,
            transformers=transformers.__version__,
            git=git.stdout.strip() or None,
            identity=state.identity,
            load_memory=load_memory,
            directory=str(Path.cwd()),
            attention=attention,
            arguments=vars(args),
        )
        how = args.strategy
        if args.fsdp == 2:
            how += " (FSDP2)"
        how += f", {args.precision}, attention {attention}"
        ranks.say(f"{dist.get_world_size()} x {device}, {how}")
        ranks.say(
            f"{len(loader.dataset):,} samples, global batch {state.identity['global batch']:,}: "
            f"{loader.batch_sampler.steps_per_epoch:,} steps an epoch, {state.total_steps:,} in all"
        )

    def _count_flops(self, loader: DataLoader) -> None:
        """Find what a token costs, in documents as long as the data set's are in the mean.

        A data set whose samples are packs says so in `span`.
        """
        length = getattr(loader.dataset, "span", None)
        if length is None:
            length = loader.collate_fn([loader.dataset[0]])["input_ids"].size(1)
        self.flops_per_token = flops_per_token(unwrapped(self.state.model), length)

    def log(self, event: str, **values: Any) -> None:
        """Append an event to metrics.jsonl, and print its numbers; rank 0 does it."""
        state = self.state
        if dist.get_rank() != 0:
            return
        line = {"event": event, "step": state.step, "epoch": state.epoch, **values}
        try:
            with (self.directory / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:  # a full disk is no reason to end
            ranks.say(f"metrics.jsonl could not be written ({error.strerror})")
        words = []
        for key, value in values.items():
            if key == "phase":
                words.append(value)
            elif type(value) is float and key not in UNSAID:
                words.append(f"{SHORT.get(key, key)} {shown(value, DIGITS.get(key, 4))}")
        lines = self._progress.lines
        if lines and event == "train":
            words.append(f"left {lines.left(state.step)}")
        if lines:
            lines.rest()
        if words:
            ranks.say("  ".join([f"{event:5} {state.step}/{state.total_steps}", *words]))
        if self._trackers and event != "start":  # whose values they have as configuration
            self._trackers.log(event, state.step, values)

    def count_step(self, seconds: float) -> None:
        """Take note of a step that is done."""
        self._seconds += seconds
        self._progress.update()

    def speed(self) -> dict[str, float]:
        """Return tokens so far, tokens per second since the last call, and tracked memory.

        Where the model's FLOPs are known, on GPUs: TFLOP/s of one, and the share of its peak (MFU).
        """
        state = self.state
        per_second = (state.tokens - self._tokens) / self._seconds
        per_rank = per_second / dist.get_world_size()
        values = {
            "tokens": state.tokens,
            "tokens_per_second": per_second,
            "tokens_per_second_per_rank": per_rank,
        }
        if self.flops_per_token:
            values["tflops_per_gpu"] = per_rank * self.flops_per_token / 1e12
            peak = peak_tflops(ranks.device_name(state.device))
            if peak:
                values["mfu"] = values["tflops_per_gpu"] / peak
                values["assumed_peak_tflops"] = peak
        self._tokens = state.tokens
        self._seconds = 0.0
        return values | self.memory()

    def memory(self) -> dict[str, float]:
        """Return the peak memory so far with --track-memory, else {}."""
        return peak_memory(self.state.device) if self.args.track_memory else {}

    def log_memory(self, phase: str) -> None:
        """Log the peak of a phase, with --track-memory; on a GPU the next one counts anew."""
        if self.args.track_memory:
            self.log("memory", phase=phase, **self.memory())
            if self.state.device.type != "cpu":
                torch.accelerator.reset_peak_memory_stats()

    def log_first_forward(self) -> None:
        """Log the peak of the first forward pass that is no validation's, with --track-memory."""
        if not self.args.track_memory:
            return

        def log(*_: object) -> None:
            if torch.is_grad_enabled():
                hook.remove()
                self.log_memory("first forward")

        hook = self.state.model.register_forward_hook(log)
