"""Steps that are replayed as CUDA graphs: every token a row of its own, one graph for each bucket of rows.

A short chunk of a prompt is so many rows over one table, each one token longer than the one before. That
reads the chunk's past once for every token of it; where there is more to read, chunks are spans, which read
it once for many.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any, Literal, get_args

import torch

from ...blocks import (
    ADAPTER_SLOT,
    COLUMNS,
    LOGIT_PLACE,
    NO_NUMBERS,
    ROPE_DELTA,
    WANTED,
    LayerKind,
)  # fmt: skip
from ...kv import GroupBatches, LayerGroup, StaticBatch
from ...kv.budget import Room, free_bytes
from ...kv.columns import StaticColumns
from ...kv.ordinary import ordinary_tensors
from ...model.adapters import AdapterBatch
from ...model.adapters.vocabulary import scores_of
from ...model.attention import Forward, running
from ...model.capture.compile import Compilation, CompiledFusion
from ...model.capture.fusion import Fusion
from ...model.capture.graph import SMALLEST_WIDTH, WIDEST
from ...model.capture.pool import MOST_BYTES, CapturePool
from ...model.capture.products import lay_side_by_side
from ...model.capture.step import CapturedStep, Size, StepSource, agree, bucket_of
from ...model.dispatch import runs_unknown_code
from ...model.lazy import NotCapturable
from ...model.rehearsal import RECORDERS
from ...model.snapshot import ModelSnapshot, StateKey
from ...model.state_slots import SlotStates, states_of
from ..sampling.warp import greedy_tokens
from .eager import EagerModel, state_rows
from .eager import Form as EagerForm
from .forward_batch import Answer, ForwardBatch

WIDTHS = [512 * 8**i for i in range(7)]
"""Blocks of a row in the tables of graphs."""
MOST_PAIRS = 2**17
"""The most pairs of tokens that attend in one step in which each token of a prompt is a row: beyond, one tile
for many tokens is faster.
"""
MOST_IN_TORCH = 2**17
"""The same where plain torch reads, to which spans are rows like others."""
SHARE_OF_CAPTURES = 0.1
"""The share of a device's free memory that captured steps may have of their own at most."""
MIXED = (1.5, 2, 1.25, 3, 4, 6)
"""The tokens of a step with chunks of prompts, as multiples of the sequences that decode."""
FEWER = (3 / 4, 1 / 2, 3 / 8, 1 / 4, 1 / 8)
"""Shares of them that are left as they end."""
FEW = (8, 1)
"""Sequences of an engine that has little to do."""
Form = Literal["single", "rows", "spans"]
"""The rows of a step: sequences whose logits are all wanted, or else the form of chunks of prompts."""
FORMS: tuple[Form, ...] = get_args(Form)
"""Each can hold what those before it can."""
HOLDERS: dict[Hashable, Sequence[Form]] = {form: FORMS[i:] for i, form in enumerate(FORMS)}
"""The forms that can hold a step of each form, its own first."""


class _DecodeStep(CapturedStep):
    """One captured step, with the tensors that it reads and answers in."""

    def __init__(
        self,
        size: Size,
        ids: torch.Tensor,
        columns: StaticColumns,
        batches: dict[LayerKind, StaticBatch],
        logits: torch.Tensor,
        best: torch.Tensor,
        tables: Sequence[torch.Tensor],
    ) -> None:
        self.size = size
        self.ids = ids
        """[rows, 1]"""
        self.columns = columns
        self.batches = batches
        self.logits = logits
        self.best = best
        """[most sequences, vocabulary] and [2, most sequences]: the answer for the wanted rows, in the same
        memory for all graphs. The next replay writes over it.
        """
        self.places = None if size.form == "single" else columns.tensors[LOGIT_PLACE.name]
        """[most sequences]: the rows whose logits are wanted; None if all are."""
        self._tables = tables

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        yield self.ids
        yield from self.columns.tensors.values()
        for batch in self.batches.values():
            yield from batch.tensors

    @property
    def shared(self) -> Sequence[torch.Tensor]:
        return [*self._tables, self.logits, self.best]


