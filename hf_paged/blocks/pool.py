"""The blocks of one layer group: which are held, which are free, which are cached."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Literal, Protocol

from .evictor import Evictor
from .names import BlockName, BlockNames
from .options import check_int
from .sealed import NO_HEIR, ByteEvent, SealedBlocks
from .shares import Shares, TenantBooks, recount

FREE = 0
HELD = 1
CACHED = 2
MAX_BLOCK_SIZE = 256
NEVER_FULL = 1 << 62
"""The block size of kinds that keep one block for a sequence of any length: what its tokens have come to."""
NOWHERE = -1
LATE = 1 << 62
"""Added to the last access of blocks that are evicted behind all others."""


class OutOfBlocks(RuntimeError):
    """More blocks are needed than the pool can give."""


def check_block_size(block_size: int) -> int:
    """Return `block_size` if it is a power of two from 1 to 256."""
    check_int("block_size", block_size)
    if not 1 <= block_size <= MAX_BLOCK_SIZE or block_size & (block_size - 1):
        raise ValueError(
            f"block_size={block_size} is not a power of two from 1 to {MAX_BLOCK_SIZE}; 16 is a good choice"
        )
    return block_size


class BlockHolder(Protocol):
    """A block table, as far as the pool's audit reads it."""

    blocks: list[int]
    tenant: str

    def check(self) -> None:
        """Raise AssertionError unless it holds exactly the blocks that its tokens need."""


