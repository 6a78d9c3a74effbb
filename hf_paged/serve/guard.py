"""The guard of every HTTP request: its number, its origin, its key, its log line."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .http.context import KEY, Context
from .http.errors import ApiError, unavailable
from .http.keys import Tenant, bearer
from .openai.service import Service

OPEN_PATHS = frozenset({"/health", "/ping", "/live", "/ready"})
"""Paths that need no key: their answers have the server's state and nothing else."""
PAGES = frozenset({"/", "/docs"})
"""The pages need none either: they hold no data, ask for the key, and get all data by it."""
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})
REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
log = logging.getLogger("hf_paged.serve")


class Guard:
    """ASGI middleware around all routes."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._options = service.options
        self._keys = service.keys
        self._metrics = service.metrics
        self._spans = service.spans
        self._turns = service.turns
        options = service.options
        hosts = options.allowed_hosts or ((*LOOPBACK_NAMES, options.host) if options.loopback else ())
        self._hosts = frozenset(each.lower() for each in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].removeprefix(self._options.root_path) not in OPEN_PATHS:
            await self._turns.take()  # a thousand that arrive at once must not delay /health
        elif scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # uvicorn keeps its own, and sends no body
        scope["root_path"] = self._options.root_path  # with it or without it, as a proxy may pass it on
        headers = Headers(scope=scope)
        context = Context(_request_id(headers), Tenant("unknown", None))
        scope[KEY] = context
        answer = _GuardedAnswer(send, context.request_id)
        begun = time.monotonic()
        try:
            context.tenant = self._admitted(scope, headers)
            await self._app(scope, receive, answer.send)
        except ApiError as error:
            await answer.fail(error, scope, receive)
        except Exception:
            log.exception("unexpected error", extra={"request_id": context.request_id})
            await answer.fail(ApiError(500, "the server failed; see its log"), scope, receive)
        except asyncio.CancelledError:  # the server ends, and does not wait for this answer
            await answer.fail(
                unavailable("the server ends; send the request again", 30, "shutting_down"), scope, receive
            )
            raise
        finally:
            self._note(scope, headers, context, answer.status, time.monotonic() - begun)

    def _admitted(self, scope: Scope, headers: Headers) -> Tenant:
        """Whose request it is, or 400, 401 or 403."""
        path = scope["path"].removeprefix(self._options.root_path) or "/"
        if path not in OPEN_PATHS:  # health checks come by addresses of all kinds
            self._check_host(headers)
        self._check_origin(headers)
        if path in OPEN_PATHS | PAGES:
            return Tenant("open", None)
        tenant = self._keys.tenant(bearer(headers.get("authorization")))
        if tenant is None:
            raise ApiError(
                401,
                "the API key is missing or unknown; send one as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return tenant

    def _check_host(self, headers: Headers) -> None:
        """A page that has its own name point here must not be answered (DNS rebinding).

        Starlette's TrustedHostMiddleware also checks health checks, refuses HTTP/1.0 without a Host and hosts
        such as `a.b:`, redirects to www, and answers 400 in plain text instead of an error of OpenAI's form.
        """
        given = headers.get("host")
        if given is None or not self._hosts or self._options.uds is not None:
            return  # a browser always sends one
        host = _without_port(given)
        if host.lower() not in self._hosts:
            raise ApiError(
                403, f"the Host {host[:80]!r} is not this server's; start it with --allowed-host to allow it"
            )

    def _check_origin(self, headers: Headers) -> None:
        """Scripts of other pages must not use a server that needs no key."""
        origin = headers.get("origin")
        if origin is None or origin in self._options.allowed_origins or "*" in self._options.allowed_origins:
            return
        try:
            same = urlsplit(origin).netloc == headers.get("host", "")
        except ValueError:
            same = False
        if not same:
            raise ApiError(
                403,
                f"pages of {origin[:80]!r} may not call this server; --allowed-origin allows them",
            )

    def _note(self, scope: Scope, headers: Headers, context: Context, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", None) or "none"
        self._metrics.http.add(route=route, status=str(status))
        if self._spans is not None:
            self._spans.record(context, headers, route, status, seconds)
        level = logging.DEBUG if route in OPEN_PATHS or route == "/metrics" else logging.INFO
        facts = {
            "request_id": context.request_id,
            "method": scope["method"],
            "route": route,
            "status": status,
            "seconds": round(seconds, 4),
            "tenant": context.tenant.name,
            **context.notes,
        }
        log.log(level, "request", extra=facts)


class _GuardedAnswer:
    """The response to a request as it goes out, with the request's number among its headers."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self._request_id
        await self._send(message)

    async def fail(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        """Answer with an error, if nothing was sent yet."""
        if not self.status:
            await JSONResponse(error.body, error.status, headers=error.headers)(scope, receive, self.send)


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _without_port(host: str) -> str:
    named = not host.endswith("]") and (host.count(":") == 1 or "]" in host)
    return re.sub(r":\d*$", "", host) if named else host
