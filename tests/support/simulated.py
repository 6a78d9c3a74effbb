"""A scheduler with a model that is arithmetic: what is stored for a position stands for all tokens up to it.

So a wrong copy, a slot written while others read it, a stale hit, a row run at the wrong place: all are read
back as something else, and every request has one right answer, whoever else is in the batch.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import le

from hf_paged.blocks import BlockPool, BlockTable, Cross, Full, LayerKind, Window
from hf_paged.scheduling import (
    AdapterNames,
    AdapterSlots,
    KVCacheGroup,
    Limits,
    Request,
    Scheduler,
    SequenceGroup,
    Status,
    StepPlan,
    Swaps,
    TokenSequence,
    Victim,
)

VOCABULARY = 7


def slots_of(pool: BlockPool, block: int) -> range:
    """The numbers of a block's slots: one where all tokens come to one thing."""
    size = pool.block_size if pool.fills else 1
    return range(block * size, (block + 1) * size)


def values_of(tokens: list[int], salt: int = 0) -> list[int]:
    """Values that a model computes at each of `tokens`."""
    return list(accumulate(tokens, lambda before, token: hash((before, token)), initial=salt))[1:]


def value_of(tokens: list[int], salt: int = 0) -> int:
    """The value that it computes at the last of them."""
    return values_of(tokens, salt)[-1]


def next_token(value: int, index: int) -> int:
    """The token that sequence number `index` chooses there: samples differ, as by their seeds."""
    return hash((value, index)) % VOCABULARY


def answer(request: Request, salt: int = 0) -> list[list[int]]:
    """The tokens of a request of samples, computed alone."""
    rows = []
    for index in range(request.width):
        tokens = list(request.prompt)
        while len(tokens) < stop_at(request, index):
            tokens.append(next_token(value_of(tokens, salt), index))
        rows.append(tokens)
    return rows


def stop_at(request: Request, index: int) -> int:
    """How long a sample becomes: some end early."""
    return max(len(request.prompt) + 1, request.most_tokens - 2 * index)


def beam_step(values: list[int]) -> tuple[list[int], list[int]]:
    """Where each beam comes from, and its token."""
    order = [hash((value, VOCABULARY)) for value in values]  # of numbers: the same in every process
    sources = [order[i] % len(values) for i in range(len(values))]
    return sources, [next_token(values[source], i) for i, source in enumerate(sources)]


def beam_answer(request: Request, salt: int = 0) -> list[list[int]]:
    """The tokens of a request of beams, computed alone."""
    rows = [list(request.prompt) for _ in range(request.width)]
    while len(rows[0]) < request.most_tokens:
        sources, tokens = beam_step([value_of(row, salt) for row in rows])
        rows = [[*rows[source], token] for source, token in zip(sources, tokens, strict=True)]
    return rows


