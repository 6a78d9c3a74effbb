"""The picture of an output for notebooks: its texts, and the blocks that its tokens had."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import islice
from typing import NamedTuple

from ...trace.picture import COLUMNS, MOST, Square, block_line, card, colour_of, legend, squares_picture

MOST_TEXT = 600
"""Characters of a text that a picture and a repr show."""
MOST_ANSWERS = 8
PROMPT, ANSWER = 0, 1
"""Numbers of two colours."""


class Answer(NamedTuple):
    """An answer: its text, how many tokens it has, and why it ended."""

    text: str | None
    tokens: int
    reason: str


class Usage(NamedTuple):
    """Tokens of a prompt, those of them that were cached, and tokens of a block; 0 if no block was held."""

    prompt: int
    cached: int
    block_size: int


def shortened(text: str | None) -> str | None:
    """A text without what is beyond MOST_TEXT characters, and how many it has."""
    if text is None or len(text) <= MOST_TEXT:
        return text
    return f"{text[:MOST_TEXT]}... ({len(text):,} characters in all)"


def answers_picture(title: str, lines: Sequence[str], usage: Usage, answers: Sequence[Answer]) -> str:
    """The picture of all answers to one prompt."""
    shown = answers[:MOST_ANSWERS]
    parts = []
    if usage.block_size:
        squares = [square for answer in shown for square in _line_of(usage, answer.tokens, len(answers))]
        parts.append(squares_picture(squares[:MOST], "blocks in order of position"))
        parts.append(legend(_meanings(usage, len(answers))))
        lines = (*lines, block_line(usage.block_size))
    for answer in shown:
        said = f"{answer.reason}, {answer.tokens:,} tokens"
        text = escape(shortened(answer.text) or "")
        parts.append(f'<div style="margin-top:6px"><small>{escape(said)}</small></div>')
        parts.append(f'<div style="white-space:pre-wrap">{text}</div>')
    if len(answers) > len(shown):
        parts.append(f"<small>+{len(answers) - len(shown):,} answers</small>")
    return card(title, lines, parts)


def _line_of(usage: Usage, tokens: int, answers: int) -> Iterator[Square]:
    """The squares of an answer's blocks, up to the end of a line. The last token is in no block: it was never
    computed with.
    """
    stored = usage.prompt + max(tokens - 1, 0)
    count = min(-(-stored // usage.block_size), MOST)
    for block in range(count):
        begin, end = block * usage.block_size, (block + 1) * usage.block_size
        if begin < usage.cached:
            yield "hit", colour_of(PROMPT, answers), "prompt, from the cache"
        elif begin < usage.prompt:
            yield "held", colour_of(PROMPT, answers if end <= usage.prompt else 1), "prompt"
        else:
            yield "held", colour_of(ANSWER), "answer"
    yield from islice([("", "", "")] * COLUMNS, -count % COLUMNS)


def _meanings(usage: Usage, answers: int) -> dict[str, tuple[str, str]]:
    strong = colour_of(PROMPT, answers)
    shared = f", shared by {answers} answers" if answers > 1 else ""
    found = {"prompt" + shared: ("held", strong), "answer": ("held", colour_of(ANSWER))}
    return {**({"prompt, from the cache": ("hit", strong)} if usage.cached else {}), **found}
