"""OUTPUT_DIR and the numbers of a run: status, metrics.jsonl, lines and the progress bar. Any rank
may call these functions unless their docstrings differ. Only rank 0 writes."""

import contextlib
import json
import resource
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from tqdm import tqdm

from .ranks import Problem, on_every_rank, on_rank_zero, print0


def open_directory(directory: Path) -> None:
    """Create the directory of a run. All ranks call this. Raise Problem if the nodes do not share
    it: then no checkpoint would be complete."""
    status = directory / "status"
    on_rank_zero(lambda: directory.mkdir(parents=True, exist_ok=True))
    on_rank_zero(status.touch)
    if not all(on_every_rank(status.exists)):
        raise Problem(f"--output-dir {directory} is not on a file system that all nodes share.")


def write_status(directory: Path, word: str) -> None:
    """Write to the file status of a run: running (also after an error), stopped or finished; and on
    the second line the step of the newest checkpoint."""
    if dist.get_rank() == 0:
        saved = sorted(directory.glob("checkpoints/step-*/train_state.json"))
        step = int(saved[-1].parent.name.removeprefix("step-")) if saved else 0
        with contextlib.suppress(OSError):  # do not hide the reason for the end
            (directory / "status").write_text(f"{word}\nsaved step {step}\n")


class Log:
    """metrics.jsonl: an object {"event", "step", "time", ...} per line. Events after the step of
    `state`, and others that will be repeated, are deleted. Numbers may be tensors, for which rank 0
    waits."""

    def __init__(self, directory: Path, state: dict[str, Any], total: int) -> None:
        self.total = total
        self.path = directory / "metrics.jsonl"
        self._start = time.perf_counter()
        self._tokens, self._since = state["tokens"], self._start  # of the last train event
        if dist.get_rank() == 0:
            _truncate(self.path, state["step"], state["eval_due"])

    def write(self, event: str, step: int, tokens: int = 0, **values: Any) -> dict[str, Any]:
        """Append an event to metrics.jsonl, print its values, and return it; {} on other ranks.

        `tokens` of the run so far give those per second since the last call with `tokens`.
        """
        if dist.get_rank() != 0:
            return {}
        values = {key: x.item() if isinstance(x, Tensor) else x for key, x in values.items()}
        numbers = {key: x for key, x in values.items() if isinstance(x, int | float | str)}
        numbers.pop("best_step", None)  # the line would be longer than 80 columns
        if event == "start":
            values |= {"torch": torch.__version__, "transformers": transformers.__version__}
        if event == "done":
            values["minutes"] = (time.perf_counter() - self._start) / 60
            print0(f"Finished in {short(values['minutes'])} minutes.")
        values = {"event": event, "step": step, "time": time.time()} | values
        if tokens:
            speed = (tokens - self._tokens) / (time.perf_counter() - self._since)
            self._tokens, self._since = tokens, time.perf_counter()
            numbers["tokens/s"] = speed
            values |= {"tokens_per_second": speed, "tokens": tokens}
            values["peak_memory_mb"] = peak_memory()
        words = [f"{event:5} {step}/{self.total}"]
        words += [f"{key} {x if isinstance(x, str) else short(x)}" for key, x in numbers.items()]
        print0("  ".join(words))
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(values, default=str) + "\n")
        except OSError as error:  # a full disk; the next save tells whether work is lost
            print0(f"{self.path} lacks this line ({error}).")
        return values

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """A context for other work than training, which does not count in tokens per second."""
        start = time.perf_counter()
        yield
        self._since += time.perf_counter() - start


def short(value: float) -> str:
    """Return a number in at most eight characters if it is at least 0.0001 and below 1e100."""
    return f"{value:,.0f}" if 1000 <= value < 999_999 else f"{value:.4g}".replace("e+", "e")


def progress(items: Iterable, text: str, total: int, done: int = 0) -> Iterable:
    """Return items, with a bar on rank 0 if it has a terminal."""
    hidden = dist.get_rank() > 0 or None  # None: unless there is a terminal
    return tqdm(items, text, total, leave=False, disable=hidden, initial=done, dynamic_ncols=True)


def write_results(path: Path, results: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Print results, and write them to a file with the run's arguments. All ranks call this."""
    text = json.dumps(results | {"arguments": arguments}, indent=1, default=str)
    on_rank_zero(path.write_text, text)
    print0(f"{json.dumps(results, indent=1)}\nThe results are in {path}")


def peak_memory() -> float:
    """Return this process's peak memory in 10^6 bytes: allocated on a GPU, otherwise RSS."""
    if torch.accelerator.is_available():
        return torch.accelerator.max_memory_allocated() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1.024e-3


def _truncate(path: Path, step: int, eval_due: bool) -> None:
    """Delete invalid lines and events that will be repeated: after `step`, for step 0 all, the end
    of the run, and with `eval_due` the validation of this step."""
    kept = []
    path.touch()
    for line in path.read_text(errors="replace").splitlines() if step else []:
        with contextlib.suppress(ValueError, KeyError, TypeError):  # cut off, or not of a run
            event = json.loads(line)
            is_repeated = event["event"] == "done" or eval_due and event["event"] == "val"
            if event["step"] < step or event["step"] == step and not is_repeated:
                kept.append(line + "\n")
    temporary = path.with_name("tmp-metrics.jsonl")
    temporary.write_text("".join(kept))
    temporary.replace(path)
