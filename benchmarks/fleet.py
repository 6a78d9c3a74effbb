"""Replicas of the scheduler under a simulated clock, a router before them, and users who talk in turns.

What plans a step is hf_paged's own code: Scheduler, admission, block pool, prefix cache. What computes is a table
of step times that were measured on a card. Nothing here needs a GPU or computes a token: token number i of
conversation c is the integer (c << 20) + i, so that equal prefixes are equal integers. benchmarks/simulate.py has
the measured points, the experiments and the tables.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from traces import TRACES

from hf_paged.blocks import (
    BlockPool,
    BlockTable,
    Full,
    PrefixLookup,
    Prompt,
    adopt,
    append,
    commit,
    commit_tail,
)
from hf_paged.ray.routing import LoadBound, PrefixIndex, ranked
from hf_paged.scheduling import KVCacheGroup, Limits, Request, Scheduler, SequenceGroup, Status, StepPlan

BLOCK = 16
"""Tokens of a block."""


class Clock:
    """Simulated seconds. Events run in the order of their times, and at one time in the order they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0

    def at(self, time: float, event: Callable[..., None], *arguments: Any) -> None:
        """Call `event` at a time, which is not before now."""
        if time < self.now:
            raise ValueError(f"an event at {time} s lies before now, {self.now} s")
        self._serial += 1
        heapq.heappush(self._events, (time, self._serial, event, arguments))

    def run(self, until: float = math.inf) -> None:
        """Run all events up to a time, and those that they set."""
        while self._events and self._events[0][0] <= until:
            self.now, _, event, arguments = heapq.heappop(self._events)
            event(*arguments)
        if until < math.inf:
            self.now = until


# ---- a step


class Step(NamedTuple):
    """What decides how long a step takes.

    tokens: of all rows. context: keys that rows of one token read. pairs: of a query and a key, in rows of
    several tokens.
    """

    tokens: int
    context: int = 0
    pairs: int = 0


def step_of(plan: StepPlan) -> Step:
    """The work of a planned step."""
    batch = plan.batch
    context = sum(batch.starts[: batch.decodes]) + batch.decodes
    pairs = 0
    for _, start, count, _ in batch.other_rows:
        if count == 1:
            context += start + 1
        else:
            pairs += count * start + count * (count + 1) // 2
    return Step(batch.tokens, context, pairs)


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step: a line through measured points for its tokens, and attention beside that.

    knots: (tokens, seconds without attention), with straight lines between them. token: seconds of each token
    beyond the last knot. key: seconds of each key that a row of one token reads. pair: seconds of each pair of
    a query and a key in longer rows. decode: what steps without prompts take, as a multiple of that.
    """

    knots: tuple[tuple[int, float], ...]
    token: float
    key: float
    pair: float
    decode: float = 1.0

    def seconds(self, step: Step) -> float:
        """How long a step takes."""
        seconds = self._products(step.tokens) + self.key * step.context + self.pair * step.pairs
        return seconds if step.pairs else seconds * self.decode

    def _products(self, tokens: int) -> float:
        last, seconds = self.knots[-1]
        if tokens >= last:
            return seconds + self.token * (tokens - last)
        place = max(1, bisect_left(self.knots, (tokens, 0.0)))
        (left, low), (right, high) = self.knots[place - 1 : place + 1]
        return low + (high - low) * max(0, tokens - left) / (right - left)


# ---- who asks


@dataclass(slots=True)
class Turn:
    """A prompt and its answer. prompt: its tokens, `history` of them the conversation so far. limit: how long the
    scheduler is told that the answer may become. ids: the prompt's tokens where they are not the conversation's
    own.
    """

    conversation: int
    prompt: int
    new: int
    limit: int
    history: int = 0
    ids: tuple[int, ...] | None = None
    sent: float = 0.0
    first: float = -1.0
    last: float = -1.0
    """When it had its latest token, where its steps do not show it."""
    finished: float = -1.0
    cached: int = 0
    """Tokens of the prompt that were not computed."""
    fetched: int = 0
    """Tokens among them that came from the tier."""
    produced: int = 0

    def token(self, place: int) -> int:
        return (self.conversation << 20) + place

    def tokens(self, count: int) -> Sequence[int]:
        """The first tokens of the conversation with this turn's answer."""
        if self.ids is not None:
            return [*self.ids, *map(self.token, range(len(self.ids), count))][:count]
        return range(self.token(0), self.token(count))

    def block_names(self, count: int) -> list[bytes]:
        """Names of the full blocks of the conversation's first tokens, equal where digests would be."""
        return [self.token(place).to_bytes(8) for place in range(0, count - BLOCK + 1, BLOCK)]


