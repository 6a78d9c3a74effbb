"""How much of a prompt a pool has cached, to the token, for layers with and without a sliding window."""

from __future__ import annotations

from collections.abc import Sequence

from .hashing import ROOT, chain, parent_key
from .kinds import Full, LayerKind
from .pool import BlockPool
from .prefix import Match, Partial
from .table import BlockTable, Copy

WORTH_A_COPY = 2
"""A block of which fewer tokens than that are wanted is not copied: computing them costs less, and all
prompts begin alike.
"""
WORTH_A_STATE = 64


def worth_a_state(every: int) -> int:
    """The fewest tokens behind the last snapshot for which a prompt leaves one at its end, or where it parts
    from others. every: the tokens of a prompt between two snapshots.
    """
    return min(WORTH_A_STATE, every // 4)


class Prompt:
    """A row's tokens, and the names of its full blocks of one size."""

    def __init__(self, tokens: Sequence[int], block_size: int, extra: bytes = b"") -> None:
        self.tokens = tokens
        self.size = block_size
        self.extra = extra
        self.digests: list[bytes] = []
        parent = ROOT
        for start in range(0, len(tokens) - block_size + 1, block_size):
            parent = chain(parent, tokens[start : start + block_size], extra)
            self.digests.append(parent)
        self._in_other_blocks: dict[int, Prompt] = {}

    def at(self, block_size: int) -> Prompt:
        """The same tokens in blocks of another size."""
        if block_size == self.size:
            return self
        found = self._in_other_blocks.get(block_size)
        if found is None:
            found = self._in_other_blocks[block_size] = Prompt(self.tokens, block_size, self.extra)
        return found

    def parent_key(self, full: int) -> bytes:
        """The key of the prefix made of the first `full` blocks."""
        return parent_key(self.digests[full - 1] if full else ROOT, self.extra)


class PrefixLookup:
    """The cached blocks of a prompt in one pool. A lookup changes no count; `adopt` takes the references.

    Layers with a window need only the blocks that the next token attends to, so a prefix can match even if
    its first blocks are gone.
    """

    def __init__(
        self,
        pool: BlockPool,
        prompt: Prompt,
        kind: LayerKind | None = None,
        verify: bool = False,
        worth: int = WORTH_A_COPY,
    ) -> None:
        self.pool = pool
        self.prompt = prompt.at(pool.block_size)
        self.kind = kind or Full()
        self.verify = verify
        self.worth = worth
        """The fewest tokens of a block that are worth a copy."""
        self._found: list[int | None] = []
        for index in range(len(self.prompt.digests)):
            self._found.append(self._find(index))
            if not self.kind.releases and self._found[-1] is None:
                break  # without a window no block after a gap is usable
        self._run = [0]
        """For each number of full blocks how many of the last ones are there without a gap."""
        for block in self._found:
            self._run.append(0 if block is None else self._run[-1] + 1)

    def _find(self, index: int) -> int | None:
        block = self.pool.names.lookup(self.prompt.digests[index])
        if block is not None and self.verify and self.pool.names.tokens(block) != self._tokens(index):
            return None
        return block

    def _tokens(self, index: int) -> tuple[int, ...]:
        size = self.prompt.size
        return tuple(self.prompt.tokens[index * size : (index + 1) * size])

    def reach(self, most: int) -> int:
        """How many of the first `most` tokens can be handed out together."""
        size = self.prompt.size
        for full in range(min(max(most, 0) // size, len(self._found)), 0, -1):
            # With a part of one more block the window may need a block that is gone.
            if self._run[full] >= full - self.kind.reach((full + 1) * size - 1, size):
                tokens = full * size + self._rest(full, most)
                if self._run[full] >= full - self.kind.reach(tokens, size):
                    return tokens
        return self._rest(0, most)

    def _rest(self, full: int, most: int) -> int:
        partial = self._partial(full, most)
        return partial.tokens if partial else 0

    def _partial(self, full: int, most: int) -> Partial | None:
        """The block whose first tokens continue the prompt after `full` blocks, if copying it is worth it."""
        size = self.prompt.size
        wanted = self.prompt.tokens[full * size : min(max(most, 0), (full + 1) * size)]
        if not wanted:
            return None
        whole = self._found[full] if full < len(self._found) else None
        key = self.prompt.parent_key(full)
        index = self.pool.names.partial
        search = index.best if self.pool.fills else index.longest
        best = search(key, wanted) if whole is None else (whole, len(wanted))
        if best is None or best[1] >= size:
            return None
        if best[1] < self.worth and self.pool.names.covered(best[0]) != full * size + best[1]:
            return None
        return Partial(*best, self.pool.names.digest(best[0]))

    def take(self, tokens: int) -> Match:
        """The blocks of the first `tokens` tokens, a length that `reach` returned."""
        full, rest = divmod(max(tokens, 0), self.prompt.size)
        first = min(self.kind.reach(tokens, self.prompt.size), full)
        blocks = [block for block in self._found[first:full] if block is not None]
        return Match(blocks, self.prompt.digests[:full], first, self._partial(full, tokens) if rest else None)


def reach_in_all(lookups: Sequence[PrefixLookup], most: int) -> int:
    """How many of the first `most` tokens every pool can hand out together."""
    while True:
        reached = min(lookup.reach(most) for lookup in lookups)
        if reached == most or not reached:
            return reached
        most = reached


def detach(tables: Sequence[BlockTable], drop: bool = True) -> list[Copy]:
    """Give each table a copy of its last block if that block holds more tokens than the table or has other
    references, or is never full and has a name: the table will write in it.

    The answer is the copies to carry out. Without `drop` the tables' references to the sources stay, and the
    caller drops them once the step is planned: until then no source can become a target (C15). If the pool is
    full, the last table keeps its block in place, and the block loses its hash.
    """
    shared = [table for table in tables if table.length % table.pool.block_size and not _is_its_own(table)]
    copies = []
    for table in shared:
        if table.pool.available:
            near = table.blocks[-2] + 1 if len(table.blocks) > 1 else table.near
            copies.append(Copy(table.blocks[-1], table.pool.take(near, table.tenant)))
            table.blocks[-1] = copies[-1].target
            table.pool.copied(*copies[-1])
    for table, copy in zip(shared if drop else (), copies, strict=False):
        table.pool.drop(copy.source, table.stamp)
    return copies


def _is_its_own(table: BlockTable) -> bool:
    last = table.blocks[-1]
    pool = table.pool
    if not pool.fills:
        return not table.copies_next
    return pool.references(last) == 1 and pool.names.covered(last) == table.length
