"""The engine's requests of one HTTP request, and what comes of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from ...engine import Increment, TokenLogprob
from ...engine.outputs.text import AnswerText
from ..http.errors import ApiError, invalid, unavailable
from ..http.metrics import Metrics
from ..http.throttle import Turns
from ..link.engine_client import CallError, EngineClient, EngineRequest
from ..link.wire import End, Failure
from .adapters import ServedAdapter

KEEP_ALIVE = 15.0
"""Seconds without news after which a stream sends a comment."""


class Piece(NamedTuple):
    """New parts of one answer.

    choice: the answer's place among those to all prompts. offsets: where in the answer's text each token
    with a logprob begins.
    """

    choice: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    offsets: list[int]
    finish_reason: str | None


class Usage(NamedTuple):
    """The cost of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def body(self) -> dict[str, Any]:
        """In OpenAI's form."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass
class TextAnswers:
    """The answers to one prompt: one request of the engine."""

    ids: tuple[int, ...]
    handle: EngineRequest
    texts: list[AnswerText]
    first_index: int
    reasons: list[str | None]
    """Why each answer ended, as the client sees it; None while it is running."""
    tokens: int = 0
    last_news: float | None = None
    noted: bool = False
    """True once the metrics know its end."""
    _cancelled: bool = field(default=False, repr=False)

    @property
    def ended(self) -> bool:
        """True once all answers have ended."""
        return None not in self.reasons

    def take(self, increment: Increment) -> Piece | None:
        """An increment as the client sees it; None behind a stop string."""
        if self.reasons[increment.index] is not None:
            return None
        text = self.texts[increment.index]
        offset = text.length
        reason = increment.finish_reason
        shown = text.add(increment.token_ids, reason is not None)
        self.tokens += len(increment.token_ids)
        if (
            text.stopped
        ):  # the engine reads no special tokens that are shown, and no blanks that decoders tidy
            reason = "stop"
        self.reasons[increment.index] = reason
        if text.stopped and self.ended and self.handle.end is None:
            self.cancel()
        notes = increment.logprobs or []
        return Piece(
            self.first_index + increment.index,
            shown,
            increment.token_ids,
            notes,
            [offset] * len(notes),
            reason,
        )

    def cancel(self) -> None:
        """Free what the engine holds for it at its next step."""
        if not self._cancelled:
            self._cancelled = True
            self.handle.cancel()


class Submission(NamedTuple):
    """A prompt for the engine: its ids, the keywords of `submit()`, and the text of each answer."""

    ids: tuple[int, ...]
    keywords: dict[str, Any]
    texts: list[AnswerText]


class Generation:
    """The engine's requests of one HTTP request: submitted together, read together, broken off together.

    An event is posted when there is something to read; answers that are not read wait as token ids, so a slow
    client holds up no other and costs no more than its answers.
    """

    def __init__(
        self,
        engine: EngineClient,
        wakes: Turns,
        metrics: Metrics,
        model: str,
        each: bool,
        own: Callable[[EngineRequest, tuple[int, ...]], None],
        adapter: ServedAdapter | None,
    ) -> None:
        """model: as the metrics call it. each: whether every token is news; else the end alone is. own:
        called with each request and its prompt as soon as the engine has it. adapter: that of all prompts.
        """
        self._engine = engine
        self._metrics = metrics
        self._model = model
        self._each = each
        self._own = own
        self._told: Callable[[str], str] = str if adapter is None else adapter.told
        self._news = asyncio.Event()
        self._wake: Callable[[], None] = partial(wakes.post, self._news.set)
        self.begun = time.monotonic()
        self.answers: list[TextAnswers] = []
        self._ticked = False
        """True if the timer has rung since the last piece."""
        self.gone = False
        """True once the client is gone."""

    async def submit(self, submissions: Sequence[Submission], turns: Turns) -> None:
        """Hand all prompts to the engine. If it refuses one, none is computed."""
        width = max(len(each.texts) for each in submissions)
        try:
            for i, each in enumerate(submissions):
                await turns.take()
                handle = await self._accepted(each)
                self._own(handle, each.ids)
                self.answers.append(
                    TextAnswers(each.ids, handle, each.texts, i * width, [None] * len(each.texts))
                )
        except BaseException:
            self.close()
            raise

    async def _accepted(self, submission: Submission) -> EngineRequest:
        try:
            return await self._engine.submit(submission.ids, submission.keywords, self._wake, self._each)
        except CallError as error:
            message = self._told(str(error))
            if error.refused:
                raise invalid(message, "max_tokens", "context_length_exceeded") from error
            if error.wrong:
                raise invalid(message, "task_ids" if message.startswith("task_ids=") else None) from error
            if error.kind == "NotCompiled":
                raise unavailable(message) from error
            raise

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """New pieces, as often as there are some; an empty list now and then while there are none."""
        self._ticker = asyncio.get_running_loop().call_later(KEEP_ALIVE, self._tick)
        try:
            while True:
                self._news.clear()  # what comes from here on sets it again
                pieces = self._read()
                if pieces or self._ticked:
                    self._ticked = False
                    yield pieces
                if self.gone or all(each.noted for each in self.answers):
                    return
                self._require_alive()
                await self._news.wait()
        finally:
            self._ticker.cancel()

    def _tick(self) -> None:
        """Wake the reader up every KEEP_ALIVE seconds: one timer costs less than a timeout at each token."""
        self._ticked = True
        self._ticker = asyncio.get_running_loop().call_later(KEEP_ALIVE, self._tick)
        self._news.set()

    def _require_alive(self) -> None:
        if not self._engine.driven and any(each.handle.end is None for each in self.answers):
            raise unavailable(
                "the engine has stopped while it computed this; restart the server", 30, "engine_stopped"
            )

    def _read(self) -> list[Piece]:
        pieces: list[Piece] = []
        for each in self.answers:
            if each.noted:
                continue
            increments = each.handle.read()
            if increments:
                self._time(each, increments)
                pieces += [piece for piece in map(each.take, increments) if piece is not None]
            end = each.handle.end
            if end is not None and each.ended:
                self._note_end(each, end)
        return pieces

    def _time(self, answers: TextAnswers, increments: list[Increment]) -> None:
        tokens = sum(len(each.token_ids) for each in increments)
        self._metrics.generation_tokens.add(tokens, model_name=self._model)
        if not self._each:
            return
        now = time.monotonic()
        if answers.last_news is not None and tokens:
            self._metrics.between_tokens.observe(
                (now - answers.last_news) / tokens, tokens, model_name=self._model
            )
        answers.last_news = now if tokens else answers.last_news

    def _note_end(self, answers: TextAnswers, end: End) -> None:
        answers.noted = True
        metrics = self._metrics
        name = self._model
        metrics.prompt_tokens.add(len(answers.ids), model_name=name)
        metrics.queries.add(len(answers.ids), model_name=name)
        metrics.hits.add(end.cached_tokens, model_name=name)
        metrics.end_to_end.observe(time.monotonic() - self.begun, model_name=name)
        if end.started is not None:
            metrics.queued.observe(end.started - self.begun, model_name=name)
        if end.first_token is not None:
            metrics.first_token.observe(end.first_token - self.begun, model_name=name)
        for reason in answers.reasons:
            metrics.success.add(finished_reason=str(reason), model_name=name)
        if end.failure is not None:
            raise _failed(end.failure._replace(message=self._told(end.failure.message)))

    def cancel(self) -> None:
        """End what is not done; tokens so far stay, and the reason is "abort"."""
        for each in self.answers:
            each.cancel()

    def leave(self) -> None:
        """The client is gone: break off, and read no more."""
        self.gone = True
        self.cancel()
        self._news.set()

    def close(self) -> None:
        """Leave nothing behind in the engine."""
        for each in self.answers:
            if each.noted:
                continue
            each.noted = True
            self._engine.forget(each.handle)
            for reason in each.reasons:
                self._metrics.success.add(finished_reason=reason or "abort", model_name=self._model)
            each.cancel()

    def prompt_notes(self, prompt: int) -> list[TokenLogprob | None]:
        """The model's scores of the tokens of a prompt, once it has answered."""
        notes = self.answers[prompt].handle.prompt_logprobs
        if notes is None:
            raise ApiError(504, "the request ran out of time before its prompt was computed", code="timeout")
        return notes

    @property
    def usage(self) -> Usage:
        """Its cost so far; cached tokens are known at the end."""
        ends = [each.handle.end for each in self.answers]
        return Usage(
            sum(len(each.ids) for each in self.answers),
            sum(each.tokens for each in self.answers),
            sum(end.cached_tokens for end in ends if end is not None),
        )


def _failed(failure: Failure) -> ApiError:
    if failure.kind == "GrammarError":  # some trouble shows only while a grammar is followed
        return invalid(f"the answer's form is too complex: {failure.message:.500}; simplify it")
    return ApiError(
        500,
        f"the request ended with {failure.kind}: {failure.message:.500}; the others are not affected",
        code="failed",
    )
