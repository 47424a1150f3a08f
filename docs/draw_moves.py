"""Draws docs/moves.svg, what changes hands where rank 1 of two is twice as slow: python docs/draw_moves.py"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

#: What is divided → (who has each unit at home, who has it while rank 1 is slow).
DIVISIONS = {
    "attention heads": ("000000111111", "000000001111"),
    "neurons": ("000000111111", "000000001111"),
    "layers of a pipeline": ("000000111111", "000000001111"),
    "samples of a batch": ("000000111111", "000000001111"),
}
FILLS = ("#3b3b3b", "#b9b9b9")
CELL, GAP, LEFT, TOP, PANEL, ROW = 20, 3, 160, 50, 330, 34


def text(x: float, y: float, words: str, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}">{words}</text>'


def cells(x: float, y: float, owners: str, at_home: str) -> Iterator[str]:
    for place, (owner, home) in enumerate(zip(owners, at_home, strict=True)):
        edge = ' stroke="#c2410c" stroke-width="3"' if owner != home else ""
        at = x + place * (CELL + GAP)
        yield f'<rect x="{at}" y="{y}" width="{CELL}" height="{CELL}" rx="3" fill="{FILLS[int(owner)]}"{edge}/>'


def picture() -> str:
    width, height = LEFT + 2 * PANEL - 40, TOP + ROW * len(DIVISIONS) + 44
    parts = [f'<rect width="{width}" height="{height}" rx="8" fill="white"/>']
    parts += [text(LEFT, 30, "both ranks are fast: at home", weight="bold")]
    parts += [text(LEFT + PANEL, 30, "rank 1 is slow: away", weight="bold")]
    for row, (name, (home, away)) in enumerate(DIVISIONS.items()):
        y = TOP + row * ROW
        parts += [
            text(LEFT - 12, y + 15, name, "end"),
            *cells(LEFT, y, home, home),
            *cells(LEFT + PANEL, y, away, home),
        ]
    y = height - 30
    for place, (owners, home, words) in enumerate(
        (("0", "0", "rank 0"), ("1", "1", "rank 1"), ("0", "1", "has moved"))
    ):
        x = LEFT + place * 130
        parts += [*cells(x, y, owners, home), text(x + CELL + 8, y + 15, words)]
    title = "Heads, neurons, layers and samples of two ranks, before and after rank 1 becomes slow"
    font = 'font-family="sans-serif" font-size="14"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {font}>'
    return "\n".join([head, f"<title>{title}</title>", *parts, "</svg>\n"])


if __name__ == "__main__":
    Path(__file__).with_name("moves.svg").write_text(picture(), encoding="utf-8")
