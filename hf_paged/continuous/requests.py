"""Requests of transformers' manager, as the engine computes them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
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


class ActiveRequests:
    """The requests of a manager that have not ended, by their ids, of which no two are equal."""

    def __init__(self) -> None:
        self._requests: dict[str, BatchRequest] = {}
        self._entering: set[str] = set()
        """The ids of requests on their way to the engine."""
        self._lock = threading.Lock()
        self._count = 0
        """How many ids were made up, and avoided."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    @contextlib.contextmanager
    def entering(self, count: int, request_id: str | None = None) -> Iterator[list[str]]:
        """Ids, the caller's or new ones, that no other request has or gets while these are submitted."""
        with self._lock:
            if request_id is not None and self._is_taken(request_id):
                raise ValueError(
                    f"request_id={request_id!r} names a request that is under way; give another one"
                )
            ids = self._new_ids(count) if request_id is None else [request_id]
            self._entering.update(ids)
        try:
            yield ids
        finally:
            with self._lock:
                self._entering.difference_update(ids)

    def _is_taken(self, request_id: str) -> bool:
        return request_id in self._requests or request_id in self._entering

    def _new_ids(self, count: int) -> list[str]:
        first = self._count
        while any(self._is_taken(f"req_{number}") for number in range(first, first + count)):
            first += 1  # a caller's own
        self._count = first + count
        return [f"req_{number}" for number in range(first, first + count)]

    def add(self, request: BatchRequest) -> None:
        """Add a request that the engine has, under each of its ids."""
        self._requests.update(dict.fromkeys(request.ids, request))

    def of(self, ids: Iterable[str]) -> BatchRequest | None:
        """The request that one of the ids still names."""
        return next(filter(None, map(self._requests.get, ids)), None)

    def remove(self, request_id: str) -> BatchRequest | None:
        """Take an id out; the request that it named, None if that has ended or was cancelled."""
        return self._requests.pop(request_id, None)

    def remove_all(self) -> Iterator[tuple[str, BatchRequest]]:
        """Take out one id after the other, each before its request is handed out."""
        for request_id, request in list(self._requests.items()):
            self._requests.pop(request_id, None)
            yield request_id, request


class BatchProcessor:
    """The part of transformers' batch processor that `transformers serve` reads: a scheduler that knows the
    requests that have not ended.
    """

    def __init__(self, requests: ActiveRequests) -> None:
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
