"""Plot loss, learning rate, gradient norm, speed and memory of runs from their metrics.jsonl.
Or plot the memory that a model needs under each strategy.

    python benchmarks/plot_runs.py output/a output/b --picture runs.png
    python tools/memory_estimator.py --json > 7b.json
    python tools/memory_estimator.py --json --no-activation-checkpointing > 7b-plain.json
    python benchmarks/plot_runs.py --estimate 7b.json 7b-plain.json --title "Llama 2 7B"

It needs matplotlib. Lines are training metrics and dots are validations. An estimate is plotted as
the stacked terms under AdamW. Its dot is the peak, which is less than the sum of the terms if they
are not all held at the same time.
"""

import argparse
import contextlib
import json
import sys
from pathlib import Path

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
TERMS = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer": "optimizer state",
    "unsharded": "unsharded units; under ddp casts",
    "activation": "activations",
    "logit": "logits",
}
PEAK = "peak: not all terms are held at once"

Events = dict[str, list[dict]]  # the lines of a metrics.jsonl by event


def read(run: Path) -> Events:
    """Return the events of a run; raise ValueError if it has no training step."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} is missing. Pass the --output-dir of a run.")
    events: Events = {}
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):  # incomplete, because the run is still writing
            values = json.loads(line)
            events.setdefault(values["event"], []).append(values)
    if "train" not in events:
        raise ValueError(f"{path} has no training step yet.")
    return events


def draw(runs: dict[str, Events], panels: list[str], title: str, picture: Path) -> None:
    """Draw a panel for each quantity that a run has logged, with a color for each run."""
    lines = [line for events in runs.values() for line in events["train"]]
    panels = [key for key in panels if any(key in line for line in lines)]
    height = 0.6 + 1.8 * max(len(panels), 2)  # small: legible at a width of 600 pixels
    figure, axes = plt.subplots(len(panels), sharex=True, squeeze=False, figsize=(6.5, height))
    for axis, key in zip(axes.flat, panels, strict=True):
        for number, (name, events) in enumerate(runs.items()):
            color = f"C{number}"
            draw_points(axis, events["train"], key, "-", color=color, label=f"{name}: training")
            if key == "loss":
                validations = events.get("val", [])
                label = f"{name}: validation"
                draw_points(axis, validations, key, "o", color=color, label=label)
        axis.set_title(PANELS[key], loc="left", fontsize=11)
        if key != "loss":
            axis.set_ylim(0, 1.1 * axis.dataLim.y1)
        axis.grid(alpha=0.3)
    axes.flat[0].legend()
    axes.flat[-1].set_xlabel("optimizer step")
    save(figure, title, picture)


def draw_points(axis: "plt.Axes", lines: list[dict], key: str, style: str, **options: str) -> None:
    """Draw the quantity `key` by step, for the events that contain it."""
    lines = [line for line in lines if key in line]
    steps = [line["step"] for line in lines]
    values = [line[key] for line in lines]
    axis.plot(steps, values, style, **options)


def draw_estimate(rows: list[dict], title: str, picture: Path) -> None:
    """Draw a bar of stacked terms for each estimate, with a dot at the
    peak."""
    rows = [row for row in rows if row["optimizer"] == "adamw"]
    strategies = list(dict.fromkeys(row["strategy"] for row in rows))

    def order(row: dict) -> tuple[int, bool, bool]:
        strategy = strategies.index(row["strategy"])
        return strategy, row["cpu_offload"], row["activation_checkpointing"]

    rows.sort(key=order)
    figure, axis = plt.subplots(figsize=(11, 1.6 + 0.4 * len(rows)))
    ends = []  # where the bars end so far
    for number, (term, label) in enumerate(TERMS.items()):
        sizes = [row[f"{term}_bytes"] / 1e9 for row in rows]
        starts = ends or [0.0] * len(rows)
        axis.barh(range(len(rows)), sizes, 0.7, starts, color=f"C{number}", label=label)
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    peaks = [row["total_bytes"] / 1e9 for row in rows]
    axis.plot(peaks, range(len(rows)), "o", color="black", markersize=5, label=PEAK)
    for number, (end, peak) in enumerate(zip(ends, peaks, strict=True)):
        axis.text(max(end, peak), number, f"  {peak:.1f}", va="center")
    axis.set_yticks(range(len(rows)), [bar_name(row) for row in rows])
    axis.invert_yaxis()
    axis.margins(x=0.1)
    axis.set_xlabel("GB (10^9 bytes) on each GPU")
    axis.legend(loc="lower right")
    save(figure, title, picture)


def bar_name(row: dict) -> str:
    """Return the label of an estimate: strategy, CPU offload and activation checkpointing."""
    words = [row["strategy"]]
    if row["cpu_offload"]:
        words.append("CPU offload")
    if row["activation_checkpointing"]:
        words.append("activation checkpointing")
    return ", ".join(words)


def save(figure: "plt.Figure", title: str, picture: Path) -> None:
    """Write the figure, with its title, to the file `picture`."""
    figure.suptitle(title, fontsize=13)
    figure.tight_layout()
    figure.savefig(picture, dpi=160)


def main() -> None:
    """Plot runs or estimates, as the flags ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="*", help="output directories")
    parser.add_argument(
        "--panels", nargs="+", choices=PANELS, default=list(PANELS), help="quantities to draw"
    )
    parser.add_argument(
        "--estimate", type=Path, nargs="+", help="outputs of tools/memory_estimator.py --json"
    )
    parser.add_argument("--title", help="title of the picture")
    parser.add_argument("--picture", type=Path, default=Path("runs.png"), help="file to write")
    args = parser.parse_args()
    if bool(args.runs) == bool(args.estimate):
        parser.error("Pass output directories, or --estimate.")
    if args.estimate:
        rows = [row for path in args.estimate for row in json.loads(path.read_text())["estimates"]]
        draw_estimate(rows, args.title or "Estimated memory of training with AdamW", args.picture)
    else:
        try:
            runs = {str(run): read(run) for run in args.runs}
        except ValueError as error:
            sys.exit(str(error))
        draw(runs, args.panels, args.title or "Training runs", args.picture)
    print(args.picture)


if __name__ == "__main__":
    main()
