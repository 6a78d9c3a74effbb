"""The trial of a model before it is served: whether it can be, and in which form."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from functools import partial
from operator import sub
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin

from ...blocks import NO_NUMBERS, SOURCE, BlockTable, BlockTableArray, append
from ...blocks.columns import with_numbers
from ...kv.group import is_out_of_memory
from ...model.adapters.vocabulary import ends_of, ids_of
from ...model.lazy import NotFlat
from ...model.offloaded import input_device
from ...model.rounding import computing_dtype, shaken
from ...model.routers import routers_of
from ...model.servable import check_routers, longest
from ...model.shapes import ShapesOnly
from ...model.state_functions import tell_once
from ...scheduling import ForwardRows
from ..multimodal.cross import STATES, CrossInputs, trial_inputs, why_not_cross
from ..multimodal.encoder import EncoderInput
from ..multimodal.extras import decoder_arguments
from .eager import Form
from .forward_batch import ForwardBatch, LastTokens, RowInputs
from .probe import distance, far, far_from_rows, otherwise, require_numbers, tried
from .runner import Runner
from .warmup import load_products, warming, without_plans

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
CROSS_TOKENS = 5
"""Tokens that cross-attention layers are tried out with."""


def with_single(cuts: list[list[int]]) -> list[list[int]]:
    """The same steps, the last of which has one token of the first sequence: states have other kernels for
    it.
    """
    (begun, other), (end, last) = cuts
    return cuts if end - begun == 1 else [cuts[0], [end - 1, (other + last) // 2], cuts[1]]


def _sequences(lengths: Sequence[int], vocabulary: int) -> list[list[int]]:
    """Sequences of these lengths, of tokens of all kinds."""
    return [[(7 * i + 3 * row + 1) % vocabulary for i in range(length)] for row, length in enumerate(lengths)]


def is_given_positions(model: Any) -> bool:
    """True unless generate() is known to leave positions to a model's forward."""
    prepare = getattr(type(model), "prepare_inputs_for_generation", None)
    if prepare is GenerationMixin.prepare_inputs_for_generation:
        return True
    ids = torch.zeros(1, CROSS_TOKENS, dtype=torch.long, device=input_device(model))
    places = torch.arange(CROSS_TOKENS, device=ids.device)[None]
    try:
        given = model.prepare_inputs_for_generation(
            ids, position_ids=places, attention_mask=torch.ones_like(ids), use_cache=False
        )
        return given.get("position_ids") is not None
    except Exception:  # it asks for more than a prompt; then positions are given
        return True


