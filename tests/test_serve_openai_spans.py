"""Spans of requests, sent to a collector in a thread: what is in them, and what is not."""

from __future__ import annotations

import gzip
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("fastapi")

from serving import serving

from hf_paged.serve import openai
from hf_paged_cli.main import main

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
CHAT = {"messages": [{"role": "user", "content": "A secret story"}], "max_tokens": 5, "temperature": 0}


def test_without_the_packages_the_error_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model is loaded."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.delitem(sys.modules, "hf_paged.serve.openai.spans", raising=False)
    monkeypatch.delattr(openai, "spans", raising=False)
    assert main(["serve", "demo", "--otlp-traces-endpoint", "http://127.0.0.1:4318/v1/traces"]) == 1
    assert "pip install 'hf_paged[otel]'" in capsys.readouterr().err


def test_without_the_flag_there_are_no_spans() -> None:
    with serving() as served:
        assert served.service.spans is None
        assert served.complete(max_tokens=1)["choices"]


@contextmanager
def collector(spans: list[Any]) -> Iterator[str]:
    """The URL of a collector that keeps what it is sent, and its raw bodies."""
    service = pytest.importorskip(
        "opentelemetry.proto.collector.trace.v1.trace_service_pb2",
        reason="spans need the extra: pip install 'hf_paged[otel]'",
    )

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert b"secret" not in body
            for resource in service.ExportTraceServiceRequest.FromString(body).resource_spans:
                named = _values(resource.resource.attributes)
                assert named["service.name"] == "hf_paged"
                spans.extend(each for scope in resource.scope_spans for each in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces"
    finally:
        server.shutdown()
        server.server_close()


def _values(attributes: Any) -> dict[str, Any]:
    found = {}
    for each in attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return found


def test_a_span_of_each_request_for_answers() -> None:
    """Whole, streamed and refused ones, under the span that the client names; nothing of their texts."""
    spans: list[Any] = []
    with collector(spans) as url:
        with serving(otlp_traces_endpoint=url, api_keys=("secret-key",)) as served:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "asked-1"}
            whole = served.post("/v1/chat/completions", {**CHAT, "stop": "secret"}, headers=headers)
            assert whole.status_code == 200
            served.stream(prompt="A secret", max_tokens=4, n=2, temperature=1, seed=3, ignore_eos=True)
            assert served.post("/v1/completions", {"prompt": "secret", "max_tokens": 0}).status_code == 400
            assert served.post("/tokenize", {"prompt": "secret"}).status_code == 200
        chat, completion, refused = spans
    assert (chat.name, chat.kind) == ("chat demo", 2)
    assert (chat.trace_id.hex(), chat.parent_span_id.hex()) == (TRACE, PARENT)
    found = _values(chat.attributes)
    usage = whole.json()["usage"]
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.id"] == "asked-1"
    assert found["gen_ai.request.model"] == found["gen_ai.response.model"] == "demo"
    assert (found["gen_ai.request.max_tokens"], found["gen_ai.request.temperature"]) == (5, 0)
    assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 5
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    assert found["hf_paged.tenant"] == "key-0"
    lasted = (chat.end_time_unix_nano - chat.start_time_unix_nano) / 1e9
    queued, first = (found[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token"))
    assert 0 <= queued <= first <= lasted == pytest.approx(found["gen_ai.latency.e2e"], abs=1e-3)
    found = _values(completion.attributes)
    assert completion.name == "text_completion demo"
    assert not completion.parent_span_id
    assert (found["gen_ai.request.choice.count"], found["gen_ai.request.seed"]) == (2, 3)
    assert found["gen_ai.response.finish_reasons"] == ["length", "length"]
    found = _values(refused.attributes)
    assert (found["http.response.status_code"], found["error.type"]) == (400, "400")
    assert "gen_ai.usage.input_tokens" not in found


def test_a_collector_that_does_not_answer_holds_up_nothing() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="spans need the extra: pip install 'hf_paged[otel]'")
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/v1/traces"
        with serving(otlp_traces_endpoint=url) as served:
            for _ in range(3):
                assert served.complete(max_tokens=1)["choices"]
