"""Draw the time of a greedy step against rows, as benchmarks/generate.py measured it.

    python benchmarks/plot.py results.jsonl

Writes docs/steps.svg. Its colours are readable on white and on black, its ground is transparent. Where a
number of rows was measured several times, the last one counts.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

WIDTH, HEIGHT = 640, 380
LEFT, RIGHT, TOP, BOTTOM = 48, 560, 72, 336
INK = "#7b818a"


class Line(NamedTuple):
    """A key of the rows, and how it is drawn; `up` says on which side of the line its numbers stand."""

    key: str
    name: str
    colour: str
    up: bool
    dash: str = ""


LINES = [
    Line("stock", "stock", "#d9622b", True),
    Line("paged", "paged", "#2f80ed", True),
    Line("floor", "floor", INK, False, ' stroke-dasharray="5 4"'),
]


class Scale:
    """A logarithmic axis: values from `low` to `high` lie between the pixels `begin` and `end`."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        self.low, self.high, self.begin, self.end = low, high, begin, end

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(self.begin + share * (self.end - self.begin), 1)

    def ticks(self) -> list[float]:
        """1, 2, 5, 10, ... as far as they are on the axis."""
        candidates = [digit * 10.0**power for power in range(-4, 6) for digit in (1, 2, 5)]
        return [value for value in candidates if self.low <= value <= self.high]


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of the section steps, by number of rows."""
    found = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["section"] == "steps":
            found[row["rows"]] = row
    if len(found) < 2:
        raise SystemExit(
            f"{path} has {len(found)} row(s) of the section steps; a line needs two: benchmarks/generate.py "
            "--sections steps"
        )
    return [found[rows] for rows in sorted(found)]


def measured(row: dict[str, Any], line: Line) -> bool:
    """Whether a row has this value; noise can make a difference of two calls negative."""
    return (row.get(line.key) or 0) > 0


def text(x: float, y: float, what: str, anchor: str = "middle", colour: str = INK, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}"{more}>{what}</text>'


def number(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def axes(x: Scale, y: Scale, rows: list[int]) -> list[str]:
    """The ticks: one for each number of rows measured, 1, 2, 5, 10, ... milliseconds."""
    parts = []
    for value in y.ticks():
        parts.append(f'<path d="M{LEFT} {y(value):g}H{RIGHT}" stroke="{INK}" stroke-opacity=".25"/>')
        parts.append(text(LEFT - 8, y(value) + 4, f"{value:g}", "end"))
    parts += [text(x(value), BOTTOM + 18, str(value)) for value in rows]
    return [*parts, text((LEFT + RIGHT) / 2, BOTTOM + 36, "rows"), text(LEFT - 8, TOP - 12, "ms", "end")]


def curve(line: Line, points: list[tuple[float, float, float]]) -> list[str]:
    """A line through points (x, y, value), each with its number, and the name at the end."""
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y, _ in points)
    parts = [f'<path d="{path}" fill="none" stroke="{line.colour}" stroke-width="2"{line.dash}/>']
    for x, y, value in points:
        parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="3" fill="{line.colour}"/>')
        parts.append(
            text(x, y - 9 if line.up else y + 18, number(value), colour=line.colour, more=' font-size="11"')
        )
    x, y, _ = points[-1]
    return [*parts, text(x + 24, y + 4, line.name, "start", line.colour, ' font-weight="600"')]


def draw(rows: list[dict[str, Any]]) -> str:
    """The whole picture."""
    values = [row[line.key] for row in rows for line in LINES if measured(row, line)]
    numbers = [row["rows"] for row in rows]
    x = Scale(numbers[0], numbers[-1], LEFT + 24, RIGHT - 12)
    y = Scale(min(values) / 1.5, max(values) * 1.4, BOTTOM, TOP)
    title = f"A greedy step of generate(): {rows[-1]['shape']}, {rows[-1]['dtype']}"
    place = f"{rows[-1]['hardware']}, torch {rows[-1]['torch']}, transformers {rows[-1]['transformers']}, {rows[-1]['date']}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        'font-family="system-ui, sans-serif" font-size="12">',
        "<title>Time of a decoding step against rows: stock, paged, and the floor of the hardware</title>",
        text(LEFT - 24, 18, title, "start", more=' font-size="14" font-weight="600"'),
        text(LEFT - 24, 36, place, "start", more=' font-size="11"'),
        *axes(x, y, numbers),
    ]
    for line in LINES:
        points = [(x(row["rows"]), y(row[line.key]), row[line.key]) for row in rows if measured(row, line)]
        parts += curve(line, points) if points else []
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("json", type=Path, help="what benchmarks/generate.py --json wrote")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "steps.svg")
    options = parser.parse_args()
    options.out.write_text(draw(read(options.json)))
    print(options.out)


if __name__ == "__main__":
    main()
