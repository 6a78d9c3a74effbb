"""Every step anew: which groups run, on how many tokens, and which are preempted."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from heapq import heappop, heappush
from typing import Literal

from ..blocks import (
    Match,
    append,
    reorder,
)
from ..blocks.pool import expect
from .adapter_slots import AdapterNames, AdapterSlots
from .admission import PATIENCE, Candidate, SchedulerState, why_infeasible
from .audit import check_groups, check_kv_groups
from .forecast import ADMISSIONS, FuturePeak
from .limits import KVCacheGroup, Limits
from .plan import ScheduledRow, StepPlan, Swaps
from .plan_builder import PlanBuilder, Steps, fit, share, to_sample
from .policy import POLICIES
from .prefixes import SharedPrefixes
from .request import NO_ROW, Request, SequenceGroup, Status, TokenSequence
from .rows import RowTable
from .swap import Decide, Swapping, never

Count = Literal[
    "steps", "tokens", "preemptions", "admissions", "finished", "hits", "misses",
    "swapped_out", "swapped_in", "recomputed", "blocks_out", "blocks_in", "held_back",
]  # fmt: skip
"""The counters. Groups: those that went to the host, came back from it, had to begin again. Blocks: those
that travelled. held_back: how often a step left a group waiting for its tenant's share.
"""


Verdict = Literal["stop", "pass", "pass, impatient", "pass, behind a twin"]
"""How a group is not admitted in a step. stop: no group behind it is, either. pass: it keeps its place, and
groups behind it may pass it; impatient, only those without adapters; behind a twin, which computes its prefix
now, only those of its queue.
"""


class Infeasible(ValueError):
    """A request that could never run to its end, however long it waited."""


class Scheduler:
    """Requests in order, and the books of their blocks.

    There is one idea: every sequence has `computed` catching up with its tokens. A prompt, a chunk of it,
    what a prefix hit left over, a decoding step and a recomputation are one case. Running groups come first,
    in the order of the policy. For lack of blocks the last one is preempted, to the host if `swap` says so
    and there is room, else to be recomputed later. No new group is admitted while a preempted one waits (C26
    to C31).
    """

    def __init__(
        self,
        kv_groups: Iterable[KVCacheGroup],
        limits: Limits,
        policy: str = "fcfs",
        *,
        admission: str = "watermark",
        prefix_caching: bool = True,
        verify: bool = False,
        state_every: int = 0,
        swap: Decide = never,
        adapters: AdapterSlots | None = None,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy={policy!r} is not one of {sorted(POLICIES)}")
        if admission not in ADMISSIONS:
            raise ValueError(f"admission={admission!r} is not one of {sorted(ADMISSIONS)}")
        self.kv_groups = tuple(kv_groups)
        self.limits = limits
        self.prefixes = SharedPrefixes(self.kv_groups, prefix_caching, verify, state_every)
        """The beginnings of groups that are cached."""
        self._growing = self.prefixes.growing
        self._never_full = tuple(i for i, each in enumerate(self.kv_groups) if not each.kind.fills)
        if self._growing != self.kv_groups[: len(self._growing)]:
            raise ValueError("the pool of cross-attention layers must be the last one")
        self._no_copies = ((),) * len(self.kv_groups)
        self._key = POLICIES[policy]
        self.admission = ADMISSIONS[admission](self.kv_groups, limits)
        """Decides which groups are admitted."""
        self.waiting: list[SequenceGroup] = []
        self.preempted: list[SequenceGroup] = []
        self.running: list[SequenceGroup] = []
        """These three are in the order of the policy."""
        self.rows = RowTable(self.kv_groups)
        self._others: list[SequenceGroup] = []
        """The running groups outside the table of rows, in the same order."""
        self._free_rows = list(range(limits.sequences))
        """Rows that no sequence owns, a heap: the lowest is given first."""
        self.adapters = adapters
        """Where the adapters of requests are."""
        self.swapping = Swapping(self.kv_groups, swap, verify)
        self.divided = False
        """True if tenants divide the pools: from the first request of one on."""
        self.counts: Counter[Count] = Counter()

    # ---- requests come and go

    def submit(self, request: Request) -> SequenceGroup:
        """Queue a request, or raise Infeasible at once (C11)."""
        reason = why_infeasible(request, self.kv_groups, self.limits)
        if reason is not None:
            raise Infeasible(reason)
        group = SequenceGroup(request, self.kv_groups)
        insort(self.waiting, group, key=self._key)
        self.divided |= bool(request.tenant)
        return group

    def abort(self, group: SequenceGroup) -> None:
        """Give back everything of a group, in whatever state it is (C34)."""
        if group.status is Status.FINISHED:
            return
        self._leave_table(group)
        for sequence in group.sequences:
            sequence.free()
        self._leave(group)

    def finish(self, sequence: TokenSequence) -> None:
        """A sequence has its last token: its blocks go back, and its group ends with its last sequence."""
        group = sequence.group
        self._leave_table(group)
        self.admission.finish(sequence)
        self.prefixes.name_tail(sequence)
        sequence.free()
        self._release_row(sequence)
        if len(group.sequences) == 1:
            self._leave(group)
        else:
            group.sequences.remove(sequence)

    def _leave(self, group: SequenceGroup) -> None:
        self.prefixes.forget(group)
        self.admission.leave(group)
        {Status.WAITING: self.waiting, Status.PREEMPTED: self.preempted, Status.RUNNING: self.running}[
            group.status
        ].remove(group)
        if group.status is Status.RUNNING:
            self._others.remove(group)
        for sequence in group.sequences:
            self._release_row(sequence)
        group.status = Status.FINISHED
        self.counts["finished"] += 1

    def preempt(self, group: SequenceGroup, swap: bool = True) -> None:
        """Take all blocks of a running group. They wait on the host, or are recomputed, from the prefix cache
        where possible (C29 to C31); `swap` False means recomputed.
        """
        self._leave_table(group)
        self.prefixes.forget(group)
        self.admission.leave(group)
        for sequence in group.sequences:
            sequence.waits = False
        group.awaits_tokens = any(sequence.computed >= len(sequence.tokens) for sequence in group.sequences)
        blocks = self.swapping.park(group) if swap else None
        if blocks is None:
            self.begin_again(group)
        else:
            self.counts["swapped_out"] += 1
            self.counts["blocks_out"] += blocks
        for sequence in group.sequences:
            self._release_row(sequence)
        group.preemptions += 1
        group.status = Status.PREEMPTED
        self.running.remove(group)
        self._others.remove(group)
        insort(self.preempted, group, key=self._key)
        self.counts["preemptions"] += 1

    def begin_again(self, group: SequenceGroup) -> None:
        """Give back what a group has computed, on the host too: it will be computed again."""
        for sequence in group.sequences:
            sequence.free()
        group.reset_to_common()
        self.counts["recomputed"] += 1

    def rekey(self, group: SequenceGroup, adapter_key: bytes) -> None:
        """The adapter of a waiting group has other content: the blocks on the host belong to the old one."""
        if group.swapped:
            self.begin_again(group)
        group.rekey(adapter_key)

    def start_over(self, groups: Iterable[SequenceGroup]) -> None:
        """A step broke off in the middle: no group keeps anything, and all that are not finished are computed
        again.
        """
        self.waiting = []
        self.preempted = []
        self.running = []
        self._others = []
        self.rows.clear()
        self._free_rows = list(range(self.limits.sequences))
        self.prefixes.clear()
        self.admission.clear()
        self.swapping.clear()
        for group in groups:
            group.in_flight = []
            group.awaits_tokens = False
            for sequence in group.sequences:
                sequence.row = NO_ROW
                sequence.free()
            if group.status is Status.FINISHED:
                continue
            group.reset_to_common()
            if group.status is Status.RUNNING:
                group.status = Status.PREEMPTED
                group.preemptions += 1
            insort(self.waiting if group.status is Status.WAITING else self.preempted, group, key=self._key)

    @property
    def begun(self) -> list[SequenceGroup]:
        """The groups that have computed something: those that run and those that were preempted."""
        return [*self.running, *self.preempted]

    @property
    def unfinished(self) -> int:
        """How many groups are not done."""
        return len(self.waiting) + len(self.preempted) + len(self.running)

    @property
    def future_peak(self) -> float:
        """The share of the fullest pool that all requests, waiting ones too, will hold at their peak (C40).
        Admission "future" knows how long answers are; another one takes each to its limit.
        """
        forecast = self.admission
        if not isinstance(forecast, FuturePeak):
            forecast = FuturePeak(self.kv_groups, self.limits)
        groups = [*self.running, *self.preempted, *self.waiting]
        return forecast.share(groups, self.counts["steps"])

    # ---- a step

    def schedule(self) -> StepPlan:
        """The next step. Its blocks are taken in the books; `commit` reports that it has been computed."""
        batch = self.rows
        if batch.ending:
            for sequence in batch.complete():
                self._leave_table(sequence.group)
        if self._others:
            self._fill_table()
        waiting = self.preempted or self.waiting or self.swapping.moves
        # Most steps take one token of every sequence, for which their blocks have room.
        planned = self._others or waiting or batch.growing or batch.uneven
        plan = self._plan() if planned else StepPlan(batch.step(), self._no_copies)
        self.counts["steps"] += bool(plan.batch.sequences)
        self.counts["tokens"] += plan.batch.tokens
        return plan

    def _plan(self) -> StepPlan:
        """A step that takes blocks, or in which groups come and go."""
        builder = PlanBuilder(len(self.kv_groups), self.limits.tokens)
        steps: list[Steps] = []
        if self._others or self.rows.growing or self.rows.uneven:
            steps = self._make_room(builder)
        builder.batch = self.rows.step()
        builder.room -= builder.batch.tokens
        for i in self._never_full:
            builder.keep_named(i, [row for of_group in steps for row in of_group])
        for of_group in steps:
            self._take(builder, of_group)
        if (self.preempted or self.waiting) and not builder.preempted:
            self._admit(builder)
        return builder.plan(self.swapping.plan() if self.swapping.moves else Swaps())

    def _make_room(self, builder: PlanBuilder) -> list[Steps]:
        """Preempt groups until every pool has the blocks: the steps of groups outside the table."""
        others = sum(len(group.sequences) for group in self._others if group.decoding)
        self.rows.limit(self.limits.tokens - others)
        steps = share(self._others, self.limits.tokens - self.rows.pending)
        while last := self._victim(steps):
            if self.prefixes.snapshots.drop():
                continue
            self.preempt(last)
            last.setbacks += 1
            builder.preempted.append(last)
            steps = share(self._others, self.limits.tokens - self.rows.pending)
        return steps

    def _victim(self, steps: list[Steps]) -> SequenceGroup | None:
        """The group to preempt for want of blocks: the last of a tenant above its share that runs others too
        (C43), else the last of all, if blocks are missing whatever tenants keep.
        """
        need = self.rows.need()
        enough = not self.running or fit(self.kv_groups, steps, need)
        if self.divided:
            growth = [self.rows.growth(i) for i in range(len(self.kv_groups))]
            for sequence, count in (row for each in steps for row in each):
                for kv_group, more in zip(self.kv_groups, growth, strict=True):
                    more[sequence.group.request.tenant] += count // kv_group.pool.block_size + 1
            if enough and fit(self.kv_groups, steps, need, growth[self.prefixes.finest]):
                return None
            runs = Counter(group.request.tenant for group in self.running)
            pools = list(zip(self.kv_groups, growth, strict=True))
            over = {t for t in runs if any(each.pool.shares(t).over(t, more[t]) for each, more in pools)}
            for group in reversed(self.running):
                if group.request.tenant in over and runs[group.request.tenant] > 1:
                    return group
        return None if enough else self.running[-1]

    def commit(self, plan: StepPlan, without: Collection[SequenceGroup] = ()) -> None:
        """The rows of the plan are computed, but for those of groups `without`."""
        self.launch(plan, without)
        self.confirm(plan, without)

    def launch(self, plan: StepPlan, without: Collection[SequenceGroup] = ()) -> None:
        """The rows of the plan are on their way, but for those of groups `without`: the next step may build
        on them.
        """
        batch = plan.batch
        for sequence in batch.sequences[: batch.decodes]:
            if not without or sequence.group not in without:
                sequence.computed += 1
        for sequence, start, count, _ in batch.other_rows if len(batch.sequences) > batch.decodes else ():
            group = sequence.group
            if group in without:
                continue
            sequence.computed = start + count
            sequence.begun = True
            if sequence in self.rows:
                self.rows.note(sequence)
            if not group.forked and sequence.computed >= group.common:
                group.fork()
        if self._never_full:
            self.prefixes.snapshots.launched(plan, without)

    def confirm(
        self,
        plan: StepPlan,
        without: Collection[SequenceGroup] = (),
        sequences: Iterable[TokenSequence] = (),
        tokens: Iterable[int] = (),
    ) -> None:
        """The rows of the plan are computed, and the host has their tokens: their blocks may be cached now,
        and no sooner (C22). `sequences` run on with these `tokens`; others get theirs by `extend`.
        """
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.tokens.append(token)
        batch = plan.batch
        for sequence, end in batch.full:
            if sequence.computed >= end and sequence.group not in without:
                known = min(end, len(sequence.tokens) - sequence.drafts)
                renamed = self.prefixes.name(sequence, known)
                if renamed is not None:
                    self.rows.renamed(sequence, renamed)
        for sequence, start, count, _ in batch.other_rows if len(batch.sequences) > batch.decodes else ():
            group = sequence.group
            end = start + count
            if group.in_flight and end >= group.common and sequence.computed >= end and group not in without:
                self.prefixes.forget(group)
        if self._never_full:
            self.prefixes.snapshots.confirm(plan, without)

    def extend(self, sequences: Iterable[TokenSequence], tokens: Iterable[int]) -> None:
        """The host has the next tokens of sequences, which run or were preempted since the tokens' step."""
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.tokens.append(token)
            if sequence.behind > 1:
                self._note(sequence)
            if sequence.row == NO_ROW:
                sequence.group.awaits_tokens = False
                if not sequence.group.swapped:
                    sequence.group.reset_to_common()  # what they have in common was not known before

    def propose(self, sequence: TokenSequence, tokens: Sequence[int]) -> None:
        """Let the next step compute guesses behind the last token of a sequence in the table of rows, as many
        as it has room for; `settle` says which were right. A sequence that leaves the table forgets them.
        Behind a token that is on its way to the host there are none.
        """
        room = sequence.group.request.most_tokens - 1 - len(sequence.tokens)
        known = sequence.computed < len(sequence.tokens)
        if room > 0 and known and sequence in self.rows:
            sequence.tokens += tokens[:room]
            sequence.drafts += len(tokens[:room])
            self._note(sequence)

    def settle(self, sequence: TokenSequence, right: int) -> None:
        """The first `right` of a sequence's guesses were right, and the others never were: their keys and
        values are forgotten.
        """
        wrong = sequence.drafts - right
        sequence.drafts = 0
        known = len(sequence.tokens) - wrong
        beyond = max(0, sequence.computed - known)
        del sequence.tokens[known:]
        if beyond:
            for table in sequence.tables[: len(self._growing)]:
                table.crop(beyond)
            sequence.computed -= beyond
        self._note(sequence)

    def wait(self, sequence: TokenSequence, waits: bool = True) -> None:
        """Let a sequence take no tokens until it waits no more, or is preempted."""
        sequence.waits = waits
        self._note(sequence)

    def _note(self, sequence: TokenSequence) -> None:
        """A sequence takes another number of tokens in the next step than was expected."""
        if sequence.behind > 1 and sequence.group.status is Status.RUNNING:
            self.admission.fall_behind(sequence.group)
        if sequence in self.rows:
            self.rows.note(sequence)

    def reorder(self, group: SequenceGroup, sources: Sequence[int], tokens: Sequence[int]) -> None:
        """Make sequence i what sequence sources[i] was, and give it its next token: a step of beams (C6,
        C16).
        """
        sequences = group.sequences
        moves = any(place != source for place, source in enumerate(sources))
        for i in range(len(self.kv_groups) if moves else 0):
            reorder([sequence.tables[i] for sequence in sequences], sources)
        rows = [sequences[source].tokens for source in sources]
        # The first successor of a sequence continues its list of tokens.
        rows = [list(row) if sources[i] in sources[:i] else row for i, row in enumerate(rows)]
        for sequence, row, token in zip(sequences, rows, tokens, strict=True):
            sequence.tokens = row
            sequence.tokens.append(token)

    @property
    def may_admit(self) -> bool:
        """True if the next step may admit a group, or look its prefix up."""
        waits = bool(self.preempted or self.waiting)
        return waits and self._taken - len(self.rows.complete()) < self.limits.sequences

    # ---- the parts of a step

    def _fill_table(self) -> None:
        """Groups that only decode by now join the table of rows."""
        for group in self._others.copy():
            if self.rows.accepts(group):
                for sequence in group.sequences:
                    self.rows.join(sequence)
                self._others.remove(group)

    def _leave_table(self, group: SequenceGroup) -> None:
        """Take a group out of the table of rows, if it is there."""
        if group.leader in self.rows:
            for sequence in group.sequences:
                self.rows.leave(sequence)
            insort(self._others, group, key=self._key)

    def _release_row(self, sequence: TokenSequence) -> None:
        if sequence.row != NO_ROW:
            heappush(self._free_rows, sequence.row)
            sequence.row = NO_ROW

    def _take(self, builder: PlanBuilder, steps: Steps) -> None:
        """Enter the steps in the tables and in the plan."""
        ones = all(count == 1 for _, count in steps)
        for i, kv_group in enumerate(self.kv_groups):
            tables = [sequence.tables[i] for sequence, _ in steps]
            if ones and kv_group.kind.grows:
                now = kv_group.pool.tick()
                builder.copies[i] += [
                    copy for copy in [table.step(now) for table in tables] if copy is not None
                ]
            else:
                builder.copies[i] += append(tables, [sequence.growth(i, count) for sequence, count in steps])
        for sequence, count in steps:
            builder.rows.append(ScheduledRow(sequence, sequence.computed, count, to_sample(sequence, count)))
            builder.room -= count

    def _admit(self, builder: PlanBuilder) -> None:
        """Admit groups for which there is room: preempted ones first, and new ones only when all of these run
        (C28), or wait for nothing but an adapter (C33) or their tenant's share (C43).
        """
        pinned = set() if self.adapters is None else {group.request.adapter for group in self.running}
        if self._admit_from(self.preempted, builder, pinned):
            self._admit_from(self.waiting, builder, pinned)

    def _admit_from(
        self, queue: list[SequenceGroup], builder: PlanBuilder, pinned: set[AdapterNames] | None
    ) -> bool:
        """Admit groups of a queue: True if later queues may go on. pinned: the adapters that keep their
        slots; None where no group may have a slot before one that waits.
        """
        place = 0
        others_may = True
        while place < len(queue):
            verdict = self._verdict(queue[place], builder, pinned)
            if verdict == "stop":
                return False
            if isinstance(verdict, Candidate):
                del queue[place]
                self.admission.enter(verdict, self._state(builder.room))
                self._start(builder, verdict)
                continue
            place += 1
            if verdict == "pass, impatient":
                pinned = None
            others_may &= verdict != "pass, behind a twin"
        return others_may

    def _verdict(
        self, group: SequenceGroup, builder: PlanBuilder, pinned: set[AdapterNames] | None
    ) -> Candidate | Verdict:
        """The verdict on the next group of a queue; as a candidate it is admitted."""
        if builder.room <= 0 or self._taken >= self.limits.sequences or group.awaits_tokens:
            return "stop"
        if group.request.tenant in builder.held_back:
            return "pass"
        if group.request.adapter:
            assert self.adapters is not None
            if pinned is None or not self.adapters.reserve(group.request.adapter, pinned):
                group.passed_over += 1
                return "pass, impatient" if group.passed_over > PATIENCE else "pass"
        if group.swapped and self.swapping.stale(group):
            self.begin_again(group)
        found = self._find(group)
        if found is None:
            return "pass, behind a twin"
        if self._taken + len(group.sequences) > self.limits.sequences:
            return "stop"
        return self._fitting(group, found, builder)

    def _fitting(self, group: SequenceGroup, found: list[Match], builder: PlanBuilder) -> Candidate | Verdict:
        """The verdict of the pools and of tenants' shares of them."""
        state = self._state(builder.room)
        candidate = self._candidate(group, found)
        fits = self.admission.fits(candidate, state)
        if not fits and any(each.partial for each in found):
            # The source of a copy is referenced while it is copied: a group that needs every block does
            # without the copy.
            candidate = self._candidate(group, self._find(group, whole=True) or found)
            fits = self.admission.fits(candidate, state)
        if not fits and not (self.divided and self.admission.fits_but_for_shares(candidate, state)):
            return "stop"  # no request overtakes another for memory (C12)
        late = not fits and self.running  # where nothing runs it takes the blocks
        if late or (builder.held_back and self.admission.exceeds(candidate)):
            self.counts["held_back"] += 1
            builder.held_back.add(group.request.tenant)
            return "pass"  # tenants within their shares do not wait
        return candidate

    def _find(self, group: SequenceGroup, whole: bool = False) -> list[Match] | None:
        """The cached beginning of a group in every pool; of one on the host, those of its blocks that are on
        the device as well.
        """
        if not group.swapped:
            return self.prefixes.find(group, whole)
        there = [self.swapping.there(group, i) for i in range(len(self.kv_groups))]
        return [Match(list(set(each.values())), []) for each in there]

    @property
    def _taken(self) -> int:
        """How many sequences run."""
        return len(self.rows) + sum([len(group.sequences) for group in self._others])

    def _state(self, room: int) -> SchedulerState:
        return SchedulerState(self.counts["steps"], room, self.running, self._taken)

    def _candidate(self, group: SequenceGroup, found: list[Match]) -> Candidate:
        chunk = self.limits.tokens
        many = range(len(self.kv_groups))
        needs = [self.swapping.need(group, i, chunk) if group.swapped else group.need(i, chunk) for i in many]
        sources = [None if each.partial is None else each.partial.block for each in found]
        return Candidate(
            group,
            [each.blocks for each in found],
            needs,
            sources,
            found[0].tokens(self.kv_groups[0].pool.block_size),
            found=found,
        )

    def _start(self, builder: PlanBuilder, candidate: Candidate) -> None:
        group = candidate.group
        if group.swapped:
            self.counts["swapped_in"] += 1
            self.counts["blocks_in"] += self.swapping.bring_back(group)
        else:
            hits, misses = self.prefixes.begin(builder, group, candidate.found)
            self.counts.update(hits=hits, misses=misses)
        self.prefixes.expect(group)
        for sequence in group.sequences:
            sequence.row = heappop(self._free_rows)
        group.status = Status.RUNNING
        insort(self.running, group, key=self._key)
        insort(self._others, group, key=self._key)
        self.counts["admissions"] += 1
        if self.kv_groups[self.prefixes.finest].pool.block_size == 1:
            group.seek_runs()
        builder.admitted.append(group)
        steps = group.advance(builder.room)
        if not fit(self.kv_groups, [steps]):
            raise AssertionError(f"{group!r} was let in and its first step does not fit")
        self._take(builder, steps)

    # ---- the audit

    def check(self) -> None:
        """Recount everything; between two steps every table holds what is computed, and nothing else."""
        check_kv_groups(self.kv_groups)
        check_groups(
            {Status.WAITING: self.waiting, Status.PREEMPTED: self.preempted, Status.RUNNING: self.running},
            self._key,
        )
        state = self._state(self.limits.tokens)
        self.admission.check(state)
        self.rows.check()
        apart = [group for group in self.running if group.leader not in self.rows]
        rows = [sequence.row for group in self.running for sequence in group.sequences]
        every = sorted([*rows, *self._free_rows])
        expect(every == list(range(self.limits.sequences)), "a row belongs to two sequences, or is lost")
        expect(state.taken == len(rows), "a running sequence is not counted")
        if self.adapters is not None:
            self.adapters.check({group.request.adapter for group in self.running} - {()})
        kept = len(self.rows) == len(rows) - sum(len(group.sequences) for group in apart)
        expect(self._others == apart and kept, "a running group is in two places, or in none")
        expect(state.taken <= self.limits.sequences, f"{state.taken} run, {self.limits.sequences} may")
