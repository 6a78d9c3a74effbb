"""The routes of a server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

import hf_paged

from .dev import add_dev_routes
from .guard import OPEN_PATHS, Guard
from .http import openapi
from .http.context import Context
from .http.errors import ApiError, invalid, unavailable
from .http.streams import EventStream
from .link.engine_client import SILENT, CallError
from .map.html import page
from .openai.answering import chat, complete, respond
from .openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    Part,
    TokenizeChat,
    TokenizeText,
    UnloadAdapterRequest,
    fields_of,
    parsed,
)
from .openai.responses import ResponsesRequest
from .openai.service import Service

log = logging.getLogger("hf_paged.serve")
Answering = Callable[[Service, Request, bytes], Awaitable[Response]]
SHOWN_BLOCKS = 256
"""Blocks of a prompt whose text the map shows."""
PAGE_HEADERS = {"x-frame-options": "DENY", "referrer-policy": "no-referrer", "cache-control": "no-cache"}
WARM_UP = 4
"""Tokens of the answer that is computed before the server is ready."""


def make_app(service: Service) -> FastAPI:
    """The ASGI application of a service."""
    app = FastAPI(
        title="hf_paged",
        version=hf_paged.__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lambda _: _life(service),
        responses=openapi.ALWAYS,
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            RequestValidationError: _wrong_path,
        },
    )
    options = service.options
    app.add_middleware(Guard, service=service)
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=options.allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
    _add_states(app, service)
    _add_facts(app, service)
    _add_map(app, service)
    _add_posts(app, service)
    if options.dev:
        add_dev_routes(app, service)
    return app


@asynccontextmanager
async def _life(service: Service) -> AsyncIterator[None]:
    """From the first connection to the last: the engine runs, and is warm before requests are let in."""
    await service.engine.open()
    warm_up = asyncio.create_task(_warm_up(service))
    try:
        yield
    finally:
        warm_up.cancel()
        with suppress(asyncio.CancelledError):
            await warm_up
        await service.live.stop()
        service.tokenizer.close()
        service.tokenizer.images.close()
        service.structured.close()
        if service.spans is not None:
            service.spans.close()
        service.engine.close()


async def _warm_up(service: Service) -> None:
    """Compute what is made once, so that no client pays for it. Its blocks would have a share of the pool."""
    try:
        await service.engine.call("prepare")
        for options in ({"do_sample": False}, {"do_sample": True, "seed": 0}):
            await _answer_once(service, (0,), options)
        await _try_image(service)
        await service.engine.call("forget")
    except Exception as error:
        log.error("the warm-up failed: %s: %s", type(error).__name__, error)
        service.admission.state = "failed"
        return
    if service.admission.state == "starting":
        service.admission.state = "ready"
        log.info("ready")


async def _answer_once(service: Service, ids: tuple[int, ...], options: dict[str, Any]) -> None:
    """Compute a short answer; RuntimeError if that fails."""
    ended = asyncio.Event()
    new = min(WARM_UP, service.longest - 1)
    request = await service.engine.submit(ids, {"max_new_tokens": new, **options}, ended.set, False)
    while request.end is None and service.engine.driven:
        await ended.wait()
        ended.clear()
    if request.end is None or request.end.failure is not None:
        raise RuntimeError(f"the first request has failed: {request.end}")


async def _try_image(service: Service) -> None:
    """Have the model look at an image, if it seems to take some; else requests with images are refused."""
    images = service.tokenizer.images
    if images.refusal is not None:
        return
    try:
        ids, media = await service.tokenizer.trial()
        await _answer_once(service, ids, {"do_sample": False, "media": media})
    except (ApiError, CallError, RuntimeError) as error:
        images.refusal = str(error)[:500]
        log.warning("images are not served: %s", images.refusal)


# ---- how the server is


def _add_states(app: FastAPI, service: Service) -> None:
    """Routes for load balancers and supervisors. None of them waits for the engine."""

    def alive() -> None:
        if not service.engine.driven or service.admission.state == "failed":
            raise unavailable(
                "the engine has stopped after an error; restart the server", 30, "engine_stopped"
            )

    def answering() -> None:
        alive()
        if service.engine.silent:
            raise unavailable(
                f"the engine's process has been stuck for {SILENT:g} s; wait for it, or restart the server",
                10,
                "engine_stuck",
            )

    @app.get("/ping", response_model=openapi.ServerState, summary="The same as /health")
    @app.get("/health", response_model=openapi.ServerState, summary="200 if requests can be served")
    async def health() -> Any:
        answering()
        if service.admission.state == "starting":
            service.admission.require_ready()
        return {"status": "draining" if service.admission.state == "draining" else "ready"}

    @app.get("/live", response_model=openapi.ServerState, summary="200 unless the process must be restarted")
    async def live() -> Any:
        alive()
        return {"status": "alive"}

    @app.get("/ready", response_model=openapi.ServerState, summary="200 if new requests are let in")
    async def ready() -> Any:
        answering()
        service.admission.require_ready()
        return {"status": "ready"}


def _add_facts(app: FastAPI, service: Service) -> None:
    """Add the routes of facts."""

    @app.get("/version", response_model=openapi.Version)
    async def version() -> Any:
        return {"version": hf_paged.__version__}

    @app.get("/load", response_model=openapi.ServerLoad, summary="How many answers are under way or wait")
    async def load() -> Any:
        return {"server_load": service.admission.in_flight}

    @app.get("/v1/models", response_model=openapi.ServedModels)
    async def models() -> Any:
        names = [*service.options.names, *(each.name for each in service.adapters)]
        return {"object": "list", "data": [_model(service, name) for name in names]}

    @app.get("/v1/models/{name:path}", response_model=openapi.ServedModel, responses=openapi.errors(400, 404))
    async def model(name: str) -> Any:
        return _model(service, service.model(name))

    @app.get("/metrics", response_class=Response, responses={200: {"content": openapi.TEXT}})
    async def metrics(request: Request) -> Response:
        tenant = Context.of(request.scope).tenant
        if not tenant.sees_all and len(service.keys.names) > 1:
            raise ApiError(403, "metrics count the requests of all keys; scrape them with an admin key")
        stats = await service.engine.call("stats")
        infos = service.adapters.shown(await service.engine.call("adapters"))
        text = service.metrics.exposition(stats, service.admission.in_flight, infos, tenant.sees_all)
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
    """The pages, which hold no data and need no key, and what the map's reads."""
    pages = {"/": page(needs_key=not service.keys.open), "/docs": openapi.page()}
    owners = service.live.owners

    @app.get("/docs", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def shown(request: Request) -> Response:
        text = pages[request.scope["route"].path]
        return Response(text, media_type="text/html", headers=PAGE_HEADERS)

    @app.get(
        "/map",
        summary="The map of the blocks as it changes, as events in the form of a trace",
        response_class=Response,
        responses={200: {"content": openapi.STREAM}, **openapi.errors(429)},
    )
    async def live(request: Request) -> Response:
        viewer = service.live.enter(Context.of(request.scope).tenant)
        return EventStream(
            service.live.events(viewer),
            viewer.leave,
            lambda: service.live.close(viewer),
        )

    @app.get(
        "/map/requests/{number}",
        summary="The prompt of a request on the map, block by block",
        response_model=openapi.MapPrompt,
        responses=openapi.errors(400, 404),
    )
    async def prompt(request: Request, number: int) -> Any:
        owner = owners.of(number, Context.of(request.scope).tenant)
        if owner is None:
            raise ApiError(404, f"request {number} has ended, or it belongs to another key")
        size = service.engine.facts.block_size
        ids = owner.ids[: SHOWN_BLOCKS * size]
        blocks = [service.tokenizer.text(list(ids[i : i + size])) for i in range(0, len(ids), size)]
        return {"number": number, "request_id": owner.request_id, "blocks": blocks}


# ---- texts and ids


async def tokenize(service: Service, http: Request, body: bytes) -> Response:
    """POST /tokenize: the ids of a text or of a chat."""
    fields = fields_of(body)
    if "messages" in fields and "prompt" in fields:
        raise invalid("prompt and messages are both what is tokenized; give one of them", "prompt")
    request: TokenizeText | TokenizeChat
    request = parsed(TokenizeChat, fields) if "messages" in fields else parsed(TokenizeText, fields)
    service.model(request.model)
    with service.admission.place(1):
        if isinstance(request, TokenizeChat):
            ids = (await service.tokenizer.chat(request)).ids
        else:
            ids = await service.tokenizer.ids(request.prompt, request.add_special_tokens is not False)
    found = {"count": len(ids), "max_model_len": service.longest, "tokens": list(ids)}
    if request.return_token_strs:
        found["token_strs"] = await service.tokenizer.names(ids)
    return JSONResponse(found)


async def detokenize(service: Service, http: Request, body: bytes) -> Response:
    """POST /detokenize: the text of ids."""
    request = parsed(DetokenizeRequest, fields_of(body))
    service.model(request.model)
    with service.admission.place(1):
        text = await service.tokenizer.decoded(request.tokens, bool(request.skip_special_tokens))
    return JSONResponse({"prompt": text})


# ---- adapters


async def load_adapter(service: Service, http: Request, body: bytes) -> Response:
    """POST /v1/load_lora_adapter: serve an adapter from a folder of this machine."""
    _require_may_change_adapters(service, http)
    request = parsed(LoadAdapterRequest, fields_of(body))
    service.admission.require_ready()
    await service.adapters.load(request.lora_name, request.lora_path, bool(request.load_inplace))
    service.tokenizer.vocabulary = service.adapters.most_tokens
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
            "only an admin key may load adapters here; start the server with --admin-api-key, or with "
            "--allow-runtime-lora-updating",
        )


