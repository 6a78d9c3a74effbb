"""Answers in a form: the grammar that a request asks for, compiled beside the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from hf_paged_cli.limits import ServerLimits

from ...engine.sampling.grammar import choice_grammar, json_grammar, lark_grammar, regex_grammar
from ..http.errors import ApiError, invalid, too_large
from ..http.throttle import aside
from ..link.engine_client import CallError, EngineClient
from .protocol import ChatRequest, Generating, NamedTool, StructuredOutputs

WHITESPACE = r"[ \n\r\t]{0,32}"
"""Between the words of JSON, if a request allows any: without a bound a model may write them to the end."""
AT_ONCE = 2
"""Grammars of one tenant that are compiled at once: more of its own wait, and no other tenant's."""
MOST_CALLS = 16
"""Calls of tools in one answer, where calls are required."""
VALUES = frozenset({"const", "default", "enum", "examples"})
"""Keywords with values in a schema, which are no schemas."""
Making = Callable[[], str]


class StructuredOutput:
    """Writes the grammars of requests, one after another, in a thread of its own, and has the engine compile
    them.
    """

    def __init__(self, engine: EngineClient, limits: ServerLimits) -> None:
        self._engine = engine
        self._limits = limits
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hf_paged grammars")

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def grammar(self, request: Generating, tenant: str) -> str | None:
        """The grammar that a request's answers follow, or 400 for one that is impossible or too expensive."""
        asked = self._asked(request)
        if not asked:
            return None
        if len(asked) > 1:
            first, second, *_ = asked
            raise invalid(f"{first} and {second} both constrain the answer; give one of them", second)
        [(name, make)] = asked.items()
        if request.ignore_eos or request.min_tokens:
            raise invalid(f"{name} decides where the answer ends; leave ignore_eos and min_tokens out", name)
        turn = self._turns.setdefault(tenant, asyncio.Semaphore(AT_ONCE))
        try:
            async with asyncio.timeout(self._limits.request_seconds), turn:
                grammar = await aside(self._thread, make)
                await self._engine.call("grammar", grammar)
            return grammar
        except TimeoutError:
            raise ApiError(
                504, f"{name} waited too long for others; send it again later", name, "timeout"
            ) from None
        except CallError as error:
            if not error.wrong:
                raise
            raise invalid(f"{name}: {error!s:.500}", name) from error
        except (ValueError, TypeError) as error:
            raise invalid(f"{name}: {error!s:.500}", name) from error
        except ImportError as error:
            raise invalid(f"{name} is not served here: {error}", name, "unsupported_parameter") from error

    def _asked(self, request: Generating) -> dict[str, Making]:
        """Makers of the answer's form, by the field that asks for it."""
        found: dict[str, Making] = {}
        form = request.response_format
        if form is not None and form.type != "text":
            needs = {"json_schema": form.json_schema, "regex": form.regex}.get(form.type, True)
            if needs is None:
                raise invalid(
                    f"response_format of type {form.type} needs {form.type}; give it", "response_format"
                )
        blanks = request.guided_whitespace_pattern
        if form is not None and form.type == "json_object":
            found["response_format"] = self._json("response_format", {"type": "object"}, blanks)
        elif form is not None and form.type == "json_schema" and form.json_schema is not None:
            found["response_format"] = self._json("response_format", form.json_schema.fits, blanks)
        elif form is not None and form.type == "regex":
            found["response_format"] = self._text("response_format", regex_grammar, form.regex)
        if request.structured_outputs is not None:
            found |= self._structured(request.structured_outputs)
        for name, make in (("guided_regex", regex_grammar), ("guided_grammar", lark_grammar)):
            if getattr(request, name) is not None:
                found[name] = self._text(name, make, getattr(request, name))
        if request.guided_json is not None:
            found["guided_json"] = self._json("guided_json", request.guided_json, blanks)
        if request.guided_choice is not None:
            found["guided_choice"] = self._choice("guided_choice", request.guided_choice)
        if isinstance(request, ChatRequest) and forced(request):
            found["tool_choice"] = self._json("tool_choice", _schema_of_calls(request), blanks)
        return found

    def _structured(self, given: StructuredOutputs) -> dict[str, Making]:
        name = "structured_outputs"
        blanks = None if given.disable_any_whitespace else given.whitespace_pattern
        if blanks is None and given.disable_any_whitespace is False:
            blanks = WHITESPACE
        found: dict[str, Making] = {}
        if given.fits is not None:
            found[f"{name}.json"] = self._json(name, given.fits, blanks)
        if given.json_object:
            found[f"{name}.json_object"] = self._json(name, {"type": "object"}, blanks)
        if given.regex is not None:
            found[f"{name}.regex"] = self._text(name, regex_grammar, given.regex)
        if given.choice is not None:
            found[f"{name}.choice"] = self._choice(name, given.choice)
        if given.grammar is not None:
            found[f"{name}.grammar"] = self._text(name, lark_grammar, given.grammar)
        if not found:
            raise invalid(f"{name} needs one of json, json_object, regex, choice and grammar; give it", name)
        return found

    def _json(self, name: str, schema: Any, blanks: str | None) -> Making:
        """blanks: a pattern of what may stand between the words; None for nothing."""
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError):
                raise invalid(f"{name}: the schema is not JSON; give an object", name) from None
        if not isinstance(schema, dict | bool):
            raise invalid(f"{name}: a JSON schema is an object, got {type(schema).__name__}", name)
        self._require_short(name, len(json.dumps(schema)))
        return partial(json_grammar, schema, **({} if blanks is None else {"whitespace_pattern": blanks}))

    def _text(self, name: str, make: Callable[[str], str], text: Any) -> Making:
        self._require_short(name, len(text))
        return partial(make, text)

    def _choice(self, name: str, choices: list[str]) -> Making:
        self._require_short(name, sum(map(len, choices)) + 3 * len(choices))
        return partial(choice_grammar, choices)

    def _require_short(self, name: str, length: int) -> None:
        most = self._limits.grammar_chars
        if length > most:
            raise too_large(
                f"{name} has {length} characters of grammar and the limit is {most}; shorten it", name
            )


def forced(request: ChatRequest) -> bool:
    """True if the answer must be calls of tools."""
    return request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)


def _schema_of_calls(request: ChatRequest) -> dict[str, Any]:
    """The form of an answer that must be calls: the arguments of the named function, or a list of calls."""
    anything: dict[str, Any] = {"type": "object"}
    schemas = {each.function.name: each.function.parameters or anything for each in request.offered}
    if isinstance(request.tool_choice, NamedTool):
        return schemas[request.tool_choice.function.name]
    # References count from the root: each tool's schema lies there under a name of its own.
    definitions = {str(i): _moved(each, f"#/$defs/{i}") for i, each in enumerate(schemas.values())}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{i}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i, name in enumerate(schemas)
    ]
    most = 1 if request.parallel_tool_calls is False else MOST_CALLS
    found = {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": calls}}
    return {"$defs": definitions, **found}


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references to its own parts are right where it lies at `root` of another one."""
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: each if key in VALUES else _moved(each, root) for key, each in schema.items()}
    target = found.get("$ref")
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        found["$ref"] = root + target[1:]
    return found
