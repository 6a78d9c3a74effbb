"""Shared by the tests of serve/: a real server in a thread, on a free port, with the demo model."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx
from processes import LIMIT

from hf_paged import Engine, demo
from hf_paged.serve.http.options import ServerOptions
from hf_paged.serve.link.in_process import connected
from hf_paged.serve.openai.service import Service
from hf_paged.serve.server import Server
from hf_paged_cli.limits import ServerLimits

GUARD = LIMIT
"""Seconds after which something hangs."""
ENGINE = {"block_size": 8, "num_blocks": 600, "max_batch_tokens": 256, "max_batch_sequences": 32}


@dataclass
class Served:
    """A server that runs."""

    url: str
    engine: Engine
    service: Service
    server: Server
    client: httpx.Client

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def complete(self, prompt: Any = "The fox", **body: Any) -> dict[str, Any]:
        """The body of a completion that succeeds; greedy unless it says otherwise."""
        response = self.post("/v1/completions", {"prompt": prompt, "temperature": 0, **body})
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
        """The events of a stream that succeeds, without the last one."""
        response = self.post(path, {"temperature": 0, "stream": True, **body})
        assert response.status_code == 200, response.text
        return events(response.text)

    def refusal(self, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
        """The error of a request that is refused with 400."""
        response = self.post(
            path, {"prompt": "The fox", **body} if "completions" in path and "chat" not in path else body
        )
        assert response.status_code == 400, response.text
        return response.json()["error"]


def events(text: str) -> list[dict[str, Any]]:
    """The lines behind `data:`, in JSON; the last one is [DONE]."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(each) for each in data[:-1]]


@contextmanager
def serving(
    engine: dict[str, Any] | None = None,
    limits: dict[str, Any] | None = None,
    model: Any = None,
    adapters: dict[str, Any] | None = None,
    tokenizer: Any = None,
    **options: Any,
) -> Iterator[Served]:
    """A server of the demo model, or another, until the block ends. adapters: folders by name."""
    made = Engine(model or demo.model(), **{**ENGINE, **(engine or {})})
    for name, folder in (adapters or {}).items():
        made.add_adapter(name, folder)
    chosen = ServerOptions(
        **{"names": ("demo",), "port": 0, "limits": ServerLimits(**(limits or {})), **options}
    )
    texts = tokenizer or demo.tokenizer()
    service = Service.of(connected(made, texts), texts, chosen)
    server = Server(service)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started and service.admission.state == "ready")
    url = "http://localhost" if chosen.uds else server.url.removesuffix(chosen.root_path)
    transport = httpx.HTTPTransport(uds=chosen.uds, verify=False)  # reading certificates takes 16 ms
    headers = {"authorization": f"Bearer {chosen.api_keys[0]}"} if chosen.api_keys else {}
    try:
        with httpx.Client(
            base_url=url + chosen.root_path, headers=headers, timeout=GUARD, transport=transport
        ) as client:
            yield Served(url, made, service, server, client)
        if made.driven:
            until(lambda: not service.admission.in_flight)
            made.check()
    finally:
        server.should_exit = True
        thread.join(GUARD)
    assert not thread.is_alive()


def until(true: Any) -> None:
    """Wait until something holds."""
    end = time.monotonic() + GUARD
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@cache
def tokenizer() -> Any:
    return demo.tokenizer()


def ids(prompt: str) -> list[int]:
    """The demo tokenizer's ids of a prompt."""
    return list(tokenizer()(prompt)["input_ids"])


@cache
def model() -> Any:
    return demo.model()


def generated(prompt: str, **options: Any) -> list[list[int]]:
    """The new tokens of stock generate(), without what pads them."""
    inputs = tokenizer()(prompt, return_tensors="pt")
    found = (
        model()
        .generate(**inputs, **{"do_sample": False, **options})[:, inputs["input_ids"].shape[1] :]
        .tolist()
    )
    pad, end = model().generation_config.pad_token_id, model().generation_config.eos_token_id
    rows = [row[: row.index(end) + 1] if end in row else row for row in found]
    return [[token for token in row if token != pad] for row in rows]


def text(tokens: list[int]) -> str:
    return tokenizer().decode(tokens, skip_special_tokens=True)
