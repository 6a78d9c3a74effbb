"""Schemas of bodies and answers for /openapi.json. Nothing is checked by them while the server runs; tests
hold answers to them, and so does schemathesis.

FastAPI writes the page from these forms. Routes read their bodies themselves, because FastAPI reads a body
whole, before any limit. As its parameter, with a `response_model`, a chat takes 66 us of HTTP and 50 so, one
with logprobs of 128 tokens 690 and 800; of this file that would delete `body_of` and parts of `describe`.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any, Literal, NotRequired, TypeAlias

from fastapi import FastAPI
from pydantic import ConfigDict, TypeAdapter, with_config
from pydantic.json_schema import models_json_schema
from typing_extensions import TypedDict

from ...trace.picture import colours
from .page import inlined

FinishReason = Literal["stop", "length", "abort", "tool_calls"]
Responses: TypeAlias = dict[int | str, dict[str, Any]]


def form(name: str, /, **fields: Any) -> Any:
    """A form of answers: an object with these fields and no others."""
    made: Any = TypedDict(name, fields)  # type: ignore[misc]
    return with_config(ConfigDict(extra="forbid"))(made)


def maybe(kind: Any) -> Any:
    """A field that may be missing."""
    return NotRequired[kind]


def many(kind: Any) -> Any:
    """A list."""
    return list[kind]


def by_text(kind: Any) -> Any:
    """An object whose keys are texts."""
    return dict[str, kind]


SCHEMAS = "#/components/schemas/"
Objects = dict[str, Any]

ErrorFields = form("ErrorFields", message=str, type=str, param=str | None, code=str | None)
ErrorBody = form("ErrorBody", error=ErrorFields)

ServerState = form("ServerState", status=Literal["ready", "draining", "alive"])
Version = form("Version", version=str)
ServerLoad = form("ServerLoad", server_load=int)
ServedModel = form(
    "ServedModel", id=str, object=Literal["model"], created=int, owned_by=str, root=str, parent=str | None,
    max_model_len=int,
)  # fmt: skip
ServedModels = form("ServedModels", object=Literal["list"], data=many(ServedModel))
MapPrompt = form("MapPrompt", number=int, request_id=str, blocks=list[str])
Tokens = form(
    "Tokens", count=int, max_model_len=int, tokens=list[int], token_strs=maybe(list[str])
)  # fmt: skip
Text = form("Text", prompt=str)

CachedTokens = form("CachedTokens", cached_tokens=int)
TokenUsage = form(
    "TokenUsage", prompt_tokens=int, completion_tokens=int, total_tokens=int,
    prompt_tokens_details=CachedTokens,
)  # fmt: skip
PromptToken = form("PromptToken", logprob=float, rank=int | None, decoded_token=str)
PromptTokens = many(by_text(PromptToken) | None)
CompletionLogprobs = form(
    "CompletionLogprobs", tokens=list[str], token_logprobs=list[float | None],
    top_logprobs=list[dict[str, float] | None], text_offset=list[int],
)  # fmt: skip
CompletionChoice = form(
    "CompletionChoice", index=int, text=str, logprobs=CompletionLogprobs | None, finish_reason=FinishReason,
    token_ids=maybe(list[int]), prompt_token_ids=maybe(list[int]), prompt_logprobs=maybe(PromptTokens),
)  # fmt: skip
Completion = form(
    "Completion", id=str, object=Literal["text_completion"], created=int, model=str,
    choices=many(CompletionChoice), usage=TokenUsage,
)  # fmt: skip

CandidateToken = form("CandidateToken", token=str, logprob=float, bytes=list[int])
ChatToken = form(
    "ChatToken", token=str, logprob=float, bytes=list[int], top_logprobs=many(CandidateToken)
)  # fmt: skip
ChatLogprobs = form("ChatLogprobs", content=many(ChatToken), refusal=None)
AnsweredFunction = form("AnsweredFunction", name=str, arguments=str)
AnsweredCall = form("AnsweredCall", id=str, type=Literal["function"], function=AnsweredFunction)
AnsweredMessage = form(
    "AnsweredMessage", role=Literal["assistant"], content=str | None, refusal=None,
    reasoning_content=maybe(str), tool_calls=maybe(many(AnsweredCall)),
)  # fmt: skip
ChatChoice = form(
    "ChatChoice", index=int, message=AnsweredMessage, logprobs=ChatLogprobs | None,
    finish_reason=FinishReason, token_ids=maybe(list[int]), prompt_token_ids=maybe(list[int]),
)  # fmt: skip
ChatCompletion = form(
    "ChatCompletion", id=str, object=Literal["chat.completion"], created=int, model=str,
    choices=many(ChatChoice), usage=TokenUsage, prompt_logprobs=maybe(PromptTokens),
    prompt_token_ids=maybe(list[int]),
)  # fmt: skip

InputDetails = form("InputDetails", cached_tokens=int, cache_write_tokens=int)
OutputDetails = form("OutputDetails", reasoning_tokens=int)
ResponseUsage = form(
    "ResponseUsage", input_tokens=int, input_tokens_details=InputDetails, output_tokens=int,
    output_tokens_details=OutputDetails, total_tokens=int,
)  # fmt: skip
OutputText = form(
    "OutputText", type=Literal["output_text", "reasoning_text"], text=str, annotations=maybe(many(None)),
    logprobs=maybe(many(ChatToken)),
)  # fmt: skip
OutputItem = form(
    "OutputItem", id=str, type=Literal["message", "reasoning", "function_call"],
    status=Literal["completed", "incomplete"], role=maybe(Literal["assistant"]),
    content=maybe(many(OutputText)), summary=maybe(many(None)), call_id=maybe(str), name=maybe(str),
    arguments=maybe(str),
)  # fmt: skip
ResponseError = form("ResponseError", code=Literal["server_error"], message=str)
IncompleteDetails = form("IncompleteDetails", reason=Literal["max_output_tokens"])
ResponseObject = form(
    "ResponseObject", id=str, object=Literal["response"], created_at=int, completed_at=float | None,
    model=str, status=Literal["completed", "incomplete", "failed"], error=ResponseError | None,
    incomplete_details=IncompleteDetails | None, output=many(OutputItem), usage=ResponseUsage,
    instructions=str | None, max_output_tokens=int | None, top_logprobs=int | None, temperature=float | None,
    top_p=float | None, tools=many(Objects), tool_choice=str | Objects, parallel_tool_calls=bool,
    text=Objects, reasoning=Objects, truncation=Literal["disabled"], store=Literal[False],
    background=Literal[False], previous_response_id=None, metadata=dict[str, str],
)  # fmt: skip

EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
STREAM = {"text/event-stream": {"schema": EVENT}}
TEXT = {"text/plain": {"schema": {"type": "string"}}}
MEANINGS = {
    400: "a field, or a part of the path, is unknown, wrong, beyond a limit, or contradicts another",
    401: "no API key, or one that is not known",
    403: "a Host or an Origin that is not allowed, or a key that may not do this",
    404: "there is no such thing",
    408: "the body came too slowly",
    409: "the engine's state does not allow it now",
    413: "the body, a text or a grammar is too large",
    415: "the body is not application/json",
    429: "the queue is full, or as many watch as may; see Retry-After",
    500: "the request failed; others are not affected",
    503: "warming up, shutting down, or the engine has stopped",
    504: "the deadline passed before the first token",
}


def errors(*statuses: int) -> Responses:
    """The description of errors."""
    content = {"application/json": {"schema": {"$ref": f"{SCHEMAS}ErrorBody"}}}
    return {each: {"content": content, "description": MEANINGS[each]} for each in statuses}


ALWAYS = errors(401, 403, 500, 503)
OF_BODIES = errors(400, 404, 408, 413, 415, 429)
"""Of routes that read a body."""


def answers(model: Any) -> Responses:
    """The description of a route that generates: answers of a form, whole or in a stream."""
    return {200: {"model": model, "content": STREAM}, **OF_BODIES, **errors(504)}


def body_of(*schemas: dict[str, Any], example: dict[str, Any] | None = None) -> dict[str, Any]:
    """The description of a route that reads its body itself, which has one of these forms."""
    found: dict[str, Any] = {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}}
    if example is not None:
        found["example"] = example
    return {"requestBody": {"required": True, "content": {"application/json": found}}}


@cache
def schemas_of(kinds: tuple[Any, ...]) -> dict[str, Any]:
    """The schemas of bodies of these kinds and of errors, by name."""
    template = f"{SCHEMAS}{{model}}"
    _, bodies = models_json_schema([(kind, "validation") for kind in kinds], ref_template=template)
    error = TypeAdapter(ErrorBody).json_schema(mode="serialization", ref_template=template)
    return {**bodies["$defs"], **error.pop("$defs"), "ErrorBody": error}


def describe(app: FastAPI, schemas: dict[str, Any], keys: bool, open_paths: frozenset[str]) -> None:
    """Add to the description of an app what its routes do not say: schemas of bodies that they read
    themselves, and who may call them.
    """
    stock = app.openapi

    def described() -> dict[str, Any]:
        found = stock()
        parts = found.setdefault("components", {})
        parts.setdefault("schemas", {}).update(schemas)
        for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own form of errors
            parts["schemas"].pop(name, None)
        if keys:
            parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, methods in found["paths"].items():
            for operation in methods.values():
                operation["responses"].pop("422", None)
                if keys and path not in open_paths:
                    operation["security"] = [{"key": []}]
        return found

    app.openapi = described  # type: ignore[method-assign]


def page() -> str:
    """The page that shows what /openapi.json says, and sends requests. It loads nothing from elsewhere."""
    return inlined(resources.files(__package__) / "docs", "docs", ("docs.js",), {}, colours(), "")
