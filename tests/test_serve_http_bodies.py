"""Bodies: values are counted before they are parsed, and large bodies take turns."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("fastapi")

from hypothesis import example, given
from hypothesis import strategies as st
from serving import serving
from starlette.requests import Request
from starlette.types import Message

from hf_paged.serve.http.bodies import SMALL, Bodies, JsonCounts
from hf_paged.serve.http.errors import ApiError
from hf_paged_cli.limits import ServerLimits

TEXTS = st.text(st.sampled_from('ab\\",:[]{}\n\u20ac'), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=30,
)


def counted(value: Any) -> tuple[int, int, int]:
    """Values, fields and objects of a value."""
    if not isinstance(value, dict | list):
        return 1, 0, 0
    inner = [counted(each) for each in (value.values() if isinstance(value, dict) else value)]
    values, fields, objects = (sum(column) for column in zip(*inner, strict=True)) if inner else (0, 0, 0)
    own = isinstance(value, dict)
    return values + 1, fields + own * len(value), objects + own


def separators(value: Any) -> int:
    """How many "[", "," and ":" the text of a value has outside of strings."""
    if not isinstance(value, dict | list):
        return 0
    inner = sum(map(separators, value.values() if isinstance(value, dict) else value))
    own = len(value) if isinstance(value, dict) else 1
    return inner + own + max(0, len(value) - 1)


@example({"a": [], "b": [], "c": [], "d": []}, [], None)
@given(JSON, st.lists(st.integers(0, 200), max_size=6), st.sampled_from([None, 1]))
def test_counts_are_those_of_the_parsed_text_however_it_is_cut(
    value: Any, cuts: list[int], indent: int | None
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=not cuts).encode()
    counts = JsonCounts(10**6)
    ends = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for begin, end in pairwise(ends):
        counts.add(text[begin:end])
    values, fields, objects = counted(value)
    assert (counts.fields, counts.objects) == (fields, objects)
    assert counts.values == 1 + separators(value)
    assert values <= counts.values, "an empty list counts as one with a value, and so do names"


@pytest.mark.parametrize(
    ("unit", "said"),
    [
        (b"5", "262144 values (numbers, texts, lists, objects); send fewer, or start"),
        (b"[]", "262144 values"),
        (b'{"a":1}', "10000 objects"),
        (b'{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1,"g":1,"h":1}', "40000 fields"),
    ],
)
def test_a_body_of_many_values_is_refused_before_its_end(unit: bytes, said: str) -> None:
    counts = JsonCounts(ServerLimits().body_values)
    with pytest.raises(ApiError) as caught:
        [counts.add(part) for part in [(unit + b",") * 1000] * 1000]
    assert caught.value.status == 413
    assert said in caught.value.message


def request_of(*parts: bytes) -> Request:
    """A request whose body comes in parts."""
    left = list(parts)

    async def receive() -> Message:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    headers = [(b"content-type", b"application/json")]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)


def test_large_bodies_are_parsed_in_turns_of_their_own() -> None:
    """Between two of them the event loop does everything else that is due, once; their bytes are held so long."""
    text = json.dumps({"prompt": "a" * 3 * SMALL}).encode()
    turns: list[str] = []

    async def run() -> int:
        bodies = Bodies(ServerLimits())

        async def one() -> None:
            assert await bodies.read(request_of(text[:100_000], text[100_000:])) == text
            turns.append("parsed")

        async def others() -> None:
            while turns.count("parsed") < 4:
                turns.append("others")
                await asyncio.sleep(0)

        await asyncio.gather(others(), *(one() for _ in range(4)))
        return bodies.held

    assert asyncio.run(run()) == 0
    first = turns.index("parsed")
    assert "parsed,parsed" not in ",".join(turns[first:])


def test_a_text_may_have_what_looks_like_values() -> None:
    with serving(limits={"body_values": 60}) as served:
        text = '[{"a": 1, "b": [2, 3]}, ' * 40
        assert served.post("/tokenize", {"prompt": text}).status_code == 200
        assert served.post("/detokenize", {"tokens": [5] * 40}).status_code == 200
        refused = served.post("/detokenize", {"tokens": [5] * 80})
        assert refused.status_code == 413
        assert "--limit-body-values" in refused.json()["error"]["message"]
