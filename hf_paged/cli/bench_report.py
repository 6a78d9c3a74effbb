"""The table and the picture of `hf-paged bench`: how much faster or slower than stock everything is."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

STOCK = "generate()"
WHO = (STOCK, "paged generate()", "Engine")
"""Those that are compared, the first with the others."""


class Speed(NamedTuple):
    """The speed of one of WHO in one turn; quantiles in milliseconds, None where tokens were not timed."""

    kind: str
    batch: int
    who: str
    tokens_per_second: float
    first_token: dict[str, float] | None
    between_tokens: dict[str, float] | None

    @classmethod
    def of(
        cls, kind: str, batch: int, who: str, tokens: int, seconds: float, times: list[list[float]]
    ) -> Speed:
        """times: of each answer's tokens, in seconds from the begin of all; none if they are not known."""
        between = [b - a for each in times for a, b in pairwise(each)]
        return cls(
            kind,
            batch,
            who,
            tokens / seconds,
            quantiles([each[0] for each in times]) if times else None,
            quantiles(between) if between else None,
        )


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """The median and the 99th percentile, in milliseconds."""
    ordered = sorted(seconds)
    return {f"p{q}": 1e3 * ordered[min(len(ordered) * q // 100, len(ordered) - 1)] for q in (50, 99)}


Value = Callable[[Speed], float | None]
MEASURES: list[tuple[str, Value, bool]] = [
    ("output tokens a second", lambda each: each.tokens_per_second, True),
    ("first token, median, ms", lambda each: (each.first_token or {}).get("p50"), False),
    ("first token, p99, ms", lambda each: (each.first_token or {}).get("p99"), False),
    ("between tokens, median, ms", lambda each: (each.between_tokens or {}).get("p50"), False),
    ("between tokens, p99, ms", lambda each: (each.between_tokens or {}).get("p99"), False),
]
"""The values that are shown: a name, a value, and whether more is better."""

Line = tuple[str, int]
"""The load and the batch of a line."""


def lines_of(found: list[Speed]) -> list[Line]:
    """The lines of a table, in the order of measurement."""
    return list(dict.fromkeys((each.kind, each.batch) for each in found))


def values(found: list[Speed], line: Line, who: str, value: Value) -> list[float]:
    """The values of one of WHO, by turns; none where they were not measured."""
    speeds = [each for each in found if (each.kind, each.batch) == line and each.who == who]
    return [number for number in map(value, speeds) if number is not None]


AGREE = 0.75
"""The share of turns that must agree about the direction."""


def beside(ours: list[float], stock: list[float], more_is_better: bool) -> str:
    """How much faster or slower than stock, the median over turns; "level" if turns disagree about it."""
    ratios = [a / b if more_is_better else b / a for a, b in zip(ours, stock, strict=True)]
    ratio = statistics.median(ratios)
    agree = sum((each > 1) == (ratio > 1) for each in ratios)
    if agree < AGREE * len(ratios) or round(ratio, 2) == 1:
        return "level"
    return f"{ratio:.2f} x faster" if ratio > 1 else f"{1 / ratio:.2f} x slower"


def table(found: list[Speed]) -> list[str]:
    """The medians as lines of text, a part for each measure."""
    lines = lines_of(found)
    width = max(len(name) for name, _, _ in MEASURES)
    shown: list[str] = []
    for name, value, more in MEASURES:
        stock = {line: values(found, line, STOCK, value) for line in lines}
        if not any(stock.values()):
            continue
        shown.append(f"{name:{width}}{STOCK:>14}" + "".join(f"{who:>28}" for who in WHO[1:]))
        for line in filter(stock.get, lines):
            kind, batch = line
            text = f"  {kind}, batch of {batch}"
            text = f"{text:{width}}{statistics.median(stock[line]):>14,.1f}"
            for who in WHO[1:]:
                ours = values(found, line, who, value)
                said = beside(ours, stock[line], more) if ours else ""
                text += f"{statistics.median(ours):>13,.1f}{said:>15}" if ours else " " * 28
            shown.append(text.rstrip())
        shown.append("")
    return shown[:-1]


COLOURS = ("#808080", "#d9622b", "#1f6fd6")
"""Readable on white and on black."""


def draw(found: list[Speed], facts: list[str]) -> str:
    """Output tokens a second as bars, a group for each line; SVG on a transparent ground."""
    name, value, more = MEASURES[0]
    parts: list[str] = []

    def text(x: float, y: float, said: str, weight: str = "") -> None:
        parts.append(f'<text x="{x:g}" y="{y:g}" fill="#808080"{weight}>{escape(said)}</text>')

    def bar(x: float, y: float, width: float, colour: str) -> None:
        parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="12" rx="2" fill="{colour}"/>')

    for i, said in enumerate(facts):
        text(8, 24 + 18 * i, said)
    y = 24 + 18 * len(facts)
    for i, who in enumerate(WHO):
        bar(8 + 180 * i, y, 12, COLOURS[i])
        text(26 + 180 * i, y + 10, who)
    y += 36
    for line in lines_of(found):
        text(8, y, f"{name}: {line[0]}, batch of {line[1]}", ' font-weight="600"')
        by_who = {who: values(found, line, who, value) for who in WHO}
        most = max(statistics.median(each) for each in by_who.values())
        for i, (who, ours) in enumerate(by_who.items()):
            y += 18
            length = round(460 * statistics.median(ours) / most, 1)
            bar(8, y - 10, length, COLOURS[i])
            said = "" if who == STOCK else f" ({beside(ours, by_who[STOCK], more)})"
            text(16 + length, y, f"{statistics.median(ours):,.1f}{said}")
        y += 30
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 {y:g}" width="680" height="{y:g}" '
            'role="img" font-family="system-ui, sans-serif" font-size="12">',
            "<title>Speed of a model in stock generate(), paged generate() and hf_paged's Engine</title>",
            *parts,
            "</svg>\n",
        ]
    )