class BlockPool:
    """Reference counts of `total` blocks of `block_size` tokens each.

    Every block is in one of three states: free (never used or emptied), held (the reference count is the
    number of tables that name it) or cached (no table names it, its digest can still be matched). free + held
    + cached = total after every operation; available = free + cached.
    """

    def __init__(self, total: int, block_size: int) -> None:
        if total < 0:
            raise ValueError(f"a pool cannot have {total} blocks; give 0 or more")
        self.block_size = block_size if block_size == NEVER_FULL else check_block_size(block_size)
        self.fills = block_size != NEVER_FULL
        """True if each token has a slot of its own in a block, until that is full. Otherwise every token
        replaces what the block holds: a name is of use at exactly the tokens that it covers, and a named
        block is copied before it is written.
        """
        self._state = bytearray(total)
        self._references = [0] * total
        self._lowest_free = 0
        self._held = 0
        self.weights: dict[str, float] = {}
        """How large the shares of tenants are in the blocks, beside each other; 1 without an entry."""
        self.owners: dict[int, str] = {}
        """The tenants of blocks that are not free; blocks of requests without one are not here."""
        self._tenants: TenantBooks | None = None
        """The blocks of each tenant, "" too, from the first block of a named one on."""
        self.taken: Counter[str] = Counter()
        """Cached blocks that tenants have lost within their shares (C43)."""
        self._evictor = Evictor()
        self._last_access = [0] * total
        self.names = BlockNames()
        """The names of blocks, for readers; `cache` gives them, `uncache` and `forget` take them away."""
        self._clock = 0
        self.epoch = 0
        """How often `forget` was called. What a table computed in an earlier epoch is never named."""
        self._tables: weakref.WeakSet[BlockHolder] = weakref.WeakSet()
        self.peak_held = 0
        self.top = 0
        """No block from here on was ever handed out, so none needs memory yet."""
        self.counts: Counter[Literal["copies", "evictions", "hits", "misses", "checked", "mismatched"]] = (
            Counter()
        )
        self.sealed: SealedBlocks | None = None
        """The blocks whose bytes are verified; None if none are."""

    # ---- sizes

    @property
    def unit(self) -> str:
        """The pool's blocks, for errors."""
        return f"blocks of {self.block_size} tokens" if self.fills else "blocks of one sequence each"

    @property
    def total(self) -> int:
        return len(self._state)

    @property
    def held(self) -> int:
        return self._held

    @property
    def cached(self) -> int:
        return len(self._evictor)

    @property
    def cached_by_tenant(self) -> dict[str, int]:
        """The cached blocks of each tenant that has any."""
        return self._evictor.counts()

    @property
    def free(self) -> int:
        return self.total - self._held - self.cached

    @property
    def available(self) -> int:
        return self.total - self._held

    def blocks_for(self, tokens: int) -> int:
        """The number of blocks that `tokens` tokens fill."""
        return -(-tokens // self.block_size)

    def grow(self, total: int) -> None:
        """Add free blocks at the end until there are `total`."""
        more = total - self.total
        if more < 0:
            raise ValueError(f"a pool of {self.total} blocks cannot shrink to {total}")
        self._state.extend(bytes(more))
        self._references.extend([0] * more)
        self._last_access.extend([0] * more)

    def tick(self) -> int:
        """A new point in time, for tables to stamp their use with."""
        self._clock += 1
        return self._clock

    # ---- blocks

    def take(self, near: int = NOWHERE, tenant: str = "") -> int:
        """Hand out one block with one reference: `near` if it is free, else the lowest free one, else an
        evicted one. Until it is free it counts for the share of `tenant`.
        """
        state = self._state
        if 0 <= near < len(state) and state[near] == FREE:
            block = near
        else:
            block = state.find(FREE, self._lowest_free)
            self._lowest_free = len(state) if block < 0 else block
            if block < 0:
                block = self._evict(tenant)
        state[block] = HELD
        self._references[block] = 1
        self._held += 1
        if tenant or self._tenants:
            self._give((block,), tenant)
        if self._held > self.peak_held:
            self.peak_held = self._held
        if block >= self.top:
            self.top = block + 1
        return block

    def take_several(self, count: int, near: int = NOWHERE, tenant: str = "") -> list[int]:
        """Hand out `count` blocks, side by side from `near` on if these are free.

        Else each comes after the one before it, or from the lowest place. With blocks of one token a prompt
        is as many blocks, so it gets the lowest run that is long enough first (C38).
        """
        fits = near >= 0 and self._state.find(bytes(count), near, near + count) == near
        start = near if fits else None
        if start is None and self.block_size == 1:
            start = self.find_run(count)
            near = NOWHERE
        if start is None:
            found: list[int] = []
            for _ in range(count):
                found.append(self.take(found[-1] + 1 if found else near, tenant))
            return found
        end = start + count
        self._state[start:end] = bytes((HELD,)) * count
        self._references[start:end] = [1] * count
        self._held += count
        self.peak_held = max(self.peak_held, self._held)
        self.top = max(self.top, end)
        if tenant or self._tenants:
            self._give(range(start, end), tenant)
        return list(range(start, end))

    def _give(self, blocks: Collection[int], tenant: str) -> None:
        """Count blocks that were just handed out for a tenant."""
        if tenant:
            self.owners.update(dict.fromkeys(blocks, tenant))
        if self._tenants is None:
            self._count_tenants()
        else:
            self._tenants.change(tenant, len(blocks), len(blocks))

    def find_run(self, length: int) -> int | None:
        """The lowest start of `length` free blocks in a row, if there is such a run."""
        start = self._state.find(bytes(length), self._lowest_free)
        return None if start < 0 or length == 0 else start

    def share(self, block: int) -> None:
        """Add a reference to a held block, or make a cached one held again."""
        if self._state[block] == CACHED:
            self._evictor.remove(block)
            self._state[block] = HELD
            self._held += 1
            if self._tenants:
                self._tenants.change(self.owners.get(block, ""), 0, 1)
            self.peak_held = max(self.peak_held, self._held)
        elif self._state[block] == FREE:
            raise ValueError(f"block {block} is free and cannot be shared")
        self._references[block] += 1
        if self.sealed is not None:
            self.sealed.note(block, "shared")

    def copied(self, source: int, target: int) -> None:
        """Count a copy on write, which is still to be carried out."""
        self.counts["copies"] += 1
        self.note(source, "copied", target)

    def note(self, block: int, event: ByteEvent, heir: int = NO_HEIR) -> None:
        """Let the bytes of a block be checked, if any are; `heir` is the block that gets them."""
        if self.sealed is not None:
            self.sealed.note(block, event, heir)

    def drop(self, block: int, last_access: int = 0) -> None:
        """Take a reference away; with the last one the block is free, or cached if it has a name."""
        if self._references[block] == 0:
            raise ValueError(f"block {block} was freed twice: no table names it any more")
        self._references[block] -= 1
        self._last_access[block] = max(self._last_access[block], last_access)
        if self._references[block]:
            return
        self._held -= 1
        name = self.names.of.get(block)
        if name:
            tenant = self.owners.get(block, "")
            self._state[block] = CACHED
            saves = 0 if self.fills else self.names.saves(block)
            last_access = self._last_access[block] + (LATE if block in self.names.lasting else 0)
            self._evictor.add(block, last_access, name.covered, tenant, saves)
            if self._tenants:
                self._tenants.change(tenant, 0, -1)
        else:
            self._set_free(block)

    def drop_several(self, blocks: Sequence[int], last_access: int = 0) -> None:
        """Drop one reference of each block. Blocks without further references and without a hash are free at
        once.
        """
        references = self._references
        state = self._state
        names = self.names.of
        times = self._last_access
        lowest = self._lowest_free
        freed = 0
        tenants = self._tenants
        sealed = self.sealed
        gone: Counter[str] = Counter()
        try:
            for block in blocks:
                if references[block] == 1 and block not in names:
                    references[block] = 0
                    state[block] = FREE
                    times[block] = 0
                    freed += 1
                    if block < lowest:
                        lowest = block
                    if tenants:
                        gone[self.owners.pop(block, "")] += 1
                    if sealed is not None:
                        sealed.free(block)
                else:
                    self.drop(block, last_access)
        finally:
            self._held -= freed
            self._lowest_free = min(lowest, self._lowest_free)
            if tenants:
                for tenant, count in gone.items():
                    tenants.change(tenant, -count, -count)

    def references(self, block: int) -> int:
        """How many tables name `block`."""
        return self._references[block]

    def states(self) -> bytes:
        """A byte for each block: FREE, HELD or CACHED."""
        return bytes(self._state)

    def _set_free(self, block: int) -> None:
        if self._tenants:
            self._tenants.change(self.owners.pop(block, ""), -1, -(self._state[block] == HELD))
        self._state[block] = FREE
        self._last_access[block] = 0
        self._lowest_free = min(self._lowest_free, block)
        if self.sealed is not None:
            self.sealed.free(block)

    def _evict(self, tenant: str) -> int:
        if not self.cached:
            raise OutOfBlocks(f"all {self.total} {self.unit} are held; 1 more is needed")
        loser = ""
        if self._tenants:
            shares = self.shares(tenant)
            loser = shares.loser()
            self.taken[loser] += loser != tenant and not shares.over(loser)
        inner = None if self.fills else self.names.inner(self._evictor.least(loser))
        if inner is not None and inner in self._evictor and self.owners.get(inner, "") == loser:
            block = inner  # a sequence may go on from the chain's end
            self._evictor.remove(block)
        else:
            block = self._evictor.evict(loser)
        self.note(block, "evicted")
        self._unname(block)
        self._set_free(block)
        self.counts["evictions"] += 1
        for log in self.names.logs:
            log.evicted.add(block)
        return block

    # ---- tenants

    def shares(self, tenant: str, hits: Iterable[int] = ()) -> Shares:
        """How the pool is divided while `tenant` needs blocks; `hits` are as good as held."""
        found = [self.owners.get(block, "") for block in hits if self._state[block] == CACHED]
        return Shares(self._tenants or self._count_tenants(), self.total, tenant, found)

    def _count_tenants(self) -> TenantBooks:
        """Count the blocks of all tenants anew."""
        cached = self._evictor.counts()
        books = self._tenants = TenantBooks(self.weights)
        for tenant, count in self._used().items():
            books.change(tenant, count, count - cached.get(tenant, 0))
        return books

    def _used(self) -> Counter[str]:
        """The blocks of each tenant, counted one by one."""
        return Counter(self.owners.get(block, "") for block, state in enumerate(self._state) if state != FREE)

    # ---- names

    def cache(
        self, block: int, digest: bytes, covered: int, tokens: tuple[int, ...] = (), parent_key: bytes = b""
    ) -> int | None:
        """Make a held block matchable under `digest`; the answer is the block that bears the name.

        That is another one if the same content is cached already: the caller may adopt it and drop its own
        (C17). It is None if `block` cannot bear the name, because it has another or because other content has
        taken it (C25).
        """
        if self._state[block] != HELD:
            raise ValueError(
                f"block {block} is not held and cannot be published; publish before the last reference goes"
            )
        name = BlockName(digest, covered, tokens, parent_key if tokens else b"")
        new = not self.fills and block not in self.names
        bearer = self.names.add(block, name)
        if new and bearer == block:
            self._weigh_behind(name)
        if self.sealed is not None and bearer == block:
            self.sealed.seal(block)
        return bearer

    def uncache(self, block: int) -> None:
        """Take the name of `block` away, if it has one: its content is about to change."""
        self._unname(block)
        if self.sealed is not None:
            self.sealed.lift(block)

    def discard(self, block: int) -> None:
        """Have no prompt find `block` again, whose content is wrong: it is free once no table names it."""
        if self._state[block] == CACHED:
            self._evictor.remove(block)
            self._unname(block)
            self._set_free(block)
        else:
            self.uncache(block)

    def _unname(self, block: int) -> None:
        """Take the name of `block` away, if it has one."""
        name = self.names.remove(block)
        if name and not self.fills:
            self._weigh_behind(name)

    def _weigh_behind(self, name: BlockName) -> None:
        """A block of this name came or went: the next longer ones save other numbers of tokens now."""
        for block in self.names.partial.next_longer(name.parent_key, name.tokens):
            if block in self._evictor:
                self._evictor.change(block, self.names.saves(block))

    def forget(self) -> None:
        """Drop every hash: cached blocks become free; held ones keep their content but match no prompt any
        more.

        Blocks that existing tables fill later depend on the dropped content, so they get no hash either.
        """
        for block in list(self._evictor):
            self._evictor.remove(block)
            self._set_free(block)
        self.names.clear()
        self.epoch += 1

    def recover(self) -> None:
        """Make the books agree with the tables again, after something broke into the middle of a change."""
        try:
            self.check()
            return
        except (AssertionError, LookupError):
            named = Counter(block for table in self._tables for block in table.blocks)
        self.forget()
        if self.sealed is not None:
            self.sealed.clear()
        self._references = [named[block] for block in range(self.total)]
        self._state = bytearray(HELD if count else FREE for count in self._references)
        self.owners = {
            block: table.tenant for table in self._tables for block in table.blocks if table.tenant
        }
        self._evictor = Evictor()
        self._held = len(named)
        self._tenants = None
        if self.owners:
            self._count_tenants()
        self._lowest_free = 0

    # ---- the audit

    def register(self, table: BlockHolder) -> None:
        """Register a table, so that `check` can recount its references."""
        self._tables.add(table)

    def check(self) -> None:
        """Recount everything from the tables; raise AssertionError on the first thing that does not add
        up.
        """
        named: Counter[int] = Counter()
        for table in self._tables:
            table.check()
            named.update(table.blocks)
        known = {*named, *self._evictor}  # most other blocks are free in all books
        for block, (count, state) in enumerate(zip(self._references, self._state, strict=True)):
            if count or state != FREE or block in known:
                self._check_block(block, count, state, named.get(block, 0))
        expect(self._held == self._state.count(HELD), f"held={self._held} is not the number of held blocks")
        expect(self.free == self._state.count(FREE), f"free={self.free} is not the number of free blocks")
        expect(
            self._state.count(FREE, self.top) == self.total - self.top,
            f"a block from {self.top} on is in use",
        )
        expect(self.free + self.held + self.cached == self.total, "free + held + cached is not total")
        first = self._state.find(FREE)
        expect(first < 0 or first >= self._lowest_free, f"block {first} is free below {self._lowest_free}")
        self.names.check()
        named_blocks = self.names.of
        cached = Counter(self.owners.get(block, "") for block in named_blocks if self._state[block] == CACHED)
        expect(self.cached_by_tenant == cached, "the evictor counts other blocks for tenants")
        expect(all(self._state[block] != FREE for block in self.owners), "a free block has a tenant")
        if self._tenants:
            self._check_shares(self._tenants)
        for block in named_blocks:
            expect(self._state[block] != FREE, f"block {block} is free and has a name")
        if self.sealed is not None:
            self.sealed.check(self._state, FREE)

    def _check_block(self, block: int, count: int, state: int, named: int) -> None:
        expect(count == named, f"block {block} has {count} references but {named} tables name it")
        expect((count > 0) == (state == HELD), f"block {block} has {count} references and state {state}")
        expect((state == CACHED) == (block in self._evictor), f"the evictor disagrees about block {block}")
        expect(state != CACHED or block in self.names, f"block {block} is cached without a name")

    def _check_shares(self, books: TenantBooks) -> None:
        """Check the counts kept where blocks change hands against all blocks."""
        used = self._used()
        cached = self.cached_by_tenant
        expect(books.used == used, "other blocks are counted for tenants")
        expect(books.held == used - Counter(cached), "other held blocks are counted for tenants")
        weights = {each: books.weight(each) for each in used}
        for tenant in used:
            shares = self.shares(tenant)
            reserved, loser = recount(self.total, used, cached, weights, tenant)
            expect(shares.reserved() == reserved, f"{reserved} blocks are reserved from {tenant!r}")
            expect(
                not cached or shares.loser() == loser, f"{loser!r} loses a block where {tenant!r} needs one"
            )


def expect(holds: bool, otherwise: str) -> None:
    """Raise AssertionError unless `holds`, under python -O too."""
    if not holds:
        raise AssertionError(otherwise)
