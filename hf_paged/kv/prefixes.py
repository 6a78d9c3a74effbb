"""Prefixes of a cache in all its groups: what all of them hold of its prompts is a hit, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ..blocks import BlockTable, LayerKind, Match, PrefixLookup, Prompt, adopt
from .sequences import Sequences


class Prefix(NamedTuple):
    """A prefix for the rows of a cache: `columns` columns, padding included, and each row's blocks by kind of
    layer.
    """

    columns: int
    found: Mapping[LayerKind, list[Match]]


def longest_prefix(
    sequences: Sequences, prompts: Sequence[Prompt], most: int, verify: bool = False
) -> Prefix | None:
    """The most columns, up to `most`, that every row can begin with in every group; None if that is nothing.

    Rows end together, so a row that begins later than others has fewer tokens in as many columns.
    """
    starts = sequences.starts or [0] * len(prompts)
    lookups = {
        kind: [PrefixLookup(rows.group.pool, prompt, kind, verify) for prompt in prompts]
        for kind, rows in sequences.rows.items()
    }
    columns = most
    while True:
        reached = min(
            start + lookup.reach(columns - start) if start < columns else columns
            for row in lookups.values()
            for start, lookup in zip(starts, row, strict=True)
        )
        if reached <= min(starts):
            return None
        if reached == columns:
            break
        columns = reached
    return Prefix(
        columns,
        {
            kind: [lookup.take(columns - start) for start, lookup in zip(starts, row, strict=True)]
            for kind, row in lookups.items()
        },
    )


def begin_with(sequences: Sequences, prefix: Prefix, more: int) -> None:
    """Let the rows begin with a prefix that was just found; `more` columns follow."""
    for kind, rows in sequences.rows.items():
        rows.begin_with(prefix.found[kind], prefix.columns, more)


@contextmanager
def computed_again(sequences: Sequences, prefix: Prefix) -> Iterator[Callable[[], bool]]:
    """Hold the blocks of a prefix that was found and is computed again all the same. The value tells whether
    the rows now hold what was found, up to rounding, in all of its full blocks.
    """
    tables: dict[LayerKind, list[BlockTable]] = {}

    def agrees() -> bool:
        for kind, rows in sequences.rows.items():
            pairs = [
                pair
                for table, match, own in zip(tables[kind], prefix.found[kind], rows.tables, strict=True)
                for pair in zip(
                    table.blocks[: len(match.blocks)],
                    own.blocks[match.released - own.released :],
                    strict=False,
                )
            ]
            if pairs and not rows.group.blocks_agree(pairs):
                return False
        return True

    try:
        for kind, matches in prefix.found.items():
            tables[kind] = [BlockTable(sequences.rows[kind].group.pool) for _ in matches]
            for table, match in zip(tables[kind], matches, strict=True):
                adopt(table, match)
        yield agrees
    finally:
        for held in tables.values():
            for table in held:
                table.free()


def count_hits(sequences: Sequences, prompts: Sequence[Prompt], prefix: Prefix | None) -> None:
    """Enter in the books which of the prompts' blocks were found."""
    for kind, rows in sequences.rows.items():
        hits = (
            0
            if prefix is None
            else sum(len(match.blocks) + (match.partial is not None) for match in prefix.found[kind])
        )
        behind = 0 if prefix is None else sum(match.released for match in prefix.found[kind])
        whole = sum(rows.group.pool.blocks_for(len(prompt.tokens)) for prompt in prompts)
        rows.group.pool.counts["hits"] += hits
        rows.group.pool.counts["misses"] += max(0, whole - hits - behind)
