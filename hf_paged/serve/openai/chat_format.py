"""Answers in OpenAI's forms: one JSON body, or chunks of a stream."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from ...engine import TokenLogprob
from ..http.errors import ApiError
from ..http.streams import DONE, event
from .generation import Piece, Usage
from .reply_parser import Reply, call_bodies
from .tokens import Tokenizer

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has not."""


def joined(pieces: list[Piece]) -> list[Piece]:
    """The pieces of each answer as one, by the answers' indices."""
    if len(pieces) == 1:
        return pieces
    found: dict[int, Piece] = {}
    for new in pieces:
        old = found.get(new.choice)
        found[new.choice] = new if old is None else _join(old, new)
    return [found[index] for index in sorted(found)]


def best(answers: list[Piece], drawn: int, most: int) -> list[Piece]:
    """Of the `drawn` answers to each prompt so many, the likeliest tokens on the average first."""
    if drawn == most:
        return answers
    ranked = sorted(answers, key=lambda each: (each.choice // drawn, -_mean_logprob(each)))
    kept = [each for i, each in enumerate(ranked) if i % drawn < most]
    return [each._replace(choice=i) for i, each in enumerate(kept)]


def _mean_logprob(piece: Piece) -> float:
    return sum(note.logprob for note in piece.logprobs) / max(len(piece.logprobs), 1)


def _join(old: Piece, new: Piece) -> Piece:
    return Piece(
        old.choice,
        old.text + new.text,
        old.token_ids + new.token_ids,
        old.logprobs + new.logprobs,
        old.offsets + new.offsets,
        new.finish_reason or old.finish_reason,
    )


class Form(ABC):
    """How an answer is written: a kind of object, and of choices."""

    whole_object: str
    chunk_object: str

    def __init__(
        self, number: str, model: str, tokenizer: Tokenizer, prompts: list[tuple[int, ...]], answers: int
    ) -> None:
        """number: of the request. prompts: their ids, if the client wants them back. answers: to each."""
        self._number = number
        self._model = model
        self._created = int(time.time())
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._answers = answers
        self.with_logprobs = False
        self.with_ids = False
        self.name = tokenizer.token
        """How a token is called beside its logprob."""
        self.scored: int | None = None
        """How many alternatives beside each token of the prompt, in vLLM's form; None for no such form."""
        self.prompt_notes: Callable[[int], list[TokenLogprob | None]] = lambda prompt: []
        """The model's scores of the tokens of a prompt, where these are asked for."""
        before, behind = self._chunk([self._choice_with(self._delta("\0"))]).split(b'"\\u0000"')
        self._template = before.split(b'"index":0'), behind

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._number, "object": kind, "created": self._created, "model": self._model}

    def _chunk(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> bytes:
        body = {**self._head(self.chunk_object), "choices": choices}
        if usage is not None:
            body["usage"] = usage.body
        return event(body)

    def chunk(self, piece: Piece) -> bytes:
        """A piece as an event; nothing for one that shows nothing."""
        if self.with_logprobs or self.with_ids or piece.finish_reason is not None:
            return self._chunk([self._choice(piece, self._delta(piece.text))])
        if not piece.text:
            return b""
        (first, second), last = self._template
        text = json.dumps(piece.text, ensure_ascii=False).encode()
        return b'%b"index":%d%b%b%b' % (first, piece.choice, second, text, last)

    def closing(self, usage: Usage, asked: bool) -> bytes:
        """The end of a stream. asked: whether the client wants the usage."""
        return (self._chunk([], usage) if asked else b"") + DONE

    def failure(self, error: ApiError) -> bytes:
        """The end of a stream that has failed, whose status is sent already."""
        return event(error.body) + DONE

    def opening(self) -> Iterable[bytes]:
        """The beginning of a stream."""
        return ()

    def whole(self, pieces: list[Piece], usage: Usage) -> dict[str, Any]:
        """The answer as one body."""
        choices = [self._choice(piece, self._content(piece.text)) for piece in pieces]
        return {**self._head(self.whole_object), "choices": choices, "usage": usage.body}

    def _choice(self, piece: Piece, content: dict[str, Any]) -> dict[str, Any]:
        logprobs = self._logprobs(piece) if self.with_logprobs else None
        choice = self._choice_with(content, piece.choice, logprobs, piece.finish_reason)
        if self.with_ids:
            choice["token_ids"] = piece.token_ids
            choice["prompt_token_ids"] = list(self._prompts[piece.choice // self._answers])
        return choice

    def _choice_with(
        self, content: dict[str, Any], index: int = 0, logprobs: Any = None, reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def _prompt_logprobs(self, prompt: int) -> list[dict[str, Any] | None]:
        """Of the tokens of a prompt, as vLLM writes them. A rank is known of the alternatives alone."""
        return [
            None
            if note is None
            else self._ranked(note._replace(top_logprobs=note.top_logprobs[: self.scored]))
            for note in self.prompt_notes(prompt)
        ]

    def _ranked(self, note: TokenLogprob) -> dict[str, Any]:
        ranks = {token: rank for rank, (token, _) in enumerate(note.top_logprobs, 1)}
        return {
            str(token): {
                "logprob": _finite(value),
                "rank": ranks.get(token),
                "decoded_token": self.name(token),
            }
            for token, value in _candidates(note)
        }

    @abstractmethod
    def _delta(self, text: str) -> dict[str, Any]:
        """New text in a chunk's choice."""

    @abstractmethod
    def _content(self, text: str) -> dict[str, Any]:
        """The whole text in a choice."""

    @abstractmethod
    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        """The logprobs of a piece."""


class CompletionForm(Form):
    """Of /v1/completions."""

    whole_object = chunk_object = "text_completion"

    def __init__(self, *args: Any) -> None:
        self.echoes: list[str] = []
        """The texts of the prompts, if they are shown before the answers."""
        self.texts: list[bool] = []
        """True where a prompt was a text, not ids."""
        self.top_logprobs = 0
        """How many alternatives beside each token."""
        self._opened: set[int] = set()
        """The answers before which the prompt was shown with its logprobs."""
        super().__init__(*args)

    def opening(self) -> Iterable[bytes]:
        if self.with_logprobs:
            return  # it comes with its logprobs, before the first token
        for i in range(len(self.echoes) * self._answers):
            yield self._chunk([self._choice_with(self._delta(self.echoes[i // self._answers]), i)])

    def chunk(self, piece: Piece) -> bytes:
        if not (self.echoes and self.with_logprobs):
            return super().chunk(piece)
        echo = self._echo(piece.choice)
        shown = super().chunk(self._behind(echo, piece))
        if piece.choice in self._opened:
            return shown
        self._opened.add(piece.choice)
        notes = self._echoed(piece.choice // self._answers)
        return self._chunk([self._choice_with(self._delta(echo), piece.choice, notes)]) + shown

    def whole(self, pieces: list[Piece], usage: Usage) -> dict[str, Any]:
        if self.echoes:
            echoes = [self._echo(each.choice) for each in pieces]
            pieces = [
                self._behind(echo, each)._replace(text=echo + each.text)
                for echo, each in zip(echoes, pieces, strict=True)
            ]
        body = super().whole(pieces, usage)
        for choice in body["choices"]:
            prompt = choice["index"] // self._answers
            if self.echoes and self.with_logprobs:
                own = choice["logprobs"]
                choice["logprobs"] = {key: value + own[key] for key, value in self._echoed(prompt).items()}
            if self.scored is not None:
                choice["prompt_logprobs"] = self._prompt_logprobs(prompt)
        return body

    def _echo(self, choice: int) -> str:
        return self.echoes[choice // self._answers]

    def _behind(self, echo: str, piece: Piece) -> Piece:
        return piece._replace(offsets=[len(echo) + offset for offset in piece.offsets])

    def _echoed(self, prompt: int) -> dict[str, list[Any]]:
        """The logprobs of a prompt's tokens. The first one follows nothing and has none."""
        name = self.name
        ids = self._prompts[prompt]
        notes = self.prompt_notes(prompt)
        return {
            "tokens": [name(token) for token in ids],
            "token_logprobs": [None if each is None else _finite(each.logprob) for each in notes],
            "top_logprobs": [None if each is None else self._top(each) for each in notes],
            "text_offset": self._tokenizer.offsets(ids, self.texts[prompt]),
        }

    def _top(self, note: TokenLogprob) -> dict[str, float]:
        """The alternatives to a token by their texts, and itself; the likeliest of those that read alike."""
        found: dict[str, float] = {}
        for token, value in _candidates(note._replace(top_logprobs=note.top_logprobs[: self.top_logprobs])):
            found.setdefault(self.name(token), _finite(value))
        return found

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    _content = _delta

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        name = self.name
        return {
            "tokens": [name(each.token_id) for each in piece.logprobs],
            "token_logprobs": [_finite(each.logprob) for each in piece.logprobs],
            "top_logprobs": [self._top(each) for each in piece.logprobs],
            "text_offset": piece.offsets,
        }


class ChatForm(Form):
    """Of /v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, *args: Any) -> None:
        self.replies: list[Reply] = []
        """A reader for each answer, if it may be more than content."""
        self._calls: Counter[int] = Counter()
        """The calls of each answer so far."""
        super().__init__(*args)

    def chunk(self, piece: Piece) -> bytes:
        if not self.replies:
            return super().chunk(piece)
        reply = self.replies[piece.choice]
        delta = reply.add(piece.text, piece.finish_reason is not None)
        body: dict[str, Any] = {}
        if delta.reasoning:
            body["reasoning_content"] = delta.reasoning
        if delta.content:
            body["content"] = delta.content
        if delta.calls:
            body["tool_calls"] = call_bodies(delta.calls, self._calls[piece.choice])
            self._calls[piece.choice] += len(delta.calls)
        if not (body or piece.finish_reason or self.with_logprobs or self.with_ids):
            return b""
        piece = piece._replace(finish_reason=reply.reason(piece.finish_reason))
        return self._chunk([self._choice(piece, {"delta": body})])

    def whole(self, pieces: list[Piece], usage: Usage) -> dict[str, Any]:
        body = self._read(pieces, usage) if self.replies else super().whole(pieces, usage)
        if self.scored is not None:
            body["prompt_logprobs"] = self._prompt_logprobs(0)
        if self.with_ids:  # here they are the same for all choices
            body["prompt_token_ids"] = list(self._prompts[0])
        return body

    def _read(self, pieces: list[Piece], usage: Usage) -> dict[str, Any]:
        """The answers as they are read, in one body."""
        choices = []
        for piece in pieces:
            reply = self.replies[piece.choice]
            delta = reply.add(piece.text, last=True)
            content = delta.content if delta.content or not delta.calls else None
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            if delta.reasoning:
                message["reasoning_content"] = delta.reasoning
            if delta.calls:
                message["tool_calls"] = call_bodies(delta.calls)
            piece = piece._replace(finish_reason=reply.reason(piece.finish_reason))
            choices.append(self._choice(piece, {"message": message}))
        return {**self._head(self.whole_object), "choices": choices, "usage": usage.body}

    def opening(self) -> Iterable[bytes]:
        for i in range(self._answers):
            yield self._chunk([self._choice_with({"delta": {"role": "assistant", "content": ""}}, i)])

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._named(each.token_id, each.logprob),
                    "top_logprobs": [self._named(token, value) for token, value in each.top_logprobs],
                }
                for each in piece.logprobs
            ],
            "refusal": None,
        }

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        shown = list(self._tokenizer.bytes(token))
        return {"token": self.name(token), "logprob": _finite(logprob), "bytes": shown}


def _candidates(note: TokenLogprob) -> list[tuple[int, float]]:
    """The alternatives to a token, and itself if it is none of them."""
    found = dict(note.top_logprobs)
    found.setdefault(note.token_id, note.logprob)
    return list(found.items())


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
