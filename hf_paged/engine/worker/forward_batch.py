"""The input of a forward, as the runner takes it, and its answer; the tokens that only the device has, and
how they come to the host.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from ...blocks import NO_NUMBERS, Numbers
from ...blocks.columns import by_token, selected
from ...kv.ordinary import ordinary_tensors
from ...kv.upload import upload
from ...scheduling import ScheduledBatch, TokenSequence
from ..multimodal import PromptInputs
from ..multimodal.cross import CrossInputs, CrossMedia
from ..multimodal.encoder import EncoderInput
from ..multimodal.extras import DecoderExtras
from ..multimodal.media import Media
from ..sampling.scores import Scored


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


class RowInputs(NamedTuple):
    """The inputs of a row other than ids at consecutive positions."""

    embeds: torch.Tensor | None = None
    """[n, hidden]: what the first n of its tokens are instead of ids."""
    source: EncoderInput | None = None
    """The input of its encoder, if the model has one."""
    positions: torch.Tensor | None = None
    """[axes, tokens] on the host: the RoPE positions, if these are not consecutive."""
    one_delta: bool = True
    """True if its positions are consecutive but for one number, the column rope_delta."""
    extras: DecoderExtras | None = None
    """Inputs of its decoder for some of its tokens, in addition to embeddings."""
    cross: CrossInputs | None = None
    """The states that its decoder attends to across, and their masks."""
    ids: list[int] | None = None
    """The ids of its tokens that the host has, if the sequence has other names for them."""
    scored: Scored | None = None
    """The part of its prompt to be scored."""
    prompt: PromptInputs | None = None
    """The source of its embeddings, states or encoder output."""

    @property
    def of_ids(self) -> bool:
        """True if a captured step can take it: ids only, and at most one delta."""
        plain = self.embeds is None and self.source is None and self.cross is None
        return plain and self.scored is None and self.one_delta


PLAIN = RowInputs()


def inputs_of(given: PromptInputs | None, start: int, count: int, begun: bool) -> RowInputs:
    """The inputs of `count` tokens from `start` on of a prompt, but their positions. begun: whether keys and
    values across are in the pages.
    """
    if isinstance(given, EncoderInput):
        return RowInputs(source=given, prompt=given)
    if isinstance(given, CrossMedia):
        assert given.cross is not None
        return RowInputs(cross=given.cross.part(start, count, begun), prompt=given)
    if not isinstance(given, Media):
        embeds, extras = given, None
    elif given.concerns(start, count):
        embeds, extras = given.made, given.near(start, count)
    else:
        return PLAIN
    if embeds is None or start >= len(embeds):
        return PLAIN
    return RowInputs(embeds[start : start + count], extras=extras, prompt=given)


class ForwardBatch(NamedTuple):
    """The rows of one forward. inputs: of the rows that are more than token ids. unseen: the sequences of the
    step in flight, whose last tokens the host has not seen. columns: by name the number of every row; the
    same object as in the step before where no number has changed.
    """

    rows: ScheduledBatch
    last_tokens: LastTokens
    inputs: Mapping[int, RowInputs] = MappingProxyType({})
    unseen: tuple[TokenSequence, ...] = ()
    columns: Numbers = NO_NUMBERS

    def ids(self, device: torch.device) -> torch.Tensor:
        """The token ids [tokens] of all rows."""
        last = self.last_tokens
        if last.tokens.device != device:
            last.move(device)
        rows = self.rows
        count = rows.decodes
        behind = self._ids_of_chunks(device) if len(rows.sequences) > count else None
        if not count:
            return upload([], device) if behind is None else behind
        if rows.sequences[:count] == self.unseen[:count]:
            decoding = last.tokens[last.index_of(rows.row_ids[:count])]
        else:
            decoding = self._ids_of_decodes(device)
        return decoding if behind is None else torch.cat([decoding, behind])

    def _ids_of_decodes(self, device: torch.device) -> torch.Tensor:
        rows = self.rows
        sequences = rows.sequences[: rows.decodes]
        ids = upload([sequence.tokens[-1] for sequence in sequences], device)
        seen = [len(sequence.tokens) > sequence.computed for sequence in sequences]
        if all(seen):
            return ids
        places, known = upload([rows.row_ids[: rows.decodes].tolist(), seen], device)
        return torch.where(known > 0, ids, self.last_tokens.tokens[places])

    def _ids_of_chunks(self, device: torch.device) -> torch.Tensor:
        ids: list[int] = []
        row_ids: list[int] = []
        for i, (sequence, start, count, _) in enumerate(self.rows.other_rows, self.rows.decodes):
            known = self.inputs.get(i, PLAIN).ids or sequence.tokens[start : start + count]
            unseen = count - len(known)
            ids += known + [0] * unseen
            row_ids += [-1] * len(known) + [sequence.row] * unseen
        if max(row_ids) < 0:
            return upload(ids, device)
        known_ids, places = upload([ids, row_ids], device)
        return torch.where(places < 0, known_ids, self.last_tokens.tokens[places.clamp(min=0)])

    @property
    def of_ids(self) -> bool:
        """True if a captured step can take all rows."""
        return all(row.of_ids for row in self.inputs.values())

    @property
    def wanted(self) -> list[int]:
        """The rows whose logits are sampled from."""
        rows = self.rows
        return [
            *range(rows.decodes),
            *(i for i in range(rows.decodes, len(rows)) if rows.samples[i]),
        ]

    @property
    def scored(self) -> list[tuple[TokenSequence, int, Scored]]:
        """The parts to be scored: the sequence, where among all tokens its row begins, and which."""
        found = []
        begin = 0
        for i, count in enumerate(self.rows.counts if self.inputs else ()):
            scored = self.inputs.get(i, PLAIN).scored
            if scored is not None:
                found.append((self.rows.sequences[i], begin, scored))
            begin += count
        return found

    @property
    def positions(self) -> list[int]:
        """The number in its sequence of every token."""
        return [
            position
            for start, count in zip(self.rows.starts, self.rows.counts, strict=True)
            for position in range(start, start + count)
        ]

    def rope_positions(self) -> torch.Tensor | None:
        """[axes, 1, tokens] on the host: the RoPE positions of all tokens; None if they are consecutive."""
        given = [row.positions for row in self.inputs.values() if row.positions is not None]
        if not given:
            return None
        axes = max(len(positions) for positions in given)
        found = []
        for i, (start, count) in enumerate(zip(self.rows.starts, self.rows.counts, strict=True)):
            own = self.inputs.get(i, PLAIN).positions
            plain = torch.arange(start, start + count, device="cpu").expand(axes, -1)
            found.append(plain if own is None else own)
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
        return ForwardBatch(self.rows.select(rows), self.last_tokens, inputs, self.unseen, columns)


class Answer(NamedTuple):
    """The logits that follow the last tokens of some sequences, and the greedy choice among them where a
    captured step has made it.

    Those of a captured step are its own memory: the next step writes over them.
    """

    logits: torch.Tensor
    """[sequences, vocabulary] in fp32"""
    best: torch.Tensor | None = None
    """[2, sequences], as `best` makes it of the logits."""
    scores: Mapping[TokenSequence, torch.Tensor] = MappingProxyType({})
    """Of sequences whose prompts are scored, the numbers of the tokens behind the first of their rows."""

    def clone(self) -> Answer:
        """The same in memory of its own."""
        return Answer(self.logits.clone(), None if self.best is None else self.best.clone())


def download(tensors: Sequence[torch.Tensor]) -> Callable[[], Sequence[torch.Tensor]]:
    """Launch copies of tensors of one device to the host; the answer waits for all of them and has them."""
    if not (tensors and tensors[0].is_cuda):
        return lambda: tensors
    copies = [
        torch.empty(each.shape, dtype=each.dtype, device="cpu", pin_memory=True).copy_(
            each, non_blocking=True
        )
        for each in tensors
    ]
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensors[0].device))

    def wait() -> list[torch.Tensor]:
        event.synchronize()
        return copies

    return wait
