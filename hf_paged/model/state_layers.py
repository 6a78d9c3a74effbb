"""Layers that keep recurrent states, and the slots of a model's pools in which they keep them.

Stock's layers compute with tensors of their own, which they change in place. Here those tensors exist within
a forward only: they are read from the slots that its rows name, and written to slots when it ends. So any
model computes as with stock's cache, and its steps are captured, run again and taken back by the choice of
slots.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import transformers
from transformers.cache_utils import LinearAttentionLayer

from ..blocks import STATE_READ, STATE_WRITTEN, LayerKind
from ..kv import LayerGroup, Sequences
from ..kv.layout import StateLayout
from ..kv.spans import StaticSpans
from ..kv.state_rows import StateRows
from ..kv.state_spans import StateSpans
from ..kv.upload import upload
from .layer import require_all
from .lazy import NotCapturable, as_dense
from .state_functions import WITHOUT_PAST, SlotState, StateFunctions, stepping
from .state_slots import SlotStates, StateRow, StatesAdvanced, StateSlots, rows_at
from .state_spans import FlatStates, SelectiveScan, StateName, StockCall


class StoredStates(SlotStates):
    """Recurrent states of layers that compute with stock's code: a forward reads a layer's from slots, and
    writes them when it comes to the next layer.
    """

    def __init__(
        self, sequences: Sequences, group: LayerGroup, functions: StateFunctions | None = None
    ) -> None:
        """functions: those of the model's files that begin without states; None where they are replaced."""
        super().__init__()
        self.functions = functions
        self._outer: Any = None
        """The answerer of functions around the running forward."""
        self._layer = -1
        """The layer that the running forward is at, and the heads of it that have gone through a scan."""
        self._heads = 0
        self.sequences = sequences
        self.group = group
        self.tokens = group.tokens_behind  # with the slots, which several caches share
        self.running = False
        """True within a forward."""
        self.in_forward: dict[StateName, torch.Tensor] = {}
        """The states [rows, ...] of the layer that the running forward is at."""
        self._left: set[StateName] = set()
        """The states that it has written."""
        self.begun: set[tuple[int, int]] = set()
        """Layers and numbers of the states that the running forward has begun."""
        self.flat: FlatStates | None = None
        """The states of a running forward whose rows lie one behind the other in one row."""

    @property
    def is_unused(self) -> bool:
        return not self.group.layouts

    # ---- a forward

    def begin(self, rows: Sequence[StateRow] = ()) -> None:
        super().begin(rows)
        self._clear()

    @contextmanager
    def forward(self) -> Iterator[None]:
        self._enter()
        if self.functions is not None:
            self.functions.put_in()
        self._outer = stepping.get()
        token = stepping.set(self)
        try:
            yield
            self._write()
        finally:
            stepping.reset(token)
            self._outer = None
            if self.functions is not None:
                self.functions.take_out()
            self.running = False
            self._clear()

    def call(
        self, name: str, stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The answer to a call of a function of a modeling file: one that begins without states goes on from
        those of its layer.
        """
        if name in WITHOUT_PAST and self.has_past():
            past = as_dense(self.get((self._layer, "recurrent", 0)))
            if past.ndim > 3:  # one head of several
                past = past[:, self._heads]
                self._heads += 1
            return SelectiveScan.of(StockCall.of(stock, WITHOUT_PAST[name], args, kwargs)).behind(past)
        return stock(*args, **kwargs) if self._outer is None else self._outer.call(name, stock, args, kwargs)

    @contextmanager
    def flat_forward(self, reasons: Iterable[str]) -> Iterator[None]:
        """The same for rows that lie one behind the other in one row. reasons: why functions are not known.

        Their states are written where the layers' functions are answered.
        """
        spans = StateSpans([row.count for row in self.rows], *self.slots)
        self._enter()
        self.flat = FlatStates(self.group, spans, reasons)
        token = stepping.set(self.flat)
        try:
            yield
            self.flat.settle()
        finally:
            stepping.reset(token)
            self.flat = None
            self.running = False

    def _enter(self) -> None:
        self._clear()
        self.running = True

    def _clear(self) -> None:
        self.in_forward.clear()
        self.begun.clear()
        self._left.clear()
        self._layer = -1

    def turn_to(self, layer: int) -> None:
        """The forward is at a layer: those before it have their states."""
        if layer != self._layer:
            self._layer = layer
            self._heads = 0
        if any(name[0] != layer for name in self.in_forward):
            self._write()

    def _write(self) -> None:
        """Write the states at hand to their slots."""
        for name, states in self.in_forward.items():
            if isinstance(states, SlotState):
                if states.stepped and states.in_slots:
                    continue  # a kernel has written them
                states = states.dense()
            if states.requires_grad:
                raise RuntimeError(
                    "a paged cache keeps no gradients; call the model under torch.no_grad(), or train "
                    "without a cache"
                )
            self.group.place(name, StateLayout.of(states, self._kept_in(name, states)))
            slots = self._slots(STATE_WRITTEN.name, states.device)
            if slots is not None:
                store, place = self.group.store(name)
                store.write(place, slots, states)
        self._left.update(self.in_forward)
        self.in_forward.clear()

    def _kept_in(self, name: StateName, states: torch.Tensor) -> torch.dtype | None:
        """The type in which slots hold a state, if it is another one than the layer's."""
        if self.group.config.state_dtype and name[1] == "recurrent" and states.dtype == torch.float32:
            return torch.bfloat16
        return None

    def _slots(self, name: str, device: torch.device) -> torch.Tensor | None:
        """The slots of the rows; None if no row has any."""
        return self.sequences.column(name, device)

    # ---- one state

    def has_past(self) -> bool:
        """True if tokens are behind the rows of the running forward: behind all of them or none. Of rows that
        lie in one, each has its own past.
        """
        if self.flat is not None:
            return False
        if not self.rows or self._static_spans is not None:
            return self.sequences.static is not None  # a step without tokens, to be captured ahead
        return bool(self.rows[0].start)

    @property
    def _static_spans(self) -> StaticSpans | None:
        """The tensors of a captured step whose rows may take several tokens."""
        static = self.sequences.static
        batch = next(iter(static.values()), None) if isinstance(static, dict) else None
        return batch if isinstance(batch, StaticSpans) else None

    def get(self, name: StateName) -> torch.Tensor | None:
        """The states [rows, ...] of that name in the running forward; None before a first token."""
        if self.flat is not None:
            raise self.flat.unknown(name[0])
        self.turn_to(name[0])
        found = self.in_forward.get(name)
        if found is not None:
            return found
        layout: StateLayout | None = self.group.layout(name)
        if layout is None:
            return None
        left = name in self._left
        column = STATE_WRITTEN if left else STATE_READ
        slots = self._slots(column.name, layout.device) if left or self.has_past() else None
        if slots is None:
            found = torch.zeros((len(self.rows), *layout.shape), dtype=layout.computed, device=layout.device)
        else:
            found = self._read(name, layout, slots)
        self.in_forward[name] = found
        return found

    def _read(self, name: StateName, layout: StateLayout, slots: torch.Tensor) -> torch.Tensor:
        """The states in the slots that rows read; in a captured step, what stands for them until a kernel
        steps them there.
        """
        store, place = self.group.store(name)
        number, which, _ = name
        functions = self._outer
        spans = self._static_spans
        one = self.sequences.static is not None and (not self.rows or self.rows[0].count == 1)
        known = functions is not None and (number, which) in functions.known and store.steps is not None
        if known and (one or spans is not None):
            target = self._slots(STATE_WRITTEN.name, layout.device)
            if target is not None:
                borders = None if spans is None else spans.spans_on(layout.device).borders
                limit = functions.limits.get(number)
                return SlotState(layout, store.steps, store.of_layer[place], slots, target, borders, limit)
        if spans is not None:
            raise NotCapturable(f"layer {number} advances the states of rows of several tokens by other code")
        states: torch.Tensor = store.read(place, slots)
        return states


class RowStates(StoredStates):
    """The recurrent states of a cache of generate()."""

    def __init__(
        self, sequences: Sequences, kept: StateRows, functions: StateFunctions | None = None
    ) -> None:
        super().__init__(sequences, kept.group, functions)
        self._expected: tuple[int, int] | None = None
        """Rows and new tokens of a plain forward, which begins when a layer asks for its state."""

    @property
    def kept(self) -> StateRows:
        """The rows of the states' kind."""
        rows = self.sequences.states
        assert rows is not None
        return rows

    # ---- a run

    def may_repeat(self, rows: Sequence[StateRow]) -> bool:
        """True if a step of these rows, before it has run, may run twice."""
        return not self.group.fixed or not self.kept.columns or self.group.pool.available >= len(rows)

    def slots_of(self, rows: Sequence[StateRow]) -> StateSlots:
        kept = self.kept
        start = rows[0].start if rows else kept.columns
        if start == kept.begun and len(rows) != kept.count:
            kept.return_to(start, None)  # other rows are computed now
        if start == kept.begun:
            return StateSlots(kept.read, kept.written)
        if not rows or not rows[0].count:
            return StateSlots(kept.written, kept.written)
        if start != kept.columns:
            raise StatesAdvanced(
                f"a run behind {start} tokens would read recurrent states behind {kept.columns}; compute the "
                "sequences again from their first token"
            )
        kept.take(len(rows), rows[0].count)
        return StateSlots(kept.read, kept.written)

    def may_run(self, rows: Sequence[StateRow]) -> bool:
        start = rows[0].start if rows else self.kept.columns
        if not start:
            return True  # rows that go back to nothing have no state
        return start in (self.kept.begun, self.kept.columns) and super().may_run(rows)

    def begin(self, rows: Sequence[StateRow] = ()) -> None:
        self._expected = None
        super().begin(rows)
        self.sequences.put(STATE_READ.name, self.slots.read)
        self.sequences.put(STATE_WRITTEN.name, self.slots.written)

    # ---- a plain forward

    def expect(self, shape: Sequence[int]) -> None:
        rows, new = shape
        self.running = False  # a forward before it that failed
        self._expected = (rows, new) if rows and new else None

    def _begin_plain(self) -> None:
        """Begin a plain forward, if one runs."""
        if not self.running and self._expected is not None:
            rows, new = self._expected
            self.begin(rows_at(self.kept.columns, rows, new))
            self._enter()

    def end(self) -> None:
        self._expected = None
        if self.running:
            self._write()
            self.running = False
            self._clear()

    # ---- one state

    def has_past(self) -> bool:
        """The same; outside of a forward true if the rows hold tokens."""
        self._begin_plain()
        return super().has_past() if self.running else bool(self.kept.columns)

    def get(self, name: StateName) -> torch.Tensor | None:
        """The same; outside of a forward a copy of the states."""
        self._begin_plain()
        layout: StateLayout | None = self.group.layout(name)
        if self.running or layout is None:
            return super().get(name)
        self.sequences.flush()
        if not self.kept.columns:
            return None
        store, place = self.group.store(name)
        states: torch.Tensor = store.read(place, upload(list(self.kept.written), layout.device))
        return states


class KeptStates(MutableMapping[int, Any]):
    """The states of one layer that stock's code knows as `conv_states` or `recurrent_states`, by number."""

    def __init__(self, layer: KeepsStates, which: str) -> None:
        self.layer = layer
        self.which = which

    def __getitem__(self, number: int) -> torch.Tensor | None:
        if not 0 <= number < len(self):
            raise KeyError(number)
        return self.layer.states.get((self.layer.number, self.which, number))

    def __setitem__(self, number: int, states: torch.Tensor) -> None:
        if not self.layer.states.running:
            raise RuntimeError(
                f"{self.which} states are set by forwards of the model that the cache was made for; outside "
                "of one the cache has only copies"
            )
        if self.layer.states.flat is not None:
            raise self.layer.states.flat.unknown(self.layer.number)
        self.layer.states.turn_to(self.layer.number)
        self.layer.states.in_forward[self.layer.number, self.which, number] = states

    def __delitem__(self, number: int) -> None:
        raise TypeError("states cannot be deleted; reset() the cache")

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return self.layer.number_of_states


class Flags(MutableMapping[int, bool]):
    """Flags of a layer's states, by number, as stock's code reads and sets them."""

    def __init__(
        self, layer: KeepsStates, flag: Callable[[int], bool], note: Callable[[int], object]
    ) -> None:
        self.layer = layer
        self.flag = flag
        self.note = note
        """Called with the number of a flag that is set."""

    def __getitem__(self, number: int) -> bool:
        return self.flag(number)

    def __setitem__(self, number: int, value: bool) -> None:
        if value:
            self.note(number)

    def __delitem__(self, number: int) -> None:
        raise TypeError("flags of states cannot be deleted; reset() the cache")

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return self.layer.number_of_states


FLAGS = ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state")
IN_SLOTS = frozenset({"conv_states", "recurrent_states", "states", *FLAGS})
"""Names that stock's layers have for what lies in slots here."""


NUMBERED = "number_of_states" in inspect.signature(LinearAttentionLayer.__init__).parameters
"""True if stock's layers number their states, as from transformers 5.14 on."""


class KeepsStates:
    """Beside stock's layer of recurrent states: the states lie in slots. Its arithmetic is stock's."""

    complete = True
    number: int
    number_of_states: int
    sequences: Sequences
    states: StoredStates

    def keep_in_slots(self, states: StoredStates) -> None:
        """Keep the states in these slots from now on."""
        if not NUMBERED:
            raise TypeError(
                f"transformers {transformers.__version__} does not number recurrent states, which hf_paged "
                "keeps in slots; upgrade it to 5.14, or use its own cache"
            )
        self.states = states
        self.conv_states: Any = KeptStates(self, "conv")
        self.recurrent_states: Any = KeptStates(self, "recurrent")
        self.shown: set[StateName] = getattr(self, "shown", set())
        """The states whose shape the layer has seen."""
        for which in ("conv", "recurrent"):
            flags = Flags(self, partial(self._is_known, which), partial(self._show, which))
            setattr(self, f"is_{which}_states_initialized", flags)
        self.has_previous_state: Any = Flags(self, self._has_past, self._begin)

    def _is_known(self, which: str, number: int) -> bool:
        name = self.number, which, number
        states = self.states
        return name in self.shown and (name in states.in_forward or states.group.layout(name) is not None)

    def _show(self, which: str, number: int) -> None:
        self.shown.add((self.number, which, number))

    def _has_past(self, number: int) -> bool:
        if self.states.flat is not None:
            return False
        return self.states.has_past() or (self.number, number) in self.states.begun

    def _begin(self, number: int) -> None:
        if self.states.running:
            self.states.begun.add((self.number, number))

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Take the shapes of states, as stock does."""
        super().lazy_initialization(*args, **kwargs)  # type: ignore[misc]
        self.keep_past(**kwargs)

    def keep_past(self, state_idx: int = 0, **given: Any) -> None:
        """Read states that stock has begun with zeros from their slots: rows may begin behind a snapshot."""
        if self.complete and self.states.flat is None and self.states.has_past():
            for which in ("conv", "recurrent"):
                if given.get(f"{which}_states") is not None:
                    self.states.in_forward.pop((self.number, which, state_idx), None)

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Replace a state by its last inputs; the answer is what the layer convolves."""
        flat = self.states.flat if self.complete else None
        if flat is not None:
            return flat.begin((self.number, "conv", state_idx), conv_states)
        answer: torch.Tensor
        answer = super().update_conv_state(conv_states, state_idx, **kwargs)  # type: ignore[misc]
        return answer

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Replace a state."""
        flat = self.states.flat if self.complete else None
        if flat is not None:
            return flat.end((self.number, "recurrent", state_idx), recurrent_states)
        answer: torch.Tensor
        answer = super().update_recurrent_state(recurrent_states, state_idx, **kwargs)  # type: ignore[misc]
        return answer

    def keep_apart(self) -> None:
        """Keep the states in tensors of the layer's own from now on, as stock does: a step may be cropped
        that has left its inputs there.
        """
        if not self.complete:
            return
        self.complete = False
        for name in ("conv_states", "recurrent_states", *FLAGS):
            setattr(self, name, dict(getattr(self, name)))


class StateLayer(KeepsStates, LinearAttentionLayer):  # type: ignore[misc]  # options by name
    """A layer that keeps recurrent states and nothing else."""

    def __init__(self, number: int, kind: LayerKind, sequences: Sequences) -> None:
        LinearAttentionLayer.__init__(self)
        self.number = number
        self.kind = kind
        self.sequences = sequences

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.kind.name})"

    # ---- the cache does these for all layers at once

    def reset(self) -> None:
        if self._is_moved("reset"):
            super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        if self._is_moved("crop"):
            super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self._is_moved("reorder_cache"):
            super().reorder_cache(beam_idx)

    def _is_moved(self, method: str) -> bool:
        """True if the layer's own tensors are to be changed; slots follow their rows."""
        require_all(self.sequences, self.number, method)
        return not self.complete

    def activate_past_recording(self) -> None:
        self.keep_apart()
        super().activate_past_recording()  # type: ignore[no-untyped-call]

    def offload(self) -> None: ...

    def prefetch(self) -> None: ...