@dataclass
class Simulated:
    """Runs plans over a store of numbers, and keeps what every request answered."""

    pools: list[BlockPool]
    kinds: list[LayerKind]
    limits: Limits
    encoders: BlockPool | None = None
    """Of what encoders make, if there are any: numbers of their own stand there."""
    policy: str = "fcfs"
    admission: str = "watermark"
    prefix_caching: bool = True
    verify: bool = False
    state_every: int = 16
    host: int | None = None
    """Blocks of the host for each pool; without it nobody is swapped."""
    swap: Callable[[Victim], bool] = lambda victim: True
    fails: Callable[[SequenceGroup], bool] = lambda group: False
    salt: int = 0
    slots: int | None = None
    """Slots of adapters; without them no request has one."""
    delay: Callable[[], int] = lambda: 0
    """How many times it is asked for an adapter before that is there."""
    checks: bool = True
    """True if an audit of the books follows every step."""
    advances: random.Random | None = None
    """Chance, if rows take any number of tokens: several that are known, guesses, or none."""
    advanced: Counter[int] = field(default_factory=Counter)
    """How often a row that decodes has come forward by so many tokens."""
    tenants: tuple[str, ...] = ("",)
    """Those of requests that come at random."""
    groups: list[SequenceGroup] = field(default_factory=list)
    """Those that are not finished, and some that are."""
    requests: dict[int, Request] = field(default_factory=dict)
    beams: set[int] = field(default_factory=set)
    answers: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    computed: int = 0

    def __post_init__(self) -> None:
        everybody = self.pools if self.encoders is None else [*self.pools, self.encoders]
        self.hosts = [
            None if self.host is None else BlockPool(self.host, pool.block_size) for pool in everybody
        ]
        kv_groups = [
            KVCacheGroup(kind, pool, host)
            for pool, kind, host in zip(self.pools, self.kinds, self.hosts, strict=False)
        ]
        if self.encoders is not None:
            kv_groups.append(KVCacheGroup(Cross(), self.encoders, self.hosts[-1]))
        self.held: dict[int, AdapterNames] = {}
        self.loading: dict[AdapterNames, int] = {}
        adapters = None if self.slots is None else AdapterSlots(self.slots, self.load, self.is_there)
        options = {
            "admission": self.admission,
            "prefix_caching": self.prefix_caching,
            "verify": self.verify,
            "state_every": self.state_every,
            "adapters": adapters,
        }
        self.scheduler = Scheduler(
            kv_groups, self.limits, self.policy, swap=lambda victim: self.swap(victim), **options
        )
        self.stores: list[dict[int, int]] = [{} for _ in everybody]
        self.on_host: list[dict[int, int]] = [{} for _ in everybody]

    @classmethod
    def of(
        cls,
        total: int,
        size: int = 4,
        window: int | None = None,
        tokens: int = 16,
        sequences: int = 8,
        watermark: float = 0.0,
        **options,
    ) -> Simulated:
        """One pool, or one of full and one of windowed layers."""
        kinds = [Full()] if window is None else [Full(), Window(window)]
        return cls.mixed(
            [(kind, total, size) for kind in kinds], Limits(tokens, sequences, watermark), **options
        )

    @classmethod
    def mixed(cls, pools: Iterable[tuple[LayerKind, int, int]], limits: Limits, **options) -> Simulated:
        """A pool for each kind of layers, of so many blocks of its own size."""
        kinds, totals, sizes = zip(*pools, strict=True)
        made = [
            BlockPool(total, kind.block_size(size))
            for kind, total, size in zip(kinds, totals, sizes, strict=True)
        ]
        return cls(made, list(kinds), limits, **options)

    def submit(self, request: Request, beams: bool = False) -> SequenceGroup:
        assert request.number not in self.requests, f"a request number {request.number} has been here before"
        if beams:  # as an engine's
            request = replace(request, batchable=False)
        group = self.scheduler.submit(request)
        self.groups = [other for other in self.groups if other.status is not Status.FINISHED] + [group]
        self.requests[request.number] = request
        self.answers[request.number] = {}
        if beams:
            self.beams.add(request.number)
        return group

    def step(self) -> StepPlan:
        """One step: plan, copy, compute, commit, choose."""
        scheduler = self.scheduler
        if self.advances is not None:
            self.let_some_wait(self.advances)
        held = [kv_group.pool.held for kv_group in scheduler.kv_groups]
        plan = scheduler.schedule()
        assert plan.tokens <= self.limits.tokens
        if not plan.takes_blocks:
            assert all(map(le, [kv_group.pool.held for kv_group in scheduler.kv_groups], held))
            assert not plan.swaps
            assert not any(plan.copies)
        self.carry(plan.swaps)
        self.copy(plan)
        failed = [group for group in plan.groups if self.fails(group)]
        values = {
            row.sequence: self.compute(row.sequence, row.start, row.count)
            for row in plan.rows
            if row.sequence.group not in failed
        }
        scheduler.commit(plan, failed)
        for group in failed:
            scheduler.abort(group)
        for group in plan.groups:
            rows = [row for row in plan.rows if row.sequence.group is group and row.samples]
            if rows and group not in failed:
                chosen = {sequence: values[row.sequence] for row in rows for sequence in row.samples}
                (self.choose_beams if group.request.number in self.beams else self.choose)(group, chosen)
        if self.checks:
            scheduler.check()
        return plan

    def run(self, most: int = 10_000) -> list[StepPlan]:
        """Steps until nobody waits."""
        plans = []
        while self.scheduler.unfinished:
            plans.append(self.step())
            loads = any(left >= 0 for left in self.loading.values())
            assert plans[-1].rows or loads, "nobody can run and somebody is unfinished"
            assert len(plans) < most
        return plans

    # ---- the model

    def load(self, names: AdapterNames, slot: int) -> None:
        """The former content of the slot is no running group's."""
        assert self.held.get(slot) not in {group.request.adapter for group in self.scheduler.running}
        self.held[slot] = names
        self.loading[names] = self.delay()

    def is_there(self, names: AdapterNames) -> bool:
        self.loading[names] -= 1
        return self.loading[names] < 0

    def carry(self, swaps: Swaps) -> None:
        """All that goes to the host, then all that comes back; every block goes to one place once."""
        for ways, here, there in (
            (swaps.out, self.stores, self.on_host),
            (swaps.back, self.on_host, self.stores),
        ):
            for kv_group, sources, targets, copies in zip(
                self.scheduler.kv_groups, here, there, ways, strict=bool(ways)
            ):
                pool = kv_group.pool
                assert len({copy.target for copy in copies}) == len(copies)
                for copy in copies:
                    targets.update(
                        (there, sources.get(here, 0))
                        for here, there in zip(*(slots_of(pool, block) for block in copy), strict=True)
                    )

    def copy(self, plan: StepPlan) -> None:
        assert self.encoders is None or not plan.copies[-1]
        for kv_group, store, copies in zip(self.scheduler.kv_groups, self.stores, plan.copies, strict=True):
            pool = kv_group.pool
            assert not {copy.source for copy in copies} & {copy.target for copy in copies}
            assert len({copy.target for copy in copies}) == len(copies)
            for copy in copies:
                for here, there in zip(*(slots_of(pool, block) for block in copy), strict=True):
                    store[there] = store.get(here, 0)

    def compute(self, sequence: TokenSequence, start: int, count: int) -> int:
        """Write what the row computes in every pool, after reading all that it looks at: the answer is its
        last value.
        """
        names = sequence.group.request.adapter
        if names:
            assert self.scheduler.adapters is not None
            assert self.held[self.scheduler.adapters.slot(names)] == names
            assert self.loading[names] < 0
        self.computed += count
        right = values_of(sequence.tokens[: start + count], self.salt_of(sequence.group.request))
        if self.encoders is not None:
            self.cross_attend(sequence)
        for table, store, kind in zip(sequence.tables, self.stores, self.kinds, strict=self.encoders is None):
            assert table.length == start + count
            if not kind.fills:
                self.update(sequence, table, store, right, start)
                continue
            window = kind.window
            for position in range(start, start + count):
                store[table.slot(position)] = right[position]
            for seen in range(max(0, start - (window or start + 1) + 1), start + count):
                assert store[table.slot(seen)] == right[seen], f"{sequence!r} reads a wrong {seen}"
        return right[-1]

    def update(
        self, sequence: TokenSequence, table: BlockTable, store: dict[int, int], right: list[int], start: int
    ) -> None:
        """Replace what the tokens have come to; no name may promise what was there."""
        (block,) = table.blocks
        assert not start or store[block] == right[start - 1], f"{sequence!r} continues a wrong state"
        assert table.pool.references(block) == 1, f"{sequence!r} writes what others read"
        assert block not in table.pool.names, f"{sequence!r} writes what others find"
        store[block] = right[-1]

    def salt_of(self, request: Request) -> int:
        """Tokens that attend across to other content are other values."""
        key = request.source_key + request.adapter_key
        return self.salt + int.from_bytes(key, "big")

    def cross_attend(self, sequence: TokenSequence) -> None:
        """The keys and values of a cross layer are written in its first forward, behind a hit too, and are
        there in later ones.
        """
        table, request = sequence.tables[-1], sequence.group.request
        assert table.length == request.source
        slots = [table.slot(position) for position in range(request.source)]
        if not sequence.begun:
            self.stores[-1].update(dict.fromkeys(slots, request.number))
        assert {self.stores[-1][slot] for slot in slots} <= {request.number}

    # ---- what comes after the model

    def choose(self, group: SequenceGroup, values: dict[TokenSequence, int]) -> None:
        for sequence, value in values.items():
            if self.advances is not None:
                value = self.settled(sequence, value)
            self.scheduler.extend([sequence], [next_token(value, sequence.index)])
            if self.advances is not None:
                self.go_on(sequence, self.advances)
            known = len(sequence.tokens) - sequence.drafts
            if known >= stop_at(group.request, sequence.index):
                self.answers[group.request.number][sequence.index] = sequence.tokens[:known]
                self.scheduler.finish(sequence)

    # ---- rows that take any number of tokens

    def let_some_wait(self, chance: random.Random) -> None:
        """Some rows take no token in the next step, and those that waited go on; never does every row wait."""
        running = [each for group in self.scheduler.running for each in group.sequences]
        for group in self.scheduler.running:
            waits = chance.random() < 0.2  # beams wait together
            for sequence in group.sequences:
                if group.request.number not in self.beams:
                    waits = chance.random() < 0.2
                self.advanced[0] += waits and sequence.computed > len(group.request.prompt)
                self.scheduler.wait(sequence, waits)
        if running and all(sequence.waits for sequence in running):
            for sequence in running:
                self.scheduler.wait(sequence, False)

    def settled(self, sequence: TokenSequence, value: int) -> int:
        """Forgets the tokens behind the last of a sequence's guesses that is right."""
        known = len(sequence.tokens) - sequence.drafts
        values = values_of(sequence.tokens, self.salt_of(sequence.group.request))
        right = 0
        while right < sequence.drafts:
            if sequence.tokens[known + right] != next_token(values[known + right - 1], sequence.index):
                break
            right += 1
        if sequence.drafts:
            self.advanced[right + 1] += 1
            value = values[known + right - 1]
        self.scheduler.settle(sequence, right)
        return value

    def go_on(self, sequence: TokenSequence, chance: random.Random) -> None:
        """Let the host have more tokens of a sequence, or guesses."""
        group = sequence.group
        end = stop_at(group.request, sequence.index)
        tokens = list(sequence.tokens)
        while len(tokens) < min(end, len(sequence.tokens) + 4):
            tokens.append(next_token(value_of(tokens, self.salt_of(group.request)), sequence.index))
        more = tokens[len(sequence.tokens) :][: chance.randrange(5)]
        if chance.random() < 0.3:
            self.scheduler.extend([sequence] * len(more), more)
        elif chance.random() < 0.6:
            more = more[: max(0, end - 1 - len(sequence.tokens))]  # behind them comes a token
            guesses = [token if chance.random() < 0.7 else chance.randrange(VOCABULARY) for token in more]
            self.scheduler.propose(sequence, guesses)

    def choose_beams(self, group: SequenceGroup, values: dict[TokenSequence, int]) -> None:
        sources, tokens = beam_step([values[sequence] for sequence in group.sequences])
        self.scheduler.reorder(group, sources, tokens)
        if group.length >= group.request.most_tokens:
            for sequence in list(group.sequences):
                self.answers[group.request.number][sequence.index] = list(sequence.tokens)
                self.scheduler.finish(sequence)

    # ---- what must hold

    def assert_answered(self) -> None:
        """Every request that came to its end has the tokens it has alone."""
        for number, answers in self.answers.items():
            request = self.requests[number]
            if len(answers) == request.width:
                expected = (beam_answer if number in self.beams else answer)(request, self.salt_of(request))
                assert [answers[i] for i in range(request.width)] == expected, f"request {number}"

    def assert_empty(self) -> None:
        assert not self.scheduler.unfinished
        assert all(
            kv_group.pool.held == 0 and (kv_group.host is None or kv_group.host.held == 0)
            for kv_group in self.scheduler.kv_groups
        )
        assert self.scheduler.prefixes.idle
        self.scheduler.check()
