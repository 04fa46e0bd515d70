"""Plot loss, learning rate, gradient norm, speed and memory of runs from their metrics.jsonl.
Or plot the memory that a model needs under each strategy.

    python benchmarks/plot_runs.py output/a output/b --picture runs.png
    python tools/memory_estimator.py --json > 7b.json
    python benchmarks/plot_runs.py --estimate 7b.json --title "Llama 2 7B"

It needs matplotlib. Lines are training metrics, dots are validations, and losses are logarithmic.
An estimate is plotted as stacked terms. Its dot is the peak, which is less than the sum of the
terms if they are not all held at the same time.
"""

import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro
from tyro.conf import Positional

from core import steps

try:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
except ImportError:
    sys.exit("plot_runs.py needs matplotlib. Run `pip install matplotlib`.")

PANELS = {
    "loss": "Loss, nats per target token",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm before clipping",
    "tokens_per_second": "Tokens per second, all ranks together",
    "peak_memory_mb": "Peak memory of rank 0, MB (10^6 bytes)",
}
Panel = Literal[*PANELS]
TERMS = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer": "optimizer state",
    "unsharded": "unsharded units; under ddp casts",
    "activation": "activations",
    "logit": "logits",
}


@dataclass
class Args:
    """The flags."""

    runs: Positional[tuple[Path, ...]] = ()  # output directories
    panels: tuple[Panel, ...] = tuple(PANELS)  # quantities to draw
    estimate: Path | None = None  # output of tools/memory_estimator.py --json
    title: str = ""  # title of the picture
    picture: Path = Path("runs.png")  # file to write


def read(run: Path, event: str) -> list[dict]:
    """Return the lines of an event in a run's metrics.jsonl; exit if there is no such file."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        sys.exit(f"{path} is missing. Pass the --output-dir of a run.")
    lines = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):  # incomplete, because the run is still writing
            lines.append(json.loads(line))
    return [line for line in lines if line["event"] == event]


def rates(run: Path) -> list[tuple[int, float]]:
    """Return the number and the learning rate of each step, also of those that have no line."""
    start = read(run, "start")[-1]
    optim = SimpleNamespace(**start["arguments"]["optim"])
    total_steps = optim.max_steps or optim.epochs * start["epoch_steps"]
    factors = steps.schedule(optim, total_steps, start["epoch_steps"])
    return [(step, optim.lr * factor) for step, factor in enumerate(factors, 1)]


def draw(runs: tuple[Path, ...], panels: tuple[str, ...]) -> plt.Figure:
    """Return a figure with a panel for each quantity and a color for each run."""
    height = 0.6 + 1.8 * max(len(panels), 2)  # small: legible at a width of 600 pixels
    figure, axes = plt.subplots(len(panels), sharex=True, squeeze=False, figsize=(6.5, height))
    for axis, key in zip(axes.flat, panels, strict=True):
        axis.set_title(PANELS[key], loc="left", fontsize=11)
        axis.grid(alpha=0.3)
        for number, run in enumerate(runs):
            styles = {"train": "-", "val": "o"} if key == "loss" else {"train": "-"}
            for event, style in styles.items():
                points = [(line["step"], line[key]) for line in read(run, event) if key in line]
                if key == "lr":
                    points = rates(run)
                label = f"{run}: {'training' if event == 'train' else 'validation'}"
                axis.plot(*zip(*points, strict=True), style, color=f"C{number}", label=label)
        if key == "loss":
            axis.set_yscale("log")
        else:
            axis.set_ylim(0, 1.1 * axis.dataLim.y1)
    axes.flat[0].legend()
    axes.flat[-1].set_xlabel("optimizer step")
    return figure


def draw_estimate(path: Path) -> plt.Figure:
    """Return a figure with a bar of stacked terms for each row of an estimate, with a dot at the
    peak."""
    rows = json.loads(path.read_text())["estimates"]
    places = range(len(rows))
    figure, axis = plt.subplots(figsize=(11, 1.6 + 0.4 * len(rows)))
    # Each term starts where the bars end so far.
    ends = [0.0 for _ in rows]
    for term, label in TERMS.items():
        sizes = [row[f"{term}_bytes"] / 1e9 for row in rows]
        axis.barh(places, sizes, 0.7, ends, label=label)
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    peaks = [row["total_bytes"] / 1e9 for row in rows]
    axis.plot(peaks, places, "o", color="black", label="peak: not all terms are held at once")
    names = []
    for place, row in enumerate(rows):
        axis.text(max(ends[place], peaks[place]), place, f"  {peaks[place]:.1f}", va="center")
        name = row["strategy"] + ", CPU offload" * row["cpu_offload"]
        kind = row["activation_checkpointing"]
        names.append(name if kind == "none" else f"{name}, {kind}")
    axis.set_yticks(places, names)
    axis.invert_yaxis()
    axis.margins(x=0.1)
    axis.set_xlabel("GB (10^9 bytes) on each GPU")
    axis.legend(loc="lower right")
    return figure


def main() -> None:
    """Plot runs or an estimate, as the flags ask for."""
    args = tyro.cli(Args, description=__doc__)
    figure = draw_estimate(args.estimate) if args.estimate else draw(args.runs, args.panels)
    figure.suptitle(args.title, fontsize=13)
    figure.tight_layout()
    figure.savefig(args.picture, dpi=160)
    print(args.picture)


if __name__ == "__main__":
    main()
