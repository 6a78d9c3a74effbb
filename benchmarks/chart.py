"""Draw README's chart from the tables of docs/benchmarks.md: python benchmarks/chart.py [--out docs/speed.svg]

Every bar is a cell of a table there, found by the label of its row and the head of its column. The colours are
readable on white and on black, the ground is transparent. tests/test_docs.py compares the checked-in file with
what this script draws.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from plot import text

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
SMALL = ' font-size="11"'
BOLD = ' font-size="13" font-weight="600"'
WIDTH, TOP = 780, 106
PANEL, BARS = 264, 168
"""Pixels from one panel to the next, and of the longest bar."""
THICK, STEP, GAP = 12, 16, 26
"""Pixels of a bar, from one bar to the next, and between groups (for a group's name)."""
NOTES = [
    "One NVIDIA H200, a Llama of the 8B shape, bfloat16, torch 2.11.0+cu130, transformers 5.17.0, 2026-11-21 and 22.",
    "transformers: generate() without torch.compile; continuous batching with graphs and compiled steps. hf_paged: no torch.compile.",
    "vLLM 0.25.1, compiled, was measured earlier on such a card, not in the same runs. The Engine's 256 rows have a mean context of 421.",
]
"""What the figures were measured on and with, as docs/benchmarks.md says it."""

COLOURS = {
    "transformers": "#d9622b",
    "hf_paged: generate()": "#56a3f5",
    "hf_paged: Engine": "#1f6fd6",
    "vLLM": "#9a7fc7",
}


class Bar(NamedTuple):
    """A cell of a table of docs/benchmarks.md, and the contender that it belongs to."""

    who: str
    row: str
    column: str


class Panel(NamedTuple):
    title: str
    better: str
    groups: dict[str, list[Bar]]


def _steps(rows: str) -> list[Bar]:
    return [
        Bar("transformers", rows, "stock"),
        Bar("hf_paged: generate()", rows, "paged"),
        Bar("hf_paged: Engine", "engine", rows),
        Bar("vLLM", "vLLM", rows),
    ]


def _searches(width: str) -> list[Bar]:
    return [
        Bar("transformers", width, "stock `generate()`"),
        Bar("hf_paged: generate()", width, "paged `generate()`"),
        Bar("hf_paged: Engine", width, "engine"),
        Bar("vLLM", width, "vLLM"),
    ]


def _traces(label: str) -> list[Bar]:
    return [Bar("hf_paged: Engine", label, "output tokens a second"), Bar("vLLM", label, "vLLM")]


BATCHING = "128 requests, transformers' with graphs and compiled"
PANELS = [
    Panel(
        "A decoding step, ms",
        "context 384; lower is better",
        {rows: _steps(rows) for rows in ("1 row", "64 rows", "256 rows")},
    ),
    Panel(
        "16 beam searches, s",
        "prompts of 256, 64 new; lower is better",
        {f"width {width}": _searches(f"width {width}") for width in (4, 8)},
    ),
    Panel(
        "Output tokens a second",
        "ShareGPT's mean lengths; higher is better",
        {
            "512 requests, 256 at once": _traces("512 requests, up to 256 at once"),
            "1,024 requests, 1,024 at once": _traces("1,024 requests, up to 1,024 at once"),
            "128 requests, continuous batching": [
                Bar("transformers", BATCHING, "transformers"),
                Bar("hf_paged: Engine", BATCHING, "hf_paged"),
            ],
        },
    ),
]


def tables(page: str) -> list[list[list[str]]]:
    """The tables of a page as rows of cells, the head first."""
    found: list[list[list[str]]] = [[]]
    for line in page.splitlines():
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif found[-1]:
            found.append([])
    return [[rows[0], *rows[2:]] for rows in found if len(rows) > 2]


def value(page: str, bar: Bar) -> float:
    """The figure at such a row and such a column; tables that both have it must agree."""
    cells = {
        row[table[0].index(bar.column)]
        for table in tables(page)
        if bar.column in table[0]
        for row in table[1:]
        if row[0] == bar.row
    }
    if len(cells) != 1:
        raise SystemExit(
            f"docs/benchmarks.md has {sorted(cells)} at {bar.row!r} x {bar.column!r}, expected one figure"
        )
    return float(cells.pop().replace(",", ""))


def _number(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.2f}"


def draw_panel(page: str, panel: Panel, x: float) -> list[str]:
    """A panel at x: names of groups, bars, and the figure at the end of each bar."""
    figures = {name: [value(page, bar) for bar in bars] for name, bars in panel.groups.items()}
    most = max(max(group) for group in figures.values())
    y = float(TOP)
    parts = [
        text(x, y - 34, panel.title, "start", more=BOLD),
        text(x, y - 18, panel.better, "start", more=SMALL),
    ]
    for name, bars in panel.groups.items():
        parts.append(text(x, y + 12, name, "start", more=SMALL))
        y += 18
        for bar, figure in zip(bars, figures[name], strict=True):
            width = round(BARS * figure / most, 1)
            colour = COLOURS[bar.who]
            parts.append(
                f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{THICK}" rx="2" fill="{colour}"/>'
            )
            parts.append(text(x + width + 6, y + 10, _number(figure), "start", more=SMALL))
            y += STEP
        y += GAP - 18
    return parts


def draw_legend() -> list[str]:
    parts = []
    for number, (who, colour) in enumerate(COLOURS.items()):
        x = 8 + 180 * number
        parts.append(f'<rect x="{x}" y="34" width="12" height="12" rx="2" fill="{colour}"/>')
        parts.append(text(x + 18, 44, who, "start"))
    return parts


def draw(page: str) -> str:
    """The whole chart."""
    tallest = max(sum(GAP + STEP * len(bars) for bars in panel.groups.values()) for panel in PANELS)
    height = TOP + tallest + 16 * len(NOTES)
    title = "Decoding steps, beam searches and throughput: transformers, hf_paged and vLLM"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" font-family="system-ui, sans-serif" font-size="12">',
        f"<title>{title}</title>",
        text(8, 18, "Llama 8B on one H200", "start", more=' font-size="14" font-weight="600"'),
        *draw_legend(),
    ]
    for number, panel in enumerate(PANELS):
        parts += draw_panel(page, panel, 8 + PANEL * number)
    for number, note in enumerate(reversed(NOTES)):
        parts.append(text(8, height - 6 - 16 * number, note, "start", more=SMALL))
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "speed.svg")
    options = parser.parse_args()
    options.out.write_text(draw(PAGE.read_text()))
    print(options.out)


if __name__ == "__main__":
    main()
