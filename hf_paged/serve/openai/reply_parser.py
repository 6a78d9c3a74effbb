"""Parts of a chat's answer: reasoning, content and calls of tools, by transformers' response templates."""

from __future__ import annotations

import inspect
import json
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

from ..http.errors import invalid
from .protocol import ChatRequest, NamedTool, Tool
from .structured import forced

SLICE = 256
"""Characters that a parser gets at once."""
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError, TimeoutError)
"""Errors of a reader where a model has not written what its template reads."""
PATTERN_SECONDS = 0.25
"""Of a CPU, in which a pattern finds what it looks for. Patterns as those of Qwen's templates take the square
of a run of blanks, or the cube, and a client may have the model write long ones.
"""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields of response templates that are reasoning."""


class FunctionCall(NamedTuple):
    """A call of a tool; arguments in JSON."""

    name: str
    arguments: str


@dataclass
class Delta:
    """New parts of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[FunctionCall] = field(default_factory=list)


class Reply(Protocol):
    """One answer while it is read."""

    def add(self, text: str, last: bool) -> Delta:
        """The content of further text; with the `last` one all that was held back."""

    def reason(self, finish_reason: str | None) -> str | None:
        """Why the answer ended, as the client sees it."""


class ForcedReply:
    """An answer that is a call of a tool, or a list of calls, by its grammar: known at its end."""

    def __init__(self, request: ChatRequest) -> None:
        choice = request.tool_choice
        self._name = choice.function.name if isinstance(choice, NamedTool) else None
        self._text = ""
        self._called = False

    def add(self, text: str, last: bool) -> Delta:
        self._text += text
        if not last:
            return Delta()
        if self._name is not None:
            return Delta(calls=[FunctionCall(self._name, self._text)])
        try:
            found = json.loads(self._text)
        except (ValueError, RecursionError):  # it was cut off, or is too deep
            return Delta(self._text)
        self._called = True
        return Delta(calls=[FunctionCall(each["name"], _dumped(each["arguments"])) for each in found])

    def reason(self, finish_reason: str | None) -> str | None:
        # As in OpenAI's API: the call of a tool that the request names is an ordinary end.
        return "tool_calls" if self._called and finish_reason == "stop" else finish_reason


class ParsedReply:
    """An answer read by a response template. Text that may begin a delimiter is held back; a call that cannot
    be read is shown as content.
    """

    def __init__(self, make: Callable[[], Any], most_calls: int | None) -> None:
        """make: gives a parser that has read nothing. most_calls: how many calls are shown; None for all."""
        self._make = make
        self._parser = make()
        self._most_calls = most_calls
        self._text = ""
        """Text that the parser has read."""
        self._calls = 0
        self._unread = ""
        """The raw text of the region that is open."""
        self._held = ""
        """Blanks at the end of reasoning so far."""
        self._begun = {"reasoning": False, "content": False}
        self._broken = False

    def add(self, text: str, last: bool) -> Delta:
        delta = Delta()
        for event in self._parser.initial_events:  # what the prompt has begun, and no part of the answer
            self._take(event, Delta())
        self._parser.initial_events = []
        for begin in range(0, len(text), SLICE):
            self._read(text[begin : begin + SLICE], delta)
        if last and not self._broken:
            try:
                for event in self._parser.finalize()[1]:
                    self._take(event, delta)
            except UNREADABLE:
                delta.content += self._unread + _held_by(self._parser)
        return delta

    def _read(self, text: str, delta: Delta) -> None:
        if self._broken:
            delta.content += text
            return
        try:
            for event in self._parser.feed(text):
                self._take(event, delta)
            self._text += text
        except UNREADABLE:
            self._broken = True
            self._read_to_trouble(text, delta)

    def _read_to_trouble(self, text: str, delta: Delta) -> None:
        """Show what comes before a region that cannot be read, and what was meant to be read as text."""
        parser = self._make()
        parser.feed(self._text)
        for place, character in enumerate(text):
            try:
                for event in parser.feed(character):
                    self._take(event, delta)
            except UNREADABLE:
                delta.content += self._unread + _held_by(parser) + text[place + 1 :]
                return

    def _take(self, event: dict[str, Any], delta: Delta) -> None:
        name = event["field"]
        if event["type"] == "region_open":
            self._unread = ""
        elif event["type"] == "region_chunk":
            if event["dirty"]:
                self._unread += event["text"]
            elif name in REASONING:
                delta.reasoning += self._shown("reasoning", event["text"])
            elif name == "content":
                delta.content += self._shown("content", event["text"])
        elif name == "tool_calls":
            try:
                calls = _calls_in(event["value"])
            except UNREADABLE:
                delta.content += self._unread
            else:
                self._note(calls, delta)
            self._unread = ""

    def _shown(self, name: str, text: str) -> str:
        """Text without the blanks around reasoning."""
        if not self._begun[name] and (name == "reasoning" or self._begun["reasoning"] or self._calls):
            text = text.lstrip()
        if name == "reasoning":
            text = self._held + text
            kept = text.rstrip()
            self._held = text[len(kept) :] if kept or self._held else ""
            text = kept
        self._begun[name] = self._begun[name] or bool(text)
        return text

    def _note(self, calls: list[FunctionCall], delta: Delta) -> None:
        for call in calls:
            self._calls += 1
            if self._most_calls is None or self._calls <= self._most_calls:
                delta.calls.append(call)

    def reason(self, finish_reason: str | None) -> str | None:
        return "tool_calls" if self._calls and finish_reason == "stop" else finish_reason


