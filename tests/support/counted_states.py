"""A layer whose state is the list of the tokens that it was advanced by: what is applied twice, or not at all,
shows.

A model of the tests is given one before its first decoder layer. A token's answer depends on all tokens in its
sequence's state, and every read of a state is noted with the token that reads it. Slots are the test's choice:
`in_place`, or a second slot for each sequence, which the next step reads.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from hf_paged.engine.worker import cache as engine_cache
from hf_paged.generate import cache as generate_cache
from hf_paged.model import support
from hf_paged.model.cache_name import CACHE, OLDER
from hf_paged.model.slots import Slot
from hf_paged.model.state_slots import NO_SLOT, SlotStates, StateRow, StateSlots


class Read(NamedTuple):
    """A token that has read a state."""

    owner: Any
    place: int
    """Of the token in its sequence."""
    state: tuple[int, ...]
    """The tokens in the state."""
    rows: int
    """The rows of its step: in generate() equal ones may be one."""


class CountedStates(SlotStates):
    """States by owner: one slot each, or two that are read and written in turns."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.content: dict[int, tuple[int, ...]] = {}
        self.slots_by_owner: dict[Any, tuple[int, int]] = {}
        self.sequences: dict[int, Any] = {}
        """The owners of an engine's rows; a row that is not there is its own."""
        self.reads: list[Read] = []
        self.runs: list[tuple[tuple[Any, int, int], ...]] = []
        """The rows of every run that advanced states."""
        self.last_ids: list[list[int]] = []
        """The tokens of the last run."""
        self.after: Callable[[CountedStates], object] = lambda states: None
        """Called in the middle of a run, when its states are advanced and its later layers are not computed."""
        self._numbers = itertools.count()

    def slots_of(self, rows: Sequence[StateRow]) -> StateSlots:
        read = []
        written = []
        for row, start, _ in rows:
            owner = self.sequences.get(row, row)
            if owner not in self.slots_by_owner:
                self.slots_by_owner[owner] = next(self._numbers), next(self._numbers)
            one, other = self.slots_by_owner[owner]
            if self.tokens.get(other) == start and self.tokens.get(one) != start:
                one, other = other, one
            read.append(one if start else NO_SLOT)
            written.append(one if self.in_place else other)
        return StateSlots(tuple(read), tuple(written))

    def fork(self, owners: Sequence[Any]) -> None:
        """Row i becomes what row owners[i] was."""
        made = {}
        for row, owner in enumerate(owners):
            made[row] = next(self._numbers), next(self._numbers)
            for new, old in zip(made[row], self.slots_by_owner.get(owner, ()), strict=False):
                if old in self.tokens:
                    self.tokens[new] = self.tokens[old]
                    self.content[new] = self.content[old]
        self.slots_by_owner = made

    def advance(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> list[list[tuple[int, ...]]]:
        """Advance the states of some rows of the running step: the tokens in the state behind each token."""
        found = []
        for i, tokens in zip(rows, ids, strict=True):
            row, start, count = self.rows[i]
            owner = self.sequences.get(row, row)
            assert len(tokens) == count
            slot = self.slots.read[i]
            state = () if slot == NO_SLOT else self.content[slot]
            states = []
            for place, token in enumerate(tokens):
                self.reads.append(Read(owner, start + place, state, len(self.rows)))
                state = (*state, token)
                states.append(state)
            self.content[self.slots.written[i]] = state
            found.append(states)
        self.runs.append(tuple(self.rows[i][:3] for i in rows))
        self.last_ids = [list(tokens) for tokens in ids]
        self.after(self)
        return found


class CountingLayer:
    """A cache's layer with counted states, and what transformers asks of layers."""

    is_initialized = True
    is_croppable = True
    is_compileable = False
    is_sliding = False
    complete = True
    path = "paged"

    def __init__(self, states: CountedStates, step: Any = None) -> None:
        self.states = states
        self.step = step
        self.row = -1
        """The row that runs, where rows run one by one."""

    def reset(self) -> None:
        """The engine's cache begins a row, or all of them; generate()'s is emptied."""
        self.row += 1

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def reorder_cache(self, index: torch.Tensor) -> None:
        self.states.fork(index.tolist())

    def crop(self, count: int) -> None: ...


def counting(model: Any) -> Any:
    """The model with a mixer before its first decoder layer, over the last layer of the cache that it is given."""
    layer = model.model.layers[0]
    kind = type(layer)
    embeddings = model.get_input_embeddings().weight

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        cache = next((keywords[name] for name in (CACHE, OLDER) if keywords.get(name) is not None), None)
        found = next((each for each in getattr(cache, "layers", ()) if isinstance(each, CountingLayer)), None)
        return kind.forward(self, mixed(hidden_states, embeddings, found), *args, **keywords)

    forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    layer.__class__ = type("CountingDecoderLayer", (kind,), {"forward": forward})
    return model


def mixed(hidden: torch.Tensor, embeddings: torch.Tensor, layer: CountingLayer | None) -> torch.Tensor:
    """The hidden states [rows, tokens, hidden], each moved by all tokens of its sequence up to it."""
    with _disable_current_modes():
        flat = hidden.detach().flatten(0, 1)
        ids = [int((embeddings == each).all(1).nonzero()[0]) if each.any() else 0 for each in flat]
    length = hidden.shape[1]
    if layer is None:
        states = [tuple(ids[: i + 1][i // length * length :]) for i in range(len(ids))]
    else:
        states = _advanced(layer, ids)
    moves = [sum((place + 1) * token for place, token in enumerate(state)) % 31 / 31 for state in states]
    moves += [0.0] * (len(ids) - len(moves))
    parts = [part + move for part, move in zip(hidden.flatten(0, 1).split(1), moves, strict=True)]
    return torch.cat(parts).view_as(hidden)


def _advanced(layer: CountingLayer, ids: list[int]) -> list[tuple[int, ...]]:
    states = layer.states
    counts = [count for _, _, count in states.rows]
    rows = list(range(len(counts)))
    if len(ids) < sum(counts):  # row by row
        rows = [layer.row % len(counts)]
    ends = list(itertools.accumulate(counts[row] for row in rows))
    given = [ids[end - counts[row] : end] for row, end in zip(rows, ends, strict=True)]
    return [state for each in states.advance(rows, given) for state in each]


def put_into_generate(monkeypatch: pytest.MonkeyPatch, states: CountedStates) -> None:
    """Give every cache of generate() a counting layer with these states, behind its own layers."""
    known = generate_cache.slots_of

    def more(model: Any, cross: bool) -> list[Slot]:
        return [*known(model, cross), Slot(None, None, CountingLayer(states))]

    for module in (generate_cache, support):
        monkeypatch.setattr(module, "slots_of", more)


def put_into_engines(monkeypatch: pytest.MonkeyPatch, states: CountedStates) -> None:
    """Give every engine's cache a counting layer with these states, behind its own layers."""
    make = engine_cache.StepCache.__init__
    begin = states.begin

    def made(self: Any, *given: Any) -> None:
        make(self, *given)
        self.layers.append(CountingLayer(states, self))
        layer = self.layers[-1]

        def begin_first(rows: Sequence[StateRow] = ()) -> None:
            begin(rows)
            layer.row = -1

        states.begin = begin_first  # type: ignore[method-assign]

    monkeypatch.setattr(engine_cache.StepCache, "__init__", made)


def assert_every_token_once(states: CountedStates, tokens_of: Callable[[Read], Sequence[int]]) -> None:
    """Every token read the state behind exactly the tokens before it, each applied once."""
    assert states.reads
    for read in states.reads:
        assert list(read.state) == list(tokens_of(read)[: read.place]), f"token {read.place} of {read.owner}"
