"""Answers in the form of /v1/responses: items, and in a stream an event for each of their changes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from ..http.errors import ApiError
from ..http.streams import event
from .chat_format import ChatForm
from .generation import Piece, Usage
from .reply_parser import Delta, FunctionCall
from .responses import ResponsesRequest

Event = dict[str, Any]
TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}
"""Names of an item's content, by the item's type."""
ECHOED = ("instructions", "max_output_tokens", "top_logprobs")
SHOWN = {*ECHOED, "tools", "tool_choice", "text", "reasoning"}
"""Fields of a request that its answer repeats."""
STATUSES = {"length": "incomplete", "abort": "failed"}
"""Of a response, by why its answer has ended; others are completed."""


class Items:
    """The items of an answer as they grow. Each change is an event, without its number."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._text = ""
        """The text of the open item."""
        self._logprobs: list[Any] = []

    def add(self, delta: Delta, logprobs: list[Any], last: str | None) -> Iterator[Event]:
        """Take what is new. last: the status of the item that is open then, if nothing follows."""
        for kind, text in (("reasoning", delta.reasoning), ("message", delta.content)):
            if text or (kind == "message" and logprobs):
                yield from self._grow(kind, text, logprobs)
        for call in delta.calls:
            yield from self._close()
            yield from self._call(call, last or "completed")
        if last is not None:
            if not self.done and self._open is None:
                yield from self._begin("message")
            yield from self._close(last)

    @property
    def reasoning(self) -> str:
        """The text of all reasoning."""
        items = [each for each in self.done if each["type"] == "reasoning"]
        return "".join(part["text"] for each in items for part in each["content"])

    def _at(self, event: str, **more: Any) -> Event:
        assert self._open is not None
        return {"type": event, "item_id": self._open["id"], "output_index": len(self.done), **more}

    def _part(self) -> dict[str, Any]:
        assert self._open is not None
        part: dict[str, Any] = {"type": TEXTS[self._open["type"]], "text": self._text}
        return (
            part
            if self._open["type"] == "reasoning"
            else part | {"annotations": [], "logprobs": self._logprobs}
        )

    def _begin(self, kind: str) -> Iterator[Event]:
        item: dict[str, Any] = {"id": _id({"message": "msg", "reasoning": "rs"}[kind]), "type": kind}
        item |= {"role": "assistant"} if kind == "message" else {"summary": list[Any]()}
        self._open = {**item, "status": "in_progress", "content": []}
        self._text = ""
        self._logprobs = []
        yield self._item("added")
        yield self._at("response.content_part.added", content_index=0, part=self._part())

    def _item(self, change: str) -> Event:
        return {"type": f"response.output_item.{change}", "output_index": len(self.done), "item": self._open}

    def _grow(self, kind: str, text: str, logprobs: list[Any]) -> Iterator[Event]:
        if self._open is None or self._open["type"] != kind:
            yield from self._close()
            yield from self._begin(kind)
        self._text += text
        more = {} if kind == "reasoning" else {"logprobs": logprobs}
        self._logprobs = self._logprobs + logprobs
        yield self._at(f"response.{TEXTS[kind]}.delta", content_index=0, delta=text, **more)

    def _close(self, status: str = "completed") -> Iterator[Event]:
        if self._open is None:
            return
        kind = self._open["type"]
        more = {} if kind == "reasoning" else {"logprobs": self._logprobs}
        yield self._at(f"response.{TEXTS[kind]}.done", content_index=0, text=self._text, **more)
        yield self._at("response.content_part.done", content_index=0, part=self._part())
        self._open = {**self._open, "status": status, "content": [self._part()]}
        yield self._item("done")
        self.done.append(self._open)
        self._open = None

    def _call(self, call: FunctionCall, status: str) -> Iterator[Event]:
        item = {"id": _id("fc"), "type": "function_call", "call_id": _id("call"), "name": call.name}
        self._open = {**item, "status": "in_progress", "arguments": ""}
        yield self._item("added")
        yield self._at("response.function_call_arguments.delta", delta=call.arguments)
        yield self._at("response.function_call_arguments.done", name=call.name, arguments=call.arguments)
        self._open = {**item, "status": status, "arguments": call.arguments}
        yield self._item("done")
        self.done.append(self._open)
        self._open = None


