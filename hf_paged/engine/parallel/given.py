"""What prompts are beside token ids: all ranks have it under one number, which steps name."""

from __future__ import annotations

import copy
import itertools
from array import array
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from ...scheduling import SequenceGroup, TokenSequence
from ..forward_batch import PLAIN, ForwardBatch, PromptInputs, RowInputs, inputs_of
from ..multimodal.encoder import EncoderInput
from ..multimodal.media import Media, put_on
from ..requests.params import RequestParams

NO_DELTA = -(2**31)
"""In the place of a RoPE delta that is no single number."""


class GivenNumbers:
    """Rank 0's numbers of what the other ranks have."""

    def __init__(self, requests: Mapping[SequenceGroup, RequestParams]) -> None:
        """requests: those that wait or run and are more than token ids."""
        self._requests = requests
        self._next = itertools.count(1)
        self._held: dict[int, PromptInputs] = {}
        self._last: dict[int, int] = {}
        """The last number of what is held, by its id()."""

    def add(self, given: PromptInputs) -> int:
        """A number for it. What has an older one was encoded anew."""
        number = next(self._next)
        self._held[number] = given
        self._last[id(given)] = number
        return number

    def of(self, given: PromptInputs | None) -> int:
        """Its last number; 0 if it has none."""
        return self._last.get(id(given), 0)

    def missing(self, batch: ForwardBatch) -> list[PromptInputs]:
        """What the rows of a batch are given and the other ranks do not have. Media come when encoded."""
        found = {id(row.given): row.given for row in batch.inputs.values() if row.given is not None}
        return [each for each in found.values() if not isinstance(each, Media) and not self.of(each)]

    def take_gone(self) -> list[int]:
        """The numbers of what no step needs any more."""
        if not self._held:
            return []
        known = (params.given for params in self._requests.values())
        needed = {self.of(each) for each in known if not isinstance(each, Media) or each.made is not None}
        gone = [number for number in self._held if number not in needed]
        for number in gone:
            given = self._held.pop(number)
            if self.of(given) == number:
                del self._last[id(given)]
        return gone


def on_host(given: PromptInputs) -> PromptInputs:
    """The same as it can be sent, without what was made of it."""
    cpu = torch.device("cpu")
    if isinstance(given, torch.Tensor):
        return given.to(cpu)
    sent = copy.copy(given)
    sent.inputs = put_on(given.inputs, cpu)
    sent.made = None
    return sent


def on_device(given: PromptInputs, device: torch.device) -> PromptInputs:
    """What was sent, where a forward takes it; media are moved when they are encoded."""
    if isinstance(given, EncoderInput):
        given.inputs = given.inputs.to(device)
    return given.to(device) if isinstance(given, torch.Tensor) else given


class GivenRow(NamedTuple):
    """What a row is beside token ids, and its cross-attention table."""

    inputs: RowInputs = PLAIN
    length: int = 0
    """The tokens that it attends to across."""
    blocks: tuple[int, ...] = ()
    """Where these are."""

    @classmethod
    def of(cls, inputs: RowInputs, sequence: TokenSequence) -> GivenRow:
        """A row with these inputs."""
        if inputs.source is None:
            return cls(inputs)
        table = sequence.tables[-1]
        return cls(inputs, table.length, tuple(table.blocks))

    def write(self, out: array[int], number: int) -> None:
        """Append this as numbers; number: of what the row is given."""
        inputs = self.inputs
        if inputs.given is not None and not number:
            raise RuntimeError("other ranks do not have what a row is given; report this")
        out.extend((number, NO_DELTA if inputs.rope_delta is None else inputs.rope_delta))
        positions = inputs.positions
        if positions is None:
            out.append(0)
        elif positions.is_floating_point():  # of recordings: their bits
            out.append(-len(positions))
            out.extend(positions.to(torch.float32).view(torch.int32).flatten().tolist())
        else:
            out.append(len(positions))
            out.extend(positions.flatten().tolist())
        out.extend((self.length, len(self.blocks), *self.blocks))

    @classmethod
    def read(cls, read: Iterator[int], given: Mapping[int, PromptInputs], start: int, count: int) -> GivenRow:
        """What `write` has written, for `count` tokens from `start` on."""
        number = next(read)
        delta = next(read)
        axes = next(read)
        numbers = list(itertools.islice(read, abs(axes) * count))
        length = next(read)
        blocks = tuple(itertools.islice(read, next(read)))
        inputs = inputs_of(given[number], start, count, False) if number else PLAIN
        if number and inputs.given is None:
            raise RuntimeError("this rank does not have what a row is given; report this")
        positions = None
        if axes:
            positions = torch.tensor(numbers, dtype=torch.int32, device="cpu").view(abs(axes), count)
            positions = positions.long() if axes > 0 else positions.view(torch.float32)
        inputs = inputs._replace(positions=positions, rope_delta=None if delta == NO_DELTA else delta)
        return cls(inputs, length, blocks)
