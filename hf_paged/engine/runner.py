"""Computes the steps of an engine in the form that its model takes, found by a trial."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from ..blocks import append
from ..checking.ties import computing_dtype, shaken
from ..kv.group import is_out_of_memory
from ..kv.upload import upload
from ..kv.warmup import Warming
from ..model.adapters import Inapplicable
from ..model.capture.rehearsal import RECORDERS
from ..model.capture.step import Size
from ..model.lazy import NotFlat
from ..model.offloaded import input_device
from ..model.routers import routers_of
from ..model.slots import CROSS
from ..scheduling import Names, Request, ScheduledBatch, ScheduledRow, SequenceGroup, TokenSequence
from .decoding import Decoding
from .eager import EagerModel, Form
from .forward_batch import Answer, ForwardBatch, LastTokens, RowInputs
from .multimodal.cross import STATES, CrossInputs, trial_inputs, why_not_across
from .multimodal.encoder import EncoderInput
from .multimodal.extras import decoder_arguments
from .multimodal.media import Media
from .multimodal.merging import Merger
from .pools import Pools
from .probe import distance, far, otherwise, require_numbers, tried
from .support import check_routers, longest
from .warmup import label_of, load_products, warming, without_plans
from .weakly import weakly

TRIAL = [11, 17]
"""Tokens of the two sequences with which a model is tried out."""
CUT = [10, 8]
"""Where they are cut: little of the first comes last, and much of the second."""
LONGER = {"cuda": 8}
"""How many times as long they are on a device: there prompts have a kernel, compiled for pieces of prompts'
lengths.
"""
LONGEST = 512
"""Models for shorter sequences are tried out with short ones everywhere."""
ACROSS = 5
"""Tokens that cross-attention layers are tried out with."""


class Runner:
    """The model, and the form in which it takes many sequences at once.

    flat: all tokens of a step in one row [1, tokens]; only attention separates the sequences. rows: every
        sequence by itself, for models with positions, masks, keys or values of their own. The form is found
        by a trial, not in a list.
    """

    def __init__(self, model: nn.Module, pools: Pools) -> None:
        self.eager = EagerModel(model, pools)
        """The model over pages, operation by operation."""
        self.decoding = Decoding(self.eager, weakly(self.is_ready)) if pools.config.graphs else None
        """The captured steps, where they are wanted."""
        self.why_no_embeddings: str | None = None
        """Why a prompt cannot be embeddings; None if it can."""
        self.merger = Merger(self.eager)
        """Its way from pictures and recordings to embeddings."""
        self.why_not_across: str | None = None
        """Why its cross-attention layers get no pictures; None if they may, or if it has none."""
        self._trial_source: EncoderInput | None = None
        self.warming: Warming | None = None
        """Compiles kernels during the trial, and those of further sizes after it."""
        self.why_rows: str | None = None
        """Why the model does not take a flat row; None if it does."""
        if self.eager.encoder is not None:
            self.why_rows = f"{type(model).__name__} is an encoder-decoder"
        elif not self.eager.takes_positions:
            self.why_rows = f"{type(model).__name__}.forward takes no position_ids"
        elif not self.eager.configs:
            self.why_rows = f"the attention of {type(model).__name__} does not ask transformers' registry"

    @property
    def form(self) -> Form:
        """How the model takes the rows of a step."""
        return "flat" if self.why_rows is None else "rows"

    @property
    def captures(self) -> bool:
        """Whether steps may be captured."""
        return self.decoding is not None and self.why_rows is None and self.eager.device.type in RECORDERS

    @property
    def capture_bytes(self) -> int:
        """Memory that captured steps may come to take."""
        return 0 if self.decoding is None or self.why_rows is not None else self.decoding.budget

    def close(self) -> None:
        """Compile nothing any more, and drop captured steps. Twice is once."""
        if self.warming is not None:
            self.warming.stop()
        if self.decoding is not None:
            self.decoding.forget()

    def is_ready(self, size: Size) -> bool:
        """Whether the kernels of captured steps of a size are compiled."""
        label = label_of(size)
        return self.warming is None or self.warming.done or not label or label in self.warming.ready

    def capture_ahead(self, sequences: int) -> None:
        """Capture a step that is likely to come, while the device is busy."""
        if self.decoding is not None and self.why_rows is None:
            with self.eager.pools.memory.lock, torch.no_grad():
                self.decoding.capture_ahead(sequences)

    def warm_up(self) -> int:
        """Capture a step that many requests will need: how many are missing still."""
        if self.decoding is None or not self.captures:
            return 0
        with self.eager.pools.memory.lock, torch.no_grad():
            return self.decoding.warm_up()

    def run(self, batch: ForwardBatch) -> Answer:
        """The logits behind the rows that are sampled from, from a captured step if there is one."""
        parts = self._parts(batch) if batch.inputs or batch.adapters is not None else []
        if parts:
            return self._join(batch, parts)
        try:
            with self.eager.pools.memory.lock, torch.no_grad():
                decoding = self.decoding if self.why_rows is None else None
                replayed = None if decoding is None else decoding.run(batch)
                if replayed is not None:
                    return replayed
                return self.eager.plugged(lambda: self._compute(batch, decoding))
        except Inapplicable:  # the table notes it: from now on each adapter's tokens run by themselves
            return self.run(batch)

    def _parts(self, batch: ForwardBatch) -> list[tuple[list[int], Callable[[ForwardBatch], Answer]]]:
        """Rows that must be run apart from each other, and how; none if all go together."""
        if self.why_rows is not None:
            return []
        across = [i for i, row in batch.inputs.items() if row.across is not None]
        if across:
            texts = [i for i in range(len(batch.rows)) if i not in across]
            return [(across, self._one_by_one), (texts, self.run)]
        slots = batch.adapters
        adapters = self.eager.adapters
        if slots is None or adapters is None or adapters.table.why_not is None or len(set(slots)) == 1:
            return []
        return [
            ([i for i, each in enumerate(slots) if each == slot], self.run) for slot in sorted(set(slots))
        ]

    def _one_by_one(self, batch: ForwardBatch) -> Answer:
        with self.eager.pools.memory.lock, torch.no_grad():
            return self.eager.plugged(lambda: self.eager.run(batch, "rows"))

    def _join(
        self, batch: ForwardBatch, parts: list[tuple[list[int], Callable[[ForwardBatch], Answer]]]
    ) -> Answer:
        """The answers of parts of a batch, each run by itself, in the order of the batch."""
        wanted = batch.wanted
        order: list[int] = []
        found: list[torch.Tensor] = []
        scores: dict[TokenSequence, torch.Tensor] = {}
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
        return Answer(torch.cat(found)[places], scores=scores)

    def _compute(self, batch: ForwardBatch, decoding: Decoding | None) -> Answer:
        answer = self.eager.run(batch, self.form)
        if decoding is not None:
            decoding.learn(batch, answer.logits)
        return answer

    def encode_media(self, media: Media, names: Names = ()) -> None:
        """Encode a prompt's pictures or recordings, with the adapters of its request. The model's attention
        is its own here.
        """
        self.eager.device = input_device(self.eager.model)
        self.eager.checks.mark_dirty()
        adapters = self.eager.adapters
        with nullcontext() if adapters is None else adapters.applied(adapters.of_request(names)):
            self.merger.run(media)
        if media.rope_deltas and self.decoding is not None and not self.decoding.has_rope_deltas:
            self.decoding.has_rope_deltas = True
            self.decoding.forget()

    def check_captures(self) -> None:
        """See whether the captured steps are still of the model as it is."""
        if self.decoding is not None:
            with self.eager.pools.memory.lock:
                self.decoding.check_captures()

    def fuse_projections(self) -> None:
        """Lay the weights as captured steps are to read them."""
        if self.decoding is not None:
            self.decoding.fuse_projections()

    # ---- which form

    def try_out(self) -> None:
        """See whether the model can be served and in which form, while kernels are compiled that it will
        need.
        """
        self.fuse_projections()
        try:
            warm = warming(self.eager, self.decoding is not None, self.why_rows is None)
            with warm as self.warming, without_plans(self.eager.device):
                if self.warming is not None:
                    weakref.finalize(self, self.warming.stop).atexit = False
                    if self.decoding is not None:
                        load_products(self.eager.model, self.decoding.expected_rows())
                self._try_out()
        finally:
            self.eager.unplug()
        if self.decoding is not None:
            self.decoding.forget()

    def _try_out(self) -> None:
        """Compute two short sequences without a cache, in pieces on pages, and in pieces beside each other:
        all must agree.

        A model that answers differently in pieces can neither be cut into chunks nor be recomputed, so it
        cannot be served. One that only takes no flat row is run row by row.
        """
        config: Any = self.eager.model.config
        vocabulary = int(config.get_text_config(decoder=True).vocab_size)
        long = (longest(self.eager.model) or LONGEST) >= LONGEST
        longer = LONGER.get(self.eager.device.type, 1) if long else 1
        lengths = [longer * length for length in TRIAL]
        cuts = [[longer * length for length in CUT], lengths]
        rows = [
            [(7 * i + 3 * row + 1) % vocabulary for i in range(length)] for row, length in enumerate(lengths)
        ]
        self.eager.pools.fit_trial(max(lengths))
        name = type(self.eager.model).__name__
        with tried(f"{name} fails without any cache; fix its forward"):
            if self.eager.encoder is not None:
                self._trial_source = self.eager.encoder.trial(vocabulary)
                self.eager.pools.fit_trial(max(*lengths, self.eager.encoder.length(self._trial_source)))
            with routers_of(self.eager.model).recording():
                whole = self._without_cache(rows)
        require_numbers(self.eager.model, whole)
        self.why_no_embeddings = self._why_no_embeddings(rows[:1], whole[:1])  # while kernels compile
        with tried(f"{name} failed when its forward was tried on pages; use generate()"):
            pieces = self._trial(rows, "rows", cuts)
        check_routers(self.eager.model, self.eager.pools.config.max_batch_tokens)
        off = self._apart(rows, whole, pieces)
        if off is not None:
            raise otherwise(self.eager.model, off, self._apart(rows, whole, self._without_cache(rows)))
        if self.why_rows is None:
            self.why_rows = self._why_not_flat(rows, whole, cuts)
        if CROSS in self.eager.pools.groups and self.eager.encoder is None:
            self.why_not_across = why_not_across(self.eager.model) or self._why_not_across(rows, cuts)
            if self.why_not_across is not None:
                self.eager.pools.drop_cross()
        if self.decoding is not None:
            self.decoding.check_compilation(self.why_rows)

    def _why_not_across(self, rows: list[list[int]], cuts: list[list[int]]) -> str | None:
        """Why cross-attention layers do not get what they attend to from the pages. The trial also shows what
        a block of theirs is made of.
        """
        name = type(self.eager.model).__name__
        like = self.eager.embedded(torch.zeros(1, ACROSS, dtype=torch.long, device=self.eager.device))
        across = trial_inputs(like, max(map(len, rows)))
        try:
            whole = self._without_cache(rows, across=across)
            pieces = self._trial(rows, "rows", cuts, across)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return f"{name} fails with {STATES} ({type(error).__name__}: {error})"
        off = self._apart(rows, whole, pieces, across)
        if off is None:
            return None
        return f"{name} answers {STATES} differently in pieces (by {off:.1e} of its logits)"

    def _why_no_embeddings(self, rows: list[list[int]], right: torch.Tensor) -> str | None:
        """Why the model does not take its own embeddings for the ids that they are of."""
        name = type(self.eager.model).__name__
        if self.eager.encoder is not None:
            return f"{name} is an encoder-decoder, of whose prompts the engine takes token ids and recordings"
        if not self.eager.takes_embeddings:
            return f"{name}.forward takes no inputs_embeds"
        try:
            off = self._apart(rows, right, self._without_cache(rows, embedded=True))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return f"{name} fails with embeddings instead of token ids ({type(error).__name__}: {error})"
        if off is None:
            return None
        return f"{name} answers its own embeddings differently from their ids (by {off:.1e} of its logits)"

    def _why_not_flat(self, rows: list[list[int]], right: torch.Tensor, cuts: list[list[int]]) -> str | None:
        try:
            together = self._trial(rows, "flat", cuts)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return str(error) if isinstance(error, NotFlat) else f"{type(error).__name__}: {error}"
        if self.eager.cache.paths != {"paged"}:
            return "its attention does not read the pages"
        off = self._apart(rows, right, together)
        if off is None:
            return None
        return f"in one row with others its sequences get other logits (by {off:.1e} of their size)"

    def _without_cache(
        self, rows: list[list[int]], embedded: bool = False, across: CrossInputs | None = None
    ) -> torch.Tensor:
        """The logits [rows, vocabulary] after each row, by the model as it is, from ids or from its own
        embeddings of them. across: what every row attends to.
        """
        last = []
        for row in rows:
            with torch.no_grad():
                ids = torch.tensor([row], device=self.eager.device)
                arguments: dict[str, Any] = (
                    {"inputs_embeds": self.eager.embedded(ids)} if embedded else {"input_ids": ids}
                )
                if self.eager.encoder is not None and self._trial_source is not None:
                    source = self._trial_source
                    arguments = {self.eager.encoder.input_name: source.inputs, "decoder_input_ids": ids}
                if self.eager.takes_positions:
                    arguments["position_ids"] = torch.arange(len(row), device=self.eager.device)[None]
                part = {} if across is None else across.part(0, len(row), stored=False).arguments
                with decoder_arguments(self.eager.model, part), self.eager.head.in_place():
                    answer = self.eager.model(**arguments, use_cache=False, return_dict=True)
                    self.eager.head.require(answer.logits)
                last.append(answer.logits[0, -1].to(torch.float32))
        return torch.stack(last)

    def _apart(
        self,
        rows: list[list[int]],
        right: torch.Tensor,
        found: torch.Tensor,
        across: CrossInputs | None = None,
    ) -> float | None:
        """How far logits after `rows` are from the right ones, if that is more than rounding, which is none
        where the batch may not change it.
        """
        if self.eager.pools.config.batch_invariant:
            return None if torch.equal(right, found) else distance(right, found)
        dtype = computing_dtype(self.eager.device.type, self.eager.dtype)
        return far(right, found, dtype, lambda: self._moved(rows, right, across))

    def _moved(self, rows: list[list[int]], right: torch.Tensor, across: CrossInputs | None) -> float:
        """How far the logits after `rows` are from the right ones if every embedding is off by what rounding
        may do to it.

        All layers round in this way; on models of 4 to 80 of them one time more at the beginning moves the
        logits by 1.0 to 1.5 times as much as they are off anyway.
        """
        chance = torch.Generator(self.eager.device).manual_seed(0)

        def shake(module: nn.Module, inputs: Any, embeddings: torch.Tensor) -> torch.Tensor:
            return shaken(embeddings, chance)

        hook = self.eager.model.get_input_embeddings().register_forward_hook(shake)  # type: ignore[operator]
        try:
            return distance(right, self._without_cache(rows, across=across))
        finally:
            hook.remove()

    def _trial(
        self,
        rows: list[list[int]],
        form: Form,
        cuts: list[list[int]],
        across: CrossInputs | None = None,
    ) -> torch.Tensor:
        """The logits [rows, vocabulary] after the last of the steps that take row i up to cuts[step][i]
        tokens; across: what every row attends to.
        """
        if self.warming is not None and (form == "flat" or self.eager.pools.config.kernels != "auto"):
            self.warming.wait()  # here the first kernel is launched
        kv_groups = self.eager.pools.kv_groups
        requests = [Request(i, tuple(row), len(row)) for i, row in enumerate(rows)]
        sequences = [SequenceGroup(request, kv_groups).leader for request in requests]
        last_tokens = LastTokens(0, self.eager.device)
        logits = torch.empty(0, dtype=torch.float32, device=self.eager.device)
        try:
            for ends in cuts:
                made = [self._trial_row(*each, across) for each in zip(sequences, ends, strict=True)]
                inputs = {i: self._trial_inputs(row, across) for i, row in enumerate(made)}
                batch = ForwardBatch(ScheduledBatch().followed_by(made), last_tokens, inputs)
                with self.eager.pools.memory.lock, torch.no_grad():
                    logits = self.eager.plugged(partial(self.eager.run, batch, form)).logits
                for row in made:
                    row.sequence.computed += row.count
        finally:
            for sequence in sequences:
                sequence.free()
        return logits

    def _trial_row(self, sequence: TokenSequence, end: int, across: CrossInputs | None) -> ScheduledRow:
        """A row that takes a sequence up to `end` tokens."""
        start = sequence.computed
        first = 0 if across is None else ACROSS
        if self.eager.encoder is not None and self._trial_source is not None:
            first = self.eager.encoder.length(self._trial_source)
        for group, table in zip(self.eager.pools.groups.values(), sequence.tables, strict=True):
            if group.kind.window is not None:
                table.release_before(table.length - group.kind.window + 1)
            count = end - start
            if group.kind == CROSS:
                count = 0 if start else first
            append([table], [count])
        return ScheduledRow(sequence, start, end - start, (sequence,))

    def _trial_inputs(self, row: ScheduledRow, across: CrossInputs | None) -> RowInputs:
        part = None if across is None else across.part(row.start, row.count, stored=bool(row.start))
        return RowInputs(source=self._trial_source, across=part)