class CapturedRunner:
    """The captured steps of one engine. A step that none can hold is computed operation by operation."""

    def __init__(self, eager: EagerModel, is_ready: Callable[[Size], bool]) -> None:
        self.eager = eager
        self.states = states_of(eager.cache.layers)
        """The recurrent states that layers keep in slots; None if none does."""
        self.compilation = Compilation() if eager.pools.config.compile else None
        self._read: Sequence[LayerGroup] = [*(eager.pools.paged or eager.pools.own).values()]
        """The groups that a step reads: those of keys and values, or of a model without any its states."""
        self._most = bucket_of(eager.pools.config.limits().sequences)
        """Rows whose logits may be wanted in one step."""
        self._answers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Where captured steps answer, by the width of their logits: one runs at a time, and its answer is
        read before the next.
        """
        self._snapshot: ModelSnapshot | None = None
        """The model when it was checked last."""
        self._state: StateKey | None = None
        """Its state then."""
        self._agreed: StateKey | None = None
        """The last one that ranks have looked at together."""
        self._size: Size | None = None
        """The size of the last step that was replayed."""
        self._by_kernels = False
        """True if kernels read the pages in it."""
        room = Room(eager.device.type, free_bytes(eager.device))
        own = _own_bytes(room)
        self.makers = {
            kind: GroupBatches(group, captured=True, latent=bool(eager.expanding))
            for kind, group in eager.pools.own.items()
        }
        """The makers of its steps' batches."""
        self.captures = CapturePool(eager.pools.memory, own, is_ready, self.compilation)
        config: Any = eager.model.config
        known = scores_of(eager.model)
        self._vocabulary: int = known or int(config.get_text_config(decoder=True).vocab_size)
        self.budget = self.budget_in(room)
        """Bytes that captured steps may take."""

    def budget_in(self, room: Room) -> int:
        """Bytes that captured steps may take on a device: their own, and those that they share."""
        return _own_bytes(room) + self._shared_bytes() if room.type in RECORDERS else 0

    def fuse_projections(self) -> None:
        """Lay weights with one input side by side, if the engine may move them and has captured steps."""
        config = self.eager.pools.config
        if self.eager.device.type in RECORDERS and (config.fuse_projections or config.compile):
            with self.eager.pools.memory.lock:
                lay_side_by_side(self.eager.model)

    def check_compilation(self, why_rows: str | None) -> None:
        """Give the reason if no layers can be compiled. why_rows: why sequences are run one by one."""
        if self.compilation is None:
            return
        if why_rows is not None:
            self.compilation.give_up(f"sequences are run one by one: {why_rows}")
        elif self.states is not None:
            self.compilation.give_up("layers keep recurrent states")
        elif self.eager.device.type not in RECORDERS:
            self.compilation.give_up(f"it is for captured steps, and there are none on {self.eager.device}")

    def _shared_bytes(self) -> int:
        """About what steps compute with and answer in: the widest activations of the largest, and logits of
        as many rows as its head is given.
        """
        whole: Any = self.eager.model.config
        config = whole.get_text_config(decoder=True)
        inner = int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
        limits = self.eager.pools.config.limits()
        size = self.eager.dtype.itemsize
        rows = max(limits.tokens, limits.sequences)
        headed = rows if self._head(False) is None else self._most
        return (rows * 4 * inner + headed * self._vocabulary) * size + 4 * self._most * self._vocabulary

    def stats(self) -> dict[str, Any]:
        """Counts of the pool of captured steps, and the rows of trusted ones by their form."""
        sizes: dict[str, list[int]] = {}
        for size in self.captures.sizes():
            form = f"{size.form}, adapters" if size.adapters else str(size.form)
            sizes.setdefault(form, []).append(size.rows)
        return {**self.captures.stats(), "sizes": {form: sorted(rows) for form, rows in sizes.items()}}

    def run(self, batch: ForwardBatch) -> Answer | None:
        """The answer for the wanted rows; None if no trusted step can hold them. The next run overwrites
        it.
        """
        size = self._shape(batch)
        if size is None:
            return None
        checks = not self.eager.checks.unseen
        state = self._state
        states = self.states
        once = checks and states is not None and not self._may_repeat(states, batch)
        if state is None or once or (checks and self.eager.checks.looks_together):
            state = self._check()
            checks = False
        step = self.captures.find(state, size, HOLDERS[size.form])
        if not isinstance(step, _DecodeStep):
            return None
        if step.size != size and self.eager.cache.states is not None:
            self._capture_smaller(state, step, size, batch)
        self._load(step, batch)
        step.replay()
        # Where the model must be checked in this step, it is checked while the device works, as the step may
        # run again.
        if checks and self._check() is not state:
            return None
        self.captures.counts["replayed"] += 1
        self._size = size
        count = len(batch.wanted) if step.places is not None else len(batch.rows.row_ids)
        answer = Answer(step.logits[:count], step.best[:, :count])
        if step.size != size:
            source = _EngineSource(self, size, batch)
            if self.captures.is_due(state, source, step):
                answer = answer.clone()  # the new step answers in the same place
                self._capture(state, source, answer, step)
        return answer

    def _capture_smaller(
        self, state: StateKey, stand_in: _DecodeStep, size: Size, batch: ForwardBatch
    ) -> None:
        """Before a larger step stands in for a batch that advances states in place: capture one of its size,
        if that is due, over runs that write no state.
        """
        states = self.eager.cache.states
        assert states is not None
        source = _EngineSource(self, size, batch)
        with states.trying():
            states.follow(batch.rows.tables)
            if self.captures.is_due(state, source, stand_in):
                self._load(stand_in, batch)
                stand_in.replay()
                count = len(batch.wanted) if stand_in.places is not None else len(batch.rows.row_ids)
                answer = Answer(stand_in.logits[:count], stand_in.best[:, :count]).clone()
                self._capture(state, source, answer, stand_in)

    @staticmethod
    def _may_repeat(states: SlotStates, batch: ForwardBatch) -> bool:
        states.follow(batch.rows.tables)
        return states.slots_of(state_rows(batch)).repeatable

    def learn_first(self, batch: ForwardBatch, forward: Callable[[], Answer]) -> None:
        """Before a batch is computed that advances states in place: capture it, or see whether a captured
        step agrees, over runs that write no state.
        """
        states = self.eager.cache.states
        size = self._shape(batch)
        if states is None or size is None:
            return
        source = _EngineSource(self, size, batch)
        state = self._check()
        with states.trying():
            states.follow(batch.rows.tables)
            if self.captures.is_due(state, source):
                self._capture(state, source, Answer(forward().logits))

    def learn(self, batch: ForwardBatch, logits: torch.Tensor) -> None:
        """After a batch was computed without a captured step: capture one, or see whether it agrees."""
        size = self._shape(batch)
        if size is None:
            return
        source = _EngineSource(self, size, batch)
        state = self._check()
        if self.captures.is_due(state, source):
            self._capture(state, source, Answer(logits))

    def capture_ahead(self, sequences: int) -> None:
        """Capture a size that steps are likely to have when so many sequences decode, if one is missing: the
        device is busy, and the host is not.
        """
        state = self._state
        if self._size is None or state is None or not self._by_kernels:
            return  # plain torch has no step without tokens
        for size in self._likely(self._size, sequences):
            source = _EngineSource(self, size, None)
            if self.captures.may_come_first(state, source):
                self._capture(state, source, None)
                return

    def warm_up(self) -> int:
        """Capture a size that an engine with many requests will need, though no step was computed yet: how
        many of them are missing still.
        """
        pools = self.eager.pools
        pools.back([group.backed for group in pools.groups.values()])
        possible = self.captures.worst(self._may_warm_up())
        if possible < 2:
            return possible
        state = self._check()
        sizes = [*self._expected(), *(Size("single", rows, WIDTHS[0]) for rows in FEW if rows < self._most)]
        missing: list[tuple[int, _EngineSource]] = []
        for size in dict.fromkeys(sizes):
            source = _EngineSource(self, size, None)
            lacks = self.captures.lacks(state, source)
            missing.append((self.captures.worst(lacks + (lacks and self.captures.is_ready(size))), source))
        ready = next((source for found, source in missing if found == 2), None)
        if ready is not None:
            self._capture(state, ready, None)
        return sum(found > 0 for found, _ in missing) - (ready is not None)

    def _may_warm_up(self) -> int:
        """2 if sizes may be captured before a step has them; 1 if that is known with the next step."""
        adapters = self.eager.adapters
        if runs_unknown_code(self.eager.model) or (adapters is not None and adapters.present):
            return 0
        groups = self._read
        if not all(group.stores for group in self.eager.pools.own.values()):
            return 1
        # Plain torch has no step without tokens.
        kernels = all(group.captured_ops.kernels is not None for group in groups)
        return 2 * (kernels and not self.eager.expanding and not self.eager.checks.foreign_on_a_rank)

    def expected_rows(self) -> list[int]:
        """The rows of the sizes that an engine with many requests captures."""
        return [size.rows for size in self._expected()]

    def _expected(self) -> list[Size]:
        limits = self.eager.pools.config.limits()
        largest = Size("spans", bucket_of(max(limits.tokens, limits.sequences), 4), WIDTHS[0])
        return [largest, *self._likely(largest, limits.sequences)]

    def _likely(self, last: Size, sequences: int) -> Iterator[Size]:
        """The sizes of steps behind one of that size, those that come soon first: all sequences decode, some
        of them beside chunks of prompts, and then ever fewer.
        """
        limits = self.eager.pools.config.limits()
        most = min(sequences, limits.sequences)
        yield last._replace(form="single", rows=bucket_of(most))
        if last.form != "single":
            for part in MIXED:
                if most * part < limits.tokens:
                    yield last._replace(rows=bucket_of(int(most * part), 4))
        for part in FEWER:
            yield last._replace(form="single", rows=bucket_of(max(1, int(most * part))))

    def _capture(
        self,
        state: StateKey,
        source: _EngineSource,
        answer: Answer | None,
        stand_in: _DecodeStep | None = None,
    ) -> None:
        self.eager.checks.mark_dirty()
        self.eager.plugged(lambda: self.captures.capture_or_compare(state, source, answer, stand_in))
        if self.compilation is not None and self.captures.reasons and not self.captures.counts["captured"]:
            reason = next(iter(self.captures.reasons.values()))
            self.compilation.warn(f"a step cannot be captured, {reason}")

    def forget(self) -> None:
        """Drop every captured step."""
        self.captures.drop()
        self._snapshot = self._state = None

    # ---- the model's state

    def check_captures(self) -> None:
        """Read the model's state anew, if there are captured steps: they read the memory that it had then."""
        if len(self.captures) and not self.eager.checks.looks_together:  # else in the next step
            self._check()

    def _check(self) -> StateKey:
        """The model's state as it is now."""
        state = self.captures.known(self.current().graph_key)
        self._state = state
        if self.eager.checks.looks_together:
            self._agreed = self.captures.agree_on(state)
            self.eager.checks.looks_together = self.eager.checks.foreign_on_a_rank
        return state

    def moved(self) -> bool:
        """True if the model is in a state that ranks have not looked at together."""
        if self.eager.device.type not in RECORDERS:
            return False
        return self.captures.known(self.current().graph_key) is not self._agreed

    def current(self) -> ModelSnapshot:
        """The model as it is now."""
        known = self._snapshot
        alone = self.eager.adapters is not None
        self._snapshot = (
            ModelSnapshot(self.eager.model, watch=True, alone=alone) if known is None else known.current()
        )
        return self._snapshot

    # ---- one step

    def _shape(self, batch: ForwardBatch) -> Size | None:
        if self.eager.device.type not in RECORDERS:
            return None
        if (batch.inputs or batch.columns) and not batch.of_ids:
            return None
        groups = self._read
        many = len(batch.rows.row_ids)
        if not 0 < many <= self._most or not all(group.stores for group in self.eager.pools.own.values()):
            return None  # the pools were given back, and come again with this step
        if self.eager.pools.routing and not self.eager.routing.begun:
            return None  # so does the place of the routing
        # Stock's code advances the states of one token a row, behind others.
        stateful = self.eager.cache.states is not None
        several = stateful and (batch.rows.decodes < many or 0 in batch.rows.starts)
        # Latents are read by plain torch, whatever the kernels are.
        stores = [store for group in groups for store in group.stores.values()]
        kernels = not self.eager.expanding and all(store.captured.kernels is not None for store in stores)
        self._by_kernels = kernels
        decodes = batch.rows.decodes == many and not several
        form = "single" if decodes else self._form(batch, kernels, several)
        if form is None or (several and not self.eager.steps_spans):
            return None
        adapters = 0
        if ADAPTER_SLOT.name in batch.columns:
            assert self.eager.adapters is not None
            table = self.eager.adapters.table
            if table.why_not is not None or table.kernels is None or table.why_eager is not None:
                return None
            adapters = table.layout
        rows = bucket_of(batch.rows.decodes if decodes else batch.rows.tokens, 8 if form == "single" else 4)
        if not self.eager.pools.paged:
            return Size(form, rows, WIDTHS[0], adapters)
        size = min(group.pool.block_size for group in groups)
        blocks = -(-batch.rows.longest // size)
        if kernels:
            # Kernels read what is there, so a wide table costs its upload and no more.
            return Size(form, rows, next(width for width in WIDTHS if width >= blocks), adapters)
        width = max(SMALLEST_WIDTH, 1 << (blocks - 1).bit_length())
        if any(width * group.pool.block_size > WIDEST for group in groups):
            return None
        return Size(form, rows, width, adapters)

    @staticmethod
    def _form(batch: ForwardBatch, kernels: bool, several: bool) -> Form | None:
        """The form of a batch's chunks in a graph, None if they are the flat row's. several: states are
        advanced by several tokens.
        """
        rows = batch.rows
        if not several and rows.tokens == len(rows) and WANTED.name not in batch.columns:
            return "single"
        if kernels:
            return "spans"  # one launch more in a layer, and the past of a chunk is read once for its tokens
        chunks = zip(rows.starts, rows.counts, strict=True)
        pairs = sum(count * (start + count) for start, count in chunks if count > 1)
        if pairs <= MOST_PAIRS and not several:
            return "rows"
        return "spans" if pairs <= MOST_IN_TORCH else None

    def _load(self, step: _DecodeStep, batch: ForwardBatch) -> None:
        """Enter a batch in a captured step's tensors; the tables have taken its tokens already."""
        places: tuple[int, ...] = ()
        if step.places is not None:
            batch, places = self._load_chunks(step, batch)
        rows = batch.rows
        if self.states is not None:
            begin_states(self.states, batch)
        for tables, static in zip(rows.tables, step.batches.values(), strict=False):  # states have none
            static.load_array(tables, rows.row_ids, rows.starts, rows.counts)
        ids = batch.ids(step.ids.device)
        step.ids[: len(ids), 0].copy_(ids)
        columns = batch.forward_columns if batch.columns else NO_NUMBERS
        if places:
            columns = {**columns, LOGIT_PLACE.name: places}
        if self.eager.cache.states is not None:
            columns = self.eager.with_states(columns, batch)
        if columns is not step.columns.loaded:
            step.columns.load(columns)

    @staticmethod
    def _load_chunks(step: _DecodeStep, batch: ForwardBatch) -> tuple[ForwardBatch, tuple[int, ...]]:
        """The batch in the order of the step's rows, and the tokens whose logits are wanted."""
        wanted = batch.wanted
        order = list(range(len(batch.rows)))
        if step.size.form == "spans":
            order.sort(key=lambda i: batch.rows.counts[i] > 1)  # sequences of one token come first
            batch = batch.select(order)
        ends = dict(zip(order, accumulate(batch.rows.counts), strict=True))
        return batch, tuple([ends[i] - 1 for i in wanted])

    def make(self, size: Size) -> _DecodeStep:
        """Static tensors for steps of a size."""
        rows = size.rows
        device = self.eager.device
        groups = self._read if size.form == "spans" else self.eager.pools.paged.values()
        most = self._most if size.form == "spans" else None
        batches = {
            group.kind: self.makers[group.kind].static(rows, size.width, most=most) for group in groups
        }
        with ordinary_tensors():
            ids = torch.zeros(rows, 1, dtype=torch.long, device=device)
            table = self.eager.adapters.table if size.adapters and self.eager.adapters else None
            several = table is not None and table.sizes is not None
            tokens = table.vocabularies.most if table is not None and several else self._vocabulary
            if tokens not in self._answers:
                logits = torch.empty(self._most, tokens, dtype=torch.float32, device=device)
                self._answers[tokens] = logits, torch.empty(2, self._most, dtype=torch.long, device=device)
        logits, best = self._answers[tokens]
        wanted = rows if size.form == "single" else self._most
        tables = () if table is None else table.tensors
        columns = StaticColumns(COLUMNS.values(), wanted, rows, device)
        return _DecodeStep(size, ids, columns, batches, logits[:wanted], best[:, :wanted], tables)

    def _run(self, step: _DecodeStep) -> None:
        eager = self.eager
        sequences = eager.cache.sequences
        sequences.static = step.batches
        sequences.static_columns = step.columns.tensors
        outer = running.get()
        try:
            running.set(Forward(eager.cache))
            for kind, batch in step.batches.items():
                batch.begin(eager.pools.groups[kind].captured_ops.advance)
            arguments = {"input_ids": step.ids}
            if eager.takes_positions and step.batches:
                seen = next(iter(step.batches.values())).seen
                positions = step.columns.tensors[ROPE_DELTA.name].to(seen.device) + seen - 1
                arguments["position_ids"] = positions.clamp(min=0)[:, None]
            if eager.keeps_some:
                arguments["logits_to_keep"] = 1  # type: ignore[assignment]  # a number among tensors
            head = self._head(step.size.adapters > 0)
            states = nullcontext() if self.states is None else self.states.forward()
            headed_rows = eager.head.of_rows(head, len(step.ids), step.places)
            with self._with_adapters(step), headed_rows as headed, states, eager.recording():
                answer = eager.model(
                    **arguments, **{eager.cache_name: eager.cache}, use_cache=True, return_dict=True
                )
            logits: torch.Tensor = answer.logits[:, -1]
            if step.places is not None and not headed():
                logits = logits.index_select(0, step.places)
            if logits.shape != step.logits.shape:
                raise NotCapturable(f"its logits are {list(logits.shape)}, not {list(step.logits.shape)}")
            step.logits.copy_(logits)
            if step.size.adapters and eager.adapters is not None:
                slots = step.columns.tensors[ADAPTER_SLOT.name]
                own = slots if step.places is None else slots.index_select(0, step.places)
                eager.adapters.table.cut(step.logits, own)
            step.best.copy_(greedy_tokens(step.logits))
        finally:
            running.set(outer)
            sequences.static = None
            sequences.static_columns = {}

    def _head(self, adapters: bool) -> Any:
        """The head, if it can be given some rows of a step alone: they lie on its device, and no adapter in
        it asks whose they are.
        """
        eager = self.eager
        model: Any = eager.model
        head = model.get_output_embeddings()
        asked = adapters and eager.adapters is not None and eager.adapters.changes_layer(head)
        return None if eager.spread or asked else head

    def _with_adapters(self, step: _DecodeStep) -> AbstractContextManager[None]:
        adapters = self.eager.adapters
        if adapters is None:
            return nullcontext()
        slots = step.columns.tensors[ADAPTER_SLOT.name]
        return adapters.applied(AdapterBatch(adapters.table, slots) if step.size.adapters else None)


def _own_bytes(room: Room) -> int:
    return min(MOST_BYTES, int(SHARE_OF_CAPTURES * room.free)) if room.type in RECORDERS else 0


def begin_states(states: SlotStates, batch: ForwardBatch) -> None:
    """Begin a run of a batch over its sequences' states."""
    states.follow(batch.rows.tables)
    states.begin(state_rows(batch))


class _EngineSource(StepSource[_DecodeStep]):
    """A step of an engine."""

    def __init__(self, captured: CapturedRunner, size: Size, batch: ForwardBatch | None) -> None:
        """batch: None for a size that no step has yet."""
        self.model = captured.eager.model
        self.size = size
        self._captured = captured
        self.holders = HOLDERS[size.form]
        self.groups = list(captured.eager.pools.own.values())
        self._batch = batch

    @property
    def code(self) -> Hashable:
        """Of all forms: they differ in how our own code reads the pages."""
        return "engine", self.size.adapters

    def snapshot(self) -> ModelSnapshot:
        return self._captured.current()

    def prepare(self) -> _DecodeStep:
        return self._captured.make(self.size)

    def load(self, step: _DecodeStep) -> None:
        if self._batch is not None:
            self._captured._load(step, self._batch)
            return
        if self._captured.states is not None:
            self._captured.states.begin()
        for batch in step.batches.values():
            batch.load_nothing()

    def forward(self, step: _DecodeStep) -> None:
        self._captured.eager.plugged(partial(self._captured._run, step))

    @property
    def comparable(self) -> bool:
        return self._batch is not None and bool(self._batch.wanted)

    @property
    def repeatable(self) -> bool:
        states = self._captured.states
        return states is None or self._batch is None or states.may_run(state_rows(self._batch))

    def agrees(self, step: _DecodeStep, answer: Any) -> bool:
        logits = answer.logits
        dtype = self._captured.eager.dtype
        return agree(step.logits[: len(logits)].to(dtype), logits.to(dtype))

    def recompute(self) -> None:
        batch = self._batch
        assert batch is not None
        captured = self._captured
        if captured.states is not None:
            begin_states(captured.states, batch)
        form: EagerForm = "flat" if captured.eager.cache.states is None else "rows"
        captured.eager.plugged(lambda: captured.eager.run(batch, form))

    def compile(self, fusion: Fusion) -> CompiledFusion | None:
        eager = self._captured.eager
        compilation = self._captured.compilation
        if compilation is None or self.size.adapters:
            return None
        return CompiledFusion(eager.model, fusion.kernels, compilation, eager.cache.layers)
