"""Prefixes: find blocks that hold a prompt's beginning already, and name the ones that were filled."""

from collections.abc import Sequence
from typing import NamedTuple

from .digest import ROOT, chain
from .pool import BlockPool
from .table import Table


class Match(NamedTuple):
    """The leading blocks of a prompt that the pool holds already, with their names. Nothing is referenced yet."""

    blocks: list[int]
    digests: list[bytes]


def match(pool: BlockPool, tokens: Sequence[int], extra: bytes = b"", verify: bool = False) -> Match:
    """Walk the chain of `tokens` as far as the pool knows it.

    At least one token is always left to compute: hits are capped at (L - 1) // B blocks (C21). With `verify` the
    tokens themselves are compared on every hit (C25).
    """
    found = Match([], [])
    size, parent = pool.block_size, ROOT
    most = max(0, len(tokens) - 1) // size
    for start in range(0, most * size, size):
        content = tokens[start : start + size]
        parent = chain(parent, content, extra)
        block = pool.lookup(parent)
        if block is None or (verify and pool.published_tokens(block) != tuple(content)):
            break
        found.blocks.append(block)
        found.digests.append(parent)
    pool.counts["hits"] += len(found.blocks)
    pool.counts["misses"] += most - len(found.blocks)
    return found


def adopt(table: Table, found: Match) -> None:
    """Begin an empty table with the blocks of a match: one more reference each.

    A match holds nothing: if another caller had a block of it evicted or rewritten since, nothing changes and the
    error says so.
    """
    pool = table.pool
    if table.blocks or table.length:
        raise ValueError(f"only an empty table can begin with a prefix, this one holds {table.length} tokens")
    for block, digest in zip(found.blocks, found.digests, strict=True):
        if pool.lookup(digest) != block:
            raise ValueError(f"block {block} no longer holds what was matched; match again, and adopt before anything is appended")
    for block in found.blocks:
        pool.share(block)
    table.blocks, table.digests = list(found.blocks), list(found.digests)
    table.length = len(found.blocks) * pool.block_size
    table.stamp, table.epoch = pool.tick(), pool.epoch


def commit(table: Table, tokens: Sequence[int], extra: bytes = b"", verify: bool = False) -> None:
    """Name every full block of `table`; `tokens` are the sequence's tokens from its first.

    Call it only once the forward that filled the blocks has succeeded (C22) and no launched step names them. A
    private block whose content is cached under another id is exchanged for that one (C17). Naming ends at the first
    block that cannot bear its name, and what rests on forgotten blocks gets none: no later block may be found behind
    a content that it was not computed from (C24, C25).
    """
    size = table.pool.block_size
    full = min(len(tokens), table.length) // size
    parent = table.digests[-1] if table.digests else ROOT
    for index in range(len(table.digests), full if table.epoch == table.pool.epoch else 0):
        content = tuple(tokens[index * size : (index + 1) * size])
        parent = chain(parent, content, extra)
        place = index - table.released
        if place >= 0 and not _publish(table, place, parent, (index + 1) * size, content if verify else ()):
            return
        table.digests.append(parent)


def _publish(table: Table, place: int, digest: bytes, covered: int, tokens: tuple[int, ...]) -> bool:
    pool, block = table.pool, table.blocks[place]
    bearer = pool.publish(block, digest, covered, tokens)
    if bearer is not None and bearer != block and pool.references(block) == 1:
        pool.share(bearer)
        table.blocks[place] = bearer
        pool.drop(block, table.stamp)
    return bearer is not None
