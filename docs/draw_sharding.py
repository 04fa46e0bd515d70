"""Draw docs/sharding.svg and docs/bars.svg. The first shows what each of four GPUs holds of three
FSDP units during a step, and how computation and communication overlap; the second the memory of
Llama 2 7B under three strategies.

python docs/draw_sharding.py
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools import memory_estimator

GPUS = 4
UNITS = 3
STAGES = (  # title, note, index of the unit that is gathered, held parts of the gradients by unit
    ("at rest", "a quarter of each unit", None, {}),
    ("forward, unit 2", "all-gather, compute, free", 1, {}),
    ("backward, unit 2", "all-gather, compute", 1, {1: "whole", 2: "shard"}),
    ("after backward, unit 2", "reduce-scatter, free", None, {1: "shard", 2: "shard"}),
    ("optimizer step", "each GPU updates its quarter", None, dict.fromkeys(range(3), "shard")),
)
LANES = {  # label, start and end of each bar
    "compute": (
        ("forward 1", 1.0, 2.5), ("forward 2", 2.5, 4.0), ("forward 3", 4.0, 5.5),
        ("backward 3", 5.5, 8.0), ("backward 2", 8.0, 10.5), ("backward 1", 10.5, 13.0),
    ),
    "network": (
        ("gather 1", 0.0, 1.0), ("gather 2", 1.0, 2.0), ("gather 3", 2.5, 3.5),
        ("gather 2", 5.5, 6.5), ("gather 1", 8.0, 9.0), ("reduce 3", 9.0, 10.0),
        ("reduce 2", 10.5, 11.5), ("reduce 1", 13.0, 14.0),
    ),
}  # fmt: skip
BARS = {  # flags of the estimator by label
    "DDP": {"strategy": "ddp"},
    "FSDP": {"strategy": "full_shard"},
    "FSDP, recomputation": {"strategy": "full_shard", "activation_checkpointing": "blocks"},
}
PARTS = {  # label and color by key of an estimate
    "parameter_bytes": ("weights", "#4c78a8"),
    "gradient_bytes": ("gradients", "#f58518"),
    "optimizer_bytes": ("moments", "#54a24b"),
    "unsharded_bytes": ("weights in use", "#b279a2"),
    "activation_bytes": ("activations", "#e45756"),
    "logit_bytes": ("logits", "#9d755d"),
}
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")  # one per GPU, for its shards
SIZE = 13  # side of the square that represents a shard
GAP = 9  # between units
STAGE_WIDTH = 200
TOP = 62
LEFT = 62
ROW = SIZE * 4 + 18
LANE = 24
SECOND = 70  # width of a unit of time


def draw_shards(x: float, y: float, held: range | list[int], is_gradient: bool) -> list[str]:
    """Return SVG rectangles for the four shards of a unit, in a column; only `held` are filled."""
    rects = []
    for shard, color in enumerate(COLORS):
        fill = color if shard in held else "none"
        opacity = 0.45 if is_gradient else 1
        rects.append(
            f'<rect x="{x}" y="{y + shard * SIZE}" width="{SIZE}" height="{SIZE}" fill="{fill}" '
            f'fill-opacity="{opacity}" stroke="#999" stroke-width="0.7"/>'
        )
    return rects


def draw_text(x: float, y: float, text: str, size: int = 11, weight: str = "normal") -> str:
    """Return an SVG element with `text`, which starts at x and has its baseline at y."""
    return f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}">{text}</text>'


def draw_lanes(top: float) -> list[str]:
    """Return the SVG elements of LANES."""
    parts = []
    for row, (name, bars) in enumerate(LANES.items()):
        y = top + row * LANE
        parts.append(draw_text(8, y + 13, name))
        for label, start, end in bars:
            x = LEFT + start * SECOND
            parts.append(
                f'<rect x="{x}" y="{y}" width="{(end - start) * SECOND}" height="18" fill="#eee" '
                'stroke="#999" stroke-width="0.7"/>'
            )
            parts.append(draw_text(x + 4, y + 13, label))
    return parts


def draw_figure() -> str:
    """Return the whole figure as SVG."""
    width = LEFT + STAGE_WIDTH * len(STAGES)
    bottom = TOP + ROW * GPUS
    height = bottom + 2 * LANE + 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" font-family="sans-serif" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for column, (title, note, gathered, gradients) in enumerate(STAGES):
        left = LEFT + column * STAGE_WIDTH
        parts.append(draw_text(left, 22, title, 13, "bold"))
        parts.append(draw_text(left, 40, note))
        for gpu in range(GPUS):
            y = TOP + gpu * ROW
            for unit in range(UNITS):
                x = left + unit * (SIZE + GAP)
                held = range(4) if unit == gathered else [gpu]
                parts += draw_shards(x, y, held, is_gradient=False)
            for unit, part in gradients.items():
                x = left + (UNITS + unit) * (SIZE + GAP) + 16
                held = range(4) if part == "whole" else [gpu]
                parts += draw_shards(x, y, held, is_gradient=True)
    for gpu in range(GPUS):
        parts.append(draw_text(8, TOP + gpu * ROW + 2 * SIZE + 4, f"GPU {gpu}"))
    parts += draw_lanes(bottom)
    legend = (
        "Full color: weights of units 1, 2, 3. Pale: their gradients, computed from unit 3 to "
        "unit 1. The optimizer state stays sharded throughout."
    )
    parts.append(draw_text(LEFT, height - 8, legend))
    return "\n".join([*parts, "</svg>\n"])


def draw_bars() -> str:
    """Return the memory of one of eight GPUs, estimated, as SVG: a bar for each of BARS."""
    args = memory_estimator.parse_args(["--model-name", "llama-2-7b"])
    model = memory_estimator.Model(args)
    rows = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 150" width="860" '
        'font-family="sans-serif" fill="#222">',
        '<rect width="860" height="150" fill="white"/>',
    ]
    for row, (label, flags) in enumerate(BARS.items()):
        y = 14 + row * 34
        rows.append(draw_text(8, y + 15, label))
        estimate = memory_estimator.estimate(model, replace(args, **flags))
        x = 134.0
        for key, (_, color) in PARTS.items():
            width = estimate[key] / 1e9 * 4.8
            rows.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="22" fill="{color}"/>'
            )
            x += width
        rows.append(draw_text(x + 6, y + 15, f"{estimate['peak_bytes'] / 1e9:.1f} GB"))
    for column, (label, color) in enumerate(PARTS.values()):
        x = 134 + column * 118
        rows.append(f'<rect x="{x}" y="124" width="11" height="11" fill="{color}"/>')
        rows.append(draw_text(x + 16, 134, label))
    return "\n".join([*rows, "</svg>\n"])


if __name__ == "__main__":
    Path(__file__).with_name("sharding.svg").write_text(draw_figure())
    Path(__file__).with_name("bars.svg").write_text(draw_bars())
