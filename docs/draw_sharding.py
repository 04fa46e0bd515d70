"""Draw docs/sharding.svg: what each of four GPUs holds of three FSDP units in the course of a step.

python docs/draw_sharding.py
"""

from pathlib import Path

GPUS = 4
UNITS = 3
MOMENTS = (  # title, note, the unit that is whole there, and what is held of its gradient
    ("at rest", "a quarter of each unit", None, None),
    ("forward, unit 2", "all-gather, compute, free", 1, None),
    ("backward, unit 2", "all-gather, compute", 1, "whole"),
    ("after it", "reduce-scatter, free", None, "shard"),
    ("optimizer step", "each GPU its quarter", None, "shard"),
)
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")  # of the GPUs' shards
SIZE = 13  # of a shard's square
GAP = 9  # between units
CELL = 150  # width of a moment
TOP = 62
LEFT = 62
ROW = SIZE * 4 + 18


def squares(x: float, y: float, held: range | list[int], is_gradient: bool) -> list[str]:
    """Return the four shards of a unit, one below the other, of which some are held."""
    found = []
    for shard, color in enumerate(COLORS):
        fill = color if shard in held else "none"
        opacity = 0.45 if is_gradient else 1
        found.append(
            f'<rect x="{x}" y="{y + shard * SIZE}" width="{SIZE}" height="{SIZE}" fill="{fill}" '
            f'fill-opacity="{opacity}" stroke="#999" stroke-width="0.7"/>'
        )
    return found


def text(x: float, y: float, words: str, size: int = 11, weight: str = "normal") -> str:
    """Return words that begin at a place."""
    return f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}">{words}</text>'


def drawing() -> str:
    """Return the whole picture."""
    width = LEFT + CELL * len(MOMENTS)
    height = TOP + ROW * GPUS + 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" font-family="sans-serif" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for column, (title, note, whole, gradient) in enumerate(MOMENTS):
        left = LEFT + column * CELL
        parts.append(text(left, 22, title, 13, "bold"))
        parts.append(text(left, 40, note))
        for gpu in range(GPUS):
            y = TOP + gpu * ROW
            for unit in range(UNITS):
                x = left + unit * (SIZE + GAP)
                held = range(4) if unit == whole else [gpu]
                parts += squares(x, y, held, is_gradient=False)
            if gradient:
                held = range(4) if gradient == "whole" else [gpu]
                parts += squares(left + UNITS * (SIZE + GAP) + 16, y, held, is_gradient=True)
    for gpu in range(GPUS):
        parts.append(text(8, TOP + gpu * ROW + 2 * SIZE + 4, f"GPU {gpu}"))
    note = "Full colour: weights of units 1, 2, 3. Pale: the gradient of unit 2. "
    parts.append(text(LEFT, height - 8, f"{note}The optimizer's state is held as at rest."))
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    Path(__file__).with_name("sharding.svg").write_text(drawing())
