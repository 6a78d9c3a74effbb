"""Computes the steps of an engine in the form that its model takes, found by a trial."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from ...blocks import ADAPTER_SLOT, SOURCE, ColumnFillers
from ...kv.budget import Room
from ...kv.upload import upload
from ...kv.warmup import Warming
from ...model.adapters import Inapplicable
from ...model.adapters.vocabulary import joined
from ...model.capture.step import Size
from ...model.offloaded import input_device
from ...model.rehearsal import RECORDERS
from ...model.state_slots import states_of
from ...scheduling import AdapterNames
from ..multimodal.media import Media
from .captured import CapturedRunner, begin_states
from .eager import EagerModel, Form
from .forward_batch import Answer, ForwardBatch, sources_of
from .merging import Merger
from .pools import Pools
from .warmup import label_of
from .weakly import weakly


class Verdicts(NamedTuple):
    """The findings of a runner's trial, as the runner has them."""

    why_rows: str | None
    captures_rows: bool
    why_no_embeddings: str | None
    why_not_cross: str | None
    why_not_beside: str | None
    takes_positions: bool


class Runner:
    """The model, and the form in which it takes many sequences at once.

    flat: all tokens of a step in one row [1, tokens]; attention and recurrent states separate the sequences.
        rows: every sequence by itself, for models with positions, masks, keys or values of their own. The
        form is found by a trial, not in a list.
    """

    def __init__(self, model: nn.Module, pools: Pools) -> None:
        self.fillers = ColumnFillers()
        """The fillers of columns: each is given the sequences of a step."""
        if not all(kind.grows for kind in pools.groups):
            self.fillers.fill(SOURCE.name, sources_of)
        self.eager = EagerModel(model, pools)
        """The model over pages, operation by operation."""
        self.states = states_of(self.eager.cache.layers)
        """The recurrent states that layers keep in slots; None if none does."""
        self.captured = CapturedRunner(self.eager, weakly(self.is_ready)) if pools.config.graphs else None
        """The captured steps, where they are wanted."""
        self.why_no_embeddings: str | None = None
        """Why a prompt cannot be embeddings; None if it can."""
        self.merger = Merger(self.eager)
        """Its way from pictures and recordings to embeddings."""
        self.why_not_cross: str | None = None
        """Why its cross-attention layers get no pictures; None if they may, or if it has none."""
        self.warming: Warming | None = None
        """Compiles kernels during the trial, and those of further sizes after it."""
        self.why_rows: str | None = None
        """Why the model does not take a flat row; None if it does."""
        self.captures_rows = False
        """True if steps of rows of one token are captured all the same."""
        if self.eager.encoder is not None:
            self.why_rows = f"{type(model).__name__} is an encoder-decoder"
        elif pools.paged and not self.eager.takes_positions:
            self.why_rows = f"{type(model).__name__}.forward takes no position_ids"
        elif pools.paged and not self.eager.configs:
            self.why_rows = (
                f"the attention of {type(model).__name__} does not use transformers' attention registry"
            )
        elif self.states is not None:
            self.captures_rows = True

    @property
    def verdicts(self) -> Verdicts:
        """The findings of its trial."""
        return Verdicts(
            self.why_rows, self.captures_rows, self.why_no_embeddings, self.why_not_cross,
            self.eager.why_not_beside, self.eager.takes_positions,
        )  # fmt: skip

    def take(self, verdicts: Verdicts) -> None:
        """Know what a trial of this model, or of one alike, has found over other pools."""
        self.why_rows = verdicts.why_rows
        self.captures_rows = verdicts.captures_rows
        self.why_no_embeddings = verdicts.why_no_embeddings
        self.why_not_cross = verdicts.why_not_cross
        self.eager.why_not_beside = verdicts.why_not_beside
        self.eager.takes_positions = verdicts.takes_positions
        if self.captured is not None and self.captured.compilation is not None:
            self.captured.compilation.why_not = "peft's own modules compute"

    @property
    def form(self) -> Form:
        """How the model takes the rows of a step. Layers show what their states are like in rows: at first,
        and after a cast of the model.
        """
        known = self.states is None or not self.states.is_unused
        return "flat" if self.why_rows is None and known else "rows"

    @property
    def captures(self) -> bool:
        """True if steps may be captured."""
        return self._capturing is not None and self.eager.device.type in RECORDERS

    @property
    def capture_bytes(self) -> int:
        """Memory that captured steps may come to take."""
        return 0 if self._capturing is None else self._capturing.budget

    @property
    def _capturing(self) -> CapturedRunner | None:
        """The captured steps, if the model takes their form."""
        return self.captured if self.why_rows is None or self.captures_rows else None

    def capture_bytes_in(self, room: Room) -> int:
        """The same on a device where the model is not."""
        return 0 if self.captured is None or self.why_rows is not None else self.captured.budget_in(room)

    def close(self) -> None:
        """Compile nothing any more, and drop captured steps. Twice is once."""
        if self.warming is not None:
            self.warming.stop()
        if self.captured is not None:
            self.captured.forget()

    def is_ready(self, size: Size) -> bool:
        """True if the kernels of captured steps of a size are compiled."""
        label = label_of(size)
        return self.warming is None or self.warming.done or not label or label in self.warming.ready

    def capture_ahead(self, sequences: int) -> None:
        """Capture a step that is likely to come, while the device is busy."""
        if self._capturing is not None:
            with self.eager.pools.memory.lock, torch.no_grad():
                self._capturing.capture_ahead(sequences)

    def warm_up(self) -> int:
        """Capture a step that many requests will need: how many are missing still."""
        if self.captured is None or not self.captures:
            return 0
        with self.eager.pools.memory.lock, torch.no_grad():
            return self.captured.warm_up()

    def run(self, batch: ForwardBatch) -> Answer:
        """The logits behind the rows that are sampled from, from a captured step if there is one."""
        parts = self._parts(batch) if batch.inputs or batch.columns else []
        if parts:
            rows, act = parts[0]
            return act(batch) if len(rows) == len(batch.rows) else self.join(batch, parts)
        try:
            with self.eager.pools.memory.lock, torch.no_grad():
                captured = self.captured if self.why_rows is None or self.captures_rows else None
                if self.states is not None and self.states.is_unused:
                    captured = None
                replayed = None if captured is None else captured.run(batch)
                if replayed is not None:
                    return replayed
                return self.eager.plugged(lambda: self._compute(batch, captured))
        except Inapplicable:  # the table notes it: from now on each adapter's tokens run by themselves
            return self.run(batch)  # raises StatesAdvanced where the batch may run once

    def _parts(self, batch: ForwardBatch) -> list[tuple[list[int], Callable[[ForwardBatch], Answer]]]:
        """Rows that must be run apart from each other, and how; none if all go together."""
        given = [i for i, row in batch.inputs.items() if row.past is not None]
        if given:
            others = [i for i in range(len(batch.rows)) if i not in given]
            return [(given, self._write), (others, self.run)]
        slots = batch.columns.get(ADAPTER_SLOT.name)
        adapters = self.eager.adapters
        apart = [] if slots is None or adapters is None else adapters.apart.among(slots)
        if slots is not None and adapters is not None and apart:
            rows = {slot: [i for i, each in enumerate(slots) if each == slot] for slot in apart}
            rest = [i for i, each in enumerate(slots) if each not in rows]
            return [*((rows[slot], partial(adapters.apart.run, slot)) for slot in apart), (rest, self.run)]
        if self.why_rows is not None:
            return []
        cross = [i for i, row in batch.inputs.items() if row.cross is not None]
        if cross:
            texts = [i for i in range(len(batch.rows)) if i not in cross]
            return [(cross, self._one_by_one), (texts, self.run)]
        if slots is None or adapters is None or adapters.table.why_not is None or len(set(slots)) == 1:
            return []
        return [
            ([i for i, each in enumerate(slots) if each == slot], self.run) for slot in sorted(set(slots))
        ]

    def _write(self, batch: ForwardBatch) -> Answer:
        """Write the keys and values that rows bring along."""
        with self.eager.pools.memory.lock, torch.no_grad():
            self.eager.write(batch)
        return Answer(torch.empty(0, 0, dtype=torch.float32, device=self.eager.device))

    def _one_by_one(self, batch: ForwardBatch) -> Answer:
        with self.eager.pools.memory.lock, torch.no_grad():
            return self.eager.plugged(lambda: self.forward(batch, "rows"))

    def join(
        self, batch: ForwardBatch, parts: Sequence[tuple[list[int], Callable[[ForwardBatch], Answer]]]
    ) -> Answer:
        """The answers of parts of a batch, each run by itself, in the order of the batch."""
        wanted = batch.wanted
        order: list[int] = []
        found: list[torch.Tensor] = []
        scores: dict[int, torch.Tensor] = {}
        for rows, run in parts:
            if rows:
                answer = run(batch.select(rows))
                logits = answer.logits
                scores |= answer.scores
                found += [logits.clone()] if len(logits) else []  # the next run may overwrite it
                order += [i for i in rows if i in wanted]
        if not found:
            return Answer(torch.empty(0, 0, dtype=torch.float32, device=self.eager.device), scores=scores)
        places = upload([order.index(i) for i in wanted], found[0].device)
        return Answer(joined(found)[places], scores=scores)

    def forward(self, batch: ForwardBatch, form: Form) -> Answer:
        """One run of a batch, operation by operation."""
        if self.states is not None:
            begin_states(self.states, batch)
        return self.eager.run(batch, form)

    def _compute(self, batch: ForwardBatch, captured: CapturedRunner | None) -> Answer:
        if captured is not None:
            captured.learn_first(batch, lambda: self.forward(batch, self.form))
        answer = self.forward(batch, self.form)
        if captured is not None:
            captured.learn(batch, answer.logits)
        return answer

    def encode_media(self, media: Media, names: AdapterNames = ()) -> None:
        """Encode a prompt's pictures or recordings, with the adapters of its request. The model's attention
        is its own here.
        """
        self.eager.checks.mark_dirty()
        adapters = self.eager.adapters
        slot = -1 if adapters is None else adapters.slots.slot(names)
        if adapters is not None and slot in adapters.apart:
            adapters.apart.by_slot[slot].runner.encode_media(media)
            return
        self.eager.device = input_device(self.eager.model)
        with nullcontext() if adapters is None else adapters.applied(adapters.of_request(names)):
            self.merger.run(media)

    def check_captures(self) -> None:
        """See whether the captured steps are still of the model as it is."""
        if self.captured is not None:
            with self.eager.pools.memory.lock:
                self.captured.check_captures()

    def fuse_projections(self) -> None:
        """Lay the weights as captured steps are to read them."""
        if self.captured is not None:
            self.captured.fuse_projections()
