"""The input of a forward, as the runner takes it, and its answer; the tokens that only the device has, and
how they come to the host.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import add
from types import MappingProxyType
from typing import NamedTuple

import torch

from ...blocks import ADAPTER_SLOT, NO_NUMBERS, ROPE_DELTA, SCORED, SOURCE, WANTED, Numbers
from ...blocks.columns import by_token, selected, with_numbers
from ...kv.ordinary import ordinary_tensors
from ...kv.upload import upload
from ...model.adapters.virtual import GivenPast
from ...scheduling import ForwardRows, ScheduledBatch, ScheduledRow, TokenSequence
from ..multimodal import PromptInputs
from ..multimodal.cross import CrossInputs, CrossMedia
from ..multimodal.encoder import EncoderInput
from ..multimodal.extras import DecoderExtras
from ..multimodal.media import Media
from ..sampling.scores import Scored

UNSEEN = -1
"""In the place of a token that only the device has."""
NO_IDS = array("i")


class LastTokens:
    """The last sampled token of every running sequence, on the device, by the row that the sequence owns.

    The sampler writes it, and the next step's ids are read from it: no other place has a token that the host
    has not seen.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        with ordinary_tensors():
            self.tokens = torch.zeros(rows, dtype=torch.long, device=device)
            """[rows]"""
        self._index: tuple[array[int], slice | torch.Tensor] = (array("i"), slice(0))
        """The rows that were used last, and their places: one value, so that no interrupt parts them."""

    def move(self, device: torch.device) -> None:
        """Keep the tokens on a device from now on."""
        self._index = (array("i"), slice(0))
        with ordinary_tensors():
            self.tokens = self.tokens.to(device)

    def index_of(self, row_ids: array[int]) -> slice | torch.Tensor:
        """A slice where rows lie side by side; else their numbers on the device, kept for the next call."""
        known, index = self._index
        if row_ids == known:
            return index
        first = row_ids[0] if row_ids else 0
        side_by_side = row_ids == array("i", range(first, first + len(row_ids)))
        index = slice(first, first + len(row_ids)) if side_by_side else upload(row_ids, self.tokens.device)
        self._index = (row_ids, index)
        return index


class ScoredRow(NamedTuple):
    """A row of a forward of which a part is scored: `count` logits, from that behind its first token on."""

    row_id: int
    begin: int
    """Its first token, among all of the forward."""
    count: int  # type: ignore[assignment]  # nothing uses a row as a tuple
    scored: Scored | None
    """The tokens, which rank 0 alone has."""


class RowInputs(NamedTuple):
    """The inputs of a row other than ids at consecutive positions."""

    embeds: torch.Tensor | None = None
    """[n, hidden]: what the first n of its tokens are instead of ids."""
    source: EncoderInput | None = None
    """The input of its encoder, if the model has one."""
    positions: torch.Tensor | None = None
    """[axes, tokens] on the host: the RoPE positions, if these are not consecutive from the row's start and
    its number in the column ROPE_DELTA on.
    """
    extras: DecoderExtras | None = None
    """Inputs of its decoder for some of its tokens, in addition to embeddings."""
    cross: CrossInputs | None = None
    """The states that its decoder attends to across, and their masks."""
    ids: list[int] | None = None
    """The ids of its tokens that the host has, if the sequence has other names for them."""
    scored: Scored | None = None
    """The part of its prompt to be scored; the column SCORED has how many tokens that are."""
    prompt: PromptInputs | None = None
    """The source of its embeddings, states or encoder output."""
    past: GivenPast | None = None
    """Keys and values of its tokens, which are written instead of computed."""

    @property
    def of_ids(self) -> bool:
        """True if a captured step can take it: ids only, at consecutive positions."""
        given = self.embeds, self.source, self.cross, self.positions, self.past
        return all(each is None for each in given)


PLAIN = RowInputs()


def sources_of(sequences: Sequence[TokenSequence]) -> list[int]:
    """The column SOURCE of sequences."""
    return [sequence.group.request.source for sequence in sequences]


