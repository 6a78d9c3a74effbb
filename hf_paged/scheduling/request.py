"""Requests in the books: their sequences, and how far each has come."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from hashlib import blake2b

from ..blocks import BlockTable, Prompt
from ..blocks.pool import NOWHERE
from .adapter_slots import AdapterNames
from .limits import KVCacheGroup, finest, name_size

UNKNOWN = -1
"""In the place of a token id: there is none."""
NO_ROW = -1
"""The row of a sequence that does not run."""


class Status(Enum):
    """Which queue a group is in. Only the scheduler writes it."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(frozen=True)
class Request:
    """A request as the scheduler sees it.

    number: its place in the order of arrival. prompt: token ids. most_tokens: how long a sequence may become,
    prompt included. width: how many sequences it becomes after its prompt (samples or beams). priority:
    higher is sooner, if the policy uses it. extra: what changes keys and values for the same tokens (C24).
    source: tokens that it attends to across, of its encoder or its pictures. source_key: their content;
    without it no prefix is shared. batchable: whether its sequences may be in the table of rows. adapter:
    names, adapter_key: their content, adapter_start: the first token that they compute; those before it have
    the blocks of the model alone. scored: numbers for each token of its prompt. tenant: for cache_shares.
    given: its first tokens whose keys and values are given, and not computed. task: the number of its task,
    -1 for none. whole: whether all tokens of a forward change each other, so that its prompt is computed at
    once, its other tokens one by one, and no prefix is shared.
    """

    number: int
    prompt: tuple[int, ...]
    most_tokens: int
    width: int = 1
    priority: int = 0
    extra: bytes = b""
    source: int = 0
    batchable: bool = True
    source_key: bytes = b""
    adapter: AdapterNames = ()
    adapter_key: bytes = b""
    scored: int = 0
    tenant: str = ""
    adapter_start: int = 0
    given: int = 0
    task: int = -1
    whole: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.priority, int):  # whatever cannot be put in order would break the order of all
            raise TypeError(f"priority={self.priority!r} is not an int; higher is sooner")
        if not isinstance(self.tenant, str):
            raise TypeError(f"tenant={self.tenant!r} is not a str; give the name of a tenant")

    @cached_property
    def shares(self) -> bool:
        """True if `key` and the tokens determine its keys and values, so that prefixes can be shared."""
        return not self.whole and (not self.source or bool(self.source_key))

    @cached_property
    def key(self) -> bytes:
        """The extra key of its blocks (C24)."""
        adapter_key = b"" if self.adapter_start else self.adapter_key
        return self.extra + adapter_key + self.source_key

    @property
    def first_adapter(self) -> AdapterNames:
        """The adapter of its first token, and of what is shown in its prompt."""
        return () if self.adapter_start else self.adapter

    @property
    def names(self) -> list[int]:
        """The names of its prompt's tokens in blocks: ids, but for the one with which its adapter begins
        behind others. Its name contains the adapter's content, and so do all blocks from there on.
        """
        names = list(self.prompt)
        place = self.adapter_start
        if place and self.adapter_key:
            content = self.adapter_key + names[place].to_bytes(8, "little", signed=True)
            names[place] = -2 - (int.from_bytes(blake2b(content, digest_size=8).digest(), "big") >> 2)
        return names


