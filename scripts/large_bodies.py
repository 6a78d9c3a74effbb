"""How long large bodies hold up a server's event loop: the latency of /health while 20 of one kind come at once.

python scripts/large_bodies.py

Bodies have 8 MB, or as many values as are let through. It starts a server of the demo model; the exit code is 1 if a p99
is beyond 100 ms.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from load_serve import start

SIZE = 8 * 2**20 - 200
TOGETHER = 20
MOST_SECONDS = 0.1
MESSAGE = {"role": "user", "content": "a"}


def bodies() -> dict[str, tuple[str, bytes]]:
    """Paths and bodies by what is in them."""

    def filled(unit: str, count: int = 0) -> str:
        return ",".join([unit] * (count or SIZE // (len(unit) + 1)))

    chat = "/v1/chat/completions"
    message = json.dumps({**MESSAGE, "content": "a" * 1600})
    kwargs = json.dumps({"messages": [MESSAGE], "max_tokens": 1})[:-1]
    found = {
        "a text": ("/v1/completions", f'{{"prompt": "{"a" * SIZE}"}}'),
        "a text of escapes": (
            "/v1/completions",
            f'{{"prompt": "{chr(92) + "n"}"}}'.replace("\\n", "\\n" * (SIZE // 2)),
        ),
        "8 MB of ids": ("/v1/completions", f'{{"prompt": [{filled("5")}]}}'),
        "8 MB of empty texts": ("/v1/completions", f'{{"prompt": [{filled(chr(34) * 2)}]}}'),
        "8 MB of messages": (chat, f'{{"messages": [{filled(json.dumps(MESSAGE))}]}}'),
        "5,000 long messages": (chat, f'{{"messages": [{filled(message, 5000)}]}}'),
        "ids at the limit": ("/v1/completions", f'{{"prompt": [{filled("5", 262_100)}]}}'),
        "lists at the limit": ("/v1/completions", f'{{"prompt": [{filled("[5]", 131_000)}]}}'),
        "fields at the limit": (
            "/v1/completions",
            json.dumps({"prompt": "a", "logit_bias": {str(i): 1 for i in range(39_900)}}),
        ),
        "lists in an object at the limit": (
            chat,
            f'{kwargs}, "chat_template_kwargs": {{"a": [{filled("[]", 130_000)}]}}}}',
        ),
    }
    return {name: (path, body.encode()) for name, (path, body) in found.items()}


def send(port: int, path: str, body: bytes) -> str:
    """The status of the answer."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    )
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        with contextlib.suppress(ConnectionError):  # it is refused before its end
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        return connection.makefile("rb").readline().split()[1].decode()


def probe(port: int, over: Event, found: Queue[list[float]]) -> None:
    """Ask /health again and again, in a process of its own: the latencies."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    latencies = []
    while not over.is_set():
        begun = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        latencies.append(time.perf_counter() - begun)
        time.sleep(0.005)
    found.put(sorted(latencies))


def main() -> int:
    process, port = start([])
    worst = 0.0
    try:
        for name, (path, body) in bodies().items():
            over = multiprocessing.Event()
            found: Queue[list[float]] = multiprocessing.Queue()
            prober = multiprocessing.Process(target=probe, args=(port, over, found))
            prober.start()
            time.sleep(0.2)
            with ThreadPoolExecutor(TOGETHER) as threads:
                statuses = set(threads.map(partial(send, port, path), [body] * TOGETHER))
            over.set()
            latencies = found.get()
            prober.join()
            p99 = latencies[int(len(latencies) * 0.99)]
            worst = max(worst, p99)
            print(f"{name:32} {len(body) / 1e6:4.1f} MB, {'/'.join(statuses)}: /health p99 {p99 * 1e3:4.0f} ms, at most "
                  f"{latencies[-1] * 1e3:4.0f} ms")  # fmt: skip
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    return int(worst > MOST_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
