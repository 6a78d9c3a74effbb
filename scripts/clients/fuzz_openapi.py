"""Requests made from a server's own /openapi.json, right and wrong ones: each gets 2xx or 4xx, never 5xx and never
no answer, and /health is 200 after each.

python scripts/clients/fuzz_openapi.py [--url http://127.0.0.1:8000] [--requests 2000] [--seed 0]

Without --url a server of the demo model is started. It needs httpx. The exit code is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from load_serve import start

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 0.5, 1e308, 2**31, 2**63, -(2**64), "", "a", "\x00", "\U0001f600", "x" * 5000, [], [0], [[1]], ["a", 1],
    {}, {"a": 1}, [None], [[[[]]]], {"$ref": "#"}, "NaN", "../../etc/passwd", "http://127.0.0.1:1/x",
    [1] * 100_000, ["a"] * 100_000, [{}] * 100_000, {str(i): 1 for i in range(100_000)}, "x" * 1_000_000,
]  # fmt: skip
HEADERS = [
    {}, {"content-type": "text/plain"}, {"content-type": "application/json; charset=utf-16"}, {"accept": "image/png"},
    {"authorization": "Bearer"}, {"authorization": "Basic x"}, {"x-request-id": "x" * 5000}, {"x-request-id": "{}"}, {"x": "a" * 60_000}, {"x": "a" * 300_000}, {"host": "evil.example"},
    {"origin": "http://evil.example"}, {"content-encoding": "gzip"}, {"expect": "100-continue"}, {"range": "bytes=0-1"},
]  # fmt: skip
DEEPEST = 6


class Fuzzer:
    """Bodies by the schemas of a server."""

    def __init__(self, described: dict[str, Any], seed: int) -> None:
        self._schemas = described["components"]["schemas"]
        self._chance = random.Random(seed)
        self.routes = [
            (method.upper(), path, operation)
            for path, methods in described["paths"].items()
            for method, operation in methods.items()
            if path != "/map"  # a stream without an end
        ]

    def request(self) -> tuple[str, str, bytes, dict[str, str]]:
        """A method, a path, a body and headers."""
        chance = self._chance
        method, path, operation = chance.choice(self.routes)
        if chance.random() < 0.05:
            method = chance.choice(["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"])
        for name in ("{name}", "{number}"):
            path = path.replace(name, chance.choice(["demo", "0", "-1", "%00", "a/../b", "%ff", "x" * 3000]))
        headers = {"content-type": "application/json"}
        if chance.random() < 0.2:
            headers |= chance.choice(HEADERS)
        body = b""
        if "requestBody" in operation:
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            body = json.dumps(self._value(schema, 0)).encode()
            if chance.random() < 0.1:
                body = self._broken(body)
        return method, path, body, headers

    def _broken(self, body: bytes) -> bytes:
        place = self._chance.randrange(len(body) + 1)
        junk = self._chance.choice(
            [
                b"",
                b"\x00",
                b"\xff\xfe",
                b"}",
                b'"',
                b"[" * 500,
                b"1e999",
                b"-Infinity",
                b"1e400",
                b"9" * 5000,
                b"\\ud800",
                b"NaN",
            ]
        )
        return body[:place] + junk + body[place + self._chance.randrange(3) :]

    def _value(self, schema: dict[str, Any], depth: int) -> Any:
        """Mostly a value of the schema, now and then another one."""
        chance = self._chance
        if depth > DEEPEST or chance.random() < 0.02:
            return chance.choice(ODD)
        if "$ref" in schema:
            return self._value(self._schemas[schema["$ref"].rpartition("/")[2]], depth)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return self._value(chance.choice(schema[key]), depth + 1)
        if "enum" in schema or "const" in schema:
            return chance.choice(schema.get("enum", [schema.get("const")]))
        kind = schema.get("type")
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            least = schema.get("minItems", 0)
            return [
                self._value(schema.get("items", {}), depth + 1) for _ in range(least + chance.randrange(3))
            ]
        if kind in ("integer", "number"):
            low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
            value = chance.choice([low, low - 1, low + 1, chance.randrange(64), schema.get("maximum", 7)])
            return value if kind == "number" else int(value)
        plain: dict[Any, list[Any]] = {
            "string": ["a", "The fox", "demo", "", "user"],
            "boolean": [True, False],
            "null": [None],
        }
        return chance.choice(plain.get(kind, ODD))

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        fields = schema.get("properties", {})
        needed = [name for name in schema.get("required", ()) if self._chance.random() < 0.97]
        others = [name for name in fields if name not in needed]
        names = needed + self._chance.sample(others, min(len(others), self._chance.randrange(5)))
        made = {name: self._value(fields.get(name, {}), depth + 1) for name in names}
        if "max_tokens" in fields and self._chance.random() < 0.9:
            made["max_tokens"] = self._chance.randrange(4)
        if self._chance.random() < 0.03:
            made["zzz"] = self._chance.choice(ODD)
        return made


@contextlib.contextmanager
def server() -> Iterator[str]:
    """A server of the demo model."""
    process, port = start([])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def run(url: str, requests: int, seed: int) -> int:
    """How many requests went wrong."""
    statuses: Counter[str] = Counter()
    wrong = 0
    with httpx.Client(base_url=url, timeout=60) as client:
        fuzzer = Fuzzer(client.get("/openapi.json").json(), seed)
        for number in range(requests):
            method, path, body, headers = fuzzer.request()
            try:
                status = client.request(method, path, content=body, headers=headers).status_code
            except (httpx.InvalidURL, httpx.LocalProtocolError, UnicodeError):
                continue  # this client cannot send it
            except httpx.HTTPError as error:
                status = 0
                print(f"{number}: {type(error).__name__}: {error}")
            statuses[f"{path.partition('%')[0][:40]} {status}"] += 1
            healthy = client.get("/health").status_code == 200
            if not 200 <= status < 500 or not healthy:
                wrong += 1
                print(
                    f"WRONG {number}: {status}, healthy={healthy}: {method} {path[:200]} {headers} {body[:1000]!r}"
                )
    for name, count in sorted(statuses.items()):
        print(f"{count:6d}  {name}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with contextlib.nullcontext(options.url) if options.url else server() as url:
        wrong = run(url, options.requests, options.seed)
    print(f"{wrong} of {options.requests} requests went wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
