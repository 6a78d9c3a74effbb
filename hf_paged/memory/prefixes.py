"""Prefixes of a cache in all its groups: what all of them hold of its prompts is a hit, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..blocks import Match, Prompt, Trail
from .group import Kind
from .sequences import Sequences


class Prefix(NamedTuple):
    """What the rows of a cache can begin with: `columns` columns, padding included, and each row's blocks by kind of layer."""

    columns: int
    found: Mapping[Kind, list[Match]]


def longest(sequences: Sequences, prompts: Sequence[Prompt], most: int, verify: bool = False) -> Prefix | None:
    """The most columns, up to `most`, that every row can begin with in every group; None if that is nothing.

    Rows end together, so a row that begins later than others has fewer tokens in as many columns.
    """
    starts = sequences.starts or [0] * len(prompts)
    trails = {kind: [Trail(rows.group.pool, prompt, kind.window, verify) for prompt in prompts] for kind, rows in sequences.rows.items()}
    columns = most
    while True:
        reached = min(
            start + trail.reach(columns - start) if start < columns else columns
            for row in trails.values()
            for start, trail in zip(starts, row, strict=True)
        )
        if reached <= min(starts):
            return None
        if reached == columns:
            break
        columns = reached
    return Prefix(
        columns, {kind: [trail.take(columns - start) for start, trail in zip(starts, row, strict=True)] for kind, row in trails.items()}
    )


def begin_with(sequences: Sequences, prefix: Prefix, more: int) -> None:
    """Let the rows begin with a prefix that was just found; `more` columns follow."""
    for kind, rows in sequences.rows.items():
        rows.begin_with(prefix.found[kind], prefix.columns, more)


def count(sequences: Sequences, prompts: Sequence[Prompt], prefix: Prefix | None) -> None:
    """Enter in the books which of the prompts' blocks were found."""
    for kind, rows in sequences.rows.items():
        hits = 0 if prefix is None else sum(len(match.blocks) + (match.partial is not None) for match in prefix.found[kind])
        behind = 0 if prefix is None else sum(match.released for match in prefix.found[kind])
        whole = sum(rows.group.pool.blocks_for(len(prompt.tokens)) for prompt in prompts)
        rows.group.pool.counts["hits"] += hits
        rows.group.pool.counts["misses"] += max(0, whole - hits - behind)
