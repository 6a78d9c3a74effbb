"""Snapshots: recurrent states as they were behind an exact number of tokens, for others to begin with.

A state goes on with its sequence, and cannot be taken back. So a sequence leaves a snapshot where others are
likely to part from it: behind its prompt and its answer, every so many tokens of its prompt, and where it
parts itself from blocks that are cached, as the next one may do. Its chunks end there. The slot is shared
from the launch of that step on, so the next step writes in a copy; once the step is known to be computed, the
slot has a name and is evicted like any other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from ..blocks import BlockTable, commit, commit_tail, tail_name
from ..blocks.prefix_lookup import worth_a_state
from .limits import KVCacheGroup
from .plan import NOTHING, StepPlan
from .request import SequenceGroup, TokenSequence


class _Snapshot(NamedTuple):
    """The tables of a sequence of a group, as the step of a plan leaves them."""

    tables: Sequence[BlockTable]
    tokens: Sequence[int]
    group: SequenceGroup
    plan: StepPlan


class Snapshots:
    """The places at which groups leave snapshots, and those whose step is not known to be computed yet."""

    def __init__(self, kv_groups: Sequence[KVCacheGroup], every: int) -> None:
        """every: tokens of a prompt between two snapshots; 0 for no snapshots at all."""
        self.every = every
        self._numbers = [i for i, each in enumerate(kv_groups) if not each.kind.fills] if every else []
        self._worth = worth_a_state(every)
        self._taken: list[_Snapshot] = []
        self._launched = StepPlan(NOTHING)
        """The last plan of which a step was launched."""

    @property
    def on(self) -> bool:
        """True if groups leave any."""
        return bool(self._numbers)

    @property
    def idle(self) -> bool:
        """True if none waits for its step."""
        return not self._taken

    # ---- where

    def place(self, group: SequenceGroup) -> None:
        """Choose where a group that begins leaves snapshots. Its chunks end there."""
        group.stops = []
        if self._numbers:
            begun, end = group.leader.computed, group.common
            stops = {*range(begun - begun % self.every + self.every, end, self.every)}
            stops.update(place for place in (group.parts_at, end) if begun + self._worth <= place <= end)
            group.stops = sorted(stops)

    def part(self, group: SequenceGroup, tokens: int) -> None:
        """A group that runs leaves a snapshot behind so many tokens too, if it has not passed them."""
        if self._numbers and tokens < group.common:
            taken = group.leader.tables[self._numbers[0]].length
            behind = max([stop for stop in group.stops if stop <= tokens], default=0)
            if taken < tokens and behind + self._worth <= tokens:
                group.stops = sorted({*group.stops, tokens})

    # ---- what is left there

    def launched(self, plan: StepPlan, without: Collection[SequenceGroup] = ()) -> None:
        """The step of a plan is on its way, but for the rows of groups `without`."""
        self._launched = plan
        for sequence, start, count, _ in plan.batch.other_rows if self._numbers else ():
            group = sequence.group
            if start + count in group.stops and group not in without:
                self._take(sequence, [sequence.tables[i] for i in self._numbers])

    def _take(self, sequence: TokenSequence, tables: Sequence[BlockTable]) -> None:
        """Share some tables of a sequence as the last launched step leaves them, unless all are found there
        already.
        """
        key = sequence.group.request.key
        names = [(table.pool, tail_name(table, sequence.tokens, key)) for table in tables]
        if any(name is not None and pool.names.lookup(name) is None for pool, name in names):
            forks = [table.fork() for table in tables]
            self._taken.append(_Snapshot(forks, sequence.tokens, sequence.group, self._launched))

    def finish(self, sequence: TokenSequence, tables: Sequence[BlockTable]) -> bool:
        """A sequence with these tables ends: True if its states cover its last token too, since its step was
        launched before that was known to be the last. They get their names with that step.
        """
        if not self._numbers or sequence.computed < len(sequence.tokens):
            return False
        self._take(sequence, tables)
        return True

    def confirm(self, plan: StepPlan, without: Collection[SequenceGroup] = ()) -> None:
        """The step of a plan is computed, but for the rows of groups `without`: what it left has a name now.
        Steps are computed in the order of their launch.
        """
        if not self._taken:
            return
        taken, self._taken = self._taken, []
        for each in taken:
            if each.plan is not plan and each.plan is self._launched:
                self._taken.append(each)
                continue
            for table in each.tables:
                if each.plan is plan and each.group not in without:
                    commit(table, each.tokens, each.group.request.key, keep_tokens=True)
                    if table.pool.fills:  # else that was its only block
                        commit_tail(table, each.tokens, each.group.request.key)
                table.free()

    def drop(self) -> bool:
        """Give up snapshots that have no name yet, so that no sequence needs a copy for them: True if there
        were any.
        """
        taken, self._taken = self._taken, []
        for each in taken:
            for table in each.tables:
                table.free()
        return bool(taken)
