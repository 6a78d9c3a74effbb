"""The prefixes that groups share: what a group finds in the cache of others, and what it leaves there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice, takewhile

from ..blocks import (
    BlockTable,
    Match,
    PrefixLookup,
    PromptScores,
    adopt,
    commit,
    commit_tail,
    leading,
    reach_in_all,
)
from ..blocks.prefix_lookup import WORTH_A_COPY
from .limits import KVCacheGroup, finest
from .plan_builder import PlanBuilder
from .request import SequenceGroup, Status, TokenSequence
from .snapshots import Snapshots

MOST_NAMES = 2**16
"""Names of begun prompts that are kept where no blocks are."""


class SharedPrefixes:
    """The beginnings of groups that are cached, and the blocks that running groups are about to cache."""

    def __init__(
        self, kv_groups: tuple[KVCacheGroup, ...], enabled: bool, verify: bool, state_every: int
    ) -> None:
        """enabled: whether groups share any. verify: compare the tokens of hits. state_every: tokens of a
        prompt between snapshots of its states.
        """
        self.kv_groups = kv_groups
        self.enabled = enabled
        self.verify = verify
        self.growing = tuple(kv_group for kv_group in kv_groups if kv_group.kind.grows)
        """Those whose tables hold a sequence's own tokens; what it attends to across is made anew."""
        self.finest = finest(kv_groups)
        """The number of the group with the smallest blocks."""
        self.snapshots = Snapshots(self.growing, state_every if enabled else 0)
        self.scores = PromptScores(kv_groups[self.finest].pool)
        """The numbers known about the tokens of cached blocks."""
        self._largest = max(each.pool.block_size for each in self.growing)
        """Tokens up to a multiple of it are full blocks in every pool."""
        # Where a block is never full, one token less may not be found.
        self._worth = WORTH_A_COPY if all(each.kind.fills for each in kv_groups) else 1
        self._coming: Counter[bytes] = Counter()
        """Digests of the blocks that running groups are about to compute: twins wait for them instead of
        computing them too.
        """
        self._computing: dict[SequenceGroup, None] = {}
        """Those groups."""
        self._begun: dict[bytes, None] = {}
        """Names of prompts that groups have begun, the latest last, where no blocks keep them."""

    def shares(self, group: SequenceGroup) -> bool:
        """True if a group takes prefixes of others, and leaves its own."""
        return self.enabled and group.request.shares

    # ---- what a group finds

    def find(self, group: SequenceGroup, whole: bool = False) -> list[Match] | None:
        """The cached beginning of a group in every pool, to the token or in whole blocks; None if a twin is
        computing the next block right now.
        """
        if not self.shares(group):
            return [Match([], []) for _ in self.kv_groups]
        prompt = group.prompt
        names = group.names()
        lookups = [
            PrefixLookup(kv_group.pool, prompt, kv_group.kind, self.verify, self._worth)
            for kv_group in self.growing
        ]
        most = group.common - 1
        ahead = 0
        if group.request.scored:
            # What a token is scored with comes of the token before it, which must be computed.
            ahead = 1
            known = self.scores.known(prompt.digests, group.request.scored)
            most = max(0, min(most, known * prompt.size - ahead))
        reached = reach_in_all(lookups, most)
        filling = [each for each in lookups if each.pool.fills] if self.snapshots.on else []
        if filling:
            group.parts_at = reach_in_all(filling, most)
        elif self.snapshots.on:
            group.parts_at = prompt.size * sum(1 for _ in takewhile(self._begun.__contains__, names))
        while whole and reached % self._largest:
            reached = reach_in_all(lookups, reached - reached % self._largest)
        full = (reached + ahead) // prompt.size
        if full < len(names) and self._coming[names[full]]:
            for twin in self._computing if self.snapshots.on else ():
                self.snapshots.part(twin, leading(twin.names(), names) * prompt.size)
            return None
        cross = [Match([], [])] * (len(self.kv_groups) - len(self.growing))
        return [lookup.take(reached) for lookup in lookups] + cross

    def begin(self, builder: PlanBuilder, group: SequenceGroup, found: Sequence[Match]) -> tuple[int, int]:
        """Let a group begin with what was found: its hits and misses in the smallest blocks."""
        leader = group.leader
        for i, (table, each) in enumerate(zip(leader.tables, found, strict=True)):
            adopt(table, each)
            builder.detach(i, table)
        leader.computed = leader.tables[0].length
        if self.shares(group):
            self.snapshots.place(group)
        if group.status is Status.WAITING:
            group.cached_tokens = leader.computed
        counted = 0, 0
        for i, kv_group in enumerate(self.growing if self.shares(group) else ()):
            hits = len(found[i].digests) + (found[i].partial is not None)
            misses = max(0, (group.common - 1) // kv_group.pool.block_size - hits)
            kv_group.pool.counts.update(hits=hits, misses=misses)
            if i == self.finest:
                counted = hits, misses
        return counted

    # ---- what it leaves

    def expect(self, group: SequenceGroup) -> None:
        """A group begins to compute the rest of what its sequences have in common."""
        if self.shares(group) and group.leader.computed < group.common:
            names = group.names()
            table = group.leader.tables[self.finest]
            known = len(table.digests) if table.pool.fills else group.leader.computed // group.prompt.size
            group.in_flight = names[known:]
            self._coming.update(group.in_flight)
            self._computing[group] = None
            if self.snapshots.on and not table.pool.fills:
                self._note(names)

    def _note(self, names: Sequence[bytes]) -> None:
        """A prompt with these names has begun."""
        for name in names:
            self._begun.pop(name, None)
            self._begun[name] = None
        for name in list(islice(self._begun, max(0, len(self._begun) - MOST_NAMES))):
            del self._begun[name]

    def forget(self, group: SequenceGroup) -> None:
        """The group has computed it, or will not do so: no other waits for it any more."""
        for name in group.in_flight:
            self._coming[name] -= 1
            if not self._coming[name]:
                del self._coming[name]
        group.in_flight = []
        self._computing.pop(group, None)

    def clear(self) -> None:
        """No group runs any more."""
        self._coming.clear()
        self._computing.clear()
        self.snapshots.drop()

    def name(self, sequence: TokenSequence, end: int) -> int | None:
        """The blocks of the first `end` tokens of a sequence are computed, and others may find them: the
        number of the first block that is another one now, if any is.
        """
        deduped = end
        request = sequence.group.request
        for table in self._named_tables(sequence):
            if not table.pool.fills:
                continue  # by snapshots
            named = len(table.digests) * table.pool.block_size
            if commit(table, sequence.tokens, request.key, keep_tokens=True, until=end):
                deduped = min(deduped, named)
            if named < request.given:
                given = min(len(table.digests), request.given // table.pool.block_size)
                table.pool.names.lasting.update(table.blocks[: max(0, given - table.released)])
        for kv_group, table in zip(self.kv_groups, sequence.tables, strict=True):
            table.seal(end if kv_group.kind.grows else table.length)
        return deduped // self._largest if deduped < end else None

    def name_tail(self, sequence: TokenSequence) -> None:
        """Let others find the last, partly filled block of a sequence that ends, and its states (C17). Its
        last token was never computed, or is on its way.
        """
        tokens, tables = sequence.tokens, self._named_tables(sequence)
        if tables and self.snapshots.finish(sequence, tables):
            return
        for table in tables:
            commit_tail(table, tokens, sequence.group.request.key, until=len(tokens) - 1)

    def _named_tables(self, sequence: TokenSequence) -> tuple[BlockTable, ...]:
        """The tables whose blocks others may find by the sequence's tokens."""
        return sequence.tables[: len(self.growing)] if self.shares(sequence.group) else ()

    # ---- the audit

    @property
    def idle(self) -> bool:
        """True if no group waits for another's blocks."""
        return not self._coming and self.snapshots.idle
