"""Runs the rows of a step through the model as it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from ..blocks import append
from ..checking.ties import shaken
from ..kv import Batch, FlatBatch, LayerKind
from ..kv.group import is_out_of_memory
from ..kv.upload import upload
from ..kv.warmup import Warming
from ..model.attention import NAME, Forward, running
from ..model.capture.step import Size
from ..model.lazy import NotFlat
from ..model.mla import defer_expansion, expanding_classes
from ..model.offloaded import input_device
from ..model.routers import routers_of
from ..model.slots import CROSS
from ..model.switch import decoder_configs, restore, switch
from ..scheduling import Request, ScheduledBatch, ScheduledRow, SequenceGroup, TokenSequence
from .cache import StepCache
from .check_policy import CheckPolicy
from .decoding import Decoding
from .forward_batch import PLAIN, ForwardBatch, LastTokens, RowInputs
from .multimodal.cross import STATES, CrossInputs, trial_inputs, why_not_across
from .multimodal.encoder import Encoder, EncoderInput
from .multimodal.extras import given, joined
from .multimodal.media import Media
from .multimodal.merging import Merger
from .pools import Pools
from .probe import distance, otherwise, require_numbers, tried
from .sampling.answers import Answer
from .support import Unservable, check_routers, longest
from .warmup import label_of, warming, without_plans

T = TypeVar("T")
Form = Literal["flat", "rows"]

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
CLOSE = {torch.float32: 1e-2, torch.float64: 1e-6}
CLOSE_IN_HALF = 5e-2
"""How far logits may be apart that should be the same, as a share of their size. A token that sees what it
should not is far beyond.
"""
ROUNDINGS = 2.0
MOST_IN_HALF = 0.25
"""In half precision a deep model may be further off: by so many times what rounding its embeddings once more
does, and at most so far.
"""


class Runner:
    """The model, and the form in which it takes many sequences at once.

    flat: all tokens of a step in one row [1, tokens]; only attention separates the sequences. rows: every
        sequence by itself, for models with positions, masks, keys or values of their own. The form is found
        by a trial, not in a list.
    """

    def __init__(self, model: nn.Module, pools: Pools) -> None:
        self.model = model
        self.pools = pools
        self.checks = CheckPolicy()
        """Foreign code runs in the model's forward; and a captured step assumes the model as it was."""
        self.device = input_device(model)
        """Where the token ids go."""
        self.cache = StepCache(pools)
        self.decoding = Decoding(self) if pools.config.graphs else None
        """The captured steps, where they are wanted."""
        self.configs = decoder_configs(model)
        self.expanding = expanding_classes(model)
        """Attention classes that expand latents, which steps read unexpanded."""
        self._plugged = False
        parameters = inspect.signature(model.forward).parameters
        self.keeps_some = "logits_to_keep" in parameters
        self.takes_embeddings = "inputs_embeds" in parameters
        self.why_no_embeddings: str | None = None
        """Why a prompt cannot be embeddings; None if it can."""
        self.merger = Merger(self)
        """Its way from pictures and recordings to embeddings."""
        self.why_not_across: str | None = None
        """Why its cross-attention layers get no pictures; None if they may, or if it has none."""
        self._trial_source: EncoderInput | None = None
        self.warming: Warming | None = None
        """Compiles kernels during the trial, and those of further sizes after it."""
        self.why_rows: str | None = None
        """Why the model does not take a flat row; None if it does."""
        self.encoder = Encoder(model) if pools.cross_layers else None
        self._takes_positions = "position_ids" in parameters and self.encoder is None
        if self.encoder is not None:
            self.why_rows = f"{type(model).__name__} is an encoder-decoder"
        elif not self._takes_positions:
            self.why_rows = f"{type(model).__name__}.forward takes no position_ids"
        elif not self.configs:
            self.why_rows = f"the attention of {type(model).__name__} does not ask transformers' registry"

    @property
    def form(self) -> Form:
        """How the model takes the rows of a step."""
        return "flat" if self.why_rows is None else "rows"

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

    def run(self, batch: ForwardBatch) -> Answer:
        """The logits behind the rows that are sampled from, from a captured step if there is one."""
        apart = [i for i, row in batch.inputs.items() if row.across is not None]
        if apart and self.why_rows is None:
            return self._run_apart(batch, apart)
        with self.pools.memory.lock, torch.no_grad():
            decoding = self.decoding if self.why_rows is None else None
            replayed = None if decoding is None else decoding.run(batch)
            if replayed is not None:
                return replayed
            return self.plugged(lambda: self._compute(batch, decoding))

    def _run_apart(self, batch: ForwardBatch, apart: list[int]) -> Answer:
        """Rows that attend across, one by one, and the others as ever."""
        texts = [i for i in range(len(batch.rows)) if i not in apart]
        with self.pools.memory.lock, torch.no_grad():
            self.device = input_device(self.model)
            across = self.plugged(lambda: self._one_by_one(batch.select(apart)))
            if not texts:
                return Answer(across)
            parts = [each for each in (self.run(batch.select(texts)).logits, across) if len(each)]
            wanted = batch.wanted
            order = [i for i in texts if i in wanted] + [i for i in apart if i in wanted]
            places = upload([order.index(i) for i in wanted], self.device)
            return Answer(torch.cat(parts)[places] if parts else across)

    def _compute(self, batch: ForwardBatch, decoding: Decoding | None) -> Answer:
        logits = self.forward(batch, self.form)
        if decoding is not None:
            decoding.learn(batch, logits)
        return Answer(logits)

    def forward(self, batch: ForwardBatch, form: Form) -> torch.Tensor:
        """The same logits, operation by operation."""
        self.device = input_device(self.model)
        return self.flat(batch) if form == "flat" else self._one_by_one(batch)

    def show(self, media: Media) -> None:
        """Encode a prompt's pictures or recordings. The model's attention is its own here."""
        self.device = input_device(self.model)
        self.checks.mark_dirty()
        self.merger.run(media)
        if media.shift and self.decoding is not None and not self.decoding.moves:
            self.decoding.moves = True
            self.decoding.forget()

    def look(self) -> None:
        """See whether the captured steps are still of the model as it is."""
        if self.decoding is not None:
            with self.pools.memory.lock:
                self.decoding.look()

    def flat(self, batch: ForwardBatch) -> torch.Tensor:
        """The step as one flat row, operation by operation."""
        self.checks.mark_dirty()
        rows = batch.rows
        self.cache.begin(
            {
                kind: FlatBatch([sequence.tables[i] for sequence in rows.sequences], rows.counts)
                for i, kind in enumerate(self.pools.own)
            }
        )
        ends = list(accumulate(rows.counts))
        return self._forward(batch, self._inputs(batch), [ends[i] - 1 for i in batch.wanted], flat=True)

    def _one_by_one(self, batch: ForwardBatch) -> torch.Tensor:
        self.checks.mark_dirty()
        found = [self._row(batch.select([i])) for i in range(len(batch.rows))]
        wanted = [found[i] for i in batch.wanted]
        return torch.cat(wanted or [torch.empty(0, 0, dtype=torch.float32, device=self.device)])

    def _row(self, batch: ForwardBatch) -> torch.Tensor:
        """The logits behind the one row of a batch, if they are wanted."""
        ((sequence, start, count, _),) = batch.rows.rows
        batches = {
            kind: Batch([sequence.tables[i]], None, start + count, count, None, lambda: True)
            for i, kind in enumerate(self.pools.own)
        }
        inputs = self._inputs(batch)
        row = batch.inputs.get(0, PLAIN)
        across = 0
        if row.source is not None:
            inputs = self._behind_encoder(row.source, sequence, inputs["input_ids"], batches, start == 0)
        elif row.across is not None:
            table = sequence.tables[-1]
            batches[CROSS] = Batch([table], None, table.length, table.length, None, lambda: True)
            across = 0 if row.across.states else table.length
        self.cache.begin(batches, past=start, across=across)
        return self._forward(batch, inputs, [count - 1] if batch.wanted else [], flat=False)

    def _behind_encoder(
        self,
        source: EncoderInput,
        sequence: TokenSequence,
        ids: torch.Tensor,
        batches: dict[LayerKind, Batch],
        first: bool,
    ) -> dict[str, Any]:
        """What a decoder is given for the ids [1, tokens] of a row, and where it finds what it attends to."""
        assert self.encoder is not None
        table = sequence.tables[-1]
        answer = self.encoder.run(source) if first or source.made is None else source.made
        made = answer.last_hidden_state.shape[1]
        if made != table.length:
            raise RuntimeError(
                f"the encoder of {type(self.model).__name__} made {made} tokens, expected {table.length}; "
                "use generate()"
            )
        batches[CROSS] = Batch([table], None, table.length, table.length, None, lambda: True)
        return {
            "decoder_input_ids": ids,
            "past_key_values": self.cache.with_encoder(filled=not first),
            "encoder_outputs": answer,
        }

    def _inputs(self, batch: ForwardBatch) -> dict[str, torch.Tensor]:
        """The token ids [1, tokens] of a batch, or if any row has embeddings those of all rows [1, tokens,
        hidden].
        """
        ids = batch.ids(self.device)[None]
        if all(row.embeds is None for row in batch.inputs.values()):
            return {"input_ids": ids}
        embeds = self.embedded(ids.clamp(min=0))
        begin = 0
        for i, count in enumerate(batch.rows.counts):
            own = batch.inputs.get(i, PLAIN).embeds
            if own is not None:
                embeds[0, begin : begin + len(own)] = own
            begin += count
        return {"inputs_embeds": embeds}

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """The model's own embeddings [1, tokens, hidden] of ids [1, tokens]."""
        found: torch.Tensor = self.model.get_input_embeddings()(ids)  # type: ignore[operator]
        return found

    def _forward(
        self, batch: ForwardBatch, inputs: Mapping[str, Any], last: list[int], flat: bool
    ) -> torch.Tensor:
        """One forward over the tokens of a batch: the logits [len(last), vocabulary] at the places `last`."""
        arguments: dict[str, Any] = {"past_key_values": self.cache, **inputs}
        positions = batch.positions
        moved = batch.rope_positions()
        count = len(positions)
        numbers = upload(
            [*positions, *(last or [count - 1])], self.device
        )  # together: a transfer costs more than what it carries
        if self._takes_positions:
            arguments["position_ids"] = numbers[None, :count] if moved is None else moved.to(self.device)
        places = numbers[count:]
        if self.keeps_some:
            arguments["logits_to_keep"] = places
        counts = batch.rows.counts
        extras = joined([batch.inputs.get(i, PLAIN).extras for i in range(len(counts))], counts)
        for row in batch.inputs.values():
            extras |= {} if row.across is None else row.across.arguments
        outer = running.get()
        try:
            running.set(Forward(self.cache, flat=flat))
            with given(self.model, extras):
                answer = self.model(**arguments, use_cache=True, return_dict=True)
        finally:
            running.set(outer)
        if answer.past_key_values is not arguments["past_key_values"]:
            raise Unservable(
                f"{type(self.model).__name__} continued with another cache than the engine's; use generate()"
            )
        logits = answer.logits[0] if self.keeps_some else answer.logits[0].index_select(0, places)
        kept: torch.Tensor = logits[: len(last)].to(torch.float32)
        return kept

    def plugged(self, act: Callable[[], T]) -> T:
        """The answer of `act`, while the decoder's attention is ours, as in a paged generate()."""
        if self._plugged:
            return act()
        try:
            self._plugged = True
            defer_expansion(self.expanding)
            switch(self.configs, NAME, self)
            return act()
        finally:
            self.unplug()

    def unplug(self) -> None:
        """Give the decoder its attention back. Twice is once: an interrupted step is mended by calling it
        again.
        """
        self._plugged = False
        restore(self.configs, self)

    # ---- which form

    def try_out(self) -> None:
        """See whether the model can be served and in which form, while kernels are compiled that it will
        need.
        """
        try:
            with warming(self) as self.warming, without_plans(self.device):
                self._try_out()
        finally:
            self.unplug()
        if self.decoding is not None:
            self.decoding.forget()

    def _try_out(self) -> None:
        """Compute two short sequences without a cache, in pieces on pages, and in pieces beside each other:
        all must agree.

        A model that answers differently in pieces can neither be cut into chunks nor be recomputed, so it
        cannot be served. One that only takes no flat row is run row by row.
        """
        config: Any = self.model.config
        vocabulary = int(config.get_text_config(decoder=True).vocab_size)
        longer = LONGER.get(self.device.type, 1) if (longest(self.model) or LONGEST) >= LONGEST else 1
        lengths = [longer * length for length in TRIAL]
        cuts = [[longer * length for length in CUT], lengths]
        rows = [
            [(7 * i + 3 * row + 1) % vocabulary for i in range(length)] for row, length in enumerate(lengths)
        ]
        self.pools.lend(max(lengths))
        name = type(self.model).__name__
        with tried(f"{name} fails without any cache; fix its forward"):
            if self.encoder is not None:
                self._trial_source = self.encoder.trial(vocabulary)
                self.pools.lend(max(*lengths, self.encoder.length(self._trial_source)))
            with routers_of(self.model).recording():
                whole = self._without_cache(rows)
        require_numbers(self.model, whole)
        with tried(f"{name} failed when its forward was tried on pages; use generate()"):
            pieces = self._trial(rows, "rows", cuts)
        check_routers(self.model, self.pools.config.max_batch_tokens)
        far = self._apart(rows, whole, pieces)
        if far is not None:
            raise otherwise(self.model, far, self._apart(rows, whole, self._without_cache(rows)))
        if self.why_rows is None:
            self.why_rows = self._why_not_flat(rows, whole, cuts)
        self.why_no_embeddings = self._why_no_embeddings(rows[:1], whole[:1])
        if CROSS in self.pools.groups and self.encoder is None:
            self.why_not_across = why_not_across(self.model) or self._why_not_across(rows, cuts)
            if self.why_not_across is not None:
                self.pools.drop_cross()
        if self.decoding is not None:
            self.decoding.prepare(lambda: self._without_cache(rows[:1]))

    def _why_not_across(self, rows: list[list[int]], cuts: list[list[int]]) -> str | None:
        """Why cross-attention layers do not get what they attend to from the pages. The trial also shows what
        a block of theirs is made of.
        """
        name = type(self.model).__name__
        like = self.embedded(torch.zeros(1, ACROSS, dtype=torch.long, device=self.device))
        across = trial_inputs(like, max(map(len, rows)))
        try:
            whole = self._without_cache(rows, across=across)
            pieces = self._trial(rows, "rows", cuts, across)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return f"{name} fails with {STATES} ({type(error).__name__}: {error})"
        far = self._apart(rows, whole, pieces, across)
        if far is None:
            return None
        return f"{name} answers {STATES} differently in pieces (by {far:.1e} of its logits)"

    def _why_no_embeddings(self, rows: list[list[int]], right: torch.Tensor) -> str | None:
        """Why the model does not take its own embeddings for the ids that they are of."""
        name = type(self.model).__name__
        if self.encoder is not None:
            return f"{name} is an encoder-decoder, of whose prompts the engine takes token ids and recordings"
        if not self.takes_embeddings:
            return f"{name}.forward takes no inputs_embeds"
        try:
            far = self._apart(rows, right, self._without_cache(rows, embedded=True))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return f"{name} fails with embeddings instead of token ids ({type(error).__name__}: {error})"
        return (
            None
            if far is None
            else f"{name} answers its own embeddings differently from their ids (by {far:.1e} of its logits)"
        )

    def _why_not_flat(self, rows: list[list[int]], right: torch.Tensor, cuts: list[list[int]]) -> str | None:
        try:
            together = self._trial(rows, "flat", cuts)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return str(error) if isinstance(error, NotFlat) else f"{type(error).__name__}: {error}"
        if self.cache.paths != {"paged"}:
            return "its attention does not read the pages"
        far = self._apart(rows, right, together)
        return (
            None
            if far is None
            else f"in one row with others its sequences get other logits (by {far:.1e} of their size)"
        )

    def _without_cache(
        self, rows: list[list[int]], embedded: bool = False, across: CrossInputs | None = None
    ) -> torch.Tensor:
        """The logits [rows, vocabulary] after each row, by the model as it is, from ids or from its own
        embeddings of them. across: what every row attends to.
        """
        last = []
        for row in rows:
            with torch.no_grad():
                ids = torch.tensor([row], device=self.device)
                arguments: dict[str, Any] = (
                    {"inputs_embeds": self.embedded(ids)} if embedded else {"input_ids": ids}
                )
                if self.encoder is not None and self._trial_source is not None:
                    source = self._trial_source
                    arguments = {self.encoder.input_name: source.inputs, "decoder_input_ids": ids}
                if self._takes_positions:
                    arguments["position_ids"] = torch.arange(len(row), device=self.device)[None]
                part = {} if across is None else across.part(0, len(row), stored=False).arguments
                with given(self.model, part):
                    answer = self.model(**arguments, use_cache=False, return_dict=True)
                last.append(answer.logits[0, -1].to(torch.float32))
        return torch.stack(last)

    def logits_of(self, embeds: torch.Tensor, count: int, where: torch.Tensor | None) -> torch.Tensor:
        """The logits [count, vocabulary] after the last of these embeddings [1, tokens, hidden], by the model
        as it is.

        where [axes, tokens]: their positions, if these are not consecutive.
        """
        arguments: dict[str, Any] = {"logits_to_keep": count} if self.keeps_some else {}
        if self._takes_positions:
            plain = torch.arange(embeds.shape[1], device=self.device)[None]
            arguments["position_ids"] = plain if where is None else where[:, None].to(self.device)
        if where is not None:  # tokens with equal positions must not be taken for several sequences in a row
            arguments["attention_mask"] = torch.ones(embeds.shape[:2], dtype=torch.long, device=self.device)
        answer = self.model(inputs_embeds=embeds, **arguments, use_cache=False, return_dict=True)
        logits: torch.Tensor = answer.logits[0, -count:]
        return logits.to(torch.float32)

    def _apart(
        self,
        rows: list[list[int]],
        right: torch.Tensor,
        found: torch.Tensor,
        across: CrossInputs | None = None,
    ) -> float | None:
        """How far logits after `rows` are from the right ones, if that is more than rounding."""
        return self.far(right, found, lambda: self._moved(rows, right, across))

    def far(self, right: torch.Tensor, found: torch.Tensor, moved: Callable[[], float]) -> float | None:
        """How far logits are from the right ones, if that is more than rounding; `moved` finds out what
        rounding does to them.
        """
        dtype = next(self.model.parameters()).dtype
        far = distance(right, found)
        if far <= CLOSE.get(dtype, CLOSE_IN_HALF):
            return None
        rounding = dtype not in CLOSE and far <= MOST_IN_HALF and far <= ROUNDINGS * moved()
        return None if rounding else far

    def _moved(self, rows: list[list[int]], right: torch.Tensor, across: CrossInputs | None) -> float:
        """How far the logits after `rows` are from the right ones if every embedding is off by what rounding
        may do to it.

        All layers round in this way; on models of 4 to 80 of them one time more at the beginning moves the
        logits by 1.0 to 1.5 times as much as they are off anyway.
        """
        chance = torch.Generator(self.device).manual_seed(0)

        def shake(module: nn.Module, inputs: Any, embeddings: torch.Tensor) -> torch.Tensor:
            return shaken(embeddings, chance)

        hook = self.model.get_input_embeddings().register_forward_hook(shake)  # type: ignore[operator]
        try:
            return distance(right, self._without_cache(rows, across=across))
        finally:
            hook.remove()

    def moved(self, right: torch.Tensor, embeds: torch.Tensor, where: torch.Tensor | None) -> float:
        """The same for logits after embeddings [1, tokens, hidden]."""
        return distance(
            right,
            self.logits_of(shaken(embeds, torch.Generator(self.device).manual_seed(0)), len(right), where),
        )

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
        if self.warming is not None and (form == "flat" or self.pools.config.kernels != "auto"):
            self.warming.wait()  # here the first kernel is launched
        kv_groups = self.pools.kv_groups
        requests = [Request(i, tuple(row), len(row)) for i, row in enumerate(rows)]
        sequences = [SequenceGroup(request, kv_groups).leader for request in requests]
        last_tokens = LastTokens(0, self.device)
        logits = torch.empty(0, dtype=torch.float32, device=self.device)
        try:
            for ends in cuts:
                made = [self._trial_row(*each, across) for each in zip(sequences, ends, strict=True)]
                inputs = {i: self._trial_inputs(row, across) for i, row in enumerate(made)}
                batch = ForwardBatch(ScheduledBatch().followed_by(made), last_tokens, inputs)
                with self.pools.memory.lock, torch.no_grad():
                    logits = self.plugged(partial(self.forward, batch, form))
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
        if self.encoder is not None and self._trial_source is not None:
            first = self.encoder.length(self._trial_source)
        for group, table in zip(self.pools.groups.values(), sequence.tables, strict=True):
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
