"""Bodies of requests: read within limits, and counted before they are parsed."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from hf_paged_cli.limits import ServerLimits

from .admission import ByteBudget
from .errors import ApiError, invalid, too_large
from .throttle import Turns

SMALL = 65536
"""Bytes of a body that are read whatever others hold, and that are counted at once."""
MOST_OBJECTS = 10_000
"""Objects in a body: each is checked in the event loop, in about 10 us."""
MOST_FIELDS = 40_000
"""Fields of all objects in a body: each takes the event loop about 1 us."""
PAUSE = 0.005
"""Seconds between the turns in which large bodies are parsed."""


class Bodies:
    """The bodies that a server is reading.

    A body is parsed in one turn of the event loop, which takes as long as the body has values, so these are
    bounded, and large bodies are parsed in turns of their own.
    """

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._budget = ByteBudget(limits.bodies_bytes, "the bodies that are being read")
        self._large = Turns(1, PAUSE)

    @property
    def held(self) -> int:
        """Bytes of all of them, beyond the small ones."""
        return self._budget.held

    async def read(self, request: Request) -> bytes:
        """The body of a request: JSON by its header, of limited size, in limited time."""
        limits = self._limits
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"the body has content-type {kind[:80]!r}; send application/json")
        declared = request.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > limits.body_bytes:
            raise too_large(f"the body has {declared} bytes and the limit is {limits.body_bytes}; send less")
        body = bytearray()
        counts = JsonCounts(limits.body_values)
        held = 0
        try:
            async with asyncio.timeout(limits.body_seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > limits.body_bytes:
                        raise too_large(f"the body has more than {limits.body_bytes} bytes; send less")
                    more = max(len(body) - SMALL, 0) - held
                    self._budget.take(more)
                    held += more
                    await _count(counts, part)
            if held:
                await self._large.take()
        except TimeoutError:
            message = f"the body took longer than {limits.body_seconds} s; send it faster"
            raise ApiError(408, message) from None
        except ClientDisconnect:
            raise invalid("the client left before its body was complete") from None
        finally:
            self._budget.give(held)
        return bytes(body)


async def _count(counts: JsonCounts, part: bytes) -> None:
    """Count a part of a body, a large one in several turns of the event loop."""
    counts.add(part[:SMALL])
    for start in range(SMALL, len(part), SMALL):
        await asyncio.sleep(0)
        counts.add(part[start : start + SMALL])


class JsonCounts:
    """How many values a JSON text has so far: every value but the first follows "[", "," or ":"."""

    def __init__(self, most: int) -> None:
        """most: values that are let through."""
        self._most = most
        self._within = False
        """True if the text so far ends within a string."""
        self._escape = b""
        """The backslash at its end, if what it escapes is still to come."""
        self.values = 1
        self.fields = 0
        self.objects = 0

    def add(self, part: bytes) -> None:
        """Count the next part of the text; 413 if it has too many of something."""
        outside = self._outside(part)
        self.objects += outside.count(b"{")
        self.fields += outside.count(b":")
        self.values += outside.count(b"[") + outside.count(b",") + outside.count(b":")
        if self.objects > MOST_OBJECTS:
            raise too_large(f"the body has more than {MOST_OBJECTS} objects; send fewer")
        if self.fields > MOST_FIELDS:
            raise too_large(f"the objects of the body have more than {MOST_FIELDS} fields; send fewer")
        if self.values > self._most:
            raise too_large(
                f"the body has more than {self._most} values (numbers, texts, lists, objects); send fewer, "
                "or start the server with a higher --limit-body-values"
            )

    def _outside(self, part: bytes) -> bytes:
        """Bytes of a part outside of strings."""
        part = self._escape + part
        self._escape = b""
        if b"\\" in part:
            part = part.replace(b"\\\\", b"")
            if part.endswith(b"\\"):
                self._escape = b"\\"
                part = part[:-1]
            part = part.replace(b'\\"', b"")
        pieces = part.split(b'"')  # in turn outside of strings and within
        outside = b" ".join(pieces[self._within :: 2])
        self._within ^= len(pieces) % 2 == 0
        return outside