class TokenSequence:
    """Tokens, and how many of them have keys and values: `computed` catches up with `tokens`, for whatever
    reason it is behind.

    A prefix hit begins further on, a chunk covers a part, decoding is one behind, a preempted sequence starts
    again at 0 or, if it was swapped, where it was. `tokens` are those that the host has; where all of them
    are computed, the next one is sampled and on its way to the host.
    """

    __slots__ = (
        "begun", "computed", "drafts", "group", "index", "parked", "row", "tables", "tokens", "waits",
    )  # fmt: skip

    def __init__(
        self, group: SequenceGroup, index: int, tokens: list[int], tables: tuple[BlockTable, ...]
    ) -> None:
        self.group = group
        self.index = index
        self.tokens = tokens
        self.tables = tables
        self.parked: tuple[BlockTable, ...] = ()
        """Its tables in the pools of the host while it is swapped; the others are empty then."""
        self.computed = 0
        self.begun = False
        """True once its tables have been through a forward, so that its cross-attention table is filled."""
        self.row = NO_ROW
        """The row of the batch that it owns while it runs."""
        self.drafts = 0
        """How many of its last tokens are guesses, which a step has still to judge."""
        self.waits = False
        """True while it takes no token, though it runs."""

    def __repr__(self) -> str:
        name = f"{self.group.request.number}.{self.index}"
        return f"Sequence({name}, computed={self.computed} of {self.length})"

    @property
    def length(self) -> int:
        """Its tokens, with one that is on its way to the host."""
        known = len(self.tokens)
        return known if known > self.computed else self.computed + 1

    @property
    def behind(self) -> int:
        """How many tokens are still to be computed."""
        return self.length - self.computed

    @property
    def pending(self) -> int:
        """How many tokens the next step takes, if it has room."""
        return 0 if self.waits else self.behind

    @property
    def complete(self) -> bool:
        """True if it is as long as it may become: at most its last token is on its way to the host."""
        return self.length >= self.group.request.most_tokens

    def keep_drafts(self, count: int) -> None:
        """Forget the guesses behind its last token but for the first `count`; none of them is computed."""
        del self.tokens[len(self.tokens) - self.drafts + count :]
        self.drafts = count

    def growth(self, kv_group: int, count: int) -> int:
        """By how many tokens a table grows in a step of `count`: by so many, or in a first step by all that
        it attends to across (C36).
        """
        kind = self.group.kv_groups[kv_group].kind
        return kind.growth(count, self.tables[kv_group].length, self.group.request.source)

    def free(self) -> None:
        """Give back every block, wherever it is (C30, C34)."""
        for table in (*self.tables, *self.parked):
            table.free()
        self.parked = ()
        self.computed = 0
        self.begun = False
        self.keep_drafts(0)
        self.waits = False


