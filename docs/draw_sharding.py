"""Draw docs/sharding.svg: what each of four GPUs holds of three FSDP units during a step.

python docs/draw_sharding.py
"""

from pathlib import Path

GPUS = 4
UNITS = 3
STAGES = (  # title, note, index of the unit that is gathered, held part of its gradient
    ("at rest", "a quarter of each unit", None, None),
    ("forward, unit 2", "all-gather, compute, free", 1, None),
    ("backward, unit 2", "all-gather, compute", 1, "whole"),
    ("after backward, unit 2", "reduce-scatter, free", None, "shard"),
    ("optimizer step", "each GPU updates its quarter", None, "shard"),
)
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")  # one per GPU, for its shards
SIZE = 13  # side of the square that represents a shard
GAP = 9  # between units
STAGE_WIDTH = 184
TOP = 62
LEFT = 62
ROW = SIZE * 4 + 18


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


def draw_figure() -> str:
    """Return the whole figure as SVG."""
    width = LEFT + STAGE_WIDTH * len(STAGES)
    height = TOP + ROW * GPUS + 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" font-family="sans-serif" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for column, (title, note, gathered, gradient) in enumerate(STAGES):
        left = LEFT + column * STAGE_WIDTH
        parts.append(draw_text(left, 22, title, 13, "bold"))
        parts.append(draw_text(left, 40, note))
        for gpu in range(GPUS):
            y = TOP + gpu * ROW
            for unit in range(UNITS):
                x = left + unit * (SIZE + GAP)
                held = range(4) if unit == gathered else [gpu]
                parts += draw_shards(x, y, held, is_gradient=False)
            if gradient:
                held = range(4) if gradient == "whole" else [gpu]
                parts += draw_shards(left + UNITS * (SIZE + GAP) + 16, y, held, is_gradient=True)
    for gpu in range(GPUS):
        parts.append(draw_text(8, TOP + gpu * ROW + 2 * SIZE + 4, f"GPU {gpu}"))
    legend = "Full color: weights of units 1, 2, 3. Pale: gradient of unit 2. "
    legend += "The optimizer state stays sharded throughout."
    parts.append(draw_text(LEFT, height - 8, legend))
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    Path(__file__).with_name("sharding.svg").write_text(draw_figure())
