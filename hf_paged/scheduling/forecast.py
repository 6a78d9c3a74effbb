"""Admission by what the running groups will hold at their peak, not by what they hold now (C40)."""

from __future__ import annotations

import heapq
import math
from bisect import bisect, bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, takewhile
from typing import NamedTuple

from ..blocks.pool import expect
from .admission import Candidate, SchedulerState, Watermark
from .history import AnswerLengths
from .limits import KVCacheGroup, Limits
from .request import SequenceGroup, Status, TokenSequence

FAR = 1 << 60
"""The end of groups whose prompt takes several steps: it is unknown."""
LAG = 1
"""A group that ends is freed this many steps later when the host runs ahead."""
SHORTEST_REVIEW = 16
"""The fewest tokens between two estimates of one group; later a quarter of its answer so far."""
MARGIN = 0.5
"""Estimates are wrong by about their own size, and errors add up as squares: this share of their sum stays
free.
"""
GOLDEN = 0.6180339887498949


class Segment(NamedTuple):
    """The slots of a pool that a group holds at a step, `start + slope * step`, through step `end`."""

    end: int
    slope: int
    start: int


def peak(parts: Iterable[Segment]) -> int:
    """The most slots that are ever held. The parts come in order of their ends, the last to end first.

    Every part grows, so the maximum is reached at a step where some part ends, and the parts that end no
    sooner are all there.
    """
    most = slots = slope = 0
    for part in parts:
        slots += part.start
        slope += part.slope
        most = max(most, slots + slope * part.end)
    return most


@dataclass(slots=True, eq=False)
class _Entry:
    """The expected use of every pool by a group that runs, or would like to. Replaced as a whole whenever
    that changes.

    settled: it takes a token in every step by now. review: the step at which it is estimated anew. spread:
    the square of what is only estimated. shared: blocks that are counted for several groups, and not in its
    parts.
    """

    group: SequenceGroup
    settled: bool
    review: int
    spread: int
    parts: list[Segment]
    shared: list[list[int]]
    key: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.key = (-self.parts[0].end, self.group.request.number)


