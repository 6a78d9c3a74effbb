"""Many clients at once against a real server of the demo model: every well-formed answer is compared with
generate()'s, and the server's memory and the latency of /health are measured meanwhile.

python scripts/load_serve.py [--connections 1000] [--requests 10000] [--tokens 16]

5 % of the requests are cancelled, 5 % are malformed, 2 % are read slowly. The exit code is 1 if an answer was wrong or
lost, if a malformed request was not refused with 4xx, or if a bar was missed.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

PATH = "/v1/completions"
MALFORMED: list[bytes] = [
    b"{", b"[]", b'{"prompt": 5}', b'{"prompt": "a", "n": 0}', b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "\\ud800"}',
    b'{"prompt": "a", "zzz": 1}', b'{"prompt": "a", "max_tokens": 99999}', b'{"prompt": [999999]}', b"[" * 9000,
]  # fmt: skip
MOST_GROWTH = 50.0
"""MB that the server may grow by."""
SLOWEST_HEALTH = 100.0
"""ms, the 99th percentile."""


class Wrong(Exception):
    """An answer that is not what it must be."""


class Connection:
    """One HTTP/1.1 connection, as thin as it can be."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: Any = None
        self._writer: Any = None

    async def ask(self, method: str, path: str, body: bytes = b"") -> None:
        """Send a request."""
        if self._writer is None or self._writer.is_closing():
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        await self._writer.drain()

    async def answer(self, pause: float = 0.0) -> tuple[int, bytes]:
        """Read the response; `pause` seconds between small pieces."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        status = int(head.split()[1])
        if "content-length:" in head:
            return status, await self._reader.readexactly(
                int(head.partition("content-length:")[2].split()[0])
            )
        body = b""
        while True:
            size = int(await self._reader.readline(), 16)
            part = await self._reader.readexactly(size + 2)
            if not size:
                return status, body
            body += part[:-2]
            if pause:
                await asyncio.sleep(pause)

    def close(self) -> None:
        """Close it, whatever is under way."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None


class Load:
    """The clients, and what became of their requests."""

    def __init__(self, port: int, requests: int, answers: dict[str, str], tokens: int) -> None:
        self._port = port
        self._left = iter(range(requests))
        self._answers = answers
        self._tokens = tokens
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.seconds: list[float] = []
        self.health: list[float] = []
        self.over = threading.Event()

    async def client(self, seed: int) -> None:
        """One connection's requests, one after the other."""
        rng = random.Random(seed)
        connection = Connection(self._port)
        for number in self._left:
            try:
                await self._one(connection, rng)
            except (Wrong, OSError, asyncio.IncompleteReadError, ValueError) as error:
                self.wrong.append(f"{number}: {type(error).__name__} {error}")
                connection.close()
        connection.close()

    async def _one(self, connection: Connection, rng: random.Random) -> None:
        kind = rng.choices(["whole", "stream", "slow", "cancelled", "malformed"], [44, 44, 2, 5, 5])[0]
        if kind == "malformed":
            await connection.ask("POST", PATH, rng.choice(MALFORMED))
            status, _ = await connection.answer()
            if not 400 <= status < 500:
                raise Wrong(f"a malformed request got {status}")
        else:
            await self._completion(connection, rng, kind)
        self.counts[kind] += 1

    async def _completion(self, connection: Connection, rng: random.Random, kind: str) -> None:
        prompt = rng.choice(list(self._answers))
        stream = kind in ("stream", "slow") or rng.random() < 0.5
        body = {"prompt": prompt, "max_tokens": self._tokens, "temperature": 0, "stream": stream}
        begin = time.monotonic()
        await connection.ask("POST", PATH, json.dumps(body).encode())
        if kind == "cancelled":
            await asyncio.sleep(rng.choice([0, 0.001, 0.015, 0.019, 0.1]))
            connection.close()
            return
        status, answer = await connection.answer(0.05 if kind == "slow" else 0.0)
        if status != 200:
            raise Wrong(f"status {status}: {answer[:200]!r}")
        if text_of(answer, stream) != self._answers[prompt]:
            raise Wrong(f"another answer to {prompt!r}: {text_of(answer, stream)!r}")
        self.seconds.append(time.monotonic() - begin)

    def watch(self) -> None:
        """Have /health asked ten times a second until all clients are done, by a process of its own: the clients'
        interpreter must not be measured.
        """
        command = [sys.executable, __file__, "--watch-health", str(self._port)]
        watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.over.wait()
        found, _ = watcher.communicate()
        for status, milliseconds in json.loads(found):
            self.health.append(milliseconds)
            if status != 200:
                self.wrong.append(f"/health: {status}")


