"""Requests of transformers' manager, as the engine computes them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from ..engine import Handle


def output_id(request_id: str, place: int) -> str:
    """The id of an output: the first has the request's own, the others are its children."""
    return request_id if place == 0 else f"{request_id}__child#{place - 1}"


class BatchRequest:
    """Requests of the manager that are one of the engine's, for their prompts are equal: a handle, whose
    sequences are outputs with ids of their own.

    ids: those of the requests; one that streams is alone. each: the outputs of each of them. copies: how many
    equal outputs a sequence of the handle is.
    """

    def __init__(
        self,
        ids: list[str],
        prompt: list[int],
        handle: Handle,
        each: int,
        copies: int,
        stamps: bool,
        streams: bool,
    ) -> None:
        self.ids = ids
        self.prompt = prompt
        self.handle = handle
        self.each = each
        self.copies = copies
        self.stamps = stamps
        self.streams = streams
        self.created = time.perf_counter()
        self.tokens: dict[int, list[int]] = {}
        self.times: dict[int, list[float]] = {}
        self.logprobs: dict[int, list[float]] = {}

    def read(self) -> list[GenerationOutput]:
        """Take what is new: an output for each new token of a sequence that goes on."""
        new = []
        for increment in self.handle.read():
            place = increment.index
            tokens = self.tokens.setdefault(place, [])
            before = len(tokens)
            tokens.extend(increment.token_ids)
            now = [time.perf_counter()] * len(increment.token_ids)
            self.times.setdefault(place, []).extend(now)
            notes = increment.logprobs or []
            self.logprobs.setdefault(place, []).extend(note.processed or 0.0 for note in notes)
            for count in range(before + 1, len(tokens) + 1) if self.streams else ():
                new += [self.so_far(place * self.copies + copy, count) for copy in range(self.copies)]
        return new

    def name_of(self, place: int) -> str:
        """The id of an output."""
        return output_id(self.ids[place // self.each], place % self.each)

    def tokens_of(self, request_id: str) -> list[list[int]]:
        """The tokens of a request's outputs so far."""
        first = self.ids.index(request_id) * self.each
        return [self.tokens.get(place // self.copies, [])[:] for place in range(first, first + self.each)]

    def so_far(self, place: int, count: int | None = None) -> GenerationOutput:
        """The first tokens of an output that goes on; all that are known without a count."""
        own = place // self.copies
        return GenerationOutput(
            request_id=self.name_of(place),
            prompt_ids=self.prompt,
            generated_tokens=self.tokens.get(own, [])[:count],
            logprobs=self.logprobs.get(own, [])[:count],
            status=RequestStatus.DECODING,
            created_time=self.created,
            lifespan=(self.created, -1),
            timestamps=self.times.get(own, [])[:count] if self.stamps else None,
        )

    def ended(self) -> list[GenerationOutput]:
        """The outputs of all sequences; the request is done."""
        output = self.handle.result(0)
        started = output.timing.started or output.timing.submitted
        finished = output.timing.finished or time.monotonic()
        error = None if output.error is None else f"{type(output.error).__name__}: {output.error}"
        if error is None and output.finish_reason == "abort":
            error = "the engine was closed, or ended its requests, before this one was complete"
        sequences = [each for each in output.sequences for _ in range(self.copies)]
        return [
            GenerationOutput(
                request_id=self.name_of(place),
                prompt_ids=self.prompt,
                generated_tokens=list(sequence.token_ids),
                logprobs=[each or 0.0 for each in sequence.logprobs.processed] if sequence.logprobs else [],
                error=error,
                status=RequestStatus.FINISHED if error is None else RequestStatus.FAILED,
                created_time=self.created,
                lifespan=(started, finished),
                timestamps=self.times.get(place // self.copies, [])[:] if self.stamps else None,
            )
            for place, sequence in enumerate(sequences)
        ]


class BatchProcessor:
    """The part of transformers' batch processor that `transformers serve` reads: a scheduler that knows the
    requests that have not ended.
    """

    def __init__(self, requests: Mapping[str, BatchRequest]) -> None:
        self._requests = requests

    @property
    def scheduler(self) -> BatchProcessor:
        """Its scheduler, which is all that it is."""
        return self

    def has_pending_requests(self) -> bool:
        """True while a request has not ended."""
        return bool(self._requests)

    def request_is_cancelled(self, request_id: str) -> bool:
        """True if a request is cancelled, or has ended."""
        return request_id not in self._requests

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name} belongs to transformers' own scheduler; see manager.engine.stats() instead"
        )