class Trial:
    """Computes two short sequences in every way that steps will, and notes in a runner what it may do."""

    def __init__(self, runner: Runner, whole: bool = False) -> None:
        """whole: whether all tokens of a forward change each other, so that no prompt is cut."""
        self.runner = runner
        self._whole = whole
        self._eager = runner.eager
        self._source: EncoderInput | None = None
        """The input of an encoder-decoder's encoder."""

    def run(self) -> None:
        """See whether the model can be served and in which form, while kernels are compiled that it will
        need.
        """
        self.runner.fuse_projections()
        try:
            warm = warming(self._eager, self.runner.captured is not None, self.runner.why_rows is None)
            with warm as self.runner.warming, without_plans(self._eager.device):
                if self.runner.warming is not None:
                    weakref.finalize(self, self.runner.warming.stop).atexit = False
                    if self.runner.captured is not None:
                        load_products(self._eager.model, self.runner.captured.expected_rows())
                self._compare()
        finally:
            self._eager.unplug()
        if self.runner.captured is not None:
            self.runner.captured.forget()

    def compare(self) -> None:
        """The same for a model whose kernels are compiled."""
        try:
            with without_plans(self._eager.device):
                self._compare()
        finally:
            self._eager.unplug()

    def answers(self) -> torch.Tensor:
        """The logits [rows, vocabulary] after two short sequences, by the model as it is."""
        encoder = self._eager.encoder
        config: Any = self._eager.model.config
        vocabulary = self._known(config)
        self._source = None if encoder is None else encoder.trial(vocabulary)
        return self._without_cache(_sequences(TRIAL, vocabulary))

    def outline(self) -> None:
        """Compute a short sequence on pages and compare nothing: for a model without weights, whose layers
        show what a token of theirs takes.
        """
        rows = [[0] * CROSS_TOKENS]
        cross = None
        try:
            with ShapesOnly():
                self._fit(1, CROSS_TOKENS)
                if self._attends_across:
                    if why_not_cross(self._eager.model) is None:
                        cross = self._cross_inputs(rows)
                    else:
                        self._eager.pools.drop_cross()
                self._on_pages(rows, "rows", [[CROSS_TOKENS]], cross)
        finally:
            self._eager.unplug()

    @property
    def _attends_across(self) -> bool:
        """True if layers of the decoder's own attend to pictures."""
        attends = any(not kind.grows for kind in self._eager.pools.groups)
        return attends and self._eager.encoder is None

    def _cross_inputs(self, rows: list[list[int]]) -> CrossInputs:
        """The inputs that rows attend to in the trial of cross-attention layers."""
        ids = torch.zeros(1, CROSS_TOKENS, dtype=torch.long, device=self._eager.device)
        return trial_inputs(self._eager.embedded(ids), max(map(len, rows)))

    def _known(self, config: Any) -> int:
        """The ids that rows are made of: an adapter may know fewer than the config of its model has."""
        own = int(config.get_text_config(decoder=True).vocab_size)
        return min([own, *map(ids_of, ends_of(self._eager.model)[:1])])

    def _fit(self, vocabulary: int, tokens: int) -> None:
        """Have blocks for sequences of so many tokens, and for what an encoder makes of an input for it."""
        self._eager.pools.fit_trial(tokens)
        encoder = self._eager.encoder
        if encoder is not None:
            self._source = encoder.trial(vocabulary)
            self._eager.pools.fit_trial(max(tokens, encoder.length(self._source)))

    def _compare(self) -> None:
        """Compute two short sequences without a cache, in pieces on pages, and in pieces beside each other:
        all must agree.

        A model that answers differently in pieces can neither be cut into chunks nor be recomputed, so it
        cannot be served. One that only takes no flat row is run row by row.
        """
        config: Any = self._eager.model.config
        vocabulary = self._known(config)
        long = (longest(self._eager.model) or LONGEST) >= LONGEST
        longer = LONGER.get(self._eager.device.type, 1) if long else 1
        lengths = [longer * length for length in TRIAL]
        cuts = [lengths] if self._whole else [[longer * length for length in CUT], lengths]
        rows = _sequences(lengths, vocabulary)
        name = type(self._eager.model).__name__
        with tried(f"{name} fails without any cache; fix its forward"):
            self._fit(vocabulary, max(lengths))
            with routers_of(self._eager.model).recording():
                whole = self._without_cache(rows)
        if self._eager.takes_positions and not is_given_positions(self._eager.model):
            whole = self._own_positions(rows, whole)
        require_numbers(self._eager.model, whole)
        self.runner.why_no_embeddings = self._why_no_embeddings(rows[:1], whole[:1])  # while kernels compile
        with tried(f"{name} failed in a test of its forward on pages; use generate()"):
            pieces = self._on_pages(rows, "rows", cuts)
        if not self._whole:
            check_routers(self._eager.model, self._eager.pools.config.max_batch_tokens)
        off = self._apart(rows, whole, pieces)
        if off is not None:
            raise otherwise(self._eager.model, off, self._apart(rows, whole, self._without_cache(rows)))
        if self.runner.why_rows is None:
            self.runner.why_rows = self._why_not_flat(rows, whole, cuts, pieces)
        if self.runner.why_rows is not None and self.runner.states is not None:
            tell_once(self._eager.model, f"sequences are computed one by one: {self.runner.why_rows}")
        if self.runner.why_rows is not None and self._eager.might_be_beside:
            self._eager.why_not_beside = self._why_not_beside(rows, whole)
        if self._attends_across:
            self.runner.why_not_cross = why_not_cross(self._eager.model) or self._why_not_cross(rows, cuts)
            if self.runner.why_not_cross is not None:
                self._eager.pools.drop_cross()
        if self.runner.captured is not None:
            self.runner.captured.check_compilation(self.runner.why_rows)

    def _own_positions(self, rows: list[list[int]], whole: torch.Tensor) -> torch.Tensor:
        """The logits after rows as generate() has them from a model that it gives no positions. Where they
        are not `whole`, the engine gives it none either.
        """
        self._eager.takes_positions = False
        own = self._without_cache(rows)
        self._eager.takes_positions = self._apart(rows, own, whole) is None
        if self._eager.takes_positions:
            return whole
        name = type(self._eager.model).__name__
        self.runner.why_rows = f"{name} counts positions otherwise than from 0, and generate() gives it none"
        return own

    def _why_not_cross(self, rows: list[list[int]], cuts: list[list[int]]) -> str | None:
        """Why cross-attention layers do not get what they attend to from the pages. The trial also shows what
        a block of theirs is made of.
        """
        name = type(self._eager.model).__name__
        cross = self._cross_inputs(rows)
        try:
            whole = self._without_cache(rows, cross=cross)
            pieces = self._on_pages(rows, "rows", cuts, cross)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return f"{name} fails with {STATES} ({type(error).__name__}: {error})"
        off = self._apart(rows, whole, pieces, cross)
        if off is None:
            return None
        return f"{name} answers {STATES} differently in pieces (by {off:.1e} of its logits)"

    def _why_no_embeddings(self, rows: list[list[int]], right: torch.Tensor) -> str | None:
        """Why the model does not take its own embeddings in place of their ids."""
        name = type(self._eager.model).__name__
        if self._eager.encoder is not None:
            return f"{name} is an encoder-decoder, of whose prompts the engine takes token ids and recordings"
        if not self._eager.takes_embeddings:
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

    def _why_not_flat(
        self, rows: list[list[int]], right: torch.Tensor, cuts: list[list[int]], pieces: torch.Tensor
    ) -> str | None:
        """pieces: the logits after each row by itself."""
        try:
            together = self._on_pages(rows, "flat", cuts if self.runner.states is None else with_single(cuts))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return str(error) if isinstance(error, NotFlat) else f"{type(error).__name__}: {error}"
        if self._eager.cache.paths - {"paged"}:
            return "its attention does not read the pages"
        off = self._apart(rows, right, together)
        if off is None and self.runner.states is not None:
            dtype = computing_dtype(self._eager.device.type, self._eager.dtype)
            off = far_from_rows(right, pieces, together, dtype)
        if off is None:
            return None
        return f"in one row with others its sequences get other logits (by {off:.1e} of their size)"

    def _why_not_beside(self, rows: list[list[int]], right: torch.Tensor) -> str | None:
        """Why the last tokens of the rows are not computed beside each other, padded to one length."""
        if self._whole:
            return self.runner.why_rows
        ends = list(map(len, rows))
        try:
            found = self._on_pages(rows, "rows", [[end - 1 for end in ends], ends])
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return f"{type(error).__name__}: {error}"
        off = self._apart(rows, right, found)
        if off is None:
            return None
        return f"beside others its sequences get other logits (by {off:.1e} of their size)"

    def _without_cache(
        self, rows: list[list[int]], embedded: bool = False, cross: CrossInputs | None = None
    ) -> torch.Tensor:
        """The logits [rows, vocabulary] after each row, by the model as it is, from ids or from its own
        embeddings of them. cross: what every row attends to.
        """
        last = []
        for row in rows:
            with torch.no_grad():
                ids = torch.tensor([row], device=self._eager.device)
                arguments: dict[str, Any] = (
                    {"inputs_embeds": self._eager.embedded(ids)} if embedded else {"input_ids": ids}
                )
                if self._eager.encoder is not None and self._source is not None:
                    source = self._source
                    arguments = {self._eager.encoder.input_name: source.inputs, "decoder_input_ids": ids}
                if self._eager.takes_positions:
                    arguments["position_ids"] = torch.arange(len(row), device=self._eager.device)[None]
                part = {} if cross is None else cross.part(0, len(row), stored=False).arguments
                with decoder_arguments(self._eager.model, part), self._eager.head.in_place():
                    answer = self._eager.model(**arguments, use_cache=False, return_dict=True)
                    self._eager.head.require(answer.logits)
                last.append(answer.logits[0, -1].to(torch.float32))
        return torch.stack(last)

    def _apart(
        self,
        rows: list[list[int]],
        right: torch.Tensor,
        found: torch.Tensor,
        cross: CrossInputs | None = None,
    ) -> float | None:
        """How far logits after `rows` are from the right ones, if that is more than rounding, which is none
        where the batch may not change it.
        """
        if self._eager.pools.config.batch_invariant:
            return None if torch.equal(right, found) else distance(right, found)
        dtype = computing_dtype(self._eager.device.type, self._eager.dtype)
        return far(right, found, dtype, lambda: self._moved(rows, right, cross))

    def _moved(self, rows: list[list[int]], right: torch.Tensor, cross: CrossInputs | None) -> float:
        """How far the logits after `rows` are from the right ones if every embedding is off by what rounding
        may do to it.

        All layers round in this way; on models of 4 to 80 of them one time more at the beginning moves the
        logits by 1.0 to 1.5 times as much as they are off anyway.
        """
        chance = torch.Generator(self._eager.device).manual_seed(0)

        def shake(module: nn.Module, inputs: Any, embeddings: torch.Tensor) -> torch.Tensor:
            return shaken(embeddings, chance)

        hook = self._eager.model.get_input_embeddings().register_forward_hook(shake)  # type: ignore[operator]
        try:
            return distance(right, self._without_cache(rows, cross=cross))
        finally:
            hook.remove()

    def _on_pages(
        self,
        rows: list[list[int]],
        form: Form,
        cuts: list[list[int]],
        cross: CrossInputs | None = None,
    ) -> torch.Tensor:
        """The logits [rows, vocabulary] after the last of the steps that take row i up to cuts[step][i]
        tokens; cross: what every row attends to.
        """
        if self.runner.warming is not None and (form == "flat" or self._eager.pools.config.kernels != "auto"):
            self.runner.warming.wait()  # here the first kernel is launched
        groups = self._eager.pools.groups.values()
        tables = [[BlockTable(group.pool) for group in groups] for _ in rows]
        starts = [0] * len(rows)
        logits = torch.empty(0, dtype=torch.float32, device=self._eager.device)
        try:
            for ends in cuts:
                batch = self._batch(rows, tables, starts, ends, cross)
                with self._eager.pools.memory.lock, torch.no_grad():
                    logits = self._eager.plugged(partial(self.runner.forward, batch, form)).logits
                starts = ends
        finally:
            for own in tables:
                for table in own:
                    table.free()
        return logits

    def _batch(
        self,
        rows: list[list[int]],
        tables: list[list[BlockTable]],
        starts: list[int],
        ends: list[int],
        cross: CrossInputs | None,
    ) -> ForwardBatch:
        """A step that takes row i, with its tables of all groups, from starts[i] to ends[i] tokens."""
        arrays = tuple(BlockTableArray() for _ in self._eager.pools.groups)
        inputs = {}
        ids = array("i")
        source = self._source_length(cross)
        for i, (own, start, end) in enumerate(zip(tables, starts, ends, strict=True)):
            self._grow(own, start, end, source)
            for inside, table in zip(arrays, own, strict=True):
                inside.put(i, table)
            ids.extend(rows[i][start:end])
            part = None if cross is None else cross.part(start, end - start, stored=bool(start))
            if part is not None or self._source is not None:
                inputs[i] = RowInputs(source=self._source, cross=part)
        counts = array("i", map(sub, ends, starts))
        places = array("i", range(len(rows)))
        batch = ForwardRows(places, array("i", starts), counts, arrays, max(ends), len(ids))
        columns = with_numbers(NO_NUMBERS, SOURCE.name, [source] * len(rows))
        return ForwardBatch(batch, LastTokens(0, self._eager.device), ids, inputs, columns)

    def _source_length(self, cross: CrossInputs | None) -> int:
        """The tokens that each sequence of the trial attends to across."""
        if self._eager.encoder is not None and self._source is not None:
            return self._eager.encoder.length(self._source)
        return 0 if cross is None else CROSS_TOKENS

    def _grow(self, tables: Sequence[BlockTable], start: int, end: int, source: int) -> None:
        """Let the tables of a sequence take its tokens, and in the first step what it attends to across."""
        for group, table in zip(self._eager.pools.groups.values(), tables, strict=True):
            group.kind.release(table)
            append([table], [group.kind.growth(end - start, table.length, source)])
