"""Bodies of requests: every field is known and checked, or refused by name."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, from_json

from ..http.errors import ApiError, invalid

NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "this server answers in text"),
    "function_call": (("none", "auto"), "give tool_choice"),
    "functions": (([],), "give tools"),
    "images": ((), "give them as image_url parts of messages"),
    "modalities": ((["text"],), "this server answers in text"),
    "prediction": ((), "outputs are not predicted; leave it out"),
    "prompt_embeds": ((), "a prompt is a text or token ids"),
    "service_tier": (("auto", "default"), "there is one tier; leave it out"),
    "store": ((False,), "nothing is stored; leave it out"),
    "suffix": (("",), "text is not inserted; leave it out"),
    "truncate_prompt_tokens": ((), "prompts are not cut; shorten it"),
    "chat_template": ((), "a template is code; the operator gives it with --chat-template"),
    "documents": ((), "give them in the messages, or in chat_template_kwargs"),
    "spaces_between_special_tokens": ((True,), "the tokenizer decides that"),
    "web_search_options": ((), "this server reaches no other"),
}
"""Known fields that change nothing with these values or null, and why others are refused."""
OF_CHATS = {**NEUTRAL, "best_of": ((1,), "it belongs to /v1/completions")}
OF_COMPLETIONS = {
    **NEUTRAL,
    "parallel_tool_calls": ((True, False), "tools belong to /v1/chat/completions"),
    "reasoning_effort": ((), "it belongs to /v1/chat/completions"),
    "tool_choice": (("none", "auto"), "tools belong to /v1/chat/completions"),
    "tools": (([],), "tools belong to /v1/chat/completions"),
}
"""The same with fields that only the other kind of request has."""
ALIKE = {
    "max_tokens": ("max_output_tokens",),
    "max_new_tokens": ("max_tokens", "max_output_tokens"),
    "max_completion_tokens": ("max_tokens", "max_output_tokens"),
    "max_output_tokens": ("max_completion_tokens", "max_tokens"),
    "messages": ("input", "prompt"),
    "prompt": ("messages", "input"),
    "input": ("messages", "prompt"),
    "response_format": ("text",),
}
"""Names in other kinds of request for a field of one kind."""
MOST_PROMPTS = 10_000
"""Prompts of a request that are looked at; --limit-prompts is what is answered."""
MOST_FIELDS = 200
"""Fields of an object that has named ones: each unknown one would be an error of its own."""
WITHOUT_EFFECT = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "user"})
"""Fields that ask nothing of an answer."""


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> Any:
    """The prompts of a request as a list of texts and of lists of ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(type(each) is int for each in value):
            return [value]
        if len(value) > MOST_PROMPTS:
            raise ValueError(
                f"{len(value)} prompts are given and at most {MOST_PROMPTS} are read; send fewer"
            )
        ids = all(isinstance(each, list) and each and all(type(i) is int for i in each) for each in value)
        if ids or all(isinstance(each, str) for each in value):
            return value
    kinds = "a text, a list of texts, a list of token ids, or a list of such lists"
    got = "an empty list" if value == [] else f"another {type(value).__name__}"
    raise ValueError(f"a prompt is {kinds}, got {got}")


def _finite(value: dict[str, Any]) -> dict[str, Any]:
    """An object, which JSON can carry again: 1e400 is read as infinity."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise ValueError("a number in it is beyond 1e308; give a smaller one") from None
    return value


IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
TEXTS = {"type": "array", "items": {"type": "string"}}
PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {**TEXTS, "minItems": 1},
        IDS,
        {"type": "array", "items": IDS, "minItems": 1},
    ]
}
STOP_SCHEMA = {"anyOf": [{"type": "string"}, TEXTS, {"type": "null"}]}
Prompts = Annotated[list[Any], BeforeValidator(_prompts), WithJsonSchema(PROMPT_SCHEMA)]
Stops = Annotated[list[str] | None, BeforeValidator(_listed), WithJsonSchema(STOP_SCHEMA)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Names = Annotated[str, Field(max_length=256)]
Object = Annotated[dict[str, Any], AfterValidator(_finite)]


def _fail_fast(schema: Any) -> None:
    """Have every list and object of a schema stop at its first error: a long one must not become as many."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
            schema["fail_fast"] = True
        schema = schema.values()
    if not isinstance(schema, str | bytes) and isinstance(schema, Iterable):
        for each in schema:
            _fail_fast(each)


class Part(BaseModel):
    """A body, or an object within one, whose fields have exactly these types. Unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _require_few(cls, given: Any) -> Any:
        if type(given) is dict and len(given) > MOST_FIELDS:
            raise ValueError(f"{len(given)} fields are given and at most {MOST_FIELDS} are read; send fewer")
        return given


class Body(Part):
    """A body that may name its model."""

    model: Names | None = None


class StreamOptions(Part):
    """Parts of a stream beside the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None
    include_obfuscation: Literal[False] | None = None