@dataclass(frozen=True)
class Mix:
    """How users talk. Lengths are lognormal with the means of PagedAttention's figure 11 (traces.py). Turns of a
    conversation (geometric, mean 3.5) and seconds between an answer and the next prompt (lognormal, mean 100)
    are those of ServeGen, arXiv 2505.09999; the spread of the latter is assumed.
    """

    turns: float = 3.5
    think: float = 100.0
    spread: float = 1.0
    context: int = 8192
    """No conversation becomes longer."""


class Users:
    """A fixed number of users, each of whom reads an answer, thinks, and goes on or begins anew."""

    def __init__(self, count: int, mix: Mix, seed: int = 0) -> None:
        self.count = count
        self.mix = mix
        self._random = random.Random(seed)
        self._conversations = 0
        prompt, answer, self._spread, self._longest = TRACES["sharegpt"]
        self._prompt, self._answer = (math.log(mean) - self._spread**2 / 2 for mean in (prompt, answer))
        self._pause = math.log(mix.think) - mix.spread**2 / 2
        """The means of logarithms."""

    def begin(self) -> Iterator[tuple[float, Turn]]:
        """The next prompt of each user, in the middle of their conversations, and when it comes."""
        mix, chance = self.mix, self._random
        for _ in range(self.count):
            turn = self._new_turn(self._new_conversation(), 0)
            while chance.random() > 1 / mix.turns:
                turn = self._follow(turn)
            # A moment at random is more likely to lie in a long pause.
            pause = chance.lognormvariate(self._pause + mix.spread**2, mix.spread)
            yield pause * chance.random(), turn

    def next(self, turn: Turn) -> tuple[float, Turn]:
        """What follows an answer: seconds, and the next prompt of that user."""
        mix, chance = self.mix, self._random
        pause = chance.lognormvariate(self._pause, mix.spread)
        if chance.random() < 1 / mix.turns:
            return pause, self._new_turn(self._new_conversation(), 0)
        return pause, self._follow(turn)

    def _follow(self, turn: Turn) -> Turn:
        history = turn.prompt + turn.new
        if history + 2 * self._longest > self.mix.context:
            return self._new_turn(self._new_conversation(), 0)
        return self._new_turn(turn.conversation, history)

    def _new_conversation(self) -> int:
        self._conversations += 1
        return self._conversations

    def _new_turn(self, conversation: int, history: int) -> Turn:
        prompt = history + self._length(self._prompt)
        return Turn(conversation, prompt, self._length(self._answer), self._longest, history)

    def _length(self, mean: float) -> int:
        chosen = self._random.lognormvariate(mean, self._spread)
        return min(self._longest, max(4, int(chosen)))


# ---- who answers


