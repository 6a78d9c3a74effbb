"""Tools, templates and what a model is made to say, for tests of a server's answers."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from hf_paged import demo

CHAT = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather", "description": "The weather of a place",
        "parameters": {
            "type": "object", "properties": {"place": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["place", "days"], "additionalProperties": False,
        },
    },
}  # fmt: skip
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {
            "$defs": {"Zone": {"enum": ["UTC", "CET"]}}, "type": "object", "properties": {"zone": {"$ref": "#/$defs/Zone"}},
            "required": ["zone"], "additionalProperties": False,
        },
    },
}  # fmt: skip
TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*(?:<\|eos\|>)", "content": "text"},
    },
}  # fmt: skip
CALL = '<tool_call>{"name": "weather", "arguments": {"place": "Paris", "days": 2}}</tool_call>'
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ 'user' if m.role == 'tool' else m.role }}|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments.place }}</tool_call>{% endfor %}"
    "{% endfor %}{% if tools %}<|system|>{{ tools | map(attribute='function.name') | join(',') }}{% endif %}"
    "{% if reasoning_effort %}<|system|>{{ reasoning_effort }}{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def reading() -> Any:
    """The demo's tokenizer with a response template and a chat template that shows tools."""
    pytest.importorskip("transformers.utils.chat_parsing", reason="this transformers reads no answers")
    made = demo.tokenizer()
    made.response_template = TEMPLATE
    made.chat_template = CHAT_TEMPLATE
    return made


def unread() -> Any:
    """The demo's tokenizer without a response template."""
    made = demo.tokenizer()
    made.response_template = None
    return made


def saying(said: str) -> dict[str, Any]:
    """Fields that make the model say exactly this."""
    return {"structured_outputs": {"choice": [said]}}


def holds(kind: Any, body: Any) -> None:
    """An answer has a form, to the last field."""
    TypeAdapter(kind).validate_python(body, strict=True)
