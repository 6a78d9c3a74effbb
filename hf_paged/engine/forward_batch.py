"""What a step computes, as the runner takes it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import NamedTuple

import torch

from ..blocks import BlockTable
from ..kv.upload import upload
from ..scheduling import UNKNOWN, DecodeRows, SequenceGroup, StepPlan, TokenSequence
from .multimodal.cross import CrossInputs, CrossMedia
from .multimodal.encoder import EncoderInput
from .multimodal.extras import DecoderExtras
from .requests.params import RequestParams


class ScheduledChunk(NamedTuple):
    """New tokens of one sequence: the last ones of its tables, one table per kind of layer."""

    tokens: list[int]
    start: int
    tables: tuple[BlockTable, ...]
    wanted: bool
    """Whether anybody looks at what follows the last of them."""
    follows: int | None = None
    """Where among the tokens that the last step chose its last token stands, if the host has not heard of it
    yet.
    """
    embeds: torch.Tensor | None = None
    """[n, hidden]: what the first n of its tokens are instead of ids."""
    source: EncoderInput | None = None
    """What its decoder attends to, if the model has an encoder."""
    where: torch.Tensor | None = None
    """[axes, tokens] on the host: where its tokens stand, if that is not one behind the other."""
    shift: int | None = 0
    """How far they stand behind their number, if one number says it."""
    beside: DecoderExtras | None = None
    """What its decoder is given for some of them beside embeddings."""
    across: CrossInputs | None = None
    """What its decoder attends to across, and under which masks."""

    @property
    def of_ids(self) -> bool:
        """Whether its tokens are ids and nothing else, and one number says where they stand."""
        return self.embeds is None and self.shift is not None and self.across is None

    @property
    def positions(self) -> range:
        """The numbers of its tokens in its sequence."""
        return range(self.start, self.start + len(self.tokens))


class LastTokens(NamedTuple):
    """What the last step chose: its tokens on the device [sequences], and who they are for.

    crew: the sequences of its stride, whose tokens come first and in this order. places: finds out where
        everybody's stands.
    """

    tokens: torch.Tensor | None = None
    crew: tuple[TokenSequence, ...] = ()
    places: Callable[[], Mapping[TokenSequence, int]] = dict


class ForwardBatch(Sequence[ScheduledChunk]):
    """The pieces of a plan: those of its stride, then those of everybody else. The former are made for
    whoever looks at each of them; who takes them all at once finds the stride."""

    def __init__(
        self, plan: StepPlan, latest: LastTokens, given: Mapping[SequenceGroup, RequestParams]
    ) -> None:
        """given: the requests whose rows are more than token ids."""
        self.stride: DecodeRows | None = plan.stride
        self._plan, self._latest, self._given = plan, latest, given
        self.others = [self._piece(*row) for row in plan.others]
        self.crew = 0 if plan.stride is None else len(plan.stride.sequences)
        """How many of them are the stride's."""

    def __len__(self) -> int:
        return self.crew + len(self.others)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # a piece or a slice, as of a list
        return self._all[index]

    def __iter__(self) -> Iterator[ScheduledChunk]:
        return iter(self._all)

    @cached_property
    def _all(self) -> list[ScheduledChunk]:
        return [*(self._piece(*row) for row in self._plan.rows[: self.crew]), *self.others]

    def _piece(
        self, sequence: TokenSequence, start: int, count: int, samples: Collection[TokenSequence]
    ) -> ScheduledChunk:
        tokens = sequence.tokens[start : start + count]
        follows = self._latest.places()[sequence] if tokens[-1] == UNKNOWN else None
        made = ScheduledChunk(tokens, start, sequence.tables, bool(samples), follows)
        asked = self._given.get(sequence.group) if self._given else None
        if asked is None:
            return made
        if isinstance(asked.media, CrossMedia):
            assert asked.media.across is not None
            across = asked.media.across.part(start, count, stored=sequence.begun)
            return made._replace(tokens=asked.media.ids_of(start, tokens), across=across)
        if asked.media is not None:
            media, where = asked.media, asked.media.where(start, count)
            made = made._replace(
                where=where,
                shift=media.moved_by(start) if where is not None else 0,
                beside=media.near(start, count),
            )
        return made._replace(embeds=asked.vectors(start, count), source=asked.source)

    def without_across(self) -> ForwardBatch:
        """The same without the chunks that attend across."""
        texts = copy(self)
        texts.__dict__.pop("_all", None)
        texts.others = [piece for piece in self.others if piece.across is None]
        return texts

    def ids(self, device: torch.device) -> torch.Tensor:
        """The tokens [crew] of the stride on a device: from the last step's if the host has not heard of
        them.
        """
        assert self.stride is not None
        sequences, latest = self.stride.sequences, self._latest
        if latest.tokens is not None and latest.crew is sequences:
            return latest.tokens[: self.crew]
        told = [sequence.tokens[-1] for sequence in sequences]
        if UNKNOWN not in told:
            return upload(told, device)
        assert latest.tokens is not None
        places = latest.places()
        at = [places[each] if token == UNKNOWN else -1 for each, token in zip(sequences, told, strict=True)]
        return merged(told, at, latest.tokens)


def merged(told: list[int], places: list[int], latest: torch.Tensor) -> torch.Tensor:
    """Tokens on the device of `latest` [sequences]: those told, or from their places there where these are
    not -1.
    """
    ids, found = upload([told, places], latest.device)
    return torch.where(found < 0, ids, latest[found.clamp(min=0)])


def placed(pieces: Sequence[ScheduledChunk]) -> torch.Tensor | None:
    """[axes, 1, tokens]: where the tokens of all pieces stand, one behind the other; None if their numbers
    say that.
    """
    axes = max((len(piece.where) for piece in pieces if piece.where is not None), default=0)
    if not axes:
        return None
    plain = (
        torch.tensor(piece.positions, device="cpu").expand(axes, -1) if piece.where is None else piece.where
        for piece in pieces
    )
    return torch.cat(list(plain), 1)[:, None]


def split(pieces: Sequence[ScheduledChunk]) -> tuple[DecodeRows | None, Sequence[ScheduledChunk]]:
    """The stride among some pieces, and the others."""
    return (pieces.stride, pieces.others) if isinstance(pieces, ForwardBatch) else (None, pieces)
