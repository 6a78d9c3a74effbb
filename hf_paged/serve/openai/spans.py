"""Spans of requests, for OpenTelemetry: by its conventions for generative AI, without texts and keys."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import hf_paged

from ..http.context import Context
from .generation import Generation
from .protocol import Generating

OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
}
"""Operations of requests with a span, by route."""
ASKED = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "n": "choice.count",
}
"""Fields of a request that its span has, and their names behind `gen_ai.request.`."""
LAST_SECONDS = 2.0
"""For spans that have not been sent when the server ends."""


class RequestSpans:
    """Makes a span of each request for answers when it ends, and sends spans from a thread of its own.

    A collector that does not answer holds up nothing: at most 2,048 spans wait, further ones are dropped.
    """

    def __init__(self, endpoint: str) -> None:
        """endpoint: the URL to which spans are sent, in OTLP over HTTP."""
        named = OTELResourceDetector().detect().attributes  # by $OTEL_SERVICE_NAME and the like
        resource = Resource.create({"service.name": "hf_paged", **named})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("hf_paged.serve", hf_paged.__version__)
        self._parents = TraceContextTextMapPropagator()

    def note_request(self, context: Context, request: Generating, model: str) -> None:
        """Note what a request asks for."""
        found = {"gen_ai.request.model": model, "gen_ai.response.model": model}
        for field, name in ASKED.items():
            value = getattr(request, field, None)
            if value is not None:
                found[f"gen_ai.request.{name}"] = value
        context.span.update(found)

    def note_answers(self, context: Context, generation: Generation) -> None:
        """Note what has become of a request, once its answers have ended."""
        usage = generation.usage
        reasons = [reason or "abort" for each in generation.answers for reason in each.reasons]
        found: dict[str, Any] = {
            "gen_ai.response.finish_reasons": reasons,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        }
        ends = [each.handle.end for each in generation.answers if each.handle.end is not None]
        started = [end.started for end in ends if end.started is not None]
        first = [end.first_token for end in ends if end.first_token is not None]
        if started:
            found["gen_ai.latency.time_in_queue"] = min(started) - generation.begun
        if first:
            found["gen_ai.latency.time_to_first_token"] = min(first) - generation.begun
        context.span.update(found)

    def record(
        self, context: Context, headers: Mapping[str, str], route: str, status: int, seconds: float
    ) -> None:
        """Make the span of a request that has just ended; nothing for routes without answers.

        headers: of the request, whose `traceparent` names the span that it belongs to. seconds: that it took.
        """
        operation = OPERATIONS.get(route)
        if operation is None:
            return
        end = time.time_ns()
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "hf_paged",
            "gen_ai.request.id": context.request_id,
            "gen_ai.latency.e2e": seconds,
            "http.route": route,
            "http.response.status_code": status,
            "hf_paged.tenant": context.tenant.name,
            **context.span,
        }
        if status >= 400:
            attributes["error.type"] = str(status)
        model = context.span.get("gen_ai.request.model")
        span = self._tracer.start_span(
            f"{operation} {model}" if model else operation,
            self._parents.extract(carrier),
            SpanKind.SERVER,
            attributes,
            start_time=end - int(seconds * 1e9),
        )
        if status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end(end)

    def close(self) -> None:
        """Send the last spans, if the collector takes them in time."""
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(LAST_SECONDS)