Schema = Object | bool


class JsonSchema(Part):
    """A JSON schema in OpenAI's form; `strict` is always meant."""

    name: Names | None = None
    description: str | None = None
    fits: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Part):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    regex: str | None = None


class StructuredOutputs(Part):
    """The form of an answer, by vLLM's names."""

    fits: Annotated[Schema | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None


class Common(Body):
    """Fields common to requests for answers of all kinds."""

    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stops = None
    stop_token_ids: list[Token] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    structured_outputs: StructuredOutputs | None = None
    task_ids: Annotated[int, Field(ge=0, lt=2**31)] | None = None


class Generating(Common):
    """Fields common to requests for completions and for chat."""

    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    n: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    early_stopping: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    response_format: ResponseFormat | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    @property
    def answers(self) -> int:
        """How many answers to a prompt."""
        return 1 if self.n is None else self.n

    @property
    def drawn(self) -> int:
        """How many answers are computed, of which the best are shown."""
        return self.answers

    @property
    def alternatives(self) -> int | None:
        """How many alternatives beside each token's logprob; None if no logprob is asked for."""
        raise NotImplementedError

    @property
    def scored(self) -> int | None:
        """How many alternatives beside the logprob of each token of the prompt; None if none is asked for."""
        return self.prompt_logprobs

    @property
    def silent(self) -> bool:
        """True if only the prompt is asked about."""
        return False

    @property
    def shows_prompt(self) -> bool:
        """True if every answer has tokens of its prompt."""
        return bool(self.return_token_ids) or self.scored is not None

    @property
    def with_usage(self) -> bool:
        """True if a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(Generating):
    """POST /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    add_special_tokens: bool | None = None

    @property
    def drawn(self) -> int:
        return self.best_of or self.answers

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def scored(self) -> int | None:
        own = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((each for each in own if each is not None), default=None)

    @property
    def silent(self) -> bool:
        return self.max_tokens == 0

    @property
    def shows_prompt(self) -> bool:
        return bool(self.echo) or super().shows_prompt


class TextPart(Part):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class ImageUrl(Part):
    """Where an image is, as data:image/png;base64,... The processor decides how large it is seen."""

    url: Annotated[str, Field(min_length=1)]
    detail: Literal["auto"] | None = None


class ImagePart(Part):
    """An image in the content of a user's message."""

    type: Literal["image_url"]
    image_url: ImageUrl


ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class CalledFunction(Part):
    """The function of a call, and its arguments in JSON."""

    name: Names
    arguments: str


class ToolCall(Part):
    """A call of a tool in a message of the assistant."""

    id: Names | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Part):
    """A message of a chat. What a client sends back of an answer is taken as it is."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: Names | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Names | None = None
    reasoning_content: str | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _require_content(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError(f"a message of the role {self.role} has content; give a text")
        if self.role != "assistant" and (self.tool_calls, self.reasoning_content) != (None, None):
            raise ValueError("tool_calls and reasoning_content belong to messages of the assistant")
        if self.images and self.role != "user":
            raise ValueError("images belong to messages of the user")
        return self

    @property
    def images(self) -> list[str]:
        """The URLs of its images."""
        parts = self.content if isinstance(self.content, list) else []
        return [part.image_url.url for part in parts if isinstance(part, ImagePart)]


class ToolFunction(Part):
    """A function that the model may call. parameters: a JSON schema of its arguments."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None


class Tool(Part):
    """A tool."""

    type: Literal["function"]
    function: ToolFunction


class NamedFunction(Part):
    """The name of a function."""

    name: Names


class NamedTool(Part):
    """The tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatFields(Body):
    """Fields that make a chat's prompt."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Object | None = None
    add_special_tokens: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model is shown."""
        return [] if self.tool_choice == "none" else self.tools or []


class ChatRequest(ChatFields, Generating):
    """POST /v1/chat/completions."""

    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    parallel_tool_calls: bool | None = None

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeText(Body):
    """POST /tokenize with a text."""

    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(ChatFields):
    """POST /tokenize with messages."""

    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    tokens: list[Token]
    skip_special_tokens: bool | None = None


class LoadAdapterRequest(Part):
    """POST /v1/load_lora_adapter."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool | None = None


class UnloadAdapterRequest(Part):
    """POST /v1/unload_lora_adapter."""

    lora_name: Names


B = TypeVar("B", bound=Part)


