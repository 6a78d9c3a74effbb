"""Runs the rows of a step through the model operation by operation, and the model as it is."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from ...blocks import ADAPTER_SLOT, NO_NUMBERS, LayerKind, Numbers
from ...kv import Batch, GroupBatches
from ...kv.upload import upload
from ...model.adapters.vocabulary import joined
from ...model.attention import NAME, Forward, running
from ...model.cache_name import CACHE, name_in
from ...model.device_map import forwards_without_hooks, is_spread
from ...model.dispatch import below_autograd
from ...model.fp32_head import Fp32Head
from ...model.mla import defer_expansion, expanding_classes
from ...model.offloaded import input_device
from ...model.ranks.tensor_parallel import local_forwards
from ...model.routing import RoutingRecord
from ...model.servable import Unservable
from ...model.slots import slots_of
from ...model.state_functions import StateFunctions
from ...model.state_slots import StateRow
from ...model.state_spans import PARAMETERS
from ...model.switch import decoder_configs, modules_of, restore, switch
from ...scheduling import ForwardRows
from ..multimodal.encoder import Encoder
from ..multimodal.extras import decoder_arguments, joined_extras
from ..sampling.scores import token_scores
from .adapters import EngineAdapters
from .cache import StepCache
from .check_policy import CheckPolicy
from .forward_batch import PLAIN, Answer, ForwardBatch, RowInputs, ScoredRow
from .pools import Pools

T = TypeVar("T")
Form = Literal["flat", "rows"]


def _answered(
    logits: torch.Tensor,
    index: Mapping[int, int],
    last: list[int],
    scored: list[ScoredRow],
) -> Answer:
    """The logits at the places `last` in fp32, and the numbers of what is scored; index: where in the logits
    each place is.
    """
    scores = {}
    for row_id, begin, count, wanted in scored:
        if wanted is not None:
            first = index[begin]
            scores[row_id] = token_scores(logits[first : first + count], *wanted)
    own = upload([index[place] for place in last], logits.device)
    return Answer(logits[own].to(torch.float32), scores=scores)


def state_rows(batch: ForwardBatch) -> list[StateRow]:
    """The rows of a batch by the tokens before them."""
    rows = batch.rows
    return list(map(StateRow, rows.row_ids, rows.starts, rows.counts))


class EagerModel:
    """The model over the engine's pages, operation by operation.

    flat: all tokens of a step in one row [1, tokens]; attention separates the sequences, and the functions by
        which layers advance recurrent states. rows: every sequence by itself, for models with positions,
        masks, keys or values of their own.
    """

    def __init__(self, model: nn.Module, pools: Pools) -> None:
        self.model = model
        self.pools = pools
        self.checks = CheckPolicy()
        """Foreign code runs in the model's forward; and a captured step assumes the model as it was."""
        self.device = input_device(model)
        """Where the token ids go."""
        self.cache = StepCache(pools, slots_of(model, cross=False))
        modules = modules_of(model)
        self.configs = decoder_configs(modules)
        self.expanding = expanding_classes(modules)
        """Attention classes that expand latents, which steps read unexpanded."""
        self.functions: StateFunctions | None = None
        """The functions of the model's files by which layers advance states, if any keeps them in slots."""
        if self.cache.states is not None:
            self.functions = StateFunctions(model, PARAMETERS)
        self.adapters: EngineAdapters | None = None
        """Those of requests, once the model has been tried out as it is."""
        self._forwards = [*local_forwards(model), *forwards_without_hooks(modules)]
        self.head = Fp32Head(model, pools.config.lm_head_fp32)
        """Computes the logits in float32, where that is wanted, and those of some rows of captured steps."""
        self.spread = is_spread(model)
        """True if layers lie on several devices: the head's need not be the one of the ids."""
        self._plugged = False
        self.makers = {kind: GroupBatches(group) for kind, group in pools.groups.items()}
        """The makers of its steps' batches."""
        parameters = inspect.signature(model.forward).parameters
        self.cache_name = name_in(model)
        self.why_not_beside: str | None = None
        """Why rows of one token that might be are not computed beside each other."""
        self.keeps_some = "logits_to_keep" in parameters
        self.takes_embeddings = "inputs_embeds" in parameters
        self.encoder = Encoder(model) if pools.encoded else None
        self.takes_positions = "position_ids" in parameters and self.encoder is None
        """True if its forward is given positions, counted from 0."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the model's numbers."""
        return next(self.model.parameters()).dtype

    # ---- over pages

    def run(self, batch: ForwardBatch, form: Form) -> Answer:
        """The logits [wanted rows, vocabulary] behind a batch, and what is scored of its prompts."""
        self.device = input_device(self.model)
        return self.flat(batch) if form == "flat" else self.one_by_one(batch)

    def flat(self, batch: ForwardBatch) -> Answer:
        """The step as one flat row, operation by operation."""
        self.checks.mark_forward()
        self._begin_flat(batch.rows)
        return self._forward(batch, self._inputs(batch), flat=True)

    def write(self, batch: ForwardBatch) -> None:
        """Write to pages the keys and values that rows bring along."""
        rows = batch.rows
        self._begin_flat(rows)
        pasts = [batch.inputs[i].past for i in range(len(rows))]
        layer: Any
        for number, layer in enumerate(self.cache.layers):
            keys, values = [], []
            for past, start, count in zip(pasts, rows.starts, rows.counts, strict=True):
                assert past is not None
                keys.append(past.layers[number][0][:, start : start + count])
                values.append(past.layers[number][1][:, start : start + count])
            device = self.pools.groups[layer.kind].store(number)[0].layout.device
            layer.update(torch.cat(keys, 1)[None].to(device), torch.cat(values, 1)[None].to(device))

    def _begin_flat(self, rows: ForwardRows) -> None:
        """Let the next writes to the cache be those of all rows side by side."""
        self.cache.begin(
            {
                kind: self.makers[kind].flat(tables, rows.row_ids, rows.starts, rows.counts)
                for kind, tables in zip(self.pools.paged, rows.tables, strict=False)
            }
        )

    def one_by_one(self, batch: ForwardBatch) -> Answer:
        """The step row by row; rows of one token behind others run beside each other if they may."""
        self.checks.mark_forward()
        found: dict[int, torch.Tensor] = {}
        scores: dict[int, Any] = {}
        beside = self._rows_beside(batch)
        if beside:
            found = dict(zip(beside, self._beside(batch.select(beside)), strict=True))
        for i in range(len(batch.rows)):
            if i not in found:
                answer = self._row(batch.select([i]))
                scores |= answer.scores
                found[i] = answer.logits
        wanted = [found[i].view(1, -1) for i in batch.wanted]
        empty = torch.empty(0, 0, dtype=torch.float32, device=self.device)
        return Answer(joined(wanted or [empty]), scores=scores)

    @property
    def might_be_beside(self) -> bool:
        """True if rows that take no flat row may agree beside each other: those over states, and those whose
        sums have one order, over keys and values of their own tokens alone.
        """
        own = self.encoder is None and all(kind.grows for kind in self.pools.groups)
        return self.cache.states is not None or (self.pools.config.batch_invariant and own)

    def _rows_beside(self, batch: ForwardBatch) -> list[int]:
        """The rows of a batch that one forward computes beside each other: decoding ones."""
        if not self.might_be_beside or self.why_not_beside is not None:
            return []
        if batch.scored or ADAPTER_SLOT.name in batch.columns:
            return []
        rows = enumerate(zip(batch.rows.starts, batch.rows.counts, strict=True))
        return [i for i, (start, count) in rows if start and count == 1 and i not in batch.inputs]

    def _beside(self, batch: ForwardBatch) -> torch.Tensor:
        """The logits [rows, vocabulary] behind rows of one token each, computed as rows [rows, 1] of one
        forward.
        """
        rows = batch.rows
        batches: dict[LayerKind, Batch] = {
            kind: self.makers[kind].beside(tables, rows.row_ids, rows.starts, rows.counts)
            for kind, tables in zip(self.pools.paged, rows.tables, strict=False)
        }
        self.cache.begin(batches, past=max(rows.starts))
        arguments = {self.cache_name: self.cache, "use_cache": True, "return_dict": True}
        arguments["input_ids"] = batch.ids(self.device)[:, None]
        if self.cache.states is None:  # their layers know rows by slots, others compute with padding
            last = max(rows.starts)
            begins = upload([last - start for start in rows.starts], self.device)[:, None]
            arguments["attention_mask"] = (torch.arange(last + 1, device=self.device) >= begins).long()
        if self.takes_positions:
            positions = list(chain.from_iterable(batch.positions))
            arguments["position_ids"] = upload(positions, self.device)[:, None]
        logits: torch.Tensor = self._call(batch, arguments, None, flat=False).logits[:, -1]
        return logits.to(torch.float32)

    def with_states(self, columns: Numbers, batch: ForwardBatch) -> Numbers:
        """The columns of a forward with the slots of its rows, if layers keep states there."""
        states = self.cache.states
        return columns if states is None else {**columns, **states.columns_of(state_rows(batch))}

    def _row(self, batch: ForwardBatch) -> Answer:
        """The logits behind the one row of a batch, if they are wanted, and what is scored of it."""
        (start,) = batch.rows.starts
        (count,) = batch.rows.counts
        (source,) = batch.sources
        batches: dict[LayerKind, Batch] = {}
        for i, kind in enumerate(self.pools.groups):
            length = kind.holds(start + count, source)
            if kind.fills and length:
                rows, new = batch.rows, kind.growth(count, 0, source)
                batches[kind] = self.makers[kind].alone(
                    rows.tables[i], rows.row_ids, rows.starts, length, new
                )
        inputs = self._inputs(batch)
        row = batch.inputs.get(0, PLAIN)
        cross_tokens = 0 if row.cross is None or row.cross.states else source
        if row.source is not None:
            inputs = self._behind_encoder(batch, row, inputs["input_ids"], start == 0)
        self.cache.begin(batches, past=start, cross_tokens=cross_tokens)
        return self._forward(batch, inputs, flat=False)

    def _behind_encoder(
        self,
        batch: ForwardBatch,
        row: RowInputs,
        ids: torch.Tensor,
        first: bool,
    ) -> dict[str, Any]:
        """A decoder's arguments for the ids [1, tokens] of a row with an encoder's input."""
        assert self.encoder is not None
        assert row.source is not None
        answer = row.source.made
        if first or answer is None:
            with self._with_adapters(batch, None):
                answer = self.encoder.run(row.source)
        made = answer.last_hidden_state.shape[1]
        (expected,) = batch.sources
        if made != expected:
            raise RuntimeError(
                f"the encoder of {type(self.model).__name__} made {made} tokens, expected {expected}; "
                "use generate()"
            )
        return {
            "decoder_input_ids": ids,
            CACHE: self.cache.with_encoder(filled=not first),
            "encoder_outputs": answer,
        }

    def _inputs(self, batch: ForwardBatch) -> dict[str, torch.Tensor]:
        """The token ids [1, tokens] of a batch, or if any row has embeddings those of all rows [1, tokens,
        hidden].
        """
        ids = batch.ids(self.device)[None]
        if all(row.embeds is None for row in batch.inputs.values()):
            return {"input_ids": ids}
        with self._with_adapters(batch, None):
            embeds = self.embedded(ids.clamp(min=0))
        begin = 0
        for i, count in enumerate(batch.rows.counts):
            own = batch.inputs.get(i, PLAIN).embeds
            if own is not None:
                embeds[0, begin : begin + len(own)] = own
            begin += count
        return {"inputs_embeds": embeds}

    def _forward(self, batch: ForwardBatch, inputs: Mapping[str, Any], flat: bool) -> Answer:
        """One forward over the tokens of a batch: the logits [wanted rows, vocabulary], and what is scored
        behind other tokens.
        """
        last = batch.logit_places
        arguments: dict[str, Any] = {self.cache_name: self.cache, **inputs}
        arguments |= {"use_cache": True, "return_dict": True}
        positions = list(chain.from_iterable(batch.positions))
        moved = batch.rope_positions()
        count = len(positions)
        scored = batch.scored
        kept = last
        if scored:  # in the order of all tokens, which adapters of the head go by
            kept = sorted({*last, *(begin + i for _, begin, many, _ in scored for i in range(many))})
        places: Any = None
        if len(kept) < count:
            # Together: a transfer costs more than what it carries.
            numbers = upload([*positions, *(kept or [count - 1])], self.device)
            places = kept if self.spread else numbers[count:]
            own = numbers[None, :count]
        else:
            own = upload([positions], self.device)
        if self.takes_positions:
            arguments["position_ids"] = own if moved is None else moved.to(self.device)
        if self.keeps_some and places is not None:
            arguments["logits_to_keep"] = places
        answer = self._call(batch, arguments, places if self.keeps_some else None, flat)
        wanted = slice(None if scored else len(last))
        whole = self.keeps_some or places is None
        logits = answer.logits[0, wanted] if whole else answer.logits[0, places][wanted]
        if self.adapters is not None and self.adapters.table.sizes is not None and len(logits):
            logits = self._cut(batch, logits, kept if len(logits) == len(kept) else range(count))
        if not scored:
            return Answer(logits.to(torch.float32))
        return _answered(logits, {place: i for i, place in enumerate(kept)}, last, scored)

    def _cut(self, batch: ForwardBatch, logits: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
        """Logits behind the tokens of a batch at these places, without tokens that their adapters do not
        know.
        """
        assert self.adapters is not None
        slots = batch.forward_columns.get(ADAPTER_SLOT.name)
        if slots is None:
            return logits
        return self.adapters.table.cut(logits, upload([slots[place] for place in places], self.device))

    def _call(
        self, batch: ForwardBatch, arguments: dict[str, Any], last: torch.Tensor | None, flat: bool
    ) -> Any:
        """The model's answer to a batch. last: the places of the tokens that the head gets."""
        extras = self._extras(batch) if batch.inputs else {}
        outer = running.get()
        try:
            self.cache.sequences.numbers = self.with_states(batch.forward_columns, batch)
            running.set(Forward(self.cache, flat=flat))
            with (
                decoder_arguments(self.model, extras),
                self._with_adapters(batch, last),
                self._with_states(batch, flat),
                self.recording(),
            ):
                if self.checks.skips_autograd:
                    answer = below_autograd(self.model, arguments)
                else:
                    answer = self.model(**arguments)
        finally:
            running.set(outer)
            self.cache.sequences.numbers = NO_NUMBERS
        if getattr(answer, self.cache_name) is not arguments[self.cache_name]:
            raise Unservable(
                f"{type(self.model).__name__} continued with another cache than the engine's; use generate()"
            )
        return answer

    @functools.cached_property
    def routing(self) -> RoutingRecord:
        """The record of its tokens' experts. ValueError says why there can be none."""
        return RoutingRecord(self.model, self.cache.layers)

    def recording(self) -> AbstractContextManager[None]:
        """Let a forward record the routing of its tokens, once a request has asked for its own."""
        return self.routing.forward() if self.pools.routing else nullcontext()

    def _with_states(self, batch: ForwardBatch, flat: bool) -> AbstractContextManager[None]:
        """Let a forward read and write the recurrent states of its rows."""
        states = self.cache.states
        if states is None:
            return nullcontext()
        states.rows = state_rows(batch)
        if not flat or self.functions is None:
            return states.forward()
        return states.flat_forward(self.functions.reasons)

    def _extras(self, batch: ForwardBatch) -> dict[str, Any]:
        """The decoder's arguments beside its inputs."""
        counts = batch.rows.counts
        extras = joined_extras([batch.inputs.get(i, PLAIN).extras for i in range(len(counts))], counts)
        for row in batch.inputs.values():
            extras |= {} if row.cross is None else row.cross.arguments
        return extras

    def _with_adapters(self, batch: ForwardBatch, last: torch.Tensor | None) -> AbstractContextManager[None]:
        """Let a forward add the adapters of its rows. last: the places of the tokens that the head gets."""
        adapters = self.adapters
        if adapters is None or not adapters.present:
            return nullcontext()
        return adapters.applied(adapters.of_batch(batch, last))

    def plugged(self, act: Callable[[], T]) -> T:
        """The answer of `act`, while the decoder's attention is ours, as in a paged generate()."""
        if self._plugged:
            return act()
        try:
            self._plugged = True
            defer_expansion(self.expanding)
            switch(self.configs, NAME, self)
            for forward in self._forwards:
                forward.replace()
            self.head.put_in()
            if self.functions is not None:
                self.functions.put_in()
            return act()
        finally:
            self.unplug()

    def unplug(self) -> None:
        """Give the decoder its attention back. Twice is once: an interrupted step is mended by calling it
        again.
        """
        self._plugged = False
        if self.functions is not None:
            self.functions.take_out()
        self.head.take_out()
        for forward in self._forwards:
            forward.restore()
        restore(self.configs, self)

    @property
    def steps_spans(self) -> bool:
        """True if kernels have all functions by which layers advance states over several tokens."""
        states = self.cache.states
        if self.functions is None or states is None:
            return False
        stores = states.group.stores.values()
        return bool(self.functions.called) and all(each.steps is not None for each in stores)

    # ---- as it is

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """The model's own embeddings [1, tokens, hidden] of ids [1, tokens]."""
        found: torch.Tensor = self.model.get_input_embeddings()(ids)  # type: ignore[operator]
        return found

    def logits_of(self, embeds: torch.Tensor, count: int, where: torch.Tensor | None) -> torch.Tensor:
        """The logits [count, vocabulary] after the last of these embeddings [1, tokens, hidden], by the model
        as it is.

        where [axes, tokens]: their positions, if these are not consecutive.
        """
        arguments: dict[str, Any] = {"logits_to_keep": count} if self.keeps_some else {}
        if self.takes_positions:
            plain = torch.arange(embeds.shape[1], device=self.device)[None]
            arguments["position_ids"] = plain if where is None else where[:, None].to(self.device)
        if where is not None:  # tokens with equal positions must not be taken for several sequences in a row
            arguments["attention_mask"] = torch.ones(embeds.shape[:2], dtype=torch.long, device=self.device)
        answer = self.model(inputs_embeds=embeds, **arguments, use_cache=False, return_dict=True)
        logits: torch.Tensor = answer.logits[0, -count:]
        return logits.to(torch.float32)