class FuturePeak(Watermark):
    """Admits a group if the future peak of all running groups, with the newcomer, fits every pool.

    The expected length of an answer comes from the answers that have ended, given what the group has
    generated already. Each group is assigned another quantile, spread evenly over the groups, so that many
    groups together are as long as the answers were; a margin for errors stays free. Without a history each
    answer is taken to reach its limit, there is no margin, and no group is ever preempted. An empty engine
    admits the first group, whatever is estimated.

    Slots are counted, not blocks: a sequence of L tokens holds less than L + block_size of them, and half a
    block more on average, which is what an estimate adds. Full blocks of a prefix that several groups share
    are counted once, for as long as one of them runs. With a sliding window a sequence is taken to hold its
    maximum at once. So is a group whose prompt takes several steps, and without an end, because the step at
    which it begins to grow is unknown.

    An event (a group is admitted, leaves, or is estimated anew) costs O(log n) and the move of n pointers;
    the decision on the first of the queue costs n additions. A group that decodes as expected costs nothing,
    because its part is a line.
    """

    def __init__(
        self, kv_groups: Sequence[KVCacheGroup], limits: Limits, history: AnswerLengths | None = None
    ) -> None:
        super().__init__(kv_groups, limits)
        self.history = AnswerLengths() if history is None else history
        self.clear()

    def clear(self) -> None:
        super().clear()
        self._entries: dict[SequenceGroup, _Entry] = {}
        self._order: list[_Entry] = []
        """The same by their ends, the last first."""
        self._spread = 0
        self._reviews: list[tuple[int, int, _Entry]] = []
        self._serial = count()
        self._changed: dict[SequenceGroup, None] = {}
        """Groups that do not decode yet, or have lost a sequence."""
        self._shared: list[Counter[int]] = [Counter() for _ in self.kv_groups]
        """Blocks that are counted once for several groups, and for how many."""

    # ---- the decision

    def fits(self, candidate: Candidate, state: SchedulerState) -> bool:
        """True if there is room now, and will be."""
        if not super().fits(candidate, state):
            return False
        if not state.running:
            return True
        self._catch_up(state.step)
        entry = self._newcomer(candidate, state)
        for i, kv_group in enumerate(self.kv_groups):
            reserve = 0 if candidate.group.status is Status.PREEMPTED else self.limits.reserve(kv_group)
            margin = 0 if not kv_group.kind.linear else MARGIN * math.sqrt(self._spread + entry.spread)
            if self._peak(i, entry) + margin > (kv_group.pool.total - reserve) * kv_group.pool.block_size:
                return False
        return True

    def _peak(self, i: int, newcomer: _Entry) -> int:
        """The future peak of a pool, in slots, with the newcomer; what it shares with others is theirs no
        more.
        """
        size = self.kv_groups[i].pool.block_size
        shared = self._shared[i]
        blocks = newcomer.shared[i]
        given = {entry: len(taken) * size for entry, taken in self._owners(i, blocks)}
        place = bisect(self._order, newcomer.key, key=lambda entry: entry.key)
        entries = chain(self._order[:place], (newcomer,), self._order[place:])
        parts: Iterable[Segment] = (entry.parts[i] for entry in entries)
        if given:
            parts = (
                entry.parts[i]._replace(start=entry.parts[i].start - given.get(entry, 0)) for entry in entries
            )
        return peak(parts) + size * (len(shared) + sum(1 for block in blocks if block not in shared))

    def _owners(self, i: int, blocks: list[int]) -> Iterator[tuple[_Entry, list[int]]]:
        """The shared prefix blocks that each group counts as its own, the newcomer's first.

        Blocks shared by all of them come first. A block that is not found here is counted twice, and never
        too little.
        """
        shared = self._shared[i]
        size = self.kv_groups[i].pool.block_size
        first = next((place for place, block in enumerate(blocks) if block not in shared), len(blocks))
        new = list(takewhile(lambda block: block not in shared, blocks[first:]))
        if not new:
            return
        for entry in self._order:
            own = entry.group.leader.tables[i].blocks[first : entry.group.common // size]
            taken = [
                block for block, _ in takewhile(lambda pair: pair[0] == pair[1], zip(new, own, strict=False))
            ]
            if taken:
                yield entry, taken

    def share(self, groups: Iterable[SequenceGroup], step: int) -> float:
        """The share of the fullest pool that groups hold at their future peak if all of them run from `step`
        on; more than 1 if they do not fit. Blocks that several have in common are counted for each.
        """
        unshared: list[list[int]] = [[] for _ in self.kv_groups]
        entries = [self._entry(group, step, True, unshared) for group in groups]
        entries.sort(key=lambda entry: entry.key)
        return max(
            peak(entry.parts[i] for entry in entries) / (kv_group.pool.total * kv_group.pool.block_size)
            for i, kv_group in enumerate(self.kv_groups)
        )

    # ---- entries

    def _newcomer(self, candidate: Candidate, state: SchedulerState) -> _Entry:
        group = candidate.group
        shared = [
            [block for block in blocks if kv_group.pool.references(block)] if kv_group.kind.linear else []
            for kv_group, blocks in zip(self.kv_groups, candidate.blocks, strict=True)
        ]
        behind = group.leader.behind if group.swapped else group.common - candidate.cached
        settled = group.decoding or (group.common == group.length and behind <= state.room)
        return self._entry(group, state.step, settled, shared)

    def _entry(self, group: SequenceGroup, step: int, settled: bool, shared: list[list[int]]) -> _Entry:
        """The entry of a group from `step` on; settled: from then on it grows in every step."""
        width = len(group.sequences)
        prompt = len(group.request.prompt)
        generated = group.length - prompt
        most = group.request.most_tokens - prompt
        # Of n answers the longest counts, which stays within a length as often as one does, to the power of
        # n.
        share = (group.request.number * GOLDEN % 1.0) ** (1 / width)
        length = max(generated, self.history.expected(generated, most, share))
        end = step + length - generated - 1 + LAG if settled else FAR
        parts = []
        for i in range(len(self.kv_groups)):
            slots = (
                self._slots(i, group, prompt + length + LAG, length < most)
                - len(shared[i]) * self.kv_groups[i].pool.block_size
            )
            slope = width if settled and self.kv_groups[i].kind.linear else 0
            parts.append(Segment(end, slope, slots - slope * end))
        review = step + min(max(1, length - generated), max(SHORTEST_REVIEW, generated // 4))
        spread = (width * (length - generated)) ** 2 if length < most else 0
        return _Entry(group, settled, review, spread, parts, shared)

    def _slots(self, i: int, group: SequenceGroup, length: int, estimated: bool) -> int:
        """The most slots of a pool that a group holds whose sequences are to have `length` tokens, the last
        of which is not stored.

        Where that is an estimate, the slots that a last block leaves unused are, too: half of it, as for
        lengths at random.
        """
        kv_group = self.kv_groups[i]
        width = len(group.sequences)
        size = kv_group.pool.block_size
        if not kv_group.kind.linear:
            chunk, source = self.limits.tokens, group.request.source
            return size * kv_group.need(width, group.common, length, chunk, source)
        common = group.common // size * size
        unused = size // 2 if estimated else size - 1
        return common + width * (length - 1 - common + unused)

    def _put(self, entry: _Entry) -> None:
        self._entries[entry.group] = entry
        self._spread += entry.spread
        self._order.insert(bisect_left(self._order, entry.key, key=lambda each: each.key), entry)
        if entry.settled:
            heapq.heappush(self._reviews, (entry.review, next(self._serial), entry))
        else:
            self._changed[entry.group] = None

    def _remove(self, group: SequenceGroup) -> _Entry:
        entry = self._entries.pop(group)
        self._spread -= entry.spread
        del self._order[bisect_left(self._order, entry.key, key=lambda each: each.key)]
        return entry

    def _renew(self, group: SequenceGroup, step: int) -> None:
        entry = self._remove(group)
        self._put(self._entry(group, step, entry.settled or group.decoding, entry.shared))

    def _catch_up(self, step: int) -> None:
        """Estimate anew the groups whose review is due."""
        changed = self._changed
        self._changed = {}
        for group in changed:
            self._renew(group, step)
        while self._reviews and self._reviews[0][0] <= step:
            entry = heapq.heappop(self._reviews)[-1]
            if self._entries.get(entry.group) is entry:
                self._renew(entry.group, step)

    # ---- groups that are admitted and leave

    def enter(self, candidate: Candidate, state: SchedulerState) -> None:
        super().enter(candidate, state)
        self._catch_up(state.step)
        newcomer = self._newcomer(candidate, state)
        for i, blocks in enumerate(newcomer.shared):
            owners = list(self._owners(i, blocks))
            self._shared[i].update(blocks)
            for entry, taken in owners:
                self._shared[i].update(taken)
                entry.shared[i].extend(taken)
                self._renew(entry.group, state.step)
        self._put(newcomer)

    def fall_behind(self, group: SequenceGroup) -> None:
        super().fall_behind(group)
        entry = self._remove(group)
        self._put(self._entry(group, entry.review, False, entry.shared))  # it does not grow by one a step

    def leave(self, group: SequenceGroup) -> None:
        super().leave(group)
        if group not in self._entries:
            return
        self._changed.pop(group, None)
        for shared, blocks in zip(self._shared, self._remove(group).shared, strict=True):
            for block in blocks:
                shared[block] -= 1
                if not shared[block]:
                    del shared[block]

    def finish(self, sequence: TokenSequence) -> None:
        group = sequence.group
        length = len(sequence.tokens)
        self.history.add(length - len(group.request.prompt), limited=length >= group.request.most_tokens)
        if len(group.sequences) > 1 and group in self._entries:
            self._changed[group] = None

    # ---- the audit

    def check(self, state: SchedulerState) -> None:
        super().check(state)
        expect(
            set(self._entries) == set(state.running), "the forecast holds other groups than those that run"
        )
        expect(
            self._order == sorted(self._entries.values(), key=lambda entry: entry.key),
            "the future is out of order",
        )
        for i, kv_group in enumerate(self.kv_groups):
            expect(
                self._shared[i] == Counter(b for entry in self._order for b in entry.shared[i]),
                "shared blocks do not add up",
            )
            if not kv_group.kind.linear:
                continue
            tables = [sequence.tables[i] for group in state.running for sequence in group.sequences]
            held = {block for table in tables for block in table.blocks}
            slots = kv_group.pool.block_size * len(self._shared[i])
            for entry in self._order:
                if not entry.settled:  # it may decode by now, and longer than was estimated
                    entry = self._entry(entry.group, state.step, entry.group.decoding, entry.shared)
                slots += entry.parts[i].start + entry.parts[i].slope * (state.step - 1)
                slots += len(entry.group.sequences) * kv_group.pool.block_size if entry.spread else 0
            expect(
                len(held) * kv_group.pool.block_size <= slots,
                f"{len(held)} blocks are held, the future has {slots} slots for them",
            )


ADMISSIONS: dict[str, type[Watermark]] = {"watermark": Watermark, "future": FuturePeak}
"""The policies of admission by name."""