def fields_of(body: bytes, neutral: Mapping[str, tuple[tuple[Any, ...], str]] = NEUTRAL) -> dict[str, Any]:
    """The fields of a JSON body that ask for something. NaN, lone surrogates and deep nesting are no JSON."""
    try:
        found = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(
            f"the body is not JSON in UTF-8: {error}; send an object", code="invalid_json"
        ) from error
    if not isinstance(found, dict):
        kinds = {list: "list", str: "text", bool: "boolean", type(None): "null"}
        raise invalid(f"the body is a JSON {kinds.get(type(found), 'number')}; send an object")
    return {
        name: value
        for name, value in found.items()
        if value is not None and name not in WITHOUT_EFFECT and not _neutral(name, value, neutral)
    }


def _neutral(name: str, value: Any, neutral: Mapping[str, tuple[tuple[Any, ...], str]]) -> bool:
    """True if a known field asks for nothing; one that asks for what is not there is refused."""
    if name not in neutral:
        return False
    harmless, why = neutral[name]
    if any(type(value) is type(each) and value == each for each in harmless):
        return True
    raise invalid(f"{name} is not supported with this value: {why}", name, "unsupported_parameter")


def parsed(kind: type[B], fields: dict[str, Any]) -> B:
    """The fields as a request, or the 400 that names the first one that is wrong."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _explained(error, kind) from None


def _fit(error: ErrorDetails) -> tuple[int, bool, bool]:
    """How well the form of a value that an error speaks of fits the value, if there are several."""
    return len(error["loc"]), error["loc"][-1:] == ("type",), not error["type"].endswith("_type")


def _explained(error: ValidationError, kind: type[Part]) -> ApiError:
    errors = error.errors(include_url=False, include_context=False)
    unknown = [each for each in errors if each["type"] == "extra_forbidden"]
    # Of a value that may have several forms, the one that fits furthest is meant; its type decides.
    first = unknown[0] if unknown else max(errors, key=_fit)
    if unknown:
        return _unknown_field(kind, first["loc"])
    _, names = _place(kind, first["loc"])
    where = ".".join(names)[:160]
    if first["type"] == "missing":
        return invalid(f"the field {where!r} is missing; give it", where, "missing_parameter")
    message = first["msg"].removeprefix("Value error, ") + _got(first)
    return invalid(f"{where}: {message}" if where else message, where or None, "invalid_value")


def _got(error: ErrorDetails) -> str:
    """The given value, if it is plain and the message does not have it."""
    value = error["input"][:40] if isinstance(error["input"], str) else error["input"]
    plain = isinstance(value, str | float) or (isinstance(value, int) and abs(value) < 2**63)
    return f", got {value!r}" if plain and error["type"] != "value_error" else ""


def _unknown_field(kind: type[Part], steps: tuple[int | str, ...]) -> ApiError:
    """The error that names the nearest field of the object in which an unknown one is."""
    forms, names = _place(kind, steps[:-1])
    name = str(steps[-1])[:80]
    where = ".".join([*names, name])[:160]
    known = [each for form in _objects(forms) for each in _fields(form)]
    of_others = [] if names else [each for each in ALIKE.get(name, ()) if each in known]
    close = of_others or difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {close[0]!r}?" if close else "leave it out"
    return invalid(f"unknown field {where!r}; {hint}", where, "unknown_parameter")


def _place(kind: type[Part], steps: tuple[int | str, ...]) -> tuple[list[Any], list[str]]:
    """Where an error is: the forms that a value may have there, and the names of fields on the way.

    Steps that are no names are those of pydantic's, from a value to one of its forms.
    """
    forms: list[Any] = [kind]
    names = []
    for step in steps:
        objects = _objects(forms)
        fields = _fields(objects[0]) if len(objects) == 1 else {}
        keyed = [get_args(each)[1] for each in forms if get_origin(each) is dict]
        if isinstance(step, int):
            inner = [get_args(each)[0] for each in forms if get_origin(each) is list]
        elif len(objects) > 1:  # the step is the type of one of them
            forms = [each for each in objects if step in get_args(_fields(each)["type"])]
            continue
        elif step in fields:
            inner = [fields[step]]
        elif keyed:
            inner = keyed
        else:
            continue
        forms = [form for each in inner for form in _forms(each)]
        names.append(str(step)[:80])
    return forms, names


def _forms(annotation: Any) -> list[Any]:
    """The types that a value may have."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _forms(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [form for each in get_args(annotation) for form in _forms(each)]
    return [annotation]


def _objects(forms: list[Any]) -> list[type[Part]]:
    return [each for each in forms if isinstance(each, type) and issubclass(each, Part)]


def _fields(kind: type[Part]) -> dict[str, Any]:
    """The types of an object's fields by the names that they have in JSON."""
    return {each.alias or name: each.annotation for name, each in kind.model_fields.items()}
