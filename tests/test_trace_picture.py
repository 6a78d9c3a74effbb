"""Pictures of blocks: small, whole in themselves, escaped, and of what is in use."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from hf_paged.trace import BlockMap, Kind, Name, Step, Table
from hf_paged.trace.picture import MOST, PoolView, card, colour_of, pool_picture, shown_blocks, signs


def squares(html: str) -> int:
    """How many squares are filled: each begins a path of its own."""
    return sum(path.count("M") for path in re.findall(r'<path d="([^"]*)" fill="(?!none)', html))


def block_map(total: int, tables: dict[Name, tuple[int, ...]], **fields: frozenset[int]) -> BlockMap:
    cached = (fields.get("cached", frozenset()),)
    others = (fields.get("others", frozenset()),)
    of_kind = {name: (Table(0, blocks),) for name, blocks in tables.items()}
    return BlockMap(Step(3, 0.5), (Kind("full", None, total),), of_kind, cached, 16, others)


@pytest.mark.parametrize(
    ("top", "total", "shown"),
    [(0, 16_640, 128), (50, 16_640, 128), (112, 16_640, 128), (113, 16_640, 192), (50, 150, 150), (16_640, 16_640, 16_640), (0, 0, 0)],
)  # fmt: skip
def test_a_map_shows_what_is_in_use_and_a_margin(top: int, total: int, shown: int) -> None:
    assert shown_blocks(top, total) == shown


def test_a_default_pool_is_a_small_picture() -> None:
    found = block_map(16_640, {Name(0, 0): tuple(range(30)), Name(1, 0): (*range(10), 40, 41)})
    html = found._repr_html_()
    assert len(html) < 6000
    assert "+16,512 free" in html
    assert "32 held, 10 shared, 16,608 free" in html
    assert "A square is a block: the keys and values of 16 tokens." in html
    assert "full attention: 16,640 blocks" in html
    assert "request 1" in html
    assert "<title>request 0: 30 blocks</title>" in html
    ElementTree.fromstring(html)
    assert not re.search(r"<script|<style|href=|src=|url\(|\bon\w+=|\bid=|\bclass=", html)
    assert str(found).splitlines()[-1] == "+16,512 free"
    assert found.draw(whole=True).count("\n") == 16_640 // 64 - 1


def test_each_block_is_one_square() -> None:
    """Held, of several requests, of others, cached and free ones; the rest is a number."""
    view = PoolView(400, {0: [0], 1: [0, 0], 2: [0, 7]}, {5, 6}, {9})
    html = pool_picture(view)
    assert view.counts() == {"held": 4, "shared": 2, "cached": 2, "free": 394}
    assert squares(html) == 128 + 1  # that of several requests has one within
    assert colour_of(0) in html
    assert colour_of(0, 2) in html
    assert "+272 free" in html


def test_a_full_pool_is_cut() -> None:
    view = PoolView(50_000, {block: [block % 100] for block in range(20_000)}, range(20_000, 30_000))
    html = pool_picture(view)
    assert squares(html) == MOST
    assert "+17,952 held, 10,000 cached, 20,000 free" in html
    assert len(html) < 100_000


def test_text_is_escaped() -> None:
    html = card("<b>&", ["a < b", '"<script>'], [])
    assert "<script" not in html
    assert "&lt;b&gt;&amp;" in html
    ElementTree.fromstring(html)


def test_signs_are_relative_paths_in_a_square() -> None:
    """So that a square's place and size are all that is added to them, on canvases and in pictures."""
    known = signs()
    names = {*known["colours"]["light"], "own"}
    for operations in known["signs"].values():
        for colour, path, *_ in operations:
            assert colour in names
            assert re.fullmatch(r"m[mhvlz\d\s.-]+", path)
    assert known["colours"]["light"].keys() == known["colours"]["dark"].keys()
    levels = len(known["holders"])
    assert [len(known["lightness"][theme]) for theme in ("light", "dark")] == [levels, levels]
    assert len(known["chroma"]) == levels
