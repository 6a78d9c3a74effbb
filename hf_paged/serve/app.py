"""The routes of a server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Scope

import hf_paged

from .answering import chat, complete
from .context import Context
from .errors import ApiError, invalid, too_large, unavailable
from .guard import Guard
from .html import page
from .options import ServerLimits
from .protocol import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeChat,
    TokenizeText,
    UnloadAdapterRequest,
    fields_of,
    parsed,
)
from .service import Service
from .streams import EventStream

log = logging.getLogger("hf_paged.serve")
Answering = Callable[[Service, Request, bytes], Awaitable[Response]]
SHOWN_BLOCKS = 256
"""Blocks of a prompt whose text the map shows."""
PAGE_HEADERS = {"x-frame-options": "DENY", "referrer-policy": "no-referrer", "cache-control": "no-cache"}
WARM_UP = 4
"""Tokens of the answer that is computed before the server is ready."""


def make_app(service: Service, drop: Callable[[Scope], None] = lambda scope: None) -> FastAPI:
    """The ASGI application of a service. drop: closes the connection of a request at once."""
    app = FastAPI(
        title="hf_paged",
        version=hf_paged.__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lambda _: _life(service),
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            RequestValidationError: _wrong_path,
        },
    )
    options = service.options
    app.add_middleware(Guard, options=options, keys=service.keys, metrics=service.metrics, drop=drop)
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=options.allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
    _add_states(app, service)
    _add_facts(app, service)
    _add_map(app, service)
    _add_posts(app, service)
    return app


@asynccontextmanager
async def _life(service: Service) -> AsyncIterator[None]:
    """From the first connection to the last: the engine runs, and is warm before requests are let in."""
    service.mailbox.open()
    service.engine.start()
    warm_up = asyncio.create_task(_warm_up(service))
    try:
        yield
    finally:
        warm_up.cancel()
        with suppress(asyncio.CancelledError):
            await warm_up
        await service.live.stop()
        service.tokenizer.close()
        service.structured.close()
        await asyncio.to_thread(service.engine.close)


async def _warm_up(service: Service) -> None:
    """Compute an answer, so that the first client does not pay for what is made once."""
    try:
        await asyncio.to_thread(service.sampling.prepare)
        for options in ({"do_sample": False}, {"do_sample": True, "seed": 0}):
            handle = service.engine.submit([0], max_new_tokens=min(WARM_UP, service.longest - 1), **options)
            output = await handle
            if output.error is not None:
                raise output.error
    except Exception as error:
        log.error("the warm-up failed: %s: %s", type(error).__name__, error)
        service.admission.state = "failed"
        return
    if service.admission.state == "starting":
        service.admission.state = "ready"
        log.info("ready")


# ---- how the server is


def _add_states(app: FastAPI, service: Service) -> None:
    """Routes for load balancers and supervisors. None of them waits for the engine."""

    def alive() -> None:
        if not service.engine.driven or service.admission.state == "failed":
            raise unavailable(
                "the engine has stopped after an error; restart the server", 30, "engine_stopped"
            )

    @app.get("/health", summary="200 if requests can be served")
    async def health() -> dict[str, str]:
        alive()
        if service.admission.state == "starting":
            service.admission.require_ready()
        return {"status": service.admission.state}

    @app.get("/live", summary="200 unless the process must be restarted")
    async def live() -> dict[str, str]:
        alive()
        return {"status": "alive"}

    @app.get("/ready", summary="200 if new requests are let in")
    async def ready() -> dict[str, str]:
        service.admission.require_ready()
        return {"status": "ready"}


def _add_facts(app: FastAPI, service: Service) -> None:
    """What clients read."""

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": hf_paged.__version__}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        names = [*service.options.names, *(each.name for each in service.adapters)]
        return {"object": "list", "data": [_model(service, name) for name in names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return _model(service, service.model(name))

    @app.get("/metrics")
    async def metrics() -> Response:
        # A step may run: the books are asked in another thread.
        stats = await asyncio.to_thread(service.engine.stats)
        infos = service.adapters.shown(await asyncio.to_thread(service.engine.adapters))
        text = service.metrics.exposition(stats, service.admission.in_flight, infos)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def _model(service: Service, name: str) -> dict[str, Any]:
    adapter = service.adapters.get(name)
    base = service.options.names[0]
    return {
        "id": name,
        "object": "model",
        "created": int(service.created if adapter is None else adapter.created),
        "owned_by": "hf_paged",
        "root": base if adapter is None else name,
        "parent": None if adapter is None else base,
        "max_model_len": service.longest,
    }


# ---- the map


def _add_map(app: FastAPI, service: Service) -> None:
    """The page, which holds no data and needs no key, and what it reads."""
    shown = page(needs_key=not service.keys.open).encode()
    owners = service.live.owners

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return Response(shown, media_type="text/html", headers=PAGE_HEADERS)

    @app.get("/map", summary="The map of the blocks as it changes, as events in the form of a trace")
    async def live(request: Request) -> Response:
        context = Context.of(request.scope)
        viewer = service.live.enter(context.tenant)
        return EventStream(
            service.live.events(viewer),
            viewer.leave,
            service.options.limits.write_seconds,
            context.drop,
            lambda: service.live.close(viewer),
        )

    @app.get("/map/requests/{number}", summary="The prompt of a request on the map, block by block")
    async def prompt(request: Request, number: int) -> dict[str, Any]:
        owner = owners.of(number, Context.of(request.scope).tenant)
        if owner is None:
            raise ApiError(404, f"request {number} is not under way, or it is not of this key")
        size = service.engine.config.block_size
        ids = owner.ids[: SHOWN_BLOCKS * size]
        blocks = [service.tokenizer.text(list(ids[i : i + size])) for i in range(0, len(ids), size)]
        return {"number": number, "request_id": owner.request_id, "blocks": blocks}


# ---- bodies


def _add_posts(app: FastAPI, service: Service) -> None:
    """Routes with a body, which is read within limits and checked by name."""
    routes: list[tuple[str, Answering, tuple[type[Body], ...]]] = [
        ("/v1/completions", complete, (CompletionRequest,)),
        ("/v1/chat/completions", chat, (ChatRequest,)),
        ("/tokenize", tokenize, (TokenizeText, TokenizeChat)),
        ("/detokenize", detokenize, (DetokenizeRequest,)),
        ("/v1/load_lora_adapter", load_adapter, (LoadAdapterRequest,)),
        ("/v1/unload_lora_adapter", unload_adapter, (UnloadAdapterRequest,)),
    ]
    for path, answer, kinds in routes:
        _add_post(app, service, path, answer, kinds)
    kinds = tuple(kind for _, _, some in routes for kind in some)
    _, defined = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}"
    )
    stock = app.openapi

    def openapi() -> dict[str, Any]:
        described = stock()
        described.setdefault("components", {}).setdefault("schemas", {}).update(defined["$defs"])
        return described

    app.openapi = openapi  # type: ignore[method-assign]


def _add_post(
    app: FastAPI, service: Service, path: str, answer: Answering, kinds: tuple[type[Body], ...]
) -> None:
    schemas = [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in kinds]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    described = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}

    async def route(request: Request) -> Response:
        await service.turns.take()
        return await answer(service, request, await read_body(request, service.options.limits))

    app.add_api_route(
        path, route, methods=["POST"], openapi_extra=described, summary=answer.__doc__, name=path
    )


async def read_body(request: Request, limits: ServerLimits) -> bytes:
    """The body of a request: JSON by its header, of limited size, in limited time."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"the body has content-type {kind[:80]!r}; send application/json")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limits.body_bytes:
        raise too_large(f"the body has {declared} bytes and the limit is {limits.body_bytes}; send less")
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                body += part
                if len(body) > limits.body_bytes:
                    raise too_large(f"the body has more than {limits.body_bytes} bytes; send less")
    except TimeoutError:
        raise ApiError(408, f"the body took longer than {limits.body_seconds} s; send it faster") from None
    except ClientDisconnect:
        raise invalid("the client left before its body was complete") from None
    return bytes(body)


