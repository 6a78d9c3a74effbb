"""The server answers as /openapi.json says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

import httpx
from browser import CHROMIUM, Browser
from pydantic import ValidationError
from reply_cases import holds
from serving import Served, serving

from hf_paged.serve import guard
from hf_paged.serve.http import openapi

CHAT = [{"role": "user", "content": "Tell me a story"}]
KEYS: dict[str, Any] = {"api_keys": ("one",), "admin_api_keys": ("two",)}
LIMITS = {"body_bytes": 1000}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(dev=True, limits=LIMITS, **KEYS) as made:
        yield made


@pytest.fixture(scope="module")
def described(served: Served) -> dict[str, Any]:
    return served.client.get("/openapi.json").json()


@pytest.mark.parametrize(
    ("path", "kind", "bodies"),
    [
        (
            "/v1/completions",
            openapi.Completion,
            [
                {"prompt": "The fox"},
                {"prompt": "The fox", "logprobs": 2, "echo": True, "return_token_ids": True, "prompt_logprobs": 1},
                {"prompt": ["The fox", "An owl"], "n": 2, "use_beam_search": True},
                {"prompt": [5, 6], "max_tokens": 0, "echo": True, "logprobs": 1},
            ],
        ),
        (
            "/v1/chat/completions",
            openapi.ChatCompletion,
            [
                {"messages": CHAT},
                {"messages": CHAT, "logprobs": True, "top_logprobs": 2, "return_token_ids": True, "prompt_logprobs": 1},
            ],
        ),
        ("/tokenize", openapi.Tokens, [{"prompt": "The fox"}, {"messages": CHAT, "return_token_strs": True}]),
        ("/detokenize", openapi.Text, [{"tokens": [5, 6]}]),
    ],
)  # fmt: skip
def test_answers_have_the_described_form(served: Served, path: str, kind: Any, bodies: list[Any]) -> None:
    for body in bodies:
        short = {"max_tokens": 4, "temperature": 0} if path.startswith("/v1") else {}
        response = served.post(path, {**short, **body})
        assert response.status_code == 200, response.text
        holds(kind, response.json())


def test_states_and_facts(served: Served) -> None:
    for path, kind in (
        ("/health", openapi.ServerState),
        ("/ping", openapi.ServerState),
        ("/live", openapi.ServerState),
        ("/ready", openapi.ServerState),
        ("/version", openapi.Version),
        ("/load", openapi.ServerLoad),
        ("/v1/models", openapi.ServedModels),
        ("/v1/models/demo", openapi.ServedModel),
    ):
        holds(kind, served.client.get(path).json())
    with pytest.raises(ValidationError):  # the forms are exact
        holds(openapi.Version, {"version": "1", "other": 1})


def test_errors_are_described(served: Served, described: dict[str, Any]) -> None:
    """Each status that a request can have is there, and its body is an error."""
    path = "/v1/completions"
    key = {"authorization": "Bearer one"}
    for status, options in {
        400: {"json": {"prompt": 5}},
        401: {"json": {}, "headers": {"authorization": "Bearer three"}},
        403: {"json": {}, "headers": {"host": "evil.example"}},
        404: {"json": {"prompt": "a", "model": "other"}},
        413: {"json": {"prompt": "x" * 1000}},
        415: {"content": b"{}"},
    }.items():
        response = served.client.post(path, **{"headers": key, **options})
        assert response.status_code == status
        holds(openapi.ErrorBody, response.json())
        assert str(status) in described["paths"][path]["post"]["responses"]
    for get, status in (("/v1/models/other", 404), ("/map/requests/x", 400), ("/map/requests/70000", 404)):
        assert served.client.get(get).status_code == status
        found = next(
            value for name, value in described["paths"].items() if name.startswith(get[:11]) and "{" in name
        )
        assert str(status) in found["get"]["responses"]


def test_every_route_says_who_may_call_it_and_what_it_answers(described: dict[str, Any]) -> None:
    for path, methods in described["paths"].items():
        for operation in methods.values():
            statuses = set(operation["responses"])
            assert {"200", "401", "403", "500", "503"} <= statuses
            assert "422" not in statuses  # FastAPI's own, which is never sent
            assert ("security" in operation) == (path not in guard.OPEN_PATHS)
            if "requestBody" in operation:
                assert {"400", "408", "413", "415"} <= statuses
    assert "/pause" in described["paths"]
    assert not any("ValidationError" in name for name in described["components"]["schemas"])


def test_examples_are_answered(served: Served, described: dict[str, Any]) -> None:
    for path, methods in described["paths"].items():
        content = (
            methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
        )
        if "example" in content and "adapter" not in path:
            assert served.post(path, content["example"]).status_code == 200, path


def test_a_page_shows_it_and_needs_no_key(served: Served) -> None:
    """Whole in itself, and without data: it reads /openapi.json with the key that it asks for."""
    with httpx.Client(base_url=served.url) as client:
        found = client.get("/docs")
        assert found.status_code == 200
        assert found.text == openapi.page()
        assert client.get("/openapi.json").status_code == 401
    assert not re.search(r'(?:src|href)="(?!data:|\./|openapi\.json)', found.text)
    assert "http://" not in found.text.replace("http://www.w3.org", "")
    assert found.headers["x-frame-options"] == "DENY"
    assert "default-src 'none'" in found.text.replace("&#x27;", "'")


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed: apt-get install chromium")
def test_the_page_sends_requests(served: Served, tmp_path: Path) -> None:
    """It asks for the key, lists the routes, and sends what its text area has; on a phone it is no wider."""
    with Browser(tmp_path / "profile", 390, 800) as browser:
        browser.open(f"{served.url}/docs")
        browser.until("!document.querySelector('#key').hidden")
        browser.errors.clear()  # 401 is logged
        browser.value("document.querySelector('#key-input').value = 'one'")
        browser.value("document.querySelector('#key').requestSubmit()")
        browser.until("document.querySelectorAll('details').length > 10")
        route = "document.querySelector('details')"
        browser.value(f"{route}.open = true")
        browser.until(f"{route}.textContent.includes('guided_json')")
        browser.value(
            f"{route}.querySelector('textarea').value = JSON.stringify({{prompt: 'The owl', max_tokens: 3}})"
        )
        browser.value(f"{route}.querySelector('button').click()")
        browser.until(f"{route}.textContent.includes('completion_tokens')")
        assert '"completion_tokens": 3' in browser.value(f"{route}.textContent")
        assert browser.value("document.documentElement.scrollWidth") == 390
        assert browser.errors == []