# ---- bodies


class Post(NamedTuple):
    """A route with a body, and what /openapi.json says of it. kinds: the forms of its body."""

    path: str
    answer: Answering
    kinds: tuple[type[Part], ...]
    responses: openapi.Responses
    example: dict[str, Any]


MESSAGES = [{"role": "user", "content": "Tell me a story"}]
CHANGED: openapi.Responses = {200: {"content": openapi.TEXT}, **openapi.OF_BODIES}
TOKENIZED: openapi.Responses = {200: {"model": openapi.Tokens}, **openapi.OF_BODIES}
DETOKENIZED: openapi.Responses = {200: {"model": openapi.Text}, **openapi.OF_BODIES}
POSTS = (
    Post("/v1/completions", complete, (CompletionRequest,), openapi.answers(openapi.Completion),
         {"prompt": "The fox", "max_tokens": 20, "logprobs": 1}),
    Post("/v1/chat/completions", chat, (ChatRequest,), openapi.answers(openapi.ChatCompletion),
         {"messages": MESSAGES, "max_tokens": 20}),
    Post("/v1/responses", respond, (ResponsesRequest,), openapi.answers(openapi.ResponseObject),
         {"input": "Tell me a story", "max_output_tokens": 20}),
    Post("/tokenize", tokenize, (TokenizeText, TokenizeChat), TOKENIZED, {"prompt": "The fox"}),
    Post("/detokenize", detokenize, (DetokenizeRequest,), DETOKENIZED, {"tokens": [5, 6, 7]}),
    Post("/v1/load_lora_adapter", load_adapter, (LoadAdapterRequest,), CHANGED,
         {"lora_name": "poet", "lora_path": "adapters/poet"}),
    Post("/v1/unload_lora_adapter", unload_adapter, (UnloadAdapterRequest,), CHANGED, {"lora_name": "poet"}),
)  # fmt: skip


