"""Inputs of prompts beside token ids: all ranks have them under one number, which steps name."""

from __future__ import annotations

import copy
import itertools
from array import array
from collections.abc import Iterator, Mapping

import torch

from ...model.adapters.virtual import GivenPast
from ...scheduling import SequenceGroup
from ..multimodal import PromptInputs
from ..multimodal.encoder import EncoderInput
from ..multimodal.media import Media, put_on
from ..requests.params import RequestParams
from ..worker.forward_batch import PLAIN, ForwardBatch, RowInputs, inputs_of


class SharedInputs:
    """The other ranks' inputs of requests beside token ids, by rank 0's numbers."""

    def __init__(self, requests: Mapping[SequenceGroup, RequestParams]) -> None:
        """requests: those that wait or run and are more than token ids."""
        self._requests = requests
        self._next = itertools.count(1)
        self._numbers: dict[int, tuple[PromptInputs, int]] = {}
        """By the id of what a request is given this itself, so that the id stays its own, and its number."""
        self._gone: list[int] = []

    def add(self, given: PromptInputs) -> int:
        """A number for what a request is given. Media that were encoded before are encoded anew."""
        if self.of(given):
            self.lose(given)
        number = next(self._next)
        self._numbers[id(given)] = given, number
        return number

    def lose(self, given: PromptInputs) -> None:
        """Not all ranks have it: those that do may forget it."""
        self._gone.append(self._numbers.pop(id(given))[1])

    def of(self, given: PromptInputs) -> int:
        """Its number; 0 if it has none."""
        return self._numbers[id(given)][1] if id(given) in self._numbers else 0

    def missing(self, batch: ForwardBatch) -> list[PromptInputs]:
        """Inputs of a batch's rows that the other ranks do not have. Media come when encoded."""
        rows = {id(row.prompt): row.prompt for row in batch.inputs.values()}
        return [
            given
            for given in rows.values()
            if given is not None and not isinstance(given, Media) and not self.of(given)
        ]

    def take_gone(self) -> list[int]:
        """The numbers of what no step needs any more."""
        needed = {id(given) for given in map(_needed, self._requests.values())} if self._numbers else ()
        for given, _ in [each for each in self._numbers.values() if id(each[0]) not in needed]:
            self.lose(given)
        gone = self._gone
        self._gone = []
        return gone


def _needed(params: RequestParams) -> PromptInputs | None:
    """The inputs of a request that other ranks must have; none of media whose embeddings are spent."""
    return None if params.media is not None and params.media.made is None else params.prompt_inputs


def on_host(given: PromptInputs) -> PromptInputs:
    """The same as it can be sent, without what was made of it."""
    cpu = torch.device("cpu")
    if isinstance(given, torch.Tensor):
        return given.to(cpu)
    assert not isinstance(given, GivenPast), "require_media() refuses it"
    sent = copy.copy(given)
    sent.inputs = put_on(given.inputs, cpu)
    sent.made = None
    return sent


def on_device(given: PromptInputs, device: torch.device) -> PromptInputs:
    """Sent inputs, where a forward takes them; media are moved when they are encoded."""
    if isinstance(given, EncoderInput):
        given.inputs = given.inputs.to(device)
    return given.to(device) if isinstance(given, torch.Tensor) else given


def write_inputs(out: array[int], inputs: RowInputs, shared: SharedInputs) -> None:
    """Append a row's inputs beside token ids as numbers."""
    number = 0 if inputs.prompt is None else shared.of(inputs.prompt)
    if inputs.prompt is not None and not number:
        raise RuntimeError("other ranks do not have what a row is given; report this")
    out.append(number)
    positions = inputs.positions
    if positions is None:
        out.append(0)
    elif positions.is_floating_point():  # of recordings: their bits
        out.append(-len(positions))
        out.extend(positions.to(torch.float32).view(torch.int32).flatten().tolist())
    else:
        out.append(len(positions))
        out.extend(positions.flatten().tolist())


def read_inputs(read: Iterator[int], given: Mapping[int, PromptInputs], start: int, count: int) -> RowInputs:
    """The inputs as `write_inputs` wrote them, of `count` tokens from `start` on."""
    number = next(read)
    axes = next(read)
    numbers = list(itertools.islice(read, abs(axes) * count))
    inputs = inputs_of(given[number], start, count, False) if number else PLAIN
    if number and inputs.prompt is None:
        raise RuntimeError("this rank does not have what a row is given; report this")
    positions = None
    if axes:
        positions = torch.tensor(numbers, dtype=torch.int32, device="cpu").view(abs(axes), count)
        positions = positions.long() if axes > 0 else positions.view(torch.float32)
    return inputs._replace(positions=positions)