class Replica:
    """An engine without a model: the scheduler's plans, each as long as its step would take.

    As in the engine, a step is planned while the one before it computes. A sequence whose end the scheduler did
    not know has then computed one token too many.
    """

    def __init__(
        self,
        times: StepTimes,
        blocks: int,
        limits: Limits,
        admission: str = "watermark",
        prefix_caching: bool = True,
    ) -> None:
        self.times = times
        self.pool = BlockPool(blocks, BLOCK)
        self.scheduler = Scheduler(
            [KVCacheGroup(Full(), self.pool)], limits, admission=admission, prefix_caching=prefix_caching
        )
        self.gaps: Counter[int] = Counter()
        """Between two tokens of a sequence: tenths of milliseconds, and how often."""
        self.watch: Callable[[StepPlan, float], None] | None = None
        """Sees each plan and its seconds."""
        self.link_free = 0.0
        """When what is on its way to this card's memory is there."""
        self._turns: dict[SequenceGroup, tuple[Turn, int]] = {}
        """What each group answers, and the length at which it ends."""
        self._numbers = 0
        self._running: StepPlan | None = None
        self._next: StepPlan | None = None
        self._began = 0.0

    @property
    def idle(self) -> bool:
        """Whether no step is in flight."""
        return self._running is None

    def submit(self, turn: Turn, new: int | None = None) -> None:
        """Queue what is left of a turn, or its next `new` tokens."""
        have = turn.prompt + turn.produced
        end = turn.prompt + turn.new if new is None else have + new
        most = turn.prompt + turn.limit if new is None else end
        request = Request(self._numbers, tuple(turn.tokens(have)), most)
        self._numbers += 1
        self._turns[self.scheduler.submit(request)] = (turn, end)

    def begin(self, now: float) -> float | None:
        """Begin the next step and plan the one after it: when it is over, or None if there is none."""
        if self._running is None:
            self._running = self._launch()
        if self._running is None:
            if self.scheduler.unfinished:
                raise RuntimeError(f"none of {self.scheduler.unfinished} requests can run")
            return None
        seconds = self.times.seconds(step_of(self._running))
        if self.watch is not None:
            self.watch(self._running, seconds)
        self._next = self._launch()
        self._began = now
        return now + seconds

    def _launch(self) -> StepPlan | None:
        if not self.scheduler.unfinished:
            return None
        plan = self.scheduler.schedule()
        if not plan:
            return None
        self.scheduler.launch(plan)
        return plan

    def end(self, now: float) -> list[Turn]:
        """The step is over and its tokens are there: the turns that this replica is done with."""
        plan = self._running
        assert plan is not None
        self._running = self._next
        self._next = None
        self.scheduler.confirm(plan)
        over = []
        steady = 0
        for place, sequence in enumerate(plan.batch.sampled):
            group = sequence.group
            if group.status is Status.FINISHED:
                continue  # one token too many
            turn, end = self._turns[group]
            turn.produced += 1
            self.scheduler.extend((sequence,), (turn.token(len(sequence.tokens)),))
            if place < plan.batch.decodes and turn.first >= 0:
                steady += 1
            else:
                self._note(turn, group, now)
            if group.status is Status.PREEMPTED:
                turn.last = now
            if len(sequence.tokens) == end:
                self.scheduler.finish(sequence)
                del self._turns[group]
                over.append(turn)
        self.gaps[round((now - self._began) * 1e4)] += steady
        return over

    def _note(self, turn: Turn, group: SequenceGroup, now: float) -> None:
        """The first token of a turn, or one outside the decode batch, which may be the first after a pause."""
        if turn.first < 0:
            turn.first = now
            turn.cached = group.cached_tokens
            turn.fetched = min(turn.fetched, turn.cached)
        else:
            self.gaps[round((now - turn.last) * 1e4)] += 1
        turn.last = now

    # ---- blocks from elsewhere

    def cached(self, turn: Turn) -> int:
        """How many of the prompt's tokens are in full blocks of the pool."""
        prompt = Prompt(turn.tokens(turn.prompt), BLOCK)
        return PrefixLookup(self.pool, prompt).reach(turn.prompt - 1) // BLOCK * BLOCK

    def place(self, turn: Turn, count: int) -> None:
        """Cache the first `count` tokens of a conversation, which were computed elsewhere. Where running
        requests leave no room, nothing happens, and the tokens are computed.
        """
        tokens = list(turn.tokens(count))
        lookup = PrefixLookup(self.pool, Prompt(tokens, BLOCK))
        table = BlockTable(self.pool)
        adopt(table, lookup.take(lookup.reach(count) // BLOCK * BLOCK))
        missing = count - table.length
        if missing > 0 and self.pool.blocks_for(missing) <= self.pool.available:
            append([table], [missing])
            commit(table, tokens, keep_tokens=True)
            commit_tail(table, tokens)
        table.free()


class Echo:
    """A replica that is not simulated: a turn there takes as long as one of the latest turns of those that are."""

    def __init__(self, times: StepTimes, seed: int, kept: int = 1024) -> None:
        self._random = random.Random(seed)
        usual = (times.seconds(Step(1024)), times.seconds(Step(64)))
        self._latest: deque[tuple[float, float]] = deque([usual], maxlen=kept)
        """Seconds to the first token, and of each other one."""

    def learn(self, turn: Turn) -> None:
        each = (turn.finished - turn.first) / max(1, turn.new - 1)
        self._latest.append((turn.first - turn.sent, each))

    def seconds(self, turn: Turn) -> float:
        """From the prompt to the last token of the answer."""
        first, each = self._random.choice(self._latest)
        return first + each * (turn.new - 1)


class Tier:
    """Blocks of conversations in memory or on disks of hosts. The conversation used last stays longest."""

    def __init__(self, tokens: int) -> None:
        self._room = tokens
        self._held: OrderedDict[int, int] = OrderedDict()

    def store(self, conversation: int, tokens: int) -> None:
        self._room += self._held.pop(conversation, 0) - tokens
        self._held[conversation] = tokens
        while self._room < 0:
            self._room += self._held.popitem(last=False)[1]

    def find(self, conversation: int) -> int:
        """How many leading tokens of a conversation are there."""
        if conversation in self._held:
            self._held.move_to_end(conversation)
        return self._held.get(conversation, 0)


# ---- who goes where


def least_loaded(loads: Sequence[int], start: int = 0) -> int:
    """A replica with the smallest load, the first from `start` on, so that ties spread."""
    least = min(loads)
    try:
        return loads.index(least, start)
    except ValueError:
        return loads.index(least)


class Router:
    """Sends turns to replicas, and counts what is outstanding. Routing by prefix is that of hf_paged.ray: its
    index of the prompts that each replica was sent, its ranks, and of a rank the least loaded replica, as Ray
    Serve takes it.
    """

    POLICIES = ("random", "round-robin", "least-loaded", "prefix")

    def __init__(
        self,
        policy: str,
        count: int,
        replicas: Sequence[Replica] = (),
        seed: int = 0,
        blocks: int | None = None,
    ) -> None:
        """replicas: those of the `count` that are simulated, the first ones. blocks: how many each replica reports
        that it can hold.
        """
        if policy not in self.POLICIES:
            raise ValueError(f"routing={policy!r} is not one of {self.POLICIES}")
        self.policy = policy
        self.replicas = replicas
        self.loads = [0] * count
        self._random = random.Random(seed)
        self._turn = 0
        self._bound = LoadBound()
        self._index = PrefixIndex()
        self._index.keep({str(place): blocks for place in range(count)})

    def send(self, turn: Turn) -> int:
        """Choose the replica of a turn; it is outstanding there until `done`."""
        count = len(self.loads)
        if self.policy == "random":
            chosen = self._random.randrange(count)
        elif self.policy == "round-robin":
            chosen = self._turn % count
            self._turn += 1
        elif self.policy == "least-loaded":
            chosen = least_loaded(self.loads, self._random.randrange(count))
        else:
            chosen = self._by_prefix(turn)
        self.loads[chosen] += 1
        return chosen

    def _by_prefix(self, turn: Turn) -> int:
        names = turn.block_names(turn.prompt)
        loads = {str(place): load for place, load in enumerate(self.loads)}
        best = ranked(names, loads, self._index, self._bound, self._random)[0]
        chosen = min(best, key=loads.__getitem__)
        self._index.add(chosen, names)
        return int(chosen)

    def done(self, replica: int) -> None:
        """A turn is over there."""
        self.loads[replica] -= 1

    def note(self, turn: Turn, replica: int) -> None:
        """A replica was sent the history of a turn before the clock started."""
        if self.policy == "prefix":
            self._index.add(str(replica), turn.block_names(turn.history))


# ---- all of it


@dataclass(frozen=True)
class Setup:
    """What is simulated.

    cards: replicas of one card each. simulated: how many of them run the scheduler's code; the others are
    echoes. cache: GB of keys and values on each card. tier: where blocks outlive the card's cache: "none",
    "host" (each card its own) or "shared" (all cards one), `tier_size` GB a card, read at `tier_speed` GB/s a
    card. prefill: how many cards only compute prompts, and send what they computed to the others at
    `link_speed` GB/s a card. tokens, sequences: the most of a step. warm: seconds before anything is counted,
    seconds: that are counted.
    """

    cards: int = 64
    users: int = 128_000
    routing: str = "prefix"
    admission: str = "watermark"
    cache: float = 80.0
    tier: str = "none"
    tier_size: float = 512.0
    tier_speed: float = 52.5
    prefill: int = 0
    link_speed: float = 50.0
    simulated: int | None = 4
    prefix_caching: bool = True
    tokens: int = 2048
    sequences: int = 256
    warm: float = 100.0
    seconds: float = 200.0
    mix: Mix = field(default_factory=Mix)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tier not in ("none", "host", "shared"):
            raise ValueError(f"tier={self.tier!r} is not one of none, host and shared")
        if not 0 <= self.prefill < self.cards:
            raise ValueError(f"prefill={self.prefill} cards of {self.cards} leave none for decoding")
        if self.simulated is not None and (self.prefill or not 1 <= self.simulated <= self.cards):
            raise ValueError(
                f"simulated={self.simulated} of {self.cards} cards, prefill={self.prefill}: give 1 or more of "
                "the cards, and no cards for prefill"
            )


class Outcome(NamedTuple):
    """What came of a setup, of the turns whose answers ended in the seconds that count.

    sent: prompts that came in these seconds. tokens: of answers, by the simulated cards. prompts: tokens of prompts; cached: of these not computed;
    fetched: of those from the tier. gaps: as of Replica.
    """

    setup: Setup
    cards: int
    sent: int
    tokens: int
    prompts: int
    cached: int
    fetched: int
    first: list[float]
    gaps: Counter[int]
    preemptions: int

    @property
    def speed(self) -> float:
        """Tokens of answers a second on each card."""
        return self.tokens / self.setup.seconds / self.cards

    def cost(self, dollars: float) -> float:
        """Of a million tokens of answers, if a card costs so much an hour."""
        return dollars / 3600 / self.speed * 1e6

    def gap(self, share: float) -> float:
        """Seconds between two tokens that `share` of all gaps stay within."""
        left = share * self.gaps.total()
        for tenths in sorted(self.gaps):
            left -= self.gaps[tenths]
            if left <= 0:
                return tenths * 1e-4
        return math.nan


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all stay within."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(len(ranked) * share))] if ranked else math.nan


class Fleet:
    """Cards, routers and users on one clock."""

    def __init__(self, setup: Setup, times: StepTimes, token_bytes: int) -> None:
        self.setup = setup
        self.times = times
        self.clock = Clock()
        self.users = Users(setup.users, setup.mix, setup.seed)
        self._token_bytes = token_bytes
        self.decode = self._router(setup.cards - setup.prefill)
        self.entry = self._router(setup.prefill) if setup.prefill else self.decode
        tokens = int(setup.tier_size * 1e9 / token_bytes)
        self._shared = Tier(tokens * setup.cards)
        """One tier for all cards; where each has its own, `_own` has them."""
        self._own = {replica: Tier(tokens) for replica in self.replicas}
        self._echo = Echo(times, setup.seed)
        self._chance = random.Random(setup.seed)
        self._sent = 0
        self.turns: list[Turn] = []
        """Those that ended in the seconds that count."""

    @property
    def replicas(self) -> list[Replica]:
        """All simulated cards."""
        return list(dict.fromkeys([*self.entry.replicas, *self.decode.replicas]))

    def _router(self, count: int) -> Router:
        setup = self.setup
        blocks = int(setup.cache * 1e9 / self._token_bytes / BLOCK)
        if blocks * BLOCK < 1.02 * setup.mix.context:
            raise ValueError(
                f"cache={setup.cache} GB holds {blocks * BLOCK} tokens, and a conversation may have "
                f"{setup.mix.context}; raise cache or lower context"
            )
        limits = Limits(setup.tokens, setup.sequences)
        options = (self.times, blocks, limits, setup.admission, setup.prefix_caching)
        replicas = [Replica(*options) for _ in range(setup.simulated or count)]
        # A card whose host holds blocks as well reports these to the router, too.
        tier = int(setup.tier_size * 1e9 / self._token_bytes / BLOCK) if setup.tier == "host" else 0
        return Router(setup.routing, count, replicas, setup.seed, blocks + tier)

    def run(self) -> Outcome:
        """Warm up, then count."""
        setup = self.setup
        for wait, turn in self.users.begin():
            self._remember(turn)
            self.clock.at(wait, self._send, turn)
        self.clock.run(setup.warm)
        self.turns.clear()
        self._sent = 0
        for replica in self.replicas:
            replica.gaps.clear()
        before = self._preemptions()
        self.clock.run(setup.warm + setup.seconds)
        return self._outcome(before)

    def _outcome(self, preemptions: int) -> Outcome:
        gaps: Counter[int] = Counter()
        for replica in self.replicas:
            gaps.update(replica.gaps)
        return Outcome(
            self.setup,
            len(self.replicas),
            self._sent,
            tokens=sum(turn.new for turn in self.turns),
            prompts=sum(turn.prompt for turn in self.turns),
            cached=sum(turn.cached for turn in self.turns),
            fetched=sum(turn.fetched for turn in self.turns),
            first=[turn.first - turn.sent for turn in self.turns],
            gaps=gaps,
            preemptions=self._preemptions() - preemptions,
        )

    def _preemptions(self) -> int:
        return sum(replica.scheduler.counts["preemptions"] for replica in self.replicas)

    # ---- the way of a turn

    def _send(self, turn: Turn) -> None:
        """A user sends a prompt."""
        turn.sent = self.clock.now
        self._route(self.entry, turn)

    def _route(self, router: Router, turn: Turn) -> None:
        """To a card, which gets what it lacks of the prompt from the tier or from the card that computed it."""
        place = router.send(turn)
        if place >= len(router.replicas):
            self.clock.at(self.clock.now + self._echo.seconds(turn), self._echoed, turn, place)
            return
        replica = router.replicas[place]
        entry = router is self.entry
        self._sent += entry and turn.first < 0
        count = self._stored(turn, replica) if entry else turn.prompt
        lacks = count - replica.cached(turn) if count else 0
        if lacks < BLOCK:
            self._enter(router, place, turn, 0)
            return
        speed = self.setup.tier_speed if entry else self.setup.link_speed
        # One transfer at a time reaches a card.
        replica.link_free = max(self.clock.now, replica.link_free) + lacks * self._token_bytes / (speed * 1e9)
        turn.fetched = lacks if entry else turn.fetched
        self.clock.at(replica.link_free, self._enter, router, place, turn, count)

    def _enter(self, router: Router, place: int, turn: Turn, count: int) -> None:
        """A prompt is on its card, with the blocks of its first `count` tokens."""
        replica = router.replicas[place]
        if count:
            replica.place(turn, count)
        replica.submit(turn, None if router is self.decode else 1)
        if replica.idle:
            self._begin(router, place)

    def _begin(self, router: Router, place: int) -> None:
        end = router.replicas[place].begin(self.clock.now)
        if end is not None:
            self.clock.at(end, self._end, router, place)

    def _end(self, router: Router, place: int) -> None:
        """A step is over."""
        for turn in router.replicas[place].end(self.clock.now):
            router.done(place)
            self._store(router, place, turn.conversation, turn.prompt + turn.produced)
            if turn.produced < turn.new:
                self._route(self.decode, turn)
            else:
                turn.finished = self.clock.now
                self.turns.append(turn)
                self._echo.learn(turn)
                self._answered(turn)
        self._begin(router, place)

    def _echoed(self, turn: Turn, place: int) -> None:
        turn.produced = turn.new
        self.decode.done(place)
        self._store(self.decode, place, turn.conversation, turn.prompt + turn.new)
        self._answered(turn)

    def _answered(self, turn: Turn) -> None:
        """The user reads, thinks and goes on."""
        wait, following = self.users.next(turn)
        self.clock.at(self.clock.now + wait, self._send, following)

    def _remember(self, turn: Turn) -> None:
        """A conversation that goes on was computed somewhere before the clock started."""
        if not turn.history:
            return
        place = self._chance.randrange(len(self.decode.loads))
        self.decode.note(turn, place)
        self._store(self.decode, place, turn.conversation, turn.history)
        if place < len(self.decode.replicas):
            self.decode.replicas[place].place(turn, turn.history)

    def _store(self, router: Router, place: int, conversation: int, tokens: int) -> None:
        """Write what a card has computed through to its tier."""
        if self.setup.tier == "shared":
            self._shared.store(conversation, tokens)
        elif self.setup.tier == "host" and place < len(router.replicas):
            self._own[router.replicas[place]].store(conversation, tokens)

    def _stored(self, turn: Turn, replica: Replica) -> int:
        """How many tokens of a prompt the tier of a card has, in full blocks."""
        if self.setup.tier == "none":
            return 0
        tier = self._shared if self.setup.tier == "shared" else self._own[replica]
        return min(tier.find(turn.conversation), turn.prompt - 1) // BLOCK * BLOCK
