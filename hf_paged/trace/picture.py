"""Static pictures of blocks, in HTML and SVG without scripts, for notebooks: of an engine, a cache, an output
and a step of a trace. Signs, colours and words are in `signs.json`, by which the map's page draws, too.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib import resources
from typing import Any, NamedTuple

COLUMNS = 64
"""Squares of a line."""
CELL, SIZE = 11, 9
"""Points from one square to the next, and the side of a square."""
MOST = 2048
"""Squares of a picture, which is to stay small."""
MOST_NAMES = 8
"""Requests that a legend names."""
FONT = "font:13px/1.5 system-ui,sans-serif"

Square = tuple[str, str, str]
"""The sign of a square, the colour of its request, and a title for those who point at it."""


class PoolView(NamedTuple):
    """The blocks of a pool that are in use.

    holders: the requests that hold each block, one for each sequence. cached: blocks that none holds and a
    prompt may find. others: blocks that others hold, whose requests are not shown.
    """

    total: int
    holders: Mapping[int, Sequence[int]]
    cached: Collection[int] = ()
    others: Collection[int] = ()

    @property
    def shown(self) -> int:
        """How many blocks a map of the pool shows."""
        used = (*self.holders, *self.cached, *self.others)
        return shown_blocks(max(used, default=-1) + 1, self.total)

    def counts(self, begin: int = 0) -> dict[str, int]:
        """How many blocks from number `begin` on are held, shared, cached and free."""
        held = sum(block >= begin for block in (*self.holders, *self.others))
        shared = sum(block >= begin and len(names) > 1 for block, names in self.holders.items())
        cached = sum(block >= begin for block in self.cached)
        free = self.total - begin - held - cached
        return {"held": held, "shared": shared, "cached": cached, "free": free}


@cache
def signs() -> dict[str, Any]:
    """The signs, colours and words by which blocks are drawn."""
    text = resources.files(__package__).joinpath("signs.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def colours() -> str:
    """The colours of both themes as CSS; the dark ones are those of a root of the class `dark`."""
    parts = []
    for theme, root in (("light", ":root"), ("dark", ":root.dark")):
        values = " ".join(f"--{name}: {value};" for name, value in signs()["colours"][theme].items())
        parts.append(f"{root} {{ color-scheme: {theme}; {values} }}")
    return "\n".join(parts)


def shown_blocks(top: int, total: int) -> int:
    """How many blocks a map shows if none from number `top` on is in use: whole rows with a margin, or all of
    a pool that has little more.
    """
    row, least, margin = (signs()["shown"][name] for name in ("row", "least", "margin"))
    shown = max(least, -(-(top + margin) // row) * row)
    return int(total if shown + row > total else shown)


def colour_of(number: int, holders: int = 1) -> str:
    """The colour of a request: strong where many sequences hold a block."""
    known = signs()
    level = max(i for i, least in enumerate(known["holders"]) if holders >= least)
    turn, first = known["hue"]
    hue = (number * turn + first) % 360
    return f"oklch({known['lightness']['light'][level]} {known['chroma'][level]} {hue:.1f})"


def block_line(block_size: int) -> str:
    """A sentence on what a block is."""
    return str(signs()["words"]["block"]).replace("{tokens}", str(block_size))


def counted(counts: Mapping[str, int]) -> str:
    """Counts in words: those that are not 0."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


# ---- squares


def pool_picture(view: PoolView, noun: str = "request") -> str:
    """The blocks of a pool in order: those in use and a margin, and in words how many there are beside."""
    shown = min(view.shown, MOST)
    by_request: dict[int, int] = defaultdict(int)
    for names in view.holders.values():
        for name in set(names):
            by_request[name] += 1
    squares = [_square(view, block, by_request, noun) for block in range(shown)]
    rest = {name: count for name, count in view.counts(shown).items() if name != "shared"}
    note = f"<small>+{counted(rest)}</small>" if shown < view.total else ""
    return squares_picture(squares, f"blocks by {noun}") + note


def _square(view: PoolView, block: int, by_request: Mapping[int, int], noun: str) -> Square:
    names = view.holders.get(block)
    if names:
        first = names[0]
        title = f"{noun} {first}: {by_request[first]:,} blocks"
        return "several" if len(set(names)) > 1 else "held", colour_of(first, len(names)), title
    if block in view.others:
        return "others", "", "held by others"
    return ("cached", "", "cached") if block in view.cached else ("free", "", "free")


