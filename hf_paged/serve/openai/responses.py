"""POST /v1/responses, OpenAI's newer form of a chat, without a store: what a request means as a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ..http.errors import invalid
from .protocol import OF_CHATS, ChatRequest, Common, NamedFunction, Names, Object, Part, ToolFunction, parsed

UNSTORED = "nothing is stored; send the whole conversation as input"
OF_RESPONSES: dict[str, tuple[tuple[Any, ...], str]] = {
    **OF_CHATS,
    "background": ((False,), "an answer lives as long as its request; leave it out"),
    "conversation": ((), UNSTORED),
    "max_tool_calls": ((), "it counts calls of tools that OpenAI runs"),
    "previous_response_id": ((), UNSTORED),
    "prompt": ((), "it names a prompt that OpenAI stores; send input"),
    "prompt_cache_retention": (("in_memory",), "cached prefixes stay in memory"),
    "truncation": (("disabled",), "prompts are not cut; shorten it"),
}
RENAMED = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}
"""Fields of a chat by the names that they have here."""
LOGPROBS = "message.output_text.logprobs"


class ItemPart(Part):
    """A text in an item, or an image in a message of the user."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "input_image"]
    text: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    image_url: Annotated[str, Field(min_length=1)] | None = None
    detail: Literal["auto"] | None = None

    @model_validator(mode="after")
    def _require_content(self) -> ItemPart:
        image = self.type == "input_image"
        if (self.text is None) != image or (self.image_url is None) == image:
            raise ValueError(
                f"{self.type} has {'image_url and no text' if image else 'text and no image_url'}"
            )
        return self


Content = str | list[ItemPart]
FIELDS: dict[str, tuple[set[str], set[str]]] = {
    "message": ({"role", "content"}, {"phase"}),
    "function_call": ({"call_id", "name", "arguments"}, set()),
    "function_call_output": ({"call_id", "output"}, set()),
    "reasoning": (set(), {"summary", "content"}),
}
"""Required and optional fields of an item, by its type."""


class Item(Part):
    """A part of a conversation. What a client sends back of an answer is taken as it is; null is nothing."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: Names | None = None
    status: Names | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None
    phase: Names | None = None
    call_id: Names | None = None
    name: Names | None = None
    arguments: str | None = None
    output: Content | None = None
    summary: list[ItemPart] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return (
            {key: each for key, each in given.items() if each is not None} if type(given) is dict else given
        )

    @model_validator(mode="after")
    def _require_fields(self) -> Item:
        needed, others = FIELDS[self.type]
        given = self.model_fields_set - {"type", "id", "status"}
        if not needed <= given <= needed | others:
            expected = ", ".join(sorted(needed | others))
            raise ValueError(f"an item of type {self.type} has {expected}; got {', '.join(sorted(given))}")
        return self


class FunctionTool(ToolFunction):
    """A function that the model may call."""

    type: Literal["function"]


class FunctionChoice(NamedFunction):
    """The function that is to be called."""

    type: Literal["function"]


class TextFormat(Part):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: Names | None = None
    description: str | None = None
    fits: Annotated[Object | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Part):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Part):
    """How much the model reasons. There are no summaries: the reasoning itself is in the answer."""

    effort: str | None = None
    summary: Literal["auto"] | None = None


class ResponsesRequest(Common):
    """POST /v1/responses."""

    input: str | Annotated[list[Item], Field(min_length=1, max_length=10_000)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    chat_template_kwargs: Object | None = None

    def chat(self) -> ChatRequest:
        """The same as a request for a chat."""
        found = self.model_dump(include=set(Common.model_fields), by_alias=True, exclude_none=True)
        found["messages"] = self._messages()
        found["tools"] = [
            {"type": "function", "function": each.model_dump(exclude={"type"}, exclude_none=True)}
            for each in self.tools or ()
        ]
        choice: Any = self.tool_choice
        if isinstance(choice, FunctionChoice):
            choice = {"type": "function", "function": {"name": choice.name}}
        logprobs = LOGPROBS in (self.include or ())
        if self.top_logprobs is not None and not logprobs:
            raise invalid(f"top_logprobs needs {LOGPROBS} in include; give it", "top_logprobs")
        found |= {
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "max_completion_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "response_format": self._form(),
            "logprobs": logprobs or None,
            "top_logprobs": self.top_logprobs,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        return parsed(ChatRequest, found)

    def _form(self) -> dict[str, Any] | None:
        form = self.text.format if self.text else None
        if form is None or form.type != "json_schema":
            return None if form is None else {"type": form.type}
        if form.fits is None:
            raise invalid("text.format of type json_schema needs schema; give it", "text")
        schema = {"name": form.name, "schema": form.fits, "strict": form.strict}
        return {"type": "json_schema", "json_schema": schema}

    def _messages(self) -> list[dict[str, Any]]:
        """The items as messages: reasoning, text and calls in a row are one of the assistant."""
        found: list[dict[str, Any]] = []
        if self.instructions is not None:
            found.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*found, {"role": "user", "content": self.input}]
        reasoning: str | None = None
        for item in self.input:
            if item.type == "reasoning":
                reasoning = _text(item.content or item.summary or "")
            elif item.type == "function_call_output":
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            elif item.type == "function_call":
                if not found or found[-1]["role"] != "assistant" or reasoning is not None:
                    found.append(_assistant(None, reasoning))
                    reasoning = None
                function = {"name": item.name, "arguments": item.arguments}
                calls = found[-1].setdefault("tool_calls", [])
                calls.append({"id": item.call_id, "type": "function", "function": function})
            elif item.role == "assistant":
                found.append(_assistant(_text(item.content), reasoning))
                reasoning = None
            else:
                found.append({"role": item.role, "content": _content(item.content)})
        return found


def _assistant(content: str | None, reasoning: str | None) -> dict[str, Any]:
    found = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    return {key: each for key, each in found.items() if each is not None}


def _text(content: Content | None) -> str:
    """The text of a message, of a result, or of reasoning."""
    parts = content if isinstance(content, list) else [ItemPart(type="input_text", text=content or "")]
    if any(part.text is None for part in parts):
        raise invalid("images belong to messages of the user; send text", "input")
    return "".join(part.text or "" for part in parts)


def _content(content: Content | None) -> Any:
    """The content of a message in the form of chats."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.text}
        if part.image_url is None
        else {"type": "image_url", "image_url": {"url": part.image_url}}
        for part in content
    ]