def inputs_of(given: PromptInputs | None, start: int, count: int, begun: bool) -> RowInputs:
    """The inputs of `count` tokens from `start` on of a prompt, but their positions. begun: whether keys and
    values across are in the pages.
    """
    if isinstance(given, EncoderInput):
        return RowInputs(source=given, prompt=given)
    if isinstance(given, GivenPast):
        return RowInputs(past=given, prompt=given) if start < given.length else PLAIN
    if isinstance(given, CrossMedia):
        assert given.cross is not None
        return RowInputs(cross=given.cross.part(start, count, begun), prompt=given)
    if isinstance(given, Media):
        past = given.past(start)
        if past is not None:
            return RowInputs(past=past, prompt=given)
        embeds = given.embeds(start, count)
        extras = given.near(start, count)
        return PLAIN if embeds is None else RowInputs(embeds, extras=extras, prompt=given)
    if given is None or start >= len(given):
        return PLAIN
    return RowInputs(given[start : start + count], prompt=given)


class ForwardBatch(NamedTuple):
    """The rows of one forward.

    host_ids: the ids of all tokens, UNSEEN where only the device has one; rows of one token in front that it
    lacks are all unseen. inputs: of the rows that are more than token ids. columns: by name the number of
    every row; the same object as in the step before where no number has changed.
    """

    rows: ForwardRows
    last_tokens: LastTokens
    host_ids: array[int] = NO_IDS
    inputs: Mapping[int, RowInputs] = MappingProxyType({})
    columns: Numbers = NO_NUMBERS

    @classmethod
    def planned(
        cls,
        batch: ScheduledBatch,
        last_tokens: LastTokens,
        inputs: Mapping[int, RowInputs] = MappingProxyType({}),
        columns: Numbers = NO_NUMBERS,
        unseen: tuple[TokenSequence, ...] = (),
    ) -> ForwardBatch:
        """The rows of a step as it was planned. unseen: the sequences of the step in flight, whose last
        tokens the host has not seen.
        """
        decodes = batch.decodes
        ids = array("i")
        if batch.sequences[:decodes] != unseen[:decodes]:
            for sequence in batch.sequences[:decodes]:
                ids.append(sequence.tokens[-1] if len(sequence.tokens) > sequence.computed else UNSEEN)
        if len(batch.row_ids) > decodes:
            wanted = map(bool, batch.samples[decodes:])
            columns = with_numbers(columns, WANTED.name, [*[1] * decodes, *wanted])
            columns = _before_adapters(columns, batch)
            for i, row in enumerate(batch.other_rows, decodes):
                own = inputs.get(i, PLAIN)
                known = own.ids or _ids_of(row)
                if own.prompt is not None:  # names of up to 64 bits, in the place of what is no id
                    known = [max(token, 0) for token in known]
                ids.extend(known)
                ids.extend([UNSEEN] * (row.count - len(known)))
        scored = {i: len(row.scored.tokens) for i, row in inputs.items() if row.scored is not None}
        if scored:
            columns = with_numbers(columns, SCORED.name, [scored.get(i, 0) for i in range(len(batch))])
        return cls(batch, last_tokens, ids, inputs, columns)

    def ids(self, device: torch.device) -> torch.Tensor:
        """The token ids [tokens] of all rows."""
        last = self.last_tokens
        if last.tokens.device != device:
            last.move(device)
        rows = self.rows
        ids = self.host_ids
        unseen = rows.tokens - len(ids)
        if not ids:
            return last.tokens[last.index_of(rows.row_ids[:unseen])]
        behind = self._partly_unseen(device, unseen) if UNSEEN in ids else upload(ids, device)
        if not unseen:
            return behind
        return torch.cat([last.tokens[last.index_of(rows.row_ids[:unseen])], behind])

    def _partly_unseen(self, device: torch.device, first: int) -> torch.Tensor:
        """The ids of the rows from `first` on, some of which only the device has."""
        rows = zip(self.rows.row_ids[first:], self.rows.counts[first:], strict=True)
        places = [row_id for row_id, count in rows for _ in range(count)]
        known, own = upload([self.host_ids.tolist(), places], device)
        return torch.where(known < 0, self.last_tokens.tokens[own], known)

    @property
    def unseen(self) -> bool:
        """True if only the device has some of the ids."""
        return self.rows.tokens > len(self.host_ids) or UNSEEN in self.host_ids

    @property
    def of_ids(self) -> bool:
        """True if a captured step can take all rows."""
        return SCORED.name not in self.columns and all(row.of_ids for row in self.inputs.values())

    @property
    def wanted(self) -> list[int]:
        """The rows whose logits are sampled from."""
        wanted = self.columns.get(WANTED.name)
        return [i for i in range(len(self.rows)) if wanted is None or wanted[i]]

    @property
    def logit_places(self) -> list[int]:
        """The tokens, among all of the forward, whose logits are sampled from."""
        ends = list(accumulate(self.rows.counts))
        return [ends[i] - 1 for i in self.wanted]

    @property
    def scored(self) -> list[ScoredRow]:
        """The rows of which a part is scored."""
        counts = self.columns.get(SCORED.name, ())
        begins = accumulate(self.rows.counts, initial=0)
        return [
            ScoredRow(row_id, begin, count, self.inputs.get(i, PLAIN).scored)
            for i, (row_id, begin, count) in enumerate(zip(self.rows.row_ids, begins, counts, strict=False))
            if count
        ]

    @property
    def sources(self) -> Sequence[int]:
        """The tokens that each row attends to across."""
        return self.columns.get(SOURCE.name) or [0] * len(self.rows)

    @property
    def positions(self) -> list[range]:
        """The RoPE positions of each row's tokens, where it is given no others."""
        rows = self.rows
        deltas = self.columns.get(ROPE_DELTA.name) or [0] * len(rows)
        firsts = map(add, rows.starts, deltas)
        return [range(first, first + count) for first, count in zip(firsts, rows.counts, strict=True)]

    def rope_positions(self) -> torch.Tensor | None:
        """[axes, 1, tokens] on the host: the RoPE positions of all tokens; None if none are given."""
        given = [row.positions for row in self.inputs.values() if row.positions is not None]
        if not given:
            return None
        axes = max(len(positions) for positions in given)
        found = []
        for i, plain in enumerate(self.positions):
            own = self.inputs.get(i, PLAIN).positions
            consecutive = torch.arange(plain.start, plain.stop, device="cpu").expand(axes, -1)
            found.append(consecutive if own is None else own)
        return torch.cat(found, 1)[:, None]

    @property
    def forward_columns(self) -> Numbers:
        """The columns as a forward over all tokens reads them: the same object if every row has one token."""
        counts = self.rows.counts
        if not self.columns or len(counts) == self.rows.tokens:
            return self.columns
        return by_token(self.columns, counts)

    def select(self, rows: Sequence[int]) -> ForwardBatch:
        """A batch of some of the rows, in this order."""
        inputs = {place: self.inputs[i] for place, i in enumerate(rows) if i in self.inputs}
        columns = selected(self.columns, rows)
        return ForwardBatch(self.rows.select(rows), self.last_tokens, self._ids_of(rows), inputs, columns)

    def _ids_of(self, rows: Sequence[int]) -> array[int]:
        """The ids of some of the rows, in this order."""
        missing = self.rows.tokens - len(self.host_ids)
        ends = list(accumulate(self.rows.counts, initial=-missing))
        ids = array("i")
        for i in rows:
            ids.extend([UNSEEN] if i < missing else self.host_ids[ends[i] : ends[i + 1]])
        return ids


