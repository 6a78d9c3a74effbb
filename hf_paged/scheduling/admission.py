"""Admission of a request: now, later, or never."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..blocks import Match
from ..blocks.pool import expect
from .limits import KVCacheGroup, Limits
from .request import Request, SequenceGroup, Status, TokenSequence

PATIENCE = 1000
"""For so many steps later groups with adapters pass a group whose adapter has no slot, and groups of other
tenants one that its own tenant's share holds back while that tenant runs nothing; then they wait for it.
"""


def has_room(
    total: int, available: int, need: int, *, hits: int = 0, cached_hits: int = 0, reserve: int = 0
) -> bool:
    """True if a pool has room for `need` blocks and `reserve` more (C8, C9). Hits make no need possible that
    exceeds the whole pool.

    hits: blocks of the need that are cached already. cached_hits: those of them without references, which
    count as available now and stop doing so once they are held.
    """
    return total - need >= reserve and available - cached_hits - (need - hits) >= reserve


def why_infeasible(request: Request, kv_groups: Sequence[KVCacheGroup], limits: Limits) -> str | None:
    """Why this request can never run to its end, with both numbers, or None if it can (C11)."""
    if request.width > limits.sequences:
        return (
            f"{request.width} sequences are asked for and at most {limits.sequences} run at once; "
            "lower num_beams or num_return_sequences, or raise max_batch_sequences"
        )
    room = limits.tokens - limits.sequences + 1  # others take one token each
    if request.whole and len(request.prompt) > room:
        return (
            f"the prompt has {len(request.prompt)} tokens, its adapter needs all of them in one forward, and "
            f"{room} have room there; raise max_batch_tokens or lower max_batch_sequences"
        )
    for kv_group in kv_groups:
        need = kv_group.need(
            request.width, len(request.prompt), request.most_tokens, limits.tokens, request.source
        )
        most = kv_group.pool.total - limits.reserve(kv_group)
        if need > most and not kv_group.kind.grows:
            return (
                f"cross attention to {request.source} tokens needs {need} {kv_group.pool.unit} and {most} "
                "can be had; give a shorter input or fewer pictures, or raise num_blocks"
            )
        if need > most and not kv_group.kind.fills:
            return (
                f"{request.width} sequence(s) need {need} slots for recurrent states and {most} can be had; "
                "lower num_beams or num_return_sequences, or raise state_slots"
            )
        if need > most:
            return (
                f"{request.width} sequence(s) of up to {request.most_tokens} tokens (prompt "
                f"{len(request.prompt)}) need {need} {kv_group.pool.unit} and {most} can be had; lower "
                "max_new_tokens or raise num_blocks"
            )
    return None


def headroom(
    group: SequenceGroup, need: int, running: Sequence[SequenceGroup], kv_group: int, chunk: int
) -> int:
    """The blocks that a repeatedly preempted group must leave available when it returns with `need` blocks.

    For every running sequence, and its own, twice as many with each preemption, up to all that they can come
    to need. Then no older sequence can preempt it again for long, so the number of its preemptions is
    bounded.
    """
    each = 1 << (group.setbacks - 1)
    # Alone it finds all of the pool, and must never wait for more.
    own = min(
        each * len(group.sequences),
        max(0, min(group.most(kv_group, chunk), group.kv_groups[kv_group].pool.total) - need),
    )
    return own + sum(
        min(each * len(other.sequences), max(0, other.most(kv_group, chunk) - other.held(kv_group)))
        for other in running
    )


class Candidate(NamedTuple):
    """A group that waits for admission.

    blocks: for every pool the cached full blocks of its prefix. needs: for every pool the blocks that all its
    tokens need.

    sources: for every pool a block of which it copies a part, if there is one. cached: the tokens that it
    need not compute. takes: whether cached blocks within the shares of other tenants are there for it (C43).
    found: for every pool the cached beginning itself.
    """

    group: SequenceGroup
    blocks: Sequence[list[int]]
    needs: Sequence[int]
    sources: Sequence[int | None] = ()
    cached: int = 0
    takes: bool = False
    found: Sequence[Match] = ()


class SchedulerState(NamedTuple):
    """The scheduler's state at an admission: the number of the step, the tokens left in it, the running
    groups, and how many sequences these are.
    """

    step: int
    room: int
    running: Sequence[SequenceGroup]
    taken: int


class Watermark:
    """Admits a group if its tokens so far fit and the watermark stays free for answers to grow into (C8, C9).

    The scheduler reports admissions and departures; other policies extend this one.
    """

    def __init__(self, kv_groups: Sequence[KVCacheGroup], limits: Limits) -> None:
        self.kv_groups = tuple(kv_groups)
        self.limits = limits
        self._behind: dict[SequenceGroup, None] = {}
        """Running groups with more than one token left to compute: few, so that a decision does not visit
        every group.
        """

    def fits(self, candidate: Candidate, state: SchedulerState) -> bool:
        """True if every pool has room for all tokens of the group, beside what the running groups have still
        to compute.
        """
        self._behind = {other: None for other in self._behind if not other.decoding}
        return all(self._fits_pool(i, candidate, state) for i in range(len(self.kv_groups)))

    def fits_but_for_shares(self, candidate: Candidate, state: SchedulerState) -> bool:
        """True if only the shares of other tenants are in a group's way, and others may pass it."""
        if not self.fits(candidate._replace(takes=True), state):
            return False
        group = candidate.group
        group.passed_over += all(other.request.tenant != group.request.tenant for other in state.running)
        return not state.running or group.passed_over <= PATIENCE

    def _fits_pool(self, i: int, candidate: Candidate, state: SchedulerState) -> bool:
        kv_group = self.kv_groups[i]
        pool = kv_group.pool
        chunk = self.limits.tokens
        group = candidate.group
        need = candidate.needs[i]
        read = self._read(i, candidate)
        available = pool.available
        if pool.owners and not candidate.takes:
            available -= pool.shares(group.request.tenant, read).reserved()
        outstanding = sum(max(0, other.need(i, chunk) - other.held(i)) for other in self._behind)
        reserve = self.limits.reserve(kv_group)
        if group.status is Status.PREEMPTED:
            # No watermark; but it must not take the next block of a running sequence, or it would be the next
            # to be preempted (C9). Some kinds' tables take none.
            reserve = state.taken if kv_group.kind.adds else 0
            if group.setbacks >= 2:
                reserve = headroom(group, need, state.running, i, chunk)
        return has_room(
            pool.total,
            available - outstanding,
            need,
            hits=min(len(candidate.blocks[i]), need),
            cached_hits=sum(1 for block in read if not pool.references(block)),
            reserve=reserve,
        )

    def exceeds(self, candidate: Candidate) -> bool:
        """True if the group would bring its tenant above its share of a pool (C43)."""
        tenant = candidate.group.request.tenant
        pools = zip(self.kv_groups, candidate.needs, candidate.blocks, strict=True)
        return any(each.pool.shares(tenant).over(tenant, need - len(hits)) for each, need, hits in pools)

    @staticmethod
    def _read(i: int, candidate: Candidate) -> list[int]:
        """The blocks of a pool that the group is going to hold or to copy from."""
        source = candidate.sources[i] if candidate.sources else None
        return candidate.blocks[i] if source is None else [*candidate.blocks[i], source]

    def enter(self, candidate: Candidate, state: SchedulerState) -> None:
        """The group was let in, and is about to take the blocks that were found."""
        self._behind[candidate.group] = None

    def fall_behind(self, group: SequenceGroup) -> None:
        """A running group has more than one token left to compute."""
        self._behind[group] = None

    def leave(self, group: SequenceGroup) -> None:
        """The group holds nothing any more: it has ended or was preempted, or it never ran."""
        self._behind.pop(group, None)

    def finish(self, sequence: TokenSequence) -> None:
        """The sequence, one of its group's, has its last token."""

    def clear(self) -> None:
        """All blocks were given back."""
        self._behind.clear()

    def check(self, state: SchedulerState) -> None:
        """Raise AssertionError on the first thing that does not add up."""
        for group in state.running:
            expect(
                group.decoding or group.complete or group in self._behind,
                f"{group!r} is behind and admission does not know",
            )
        expect(self._behind.keys() <= set(state.running), "admission counts a group that does not run")