async def tokenize(service: Service, http: Request, body: bytes) -> Response:
    """POST /tokenize: the ids of a text or of a chat."""
    fields = fields_of(body)
    request: TokenizeText | TokenizeChat
    request = parsed(TokenizeChat, fields) if "messages" in fields else parsed(TokenizeText, fields)
    service.model(request.model)
    with service.admission.place(1):
        if isinstance(request, TokenizeChat):
            ids = await service.tokenizer.chat_ids(request)
        else:
            ids = await service.tokenizer.ids(request.prompt, request.add_special_tokens is not False)
    found = {"count": len(ids), "max_model_len": service.longest, "tokens": list(ids)}
    if request.return_token_strs:
        found["token_strs"] = [service.tokenizer.token(each) for each in ids]
    return JSONResponse(found)


async def detokenize(service: Service, http: Request, body: bytes) -> Response:
    """POST /detokenize: the text of ids."""
    request = parsed(DetokenizeRequest, fields_of(body))
    service.model(request.model)
    return JSONResponse({"prompt": service.tokenizer.text(request.tokens, bool(request.skip_special_tokens))})


# ---- adapters


async def load_adapter(service: Service, http: Request, body: bytes) -> Response:
    """POST /v1/load_lora_adapter: serve an adapter from a folder of this machine."""
    _require_may_change_adapters(service, http)
    request = parsed(LoadAdapterRequest, fields_of(body))
    service.admission.require_ready()
    await service.adapters.load(request.lora_name, request.lora_path, bool(request.load_inplace))
    log.info("adapter loaded", extra={"adapter": request.lora_name})
    return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' added successfully.")


async def unload_adapter(service: Service, http: Request, body: bytes) -> Response:
    """POST /v1/unload_lora_adapter: serve it no more. Requests that have it go on."""
    _require_may_change_adapters(service, http)
    request = parsed(UnloadAdapterRequest, fields_of(body))
    service.adapters.unload(request.lora_name)
    log.info("adapter unloaded", extra={"adapter": request.lora_name})
    return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' removed successfully.")


def _require_may_change_adapters(service: Service, http: Request) -> None:
    if not (service.options.allow_runtime_lora_updating or Context.of(http.scope).tenant.admin):
        raise ApiError(
            403,
            "adapters are loaded by an admin key here; start the server with --admin-api-key, or with "
            "--allow-runtime-lora-updating",
        )


# ---- errors


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, headers=error.headers)


async def _wrong_path(request: Request, error: Exception) -> Response:
    """What a path has in the place of a number; bodies are read by their own code."""
    wrong = invalid("a part of the path is not what it must be; GET /openapi.json has its form")
    return JSONResponse(wrong.body, wrong.status, headers=wrong.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router answers: no such path, or not by this method."""
    assert isinstance(error, HTTPException)
    messages = {
        404: "there is no such path; GET /openapi.json lists them",
        405: f"this path does not take {request.method}; see the header allow",
    }
    message = messages.get(error.status_code, str(error.detail))
    return JSONResponse(ApiError(error.status_code, message).body, error.status_code, headers=error.headers)
