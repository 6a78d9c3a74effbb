"""A record of an engine's steps: who ran, who came and went, and whose every block was. Read back, it is what
a block map is drawn from.

    with engine.trace("steps.jsonl"):
        engine.generate(prompts)
    print(hf_paged.trace.read("steps.jsonl"))

JSON lines, packed with gzip if the name ends with ".gz": a header, one line for each step, a last line.
Tables are written as what changed in them.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import IO, Any, NamedTuple, cast

from .picture import PoolView, block_line, card, counted, heading, pool_picture, views_legend

VERSION = 1
PLAIN = (
    "rows", "admitted", "preempted", "ended", "arrived", "states", "names", "copies", "evicted", "counted",
    "sampled",
)  # fmt: skip
"""Fields of a step that are written as they are."""
LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"


class TraceError(ValueError):
    """A file that is no trace, or not a whole one."""


class Name(NamedTuple):
    """A sequence: the number of its request in the order of arrival, and its own among the request's samples
    or beams.
    """

    request: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.request}.{self.sequence}"


class Row(NamedTuple):
    """Tokens of a step: so many `tokens` of a sequence from position `start` on."""

    request: int
    sequence: int
    start: int
    tokens: int


class Arrival(NamedTuple):
    """A request that is new to the trace: the tokens of its prompt, the most that a sequence of it may have,
    and how many sequences it becomes.
    """

    request: int
    prompt: int
    most: int
    width: int


class Ended(NamedTuple):
    """A request that ended in a step or between it and the next, and why."""

    request: int
    reason: str


class Blocks(NamedTuple):
    """A pool during a step: blocks held, blocks held by more than one table, cached, free; and the blocks in
    the host's memory.
    """

    held: int
    shared: int
    cached: int
    free: int
    swapped: int = 0


class Table(NamedTuple):
    """The blocks of a sequence in order of position, after the `released` ones that a sliding window has
    passed.
    """

    released: int
    blocks: tuple[int, ...]


class Change(NamedTuple):
    """How a table changed: of its blocks from number `released` on the first `same` stayed, and `new` ones
    follow them.
    """

    released: int
    same: int
    new: tuple[int, ...]

    def apply(self, old: Table) -> Table:
        """The table after the change."""
        kept = (
            old.blocks[self.released - old.released :][: self.same] if self.released >= old.released else ()
        )
        if len(kept) < self.same:
            raise ValueError(f"{self} does not fit {old}")
        return Table(self.released, kept + self.new)


class Kind(NamedTuple):
    """A kind of layer: its name, its window (None: all tokens), and how many blocks its pool has."""

    name: str
    window: int | None
    total: int

    @property
    def unit(self) -> str:
        """The word for its blocks: that of states is the slot of a sequence of any length."""
        return "slots" if self.name == "state" else "blocks"

    def counted(self, block_size: int) -> str:
        """The blocks of its pool, in words."""
        return f"{self.total} {self.unit}" + ("" if self.unit == "slots" else f" of {block_size} tokens")

    @property
    def title(self) -> str:
        """Its layers, in words."""
        if self.unit == "slots":
            return "recurrent states"
        return (
            f"{self.name} attention" if self.window is None else f"attention to the last {self.window} tokens"
        )


@dataclass(frozen=True)
class Step:
    """A step as it ran. The first record of a trace has no rows: it shows the state at its beginning.

    at: seconds since the trace began. preempted: the groups preempted since the step before.
    waiting, running, preempted_waiting: how many requests there were of each.
    blocks: of each kind of layer. tables: for each kind the tables that changed; None for a sequence that
        holds no blocks any more.
    cached: for each kind the blocks that came into the cache and those that left it.
    arrived: the requests that are new. states: the requests that changed to "waiting", "running" or
        "preempted".
    names: for each kind the first digits of the digests of blocks that got another one, None for none.
    copies: for each kind the copies on write since the record before, from block to block. evicted: for each
        kind the cached blocks that were given up for other content.
    host: for each kind the blocks of sequences that came to wait in the host's memory; None for a sequence
        that does not wait there any more.
    counted: what was counted since the record before, by the names of `Engine.stats()`.
    sampled: how many tokens were chosen since then.
    """

    number: int
    at: float
    rows: tuple[Row, ...] = ()
    admitted: tuple[int, ...] = ()
    preempted: tuple[int, ...] = ()
    ended: tuple[Ended, ...] = ()
    waiting: int = 0
    running: int = 0
    preempted_waiting: int = 0
    blocks: tuple[Blocks, ...] = ()
    tables: Mapping[Name, tuple[Change, ...] | None] = field(default_factory=dict)
    cached: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    arrived: tuple[Arrival, ...] = ()
    states: Mapping[int, str] = field(default_factory=dict)
    names: tuple[Mapping[int, str | None], ...] = ()
    copies: tuple[tuple[tuple[int, int], ...], ...] = ()
    evicted: tuple[tuple[int, ...], ...] = ()
    host: Mapping[Name, tuple[tuple[int, ...], ...] | None] = field(default_factory=dict)
    counted: Mapping[str, int] = field(default_factory=dict)
    sampled: int = 0

    @property
    def tokens(self) -> int:
        """The tokens of the step."""
        return sum(row.tokens for row in self.rows)


@dataclass(frozen=True)
class BlockMap:
    """Which block belongs to which sequence during a step: for each sequence its table of each kind of layer,
    and the cached blocks.

    others: blocks that others hold, of whom nothing more is known. A notebook shows a map as a picture.
    """

    step: Step
    kinds: tuple[Kind, ...]
    tables: Mapping[Name, tuple[Table, ...]]
    cached: tuple[frozenset[int], ...]
    block_size: int
    others: tuple[frozenset[int], ...] = ()

    def owners(self, kind: int = 0) -> dict[int, tuple[Name, ...]]:
        """The sequences that hold each block."""
        found: dict[int, list[Name]] = {}
        for name, tables in self.tables.items():
            for block in tables[kind].blocks:
                found.setdefault(block, []).append(name)
        return {block: tuple(names) for block, names in sorted(found.items())}

    def view(self, kind: int = 0) -> PoolView:
        """The blocks of a kind of layer that are in use."""
        holders = {block: [name.request for name in names] for block, names in self.owners(kind).items()}
        others = self.others[kind] if self.others else ()
        return PoolView(self.kinds[kind].total, holders, self.cached[kind], others)

    def draw(self, kind: int = 0, width: int = 64, whole: bool = False) -> str:
        """The blocks in order, a sign for each: its request's last digit or letter, "*" of several requests,
        "#" of others, ":" cached, "." free. Free blocks behind those in use are a number, unless the `whole`
        pool is asked for.
        """
        view = self.view(kind)
        shown = view.total if whole else view.shown
        signs = ["."] * shown
        for block in self.cached[kind]:
            signs[block] = ":"
        for block in view.others:
            signs[block] = "#"
        for block, names in view.holders.items():
            signs[block] = LETTERS[min(names) % len(LETTERS)] if len(set(names)) == 1 else "*"
        lines = ["".join(signs[i : i + width]) for i in range(0, shown, width)]
        if shown < view.total:
            lines.append(f"+{view.total - shown:,} free")
        return "\n".join(lines)

    def __str__(self) -> str:
        return "\n".join(
            f"step {self.step.number}, {kind.name}\n{self.draw(i)}" for i, kind in enumerate(self.kinds)
        )

    def picture(self, title: str, *lines: str, noun: str = "request") -> str:
        """The map as a static picture in HTML, under a title and lines of text. noun: the word for those who
        hold blocks.
        """
        views = [self.view(i) for i in range(len(self.kinds))]
        parts = []
        for i, (kind, view) in enumerate(zip(self.kinds, views, strict=True)):
            counts = {**view.counts(), "on the host": self.step.blocks[i].swapped if self.step.blocks else 0}
            parts.append(heading(f"{kind.title}: {view.total:,} {kind.unit}", counted(counts)))
            parts.append(pool_picture(view, noun))
        return card(title, (*lines, block_line(self.block_size)), [*parts, views_legend(views, noun)])

    def _repr_html_(self) -> str:
        seconds = f"{self.step.at:.2f} s, {len(self.step.rows)} sequences compute {self.step.tokens} tokens"
        return self.picture(f"step {self.step.number}", seconds)


class MapState:
    """A block map that steps change, and what else of them lasts: for a reader that follows a trace."""

    def __init__(self, kinds: tuple[Kind, ...]) -> None:
        self.kinds = kinds
        self.tables: dict[Name, tuple[Table, ...]] = {}
        self.cached: list[set[int]] = [set() for _ in kinds]
        self.names: list[dict[int, str]] = [{} for _ in kinds]
        self.host: dict[Name, tuple[tuple[int, ...], ...]] = {}
        self.arrived: dict[int, Arrival] = {}
        self.states: dict[int, str] = {}
        self.computed: dict[Name, int] = {}
        """The tokens of each sequence that its last row reached."""
        self._empty = tuple(Table(0, ()) for _ in kinds)

    def apply(self, step: Step) -> None:
        """The state after a step."""
        self._apply_tables(step)
        for blocks, (came, left) in zip(self.cached, step.cached, strict=True):
            blocks.difference_update(left)
            blocks.update(came)
        for known, names in zip(self.names, step.names, strict=False):
            for block, name in names.items():
                if name is None:
                    known.pop(block, None)
                else:
                    known[block] = name
        for sequence, waiting in step.host.items():
            self.host.pop(sequence, None)
            if waiting is not None:
                self.host[sequence] = waiting
        self.arrived.update({each.request: each for each in step.arrived})
        self.states.update(step.states)
        for row in step.rows:
            self.computed[Name(row.request, row.sequence)] = row.start + row.tokens
        for ended in step.ended:
            self.arrived.pop(ended.request, None)
            self.states.pop(ended.request, None)

    def _apply_tables(self, step: Step) -> None:
        for name, changes in step.tables.items():
            if changes is None:
                del self.tables[name]
                self.computed.pop(name, None)
            else:
                old = self.tables.get(name, self._empty)
                self.tables[name] = tuple(map(Change.apply, changes, old))

    def whole(self, last: Step) -> Step:
        """All of it as one step after none, with the counts of the last step."""
        return Step(
            last.number,
            last.at,
            tuple(Row(*name, count, 0) for name, count in self.computed.items()),
            waiting=last.waiting,
            running=last.running,
            preempted_waiting=last.preempted_waiting,
            blocks=last.blocks,
            tables={
                name: tuple(Change(table.released, 0, table.blocks) for table in tables)
                for name, tables in self.tables.items()
            },
            cached=tuple((tuple(sorted(blocks)), ()) for blocks in self.cached),
            arrived=tuple(self.arrived.values()),
            states=dict(self.states),
            names=tuple(dict(each) for each in self.names),
            host=dict(self.host),
        )


@dataclass(frozen=True)
class Trace:
    """The result of `read`. whole: whether it was written to its end. host: for each kind the most blocks
    that may wait in the host's memory.
    """

    model: str
    block_size: int
    kinds: tuple[Kind, ...]
    max_batch_tokens: int
    max_batch_sequences: int
    steps: tuple[Step, ...]
    whole: bool = True
    host: tuple[int, ...] = ()

    def maps(self) -> Iterator[BlockMap]:
        """The block map of every step, one after the other."""
        state = MapState(self.kinds)
        for step in self.steps:
            state.apply(step)
            tables = MappingProxyType(dict(state.tables))
            yield BlockMap(step, self.kinds, tables, tuple(map(frozenset, state.cached)), self.block_size)

    def map(self, number: int = -1) -> BlockMap:
        """The block map of step `number`; a negative number counts from the end."""
        count = len(self.steps)
        place = number + count if number < 0 else number
        if not 0 <= place < count:
            raise IndexError(f"step {number} is not in this trace; it has steps 0 to {count - 1}")
        return next(islice(self.maps(), place, None))

    def __str__(self) -> str:
        reasons = Counter(ended.reason for step in self.steps for ended in step.ended)
        seconds = self.steps[-1].at if self.steps else 0.0
        lines = [
            f"{self.model}: {max(0, len(self.steps) - 1)} steps in {seconds:.2f} s, "
            f"{sum(step.tokens for step in self.steps):,} tokens"
            + ("" if self.whole else "; the trace breaks off"),
            f"requests   {len({number for step in self.steps for number in step.admitted})} admitted, "
            f"{sum(len(step.preempted) for step in self.steps)} times one was preempted, "
            f"{sum(reasons.values())} ended"
            + "".join(f", {count} {reason}" for reason, count in sorted(reasons.items())),
        ]
        for i, kind in enumerate(self.kinds):
            most = [max((step.blocks[i][place] for step in self.steps), default=0) for place in range(5)]
            swapped = f", {most[4]} swapped" if most[4] else ""
            lines.append(
                f"{kind.name:<10} {kind.counted(self.block_size)}: at most {most[0]} held, "
                f"{most[1]} shared, {most[2]} cached{swapped}"
            )
        return "\n".join(lines)


# ---- files


class Writer:
    """Writes the lines of a trace: the header at once, a step when it is handed over, the last line at
    `close`.
    """

    def __init__(self, path: str | os.PathLike[str], trace: Trace) -> None:
        self.path = path
        self._file = _open(path, "w")
        self.count = 0
        """The steps so far."""
        self._line(encode_header(trace))

    def __repr__(self) -> str:
        return os.fspath(self.path)

    def write(self, step: Step) -> None:
        """Add a step."""
        self._line(encode(step))
        self.count += 1

    def close(self) -> None:
        """Mark the end of the trace."""
        with self._file:
            self._line({"steps": self.count})

    def abandon(self) -> None:
        """Close a file that cannot be written."""
        with contextlib.suppress(OSError):  # what could not be written is tried once more
            self._file.close()

    def _line(self, value: dict[str, Any]) -> None:
        self._file.write(json.dumps(value, separators=(",", ":")) + "\n")


def read(path: str | os.PathLike[str], partial: bool = False) -> Trace:
    """Read a trace. One that breaks off is an error, unless `partial` requests the steps before."""
    steps: list[Step] = []
    header: Trace | None = None
    with _open(path, "r") as file:
        try:
            for number, line in enumerate(file, 1):
                if header is None:
                    header = _header(path, line)
                    continue
                value = _json(path, number, line)
                if value is None or "at" not in value:
                    file.read(1)  # at the end gzip compares its sum
                    break
                try:
                    steps.append(_decode(len(steps), value, header))
                except (LookupError, TypeError, ValueError, AttributeError) as error:
                    raise TraceError(
                        f"line {number} of {path} is not a step of a trace ({error}); it was written over or "
                        "changed"
                    ) from error
            else:
                value = None
        except (EOFError, UnicodeDecodeError, gzip.BadGzipFile, zlib.error) as error:
            if header is None:
                raise TraceError(f"{path} is not a trace of hf_paged ({error})") from error
            value = None
    if header is None:
        raise TraceError(f"{path} is empty; a trace of hf_paged begins with a header")
    whole = value is not None and value.get("steps") == len(steps)
    if not whole and not partial:
        raise TraceError(
            f"{path} is cut off after {len(steps)} records: it is still being written, or its writer was "
            "stopped, or it is damaged; partial=True, or hf-paged trace --partial, gives what is there"
        )
    return Trace(
        header.model,
        header.block_size,
        header.kinds,
        header.max_batch_tokens,
        header.max_batch_sequences,
        tuple(steps),
        whole=whole,
        host=header.host,
    )


def _open(path: str | os.PathLike[str], mode: str) -> IO[str]:
    if os.fspath(path).endswith(".gz"):
        return cast(IO[str], gzip.open(path, mode + "t", encoding="utf-8"))
    return open(path, mode, encoding="utf-8")


def _json(path: object, number: int, line: str) -> dict[str, Any] | None:
    """The object of a line; None for one that was not written to its end."""
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        if not line.endswith("\n"):
            return None
        raise TraceError(
            f"line {number} of {path} is broken ({error}); it was written over or changed"
        ) from error
    if not isinstance(value, dict):
        raise TraceError(f"line {number} of {path} is {line[:40]!r}, expected an object")
    return value


def _header(path: object, line: str) -> Trace:
    try:
        value = json.loads(line)
        is_trace = value["hf_paged"] == "trace"
    except (ValueError, LookupError, TypeError, RecursionError):
        is_trace = False
    if not is_trace:
        raise TraceError(f"{path} is not a trace of hf_paged: it begins with {line[:40]!r}")
    if value.get("version") != VERSION:
        raise TraceError(
            f"{path} is a trace of version {value.get('version')!r} and this hf_paged reads version {VERSION}"
        )
    try:
        tokens, sequences = value["budgets"]
        kinds = tuple(Kind(*kind) for kind in value["kinds"])
        host = tuple(value.get("host", ()))
        return Trace(value["model"], value["block_size"], kinds, tokens, sequences, (), host=host)
    except (LookupError, TypeError, ValueError) as error:
        raise TraceError(
            f"the header of {path} is broken ({error}); it was written over or changed"
        ) from error


def encode_header(trace: Trace) -> dict[str, Any]:
    """The first line of a trace as plain values."""
    value: dict[str, Any] = {
        "hf_paged": "trace",
        "version": VERSION,
        "model": trace.model,
        "block_size": trace.block_size,
        "kinds": trace.kinds,
        "budgets": [trace.max_batch_tokens, trace.max_batch_sequences],
    }
    return {**value, "host": trace.host} if trace.host else value


def encode(step: Step) -> dict[str, Any]:
    """A step as plain values; what is empty is left out."""
    value: dict[str, Any] = {
        "at": round(step.at, 6),
        "requests": [step.waiting, step.running, step.preempted_waiting],
        "blocks": [each if each.swapped else each[:4] for each in step.blocks],
    }
    value |= {name: getattr(step, name) for name in PLAIN if getattr(step, name)}
    if step.tables:
        value["tables"] = {str(name): changes for name, changes in step.tables.items()}
    if any(came or left for came, left in step.cached):
        value["cached"] = step.cached
    if step.host:
        value["host"] = {str(name): blocks for name, blocks in step.host.items()}
    return value


def _decode(number: int, value: Mapping[str, Any], header: Trace) -> Step:
    waiting, running, preempted_waiting = value["requests"]
    blocks = tuple(Blocks(*each) for each in value["blocks"])
    if [each.held + each.cached + each.free for each in blocks] != [kind.total for kind in header.kinds]:
        raise ValueError(
            f"blocks {[tuple(each) for each in blocks]} do not add up to "
            f"{[kind.total for kind in header.kinds]}"
        )
    tables: dict[Name, tuple[Change, ...] | None] = {}
    for name, changes in value.get("tables", {}).items():
        tables[_name(name)] = (
            None
            if changes is None
            else tuple(Change(released, same, tuple(new)) for released, same, new in changes)
        )
    host = value.get("host", {}).items()
    return Step(
        number,
        value["at"],
        tuple(Row(*row) for row in value.get("rows", ())),
        tuple(value.get("admitted", ())),
        tuple(value.get("preempted", ())),
        tuple(Ended(*each) for each in value.get("ended", ())),
        waiting,
        running,
        preempted_waiting,
        blocks,
        MappingProxyType(tables),
        tuple(
            (tuple(came), tuple(left)) for came, left in value.get("cached", [[(), ()] for _ in header.kinds])
        ),
        tuple(Arrival(*each) for each in value.get("arrived", ())),
        {int(number): str(state) for number, state in value.get("states", {}).items()},
        tuple({int(block): name for block, name in each.items()} for each in value.get("names", ())),
        tuple(tuple((source, target) for source, target in each) for each in value.get("copies", ())),
        tuple(tuple(each) for each in value.get("evicted", ())),
        {_name(name): None if blocks is None else tuple(map(tuple, blocks)) for name, blocks in host},
        dict(value.get("counted", {})),
        value.get("sampled", 0),
    )


def _name(text: str) -> Name:
    request, sequence = text.split(".")
    return Name(int(request), int(sequence))
