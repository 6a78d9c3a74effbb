"""Prefixes of a cache in all its groups: what all of them hold of its prompts is a hit, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ..blocks import BlockTable, LayerKind, Match, PrefixLookup, Prompt, adopt
from ..blocks.prefix_lookup import WORTH_A_COPY
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
    # Where a state is of use at exactly its tokens, one token less of a block may have none.
    worth = WORTH_A_COPY if all(kind.fills for kind in sequences.rows) else 1
    lookups = {
        kind: [PrefixLookup(rows.group.pool, prompt, kind, verify, worth) for prompt in prompts]
        for kind, rows in sequences.rows.items()
    }
    columns = _reach(lookups, starts, most)
    if columns <= min(starts):
        return None
    return Prefix(
        columns,
        {
            kind: [lookup.take(columns - start) for start, lookup in zip(starts, row, strict=True)]
            for kind, row in lookups.items()
        },
    )


def parting(sequences: Sequences, prompts: Sequence[Prompt], most: int) -> int:
    """The place up to `most` where rows that have no padding part from what is cached: where blocks end, or,
    of recurrent layers alone, where the nearest snapshot holds other tokens.
    """
    filling = {kind: rows.group.pool for kind, rows in sequences.rows.items() if kind.fills}
    if filling:
        lookups = {
            kind: [PrefixLookup(pool, prompt, kind, worth=1) for prompt in prompts]
            for kind, pool in filling.items()
        }
        return _reach(lookups, [0] * len(prompts), most)
    found = [
        rows.group.pool.names.partial.best(prompt.parent_key(0), prompt.tokens[:most])
        for rows in sequences.rows.values()
        for prompt in prompts
    ]
    return min(0 if best is None else best[1] for best in found)


def _reach(lookups: Mapping[LayerKind, Sequence[PrefixLookup]], starts: Sequence[int], most: int) -> int:
    """The most columns, up to `most`, that rows which begin at these starts find in every pool."""
    columns = most
    while True:
        reached = min(
            start + lookup.reach(columns - start) if start < columns else columns
            for row in lookups.values()
            for start, lookup in zip(starts, row, strict=True)
        )
        if reached <= min(starts) or reached == columns:
            return reached
        columns = reached


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
