"""The names of a pool's blocks: digests of what they hold, by which prompts find them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from .partial_index import PartialBlockIndex


class BlockName(NamedTuple):
    """A block's keys for matching: its digest, how many tokens the digest covers, the block's own tokens if
    kept, and the key of the prefix that it follows: empty if it must not be found by its first tokens.
    """

    digest: bytes
    covered: int
    tokens: tuple[int, ...]
    parent_key: bytes


class NameLog(Protocol):
    """A reader of what becomes of names in a pool. It empties the sets."""

    renamed: set[int]
    """Blocks whose name came, went or changed."""
    evicted: set[int]


class BlockNames:
    """Which block bears which digest, one to one.

    The pool decides which block may bear a name: none that is free does.
    """

    def __init__(self) -> None:
        self.of: dict[int, BlockName] = {}
        """The name of each block that has one: to read, as often as a block is dropped."""
        self._block_of: dict[bytes, int] = {}
        self.partial = PartialBlockIndex()
        """Named blocks by prefix and tokens: for prompts that continue with a part of a block."""
        self.lasting: set[int] = set()
        """Blocks that are evicted behind all others."""
        self.logs: list[NameLog] = []
        """Filled for those that draw a map of the blocks; empty while there are none."""

    def __contains__(self, block: int) -> bool:
        """True if `block` was published and others may find it."""
        return block in self.of

    # ---- blocks by digests

    def lookup(self, digest: bytes) -> int | None:
        """The block that holds what `digest` names, held or cached."""
        return self._block_of.get(digest)

    def naming(self, digest: bytes) -> object | None:
        """An object that stays the same as long as a block bears this digest without a break."""
        block = self._block_of.get(digest)
        return None if block is None else self.of.get(block)

    # ---- digests by blocks

    def digest(self, block: int) -> bytes:
        """The digest that `block` was published under."""
        return self.of[block].digest

    def digests(self, blocks: Iterable[int] | None = None) -> dict[int, bytes | None]:
        """The digests of `blocks`, None where one has no name; without them of all blocks that have one."""
        names = self.of
        if blocks is None:
            return {block: name.digest for block, name in names.items()}
        return {block: names[block].digest if block in names else None for block in blocks}

    def covered(self, block: int) -> int:
        """How many tokens, from the sequence's first, the digest of `block` covers."""
        return self.of[block].covered

    def saves(self, block: int) -> int:
        """The tokens that a block covers beyond the next shorter one of its chain, where a block holds what
        all its tokens have come to.
        """
        _, covered, tokens, parent_key = self.of[block]
        shorter = self.partial.longest(parent_key, tokens[:-1])
        return covered - (shorter[1] if shorter else 0)

    def inner(self, block: int) -> int | None:
        """The next shorter block of the chain that ends with this one, if no other chain goes on from it."""
        _, _, tokens, parent_key = self.of[block]
        shorter = self.partial.longest(parent_key, tokens[:-1])
        if shorter is None or self.partial.next_longer(parent_key, tokens):
            return None
        alone = self.partial.next_longer(parent_key, tokens[: shorter[1]]) == [block]
        return shorter[0] if alone else None

    def tokens(self, block: int) -> tuple[int, ...]:
        """The tokens that `block` was published with, empty if none were given."""
        name = self.of.get(block)
        return name.tokens if name else ()

    # ---- changes

    def add(self, block: int, name: BlockName) -> int | None:
        """Give `block` a name; the answer is the block that bears it.

        That is another one if the same content has the name already, and None if `block` cannot bear it,
        because it has another or because other content has taken it (C25). A name gains tokens, never loses
        them.
        """
        digest, covered, tokens, _ = name
        bearer = self._block_of.get(digest, block)
        if bearer != block:
            taken = self.of[bearer]
            return bearer if taken.covered == covered and (not tokens or taken.tokens == tokens) else None
        old = self.of.get(block)
        if old is not None and old.digest != digest:
            return None
        if old is None or (tokens and not old.tokens):
            self.of[block] = name
            for log in self.logs:
                log.renamed.add(block)
            if name.parent_key:
                self.partial.add(name.parent_key, tokens, block)
        self._block_of[digest] = block
        return block

    def remove(self, block: int) -> BlockName | None:
        """Take the name of `block` away, if it has one: that name."""
        name = self.of.pop(block, None)
        self.lasting.discard(block)
        if name:
            del self._block_of[name.digest]
            for log in self.logs:
                log.renamed.add(block)
            if name.parent_key:
                self.partial.remove(name.parent_key, name.tokens, block)
        return name

    def clear(self) -> None:
        """Take all names away."""
        for log in self.logs:
            log.renamed.update(self.of)
        self.lasting.clear()
        self.of.clear()
        self._block_of.clear()
        self.partial.clear()

    # ---- the audit

    def check(self) -> None:
        """Raise AssertionError unless blocks and digests are one to one, and those to be found by their
        tokens are.
        """
        if len(self._block_of) != len(self.of):
            raise AssertionError("digests and blocks are not one to one")
        for block, name in self.of.items():
            if self._block_of.get(name.digest) != block:
                raise AssertionError(f"block {block} and its digest disagree")
        if len(self.partial) != sum(1 for name in self.of.values() if name.parent_key):
            raise AssertionError("the partial blocks and the names disagree")
