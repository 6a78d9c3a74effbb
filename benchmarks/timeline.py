"""Draw a run under pressure, as benchmarks/pressure.py wrote it down.

    python benchmarks/timeline.py timeline.jsonl results.jsonl

Writes docs/pressure.svg: who ran and who had to wait, how many blocks went out and came back, and by how much
steps came later for it.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from plot import INK, text

WIDTH, LEFT, RIGHT = 720, 64, 696
BLUE, ORANGE = "#2f80ed", "#d9622b"
BINS = 158
"""So many times the run is looked at: one bar of four pixels each."""


class Panel(NamedTuple):
    """One of the drawings that share an axis of time: its name, where it is, what its highest value is."""

    name: str
    top: float
    bottom: float
    most: float

    def y(self, value: float) -> float:
        return round(self.bottom - (self.bottom - self.top) * value / self.most, 1)

    def frame(self) -> list[str]:
        return [
            text(LEFT, self.top - 8, self.name, "start", more=' font-weight="600"'),
            *(
                f'<path d="M{LEFT} {y:g}H{RIGHT}" stroke="{INK}" stroke-opacity=".25"/>'
                for y in (self.top, self.bottom)
            ),
            text(LEFT - 8, self.top + 4, f"{self.most:g}", "end"),
            text(LEFT - 8, self.bottom + 4, "0", "end"),
        ]

    def line(self, values: list[float], colour: str) -> str:
        path = "M" + "L".join(f"{_x(i):g} {self.y(value):g}" for i, value in enumerate(values))
        return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'

    def bars(self, values: list[float], colour: str, shift: float = 0.0) -> list[str]:
        return [
            f'<path d="M{_x(i) + shift:g} {self.bottom:g}V{self.y(value):g}" stroke="{colour}" stroke-width="1.8"/>'
            for i, value in enumerate(values)
            if value
        ]


def _x(place: int) -> float:
    return round(LEFT + (RIGHT - LEFT) * (place + 0.5) / BINS, 1)


class Timeline:
    """The steps of one run, in bins of equal time."""

    def __init__(self, steps: list[dict[str, Any]]) -> None:
        self.seconds = steps[-1]["at"]
        self._bins: list[list[dict[str, Any]]] = [[] for _ in range(BINS)]
        for step in steps:
            self._bins[min(BINS - 1, int(step["at"] / self.seconds * BINS))].append(step)

    def total(self, key: str) -> list[float]:
        return [sum(step[key] for step in steps) for steps in self._bins]

    def mean(self, key: str) -> list[float]:
        """Of the steps that end in a bin; while one step lasts longer than that, as it was before."""
        values, last = [], 0.0
        for steps in self._bins:
            last = sum(step[key] for step in steps) / len(steps) if steps else last
            values.append(last)
        return values


def read(path: Path, mode: str) -> list[dict[str, Any]]:
    steps = [step for step in map(json.loads, path.read_text().splitlines()) if step["mode"] == mode]
    if len(steps) < 2 or any(one["at"] > other["at"] for one, other in pairwise(steps)):
        modes = sorted({json.loads(line)["mode"] for line in path.read_text().splitlines()})
        raise SystemExit(
            f"{path} must have the steps of one run with {mode!r}; it has {len(steps)} of it, and runs with "
            f"{modes}"
        )
    return steps


def draw(steps: list[dict[str, Any]], row: dict[str, Any]) -> str:
    """The whole picture; `row` is the run's line of results."""
    run = Timeline(steps)
    running, waiting = run.mean("running"), run.mean("preempted")
    out, back, exposed = (
        run.total("blocks_out"),
        run.total("blocks_in"),
        [1e3 * value for value in run.total("exposed")],
    )
    people = Panel("requests", 76, 216, max(running) or 1)
    blocks = Panel(f"blocks carried in {run.seconds / BINS * 1e3:.0f} ms", 256, 336, max(out + back) or 1)
    late = Panel("steps later for it, ms", 376, 426, max(1.0, round(max(exposed), 1)))
    place = f"{row['hardware']}, torch {row['torch']}, transformers {row['transformers']}, {row['date']}"
    title = f"{row['shape']} on {row['blocks']} blocks: {row['speed']:.0f} tokens a second, {row['ratio']:.2f} of what it is with enough"
    seconds = range(0, int(run.seconds) + 1, 5)
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 470" width="{WIDTH}" height="470" role="img" '
        'font-family="system-ui, sans-serif" font-size="12">',
        "<title>A run under pressure: requests, blocks carried between device and host, and the time that "
        "this cost</title>",
        text(LEFT - 40, 18, title, "start", more=' font-size="14" font-weight="600"'),
        text(LEFT - 40, 36, place, "start", more=' font-size="11"'),
        *people.frame(), people.line(running, BLUE), people.line(waiting, ORANGE),
        text(RIGHT, people.top + 14, "running", "end", BLUE), text(RIGHT, people.top + 30, "preempted", "end", ORANGE),
        *blocks.frame(), *blocks.bars(out, ORANGE), *blocks.bars(back, BLUE, 2),
        text(RIGHT, blocks.top + 14, "back", "end", BLUE), text(RIGHT, blocks.top + 30, "out", "end", ORANGE),
        *late.frame(), *late.bars(exposed, INK),
        *(text(LEFT + (RIGHT - LEFT) * value / run.seconds, late.bottom + 20, f"{value} s") for value in seconds),
        "</svg>",
    ]) + "\n"  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("timeline", type=Path, help="what benchmarks/pressure.py --timeline wrote")
    parser.add_argument("json", type=Path, help="what it wrote with --json")
    parser.add_argument("--mode", default="swap", choices=["swap", "recompute", "auto"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "pressure.svg")
    options = parser.parse_args()
    rows = [
        row for row in map(json.loads, options.json.read_text().splitlines()) if row["section"] == "pressure"
    ]
    own = [row for row in rows if row["mode"] == options.mode]
    if not own:
        raise SystemExit(f"{options.json} has no run with {options.mode!r}")
    options.out.write_text(draw(read(options.timeline, options.mode), own[-1]))
    print(options.out)


if __name__ == "__main__":
    main()
