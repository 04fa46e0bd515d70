"""Draw one or several runs from their metrics.jsonl: loss, learning rate, norm, speed and memory.
Or draw the memory that a model needs under each strategy.

    python benchmarks/plot_runs.py output/a output/b --picture runs.png
    python memory_estimator.py --model-name llama-2-7b --json > 7b.json
    python benchmarks/plot_runs.py --estimate 7b.json --picture 7b.png

It needs matplotlib. Lines are training metrics, dots are validations; memory is drawn where
--track-memory measured it. Of an estimate the terms are stacked, AdamW's, without (upper bar) and
with activation checkpointing; the dot is the peak, which is less where terms do not meet in time.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PANELS = {
    "loss": "loss, nats a token",
    "lr": "learning rate",
    "grad_norm": "gradient norm before clipping",
    "tokens_per_second": "tokens/s",
    "peak_memory_mb": "peak memory, MB (10^6 bytes)",
}


def read(run: Path) -> dict[str, list[dict]]:
    """The lines of a run's metrics.jsonl by event."""
    events: dict[str, list[dict]] = {}
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        events.setdefault(line["event"], []).append(line)
    return events


def draw(runs: dict[str, dict[str, list[dict]]], picture: Path) -> None:
    """A panel for each quantity that any run has, a colour for each run."""
    lines = [line for events in runs.values() for line in events.get("train", [])]
    panels = {key: title for key, title in PANELS.items() if any(key in line for line in lines)}
    figure, axes = plt.subplots(len(panels), sharex=True, figsize=(8, 2.2 * len(panels)))
    for axis, (key, title) in zip(figure.axes, panels.items(), strict=True):
        for number, (name, events) in enumerate(runs.items()):
            points = [(x["step"], x[key]) for x in events.get("train", []) if key in x]
            axis.plot(*zip(*points, strict=True), color=f"C{number}", label=name)
            if key == "loss":
                points = [(x["step"], x[key]) for x in events.get("val", [])]
                axis.plot(*zip(*points, strict=True), "o", color=f"C{number}")
        axis.set_ylabel(title, fontsize=8)
        axis.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.axes[-1].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


TERMS = ("parameter", "gradient", "optimizer", "unsharded", "activation", "logit")


def draw_estimate(rows: list[dict], picture: Path) -> None:
    """A stack of the terms for each strategy, in GB (10^9 bytes) of one GPU."""
    rows = [row for row in rows if row["optimizer"] == "adamw"]
    names = list(dict.fromkeys((row["strategy"], row["cpu_offload"]) for row in rows))
    figure, axis = plt.subplots(figsize=(8, 0.6 * len(names) + 1))
    for row in rows:
        place = names.index((row["strategy"], row["cpu_offload"]))
        place, left = place + (0.2 if row["activation_checkpointing"] else -0.2), 0.0
        for number, term in enumerate(TERMS):
            size = row[f"{term}_bytes"] / 1e9
            label = term if row is rows[0] else None
            axis.barh(place, size, 0.36, left, color=f"C{number}", label=label)
            left += size
        axis.plot(row["total_bytes"] / 1e9, place, "o", color="black", markersize=4)
    axis.set_yticks(range(len(names)), [name + " + offload" * offload for name, offload in names])
    axis.invert_yaxis()
    axis.set_xlabel("GB (10^9 bytes) on each GPU")
    axis.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="*", help="output directories")
    parser.add_argument("--estimate", type=Path, help="what memory_estimator.py --json prints")
    parser.add_argument("--picture", type=Path, default=Path("runs.png"), help="file to write")
    args = parser.parse_args()
    if bool(args.runs) == bool(args.estimate):
        parser.error("give output directories, or --estimate")
    if args.estimate:
        draw_estimate(json.loads(args.estimate.read_text())["estimates"], args.picture)
    else:
        draw({str(run): read(run) for run in args.runs}, args.picture)
    print(args.picture)


if __name__ == "__main__":
    main()