def _held_by(parser: Any) -> str:
    """Text that a parser holds back, since it may be the beginning of a delimiter."""
    return str(parser._buffer[parser._pos :])


def _in_time(patterns: Any) -> Any:
    """A compiled pattern, or the library of patterns, whose functions raise TimeoutError in time."""
    plain = {name: getattr(patterns, name) for name in dir(patterns) if not name.startswith("__")}
    timed = ("search", "finditer", "sub")
    return SimpleNamespace(**plain | {name: partial(plain[name], timeout=PATTERN_SECONDS) for name in timed})


def _bound(template: Any) -> None:
    """Bound the time of a template's patterns, and of those by which transformers reads calls."""
    from transformers.utils.chat_parsing import content_parsers

    parsers: Any = content_parsers
    if not isinstance(parsers.re, SimpleNamespace):
        parsers.re = _in_time(parsers.re)
    template.start_anchor_re = _in_time(template.start_anchor_re)
    for each in template.fields.values():
        each.open_re = each.open_re and _in_time(each.open_re)
        each.close_re = each.close_re and _in_time(each.close_re)


def _calls_in(value: Any) -> list[FunctionCall]:
    """The calls of a region; raises one of UNREADABLE for what is none."""
    functions = [each.get("function", each) for each in (value if isinstance(value, list) else [value])]
    return [FunctionCall(str(each["name"]), _dumped(each.get("arguments", {}))) for each in functions]


def _dumped(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


class Replies:
    """Makes the replies of one model: by its response template, if it has one."""

    def __init__(self, template: dict[str, Any] | None) -> None:
        """template: as transformers defines it; checked here."""
        self._template: Any = None
        self._only_calls = False
        """True if an answer without calls is all content."""
        if template is not None:
            try:
                from transformers.utils.chat_parsing.response_templates import load_response_template
            except ImportError as error:
                from transformers import __version__

                raise ValueError(
                    f"transformers {__version__} cannot read answers by a response template; "
                    "upgrade it or leave --response-template out"
                ) from error
            self._template = load_response_template(template)
            _bound(self._template)
            fields = self._template.fields.keys()
            self._only_calls = self._template.implicit == "content" and fields <= {"content", "tool_calls"}

    def check(self, request: ChatRequest, most: int) -> None:
        """Raise for tools that contradict each other, or that no answer could call."""
        names = [each.function.name for each in request.tools or ()]
        if len(names) > most:
            raise invalid(f"{len(names)} tools are given and the limit is {most}; give fewer", "tools")
        choice = request.tool_choice
        if len(set(names)) < len(names):
            raise invalid("two tools have one name; give each a name of its own", "tools")
        if not names and (choice == "required" or isinstance(choice, NamedTool)):
            raise invalid("tool_choice asks for a call and there are no tools; give tools", "tool_choice")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise invalid(
                f"tool_choice names {choice.function.name!r} and the tools are {', '.join(names)[:200]}",
                "tool_choice",
            )
        if request.offered and not forced(request) and self._template is None:
            raise invalid(
                "tool calls of this model cannot be parsed: its tokenizer has no response_template. "
                "tool_choice required, or a named function, works; the operator can give --response-template",
                "tools",
            )

    def reads(self, request: ChatRequest) -> bool:
        """True if answers to a request are read by the template: with their special tokens."""
        if self._template is None or forced(request) or request.skip_special_tokens is False:
            return False
        return bool(request.offered) or not self._only_calls

    def separates(self, request: ChatRequest) -> bool:
        """True if answers to a request may be more than content."""
        return forced(request) or self.reads(request)

    def of(self, request: ChatRequest, prompt: Callable[[], str]) -> list[Reply]:
        """A reply for each answer; none where answers are content alone. prompt: the chat as the template
        wrote it.
        """
        count = range(request.answers)
        if forced(request):
            return [ForcedReply(request) for _ in count]
        if not self.reads(request):
            return []
        from transformers.utils.chat_parsing import ResponseParser

        most = 1 if request.parallel_tool_calls is False else None
        chat = prompt()
        casts: dict[str, Any] = {}
        if "tools" in inspect.signature(ResponseParser).parameters:  # older ones cast no arguments
            casts["tools"] = shown_tools(request.offered)
        try:
            # A parser that does not find where the answer begins takes the whole chat for a part of it.
            prefix = chat if self._template.start_anchor_re.search(chat) else ""
            make = partial(ResponseParser, self._template, prefix=prefix, **casts)
            return [ParsedReply(make, most) for _ in count]
        except TimeoutError:
            raise invalid(
                "the response template takes too long to find where this chat's answer begins; send a "
                "shorter one, or skip_special_tokens false, with which answers are not read",
                "messages",
            ) from None


def call_bodies(calls: Iterable[FunctionCall], first: int | None = None) -> list[dict[str, Any]]:
    """Calls in OpenAI's form; in a stream with their places among the calls of an answer, from `first` on."""
    found = []
    for i, each in enumerate(calls):
        body: dict[str, Any] = {} if first is None else {"index": first + i}
        body |= {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        found.append({**body, "function": {"name": each.name, "arguments": each.arguments}})
    return found


def shown_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as chat templates take them."""
    return [each.model_dump(exclude_none=True) for each in tools]