def watch_health(port: int) -> list[tuple[int, float]]:
    """The status and milliseconds of each answer of /health, asked for until standard input ends."""
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set())).start()
    connection = http.client.HTTPConnection("127.0.0.1", port)
    found = []
    while not over.wait(0.1):
        begin = time.monotonic()
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        found.append((answer.status, (time.monotonic() - begin) * 1000))
    return found


def text_of(answer: bytes, stream: bool) -> str:
    """The text of a completion."""
    if not stream:
        return str(json.loads(answer)["choices"][0]["text"])
    lines = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: ")]
    if lines[-1] != b"[DONE]":
        raise Wrong("a stream without its end")
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])


def expected(tokens: int) -> dict[str, str]:
    """Prompts, and how stock generate() goes on with them."""
    # Not in the process that watches: what it imports would cost the server's cores.
    from hf_paged import demo

    model, tokenizer = demo.model(), demo.tokenizer()
    found = {}
    for prompt in demo.prompts():
        inputs = tokenizer(prompt, return_tensors="pt")
        row = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)[
            0, inputs["input_ids"].shape[1] :
        ]
        found[prompt] = tokenizer.decode(row, skip_special_tokens=True)
    return found


def start(flags: list[str]) -> tuple[subprocess.Popen[str], int]:
    """The server's process and port."""
    command = [
        sys.executable,
        "-m",
        "hf_paged",
        "serve",
        "demo",
        "--port",
        "0",
        "--log-format",
        "json",
        *flags,
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    port = 0
    for line in process.stderr:
        if '"listening"' in line:
            port = int(json.loads(line)["url"].rpartition(":")[2])
        if '"ready"' in line:
            return process, port
    raise SystemExit("the server did not start")


def megabytes(process: int) -> float:
    """The memory that a process and those that it has started hold."""
    proc = Path(f"/proc/{process}")
    pages = int((proc / "statm").read_text().split()[1])
    children = [int(each) for tasks in proc.glob("task/*/children") for each in tasks.read_text().split()]
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20 + sum(map(megabytes, children))


def percentile(values: list[float], share: float) -> float:
    """Of sorted values the one below which that share lies."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


async def run(load: Load, connections: int, seed: int) -> None:
    """All clients until all requests are done."""
    watching = threading.Thread(target=load.watch)
    watching.start()
    try:
        await asyncio.gather(*(load.client(seed + i) for i in range(connections)))
    finally:
        load.over.set()
        watching.join()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--watch-health", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.watch_health:
        print(json.dumps(watch_health(options.watch_health)))
        return 0
    answers = expected(options.tokens)
    process, port = start([])
    assert process.stderr is not None
    threading.Thread(target=process.stderr.read, daemon=True).start()  # the pipe must not fill up
    try:
        warm = Load(port, options.requests // 5, answers, options.tokens)
        asyncio.run(run(warm, options.connections, 0))
        before = megabytes(process.pid)
        load = Load(port, options.requests, answers, options.tokens)
        begin = time.monotonic()
        asyncio.run(run(load, options.connections, 10**6))
        seconds = time.monotonic() - begin
        growth = megabytes(process.pid) - before
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    wrong = warm.wrong + load.wrong
    done = sum(load.counts.values())
    print(
        f"{done} of {options.requests} requests on {options.connections} connections in {seconds:.1f} s: {dict(load.counts)}"
    )
    print(
        f"{done / seconds:.0f} requests/s, answers p50 {percentile(load.seconds, 0.5):.2f} s, p99 {percentile(load.seconds, 0.99):.2f} s"
    )
    print(f"/health p50 {percentile(load.health, 0.5):.1f} ms, p99 {percentile(load.health, 0.99):.1f} ms")
    print(f"memory {before:.0f} MB, grown by {growth:.1f} MB; exit code {code}")
    for each in wrong[:20]:
        print("WRONG", each)
    missed = growth > MOST_GROWTH or percentile(load.health, 0.99) > SLOWEST_HEALTH
    return int(bool(wrong) or done < options.requests or code != 0 or missed)


if __name__ == "__main__":
    sys.exit(main())