class SequenceGroup:
    """The sequences of one request: admitted, preempted and resumed as one.

    Until it is forked only the first sequence has blocks: it computes the `common` tokens for all of them,
    which are the prompt, or after a preemption whatever they still have in common (C30).
    """

    def __init__(self, request: Request, kv_groups: tuple[KVCacheGroup, ...]) -> None:
        self.request = request
        self.kv_groups = kv_groups
        self.status = Status.WAITING
        self.sequences = [
            TokenSequence(self, i, request.names, self._new_tables()) for i in range(request.width)
        ]
        self.preemptions = 0
        self.setbacks = 0
        """How many of them were for want of blocks: the more, the more room it waits for."""
        self.passed_over = 0
        """In how many steps it waited for its adapter, or alone for its tenant's share."""
        self.cached_tokens = 0
        """How many tokens of the prompt were there already when it was first admitted."""
        self.awaits_tokens = False
        """True if it was preempted while tokens were on their way to the host: it runs again behind them."""
        self.parts_at = 0
        """The tokens that it has in common with blocks that are cached, whatever states are."""
        self.stops: list[int] = []
        """Where its chunks end, to leave a snapshot of its states."""
        self.in_flight: list[bytes] = []
        """Names of the blocks that it has still to compute and that others wait for."""
        self._prompt: Prompt | None = None
        self.reset_to_common()

    def __repr__(self) -> str:
        return f"Group({self.request.number}, {self.status.value}, {self.sequences})"

    def _new_tables(self) -> tuple[BlockTable, ...]:
        return tuple(BlockTable(each.pool, tenant=self.request.tenant) for each in self.kv_groups)

    def leave_table(self) -> None:
        """Its tokens turn out to have other positions than expected: its rows are planned one by one."""
        if self.request.batchable:
            self.request = replace(self.request, batchable=False)

    def rekey(self, adapter_key: bytes) -> None:
        """Its adapter has another content now; it has no blocks."""
        self.request = replace(self.request, adapter_key=adapter_key)
        names = self.request.names
        for sequence in self.sequences:
            sequence.tokens[: len(names)] = names
        self._prompt = None

    @property
    def leader(self) -> TokenSequence:
        """The sequence that computes what all have in common."""
        return self.sequences[0]

    @property
    def length(self) -> int:
        """The tokens of its longest sequence, with one that is on its way to the host."""
        return max([sequence.length for sequence in self.sequences])

    @property
    def swapped(self) -> bool:
        """True while it waits on the host."""
        return bool(self.leader.parked)

    @property
    def decoding(self) -> bool:
        """True if the next step takes exactly one token of every sequence."""
        if not self.forked or self.complete:
            return False
        # A generator would cost more than the comparison, for every group in every step.
        for sequence in self.sequences:  # noqa: SIM110
            if len(sequence.tokens) - sequence.computed > 1:
                return False
        return True

    @property
    def complete(self) -> bool:
        """True if its sequences are as long as they may become: at most their last tokens are on their way to
        the host.
        """
        most = self.request.most_tokens
        # A generator would cost more than the comparison, for every group in every step.
        for sequence in self.sequences:  # noqa: SIM110
            if sequence.length < most:
                return False
        return True

    def reset_to_common(self) -> None:
        """Begin again, unforked, with what the sequences have in common."""
        self.forked = len(self.sequences) == 1
        self.common = _common([sequence.tokens for sequence in self.sequences])
        self._prompt = None

    def fork(self) -> None:
        """Give every sequence the leader's blocks; this never allocates and cannot fail (C13)."""
        self.forked = True
        for sequence in self.sequences[1:]:
            sequence.tables = tuple(table.fork() for table in self.leader.tables)
            sequence.computed = self.leader.computed
            sequence.begun = self.leader.begun

    def seek_runs(self) -> None:
        """With blocks of one token a prompt is placed where all of it can lie side by side, if there is such
        a place (C38).
        """
        for table in self.leader.tables:
            if not table.blocks and table.pool.block_size == 1:
                run = table.pool.find_run(self.common)
                table.near = NOWHERE if run is None else run

    def advance(self, room: int) -> list[tuple[TokenSequence, int]]:
        """How many of `room` tokens each sequence takes.

        The sequences of a group take their last token together, so that beams can be compared and samples
        stay equally long.
        """
        if self.complete:
            return []
        if not self.forked:
            count = min(self.common - self.leader.computed, room)
            return self._steps([(self.leader, count)])
        running = [sequence for sequence in self.sequences if sequence.pending and not sequence.complete]
        if sum(sequence.behind for sequence in running) <= room:
            return self._steps([(sequence, sequence.behind) for sequence in running])
        steps = []
        for sequence in running:
            found = self._steps([(sequence, min(sequence.behind - 1, room))])
            steps += found
            room -= sum([count for _, count in found])
        return steps

    def _steps(self, most: list[tuple[TokenSequence, int]]) -> list[tuple[TokenSequence, int]]:
        """The tokens of sequences that have room for so many, up to their stops."""
        found = [(sequence, self._to_stop(sequence, count)) for sequence, count in most if count > 0]
        return [each for each in found if each[1]]

    def _to_stop(self, sequence: TokenSequence, count: int) -> int:
        """`count` tokens of a sequence, or those up to the next stop."""
        if self.request.whole:
            piece = max(1, len(self.request.prompt) - sequence.computed)
            return piece if count >= piece else 0
        border = max(self.request.adapter_start, self.request.given)  # what is given has no adapter
        if sequence.computed < border:
            count = min(count, border - sequence.computed)
        place = bisect_right(self.stops, sequence.computed)
        return min(count, self.stops[place] - sequence.computed) if place < len(self.stops) else count

    def need(self, kv_group: int, chunk: int) -> int:
        """The blocks that the tokens so far fill. The common prefix is counted once; with a window, only what
        it can see.
        """
        return self._need(kv_group, self.length, chunk)

    def most(self, kv_group: int, chunk: int) -> int:
        """The blocks that it may come to need to its end."""
        return self._need(kv_group, self.request.most_tokens, chunk)

    def _need(self, kv_group: int, tokens: int, chunk: int) -> int:
        width, source = len(self.sequences), self.request.source
        return self.kv_groups[kv_group].need(width, self.common, tokens, chunk, source)

    def held(self, kv_group: int) -> int:
        """The blocks that the group's tables name, each counted once."""
        if not self.forked or len(self.sequences) == 1:
            return len(self.leader.tables[kv_group].blocks)
        return len({block for sequence in self.sequences for block in sequence.tables[kv_group].blocks})

    @property
    def block_size(self) -> int:
        """Tokens of its smallest blocks; 0 if none of them becomes full."""
        pool = self.kv_groups[finest(self.kv_groups)].pool
        return pool.block_size if pool.fills else 0

    @property
    def prompt(self) -> Prompt:
        """The tokens that the leader computes for all sequences, with the digests of its full blocks of the
        smallest size; without such blocks, of as many tokens as a name has.
        """
        if self._prompt is None:
            tokens = self.leader.tokens[: self.common]
            self._prompt = Prompt(tokens, name_size(self.kv_groups), self.request.key)
        return self._prompt

    def names(self) -> list[bytes]:
        """The digests of those full blocks, without the one that holds the last token (C21)."""
        prompt = self.prompt
        return prompt.digests[: (self.common - 1) // prompt.size]


def _common(rows: list[list[int]]) -> int:
    """How many leading tokens all rows share; of rows of several lengths not the last of any, which each
    computes by itself to be sampled from.
    """
    if len(rows) == 1:
        return len(rows[0])
    lengths = {len(row) for row in rows}
    return next(
        (i for i, column in enumerate(zip(*rows, strict=False)) if len(set(column)) > 1),
        min(lengths) - (len(lengths) > 1),
    )
