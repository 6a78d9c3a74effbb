"""Routes for training loops, behind --dev: requests pause, weights change, memory is given back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .http.context import Context
from .http.errors import ApiError, invalid
from .http.openapi import OF_BODIES, body_of, errors
from .link import ranks
from .link.engine_client import CallError
from .openai.protocol import Part, fields_of, parsed
from .openai.service import Service

WEIGHTS = "*.safetensors"
Asked = Callable[..., Awaitable[Any]]
"""Calls a function of the engine."""


class LoadWeightsRequest(Part):
    """POST /load_weights. path: a folder of this machine, or a file."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]


def add_dev_routes(app: FastAPI, service: Service) -> None:
    """Add vLLM's routes for training loops, and the engine's own ways to change weights."""

    async def admitted(http: Request) -> None:
        """Refuse a request that may not, or that has options which the route does not know."""
        if service.options.admin_api_keys and not Context.of(http.scope).tenant.admin:
            raise ApiError(403, "this route needs an admin key; send one that --admin-api-key has given")
        route = http.scope["route"]
        known = [each.alias for each in route.dependant.query_params]
        given = list(http.query_params)
        if route.path != "/load_weights" and _has_body(http):
            body = await service.bodies.read(http)
            given += [f"{name} (in the body)" for name in fields_of(body)]
        for name in given:
            if name not in known:
                none = '{"path": ...} in its body' if route.path == "/load_weights" else "no options"
                takes = f"?{known[0]}=... in its query" if known else none
                raise invalid(f"unknown option {name[:80]!r}; {route.path} takes {takes}", name[:80])

    async def load(http: Request) -> Response:
        body = await service.bodies.read(http)
        request = parsed(LoadWeightsRequest, fields_of(body))
        count = await asked("load_weights", weight_files(request.path))
        return JSONResponse({"loaded": count})

    asked = partial(_called, service)
    router = APIRouter(responses=errors(400, 409), dependencies=[Depends(admitted)])
    router.add_api_route(
        "/load_weights",
        load,
        methods=["POST"],
        summary="Read weights from files in place",
        responses=OF_BODIES,
        openapi_extra=body_of(LoadWeightsRequest.model_json_schema()),
    )
    _add_pauses(router, asked)
    _add_changes(router, asked)
    app.include_router(router)


def _add_pauses(to: APIRouter, asked: Asked) -> None:
    """Routes that stop the engine for a while."""

    @to.post("/pause", summary="Let no request run until /resume")
    async def pause(mode: Literal["abort", "wait", "keep", "recompute"] = "abort") -> dict[str, Any]:
        await asked("pause", mode)
        return {"status": "paused"}

    @to.post("/resume", summary="Let requests run again")
    async def resume() -> dict[str, Any]:
        await asked("resume")
        return {"status": "resumed"}

    @to.get("/is_paused")
    async def is_paused() -> dict[str, Any]:
        return {"is_paused": (await asked("stats"))["paused"] is not None}

    @to.post("/sleep", summary="Give memory back until /wake_up: 1 the pools, 2 the weights, too")
    async def sleep(level: Literal["1", "2"] = "1") -> dict[str, Any]:
        await asked("sleep", int(level))
        return {"status": "asleep"}

    @to.post("/wake_up", summary="Bring it back, and let requests run")
    async def wake_up() -> dict[str, Any]:
        await asked("wake_up")
        return {"status": "awake"}


def _add_changes(to: APIRouter, asked: Asked) -> None:
    """Routes about weights that were changed."""

    @to.post("/reset_prefix_cache", summary="Forget cached blocks, while nothing runs")
    async def reset_prefix_cache() -> dict[str, Any]:
        await asked("weights_changed")
        return {"success": True}

    @to.post("/weights_changed", summary="Note that the weights are others, and drop or keep the blocks")
    async def weights_changed(kv: Literal["drop", "keep"] = "drop") -> dict[str, Any]:
        await asked("weights_changed", kv)
        return {"status": "noted"}

    @to.get("/get_world_size")
    async def get_world_size() -> dict[str, int]:
        return {"world_size": ranks.world_size()}


def _has_body(http: Request) -> bool:
    return http.headers.get("content-length", "0") != "0" or "transfer-encoding" in http.headers


async def _called(service: Service, name: str, *arguments: Any) -> Any:
    """The engine's result; 400 for wrong arguments, 409 where its state does not allow it."""
    try:
        return await service.engine.call(name, *arguments)
    except CallError as error:
        if error.wrong:
            raise invalid(str(error)) from error
        if error.kind == "RuntimeError":
            raise ApiError(409, str(error)) from error
        raise


def weight_files(path: str) -> list[str]:
    """The files of weights at a path, or 404."""
    place = Path(path)
    try:
        found = sorted(place.glob(WEIGHTS)) if place.is_dir() else [place]
        good = all(each.is_file() and each.match(WEIGHTS) for each in found)
    except OSError:  # a name that is too long, a folder that may not be read
        good = False
    if not good or not found:
        raise ApiError(404, f"{path[:200]!r} has no {WEIGHTS}; give a folder or a file that has", "path")
    return [str(each) for each in found]
