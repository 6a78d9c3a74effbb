"""The guard of every HTTP request: hosts and origins."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("fastapi")

import httpx
from serving import serving


def test_hosts_and_origins() -> None:
    with serving(allowed_origins=("https://app.example",)) as served:
        get = served.client.get
        assert get("/version", headers={"host": "localhost:9"}).status_code == 200
        assert get("/version", headers={"host": "[::1]:9"}).status_code == 200
        assert get("/version", headers={"host": "evil.example"}).status_code == 403
        assert get("/version", headers={"host": "127.0.0.1.evil.example"}).status_code == 403
        assert get("/version", headers={"origin": "https://evil.example"}).status_code == 403
        assert get("/version", headers={"origin": "null"}).status_code == 403
        assert get("/version", headers={"origin": served.url}).status_code == 200
        allowed = get("/version", headers={"origin": "https://app.example"})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    with serving(allowed_hosts=("models.example",), root_path="/llm") as served:
        assert served.client.get("/version", headers={"host": "models.example"}).status_code == 200
        assert served.client.get("/health", headers={"host": "models.example:80"}).status_code == 200
        assert served.client.get("/version").status_code == 403
        assert served.client.get("/version", headers={"host": "MODELS.example"}).status_code == 200
        assert served.client.get("/live").status_code == 200  # as a health check in the container asks
        head = served.client.head("/health")
        assert (head.status_code, head.content) == (200, b"")
        assert served.client.get("/health").status_code == 200  # on the same connection
    with serving(api_keys=("key",), root_path="/llm") as served:
        assert httpx.get(f"{served.url}/llm/version").status_code == 401
        for path in ("/llm", "/llm/", "/"):  # the page, which asks for the key
            assert "<html" in httpx.get(served.url + path, follow_redirects=True).text, path
    with serving(host="127.0.0.2") as served:
        assert served.client.get("/version").status_code == 200
        assert served.client.get("/version", headers={"host": "LocalHost"}).status_code == 200
        with socket.create_connection(("127.0.0.2", served.port)) as old:
            old.sendall(b"GET /version HTTP/1.0\r\n\r\n")
            assert b" 200 " in old.recv(100)