def _add_posts(app: FastAPI, service: Service) -> None:
    """Routes with a body, which is read within limits and checked by name."""
    for each in POSTS:
        _add_post(app, service, each)
    schemas = openapi.schemas_of(tuple(kind for each in POSTS for kind in each.kinds))
    openapi.describe(app, schemas, not service.keys.open, OPEN_PATHS)


def _add_post(app: FastAPI, service: Service, post: Post) -> None:
    async def route(request: Request) -> Response:
        body = await service.bodies.read(request)
        return await post.answer(service, request, body)

    app.add_api_route(
        post.path,
        route,
        methods=["POST"],
        openapi_extra=openapi.body_of(
            *({"$ref": openapi.SCHEMAS + kind.__name__} for kind in post.kinds), example=post.example
        ),
        summary=(post.answer.__doc__ or "").partition(": ")[2],
        name=post.path,
        response_class=Response,
        responses=post.responses,
    )


# ---- errors


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, headers=error.headers)


async def _wrong_path(request: Request, error: Exception) -> Response:
    """A part of a path or a query that is not what it must be; bodies are read by their own code."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    wrong = invalid(f"{name}: {first['msg']}, got {first['input']!r:.40}; see GET /openapi.json", name)
    return JSONResponse(wrong.body, wrong.status, headers=wrong.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """The router's errors: no such path, or not by this method."""
    assert isinstance(error, HTTPException)
    messages = {
        404: "there is no such path; GET /openapi.json lists them",
        405: f"this path does not take {request.method}, it takes {(error.headers or {}).get('Allow')}",
    }
    message = messages.get(error.status_code, str(error.detail))
    return JSONResponse(ApiError(error.status_code, message).body, error.status_code, headers=error.headers)
