"""Runs the rows of a step through the model as it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from ..blocks import BlockTable, append
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
from .cache import StepCache
from .check_policy import CheckPolicy
from .decoding import Decoding
from .forward_batch import ForwardBatch, ScheduledChunk, merged, placed, split
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
ROUNDINGS, MOST_IN_HALF = 2.0, 0.25
"""In half precision a deep model may be further off: by so many times what rounding its embeddings once more
does, and at most so far.
"""


class Runner:
    """The model, and the form in which it takes many sequences at once.

    flat: all tokens of a step in one row [1, tokens]; only attention knows who is who. rows: every sequence
    by itself, for models that look at positions, masks, keys or values in ways of their own. Which one is
    tried out once, not looked up in a list.
    """

    def __init__(self, model: nn.Module, pools: Pools) -> None:
        self.model, self.pools = model, pools
        self.checks = CheckPolicy()
        """The model runs its own code in here, whoever wrote it; and a captured step takes it for what it
        was.
        """
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
        """What compiles kernels while the model is tried out, and behind it those of further sizes."""
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

    def run(self, pieces: Sequence[ScheduledChunk], latest: torch.Tensor | None = None) -> Answer:
        """What follows the last token of each piece that is wanted, from a captured step if there is one.

        latest: the tokens that the last step chose, if there are pieces that follow them.
        """
        if self.why_rows is None and any(piece.across is not None for piece in split(pieces)[1]):
            return self._run_apart(pieces, latest)
        with self.pools.memory.lock, torch.no_grad():
            decoding = self.decoding if self.why_rows is None else None
            replayed = None if decoding is None else decoding.run(pieces, latest)
            if replayed is not None:
                return replayed
            self.device = input_device(self.model)
            return self.plugged(lambda: self._compute(pieces, latest, decoding))

    def _run_apart(self, pieces: Sequence[ScheduledChunk], latest: torch.Tensor | None) -> Answer:
        """Chunks that attend across, one by one, and the others as ever."""
        stride, others = split(pieces)
        crew = 0 if stride is None else len(stride.sequences)
        across = [piece for piece in others if piece.across is not None]
        with self.pools.memory.lock, torch.no_grad():
            self.device = input_device(self.model)
            apart = self.plugged(lambda: self._one_by_one(across, latest))
            if len(across) == crew + len(others):
                return Answer(apart)
            texts = (
                pieces.without_across()
                if isinstance(pieces, ForwardBatch)
                else [piece for piece in others if piece.across is None]
            )
            parts = [each for each in (self.run(texts, latest).logits, apart) if len(each)]
            is_apart = [*[False] * crew, *(piece.across is not None for piece in others if piece.wanted)]
            # The parts hold the texts first; row i of the answer is their row places[i].
            order = sorted(range(len(is_apart)), key=is_apart.__getitem__)
            places = sorted(range(len(order)), key=order.__getitem__)
            return Answer(torch.cat(parts)[upload(places, self.device)] if parts else apart)

    def _compute(
        self, pieces: Sequence[ScheduledChunk], latest: torch.Tensor | None, decoding: Decoding | None
    ) -> Answer:
        logits = self.flat(pieces, latest) if self.why_rows is None else self._one_by_one(pieces, latest)
        if decoding is not None:
            decoding.learn(pieces, latest, logits)
        return Answer(logits)

    def show(self, media: Media) -> None:
        """Have the model look at a prompt's pictures. Its attention is its own here."""
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

    def ids(self, pieces: Sequence[ScheduledChunk], latest: torch.Tensor | None) -> torch.Tensor:
        """The tokens of the pieces, one behind the other, on the device: those that the host has not heard of
        from the device itself.
        """
        if isinstance(pieces, ForwardBatch) and pieces.stride is not None:
            own = pieces.ids(self.device)
            return torch.cat([own, self.ids(pieces.others, latest)]) if pieces.others else own
        told = [token for piece in pieces for token in piece.tokens]
        if all(piece.follows is None for piece in pieces):
            return upload(told, self.device)
        assert latest is not None
        places: list[int] = []
        for piece in pieces:
            places += [-1] * (len(piece.tokens) - 1)
            places.append(-1 if piece.follows is None else piece.follows)
        return merged(told, places, latest)

    def flat(self, pieces: Sequence[ScheduledChunk], latest: torch.Tensor | None) -> torch.Tensor:
        """The step as one flat row, operation by operation."""
        self.checks.mark_dirty()
        counts = [len(piece.tokens) for piece in pieces]
        batches = {
            kind: FlatBatch([piece.tables[i] for piece in pieces], counts)
            for i, kind in enumerate(self.pools.own)
        }
        self.cache.begin(batches)
        borders = next(iter(batches.values())).borders
        last = [border - 1 for border, piece in zip(borders[1:], pieces, strict=True) if piece.wanted]
        return self._forward(pieces, self._inputs(pieces, latest), last, flat=True)

    def _one_by_one(self, pieces: Sequence[ScheduledChunk], latest: torch.Tensor | None) -> torch.Tensor:
        self.checks.mark_dirty()
        rows = [logits for piece in pieces for logits in self._row(piece, latest)]
        return torch.cat(rows or [torch.empty(0, 0, dtype=torch.float32, device=self.device)])

    def _row(self, piece: ScheduledChunk, latest: torch.Tensor | None) -> Iterator[torch.Tensor]:
        count = len(piece.tokens)
        length = piece.start + count
        batches = {
            kind: Batch([piece.tables[i]], None, length, count, None, lambda: True)
            for i, kind in enumerate(self.pools.own)
        }
        inputs, across = self._inputs([piece], latest), 0
        if piece.source is not None:
            inputs = self._behind_encoder(piece, inputs["input_ids"], batches)
        elif piece.across is not None:
            tokens = piece.tables[-1].length
            batches[CROSS] = Batch([piece.tables[-1]], None, tokens, tokens, None, lambda: True)
            across = 0 if piece.across.states else tokens
        self.cache.begin(batches, past=piece.start, across=across)
        logits = self._forward([piece], inputs, [count - 1] if piece.wanted else [], flat=False)
        if piece.wanted:
            yield logits

    def _behind_encoder(
        self, piece: ScheduledChunk, ids: torch.Tensor, batches: dict[LayerKind, Batch]
    ) -> dict[str, Any]:
        """What a decoder is given for the ids [1, tokens] of a piece, and where it finds what it attends
        to.
        """
        assert self.encoder is not None and piece.source is not None
        first, tokens = piece.start == 0, piece.tables[-1].length
        answer = self.encoder.run(piece.source) if first or piece.source.made is None else piece.source.made
        made = answer.last_hidden_state.shape[1]
        if made != tokens:
            raise RuntimeError(
                f"the encoder of {type(self.model).__name__} made {made} tokens, expected {tokens}; use "
                "generate()"
            )
        batches[CROSS] = Batch([piece.tables[-1]], None, tokens, tokens, None, lambda: True)
        return {
            "decoder_input_ids": ids,
            "past_key_values": self.cache.with_encoder(filled=not first),
            "encoder_outputs": answer,
        }

    def _inputs(
        self, pieces: Sequence[ScheduledChunk], latest: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """The pieces' token ids [1, tokens], or if anybody has brought embeddings those of everybody [1,
        tokens, hidden].
        """
        ids = self.ids(pieces, latest)[None]
        if all(piece.embeds is None for piece in pieces):
            return {"input_ids": ids}
        rows, place = self.embedded(ids.clamp(min=0)), 0
        for piece in pieces:
            if piece.embeds is not None:
                rows[0, place : place + len(piece.embeds)] = piece.embeds
            place += len(piece.tokens)
        return {"inputs_embeds": rows}

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """The model's own embeddings [1, tokens, hidden] of ids [1, tokens]."""
        found: torch.Tensor = self.model.get_input_embeddings()(ids)  # type: ignore[operator]
        return found

    def _forward(
        self, pieces: Sequence[ScheduledChunk], inputs: Mapping[str, Any], last: list[int], flat: bool
    ) -> torch.Tensor:
        """One forward over the tokens of pieces in a row: the logits [len(last), vocabulary] at the places
        `last`.
        """
        arguments: dict[str, Any] = {"past_key_values": self.cache, **inputs}
        tokens, moved = [piece.positions for piece in pieces], placed(pieces)
        positions = [position for piece in tokens for position in piece]
        count = len(positions)
        numbers = upload(
            [*positions, *(last or [count - 1])], self.device
        )  # together: a transfer costs more than what it carries
        if self._takes_positions:
            arguments["position_ids"] = numbers[None, :count] if moved is None else moved.to(self.device)
        places = numbers[count:]
        if self.keeps_some:
            arguments["logits_to_keep"] = places
        beside, outer = joined([piece.beside for piece in pieces], [*map(len, tokens)]), running.get()
        for piece in pieces:
            beside |= {} if piece.across is None else piece.across.arguments
        try:
            running.set(Forward(self.cache, flat=flat))
            with given(self.model, beside):
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
        it must be all the same.

        A model that answers otherwise in pieces can neither be cut into chunks nor be computed again, so it
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

        where [axes, tokens]: where they stand, if not one behind the other.
        """
        arguments: dict[str, Any] = {"logits_to_keep": count} if self.keeps_some else {}
        if self._takes_positions:
            plain = torch.arange(embeds.shape[1], device=self.device)[None]
            arguments["position_ids"] = plain if where is None else where[:, None].to(self.device)
        if where is not None:  # tokens that stand side by side must not look like several sequences in a row
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
        dtype, far = next(self.model.parameters()).dtype, distance(right, found)
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
        tables = [tuple(BlockTable(group.pool) for group in self.pools.groups.values()) for _ in rows]
        kept, self.why_rows = self.why_rows, None if form == "flat" else self.why_rows or "tried out"
        begin = [0] * len(rows)
        logits, source = torch.empty(0, dtype=torch.float32, device=self.device), self._trial_source
        try:
            for ends in cuts:
                pieces = []
                for row, of_row, first, end in zip(rows, tables, begin, ends, strict=True):
                    for group, table in zip(self.pools.groups.values(), of_row, strict=True):
                        if group.kind.window is not None:
                            table.release_before(table.length - group.kind.window + 1)
                        cross = 0 if first or across is None else ACROSS
                        if not first and source is not None and self.encoder is not None:
                            cross = self.encoder.length(source)
                        append([table], [cross if group.kind == CROSS else end - first])
                    part = None if across is None else across.part(first, end - first, stored=bool(first))
                    pieces.append(
                        ScheduledChunk(row[first:end], first, of_row, True, source=source, across=part)
                    )
                logits = self.run(pieces).logits
                begin = ends
        finally:
            self.why_rows = kept
            for of_row in tables:
                for table in of_row:
                    table.free()
        return logits
