"""The clients of benchmarks/serve.py, as a process of its own: requests on standard input, times on standard
output, both as one JSON object. It needs the standard library only, and does as little as it can for a token.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from itertools import pairwise
from typing import Any

HEAD = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n"
END_OF_EVENT = b"\n\n"
BEHIND = 2
"""Events behind the tokens of a stream: the usage, and [DONE]."""


class Client(asyncio.Protocol):
    """One request on one connection: when each event came, and the end of the answer."""

    def __init__(self, body: bytes) -> None:
        self._request = HEAD.format(len(body)).encode() + body
        self._received = bytearray()
        self.times: list[float] = []
        self.over = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        begin = max(0, len(self._received) - 1)
        self._received += data
        events = self._received.count(END_OF_EVENT, begin)
        if events:
            self.times += [time.monotonic()] * events

    def connection_lost(self, error: Exception | None) -> None:
        self.end = time.monotonic()
        self.over.set_result(None)

    def answered(self, stream: bool) -> tuple[int, list[float]]:
        """How many tokens came, and when."""
        answer = bytes(self._received)
        if not answer.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"a request was not answered: {answer[:500]!r}")
        if not stream:
            return json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"], [self.end]
        if b"data: [DONE]" not in answer[-40:]:
            raise SystemExit(f"a stream broke off: {answer[-500:]!r}")
        usage = answer[answer.rindex(b'"usage":') + len(b'"usage":') :].decode()
        count = json.JSONDecoder().raw_decode(usage.lstrip())[0]["completion_tokens"]
        first_chunk = answer.partition(b"\r\n\r\n")[2].partition(b"\r\n")[2]
        comments = int(first_chunk.startswith(b":"))  # a comment opens our streams
        return count, self.times[comments:-BEHIND]


async def run(port: int, bodies: list[dict[str, Any]], arrivals: list[float]) -> dict[str, Any]:
    """All requests, each at its time."""
    loop = asyncio.get_running_loop()
    encoded = [json.dumps(body).encode() for body in bodies]
    begin = time.monotonic()

    async def one(body: bytes, arrival: float) -> Client:
        await asyncio.sleep(max(0.0, begin + arrival - time.monotonic()))
        _, client = await loop.create_connection(lambda: Client(body), "127.0.0.1", port)
        await client.over
        return client

    clients = await asyncio.gather(*map(one, encoded, arrivals))
    found = [client.answered(body["stream"]) for client, body in zip(clients, bodies, strict=True)]
    return {
        "seconds": max(client.end for client in clients) - begin,
        "tokens": sum(count for count, _ in found),
        "first": [times[0] - begin - at for (_, times), at in zip(found, arrivals, strict=True)],
        "gaps": [b - a for _, times in found for a, b in pairwise(times)],
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(**json.load(sys.stdin)))))