class ResponseForm(ChatForm):
    """Of /v1/responses."""

    def __init__(self, asked: ResponsesRequest, *args: Any) -> None:
        self._asked = asked
        self._items = Items()
        self._events = 0
        self._reason: str | None = None
        super().__init__(*args)

    def opening(self) -> Iterable[bytes]:
        body = self._body("in_progress")
        return [
            self._event({"type": f"response.{each}", "response": body}) for each in ("created", "in_progress")
        ]

    def chunk(self, piece: Piece) -> bytes:
        return b"".join(map(self._event, self._events_of(piece)))

    def closing(self, usage: Usage, asked: bool) -> bytes:
        body = self._body(STATUSES.get(self._reason or "", "completed"), usage)
        return self._event({"type": f"response.{body['status']}", "response": body})

    def failure(self, error: ApiError) -> bytes:
        return failed(self._body("failed"), error.message, error.code, self._events)

    def whole(self, pieces: list[Piece], usage: Usage) -> dict[str, Any]:
        for piece in pieces:
            list(self._events_of(piece))
        return self._body(STATUSES.get(self._reason or "", "completed"), usage)

    def _events_of(self, piece: Piece) -> Iterator[Event]:
        ended = piece.finish_reason
        delta = self.replies[0].add(piece.text, ended is not None) if self.replies else Delta(piece.text)
        self._reason = ended
        last = None if ended is None else "incomplete" if ended in STATUSES else "completed"
        return self._items.add(delta, self._logprobs(piece)["content"] if self.with_logprobs else [], last)

    def _event(self, found: Event) -> bytes:
        made = _numbered(found, self._events)
        self._events += 1
        return made

    def _body(self, status: str, usage: Usage | None = None) -> dict[str, Any]:
        asked = self._asked
        given = asked.model_dump(include=SHOWN, by_alias=True, exclude_none=True)
        over = status != "in_progress"
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        broken = {"code": "server_error", "message": "the answer was broken off; send the request again"}
        return {
            **self._head("response"),
            "status": status,
            "error": broken if status == "failed" else None,
            "incomplete_details": cut,
            "completed_at": time.time() if over else None,
            "output": self._items.done if over else [],
            "usage": None if usage is None else self._usage(usage),
            "tools": [{"strict": None, "parameters": None, **each} for each in given.get("tools", ())],
            "tool_choice": given.get("tool_choice", "auto"),
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "text": {"format": {"type": "text"}, **given.get("text", {})},
            "reasoning": {"effort": None, "summary": None, **given.get("reasoning", {})},
            **{name: given.get(name) for name in ECHOED},
            "truncation": "disabled",
            "store": False,
            "background": False,
            "previous_response_id": None,
            "metadata": {},
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._number, "object": kind, "created_at": self._created, "model": self._model}

    def _usage(self, usage: Usage) -> dict[str, Any]:
        reasoning = self._items.reasoning
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._tokenizer.count(reasoning)},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def failed(response: dict[str, Any], message: str, code: str | None, number: int) -> bytes:
    """The last event of a stream that an error ends. response: as it stood in an event before. code: that of
    the error; the code within a response is one of OpenAI's few.
    """
    body = {**response, "status": "failed", "error": {"code": "server_error", "message": message}}
    return _numbered({"type": "response.failed", "response": body, "code": code}, number)


def _numbered(found: Event, number: int) -> bytes:
    return b"event: " + str(found["type"]).encode() + b"\n" + event({**found, "sequence_number": number})


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex[:24]}"