def squares_picture(squares: Sequence[Square], label: str, columns: int = COLUMNS) -> str:
    """Squares in lines; equal ones are one path."""
    places: dict[Square, list[tuple[int, int]]] = defaultdict(list)
    for i, square in enumerate(squares):
        if square[0]:
            places[square].append((i % columns * CELL, i // columns * CELL))
    width, height = columns * CELL, -(-len(squares) // columns) * CELL
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'role="img" aria-label="{escape(label)}" style="display:block;max-width:100%;height:auto">'
    ]
    for (sign, own, title), some in places.items():
        parts.append(f"<g><title>{escape(title)}</title>{_drawn(sign, own, some)}</g>")
    return "".join([*parts, "</svg>"])


def _drawn(sign: str, own: str, places: Iterable[tuple[int, int]]) -> str:
    """The paths of a sign at several places. A line lies within its square."""
    known = signs()
    places = list(places)
    found = []
    for colour, path, *stroke in (
        *(known["signs"]["held"] if sign == "several" else ()),
        *known["signs"][sign],
    ):
        value = own if colour == "own" else known["colours"]["light"][colour]
        line = min(2.0, max(1.0, stroke[0] * SIZE)) if stroke else 0.0
        shape = _scaled(path, SIZE - line)
        data = "".join(f"M{x + line / 2:g} {y + line / 2:g}{shape}" for x, y in places)
        paint = f'fill="none" stroke="{value}" stroke-width="{line:g}"' if stroke else f'fill="{value}"'
        found.append(f'<path d="{data}" {paint}/>')
    return "".join(found)


@cache
def _scaled(path: str, size: float) -> str:
    """A path of a square with sides of 1, for sides of `size`."""
    return re.sub(r"-?\d*\.?\d+", lambda number: f"{float(number[0]) * size:.4g}", path).replace("m0 0", "")


# ---- cards


def heading(text: str, more: str) -> str:
    """A line above a picture."""
    return f'<div style="margin-top:6px">{escape(text)} <small>{escape(more)}</small></div>'


def views_legend(views: Sequence[PoolView], noun: str = "request") -> str:
    """The legend of pools: what is in them, and its first requests."""
    words = signs()["words"]
    found: dict[str, tuple[str, str]] = {}
    several = any(len(set(some)) > 1 for view in views for some in view.holders.values())
    requests = sorted({name for view in views for names in view.holders.values() for name in names})
    for number in requests[:MOST_NAMES]:
        found[f"{noun} {number}"] = ("held", colour_of(number))
    if len(requests) > MOST_NAMES:
        found[f"+{len(requests) - MOST_NAMES:,} {noun}s"] = ("", "")
    if any(view.counts()["shared"] for view in views):
        found["darker: shared"] = ("held", colour_of(requests[0], 5))
    if several:
        found[words["several"].replace("request", noun)] = ("several", colour_of(0))
    for name, there in (
        ("others", [view.others for view in views]),
        ("cached", [view.cached for view in views]),
    ):
        if any(there):
            found[words[name]] = (name, "")
    found[words["free"]] = ("free", "")
    return legend(found)


def legend(entries: Mapping[str, tuple[str, str]]) -> str:
    """Signs and what they mean: by the words the sign and its colour."""
    found = []
    for words, (sign, own) in entries.items():
        box = f'width="{SIZE}" height="{SIZE}" viewBox="0 0 {SIZE} {SIZE}" aria-hidden="true"'
        svg = f"<svg {box}>{_drawn(sign, own, [(0, 0)])}</svg> " if sign else ""
        found.append(f'<span style="white-space:nowrap;margin-right:14px">{svg}{escape(words)}</span>')
    return f"<div><small>{''.join(found)}</small></div>"


def card(title: str, lines: Iterable[str], parts: Iterable[str]) -> str:
    """A picture with its words. lines: of text. parts: of HTML."""
    known = signs()["colours"]["light"]
    said = "".join(f"<div>{escape(line)}</div>" for line in lines)
    frame = (
        f"{FONT};color:{known['ink']};background:{known['panel']};border:1px solid {known['line']};"
        "border-radius:8px;padding:8px 12px;max-width:730px;box-sizing:border-box;overflow-wrap:anywhere"
    )
    head = f'<b style="white-space:pre-line">{escape(title)}</b>'
    return f'<div style="{frame}">{head}{said}{"".join(parts)}</div>'
