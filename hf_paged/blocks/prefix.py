"""Prefixes: find blocks that hold a prompt's beginning already, and name the ones that were filled."""

from collections.abc import Sequence
from typing import NamedTuple

from .hashing import ROOT, chain, parent_key
from .table import BlockTable


class Partial(NamedTuple):
    """The first `tokens` tokens of a cached block; its further tokens belong to another prompt."""

    block: int
    tokens: int
    digest: bytes


class Match(NamedTuple):
    """The leading blocks of a prompt that the pool holds already, with their names. Nothing is referenced
    yet.
    """

    blocks: list[int]
    digests: list[bytes]
    released: int = 0
    """Leading blocks that are not among them because a sliding window has passed them."""
    partial: Partial | None = None
    """A further block of which only the first tokens are the prompt's."""

    def tokens(self, block_size: int) -> int:
        """How many tokens it hands out."""
        return len(self.digests) * block_size + (self.partial.tokens if self.partial else 0)


def adopt(table: BlockTable, found: Match) -> None:
    """Begin an empty table with the blocks of a match: one more reference each.

    A partial block is named like the others; `detach` gives the table a copy before anything is written. A
    match holds no references: if another caller had one of its blocks evicted or rewritten since, nothing
    changes and the error says so.
    """
    pool = table.pool
    if table.blocks or table.length:
        raise ValueError(f"only an empty table can begin with a prefix, this one holds {table.length} tokens")
    blocks = list(found.blocks)
    names = found.digests[found.released :]
    if found.partial:
        blocks = [*blocks, found.partial.block]
        names = [*names, found.partial.digest]
    for block, digest in zip(blocks, names, strict=True):
        if pool.names.lookup(digest) != block:
            raise ValueError(
                f"block {block} no longer holds what was matched; match again, and adopt before anything is "
                "appended"
            )
    for block in blocks:
        pool.share(block)
    table.blocks = blocks
    table.digests = list(found.digests)
    table.released = found.released
    table.length = found.tokens(pool.block_size)
    table.stamp = pool.tick()
    table.epoch = pool.epoch


def commit(
    table: BlockTable,
    tokens: Sequence[int],
    extra: bytes = b"",
    keep_tokens: bool = False,
    dedupe: bool = True,
    until: int | None = None,
) -> bool:
    """Hash every full block of `table`. `tokens` are the sequence's tokens from its first, of which the first
    `until` are computed. The answer is whether the table names other blocks now.

    Call it only once the forward that filled the blocks has succeeded (C22) and no launched step names them.
    A private block whose content is cached under another id is exchanged for that one, unless `dedupe` is
    False (C17). With `keep_tokens` the pool keeps the tokens, so that hits can be compared with them and a
    prompt can begin with a part of a block. Hashing ends at the first block that cannot be hashed, and blocks
    that depend on dropped ones get no hash: no later block may be found after a content that it was not
    computed from (C24, C25). A block that is never full is named as `commit_tail` does it.
    """
    if not table.pool.fills:
        commit_tail(table, tokens, extra, until)
        return False
    size = table.pool.block_size
    full = min(len(tokens) if until is None else until, len(tokens), table.length) // size
    deduped = False
    parent = table.digests[-1] if table.digests else ROOT
    for index in range(len(table.digests), full if table.epoch == table.pool.epoch else 0):
        content = tokens[index * size : (index + 1) * size]
        behind = parent_key(parent, extra) if keep_tokens else b""
        parent = chain(parent, content, extra)
        place = index - table.released
        if place >= 0:
            block = table.blocks[place]
            kept = tuple(content) if keep_tokens else ()
            bearer = table.pool.cache(block, parent, (index + 1) * size, kept, behind)
            if bearer is None:
                break
            if dedupe and bearer != block and table.pool.references(block) == 1:
                table.pool.share(bearer)
                table.blocks[place] = bearer
                table.pool.drop(block, table.stamp)
                deduped = True
        table.digests.append(parent)
    return deduped


def commit_tail(
    table: BlockTable, tokens: Sequence[int], extra: bytes = b"", until: int | None = None
) -> None:
    """Hash the last block too, although it is not full: another prompt may continue from its tokens with a
    copy of it.

    until: how many tokens of the table are computed; by default all of them. A block that is never full holds
    what all tokens of the table have come to, so it has a name only if all are computed.
    """
    pool = table.pool
    digest = tail_name(table, tokens, extra, until)
    if digest is None or pool.names.lookup(digest) is not None:
        return
    end = table.length if until is None else until
    full = end // pool.block_size
    behind = parent_key(table.digests[-1] if full else ROOT, extra)
    content = tuple(tokens[full * pool.block_size : end])
    pool.cache(table.blocks[full - table.released], digest, end, content, behind)


def tail_name(
    table: BlockTable, tokens: Sequence[int], extra: bytes = b"", until: int | None = None
) -> bytes | None:
    """The hash that `commit_tail` gives the last block; None if that can have none."""
    pool = table.pool
    end = table.length if until is None else until
    full, rest = divmod(end, pool.block_size)
    place = full - table.released
    if not rest or end > min(len(tokens), table.length) or not 0 <= place < len(table.blocks):
        return None
    if len(table.digests) != full or table.epoch != pool.epoch or not (pool.fills or end == table.length):
        return None
    return chain(table.digests[-1] if full else ROOT, tokens[full * pool.block_size : end], extra)