def _ids_of(row: ScheduledRow) -> list[int]:
    """The tokens of a row, with the id of one that has another name in the books since an adapter begins."""
    known = row.tokens
    request = row.sequence.group.request
    place = request.adapter_start - row.start
    if request.adapter_start and 0 <= place < len(known):
        known[place] = request.prompt[request.adapter_start]
    return known


def _before_adapters(columns: Numbers, batch: ScheduledBatch) -> Numbers:
    """The columns, in which rows before the first token of their adapter have the model alone."""
    if ADAPTER_SLOT.name not in columns:
        return columns
    before = [i for i, row in enumerate(batch.other_rows, batch.decodes) if _is_before(row)]
    if not before:
        return columns
    slots = list(columns[ADAPTER_SLOT.name])
    for i in before:
        slots[i] = int(ADAPTER_SLOT.empty)
    return with_numbers(columns, ADAPTER_SLOT.name, slots)


def _is_before(row: ScheduledRow) -> bool:
    return row.start < row.sequence.group.request.adapter_start


class Answer(NamedTuple):
    """The logits that follow the last tokens of some sequences, and the greedy choice among them where a
    captured step has made it.

    Those of a captured step are its own memory: the next step writes over them.
    """

    logits: torch.Tensor
    """[sequences, vocabulary] in fp32"""
    best: torch.Tensor | None = None
    """[2, sequences], as `best` makes it of the logits."""
    scores: Mapping[int, torch.Tensor] = MappingProxyType({})
    """Of rows whose prompts are scored, by the row that their sequence owns, the numbers of the tokens behind
    the first of them.
    """

    def clone(self) -> Answer:
        """The same in memory of its own."""
        return Answer(self.logits.clone(), None if self.best is None else self.best.clone())
